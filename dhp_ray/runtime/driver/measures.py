"""Measures of a finished step, computed from its plan and the ranks' reports. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.plan import Plan, Sample
from dhp_ray.planner.work import PAID_ONCE, Work
from dhp_ray.train.results import PackTime, StepResult, busy_s_of


def makespan_s(results: Sequence[StepResult]) -> float:
    """Return the seconds from the first start of a pack or encoder phase to the last end of one; each rank's times
    count from its own start of the step.
    """
    times = _times(results)
    return max(time.end_s for time in times) - min(time.start_s for time in times) if times else 0.0


def measured_idle_fraction(results: Sequence[StepResult]) -> float:
    """Return the share of the makespan in which ranks did not compute: they had no pack, or were blocked in an
    exchange.
    """
    span = makespan_s(results)
    busy = sum(time.busy_s for time in _times(results))
    return min(1.0, max(0.0, 1.0 - busy / (len(results) * span))) if span > 0 else 0.0


def _times(results: Sequence[StepResult]) -> list[PackTime]:
    return [time for result in results for time in (*result.pack_times, *result.encoder_times)]


def cost_error(plan: Plan, work: Work, results: Sequence[StepResult]) -> float | None:
    """Return the median relative error of the predicted seconds of the ranks' packs and images, at the speeds that the
    plan knew, against the measured seconds without waiting; None if nothing was measured.

    work: that of the plan.
    """
    measured_s = busy_s_of(work, results)
    cost = CostModel.from_json(plan.inputs["cost"])
    once_s = work.seconds(cost, PAID_ONCE)
    predicted_s = (work.seconds(cost) - once_s) / np.array(plan.cluster.speeds)[work.rank] + once_s
    known = np.isfinite(measured_s) & (measured_s > 0)
    return float(np.median(np.abs(predicted_s[known] / measured_s[known] - 1.0))) if known.any() else None


class TimeScale:
    """The running median of measured over predicted makespan. It scales how long the driver waits for a plan or a rank,
    never plans or reported values.
    """

    def __init__(self, window: int = 50) -> None:
        self.window = window
        self.ratios: list[float] = []

    @property
    def value(self) -> float:
        return statistics.median(self.ratios) if self.ratios else 1.0

    def known(self) -> float | None:
        """The median, None before the first observation."""
        return self.value if self.ratios else None

    def rescale(self, factor: float) -> None:
        """Note that predictions are from now on `factor` times what they were."""
        self.ratios = [ratio / factor for ratio in self.ratios]

    def observe(self, measured_s: float, predicted_s: float) -> None:
        if measured_s > 0 and predicted_s > 0:
            self.ratios = [*self.ratios, measured_s / predicted_s][-self.window :]


def trained_samples(plan: Plan, results: Sequence[StepResult], placeholders: Collection[str]) -> list[Sample]:
    """Return the samples that a step was trained on: those that could be used, if any of them had a valid token."""
    if not results[0].num_valid_tokens:
        return []
    return [sample for sample in plan.samples if sample.id not in placeholders]


def step_metrics(
    plan: Plan, results: Sequence[StepResult], step_time_s: float, generation: int, late: bool = False,
    placeholders: Collection[str] = (),
) -> dict[str, Any]:
    """Return the line of metrics.jsonl, with the fields of the run folder's contract. `placeholders`: the samples that
    could not be used. Without a valid token there is no loss (NaN).
    """
    first, trained = results[0], trained_samples(plan, results, placeholders)
    return {
        "step": first.step,
        "loss": first.loss_sum / first.num_valid_tokens if first.num_valid_tokens else math.nan,
        "learning_rate": first.learning_rate,
        "gradient_norm": first.gradient_norm,
        "num_tokens": sum(sample.num_tokens for sample in trained),
        "num_samples": len(trained),
        "step_time_s": step_time_s,
        "planning_time_s": plan.planning_time_s,
        "predicted_makespan_s": plan.makespan_s,
        "measured_makespan_s": makespan_s(results),
        "idle_fraction": measured_idle_fraction(results),
        "num_ranks": plan.cluster.num_ranks,
        "generation": generation,
        "degrees": {str(degree): count for degree, count in plan.degrees().items()},
        "planner": plan.planner,
        "late": late,
        **encoder_metrics(plan, results),
        **offload_metrics(plan, results),
        **recomputation_metrics(plan),
    }


def encoder_metrics(plan: Plan, results: Sequence[StepResult]) -> dict[str, Any]:
    """Return the encoder metrics of a step whose images were encoded apart from its packs, else nothing: the seconds of
    the slowest rank, without waiting, before the packs and after them; the longest sum of both over the mean sum; the
    bytes of features sent to other ranks.
    """
    if not plan.vision.apart:
        return {}
    phases = [[time.busy_s for time in result.encoder_times] for result in results]
    both = [sum(seconds) for seconds in phases]
    mean = statistics.fmean(both)
    return {"encoder": {
        "layout": plan.vision.layout, "keeps": plan.vision.keeps,
        "encode_s": max((seconds[0] for seconds in phases if seconds), default=0.0),
        "backward_s": max((seconds[1] for seconds in phases if len(seconds) > 1), default=0.0),
        "imbalance": max(both) / mean if mean > 0 else 1.0,
        "exchanged_bytes": sum(result.exchanged_bytes for result in results)}}


def offload_metrics(plan: Plan, results: Sequence[StepResult]) -> dict[str, Any]:
    """Return the offload metrics of a step with packs that moved activations to host memory, else nothing: how many
    packs did, the largest share of layers, and the bytes moved on all ranks.
    """
    shares = [group.offload for group in plan.groups if group.offload]
    if not shares:
        return {}
    return {"offload": {"packs": len(shares), "largest_share": max(shares),
                        "moved_bytes": sum(result.moved_bytes for result in results)}}


def recomputation_metrics(plan: Plan) -> dict[str, Any]:
    """Return the recomputation metrics of a step whose plan recomputes layers of some packs, else nothing: of how many
    packs, and the mean share of layers over the tokens of all packs.
    """
    num_packs = sum(group.recomputed > 0 for group in plan.groups)
    if not num_packs:
        return {}
    tokens = [sum(plan.samples[row].num_tokens for row in group.pack.sequences) for group in plan.groups]
    again = sum(group.recomputed * count for group, count in zip(plan.groups, tokens))
    return {"recomputation": {"packs": num_packs, "mean_share": again / sum(tokens)}}


def step_extra(plan: Plan, results: Sequence[StepResult], data_wait_s: float, epoch: int) -> dict[str, Any]:
    """Return what TensorBoard and the console show in addition to the metrics."""
    first = results[0]
    return {
        "applied": first.applied, "epoch": epoch,
        "num_valid_tokens": first.num_valid_tokens, "data_wait_s": data_wait_s, "lower_bound_s": plan.lower_bound_s,
        "prefetch_wait_s": max(result.data_wait_s for result in results),
        **{f"pool_{name}": count for name, count in first.pool.items()},
    }
