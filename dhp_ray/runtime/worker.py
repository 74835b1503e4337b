"""The Ray actor of one rank: it prefetches the payload of step n+1 while step n runs."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import ray
import torch

from dhp_ray.comm.device import choose
from dhp_ray.config import Config
from dhp_ray.model.build import num_parameters
from dhp_ray.planner.plan import RankPlan, StepResult
from dhp_ray.runtime.messages import BlockRows, Membership
from dhp_ray.runtime.prefetch import load_payloads, processor_spec
from dhp_ray.runtime.rank import Rank, token_ids
from dhp_ray.storage import Folder
from dhp_ray.train.collate import Payload
from dhp_ray.train.engine import resident_bytes
from dhp_ray.train.sharded import sharded_bytes

CONCURRENCY_GROUPS = {"prefetch": 1}
"""Threads beside the one that trains."""


class Worker:
    """A long-lived member of the worker group, one a rank."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rank: Rank | None = None
        self.prefetched: dict[int, tuple[RankPlan, dict[str, Payload]]] = {}

    def describe(self, device: str, probe: str) -> dict[str, Any]:
        """Where this worker is and how much memory its device has; also shows that it reaches the run folder."""
        self.accelerator = choose(device)
        self.accelerator.activate()
        Folder(self.config.run.dir).read(probe)
        context = ray.get_runtime_context()
        parameters = num_parameters(self.config.model.preset, self.config.model.path, token_ids(self.config))
        num_workers = self.config.cluster.num_workers
        lockstep = self.config.planner.sync == "micro_batch"
        state_bytes = sharded_bytes(parameters, num_workers) if lockstep else resident_bytes(parameters, num_workers, self.config.train.precision)
        return {"pid": os.getpid(), "node_id": context.get_node_id(), "device": self.accelerator.name, "memory_bytes": self.accelerator.memory_bytes(),
                "num_parameters": parameters, "resident_bytes": state_bytes}

    def join(self, membership: Membership, checkpoint: str) -> int:
        """Enter a generation, with the state of a checkpoint when one is named; returns the state version."""
        torch.set_num_threads(max(1, int(self.config.cluster.cpus_per_worker)))  # counts for this thread, which also runs the steps
        self.processor = processor_spec(self.config).load()
        self.rank = Rank(self.config, membership, self.accelerator)
        if checkpoint:
            self.rank.checkpointer.load(checkpoint)
        return self.rank.engine.state_version

    @ray.method(concurrency_group="prefetch")
    def prefetch(self, plan: RankPlan, blocks: list[BlockRows]) -> dict[str, str]:
        """Fetch and decode what this rank needs of a step; returns the samples that failed, with their reasons."""
        assert self.rank is not None
        payloads, failures = load_payloads(plan, blocks, self.processor, self.rank.adapter)
        self.prefetched[plan.step] = (plan, payloads)
        return failures

    def run(self, step: int, placeholders: frozenset[str], total_steps: int) -> StepResult:
        """Run a prefetched step; the samples in `placeholders` keep their place with every label masked."""
        assert self.rank is not None
        wait = perf_counter()
        plan, payloads = self._take(step, placeholders)
        factor = self.rank.learning_rate_factor(step, total_steps)
        result = self.rank.stepper.run(plan, payloads, factor, data_wait_s=perf_counter() - wait)
        saved, error = self.rank.checkpointer.poll()
        return replace(result, saved_steps=tuple(saved), save_error=error)

    def evaluate(self, number: int, placeholders: frozenset[str]) -> tuple[float, int]:
        """Loss sum and valid tokens, over all ranks, of a prefetched batch of held-out samples."""
        assert self.rank is not None
        return self.rank.stepper.evaluate(*self._take(number, placeholders))

    def _take(self, step: int, placeholders: frozenset[str]) -> tuple[RankPlan, dict[str, Payload]]:
        plan, payloads = self.prefetched.pop(step)
        for sample_id in placeholders & payloads.keys():
            payloads[sample_id] = replace(payloads[sample_id], masked=True)
        return plan, payloads

    def save(self, step: int) -> None:
        """Stage the state and write it in the background; `run` and `finish_save` report when it is whole."""
        assert self.rank is not None
        self.rank.checkpointer.begin(step)

    def finish_save(self) -> tuple[list[int], str]:
        assert self.rank is not None
        self.rank.checkpointer.finish()
        return self.rank.checkpointer.poll()

    def export(self, name: str) -> None:
        """Write the trained model with its tokenizer and processor to the run folder (rank 0 does; all must call)."""
        assert self.rank is not None
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            self.rank.export(folder)
            if self.rank.membership.rank == 0:
                self.processor.save(folder)
                Folder(self.config.run.dir).upload(folder, name)

    def leave(self) -> None:
        if self.rank is not None:
            self.rank.close()
            self.rank = None
