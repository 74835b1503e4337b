"""Commits finished steps, measures them by pure functions of plan and reports, and seals checkpoints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray

from dhp_ray.data.stream import Cursor
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.work import PAID_ONCE, TERMS, Work, work_of
from dhp_ray.planner.plan.types import Plan, Sample
from dhp_ray.runtime.driver.dispatch import FinishedStep
from dhp_ray.runtime.driver.feedback import busy_s
from dhp_ray.runtime.driver.session import Session
from dhp_ray.runtime.messages import Notice, RunError, StepCommitted
from dhp_ray.runtime.records.checkpoints import Manifest
from dhp_ray.storage import STORAGE_TIMEOUT_S
from dhp_ray.train.results import StepResult, busy_s_of, last_end_s


@dataclass
class Commits:
    """The one writer of steps and checkpoints."""

    session: Session
    _saves: list[ray.ObjectRef] = field(default_factory=list)  # those that stage a checkpoint, between two steps
    # saves under way: what to seal, which ranks are done
    _unsealed: dict[int, tuple[Manifest, set[int]]] = field(default_factory=dict)
    _noted_step: int = 0

    def recovered(self, finished: Sequence[FinishedStep], evaluated_at: Callable[[int], dict[str, float]]) -> None:
        """Commit what the previous generation had finished, once the state after it has its replicas."""
        if finished:
            with self.session.group.waits.on(f"the copies of the state after step {finished[-1].step}"):
                self.session.group.call("mirrored")
        for step in finished:
            self.commit(replace(step, evaluated=evaluated_at(step.step) if step is finished[-1] else {}))

    def commit(self, finished: FinishedStep) -> None:
        """Record a finished step; refuse one in which a rank ran another plan than the one written down."""
        session, records, plan = self.session, self.session.records, finished.plan
        for result in finished.results:
            if result.plan_id != finished.plan_id:
                raise RunError(f"step {finished.step}: rank {result.rank} ran plan {result.plan_id}; the plan file is "
                               f"of {finished.plan_id}")
        work = work_of(plan)
        metrics = step_metrics(plan, finished.results, finished.step_time_s, session.current.number, finished.late,
                               finished.placeholders)
        metrics |= finished.evaluated
        if (error := cost_error(plan, work, finished.results)) is not None:
            metrics["cost_error"] = error
        extra = step_extra(plan, finished.results, finished.data_wait_s, finished.epoch)
        refits = session.history.refits  # the plan may have been made before the last refit
        growth = work.growth(CostModel.from_json(plan.inputs["cost"]), refits.cost) if refits.on else 1.0
        session.history.scale.observe(metrics["measured_makespan_s"], growth * plan.makespan_s)
        session.history.step_times_s.append(finished.step_time_s)
        for sample_id, reason in (finished.skipped | finished.placeholders).items():
            if records.skip(sample_id, reason, finished.step, finished.epoch):
                session.tell(Notice(f"sample {sample_id} left out: {reason}"))
        if not extra["applied"]:
            records.event("update_skipped", step=finished.step, gradient_norm=metrics["gradient_norm"],
                          sample_ids=[sample.id for sample in plan.samples])
            session.tell(Notice(f"step {finished.step}: " + (
                "the gradient is not finite; update skipped on all ranks" if extra["num_valid_tokens"]
                else "no sample can be used; nothing is updated")))
        trained = used_samples(plan, finished.results, finished.placeholders) if extra["applied"] else []
        records.commit(finished.step, [sample.id for sample in trained], metrics)
        session.reader.batches.pop(finished.step, None)
        # after a recovery ranks may be others, though there are as many
        same_ranks = finished.generation == session.current.number and len(finished.results) == session.group.size
        shape, sharing = session.group.ranks.shape, session.current.choice.mode.expert_parallel
        # ranks that share experts compute for the packs of others
        if same_ranks and shape.ranks_that_share(sharing, session.group.size) == 1:
            self._observe_speeds(finished, work)
            self._refit(finished, work)
        extra |= {f"speed_{rank}": speed for rank, speed in enumerate(session.current.meter.planned())}
        session.scalars.step(metrics, extra)
        session.watch.step(finished.step, plan, finished.results, session.scalars)
        session.tell(StepCommitted(metrics))
        self._note_results(finished.step, finished.results)

    def save_when_due(self, step: int, results: Sequence[StepResult], cursor: Cursor, last: bool) -> None:
        """Save the state after `step`, of which these are the results; its batch ended at `cursor`."""
        every = self.session.config.checkpoint.every_steps
        if last or (every and step % every == 0):
            self._note_results(step, results)
            self.save(step, cursor)

    def save(self, step: int, cursor: Cursor) -> None:
        """Have all ranks stage their state after `step`; they write it in the background. Waits for the save before: a
        rank that waited for it within the next step would count as stuck.
        """
        session = self.session
        if self._unsealed:
            self.finish_saves()
        self._unsealed[step] = (Manifest(step, cursor, session.group.size, session.config.planner.sync,
                                         session.current.number, session.history.refits.to_json()), set())
        self._saves = session.group.start("save", step)  # ranks run it between this step and the next

    def finish_saves(self) -> None:
        """Wait for the saves under way. GroupError: a rank is STORAGE_TIMEOUT_S behind another."""
        group = self.session.group
        with group.waits.on(f"the checkpoint of step {max(self._unsealed, default=0)}"):
            group.collect(self._saves)
            saves = group.collect(group.start("finish_save"), behind_s=STORAGE_TIMEOUT_S)
        for rank, (saved_steps, error) in enumerate(saves):
            self._note_saves(rank, saved_steps, error)
        if self._unsealed:  # those that failed broke their group; no rank is in another collective here
            self._unsealed.clear()
            group.call("renew_state_group")

    def save_last(self) -> None:
        """Save the state after the last step if no checkpoint has it: that save broke, or was not due."""
        self.finish_saves()
        last_step = self.session.records.last_step
        if last_step and self.session.checkpoints.newest_step() < last_step:
            self.save(last_step, self.session.records.read_plan(last_step)["batch"]["cursor"])
            self.finish_saves()

    def forget_saves(self) -> None:
        """Forget the saves under way: their group is gone, and half-written checkpoints have no manifest."""
        self._saves = []
        self._unsealed.clear()
        self._noted_step = 0

    def _note_results(self, step: int, results: Sequence[StepResult]) -> None:
        if step != self._noted_step:
            self._noted_step = step
            for result in results:
                self._note_saves(result.rank, list(result.saved_steps), result.save_error)

    def _note_saves(self, rank: int, saved_steps: list[int], error: str) -> None:
        """Report a failed save, and seal each checkpoint once every rank has written its part."""
        session = self.session
        if error:
            session.records.event("save_failed", rank=rank, error=error)
            session.tell(Notice(f"checkpoint not saved (rank {rank}): {error}; the run goes on, the next save is "
                                "tried"))
        for step in saved_steps:
            if step not in self._unsealed:
                continue
            manifest, done = self._unsealed[step]
            done.add(rank)
            if len(done) == manifest.num_ranks:
                session.flush()
                not_deleted = session.checkpoints.seal(manifest)
                session.records.event("checkpoint", step=step)
                session.note_not_deleted(not_deleted)
                for failure in not_deleted:
                    session.tell(Notice(f"files of an older checkpoint are left: {failure}"))
                del self._unsealed[step]

    def _refit(self, finished: FinishedStep, work: Work) -> None:
        """Refit the costs to the step's packs; steps whose planning begins from now on use them."""
        session, refits = self.session, self.session.history.refits
        before = refits.cost
        if found := refits.observe(work, busy_s_of(work, finished.results)):
            session.current.dispatcher.cost = refits.cost
            session.history.scale.rescale(work.growth(before, refits.cost))
            terms = {name: [float(f"{getattr(cost, name):.4g}") for cost in (before, refits.cost)] for name in TERMS}
            session.records.event(
                "refit", step=finished.step, terms={name: pair for name, pair in terms.items() if pair[0] != pair[1]},
                error_before=round(found.error_before, 4), error_after=round(found.error_after, 4))

    def _observe_speeds(self, finished: FinishedStep, work: Work) -> None:
        session = self.session
        cost, num_ranks = session.current.dispatcher.cost, session.group.size
        session.current.meter.observe(work.seconds_of_ranks(cost, num_ranks), busy_s(finished.results, num_ranks),
                                      work.seconds_of_ranks(cost, num_ranks, PAID_ONCE))
        for rank, slow in session.current.meter.news().items():
            speed, place = session.current.meter.measured[rank], session.group.members[rank].place
            session.records.event("slow" if slow else "no_longer_slow", rank=rank, step=finished.step,
                                  speed=round(speed, 2))
            session.tell(Notice(f"rank {rank} ({place}) {'is slow' if slow else 'is no longer slow'}: {speed:.2f} of "
                                "the others' speed; plans follow"))


def makespan_s(results: Sequence[StepResult]) -> float:
    """Return the seconds from the first start of a pack or encoder phase to the last end, each on its rank's clock."""
    return last_end_s(results) - min((time.start_s for result in results for time in result.times), default=0.0)


def measured_idle_fraction(results: Sequence[StepResult]) -> float:
    """Return the share of the makespan in which ranks had no pack, or were blocked in an exchange."""
    span = makespan_s(results)
    busy = sum(time.busy_s for result in results for time in result.times)
    return min(1.0, max(0.0, 1.0 - busy / (len(results) * span))) if span > 0 else 0.0


def cost_error(plan: Plan, work: Work, results: Sequence[StepResult]) -> float | None:
    """Return the median error of predicted seconds of packs and images; None: nothing measured."""
    measured_s = busy_s_of(work, results)
    cost = CostModel.from_json(plan.inputs["cost"])
    once_s = work.seconds(cost, PAID_ONCE)
    predicted_s = (work.seconds(cost) - once_s) / np.array(plan.cluster.speeds)[work.rank] + once_s
    known = np.isfinite(measured_s) & (measured_s > 0)
    return float(np.median(np.abs(predicted_s[known] / measured_s[known] - 1.0))) if known.any() else None


def used_samples(plan: Plan, results: Sequence[StepResult], placeholders: Collection[str]) -> list[Sample]:
    """Return the samples that a step's loss is of: those that could be used, if any of them had a valid token."""
    if not results[0].num_valid_tokens:
        return []
    return [sample for sample in plan.samples if sample.id not in placeholders]


def step_metrics(
    plan: Plan, results: Sequence[StepResult], step_time_s: float, generation: int, late: bool = False,
    placeholders: Collection[str] = (),
) -> dict[str, Any]:
    """Return the line of metrics.jsonl. `placeholders`: unusable samples. Without valid tokens: no loss (NaN)."""
    first, used = results[0], used_samples(plan, results, placeholders)
    return {
        "step": first.step,
        "loss": first.loss_sum / first.num_valid_tokens if first.num_valid_tokens else math.nan,
        "learning_rate": first.learning_rate,
        "gradient_norm": first.gradient_norm,
        "num_tokens": sum(sample.num_tokens for sample in used),
        "num_samples": len(used),
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
        **({"experts": first.experts._asdict()} if first.experts else {}),
    }


def encoder_metrics(plan: Plan, results: Sequence[StepResult]) -> dict[str, Any]:
    """Return, if images are apart from packs, the slowest rank's seconds before and after these, without waiting, the
    longest sum of both over the mean sum, and the bytes of features sent to other ranks.
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
    """Return, if packs moved activations to the host: how many, the largest share of layers, bytes of all ranks."""
    shares = [group.offload for group in plan.groups if group.offload]
    if not shares:
        return {}
    return {"offload": {"packs": len(shares), "largest_share": max(shares),
                        "moved_bytes": sum(result.moved_bytes for result in results)}}


def recomputation_metrics(plan: Plan) -> dict[str, Any]:
    """Return, if packs recomputed layers: how many did, and the mean share of layers over all tokens."""
    num_packs = sum(group.recomputed > 0 for group in plan.groups)
    if not num_packs:
        return {}
    tokens = [sum(plan.samples[row].num_tokens for row in group.sequences) for group in plan.groups]
    again = sum(group.recomputed * count for group, count in zip(plan.groups, tokens))
    return {"recomputation": {"packs": num_packs, "mean_share": again / sum(tokens)}}


def step_extra(plan: Plan, results: Sequence[StepResult], data_wait_s: float, epoch: int) -> dict[str, Any]:
    """Return what TensorBoard shows in addition to the metrics."""
    first = results[0]
    return {
        "applied": first.applied, "epoch": epoch,
        "num_valid_tokens": first.num_valid_tokens, "data_wait_s": data_wait_s, "lower_bound_s": plan.lower_bound_s,
        "prefetch_wait_s": max(result.data_wait_s for result in results),
        **{f"pool_{name}": count for name, count in first.pool.items()},
    }
