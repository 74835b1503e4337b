"""What TensorBoard shows of a run, written without torch: curves in groups, pictures of plans, configuration and
cluster as text, hyperparameters.
"""

from __future__ import annotations

import os
import socket
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
from dhp_ray.spooled_log import UploadTimer
from dhp_ray.storage import Folder, append_whole, retry_when_full, storage_errors

UPLOAD_INTERVAL_S = 30.0
MAX_CURVES = 16
"""With up to this many ranks, every rank and every degree has its own curve."""
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
ENCODER_TAGS = {
    "encode_s": "encoder/encode_s",
    "backward_s": "encoder/backward_s",
    "imbalance": "encoder/imbalance",
    "exchanged_bytes": "encoder/exchanged_bytes",
}
"""Tags of steps whose images were encoded apart from their packs."""
OFFLOAD_TAGS = {
    "packs": "offload/packs",
    "largest_share": "offload/largest_share",
    "moved_bytes": "offload/moved_bytes",
}
"""Tags of steps with packs that moved activations to host memory."""
RECOMPUTATION_TAGS = {"packs": "recomputation/packs", "mean_share": "recomputation/mean_share"}
"""Tags of steps with packs whose plan recomputes layers."""
EXTRA_TAGS = {
    "num_valid_tokens": "throughput/num_valid_tokens",
    "lower_bound_s": "plan/lower_bound_s",
    "data_wait_s": "data/data_wait_s",
    "prefetch_wait_s": "data/prefetch_wait_s",
    "epoch": "data/epoch",
}


class ScalarLog:
    """An event file in `folder` for the steps from `first_step` on.

    It opens with a START event of that step: readers then forget what an earlier process wrote at that step or later,
    so a resumed run shows every step once. On a local folder a step is on the disk when `step` returns; for an object
    store the file is spooled here and uploaded whole now and then, and at the end. Calls may come from several threads.
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
        self._write(event_pb2.Event(file_version="brain.Event:2"))
        self._write(event_pb2.Event(session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)),
                    step=first_step)

    def step(self, metrics: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Write the curves of a committed step, from its line in metrics.jsonl and the `extra` values."""
        self.scalars(metrics["step"], scalars_of(metrics, extra))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point on each of the named curves."""
        points = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(event_pb2.Event(summary=summary_pb2.Summary(value=points)), step)

    def text(self, name: str, markdown: str, step: int | None = None) -> None:
        """Write a text. `step` None: the first step of this log."""
        self._summary(text_pb(name, markdown), self.first_step if step is None else step)

    def hyperparameters(self, config: Config) -> None:
        """Write what the HPARAMS page lists for this run. A resumed run keeps the values of its first start there."""
        self._summary(hparams_pb(hyperparameters_of(config)), self.first_step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        self._summary(image_of(tag, png), step)

    def flush(self) -> None:
        """Bring the file on an object store up to date."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()
            self._flush()
        if self._spool:
            self._spool.cleanup()

    def _summary(self, summary: Any, step: int) -> None:
        self._write(event_pb2.Event(summary=summary_pb2.Summary.FromString(summary.SerializeToString())), step)

    def _write(self, event: event_pb2.Event, step: int = 0) -> None:
        event.wall_time, event.step = time.time(), step
        record = BytesIO()
        RecordWriter(record).write(event.SerializeToString())
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
    """{tag: value} of a step, in groups: loss, throughput, balance, plan (with the number of packs of each degree),
    data, elastic, comm.
    """
    values = {tag: metrics[name] for name, tag in METRIC_TAGS.items() if name in metrics}
    for part, tags in (("encoder", ENCODER_TAGS), ("offload", OFFLOAD_TAGS), ("recomputation", RECOMPUTATION_TAGS)):
        values |= {tag: metrics[part][name] for name, tag in tags.items() if part in metrics}
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


def image_of(tag: str, png: bytes) -> summary_pb2.Summary:
    """A PNG as a summary; its size stands in bytes 16 to 24 of the file."""
    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
    image = summary_pb2.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, image=image)])


def hyperparameters_of(config: Config) -> dict[str, float | bool | str]:
    """{dotted key: value} of the keys of HYPERPARAMETERS; a list becomes one string."""
    return {dotted: ", ".join(map(str, value)) if isinstance(value, list) else value
            for dotted, value, _ in walk(config) if dotted.partition(".")[0] in HYPERPARAMETERS}


def cluster_text(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The cluster as Markdown: versions, then a table of ranks (rank, pid, node_id, device)."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("dhp_ray", "ray", "torch", "transformers"))
    lines = [versions, "", "| rank | node | process | device |", "|---|---|---|---|"]
    lines += [f"| {rank['rank']} | {rank['node_id']} | {rank['pid']} | {rank['device']} |" for rank in ranks]
    return "\n".join(lines)
