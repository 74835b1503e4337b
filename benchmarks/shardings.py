"""Where parameters lie, and how ranks synchronise, at equal device memory: modelled seconds of the same batches.

    python benchmarks/shardings.py

Qwen2.5-VL in bf16 on 64 devices, 8 a node: a 7B on Ascend 910B (64 GiB) and on A800 (80 GiB), a 32B on A800 and H100
(80 GiB). A row is the sum over three batches of a mix of text (`bimodal`, seeds 0 to 2). Each mode plans with `dhp`, on
the tokens a rank that the memory model leaves it, under the costs derived from the model and the device; recomputation
as `train.activation_checkpointing=auto` takes it in that mode. A pack (in micro_batch: a micro-batch) takes at least
what its layers' parameters and gradients take to travel. `auto`: the mode that `planner.sync=auto` with
`train.sharding=auto` takes for the longest sequence of the three batches, were the devices' ranks able to share memory.

All modelled: none of these has been run on such devices.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planner import bimodal
from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.config import CONF
from dhp_ray.model.families.qwen2_5_vl import Qwen25VL
from dhp_ray.planner import ClusterSpec, Plan, Sample, plan_batch
from dhp_ray.planner.derived_cost import Device, derived_cost, gather_s
from dhp_ray.planner.memory import MemoryModel
from dhp_ray.planner.memory_terms import MemorySettings
from dhp_ray.planner.mode import Candidate, Mode, choose, reference_step_s
from dhp_ray.planner.timeline import starts_of
from dhp_ray.runtime.driver.modes import MEMORY_SHARE
from tests.published_configs import published_config

NUM_RANKS, NODE_RANKS, BATCHES = 64, 8, 3
CASES = (("7B", "ascend_910b", "npu", 64), ("7B", "a800", "cuda", 80), ("32B", "a800", "cuda", 80),
         ("32B", "h100", "cuda", 80))
COUNTS = (128, 512, 2048)
KINDS = (("step", "whole"), ("step", "node"), ("micro_batch", "whole"))
IMAGE_TOKENS = 4096


class Trained(NamedTuple):
    """A mode on devices of one kind: tokens a rank, and what plans cost."""

    candidate: Candidate
    memory: MemoryModel
    device: Device

    def seconds(self, batches: Sequence[Sequence[Sample]]) -> float:
        """Infinite where a sequence does not fit."""
        mode, tokens = self.candidate.mode, self.candidate.tokens_per_rank
        if tokens < 1 or max(sample.num_tokens for batch in batches for sample in batch) > tokens * NUM_RANKS:
            return math.inf
        cost, least = (make(self.memory, self.device, NUM_RANKS // NODE_RANKS) for make in (derived_cost, gather_s))
        return sum(with_gathers_s(plan_batch(batch, ClusterSpec(NUM_RANKS, NODE_RANKS, tokens), cost, sync=mode.sync),
                                  least) for batch in batches)


def with_gathers_s(plan: Plan, least_s: float) -> float:
    """The makespan of a plan none of whose packs takes less than `least_s`."""
    groups = [replace(group, predicted_time_s=max(group.predicted_time_s, least_s)) for group in plan.groups]
    return starts_of(groups, plan.cluster.num_ranks, plan.sync, plan.fixed_s)[1]


def trained(name: str, device_name: str, kind: str, gibibytes: int, mode: Mode, num_samples: int) -> Trained:
    accelerator, device = ACCELERATORS[kind], Device.load(CONF / "device" / f"{device_name}.yaml")
    memory_bytes, shape = gibibytes * 2**30, Qwen25VL.shape(published_config(name))
    memory = MemoryModel(shape, MemorySettings(
        sync=mode.sync, world_size=NUM_RANKS, precision="bf16", recomputes=mode.recomputes, device=kind,
        sharding=mode.sharding, node_ranks=NODE_RANKS,
        communicators_bytes=accelerator.pool_groups("auto", memory_bytes) * accelerator.group_bytes))
    tokens, nodes = memory.tokens_that_fit(MEMORY_SHARE * memory_bytes), NUM_RANKS // NODE_RANKS
    step_s = reference_step_s(
        derived_cost(memory, device, nodes), mode.sync, tokens, [rank // NODE_RANKS for rank in range(NUM_RANKS)],
        math.ceil(num_samples / NUM_RANKS), IMAGE_TOKENS, shape.merge_area, gather_s(memory, device, nodes))
    return Trained(Candidate(mode, tokens, step_s), memory, device)


def cell(one: Trained, seconds: float) -> str:
    again = ", again" if one.candidate.mode.recomputes else ""
    return f"{seconds:.2f} ({one.candidate.tokens_per_rank:,}{again})" if seconds < math.inf else "does not fit"


def row(name: str, device_name: str, kind: str, gibibytes: int, count: int) -> str:
    batches = [[Sample(str(place), int(length)) for place, length in enumerate(bimodal(count, NUM_RANKS, seed))]
               for seed in range(BATCHES)]
    needed = math.ceil(max(sample.num_tokens for batch in batches for sample in batch) / NUM_RANKS)
    found, every = [], []
    for sync, sharding in KINDS:
        both = [trained(name, device_name, kind, gibibytes, Mode(sync, again, sharding), count)
                for again in (False, True)]
        every += both
        mode = choose([one.candidate for one in both], needed).mode
        found.append(next(one for one in both if one.candidate.mode == mode))
    seconds = [one.seconds(batches) for one in found]
    auto = choose([one.candidate for one in every], needed).mode
    of_auto = next(one for one in every if one.candidate.mode == auto).seconds(batches)
    cells = [cell(one, its_s) for one, its_s in zip(found, seconds)]
    return (f"| {name}, {device_name} {gibibytes} GiB, {count} | {' | '.join(cells)} | {auto} | "
            f"{of_auto / min(seconds):.3f} | {seconds[1] / seconds[2]:.3f} |")


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    if words:
        print(f"shardings.py: {words[0]}: takes nothing", file=sys.stderr)
        return 2
    print("| model, device, sequences | step, whole | step, node | micro_batch | auto takes | auto over the best | "
          "node over micro_batch |\n|" + "---|" * 7)
    for case in CASES:
        for count in COUNTS:
            print(row(*case, count), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
