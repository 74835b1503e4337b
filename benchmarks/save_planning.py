"""What the plan of a checkpoint costs rank 0: the first save of a generation, and those after it.

    python benchmarks/save_planning.py                  64 ranks with 1,400 intervals each
    python benchmarks/save_planning.py --ranks 256

All ranks' planners run in this process, one after the other, through the steps of torch.distributed.checkpoint; what
the ranks would send is pickled and read back, as its collectives do. Seconds are of this process's CPU time: what rank
0 does alone, beside training (`local`: its own part; `rest`: what it receives, plans for all, and sends). `results`:
what it receives after the writing, and the index of all tensors, which each save has anew.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from dhp_ray.train.state.intervals import Intervals, SavePlanner

PART = 8
"""Elements of an interval: how many there are does not matter to a plan."""


class Place(NamedTuple):
    """Where a file holds an interval; torch's own has the same fields."""

    file: str
    offset: int
    length: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--intervals", type=int, default=1400)
    asked = parser.parse_args(argv)
    states = [state_of(rank, asked.ranks, asked.intervals) for rank in range(asked.ranks)]
    print(f"{asked.ranks} ranks, {asked.intervals} intervals each; seconds of rank 0's CPU")
    print("| save | local | rest | plan | results |\n|---|---|---|---|---|")
    for number in range(1, 4):
        local_s, rest_s, results_s = planned(states)
        print(f"| {number} | {local_s:.2f} | {rest_s:.2f} | {local_s + rest_s:.2f} | {results_s:.2f} |")
    return 0


def state_of(rank: int, num_ranks: int, num_intervals: int) -> dict[str, Intervals]:
    return {f"{kind}.model.language_model.layers.{number // 12}.mlp.part_{number % 12}.weight":
            Intervals(num_ranks * PART, {rank * PART: torch.empty(PART)})
            for kind in ("value", "exp_avg", "exp_avg_sq") for number in range(num_intervals // 3)}


def planned(states: list[dict[str, Intervals]]) -> tuple[float, float, float]:
    """Plan a save of all ranks; what rank 0 spends on its own part, on the whole plan, and on the results."""
    planners = [SavePlanner(f"rank {rank}") for rank in range(len(states))]
    sent: list[bytes] = []
    local_s = 0.0
    for rank, (planner, state) in enumerate(zip(planners, states)):
        begun = process_time()
        planner.set_up_planner(state, is_coordinator=rank == 0)
        sent.append(pickle.dumps(planner.create_local_plan()))
        local_s = local_s or process_time() - begun
    begun = process_time()
    plans, metadata = planners[0].create_global_plan([pickle.loads(plan) for plan in sent])
    answers = [pickle.dumps(plan) for plan in with_files(plans)]
    rest_s = process_time() - begun
    results = [pickle.dumps(written(planner.finish_plan(pickle.loads(answer))))
               for planner, answer in zip(planners, answers)]
    begun = process_time()
    found: Any = metadata
    found.storage_data = {result.index: result.storage_data for one in results for result in pickle.loads(one)}
    pickle.dumps(found)
    return local_s, rest_s, process_time() - begun


def with_files(plans: list[SavePlan]) -> list[SavePlan]:
    """As `FileSystemWriter.prepare_global_plan`."""
    return [SavePlan(plan.items, f"__{rank}_", plan.planner_data, plan.usable)
            for rank, plan in enumerate(plans)]


def written(plan: SavePlan) -> list[WriteResult]:
    return [WriteResult(item.index, 4 * PART, Place(f"{plan.storage_data}0.distcp", place * 99, 99))
            for place, item in enumerate(plan.items)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
