"""Ray workers of a run whose ranks exchange over this backend, without a word of it in the run's own code.

    jobs/train.py     with `environment`: Ray calls `use` in every worker process of the job
    a rank's process  imports what ranks alone import, and from then on computes over the backend
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

OF_RANKS = "dhp_ray.comm.world"
"""A module that only ranks import, before they make a group."""

PIDS = "DHP_RAY_TEST_ASYNCHRONOUS"
"""The variable that names a folder, where each rank's process leaves a file called by its pid."""


def environment(pids: Path) -> dict[str, str]:
    """Of a process that starts a run: Ray takes the job's settings from there."""
    variables = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), PIDS: str(pids)}
    settings = {"runtime_env": {"worker_process_setup_hook": f"{__name__}.use", "env_vars": variables}}
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(settings)}


def use() -> None:
    """Let this process compute over the backend, if it is a rank's. Torch is not imported for it in any other."""
    sys.meta_path.insert(0, _OnceImported())


class _OnceImported(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != OF_RANKS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _ThenUse(spec.loader)
        return spec


class _ThenUse(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from tests.async_backend import BACKEND, compute_over

        compute_over(BACKEND)
        (Path(os.environ[PIDS]) / str(os.getpid())).touch()
