"""What the plan of a checkpoint costs rank 0: the first save of a generation, and those after it.

    python benchmarks/save_planning.py                  64 ranks with 1,400 intervals each
    python benchmarks/save_planning.py --ranks 256

All ranks' planners run in this process, one after the other, through the steps of torch.distributed.checkpoint; what
the ranks would send is pickled and read back, as its collectives do. Seconds are of this process's CPU time, and of
what rank 0 does, beside training: `plan`, what it receives, plans for all, and sends; `results`, what it receives after
the writing, and the index of all intervals. A later save is written as the first; `file`: to write its own intervals.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from dhp_ray.train.state.checkpoint import Intervals, SavePlanner, Writer, WrittenFiles

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
    plan_s, results_s, plan, index = planned(states)
    print(f"{asked.ranks} ranks, {asked.intervals} intervals each; seconds of rank 0's CPU\n"
          "| save | plan | results | file |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        planner = SavePlanner()
        planner.set_up_planner(states[0])
        first = Writer(f"{folder}/1")
        first.set_up_storage_writer(True)
        first.prepare_local_plan(plan)
        file_s = seconds(lambda: first.write_data(plan, planner))
        print(f"| 1 | {plan_s:.2f} | {results_s:.2f} | {file_s:.2f} |")
        before = WrittenFiles(plan, first.results, index)
        for number in (2, 3):
            whole_s = seconds(lambda number=number: Writer(f"{folder}/{number}").write_as(before, states[0],
                                                                                          SavePlanner()))
            print(f"| {number} | 0 | {max(0.0, whole_s - file_s):.2f} | {file_s:.2f} |")
    return 0


def seconds(action: Callable[[], object]) -> float:
    begun = process_time()
    action()
    return process_time() - begun


def state_of(rank: int, num_ranks: int, num_intervals: int) -> dict[str, Intervals]:
    return {f"{kind}.model.language_model.layers.{number // 12}.mlp.part_{number % 12}.weight":
            Intervals(num_ranks * PART, {rank * PART: torch.empty(PART)})
            for kind in ("value", "exp_avg", "exp_avg_sq") for number in range(num_intervals // 3)}


def planned(states: list[dict[str, Intervals]]) -> tuple[float, float, SavePlan, bytes]:
    """Plan a save of all ranks: what rank 0 spends on the plan and on the results, its own plan, and the index."""
    planners = [SavePlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
    sent = [pickle.dumps(planner.create_local_plan()) for planner in planners[1:]]
    begun = process_time()
    own = pickle.dumps(planners[0].create_local_plan())
    plans, metadata = planners[0].create_global_plan([pickle.loads(plan) for plan in (own, *sent)])
    answers = [pickle.dumps(plan) for plan in Writer("unused").prepare_global_plan(plans)]
    plan_s = process_time() - begun
    results = [pickle.dumps(written(planner.finish_plan(pickle.loads(answer))))
               for planner, answer in zip(planners, answers)]
    begun = process_time()
    found: Any = metadata
    found.storage_data = {result.index: result.storage_data for one in results for result in pickle.loads(one)}
    index = pickle.dumps(found)
    return plan_s, process_time() - begun, planners[0].plan, index


def written(plan: SavePlan) -> list[WriteResult]:
    return [WriteResult(item.index, 4 * PART, Place(f"{plan.storage_data.prefix}0.distcp", place * 99, 99))
            for place, item in enumerate(plan.items)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
