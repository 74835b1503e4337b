"""The files of a run folder, except checkpoints.

    config.yaml       the resolved configuration        ledger.jsonl   one line a committed step: the truth
    cluster.json      the current membership            metrics.jsonl  one line a committed step
    plans/step_*.json the plan of each step             skipped.jsonl  samples left out, each once an epoch
                                                        events.jsonl   what happened, with its time

trace/step_*.json (tensorboard.py) is cut back here with the plans.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from dhp_ray.config import RESOLVED, Config, ConfigError, dump, leaves, places
from dhp_ray.run_folder import (
    CHECKPOINTS_FOLDER,
    CLUSTER_FILE,
    CONFIG_FILE,
    EVENTS_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    MODEL_FOLDER,
    PLANS_FOLDER,
    SKIPPED_FILE,
    TRACES_FOLDER,
    WRITTEN,
    plan_file,
    step_of,
)
from dhp_ray.runtime.records.checkpoints import Checkpoints
from dhp_ray.runtime.waits import LongWait
from dhp_ray.spooled_log import SpooledLog, UploadTimer, json_text, last_line
from dhp_ray.storage import Folder, StorageError

FIXED = ("model.", "data.", "batch.", "seed", "train.precision", "train.freeze", "train.lora.")
"""Keys (or prefixes of keys) that cannot change during the life of a run: they decide what its steps compute."""

ADMITTING = ("data.on_error", "data.max_file_mb")
"""Keys of `data` that may change: they say which rows are used, not in which order rows come."""

UPLOAD_INTERVAL_S = 10.0  # how old the logs on an object store grow while steps commit, unless they take long to upload


class RunRecords:
    """The files of one run, for its one writer, the driver. A commit writes the metrics first and the ledger, which
    counts, last; opening the folder drops a metrics line that the ledger lacks.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._ledger = SpooledLog(folder, LEDGER_FILE)
        self._metrics = SpooledLog(folder, METRICS_FILE)
        self._skipped = SpooledLog(folder, SKIPPED_FILE)
        self._events = SpooledLog(folder, EVENTS_FILE)
        self._upload = UploadTimer(UPLOAD_INTERVAL_S)
        self.last_step = self._check_steps(self._ledger)  # the last committed one; 0 before the first
        self._metrics.truncate(lambda line: line["step"] <= self.last_step)
        if self._check_steps(self._metrics) < self.last_step:
            raise StorageError(f"{folder.uri}/metrics.jsonl: lines are missing; ledger.jsonl has committed "
                               f"{self.last_step} steps")
        self._skipped_ids = {(line["epoch"], line["id"]) for line in self._skipped.lines()}

    def write_config(self, config: Config, image_limit: int = 0) -> None:
        """Write the resolved configuration, and what is fixed beside it: the most tokens of an image."""
        self.folder.write(CONFIG_FILE, f"{dump(config)}{RESOLVED}:\n  image_limit: {image_limit}\n".encode())

    def commit(self, step: int, sample_ids: Sequence[str], metrics: Mapping[str, Any]) -> None:
        """Record that `step` has been applied: `metrics` in metrics.jsonl, then a line in ledger.jsonl."""
        if step != self.last_step + 1:
            raise ValueError(f"step {step} cannot be committed after step {self.last_step}")
        self._metrics.append(dict(metrics))
        self._ledger.append({"step": step, "sample_ids": list(sample_ids)})
        self.last_step = step
        if self._upload.due:
            self.flush()

    def skip(self, sample_id: str, reason: str, step: int, epoch: int = 0) -> bool:
        """List a sample that is left out of `step`'s batch; False when this epoch has listed it already."""
        if (epoch, sample_id) in self._skipped_ids:
            return False
        self._skipped_ids.add((epoch, sample_id))
        self._skipped.append({"id": sample_id, "reason": reason, "step": step, "epoch": epoch})
        return True

    def event(self, kind: str, **details: Any) -> None:
        """Add what happened now (UTC) to events.jsonl."""
        self._events.append({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, **details})

    def waited(self, wait: LongWait) -> None:
        """Add a long wait that has ended to events.jsonl."""
        self.event("wait", what=wait.what, seconds=wait.seconds)

    def plan(self, step: int, plan_json: Mapping[str, Any]) -> None:
        """Write the plan of a step, before it runs, in the form of `Plan.to_json`."""
        self.folder.write(plan_file(step), (json_text(plan_json) + "\n").encode())

    def read_plan(self, step: int) -> dict[str, Any]:
        return json.loads(self.folder.read(plan_file(step)))

    def planned_inputs(self, *steps: int) -> dict[str, Any]:
        """Return the planner's inputs for the first of these steps that has a plan file; empty if none has."""
        return next((self.read_plan(step)["inputs"] for step in steps if self.folder.exists(plan_file(step))), {})

    def cluster(self, generation: int, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Replace the membership: for each rank its rank, pid, node_id and device."""
        self.folder.write(CLUSTER_FILE, (json_text({"generation": generation, "ranks": ranks}) + "\n").encode())

    def membership(self) -> dict[str, Any]:
        """Return the `generation` (0 before the first) and the `ranks` that `cluster` wrote."""
        if not self.folder.exists(CLUSTER_FILE):
            return {"generation": 0, "ranks": []}
        return json.loads(self.folder.read(CLUSTER_FILE))

    def truncate(self, step: int) -> None:
        """Forget every step after `step`, which is that of a checkpoint (0: there is none)."""
        if step > self.last_step:
            raise StorageError(f"{self.folder.uri}/{LEDGER_FILE}: ends at step {self.last_step}; the checkpoint is of "
                               f"step {step}")
        self._ledger.truncate(lambda line: line["step"] <= step)
        self._ledger.flush()  # before anything else goes: the metrics may have more lines, never fewer
        self._metrics.truncate(lambda line: line["step"] <= step)
        self._skipped.truncate(lambda line: line["step"] <= step)
        self._skipped_ids = {(line["epoch"], line["id"]) for line in self._skipped.lines()}
        for kind in (PLANS_FOLDER, TRACES_FOLDER):
            for name in self.folder.names(kind):
                if (step_of(name, ".json") or 0) > step:
                    self.folder.delete(f"{kind}/{name}")
        self.last_step = step
        self.flush()

    def step_times_s(self) -> Iterator[float]:
        """The seconds of the steps, from the last one on backwards."""
        return (line["step_time_s"] for _, line in self._metrics.last_lines())

    @property
    def has_trained(self) -> bool:
        """Whether any committed step was trained on any sample."""
        return any(line["sample_ids"] for line in self._ledger.lines())

    def flush(self) -> None:
        """Bring the logs on an object store up to date, the ledger last. A checkpoint's manifest comes after this."""
        with self._upload.uploading():
            for log in (self._events, self._skipped, self._metrics, self._ledger):
                log.flush()

    def close(self) -> None:
        self.flush()
        for log in (self._events, self._skipped, self._metrics, self._ledger):
            log.close()

    def _check_steps(self, log: SpooledLog) -> int:
        """Return the last step of a log; its lines must be of steps 1, 2, 3, ..."""
        last = 0
        for line in log.lines():
            if line.get("step") != last + 1:
                raise StorageError(f"{self.folder.uri}/{log.name}: line {last + 1} is of step {line.get('step')}; it "
                                   f"must be of step {last + 1}")
            last += 1
        return last


def stored_config(folder: Folder) -> dict[str, Any]:
    """Return a run folder's config.yaml as dotted keys and values; empty before the first start."""
    if not folder.exists(CONFIG_FILE):
        return {}
    try:
        tree = yaml.safe_load(folder.read(CONFIG_FILE))
    except yaml.YAMLError:
        tree = None
    if not isinstance(tree, dict):
        raise StorageError(f"{folder.uri}/{CONFIG_FILE}: does not hold a configuration")
    return dict(leaves(tree))


def last_committed(folder: Folder) -> int:
    """Return the last committed step of a run folder, 0 before the first."""
    line = last_line(folder, LEDGER_FILE)
    try:
        return int(json.loads(line)["step"]) if line else 0
    except (ValueError, LookupError, TypeError):
        raise StorageError(f"{folder.uri}/{LEDGER_FILE}: its last line is of no committed step; allowed: the ledger of "
                           "a run, or another run.dir") from None


def check_run(folder: Folder, config: Config, last_step: int) -> None:
    """Refuse a start in a folder where it would destroy what is there, or cannot go on with the run that is there.
    Without a committed step (`last_step` 0) and a whole checkpoint, no run is there, whatever config.yaml says: a start
    that failed has left it.
    """
    _refuse_own_files(folder, config)
    stored, saved = stored_config(folder), Checkpoints(folder, config.checkpoint.keep).complete()
    if not (last_step or saved):
        _refuse_foreign(folder, stored)
        return
    if config.run.resume == "never":
        raise ConfigError(f"run.resume: got 'never' with a run in {folder.uri}; allowed: auto, or another run.dir")
    for name, value in leaves(asdict(config)):
        if not name.startswith(FIXED) or name in ADMITTING or name not in stored:
            continue
        if _absolute(name, stored[name]) != _absolute(name, value):
            raise ConfigError(f"{name}: got {value!r}; the run in {folder.uri} has {stored[name]!r}; allowed: that "
                              "value, or another run.dir")
    done = max((step for step in saved if step <= last_step), default=0)
    if 0 < config.run.steps < done:
        raise ConfigError(f"run.steps: got {config.run.steps}; the run in {folder.uri} has done {done}; allowed: at "
                          f"least {done}, or another run.dir")
    if not saved and folder.names(MODEL_FOLDER):
        raise ConfigError(f"run.dir: {folder.uri} has {MODEL_FOLDER}/ of a run of {last_step} steps and no checkpoint: "
                          f"the run would begin again and replace it; allowed: this folder once {MODEL_FOLDER}/ is "
                          "moved away, or another run.dir")


def _refuse_own_files(folder: Folder, config: Config) -> None:
    """Refuse to read what the run writes over, or deletes."""
    local = folder.local_path()
    if local is None:
        return
    for key, section, item in places(config):
        path = getattr(section, item.name)
        if key in ("run.dir", "planner.cost") or not path:  # cost.yaml is written with planner.cost=measure alone
            continue
        read_as = getattr(section, "format", "") or config.data.format
        for whole in (os.path.abspath, os.path.realpath):  # a link may be either, or lead to either
            if key.endswith(".path") and key != "model.path" and read_as == "llava" and whole(path) == whole(local):
                raise ConfigError(f"{key}: got {path!r}, which is run.dir: the run's logs would be among the rows; "
                                  "allowed: another place, or another run.dir")
            for name in WRITTEN:
                if Path(whole(path)).is_relative_to(whole(local / name)):
                    raise ConfigError(f"{key}: got {path!r}, which lies in run.dir, where the run writes {name}; "
                                      "allowed: another place, or another run.dir")


def _refuse_foreign(folder: Folder, stored: Mapping[str, Any]) -> None:
    """Refuse a folder without a run that has what a run would replace or delete. `stored`: its config.yaml."""
    found = [f"{MODEL_FOLDER}/"] if folder.names(MODEL_FOLDER) else []
    if f"{RESOLVED}.image_limit" not in stored:  # no run has written it; else the rest is what a failed start has left
        found += [CONFIG_FILE] if stored else []
        found += [f"{name}/" for name in (CHECKPOINTS_FOLDER, PLANS_FOLDER, TRACES_FOLDER) if folder.names(name)]
        found += [name for name in (METRICS_FILE, SKIPPED_FILE) if folder.exists(name) and folder.read(name)]
    if found:
        raise ConfigError(f"run.dir: {folder.uri} has {found[0]} and no committed step: it is of no run, and a run "
                          "would replace it; allowed: a new or empty folder, or one that a run has begun")


def _absolute(name: str, value: Any) -> Any:
    """The value of a key with its paths absolute: an older run's config.yaml has them as they were given."""
    if isinstance(value, list):
        return [{key: _absolute(f"{name}.{key}", inner) for key, inner in entry.items()}
                if isinstance(entry, dict) else entry for entry in value]
    is_path = name.endswith((".path", ".image_root")) and isinstance(value, str)
    return os.path.abspath(value) if is_path and value else value
