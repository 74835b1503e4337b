"""Micro-batches under a limit, beside a slow and obvious version; plans of them are valid, shorter than asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL, RING

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.bound import bounded
from dhp_ray.planner.problem import Problem, problem_of
from dhp_ray.planner.search.batch import batch_of
from dhp_ray.planner.search.rounds import Rounds, fill, places_of
from dhp_ray.planner.timeline import time_of


def slow_fill(problem: Problem, limit_s: float, least: int) -> list[tuple[int, list[int]]]:
    """(degree, sequences) of each pack: largest first, to the fullest pack in which it ends by the limit, else to a new
    one on the fewest ranks on which it does."""
    cost, cluster, packs = problem.cost, problem.cluster, list[tuple[int, list[int]]]()
    tokens = [sample.num_tokens for sample in problem.samples]

    def seconds(rows: list[int], degree: int) -> float:
        return float(cost.pack_time_s([tokens[row] for row in rows], range(degree), cluster))

    for row in sorted(range(len(tokens)), key=lambda row: -tokens[row]):
        fits = [(degree, rows) for degree, rows in packs
                if sum(tokens[one] for one in [*rows, row]) <= degree * cluster.tokens_per_rank
                and seconds([*rows, row], degree) <= limit_s]
        if fits:
            rooms = [min((limit_s - seconds(rows, degree)) / seconds([row], degree) * cost.linear_s * tokens[row],
                         cost.linear_s * max(tokens)) for degree, rows in fits]  # the work that they have time for
            least_room = min(rooms)
            if least_room < cost.linear_s * max(tokens) and sum(room < least_room + 1e-9 for room in rooms) > 1:
                reject()  # which of two equal sums is less is a matter of rounding
            fits[max(place for place, room in enumerate(rooms) if room == least_room)][1].append(row)
            continue
        left = cluster.num_ranks - sum(degree for degree, _ in packs)
        for degree in range(max(1, min(least, left)), left + 1):
            if tokens[row] <= degree * cluster.tokens_per_rank and seconds([row], degree) <= limit_s:
                packs.append((degree, [row]))
                break
    return packs


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=25, unique=True), st.integers(1, 10), st.integers(1, 4),
       st.floats(0.05, 1.0))
def test_a_micro_batch_is_filled_like_the_slow_one(
    lengths: list[int], num_ranks: int, least: int, limit_s: float) -> None:
    cost = CostModel(quadratic_s=0.0, linear_s=2e-4, comm_bytes_per_token=1e6, fixed_s=0.1,
                     bandwidth_bytes_per_s={2: 1e11})
    cluster = ClusterSpec(num_ranks, num_ranks, 10**6)
    samples = [Sample(str(row), length) for row, length in enumerate(lengths)]
    problem = problem_of(samples, cluster, cost, "micro_batch")
    batch = batch_of(problem)
    pack, degree, seconds, _ = fill(batch, batch.by_work, limit_s, places_of(problem.machine), least, 0.0)
    found = [(int(degree[one]), batch.by_work[pack == one].tolist()) for one in range(len(degree))]
    assert found == slow_fill(problem, limit_s, least)
    assert not found or seconds <= limit_s * (1 + 1e-9)


@pytest.mark.parametrize("cost", [ALL_TO_ALL, RING])
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=25), st.integers(1, 10), st.integers(1, 4))
def test_plans_hold_each_sequence_once_in_memory_and_are_shorter_than_asked_for(
    cost: CostModel, lengths: list[int], num_ranks: int, least: int) -> None:
    cluster = ClusterSpec(num_ranks, 16, 2000)
    samples = [Sample(str(row), length) for row, length in enumerate(lengths) if length <= cluster.max_tokens]
    if not samples:
        return
    problem = bounded(problem_of(samples, cluster, cost, "micro_batch"))
    rounds = Rounds(problem, problem.machine)
    schedule = rounds.shortest(np.inf, [least], 1, 13)
    if schedule is None:
        return
    assert sorted(schedule.rows.tolist()) == list(range(len(samples)))
    held = np.add.reduceat(problem.items.tokens[schedule.rows], schedule.first_row[:-1])
    assert (held <= np.diff(schedule.first_rank) * 2000).all()
    seconds = time_of(problem, schedule)
    assert seconds >= problem.lower_bound_s * (1 - 1e-9)
    shorter = rounds.shortest(seconds * 0.999, [least], 4, 40)
    assert shorter is None or time_of(problem, shorter) < seconds


def test_text_gets_ranks_enough_for_the_rest_of_the_longest_pack_with_images():
    """A micro-batch takes the longest encoding and the longest rest: text that ended with the pack of images, on 8
    ranks in place of 12, made it 12 % longer than a baseline."""
    images = tuple((1, 24, 16) for _ in range(21))
    samples = [Sample("text", 8000), Sample("images", 8000 - 96 * 21, 96 * 21, images), Sample("more text", 8000)]
    cost = CostModel(5e-9, 2e-4, 2e5, 0.1, {"intra": 1e10, "inter": 2e9}, communication="ring", latency_s=1e-3,
                     pack_s=0.01, overlap=0.8, vision_linear_s=1e-4)
    plan = plan_batch(samples, ClusterSpec(48, 12, 40_000), cost, sync="micro_batch")
    assert [group.degree for group in plan.groups] == [12, 12, 12]
