"""The planner against the exact optimum of small cases, by OR-tools CP-SAT (in the dev extra).

    python benchmarks/planner_exact.py [cases=0-199]

The exact model: every sequence by itself, on any number of ranks that holds it, at any time; at most N ranks busy at
once. Where communication adds up (all to all) and a pack costs nothing by itself, packing cannot beat that, so its
optimum is the optimum.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planner_cases import SMALL_COST, small_case
from dhp_ray.planner import plan_batch
from dhp_ray.planner.problem import Problem, problem_of, times_at

TICKS = 20_000
"""Ticks of the exact model's clock in the planner's makespan."""

QUICK = (16, 21, 23, 28, 33, 38, 40, 42, 43, 58)
"""Cases of 4 to 7 sequences that are proven in half a second or less."""


class Result(NamedTuple):
    """A case: the plan's gap above the optimum; the planner's bound, and the optimum at least and at most, in seconds;
    whether the optimum is proven.
    """

    gap: float
    bound_s: float
    least_s: float
    most_s: float
    proven: bool


def optimum_s(problem: Problem, makespan_s: float, limit_s: float = 60.0) -> tuple[float, float, bool]:
    """The shortest makespan, at least and at most, and whether it is proven; `makespan_s` is one that can be had.

    Times are rounded down to ticks, so the optimum of the model is below the true one, by less than a tick for each
    sequence.
    """
    from ortools.sat.python import cp_model

    model, items, num_ranks, tick_s = cp_model.CpModel(), problem.items, problem.cluster.num_ranks, makespan_s / TICKS
    end = model.new_int_var(0, TICKS, "makespan")
    intervals, demands, energy = [], [], []
    largest = int(items.language_s.argmax())
    for row in range(len(items)):
        choices = []
        for degree in range(int(items.minimum_degree[row]), num_ranks + 1):
            ticks = int(times_at(items[row:row + 1], degree, problem.machine)[0] / tick_s)
            if ticks > TICKS:
                continue
            start, chosen = model.new_int_var(0, TICKS - ticks, ""), model.new_bool_var("")
            intervals.append(model.new_optional_fixed_size_interval_var(start, ticks, chosen, ""))
            demands.append(degree)
            model.add(end >= start + ticks).only_enforce_if(chosen)
            if row == largest:  # a schedule and its mirror image are alike: the largest is nearer to the beginning
                model.add(2 * start + ticks <= end).only_enforce_if(chosen)
            choices.append(chosen)
            energy.append(degree * ticks * chosen)
        model.add_exactly_one(choices)
    model.add_cumulative(intervals, demands, num_ranks)
    model.add(sum(energy) <= num_ranks * end)  # follows; helps the proof
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 8
    status = solver.solve(model)
    bound_s, found_s = solver.best_objective_bound * tick_s, (solver.objective_value + len(items)) * tick_s
    return bound_s, found_s, status == cp_model.OPTIMAL


def compare(seed: int) -> Result:
    samples, cluster = small_case(seed)
    plan = plan_batch(samples, cluster, SMALL_COST)
    least_s, most_s, proven = optimum_s(problem_of(samples, cluster, SMALL_COST, "step"), plan.predicted_time_s)
    return Result(plan.predicted_time_s / least_s - 1, plan.lower_bound_s, least_s, most_s, proven)


def main(cases: range) -> None:
    begin = time.perf_counter()
    results = [compare(seed) for seed in cases]
    gaps = np.array([result.gap for result in results])
    slack = np.array([result.least_s / result.bound_s - 1 for result in results])
    wrong = sum(result.bound_s > result.most_s for result in results)
    print(
        f"{len(cases)} cases, {sum(result.proven for result in results)} proven optimal, "
        f"{time.perf_counter() - begin:.0f} s"
    )
    print(
        f"plan above the optimum:  mean {100 * gaps.mean():.2f} %, worst {100 * gaps.max():.2f} % (seed "
        f"{cases[gaps.argmax()]})"
    )
    print(f"optimum above the bound: mean {100 * slack.mean():.2f} %; the bound is above it in {wrong} cases")


if __name__ == "__main__":
    word = sys.argv[1] if len(sys.argv) > 1 else "cases=0-199"
    found = re.fullmatch(r"cases=(\d+)-(\d+)", word)
    if word in ("-h", "--help"):
        print(__doc__)
    elif found and int(found[1]) <= int(found[2]):
        main(range(int(found[1]), int(found[2]) + 1))
    else:
        sys.exit(f"planner_exact.py: {word}: allowed: cases=FIRST-LAST")
