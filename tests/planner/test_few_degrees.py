"""Micro-batches whose packs have few degrees: they need few process groups, batch after batch."""

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.micro_batch.search import least_degrees


def test_the_least_degree_from_a_number_on():
    assert least_degrees([1, 2, 4, 8], 6).tolist() == [1, 1, 2, 4, 4, 6, 6, 7]
    assert least_degrees(range(1, 4), 3).tolist() == [1, 1, 2, 3, 4]


@pytest.mark.parametrize(("group_s", "few"), [(0.0, False), (50.0, True)])
def test_where_making_groups_takes_long_packs_have_few_degrees(group_s: float, few: bool) -> None:
    """After some batches all groups are of 2, 4, 8 or 16 ranks where making one takes long, and plans are shorter than
    those of `pow2`, which has no other groups either."""
    cost = CostModel(1e-7, 1e-4, 100.0, 0.1, {2: 1e7}, group_s=group_s)
    random, cluster = np.random.default_rng(0), ClusterSpec(16, 8, 1000)
    pool: list[tuple[int, ...]] = []
    seconds, pow2_s = 0.0, 0.0
    degrees = set[int]()
    for batch in range(24):
        samples = [Sample(str(row), int(length)) for row, length in enumerate(random.lognormal(6.0, 1.2, 80) + 1)
                   if length < 16_000]
        plan = plan_batch(samples, cluster, cost, sync="micro_batch", pool=pool)
        plan.validate()
        groups = [group.ranks for group in plan.groups if group.degree > 1]
        pool = list(dict.fromkeys([*pool, *groups]))[-32:]
        seconds += plan.predicted_time_s
        pow2_s += plan_batch(samples, cluster, cost, sync="micro_batch", planner="pow2").predicted_time_s
        degrees |= {len(ranks) for ranks in groups} if batch >= 20 else set()
    assert not few or degrees <= {2, 4, 8, 16}
    assert seconds < 0.97 * pow2_s
