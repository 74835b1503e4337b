"""Commits finished steps: skipped samples, metrics and, last, the ledger. Seals checkpoints, which are whole once every
rank has written its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.work import PAID_ONCE, TERMS, Work, work_of
from dhp_ray.runtime.driver.calls import Calls
from dhp_ray.runtime.driver.measures import cost_error, step_extra, step_metrics, trained_samples
from dhp_ray.runtime.driver.session import Session
from dhp_ray.runtime.driver.speeds import busy_s
from dhp_ray.runtime.driver.stages import FinishedStep
from dhp_ray.runtime.messages import Notice, RunError, StepCommitted
from dhp_ray.runtime.records.checkpoints import Manifest
from dhp_ray.storage import STORAGE_TIMEOUT_S
from dhp_ray.train.results import StepResult, busy_s_of


@dataclass
class Commits:
    """The one writer of steps and checkpoints."""

    session: Session
    _saves: Calls = field(default_factory=Calls)  # those that stage a checkpoint, between two steps
    # saves under way: what to seal, which ranks are done
    _unsealed: dict[int, tuple[Manifest, set[int]]] = field(default_factory=dict)
    _noted_step: int = 0

    def recovered(self, finished: list[FinishedStep], evaluated_at: Callable[[int], dict[str, float]]) -> None:
        """Commit the steps that the previous generation had finished, once the state after them has its replicas and
        survives another loss. `evaluated_at`: evaluates after a step if that is due.
        """
        if finished:
            with self.session.group.waits.on(f"the copies of the state after step {finished[-1].step}"):
                self.session.group.call("mirrored")
        for step in finished:
            last = step is finished[-1]
            evaluated = evaluated_at(step.step) if last else {}
            self.commit(replace(step, evaluated=evaluated))

    def commit(self, finished: FinishedStep) -> None:
        """Record a finished step: skipped samples, metrics, ledger, and then the curves.

        Raises:
            RunError: a rank ran another plan than the one that is written down.
        """
        session, records, plan = self.session, self.session.records, finished.plan
        for result in finished.results:
            if result.plan_id != finished.plan_id:
                raise RunError(
                    f"step {finished.step}: rank {result.rank} ran plan {result.plan_id}; the plan file is of "
                    f"{finished.plan_id}"
                )
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
        for sample_id, reason in [*finished.skipped, *finished.placeholders.items()]:
            if records.skip(sample_id, reason, finished.step, finished.epoch):
                session.tell(Notice(f"sample {sample_id} left out: {reason}"))
        if not extra["applied"]:
            records.event("update_skipped", step=finished.step, gradient_norm=metrics["gradient_norm"],
                          sample_ids=[sample.id for sample in plan.samples])
            session.tell(Notice(f"step {finished.step}: " + (
                "the gradient is not finite; update skipped on all ranks" if extra["num_valid_tokens"]
                else "no sample can be used; nothing is updated")))
        trained = trained_samples(plan, finished.results, finished.placeholders)
        records.commit(finished.step, [sample.id for sample in trained], metrics)
        session.current.dispatcher.batches.pop(finished.step, None)
        # after a recovery ranks may be others, though there are as many
        if finished.generation == session.current.number and len(finished.results) == session.group.size:
            self._observe_speeds(finished, work)
            self._refit(finished, work)
        extra |= {f"speed_{rank}": speed for rank, speed in enumerate(session.current.meter.planned())}
        session.scalars.step(metrics, extra)
        session.watch.step(finished.step, plan, finished.results, session.scalars)
        session.tell(StepCommitted(metrics, extra))
        self._note_results(finished.step, finished.results)

    def save_when_due(self, step: int, results: Sequence[StepResult], last: bool) -> None:
        """Save the state after `step`, of which these are the results."""
        every = self.session.config.checkpoint.every_steps
        if last or (every and step % every == 0):
            self._note_results(step, results)
            self.save(step)

    def save(self, step: int) -> None:
        """Have all ranks stage their state after `step`; they write it in the background.

        Waits here for a checkpoint that is still being written: a rank that waited for it within the next step would
        count as stuck.
        """
        session = self.session
        if self._unsealed:
            self.finish_saves()
        cursor = session.records.read_plan(step)["batch"]["cursor"]
        self._unsealed[step] = (Manifest(step, cursor, session.group.size, session.config.planner.sync,
                                         session.current.number, session.history.refits.to_json()), set())
        self._saves = session.group.start("save", step)  # ranks run it between this step and the next

    def finish_saves(self) -> None:
        """Wait for the saves under way; the results of all steps so far have been noted.

        After one that failed all ranks replace its group: no rank is in another collective here.

        Raises:
            GroupError: a rank is not done STORAGE_TIMEOUT_S after another. (All ranks end a save together.)
        """
        group = self.session.group
        with group.waits.on(f"the checkpoint of step {max(self._unsealed, default=0)}"):
            group.collect(self._saves)
            saves = group.collect(group.start("finish_save"), behind_s=STORAGE_TIMEOUT_S)
        for rank, (saved_steps, error) in enumerate(saves):
            self._note_saves(rank, saved_steps, error)
        if self._unsealed:  # those that failed
            self._unsealed.clear()
            group.call("renew_state_group")

    def forget_saves(self) -> None:
        """Forget the saves under way: the group that wrote them is gone, and half-written checkpoints have no manifest.
        """
        self._saves = Calls()
        self._unsealed.clear()
        self._noted_step = 0

    def _note_results(self, step: int, results: Sequence[StepResult]) -> None:
        """Note what ranks report of saves with the results of a step, once."""
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
                session.records.flush()
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
            speed, place = session.current.meter.measured()[rank], session.group.members[rank].place
            session.records.event("slow" if slow else "no_longer_slow", rank=rank, step=finished.step,
                                  speed=round(speed, 2))
            session.tell(Notice(
                f"rank {rank} ({place}) {'is slow' if slow else 'is no longer slow'}: {speed:.2f} of the others' "
                "speed; plans follow"
            ))

