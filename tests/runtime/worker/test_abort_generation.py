"""A worker whose generation is aborted before, while and after it joins, on a device that records what is asked of
it.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dhp_ray.comm.device import CPU, Accelerator
from dhp_ray.config import load
from dhp_ray.runtime.messages import FromCheckpoint, FromMemory, Membership, RunError
from dhp_ray.runtime.worker.worker import VERSIONS_KEPT, Worker
from tests.ranks import run_processes


class Recording(Accelerator):
    """The CPU, which can be stopped: then nothing must be asked of it until it is started again."""

    asked: list[str] = []  # noqa: RUF012 (the class is frozen)

    def stop(self) -> None:
        self.asked.append("stop")

    def restart(self) -> None:
        self.asked.append("restart")


def worker_of(run_dir: str) -> tuple[Worker, list[str]]:
    worker = Worker(load(["data=synthetic", "data.path=none.parquet", f"run.dir={run_dir}", "cluster.device=cpu"]))
    worker.accelerator = Recording("cpu", CPU.backend, None)
    Recording.asked.clear()
    return worker, Recording.asked


def joined(worker: Worker, port: int, generation: int, world_size: int = 1) -> str:
    """What comes of joining: "" where it succeeds, else why not."""
    try:
        worker.join(Membership(0, world_size, generation, "127.0.0.1", port), FromCheckpoint(), 0)
    except RunError as error:
        return str(error)
    return ""


def aborted_before(process: int, port: int, run_dir: str) -> tuple[str, str, list[str], str]:
    worker, asked = worker_of(run_dir)
    worker.abort_generation(5)
    said = joined(worker, port, 5)
    return said, worker.error, list(asked), joined(worker, port, 6)


def test_a_generation_that_was_aborted_is_not_joined_and_the_next_one_is(tmp_path: Path) -> None:
    ((said, error, asked, then),) = run_processes(aborted_before, 1, str(tmp_path), timeout_s=120)
    assert said
    assert error == "", "no error of its own: it is no worse for that"
    assert asked[-1] == "restart"
    assert then == ""


def aborted_while_it_waits(process: int, port: int, run_dir: str) -> tuple[str, str, list[str], str]:
    """The other rank never comes."""
    worker, asked = worker_of(run_dir)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(joined(worker, port, 3, world_size=2)))
    thread.start()
    wait_until(lambda: worker.progress.passed().waits_for_peers)
    worker.abort_generation(2)  # of one before: late, and not meant
    assert not worker.progress.aborted
    while thread.is_alive():
        worker.abort_generation(3)
        thread.join(0.05)
    for _ in range(3):
        worker.abort_generation(3)  # the driver's last repetitions, when it has left already
    ended = list(asked)
    return said[0], worker.error, ended, joined(worker, port, 4)


def wait_until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 40
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_join_that_waits_ends_and_leaves_a_device_that_computes(tmp_path: Path) -> None:
    ((said, error, asked, then),) = run_processes(aborted_while_it_waits, 1, str(tmp_path), timeout_s=120)
    assert said
    assert error == ""
    assert asked == ["stop", "restart"] * 2  # as it left what was before, and once when it was aborted
    assert then == ""


def kept_of_generations(process: int, port: int, run_dir: str) -> list[tuple[str, list[int]]]:
    worker, _ = worker_of(run_dir)
    found = []
    for generation, origin in enumerate((0, 1, 2, 3, 1, 0), 1):
        begin = FromMemory(origin, 0, (0,)) if origin else FromCheckpoint()
        try:
            worker.join(Membership(0, 1, generation, "127.0.0.1", port), begin, 0)
            found.append(("", sorted({kept[0] for kept in worker.kept})))
        except RunError as error:
            found.append((str(error), []))
    return found


def test_generations_that_break_before_their_first_step_leave_no_heap_of_shards(tmp_path: Path) -> None:
    """Kept are those of the origin, and of the last one that has trained, which alone has copies on other ranks."""
    assert run_processes(kept_of_generations, 1, str(tmp_path), timeout_s=120) == [
        [("", kept) for kept in ([], [1], [1, 2], [1, 3], [1], [])]]


def aborted_after(process: int, port: int, run_dir: str) -> tuple[str, bool, bool]:
    worker, _ = worker_of(run_dir)
    said = joined(worker, port, 7)
    worker.abort_generation(6)
    before = worker.progress.aborted
    worker.abort_generation(7)
    return said, before, worker.progress.aborted and dist.is_initialized()


def test_only_the_generation_that_is_named_is_aborted(tmp_path: Path) -> None:
    assert run_processes(aborted_after, 1, str(tmp_path), timeout_s=120) == [("", False, True)]


def test_what_an_idle_worker_decodes_is_progress(tmp_path: Path) -> None:
    """Not beside a step: a training thread that is stuck would be found late."""
    worker, _ = worker_of(str(tmp_path))
    for worker.call, moves in (("", True), ("run", False)):
        before = worker.status().mark_id
        worker._count_decoded()
        assert (worker.status().mark_id != before) == moves


def test_a_worker_in_a_call_says_in_few_bytes_how_it_is(tmp_path: Path) -> None:
    """It is asked at every poll; what it has run counts once it has left the call."""
    worker, _ = worker_of(str(tmp_path))
    worker.steps = {version: version + 1 for version in range(VERSIONS_KEPT)}
    assert worker.status().steps == worker.steps
    worker.call = "run"
    assert len(pickle.dumps(worker.status())) < 500


def test_a_worker_that_cannot_leave_says_so(tmp_path: Path) -> None:
    """Its device is broken, most likely: it must not count as well."""
    worker, _ = worker_of(str(tmp_path))

    def broken() -> None:
        raise RuntimeError("the device is lost")

    worker._leave = broken  # type: ignore[method-assign]
    assert "Connection closed by peer" in str(worker._fall(RuntimeError("gloo: Connection closed by peer")))
    assert "the device is lost" in worker.error
