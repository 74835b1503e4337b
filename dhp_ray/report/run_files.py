"""Reads a run's folder. It changes nothing there, and the run may still be going."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dhp_ray.credentials import MOST_OF_ERROR, shown
from dhp_ray.run_folder import (
    CLUSTER_FILE,
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    PLANS_FOLDER,
    SKIPPED_FILE,
    plan_file,
    step_of,
)
from dhp_ray.storage import Folder, StorageError


class NoRunError(ValueError):
    """There is no run in the folder; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message, MOST_OF_ERROR))


@dataclass(frozen=True)
class RunFiles:
    """What a report is made from. Lines are as written, without a last line that is still being written."""

    folder: Folder
    config: str
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    skipped: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    plan_steps: list[int]

    def plan(self, step: int) -> dict[str, Any]:
        """The plan file of a step, in the form of `Plan.to_json`."""
        tree = _json(self.folder, plan_file(step))
        if not isinstance(tree, dict):
            raise StorageError(f"{self.folder.uri}/{plan_file(step)}: not a plan")
        return tree


def read_run(folder: Folder) -> RunFiles:
    """The files of the run in `folder`.

    Raises:
        NoRunError: no run has been started there.
        StorageError: a file cannot be read or is damaged.
    """
    if not folder.exists(CONFIG_FILE):
        raise NoRunError(
            f"run.dir: no run in {folder.uri} (it has no {CONFIG_FILE}); allowed: a folder that jobs/train.py has "
            "written"
        )
    cluster = _json(folder, CLUSTER_FILE) if folder.exists(CLUSTER_FILE) else {}
    steps = [step for name in folder.names(PLANS_FOLDER) if (step := step_of(name, ".json")) is not None]
    return RunFiles(folder, folder.read(CONFIG_FILE).decode(errors="replace"), _lines(folder, METRICS_FILE),
                    _lines(folder, EVENTS_FILE),
                    _lines(folder, SKIPPED_FILE), cluster.get("ranks", []) if isinstance(cluster, dict) else [],
                    sorted(steps))


def _lines(folder: Folder, name: str) -> list[dict[str, Any]]:
    if not folder.exists(name):
        return []
    lines = []
    # the text after the last newline is still being written
    texts = folder.read(name).decode(errors="replace").split("\n")[:-1]
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise StorageError(f"{folder.uri}/{name}: line {number} is not a JSON object")
        lines.append(line)
    return lines


def _json(folder: Folder, name: str) -> Any:
    try:
        return json.loads(folder.read(name))
    except ValueError:
        raise StorageError(f"{folder.uri}/{name}: not JSON") from None
