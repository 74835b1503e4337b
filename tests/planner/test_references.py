"""The planner beside slow and obvious references in both modes, and its times beside the cost formulas written anew.

    pytest tests/planner/test_references.py                  the first 20 of the batches of each mode
    pytest tests/planner/test_references.py -m slow          all 1,000 of each mode
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, plan_batch
from dhp_ray.planner.plan.cluster import Offload, Recomputation
from tests.planner.reference_cost import Batch
from tests.planner.reference_micro_batch import Pack, micro_batch_time_s, time_s
from tests.planner.reference_step import step_time_s

REFERENCES = {"step": step_time_s, "micro_batch": micro_batch_time_s}

ALL_TO_ALL = CostModel(
    quadratic_s=5.128e-9, linear_s=1.839576e-4, comm_bytes_per_token=2097152, fixed_s=0.63,
    bandwidth_bytes_per_s={2: 1.25e11, 4: 1.09e11, 8: 1.01e11}, vision_quadratic_s=1e-8, vision_linear_s=1e-5)
RING = CostModel(
    quadratic_s=5e-9, linear_s=2e-4, comm_bytes_per_token=2e5, fixed_s=0.1, communication="ring", overlap=0.8,
    bandwidth_bytes_per_s={"intra": {2: 2e10, 8: 1e10}, "inter": 2e9}, latency_s=1e-3, window_s=2e-3, pack_s=0.01,
    vision_linear_s=1e-5, encoder_pass_s=2e-3, attention_block=512)


def random_batch(
    seed: int, *, unequal: bool = False, images: bool = False, offload: bool = False, recomputation: bool = False
) -> Batch:
    """1 to 8 ranks on nodes of 2, 4 or 8; 2 to 12 sequences; both kinds of communication. `offload`: ranks hold more
    tokens with activations in host memory, over a link that compute hides as a whole, in part or hardly.
    `recomputation`: or with layers that run again, whose encoder is trained or not.
    """
    draw = np.random.default_rng(seed)
    num_ranks, count = int(draw.integers(1, 9)), int(draw.integers(2, 13))
    speeds = tuple(draw.uniform(0.5, 1.2, num_ranks).tolist()) if unequal else ()
    cluster = ClusterSpec(num_ranks, int(draw.choice([2, 4, 8])), int(draw.choice([4096, 8192, 32768])), speeds)
    if offload or recomputation:
        held = cluster.tokens_per_rank
        most = int(held * draw.uniform(1.1, 4))
        limit = float(draw.uniform(0.3, 1.0)), int(held * draw.uniform(0.7, 1.0)), most, held
        cluster = (replace(cluster, offload=Offload(*limit)) if offload
                   else replace(cluster, recomputation=Recomputation(*limit)))
    median, sigma = draw.choice([1000.0, 4000.0, 10000.0]), draw.uniform(0.0, 1.5)
    samples = []
    for row, length in enumerate(np.exp(draw.normal(np.log(median), sigma, count))):
        grid = (1, 16, 16 * int(draw.integers(1, 9)))
        grids = (grid,) * (images * int(draw.integers(4)))
        samples.append(Sample(f"s{row}", int(np.clip(length, 64, cluster.max_tokens)), 0, grids))
    cost = (ALL_TO_ALL, RING)[int(draw.integers(2))]
    if images:  # which take about as long as the text
        cost = replace(cost, vision_linear_s=2e-4)
    if offload:
        cost = replace(cost, offload_bytes_per_token=4e6, offload_bytes_per_patch=1e6,
                       forward=float(draw.uniform(0.2, 0.4)), host_bytes_per_s=float(10 ** draw.uniform(9.5, 11.5)))
    if recomputation:
        cost = replace(cost, forward=float(draw.uniform(0.2, 0.4)), vision_forward=float(draw.choice([0.25, 1.0])))
    return Batch(samples, cluster, cost)


def reckoned_s(plan: Plan, batch: Batch) -> float:
    """Seconds of a plan by the reference's costs: a group starts when its ranks are free, or its micro-batch does."""
    if plan.sync == "step":
        free_s = [batch.cost.fixed_s] * plan.cluster.num_ranks
        for group in plan.groups:
            seconds = batch.pack_time_s(group.sequences, group.ranks)
            end_s = max(free_s[rank] for rank in group.ranks) + seconds
            for rank in group.ranks:
                free_s[rank] = end_s
        return max(free_s)
    micro_batches: dict[int, list[Pack]] = {}
    for group in plan.groups:
        micro_batches.setdefault(group.micro_batch, []).append(Pack(group.sequences, group.ranks))
    return time_s(list(micro_batches.values()), batch)


def over_reference(sync: str, batch: Batch) -> float:
    """By which share the plan is longer than the reference's (negative: shorter)."""
    plan = plan_batch(batch.samples, batch.cluster, batch.cost, sync=sync)
    assert plan.predicted_time_s == pytest.approx(reckoned_s(plan, batch))
    return plan.predicted_time_s / REFERENCES[sync](batch) - 1


def check(sync: str, seeds: Sequence[int], gain: float = 0.02, **options: bool) -> None:
    over = {seed: over_reference(sync, random_batch(seed, **options)) for seed in seeds}
    longer = {seed: share for seed, share in over.items() if share > 1e-9}
    assert not longer, f"longer than the reference, by batch: {longer}"
    assert np.mean(list(over.values())) < -gain


@pytest.mark.parametrize("sync", sorted(REFERENCES))
def test_at_or_below_the_reference(sync: str) -> None:
    check(sync, range(20))


@pytest.mark.parametrize("sync", sorted(REFERENCES))
def test_at_or_below_the_reference_with_images_in_some_packs(sync: str) -> None:
    check(sync, range(4000, 4012), images=True)


@pytest.mark.parametrize("sync", sorted(REFERENCES))
def test_at_or_below_the_reference_with_activations_in_host_memory(sync: str) -> None:
    check(sync, range(5000, 5050), offload=True)


@pytest.mark.parametrize("sync", sorted(REFERENCES))
def test_at_or_below_the_reference_with_layers_that_run_again(sync: str) -> None:
    with_packs_that_recompute_little = 6281, 6322
    check(sync, [*range(6200, 6212), *with_packs_that_recompute_little], gain=0.01, recomputation=True)


@pytest.mark.parametrize("sync", sorted(REFERENCES))
def test_times_of_packs_with_images_that_run_again_are_the_formulas(sync: str) -> None:
    recomputed = 0
    for seed in range(6100, 6110):
        batch = random_batch(seed, unequal=seed % 2 == 0, images=True, recomputation=True)
        plan = plan_batch(batch.samples, batch.cluster, batch.cost, sync=sync)
        assert plan.predicted_time_s == pytest.approx(reckoned_s(plan, batch))
        assert plan.lower_bound_s <= plan.predicted_time_s * (1 + 1e-9)
        recomputed += sum(group.recomputed > 0 for group in plan.groups)
    assert recomputed > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sync", sorted(REFERENCES))
def test_at_or_below_the_reference_with_images_in_some_packs_of_200_batches(sync: str) -> None:
    check(sync, range(4000, 4200), images=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sync", sorted(REFERENCES))
def test_at_or_below_the_reference_with_activations_in_host_memory_on_200_batches(sync: str) -> None:
    check(sync, range(5000, 5200), offload=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sync", sorted(REFERENCES))
def test_at_or_below_the_reference_with_layers_that_run_again_on_200_batches(sync: str) -> None:
    check(sync, range(6200, 6400), gain=0.01, recomputation=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sync", sorted(REFERENCES))
def test_at_or_below_the_reference_on_1000_batches(sync: str) -> None:
    check(sync, range(1000))
