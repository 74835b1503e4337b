"""What a user can look at while a run goes on: TensorBoard's curves, texts, hyperparameters and pictures of plans, and
traces of steps for Perfetto. Written without torch.

Events are appended by us, not by tensorboard's writer: its thread ends with the first write that a full disk refuses.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from dhp_ray.config import Config, walk
from dhp_ray.planner.plan.types import Plan
from dhp_ray.report.trace import trace_of
from dhp_ray.run_folder import trace_file
from dhp_ray.spooled_log import UploadTimer, json_text
from dhp_ray.storage import Folder, append_whole, retry_when_full, storage_errors
from dhp_ray.train.results import StepResult

UPLOAD_INTERVAL_S = 30.0
MAX_CURVES = 16  # with up to this many ranks, every rank and every degree has its own curve
HYPERPARAMETERS = ("seed", "batch", "model", "cluster", "planner", "comm", "train")
"""Keys and sections whose numbers, words and switches the HPARAMS page compares between runs."""

METRIC_TAGS = {
    "loss": "loss/train",
    "eval_loss": "loss/eval",
    "eval_exact_match": "eval/exact_match",
    "eval_anls": "eval/anls",
    "eval_f1": "eval/f1",
    "step_time_s": "throughput/step_time_s",
    "num_tokens": "throughput/num_tokens",
    "num_samples": "throughput/num_samples",
    "idle_fraction": "balance/idle_fraction",
    "measured_makespan_s": "balance/measured_makespan_s",
    "predicted_makespan_s": "balance/predicted_makespan_s",
    "cost_error": "balance/cost_error",
    "num_ranks": "elastic/num_ranks",
    "generation": "elastic/generation",
    "planning_time_s": "plan/planning_time_s",
    "late": "plan/late",
    "learning_rate": "loss/learning_rate",
    "gradient_norm": "loss/gradient_norm",
}
PARTS = ("encoder", "experts", "offload", "recomputation")
"""Metrics of steps with images apart, experts, activations moved, layers recomputed: a curve for each number."""
EXTRA_TAGS = {
    "num_valid_tokens": "throughput/num_valid_tokens",
    "lower_bound_s": "plan/lower_bound_s",
    "data_wait_s": "data/data_wait_s",
    "prefetch_wait_s": "data/prefetch_wait_s",
    "epoch": "data/epoch",
}


class ScalarLog:
    """An event file in `folder` from `first_step` on. Its START event makes readers forget what an earlier process
    wrote from there on. On a local folder a step is on the disk when `step` returns; for an object store the file is
    uploaded whole now and then. Any thread may call.
    """

    def __init__(self, folder: Folder, first_step: int) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._open(first_step)

    def restart(self, first_step: int) -> None:
        """Go on in a new file from `first_step`: the run has gone back to the step before."""
        self.close()
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        self.first_step = first_step
        # readers sort files by name, so the name begins with the time
        self._name = f"events.out.tfevents.{time.time_ns() // 1000:016d}.{socket.gethostname()}.{os.getpid()}"
        local = self._folder.local_path()
        self._spool = None if local else tempfile.TemporaryDirectory(prefix="dhp_ray_tensorboard_")
        self._path = (local or Path(self._spool.name if self._spool else "")) / self._name
        with storage_errors(str(self._path), "cannot be opened"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  stays open for the log's life
        self._upload = UploadTimer(UPLOAD_INTERVAL_S)
        self._write(0, file_version="brain.Event:2")
        self._write(first_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def step(self, metrics: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Write the curves of a committed step, from its line in metrics.jsonl and the `extra` values."""
        self.scalars(metrics["step"], scalars_of(metrics, extra))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point on each of the named curves."""
        points = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step, summary=summary_pb2.Summary(value=points))

    def text(self, name: str, markdown: str, step: int | None = None) -> None:
        """Write a text. `step` None: the first step of this log."""
        self._write(self.first_step if step is None else step, summary=text_pb(name, markdown))

    def hyperparameters(self, config: Config) -> None:
        """Write what the HPARAMS page lists for this run. A resumed run keeps the values of its first start there."""
        values = {dotted: ", ".join(map(str, value)) if isinstance(value, list) else value
                  for dotted, value, _ in walk(config) if dotted.partition(".")[0] in HYPERPARAMETERS}
        self._write(self.first_step, summary=hparams_pb(values))

    def image(self, tag: str, png: bytes, step: int) -> None:
        """Write a PNG; its size stands in bytes 16 to 24 of the file."""
        width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
        image = summary_pb2.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self._write(step, summary=summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, image=image)]))

    def flush(self) -> None:
        """Bring the file on an object store up to date."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Flush; the log is not used any more. A second call does nothing."""
        with self._lock:
            self._file.close()
            self._flush()
        if self._spool:
            self._spool.cleanup()
            self._spool = None

    def _write(self, step: int, **fields: Any) -> None:
        record = BytesIO()
        RecordWriter(record).write(event_pb2.Event(wall_time=time.time(), step=step, **fields).SerializeToString())
        with self._lock:
            with storage_errors(str(self._path), "cannot be written"):
                retry_when_full(lambda: append_whole(self._file.fileno(), record.getvalue()))
            if self._upload.due:
                self._flush()

    def _flush(self) -> None:
        with self._upload.uploading():
            if self._spool:
                self._folder.upload(self._path, self._name)


def scalars_of(metrics: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, float]:
    """{tag: value} of a step, in groups; `plan` has the number of packs of each degree."""
    values = {tag: metrics[name] for name, tag in METRIC_TAGS.items() if name in metrics}
    for part in PARTS:
        values |= {f"{part}/{name}": value for name, value in metrics.get(part, {}).items()
                   if name not in ("layout", "keeps")}
    values |= {tag: extra[name] for name, tag in EXTRA_TAGS.items() if name in extra}
    if metrics["step_time_s"] > 0:
        values["throughput/tokens_per_s"] = metrics["num_tokens"] / metrics["step_time_s"]
    degrees = {int(degree): count for degree, count in metrics["degrees"].items()}
    # zeros too, or a curve would run straight over the steps without that degree
    for degree in range(1, metrics["num_ranks"] + 1):
        if degree in degrees or metrics["num_ranks"] <= MAX_CURVES:
            values[f"plan/degree_{degree}"] = degrees.get(degree, 0)
    values |= {f"comm/{name}": count for name, count in extra.items() if name.startswith("pool_")}
    speeds = {name: speed for name, speed in extra.items() if name.startswith("speed_")}
    if speeds:
        values["elastic/slowest_speed"] = min(speeds.values())
        values |= {f"elastic/{name}": speed for name, speed in speeds.items() if len(speeds) <= MAX_CURVES}
    if "applied" in extra:
        values["loss/update_applied"] = float(extra["applied"])
    return {tag: float(value) for tag, value in values.items()}


def cluster_text(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The cluster as Markdown: versions, then a table of ranks (rank, pid, node_id, device)."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("dhp_ray", "ray", "torch", "transformers"))
    lines = [versions, "", "| rank | node | process | device |", "|---|---|---|---|"]
    lines += [f"| {rank['rank']} | {rank['node_id']} | {rank['pid']} | {rank['device']} |" for rank in ranks]
    return "\n".join(lines)


PICTURE = "plan/planned_and_measured"


class StepPictures:
    """Shows step 1 and every `every_steps`-th step (0: none): the plan next to what the ranks measured, as a picture in
    TensorBoard and as `trace/step_*.json`. No step waits for this: one that is due while another is drawn is left out.
    """

    def __init__(self, folder: Folder, every_steps: int) -> None:
        self._folder, self._every_steps = folder, every_steps
        self._thread: threading.Thread | None = None

    def step(self, step: int, plan: Plan, results: Sequence[StepResult], scalars: ScalarLog) -> bool:
        """Start to show a committed step if it is due; returns whether it was started."""
        due = self._every_steps and (step == 1 or step % self._every_steps == 0)
        if not due or (self._thread is not None and self._thread.is_alive()):
            return False
        self._thread = threading.Thread(target=self._show, args=(step, plan, tuple(results), scalars), name="watch",
                                        daemon=True)
        self._thread.start()
        return True

    def close(self, timeout_s: float | None = None) -> None:
        """Wait at most `timeout_s` until everything started is written; call it before the ScalarLog is closed."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _show(self, step: int, plan: Plan, results: Sequence[StepResult], scalars: ScalarLog) -> None:
        from dhp_ray.report.step_picture import draw_plan  # matplotlib takes a second to import

        try:
            self._folder.write(trace_file(step), (json_text(trace_of(plan, results)) + "\n").encode())
            picture = BytesIO()
            draw_plan(plan, picture, results)
            scalars.image(PICTURE, picture.getvalue(), step)
        except Exception as error:  # a failure to show a step must not end the run; the ledger does not depend on it
            print(f"step {step} is not shown: {type(error).__name__}: {error}", file=sys.stderr)
