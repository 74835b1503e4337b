"""Micro-batches whose packs have few degrees: they need few process groups, batch after batch."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.micro_batch.search import least_degrees

COST, CLUSTER = CostModel(1e-7, 1e-4, 100.0, 0.1, {2: 1e7}), ClusterSpec(16, 8, 1000)


def test_the_least_degree_from_a_number_on():
    assert least_degrees([1, 2, 4, 8], 6).tolist() == [1, 1, 2, 4, 4, 6, 6, 7]
    assert least_degrees(range(1, 4), 3).tolist() == [1, 1, 2, 3, 4]


@cache
def pow2_s(samples: tuple[Sample, ...]) -> float:
    """By the baseline that has groups of 2, 4, 8 and 16 ranks alone; making them is not charged."""
    return plan_batch(samples, CLUSTER, COST, sync="micro_batch", planner="pow2").predicted_time_s


@pytest.mark.parametrize(("group_s", "few", "num_batches"), [
    (0.0, False, 6), (50.0, True, 10),
    *(pytest.param(*case, 24, marks=pytest.mark.slow) for case in ((0.0, False), (50.0, True)))])
def test_where_making_groups_takes_long_packs_have_few_degrees(group_s: float, few: bool, num_batches: int) -> None:
    """After some batches all groups are of 2, 4, 8 or 16 ranks where making one takes long, and plans are shorter than
    those of `pow2`, which has no other groups either."""
    cost, random = replace(COST, group_s=group_s), np.random.default_rng(0)
    pool: list[tuple[int, ...]] = []
    seconds, others_s = 0.0, 0.0
    degrees = set[int]()
    for batch in range(num_batches):
        samples = tuple(Sample(str(row), int(length)) for row, length in enumerate(random.lognormal(6.0, 1.2, 80) + 1)
                        if length < 16_000)
        plan = plan_batch(samples, CLUSTER, cost, sync="micro_batch", pool=pool)
        plan.validate()
        groups = [group.ranks for group in plan.groups if group.degree > 1]
        pool = list(dict.fromkeys([*pool, *groups]))[-32:]
        seconds += plan.predicted_time_s
        others_s += pow2_s(samples)
        degrees |= {len(ranks) for ranks in groups} if batch >= num_batches - 4 else set()
    assert not few or degrees <= {2, 4, 8, 16}
    assert seconds < 0.97 * others_s
