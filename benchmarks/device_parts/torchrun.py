"""The parts of `device.py world` on a rank that torchrun has started, each in a child of every rank:

    rank 0    child of a part, its record | hears of the others, a line | child of the next one
    rank 1    child of the part, its record | waits for the others      | child of the next one

The children of a part are a world of their own. One that fails, or rank 0's end, ends the part on all ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from benchmarks.device_parts.processes import ROOT, run_part
from benchmarks.device_parts.record import write
from benchmarks.device_parts.settings import WORLD_LIMITS_S, Settings, SettingsError
from dhp_ray.comm.device import ACCELERATORS, Accelerator
from dhp_ray.comm.world import init_world, meet, open_store
from tests import async_backend

TIMEOUT = timedelta(seconds=60)
COMPILES = timedelta(minutes=10)
"""How long the planner may at most."""
GRACE_S = 5.0
"""What the other ranks' children have once a part is over."""


class Together:
    """Runs parts on this rank and on all others. Its children see one device, as a worker does."""

    def __init__(self, settings: Settings) -> None:
        self._rank, self._num_ranks = place()
        if self._num_ranks < 2:
            raise SettingsError("world: got 1 rank; allowed: two or more")
        here, devices = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if settings.device == "cuda" and here > devices:
            raise SettingsError(f"world: got {here} ranks on a machine whose devices are {devices}; allowed: a device "
                                "for each rank")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # from torchrun: its child ends too
        self._compiling: subprocess.Popen[bytes] | None = None
        if self._rank == 0 and "speed" in settings.parts:  # a minute, once, while other parts run
            program = "from dhp_ray.planner import warm_up; warm_up()"
            self._compiling = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.DEVNULL)
        self._store = open_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), TIMEOUT)
        if variable := ACCELERATORS[settings.device].visible:
            local, listed = int(os.environ["LOCAL_RANK"]), os.environ.get(variable)
            os.environ[variable] = listed.split(",")[local] if listed else str(local)

    def run_part(self, settings: Settings, part: str, command: str) -> dict[str, Any]:
        """The record of rank 0's child, failed if any rank's has. The others' are in OUT/rank-N."""
        if self._rank:
            settings = replace(settings, out=settings.out / f"rank-{self._rank}")
            settings.out.mkdir(parents=True, exist_ok=True)
        if part == "speed":  # which plans
            if self._compiling:
                self._compiling.wait()
                self._store.set("compiled", "")
            self._store.wait(["compiled"], COMPILES)
        over_since: list[float] = []

        def is_over() -> bool:
            if not over_since and self._store.check([f"{part}/over"]):
                over_since.append(time.monotonic())
            return bool(over_since) and time.monotonic() > over_since[0] + GRACE_S

        record = run_part(settings, part, command, is_over)
        failed = record["status"] == "failed"
        if failed or not self._rank:
            self._store.set(f"{part}/over", "")
        self._store.set(f"{part}/said-{self._rank}", f"rank {self._rank}: {record['said']}" if failed else "")
        limit = timedelta(seconds=settings.limit_of(part)) + TIMEOUT
        meet(self._store, part, part, self._rank, range(self._num_ranks), limit)
        said = [self._store.get(f"{part}/said-{rank}").decode() for rank in range(self._num_ranks)]
        if any(said):
            record |= {"status": "failed", "said": "; ".join(filter(None, said))}
            write(settings.out / f"{part}.json", json.dumps(record, indent=2) + "\n")
        return record


def place() -> tuple[int, int]:
    """This rank, and how many there are."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def joined(settings: Settings, part: str, emulates: bool = False) -> Accelerator:
    """Make the world of a part's children, with the backend of their device; `emulates`: on the CPU with one that is
    asynchronous, as a device's is.
    """
    accelerator = ACCELERATORS[settings.device]
    if emulates and settings.device == "cpu":
        async_backend.register()
        accelerator = replace(accelerator, backend=async_backend.BACKEND)
    accelerator.activate()
    accelerator.compute_in(precision_of(settings))
    store = open_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), TIMEOUT)
    init_world(store, list(WORLD_LIMITS_S).index(part) + 1, *place(), accelerator, TIMEOUT)
    return accelerator


def precision_of(settings: Settings) -> str:
    return "fp32" if settings.device == "cpu" else "bf16"
