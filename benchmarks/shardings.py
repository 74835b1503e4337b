"""Where parameters lie, and how ranks synchronise, at equal device memory: modelled seconds of the same batches.

    python benchmarks/shardings.py

Qwen2.5-VL in bf16 on 64 devices, 8 a node: a 7B on Ascend 910B (64 GiB) and on A800 (80 GiB), a 32B on A800 and H100
(80 GiB). A row is the sum over three batches of a mix of text (`bimodal`, seeds 0 to 2). Each mode plans with `dhp`, on
the tokens a rank that the memory model leaves it, under the costs derived from the model and the device; recomputation
as `train.activation_checkpointing=auto` takes it in that mode. A pack (in micro_batch: a micro-batch) takes at least
what its layers' parameters and gradients take to travel. `auto`: the mode that `planner.sync=auto` with
`train.sharding=auto` takes for the longest sequence of the three batches, if NPUs too could share memory.

All modelled: none of these has been run on such devices.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planner import bimodal
from dhp_ray.config import CONF
from dhp_ray.planner import ClusterSpec, Plan, Sample, plan_batch
from dhp_ray.planner.derived_cost import Device
from dhp_ray.planner.mode import Candidate, choose
from dhp_ray.planner.model_shape import ModelShape
from dhp_ray.planner.nodes import regular_nodes
from dhp_ray.planner.timeline import starts_of
from dhp_ray.simulate.training import Ranks, Training, Wanted, training_of

NUM_RANKS, NODE_RANKS, BATCHES = 64, 8, 3
CASES = (("qwen2_5_vl_7b", "ascend_910b", "npu", 64), ("qwen2_5_vl_7b", "a800", "cuda", 80),
         ("qwen2_5_vl_32b", "a800", "cuda", 80), ("qwen2_5_vl_32b", "h100", "cuda", 80))
COUNTS = (128, 512, 2048)
KINDS = (("step", "whole"), ("step", "node"), ("micro_batch", "whole"))


def trained(name: str, device_name: str, kind: str, gibibytes: int, wanted: Wanted) -> Training:
    ranks = Ranks(device=Device.load(CONF / "device" / f"{device_name}.yaml"), kind=kind,
                  memory_bytes=gibibytes * 2**30, nodes=regular_nodes(NUM_RANKS, NODE_RANKS))
    return training_of(ModelShape.load(CONF / "model_shape" / f"{name}.yaml"), ranks, wanted)


def seconds(training: Training, batches: Sequence[Sequence[Sample]]) -> float:
    """Of the batches in a mode, whose process groups there are already; infinite where a sequence does not fit."""
    if training.tokens_per_rank < 1 or (max(sample.num_tokens for batch in batches for sample in batch)
                                        > training.most_tokens * NUM_RANKS):
        return math.inf
    cluster = ClusterSpec(NUM_RANKS, NODE_RANKS, training.tokens_per_rank, recomputation=training.recomputation)
    return sum(with_gathers_s(plan_batch(batch, cluster, replace(training.cost, group_s=0.0), sync=training.mode.sync),
                              training.gather_s) for batch in batches)


def with_gathers_s(plan: Plan, least_s: float) -> float:
    """The makespan of a plan none of whose packs takes less than `least_s`."""
    groups = [replace(group, predicted_time_s=max(group.predicted_time_s, least_s)) for group in plan.groups]
    return starts_of(groups, plan.cluster.num_ranks, plan.sync, plan.fixed_s)[1]


def cell(training: Training, taken_s: float) -> str:
    again = ", again" if training.mode.recomputes else ", packs" if training.recomputation.share else ""
    return f"{taken_s:.2f} ({training.tokens_per_rank:,}{again})" if taken_s < math.inf else "does not fit"


def row(name: str, device_name: str, kind: str, gibibytes: int, count: int) -> str:
    batches = [[Sample(str(place), int(length)) for place, length in enumerate(bimodal(count, NUM_RANKS, seed))]
               for seed in range(BATCHES)]
    base = Wanted(longest_tokens=max(sample.num_tokens for batch in batches for sample in batch),
                  batch=tuple(batches[0]))
    machine = (name, device_name, kind, gibibytes)
    found = [trained(*machine, replace(base, sync=sync, sharding=sharding)) for sync, sharding in KINDS]
    taken_s = [seconds(training, batches) for training in found]
    # as auto would take it, if the NPUs too could share memory: the fastest of those that hold the longest sequence
    needed = math.ceil(base.longest_tokens / NUM_RANKS)
    every = [Candidate(training.mode, training.most_tokens, training.step_s) for training in found]
    place = every.index(choose(every, needed))
    return (f"| {name}, {device_name} {gibibytes} GiB, {count} | "
            f"{' | '.join(cell(training, its_s) for training, its_s in zip(found, taken_s))} | {found[place].mode} | "
            f"{taken_s[place] / min(taken_s):.3f} | {taken_s[1] / taken_s[2]:.3f} |")


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
