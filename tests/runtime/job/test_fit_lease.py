"""Training from Python, without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dhp_ray.runtime.job.fit as fit_module
from dhp_ray.runtime.messages import RunFinished


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_process_that_is_interrupted_while_it_leaves_the_cluster_can_train_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's process lives on: it must not go on to hold the lease of the run folder."""
    for name in ("check_here", "connect"):
        monkeypatch.setattr(fit_module, name, lambda *_: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # another test of this process may have joined a cluster
    monkeypatch.setattr(fit_module, "run", lambda *_, **__: RunFinished("", "stopped"))
    monkeypatch.setattr(fit_module, "disconnect", interrupted)
    settings = ["data.format=synthetic", "data.path=unused", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(KeyboardInterrupt):
        fit_module.fit(settings)
    [file] = (tmp_path / "run" / "lease").iterdir()
    assert json.loads(file.read_text())["state"] == "ended"
    monkeypatch.setattr(fit_module, "disconnect", lambda: None)
    assert str(fit_module.fit(settings).error) == "stopped"
