"""A step as it is simulated: as planned where everything is as the planner thinks, and what changes where it is not."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, idle_fraction, plan_batch, plan_starts
from dhp_ray.planner.cost.work import work_of
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, LayerShare, Offload, Recomputation
from dhp_ray.planner.problem import Problem, problem_of
from dhp_ray.planner.timeline import apart_timeline
from dhp_ray.runtime.driver.commit import makespan_s, measured_idle_fraction
from dhp_ray.runtime.driver.feedback import busy_s
from dhp_ray.simulate.step import SimulatedStep, simulate_step

COST = CostModel(1e-8, 1e-3, 1e5, 0.2, {"intra": 1e9, "inter": 2e8}, communication="ring", overlap=0.9, latency_s=1e-3,
                 pack_s=0.01, vision_linear_s=2e-4, vision_quadratic_s=1e-8, feature_bytes=1e4,
                 encoder_pass_s=4e-3, attention_block=256, update_s=0.05,
                 offload_bytes_per_token=1e6, offload_bytes_per_patch=1e5, host_bytes_per_s=1e9)
OFFLOAD, RECOMPUTATION = Offload(0.8, 1500, 3000, 2000), Recomputation(0.8, 1500, 3000, 2000)


def cluster_of(num_ranks: int, beyond: LayerShare = NO_OFFLOAD, **options: tuple[float, ...]) -> ClusterSpec:
    name = "recomputation" if isinstance(beyond, Recomputation) else "offload"
    return replace(ClusterSpec(num_ranks, 4, 2000, **options), **{name: beyond})  # type: ignore[arg-type]


def batch(seed: int, count: int, longest: int) -> list[Sample]:
    random_ = random.Random(seed)
    samples = []
    for index in range(count):
        grids = tuple((1, random_.randint(2, 40), random_.randint(2, 40)) for _ in range(random_.choice([0, 0, 1, 5])))
        tokens = min(longest, int(random_.lognormvariate(6.5, 1.2)) + 1)
        vision = min(tokens - 1, sum(t * h * w for t, h, w in grids) // 4)
        samples.append(Sample(str(index), tokens - vision, vision, grids if vision else ()))
    return samples


def true_problem(plan: Plan, cost: CostModel = COST, speeds: tuple[float, ...] = ()) -> Problem:
    cluster = replace(plan.cluster, speeds=speeds or plan.cluster.speeds)
    return problem_of(plan.samples, cluster, cost, plan.sync, deals_images=False)


def simulated(plan: Plan, **true: object) -> SimulatedStep:
    return simulate_step(plan, true_problem(plan, **true))  # type: ignore[arg-type]


CASES = [pytest.param(seed, sync, encoder, marks=[pytest.mark.slow] * ((seed + seed // 2 + number) % 2))
         for seed in range(12)
         for number, (sync, encoder) in enumerate(product(("step", "micro_batch"), ("group", "world")))]
"""In make test each seed in two of the modes, and each mode with six of the seeds."""


@pytest.mark.parametrize(("seed", "sync", "encoder"), CASES)
def test_where_all_is_as_planned_the_makespan_is_the_plans(seed: int, sync: str, encoder: str) -> None:
    random_ = random.Random(seed)
    num_ranks = random_.choice([1, 3, 8, 13, 32])
    nodes = tuple(sorted(random_.randrange(4) for _ in range(num_ranks))) if seed % 2 else ()
    speeds = tuple(random_.choice([1.0, 0.8, 0.3]) for _ in range(num_ranks)) if seed % 3 == 0 else ()
    communication = random_.choice(["ring", "all_to_all"])
    cost = replace(COST, communication=communication)
    cluster = cluster_of(num_ranks, (NO_OFFLOAD, RECOMPUTATION, OFFLOAD, OFFLOAD)[seed % 4], speeds=speeds, nodes=nodes)
    planner = random_.choice(["dhp", "static_best", "pow2", "dhp_paper"])
    plan = plan_batch(batch(seed, 4 * num_ranks, min(20_000, cluster.max_tokens)), cluster, cost, sync=sync,
                      encoder=encoder, planner=planner)
    step = simulated(plan, cost=cost)
    assert step.time_s == pytest.approx(plan.predicted_time_s, rel=1e-9)
    starts, end = plan_starts(plan)
    shift = plan.fixed_s if sync == "step" else 0.0  # what is paid once comes after the packs
    assert step.starts_s + shift == pytest.approx(np.array(starts), rel=1e-9, abs=1e-12)
    assert step.time_s == pytest.approx(end, rel=1e-9)
    if apart := apart_timeline(plan):
        assert step.encoder is not None
        assert step.encoder.end_s == pytest.approx(apart.end_s + plan.fixed_s - shift)
    assert sum(step.shares().values()) == pytest.approx(1.0)


@pytest.mark.parametrize("beyond", [NO_OFFLOAD, OFFLOAD, RECOMPUTATION], ids=["off", "offload", "recomputation"])
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_where_the_time_of_ranks_went(sync: str, beyond: LayerShare) -> None:
    samples = [replace(sample, vision_tokens=0, vision_grids=()) for sample in batch(2, 60, 9000)]
    plan = plan_batch(samples, cluster_of(8, beyond), COST, sync=sync)
    assert any(group.offload for group in plan.groups) == (beyond is OFFLOAD)
    assert any(group.recomputed for group in plan.groups) == (beyond is RECOMPUTATION)
    step = simulated(plan)
    shares, rank_s = step.shares(), 8 * step.time_s
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["idle"] == pytest.approx(idle_fraction(plan), abs=1e-9)
    assert shares["compute"] * rank_s == pytest.approx(sum(work_of(plan).seconds(COST)))
    num_micro_batches = len({group.micro_batch for group in plan.groups})
    assert shares["update"] * rank_s == pytest.approx(8 * (COST.fixed_s * num_micro_batches + plan.update_s))


@pytest.mark.parametrize("communication", ["ring", "all_to_all"])
@pytest.mark.parametrize("encoder", ["group", "world"])
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_packs_of_several_ranks_that_run_again_take_what_their_plan_says(
    sync: str, encoder: str, communication: str
) -> None:
    cost = replace(COST, communication=communication, overlap=0.3, bandwidth_bytes_per_s={"intra": 3e8, "inter": 2e8})
    long = [Sample(f"long {row}", tokens) for row, tokens in enumerate((23_000, 10_500, 5500))]
    plan = plan_batch([*long, *batch(11, 20, 2000)], cluster_of(8, RECOMPUTATION), cost, sync=sync, encoder=encoder)
    assert max(group.degree for group in plan.groups if group.recomputed) > 1
    step = simulated(plan, cost=cost)
    assert step.time_s == pytest.approx(plan.predicted_time_s, rel=1e-9)
    took_s = [group.predicted_time_s for group in plan.groups]
    if sync == "step":
        assert step.left_s - step.starts_s == pytest.approx(np.array(took_s), rel=1e-9)
    nominal = work_of(plan).seconds_of_ranks(cost, 8)
    assert step.busy_s().tolist() == pytest.approx(nominal)


@pytest.mark.parametrize(("gather_s", "seconds"), [(0.0, 7.0), (6.0, 7.0), (8.0, 8.0)])
def test_ranks_of_a_micro_batch_go_on_together(gather_s: float, seconds: float) -> None:
    """After the longest encoding, 3 s, plus the longest rest, 4 s, or when the layers' parameters have travelled."""
    cost = CostModel(0.0, 1.0, 0.0, 0.5, {2: 1e9}, vision_linear_s=1.0, latency_s=9.0, gather_s=gather_s)
    samples = [Sample("images", 0, 2, ((1, 1, 3),)), Sample("text", 4)]
    plan = plan_batch(samples, ClusterSpec(2, 2, 4), cost, sync="micro_batch")
    step = simulated(plan, cost=cost)
    assert step.time_s == pytest.approx(plan.predicted_time_s) == 0.5 + seconds
    assert step.left_s.tolist() == [0.5 + seconds] * 2 == [step.packs_end_s] * 2
    results = step.results(1)
    assert sorted(busy_s(results, 2)) == [4.0, 5.0], "what they wait is not compute"
    assert makespan_s(results) == pytest.approx(seconds) == step.makespan_s == plan.makespan_s, "from when packs begin"


def test_ranks_report_what_the_drivers_own_measures_understand() -> None:
    plan = plan_batch(batch(3, 40, 8000), ClusterSpec(8, 4, 2000), COST)
    speeds = (1.0,) * 7 + (0.5,)
    step = simulated(plan, speeds=speeds)
    results = step.results(7)
    assert [result.rank for result in results] == list(range(8))
    assert makespan_s(results) == pytest.approx(step.makespan_s)
    busy, nominal = busy_s(results, 8), work_of(plan).seconds_of_ranks(COST, 8)
    assert busy == pytest.approx(step.busy_s().tolist())
    seen = [wanted / took for wanted, took in zip(nominal, busy)]  # what is paid once a pack is no slower there
    assert seen[:7] == pytest.approx([1.0] * 7)
    assert 0.5 <= seen[7] < 0.6
    assert measured_idle_fraction(results) == pytest.approx(1 - sum(busy) / 8 / step.packs_end_s)
    for sync in ("step", "micro_batch"):
        world = plan_batch(batch(3, 40, 8000), ClusterSpec(8, 4, 2000), COST, sync=sync, encoder="world")
        step = simulated(world)
        assert step.encoder is not None
        assert busy_s(step.results(1), 8) == pytest.approx(step.busy_s().tolist())
        assert makespan_s(step.results(1)) == pytest.approx(step.makespan_s)


def test_a_slow_rank_holds_up_those_that_it_runs_with() -> None:
    plan = plan_batch([Sample("a", 3000), Sample("b", 1500)], ClusterSpec(3, 8, 1500), COST)
    assert [group.degree for group in plan.groups] == [2, 1]
    speeds = tuple(0.5 if rank == plan.groups[0].ranks[0] else 1.0 for rank in range(3))
    alone, step = simulated(plan), simulated(plan, speeds=speeds)
    assert step.left_s[0] > 1.6 * alone.left_s[0]
    assert step.left_s[1] == alone.left_s[1]


def test_a_micro_batch_takes_what_its_parameters_take_to_travel() -> None:
    cost = replace(COST, gather_s=3.0)
    plan = plan_batch([Sample("a", 100), Sample("b", 300)], ClusterSpec(2, 2, 200), cost, sync="micro_batch")
    rounds = len({group.micro_batch for group in plan.groups})
    step = simulated(plan, cost=cost)
    assert step.time_s == pytest.approx(rounds * (3.0 + COST.fixed_s) + COST.update_s)
    assert step.shares()["idle"] > 0.5


def test_packs_that_take_longer_than_their_cost() -> None:
    plan = plan_batch(batch(5, 30, 4000), ClusterSpec(4, 4, 2000), COST)
    problem = true_problem(plan)
    twice = simulate_step(plan, problem, stretch=np.full(len(plan.groups), 2.0))
    assert twice.busy_s().sum() > 1.9 * simulate_step(plan, problem).busy_s().sum()


def test_memory_is_the_plans() -> None:
    cost = replace(COST, memory_bytes_per_token=10.0, resident_bytes=100.0)
    plan = plan_batch([Sample("a", 100)], ClusterSpec(2, 2, 200), cost)
    used = plan.groups[0].ranks
    assert [value > 100.0 for value in simulated(plan, cost=cost).memory_bytes()] == [rank in used for rank in (0, 1)]
