"""The lower bound beside the shortest of all plans of tiny batches, each tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Plan, PlanError, Sample, checked_problem
from dhp_ray.planner.bound import lower_bound_s
from dhp_ray.planner.plan.types import Pack, VisionPlan
from tests.planner.reference_encoder import timeline

RING = CostModel(
    quadratic_s=1e-4, linear_s=1e-2, comm_bytes_per_token=1e6, fixed_s=0.5, communication="ring", overlap=0.5,
    bandwidth_bytes_per_s={2: 1e9}, latency_s=0.1, pack_s=1.0, vision_linear_s=0.02)
ALL_TO_ALL = replace(RING, communication="all_to_all", latency_s=0.0)


def partitions(rows: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put rows into packs."""
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [rows[0], *rest[place]], *rest[place + 1 :]]


def shortest_s(samples: Sequence[Sample], cluster: ClusterSpec, cost: CostModel, apart: bool) -> float:
    """Of all packs, ranks of each, orders, and ranks that encode each image (`apart`: any)."""
    every = range(cluster.num_ranks)
    sets = [ranks for degree in every for ranks in combinations(every, degree + 1)]
    best_s = np.inf
    for packs in partitions(range(len(samples))):
        for chosen in product(sets, repeat=len(packs)):
            images = [[every if apart else ranks] * sum(len(samples[row].vision_grids) for row in pack)
                      for pack, ranks in zip(packs, chosen)]
            for encoders in product(*(product(*each) for each in images)):
                groups = [Pack(ranks, tuple(pack), 0.0, encoders=each)
                          for pack, ranks, each in zip(packs, chosen, encoders)]
                for ordered in permutations(groups):
                    plan = Plan("any", "step", cluster, tuple(samples), ordered, 0.0, 0.0,
                                inputs={"cost": cost.to_json()}, vision=VisionPlan("world" if apart else "group"))
                    try:
                        plan.validate()
                    except PlanError:  # beyond the ranks' memory
                        break
                    best_s = min(best_s, timeline(plan, cost))
    return best_s


def random_batch(seed: int, num_ranks: int) -> tuple[list[Sample], ClusterSpec, CostModel]:
    """Two or three sequences, two images at most, on ranks that hold 100 tokens."""
    draw = np.random.default_rng(seed)
    samples = [Sample(str(row), int(draw.integers(5, 90 * num_ranks)) if row == 0 else int(draw.integers(5, 60)), 0,
                      ((1, 1, int(draw.integers(1, 60))),) * int(row < draw.integers(0, 3)))
               for row in range(int(draw.integers(2, 4)))]
    speeds = (1.0,) * num_ranks if seed % 3 else tuple(draw.uniform(0.5, 1.2, num_ranks).tolist())
    return samples, ClusterSpec(num_ranks, num_ranks, 100, speeds), (RING, ALL_TO_ALL)[seed % 2]


@pytest.mark.parametrize("encoder", ["group", "world"])
def test_no_plan_is_below_it(encoder: str) -> None:
    over = []
    for seed in range(24):
        samples, cluster, cost = random_batch(seed, 2)
        bound_s = lower_bound_s(checked_problem(samples, cluster, cost, encoder=encoder))
        over.append(shortest_s(samples, cluster, cost, encoder == "world") / bound_s - 1)
    assert min(over) >= -1e-9
    assert np.mean(over) <= 0.25


def test_a_pack_on_each_rank() -> None:
    """The example of bound.py: packs hold 100 tokens and cost 1 s; four sequences of 10 tokens and 3 s, two ranks."""
    cost = CostModel(0.0, 0.3, 0.0, 0.0, {2: 1e9}, pack_s=1.0)
    samples = [Sample(str(row), 10) for row in range(4)]
    problem = checked_problem(samples, ClusterSpec(2, 2, 100), cost)
    assert lower_bound_s(problem) == pytest.approx(7.0)
    assert shortest_s(samples[:3], ClusterSpec(2, 2, 100), cost, False) >= 4.5 + 1.0
    # small packs: four of them, two a rank
    assert lower_bound_s(checked_problem(samples, ClusterSpec(2, 2, 10), cost)) == pytest.approx(8.0)
    micro = checked_problem(samples, ClusterSpec(2, 2, 10), replace(cost, fixed_s=0.1), sync="micro_batch")
    assert lower_bound_s(micro) == pytest.approx(8.2)


def test_a_rank_may_have_images_and_no_pack() -> None:
    """Packs cost 1 s; sequences of 2.7 and 0.3 s, the latter with nine images of 1 s. In packs both ranks pay for one;
    apart, the pack of both is on one rank or on both, and a rank without it has more of the images."""
    cost = CostModel(0.0, 0.3, 0.0, 0.0, {2: 1e9}, pack_s=1.0, vision_linear_s=0.1)
    samples, cluster = [Sample("a", 9), Sample("b", 1, 0, ((1, 1, 10),) * 9)], ClusterSpec(2, 2, 100)
    packed, apart = (lower_bound_s(checked_problem(samples, cluster, cost, encoder=encoder))
                     for encoder in ("group", "auto"))
    assert packed == pytest.approx((3 + 9) / 2 + 1)
    speed = np.roots([1.0, 3 + 9 - 2, -2 * 3]).max()  # of ranks with packs: o x^2 + (L + V - o S) x - L S = 0
    assert apart == pytest.approx(1 + 3 / speed, rel=1e-5)
    assert apart < packed
