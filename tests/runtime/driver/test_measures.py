import dataclasses
import math

import numpy as np
import pytest

from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.work import work_of
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Plan, Sample, VisionPlan
from dhp_ray.runtime.driver.commit import cost_error, makespan_s, measured_idle_fraction, step_metrics
from dhp_ray.runtime.driver.feedback import TimeScale
from dhp_ray.train.results import ExpertsUsed, PackTime, StepResult


def result(rank: int, *times: PackTime, loss_sum: float = 12.0, num_valid_tokens: int = 4) -> StepResult:
    return StepResult(step=3, rank=rank, loss_sum=loss_sum, num_valid_tokens=num_valid_tokens, gradient_norm=1.0,
                      learning_rate=1e-3, applied=True,
                      state_version=3, step_time_s=5.0, data_wait_s=0.0, pack_times=times, pool={"hits": 0})


def test_idle_time_is_what_ranks_neither_compute_nor_have_packs_for() -> None:
    results = [result(0, PackTime(0, 1.0, 3.0, 0.5), PackTime(1, 3.0, 5.0, 0.0)), result(1, PackTime(0, 1.0, 3.0, 1.0)),
               result(2)]
    assert makespan_s(results) == 4.0
    assert measured_idle_fraction(results) == pytest.approx(1 - (1.5 + 2.0 + 1.0) / (3 * 4.0))


def test_a_step_without_packs_has_no_makespan() -> None:
    assert makespan_s([result(0)]) == 0.0
    assert measured_idle_fraction([result(0)]) == 0.0


def test_the_scale_is_the_running_median_of_measured_over_predicted() -> None:
    scale = TimeScale(window=3)
    assert scale.known() is None
    for measured in (2.0, 4.0, 100.0, 6.0):
        scale.observe(measured, 2.0)
    assert scale.known() == 3.0  # the median of 2, 50 and 3
    scale.observe(0.0, 1.0)
    scale.observe(1.0, 0.0)
    assert scale.known() == 3.0
    scale.rescale(2.0)  # predictions have doubled
    assert scale.known() == 1.5


def test_metrics_have_the_global_mean_loss_and_the_degrees() -> None:
    samples = (Sample("a", 10, 4, ((1, 4, 4),)), Sample("b", 6), Sample("c", 5))
    plan = Plan("dhp", "step", ClusterSpec(3, 3, 8), samples,
                (Pack((0, 1), (0,), 1.0, encoders=(0,)), Pack((2,), (1,), 0.5),
                 Pack((2,), (2,), 0.5)), 1.25, 0.9, 0.002, {"cost": {"fixed_s": 0.25}})
    metrics = step_metrics(plan, [result(0, PackTime(0, 0.0, 2.0, 0.0)), result(1), result(2)], 2.5, 1, late=True)
    contract = (
        "step loss learning_rate gradient_norm num_tokens num_samples step_time_s planning_time_s predicted_makespan_s "
        "measured_makespan_s idle_fraction num_ranks generation degrees planner late"
    )
    assert contract.split() == list(metrics)
    assert metrics["loss"] == 3.0
    assert metrics["degrees"] == {"1": 2, "2": 1}
    with_experts = [result(rank)._replace(experts=ExpertsUsed(0.75, 1.5)) for rank in range(3)]
    assert step_metrics(plan, with_experts, 2.5, 1)["experts"] == {"entropy": 0.75, "max_load": 1.5}
    assert (metrics["num_tokens"], metrics["num_samples"], metrics["num_ranks"]) == (25, 3, 3)
    assert (metrics["predicted_makespan_s"], metrics["measured_makespan_s"]) == (1.0, 2.0)
    assert (metrics["learning_rate"], metrics["gradient_norm"], metrics["planner"],
            metrics["late"]) == (1e-3, 1.0, "dhp", True)


def test_metrics_count_what_was_trained() -> None:
    """Not what could not be used: placeholders keep their places, and with nothing else there is no loss."""
    samples = (Sample("a", 10, 4, ((1, 4, 4),)), Sample("b", 6))
    plan = Plan("dhp", "step", ClusterSpec(2, 2, 20), samples,
                (Pack((0,), (0,), 1.0, encoders=(0,)), Pack((1,), (1,), 0.5)), 1.25, 0.9)
    some = step_metrics(plan, [result(0), result(1)], 1.0, 1, placeholders={"a": "truncated"})
    assert (some["num_tokens"], some["num_samples"], some["loss"]) == (6, 1, 3.0)
    none = [result(rank, loss_sum=0.0, num_valid_tokens=0) for rank in range(2)]
    for placeholders in ({"a": "truncated", "b": "truncated"}, {}):
        metrics = step_metrics(plan, none, 1.0, 1, placeholders=placeholders)
        assert (metrics["num_tokens"], metrics["num_samples"]) == (0, 0)
        assert math.isnan(metrics["loss"])


def test_the_cost_error_is_the_median_of_parts_of_packs_at_the_speeds_that_the_plan_knew() -> None:
    cost = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1.0}, pack_s=1.0)
    plan = Plan("dhp", "step", ClusterSpec(2, 2, 20, (1.0, 0.5)), (Sample("a", 9), Sample("b", 4), Sample("c", 8)),
                (Pack((0,), (0,), 1.0), Pack((1,), (1,), 1.0),
                 Pack((0, 1), (2,), 1.0)), 1.0, 0.9, inputs={"cost": cost.to_json()})
    work = work_of(plan)  # of rank 0: 10 s and 5 s; of rank 1, half as fast but for what a pack pays once: 9 s, 9 s
    results = [result(0, PackTime(0, 0.0, 8.0, 0.0), PackTime(2, 8.0, 14.0, 1.0)),
               result(1, PackTime(1, 0.0, 12.5, 0.0), PackTime(2, 12.5, 30.0, 5.0))]
    assert cost_error(plan, work, results) == pytest.approx(np.median([10 / 8 - 1, 0.0, 1 - 9 / 12.5, 1 - 9 / 12.5]))
    assert cost_error(plan, work, results[:1]) == pytest.approx(0.125)  # rank 1 was lost
    assert cost_error(plan, work, []) is None


def test_metrics_of_images_encoded_apart() -> None:
    plan = Plan("dhp", "step", ClusterSpec(2, 2, 20), (Sample("a", 10, 4, ((1, 4, 4),)),),
                (Pack((0,), (0,), 1.0, encoders=(1,)),), 1.0, 0.9, vision=VisionPlan("world", False))
    results = [with_phases(result(0, PackTime(0, 1.0, 2.0, 0.0)), (0.0, 1.0, 1.0), (2.0, 4.0, 2.0), 0),
               with_phases(result(1), (0.0, 1.0, 0.0), (2.5, 4.0, 0.5), 640)]
    assert step_metrics(plan, results, 5.0, 1)["encoder"] == {
        "layout": "world", "keeps": False, "encode_s": 1.0, "backward_s": 1.0, "imbalance": 2.0, "exchanged_bytes": 640}
    assert makespan_s(results) == 4.0
    assert measured_idle_fraction(results) == pytest.approx(1 - (1.0 + 2.0) / (2 * 4.0))
    assert "encoder" not in step_metrics(dataclasses.replace(plan, vision=VisionPlan()), results, 5.0, 1)


def test_of_a_frozen_encoder_and_of_no_image_there_is_less_to_measure() -> None:
    """One phase; and a batch whose images cannot be used, so that nothing is encoded."""
    plan = Plan("dhp", "step", ClusterSpec(2, 2, 20), (Sample("a", 10, 4, ((1, 4, 4),)),),
                (Pack((0,), (0,), 1.0, encoders=(1,)),), 1.0, 0.9, vision=VisionPlan("world"))
    results = [result(0, PackTime(0, 1.0, 2.0, 0.0))._replace(encoder_times=(PackTime(-1, 0.0, 1.0, 0.75),)),
               result(1)._replace(encoder_times=(PackTime(-1, 0.0, 0.75, 0.0),), exchanged_bytes=640)]
    assert step_metrics(plan, results, 5.0, 1)["encoder"] == {
        "layout": "world", "keeps": True, "encode_s": 0.75, "backward_s": 0.0, "imbalance": 1.5, "exchanged_bytes": 640}
    nothing = [found._replace(encoder_times=(), exchanged_bytes=0) for found in results]
    assert step_metrics(plan, nothing, 5.0, 1)["encoder"] == {
        "layout": "world", "keeps": True, "encode_s": 0.0, "backward_s": 0.0, "imbalance": 1.0, "exchanged_bytes": 0}


def test_metrics_of_activations_in_host_memory() -> None:
    plan = Plan("dhp", "step", ClusterSpec(2, 2, 20), (Sample("a", 10), Sample("b", 4)),
                (Pack((0,), (0,), 1.0, offload=0.25), Pack((1,), (1,), 1.0)), 1.0, 0.9)
    results = [result(0, PackTime(0, 1.0, 2.0, 0.0))._replace(moved_bytes=640), result(1)]
    assert step_metrics(plan, results, 5.0, 1.0, 1)["offload"] == {
        "packs": 1, "largest_share": 0.25, "moved_bytes": 640}
    plain = dataclasses.replace(plan, groups=tuple(dataclasses.replace(group, offload=0.0) for group in plan.groups))
    assert "offload" not in step_metrics(plain, results, 5.0, 1.0, 1)
    assert "recomputation" not in step_metrics(plain, results, 5.0, 1.0, 1)
    again = tuple(dataclasses.replace(group, recomputed=share) for group, share in zip(plain.groups, (0.7, 0.0)))
    assert step_metrics(dataclasses.replace(plain, groups=again), results, 5.0, 1.0, 1)["recomputation"] == {
        "packs": 1, "mean_share": 0.5}, "7 of 14 tokens"


def with_phases(
    found: StepResult, before: tuple[float, float, float], after: tuple[float, float, float], num_bytes: int
) -> StepResult:
    """With phases of the encoder: begin, end, blocked."""
    return found._replace(encoder_times=(PackTime(-1, *before), PackTime(-1, *after)), exchanged_bytes=num_bytes)
