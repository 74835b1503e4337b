"""Processes that call the ranks of a large group for the driver, each a share of the ranks.

    driver   --- start(n, "run", order) --->  relay  --- run(order) --->  256 ranks
             <-- answers(n): a list --------         <-- 256 answers ---

Ray's cost of a call, of each reference in its arguments and of an answer adds up to about 0.3 ms per rank and step:
more than a second with 4,096 ranks, most of it while no rank has work. Relays share this cost in parallel, and the
driver makes one call and gets one answer per relay. A plan is sent to them in shares, the slices of a relay's ranks
together.

Ray runs calls in order only if one thread runs them, and a rank must be told to save before it is told to run. So one
thread of a relay passes calls on, and others wait for their answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count, pairwise
from threading import Condition, Lock
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp_ray.errors import first_line
from dhp_ray.planner.plan.types import RankPlan
from dhp_ray.runtime.messages import GroupError, RunError, words_of
from dhp_ray.runtime.rank_slices import RowIndex, packed_share, packed_slices, unpacked_share

SURVEY_S = 4.0
"""How long the control thread of a worker or of a relay may take to answer."""

GATHER_S = 0.002
"""Answers that arrive this soon after the first are taken with it: each wait scans all that are pending."""


class FailedCall(NamedTuple):
    """A call that raised `words`, or whose process died: the process of one rank, or the relay of several."""

    ranks: range
    died: bool
    words: str
    relay: bool

    def of(self, first_rank: int) -> FailedCall:
        """The same failure, with ranks counted from `first_rank`."""
        return self._replace(ranks=range(first_rank + self.ranks.start, first_rank + self.ranks.stop))


Outcome = list[Any] | FailedCall
"""The outcome of a reference: the answers of its ranks, in order, or the first failure among them."""


@dataclass(frozen=True)
class Calls:
    """References of calls, and the ranks whose answers each one returns. `unanswered`, of relayed calls, returns the
    ranks of some references that have not answered yet, and raises GroupError if a relay no longer answers.
    """

    ranks: Mapping[ray.ObjectRef, range] = field(default_factory=dict)
    unanswered: Callable[[Collection[ray.ObjectRef]], set[int]] | None = None

    def __len__(self) -> int:
        """Return the number of references."""
        return len(self.ranks)

    def pending_ranks(self, pending: Collection[ray.ObjectRef]) -> set[int]:
        """Return the ranks that have not answered, given the references that are `pending`."""
        if self.unanswered:
            return self.unanswered(pending)
        return {rank for reference in pending for rank in self.ranks[reference]}

    def outcomes(self, ready: Sequence[ray.ObjectRef]) -> list[Outcome]:
        """Return the outcomes of references; waits for those that are not there yet."""
        return [self._outcome(reference, value) for reference, value in zip(ready, _values(ready))]

    def answers(self) -> list[Any]:
        """Return all answers by rank, as soon as they are there; RunError if a call failed."""
        found: list[Any] = []
        for outcome in self.outcomes(list(self.ranks)):
            if isinstance(outcome, FailedCall):
                raise RunError(f"a call to rank {outcome.ranks.start} failed: {outcome.words}")
            found += outcome
        return found

    def _outcome(self, reference: ray.ObjectRef, value: Any) -> Outcome:
        ranks, relayed = self.ranks[reference], self.unanswered is not None
        if isinstance(value, RayTaskError):
            return FailedCall(ranks, False, words_of(getattr(value, "cause", None) or value), relayed)
        if isinstance(value, RayError):  # the actor died, or the answer was lost with its node
            return FailedCall(ranks, True, "", relayed)
        if not relayed:
            return [value]
        return value.of(ranks.start) if isinstance(value, FailedCall) else list(value)


def direct_calls(references: Sequence[ray.ObjectRef]) -> Calls:
    """Calls to the ranks themselves, in their order."""
    return Calls({reference: range(rank, rank + 1) for rank, reference in enumerate(references)})


def relay_of(ranks: range) -> str:
    """Return the name of a relay in messages."""
    return f"the relay of ranks {ranks.start} to {ranks.stop - 1}"


def answered(references: list[ray.ObjectRef], timeout_s: float | None) -> list[ray.ObjectRef]:
    """Wait for calls to end: at least one, unless none does within `timeout_s`."""
    first, others = ray.wait(references, num_returns=1, timeout=timeout_s)
    if not (first and others):
        return first
    return first + ray.wait(others, num_returns=len(others), timeout=GATHER_S)[0]


def _values(references: Sequence[ray.ObjectRef]) -> list[Any]:
    """Return, for calls that have ended, in order, the result or the error that Ray raises."""
    try:
        return list(ray.get(list(references)))
    except RayError:
        return [_value(reference) for reference in references]


def _value(reference: ray.ObjectRef) -> Any:
    try:
        return ray.get(reference)
    except RayError as error:
        return error


CONCURRENCY_GROUPS = {"answers": 8, "control": 1}
"""Threads in addition to the one that passes calls on. Each call whose answers are awaited holds a thread, at most five
at once: a step or held-out samples, the slices of the next of either, copies of the state, and a save.
"""


class Relay:
    """The actor: calls a share of the ranks."""

    def __init__(self, actors: Sequence[ActorHandle]) -> None:
        # as in the driver: when several ranks fail together, one is asked; Ray would print the tracebacks of the others
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        import_module("dhp_ray.train.results")  # takes seconds: not while the first answers are awaited
        self._actors = actors
        self._pending: dict[int, dict[ray.ObjectRef, int]] = {}  # by number: unanswered calls, the rank's place here
        self._failures: dict[int, Exception] = {}
        self._newest = -1  # number of the last calls; they come in order
        self._begun = Condition()

    def start(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Call a method of all ranks with the same arguments."""
        self._begin(number, lambda: [getattr(actor, method).remote(*arguments) for actor in self._actors])

    def prefetch(self, number: int, packed: bytes, references: list[ray.ObjectRef]) -> None:
        """Call each rank's `prefetch` with its slice out of a share (`packed_share`)."""
        def call() -> list[ray.ObjectRef]:
            slices = packed_slices(*unpacked_share(packed, references))
            return [actor.prefetch.remote(*own) for actor, own in zip(self._actors, slices, strict=True)]

        self._begin(number, call)

    @ray.method(concurrency_group="answers")
    def answers(self, number: int) -> Outcome:
        """Return the ranks' answers to the calls with this number, or the first failure among them."""
        with self._begun:
            self._begun.wait_for(lambda: number in self._pending or number in self._failures)
        if number in self._failures:
            raise self._failures[number]
        pending = self._pending[number]
        calls, results = direct_calls(list(pending)), dict[int, Any]()
        while pending:
            ready = answered(list(pending), None)
            for reference, outcome in zip(ready, calls.outcomes(ready)):
                if isinstance(outcome, FailedCall):
                    return outcome
                results[pending.pop(reference)] = outcome[0]
        del self._pending[number]
        return [results[place] for place in range(len(self._actors))]

    @ray.method(concurrency_group="control")
    def unanswered(self, number: int) -> list[int]:
        """Return the places, in this relay, of the ranks that have not answered these calls: all, before they are made.
        """
        if number > self._newest:
            return list(range(len(self._actors)))
        return list(self._pending.get(number, {}).values())

    def _begin(self, number: int, call: Callable[[], list[ray.ObjectRef]]) -> None:
        try:
            references, failure = call(), None
        except Exception as error:  # `answers` raises it: the result of this call is not read
            references, failure = [], error
        with self._begun:
            if failure:
                self._failures[number] = failure
            else:
                self._pending[number] = {reference: place for place, reference in enumerate(references)}
            self._newest = number
            self._begun.notify_all()


class RelayCall(NamedTuple):
    """A relay's part of a call: `begun` is done once the relay has passed the call on."""

    relay: ActorHandle
    ranks: range
    ready: ray.ObjectRef
    begun: ray.ObjectRef


class Relays:
    """The relays of one generation, seen from the driver. They end with `close`, or with the driver's process."""

    def __init__(self, actors: Sequence[ActorHandle], most_ranks: int) -> None:
        """`actors` by rank; a relay calls at most `most_ranks` of them."""
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": CONCURRENCY_GROUPS, "scheduling_strategy": node}
        relay: Any = ray.remote(**options)(Relay)
        self._ranks = shares(len(actors), most_ranks)
        self._relays = [relay.remote(actors[ranks.start:ranks.stop]) for ranks in self._ranks]
        self._ready = [relay.__ray_ready__.remote() for relay in self._relays]
        self._numbers, self._sending = count(), Lock()

    def start(self, method: str, *arguments: Any) -> Calls:
        """Call a method of all ranks with the same arguments."""
        return self._calls(lambda relay, number, ranks: relay.start.remote(number, method, arguments))

    def prefetch(self, slices: Sequence[RankPlan], index: RowIndex) -> Calls:
        """Send each rank its slice of a plan."""
        packed = {ranks: packed_share(slices[ranks.start:ranks.stop], index)  # outside the lock
                  for ranks in self._ranks}
        return self._calls(lambda relay, number, ranks: relay.prefetch.remote(number, *packed[ranks]))

    def close(self) -> None:
        """End the relays, whatever they wait for."""
        for relay in self._relays:
            ray.kill(relay)

    def _calls(self, pass_on: Callable[[ActorHandle, int, range], ray.ObjectRef]) -> Calls:
        with self._sending:  # for the driver's threads: every relay gets their calls in the same order
            number = next(self._numbers)
            parts = [RelayCall(relay, ranks, ready, pass_on(relay, number, ranks))
                     for relay, ranks, ready in zip(self._relays, self._ranks, self._ready)]
            by_reference: dict[ray.ObjectRef, RelayCall] = {part.relay.answers.remote(number): part for part in parts}

        def pending_ranks(pending: Collection[ray.ObjectRef]) -> set[int]:
            return _unanswered(number, [by_reference[reference] for reference in pending])

        return Calls({reference: part.ranks for reference, part in by_reference.items()}, pending_ranks)


def _unanswered(number: int, parts: Sequence[RelayCall]) -> set[int]:
    """Return the ranks that have not answered the calls with this number; none of a relay that is still starting. A
    relay that no longer answers, or could not pass the calls on, raises GroupError.
    """
    started = set(ray.wait([part.ready for part in parts], num_returns=len(parts), timeout=0)[0]) if parts else set()
    asked: dict[ray.ObjectRef, RelayCall] = {part.relay.unanswered.remote(number): part for part in parts
                                         if part.ready in started}
    told, silent = ray.wait(list(asked), num_returns=len(asked), timeout=SURVEY_S) if asked else ([], [])
    for reference in silent:
        raise GroupError(f"{relay_of(asked[reference].ranks)} answers no more")
    found: set[int] = set()
    for reference in told:
        ranks = asked[reference].ranks
        try:
            ray.get(asked[reference].begun, timeout=0)
        except GetTimeoutError:
            pass  # it is about to pass the calls on
        except RayError as error:
            raise GroupError(f"{relay_of(ranks)}: {first_line(error)}") from None
        with suppress(RayError):  # it has died, as its answers will say
            found |= {ranks[place] for place in ray.get(reference)}
    return found


def shares(num_ranks: int, most_ranks: int) -> list[range]:
    """Split the ranks into as few contiguous shares of at most `most_ranks` as there can be, of almost the same size.
    """
    num_shares = -(-num_ranks // most_ranks)
    bounds = [share * num_ranks // num_shares for share in range(num_shares + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]
