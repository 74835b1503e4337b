"""From one generation of a simulated run to the next: who is left, from which step they continue, and when.

The decisions are those of `runtime/driver/elastic.py`; the durations are given (`FaultSettings`):

    fault ---- seen_s ----| ---- form_s ----| the group is formed     a fault in between starts this again
                          | ---- return_s --------------| lost ranks can join, between two steps (join_s)

If the driver is lost, workers end their step meanwhile; form_s begins once they have, and the driver is back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dhp_ray.planner.errors import PlanError
from dhp_ray.runtime.driver.elastic import Condition, Failures, Form, GoOn, Stop, Wait, decide, surviving_state
from dhp_ray.simulate.faults import Fault
from dhp_ray.simulate.membership import Generation, HeldState, generation_of, held_by
from dhp_ray.simulate.settings import FaultKind, FaultSettings

Formed = tuple[Generation, float, str]
"""A generation, when it is formed, and why."""
NextFault = Callable[[float], Fault | None]
"""Returns the next fault if it strikes before a time."""


@dataclass
class Recovery:
    """What a run can continue with: workers that come back, and checkpoints.

    `saves`: (step, time at which its checkpoint is complete). `holds`: whether this many ranks hold the waiting
    sequences.
    """

    faults: FaultSettings
    num_ranks: int
    holds: Callable[[int], bool]
    saves: list[tuple[int, float]] = field(default_factory=list)
    _coming: dict[int, float] = field(default_factory=dict)  # when each of these slots can join
    _evicted: set[int] = field(default_factory=set)
    _before: HeldState | None = None  # of the generation before; counts until the present one has taken a step
    _failures: Failures = field(default_factory=Failures)

    def changed(
        self, generation: Generation, now_s: float, slow: Collection[int], mirrors: bool, another: NextFault
    ) -> Formed | None:
        """The next generation if the membership changes between two steps: slots that are ready join, slow ones leave
        to be replaced, each slot once at most (none where all restart together). If too few are left for the sequences
        that wait, or fewer than `faults.min_workers`, the run waits for those that come back. None: nothing changes.

        Raises:
            PlanError: the run cannot go on.
        """
        leaving = set(slow) - self._evicted if self.faults.policy == "elastic" else set[int]()
        if not leaving and not self._ready(now_s) and self._needed(generation.size) <= generation.size:
            return None
        self._evicted |= leaving
        stay = [slot for slot in generation.slots if slot not in leaving]
        for slot in leaving:
            self._coming[slot] = now_s + self.faults.worker.return_s
        why = [f"{len(leaving)} leave, which are slow"] if leaving else []
        if leaving and mirrors:  # their state is copied, or saved, before they leave
            generation.mirrored.append((generation.newest, now_s))
        elif leaving:
            self.saves.append((generation.newest, now_s))
        stands_s, fault = self._stands_s(now_s, stay, len(leaving), another)
        if fault:
            return self._after_fault(generation, fault, max(now_s, stands_s), mirrors, another, why)
        joining = self._ready(stands_s)
        why = [f"{len(joining)} join"] * bool(joining) + why
        formed = self._formed(generation, stay, now_s, stands_s, generation.newest, mirrors)
        return formed, stands_s + self.faults.join_s, " and ".join(why)

    def recovered(
        self, generation: Generation, fault: Fault, now_s: float, mirrors: bool, another: NextFault
    ) -> Formed:
        """The generation that follows a fault in a step.

        Raises:
            PlanError: the run cannot go on.
        """
        self._failed(generation.newest + 1)
        return self._after_fault(generation, fault, now_s, mirrors, another, [])

    def lost_by(self, generation: Generation, fault: Fault) -> set[int]:
        """The slots that a fault takes: members that are there (all of them, where all restart together), and with a
        node also those that were to return.
        """
        there = {*generation.slots} - (self._coming.keys() if self.faults.policy == "elastic" else set())
        match fault.kind:
            case "driver":
                return set()
            case "all":
                return there
            case "node":
                node = generation.node_of(generation.slot_of(fault))
                return {slot for slot in there | self._coming.keys() if generation.node_of(slot) == node}
            case _:
                return {generation.slot_of(fault)} & there

    def _after_fault(
        self, generation: Generation, fault: Fault, now_s: float, mirrors: bool, another: NextFault, why: list[str]
    ) -> Formed:
        """The generation that follows a fault. Slots that have left the group already are not among its survivors."""
        broken_s, survivors, seen = now_s, {*generation.slots} - self._coming.keys(), [fault.kind]
        driver_back_s, following = 0.0, fault
        while True:
            kind: FaultKind = getattr(self.faults, following.kind)
            lost = self.lost_by(generation, following)
            if self.faults.policy == "restart" and lost:
                lost = {*generation.slots}
            survivors -= lost
            seen_s = max(now_s, following.time_s) + kind.seen_s
            if following.kind == "driver":  # workers end their step meanwhile
                driver_back_s = following.time_s + kind.seen_s
                seen_s = now_s
            for slot in lost:
                self._coming[slot] = max(self._coming.get(slot, 0.0), seen_s + kind.return_s)
            formed_s = max(seen_s, driver_back_s) + kind.form_s
            now_s, another_fault = self._stands_s(formed_s, survivors, len(lost), another)
            if another_fault is None:
                break
            following = another_fault
            seen.append(following.kind)
            if following.time_s < formed_s:
                self._failed(generation.newest + 1)
        self.saves = [(step, whole_s) for step, whole_s in self.saves if whole_s <= broken_s]  # others are given up
        saved = max((step for step, _ in self.saves), default=0)
        step = self._surviving_step(generation, survivors, broken_s)
        if step < saved:
            step, now_s = saved, now_s + self.faults.load_s
        formed = self._formed(generation, sorted(survivors), broken_s, now_s, step, mirrors)
        return formed, now_s, " and ".join([*why, f"{', '.join(seen)} lost"])

    def _failed(self, step: int) -> None:
        """Count a generation that broke in a step, or while the next one formed.

        Raises:
            PlanError: that has happened too often.
        """
        self._failures = self._failures.with_one(step, raised=False)
        if self._failures.hopeless(step):
            raise PlanError(f"step {step} has failed {self._failures.steps.count(step)} times")

    def _surviving_step(self, generation: Generation, survivors: Collection[int], broken_s: float) -> int:
        """The newest step whose state survives in memory; -1: none."""
        if len(survivors) == generation.size:
            return generation.newest
        states = [HeldState(generation, frozenset(survivors), broken_s)]
        if generation.newest == generation.first and self._before:  # the one before counts until the first step
            states.append(self._before)
        state = surviving_state(held_by(sorted(survivors), states))
        return state.version if state else -1

    def _stands_s(
        self, time_s: float, survivors: Collection[int], num_lost: int, another: NextFault
    ) -> tuple[float, Fault | None]:
        """Return (when there are enough ranks to continue, None), or (when a fault strikes before, this fault)."""
        while True:
            fault = another(time_s)
            if fault:
                return fault.time_s, fault
            size = len(survivors) + len(self._ready(time_s))
            needed = self._needed(size)
            conditions = [Condition.HEALTHY] * len(survivors) + [Condition.DEAD] * num_lost
            match decide(conditions, len(self._ready(time_s)), needed, self.num_ranks, True):
                case Form() | GoOn():
                    return time_s, None
                case Stop(reason):
                    raise PlanError(reason)
                case Wait():
                    later = [ready_s for ready_s in self._coming.values() if ready_s > time_s]
                    if not later:
                        raise PlanError(f"{size} ranks are left, the run needs {needed}, and none comes back")
                    time_s = min(later)

    def _needed(self, size: int) -> int:
        """The number of ranks that the run needs: `size` + 1 if `size` ranks do not hold the next batches."""
        needed = self.num_ranks if self.faults.policy == "restart" else self.faults.min_workers
        if size < self.num_ranks and not self.holds(max(1, size)):
            needed = max(needed, size + 1)
        return needed

    def _ready(self, now_s: float) -> list[int]:
        return [slot for slot, ready_s in self._coming.items() if ready_s <= now_s]

    def _formed(
        self, generation: Generation, stay: list[int], broken_s: float, now_s: float, step: int, mirrors: bool
    ) -> Generation:
        """The next generation, of the slots that stay and those that are ready. The one before ended at `broken_s`."""
        joining = self._ready(now_s)
        for slot in joining:
            del self._coming[slot]
        if generation.newest > generation.first or self._before is None:
            self._before = HeldState(generation, frozenset(stay), broken_s)
        else:  # it has taken no step: the state before it counts still, as far as it survives
            self._before = self._before._replace(slots=self._before.slots & {*stay})
        slots = [*stay, *joining]
        return generation_of(generation.number + 1, slots, generation.ranks_per_node, step,
                             mirrors and len(slots) > 1)
