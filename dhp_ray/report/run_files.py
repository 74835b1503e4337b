"""Reads a run's folder. It changes nothing there, and the run may still be going."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dhp_ray.run_folder import CONFIG_FILE, EVENTS_FILE, METRICS_FILE, PLANS_FOLDER, SKIPPED_FILE, plan_file, step_of
from dhp_ray.schema import ConfigError
from dhp_ray.storage import Folder, StorageError


@dataclass(frozen=True)
class RunFiles:
    """What a report is made from. Lines are as written, without a last line that is still being written."""

    folder: Folder
    config: str
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    skipped: list[dict[str, Any]]
    plan_steps: list[int]

    def plan(self, step: int) -> dict[str, Any]:
        """The plan file of a step, in the form of `Plan.to_json`."""
        return _parsed(self.folder.read(plan_file(step)), f"{self.folder.uri}/{plan_file(step)}:")


def read_run(folder: Folder) -> RunFiles:
    """The files of a run. ConfigError: there is none. StorageError: a file cannot be read or is damaged."""
    if not folder.exists(CONFIG_FILE):
        raise ConfigError(f"run.dir: no run in {folder.uri} (it has no {CONFIG_FILE}); allowed: a folder that "
                          "jobs/train.py has written")
    steps = [step for name in folder.names(PLANS_FOLDER) if (step := step_of(name, ".json")) is not None]
    return RunFiles(folder, folder.read(CONFIG_FILE).decode(errors="replace"), _lines(folder, METRICS_FILE),
                    _lines(folder, EVENTS_FILE), _lines(folder, SKIPPED_FILE), sorted(steps))


def _lines(folder: Folder, name: str) -> list[dict[str, Any]]:
    if not folder.exists(name):
        return []
    # the text after the last newline is still being written
    texts = folder.read(name).decode(errors="replace").split("\n")[:-1]
    return [_parsed(text, f"{folder.uri}/{name}: line {number} is") for number, text in enumerate(texts, start=1)]


def _parsed(text: str | bytes, words: str) -> dict[str, Any]:
    """A JSON object. `words` begin the error line."""
    with suppress(ValueError, RecursionError):
        tree = json.loads(text)
        if isinstance(tree, dict):
            return tree
    raise StorageError(f"{words} not a JSON object")
