"""Processes beside the driver that call the ranks of a large group for it, each a share of them.

    driver   --- start(n, "run", order) --->  relay  --- run(order) --->  256 ranks
             <-- answers(n): a list --------         <-- 256 answers ---

What Ray takes for a call, for each reference in its arguments and for an answer adds up to some 0.3 ms a rank and step:
more than a second with 4,096 ranks, most of it while no rank has work. Relays take it side by side, and the driver has
a call and an answer for each relay.

Ray runs calls in order only where one thread runs them, and a rank must be told to save before it is told to run. So
one thread of a relay passes calls on, and others wait for their answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from itertools import count, pairwise
from threading import Condition
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp_ray.runtime.driver.calls import Calls, FailedCall, Outcome, answered, direct_calls

CONCURRENCY_GROUPS = {"answers": 8, "control": 1}
"""Beside the thread that passes calls on. Under way at a time: a step, the slices of the next one and of its last
resort, copies of the state, a save, a batch of held-out samples and the next one.
"""

ASKED_S = 1.0
"""How long a relay may take to say which ranks have not answered; then all of its ranks count as such."""

Slice = tuple[bytes, list[ray.ObjectRef]]
"""Of a rank: `rank_slices.packed_slice`."""


class Relay:
    """The actor: calls a share of the ranks."""

    def __init__(self, actors: Sequence[ActorHandle]) -> None:
        # as for the driver: of several ranks that fail together one is asked, and Ray would show the others' tracebacks
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        self._actors = actors
        self._pending: dict[int, dict[ray.ObjectRef, int]] = {}  # by number, unanswered calls: the rank's place here
        self._failures: dict[int, Exception] = {}
        self._newest = -1  # number of calls; those of two threads of the driver may come in either order
        self._begun = Condition()

    def start(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Call a method of all ranks with the same arguments."""
        self._begin(number, lambda: [getattr(actor, method).remote(*arguments) for actor in self._actors])

    def prefetch(self, number: int, packed: list[bytes], needed: list[list[int]],
                 references: list[ray.ObjectRef]) -> None:
        """Call each rank's `prefetch` with its packed slice and those of `references` that it needs."""
        self._begin(number, lambda: [actor.prefetch.remote(own, [references[place] for place in places])
                                     for actor, own, places in zip(self._actors, packed, needed, strict=True)])

    @ray.method(concurrency_group="answers")
    def answers(self, number: int) -> Outcome:
        """The ranks' answers to the calls with a number, or the first failure among them."""
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
        """Places here of the ranks that have not answered the calls with a number: all, before these are made."""
        if number > self._newest:
            return list(range(len(self._actors)))
        return list(self._pending.get(number, {}).values())

    def _begin(self, number: int, call: Callable[[], list[ray.ObjectRef]]) -> None:
        with self._begun:
            try:
                self._pending[number] = {reference: place for place, reference in enumerate(call())}
            except Exception as error:  # `answers` raises it: nobody looks at what comes of this call
                self._failures[number] = error
            self._newest = max(self._newest, number)
            self._begun.notify_all()


class Relays:
    """The relays of one generation, seen from the driver. They end with `close`, or with the driver's process."""

    def __init__(self, actors: Sequence[ActorHandle], most_ranks: int) -> None:
        """`actors` by rank; a relay calls at most `most_ranks` of them."""
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": CONCURRENCY_GROUPS, "scheduling_strategy": node}
        relay: Any = ray.remote(**options)(Relay)
        self._ranks = shares(len(actors), most_ranks)
        self._relays = [relay.remote(actors[ranks.start:ranks.stop]) for ranks in self._ranks]
        self._numbers = count()

    def start(self, method: str, *arguments: Any) -> Calls:
        """Call a method of all ranks with the same arguments."""
        return self._calls(lambda relay, number, ranks: relay.start.remote(number, method, arguments))

    def prefetch(self, slices: Sequence[Slice]) -> Calls:
        """Call each rank's `prefetch` with its slice. A reference goes to a relay once, whoever needs it there."""
        def pass_on(relay: ActorHandle, number: int, ranks: range) -> None:
            own = slices[ranks.start:ranks.stop]
            places = {reference: place for place, reference in enumerate(
                dict.fromkeys(reference for _, references in own for reference in references))}
            relay.prefetch.remote(number, [packed for packed, _ in own],
                                  [[places[reference] for reference in references] for _, references in own],
                                  list(places))

        return self._calls(pass_on)

    def close(self) -> None:
        """End them, whatever they wait for."""
        for relay in self._relays:
            ray.kill(relay)

    def _calls(self, pass_on: Callable[[ActorHandle, int, range], object]) -> Calls:
        number = next(self._numbers)
        for relay, ranks in zip(self._relays, self._ranks):
            pass_on(relay, number, ranks)
        references = {relay.answers.remote(number): (relay, ranks) for relay, ranks in zip(self._relays, self._ranks)}

        def unanswered(pending: Collection[ray.ObjectRef]) -> set[int]:
            asked = {references[reference][0].unanswered.remote(number): references[reference][1]
                     for reference in pending}
            told, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ASKED_S)
            calls = Calls({reference: asked[reference] for reference in told}, relayed=True)
            found = {rank for reference in silent for rank in asked[reference]}
            for reference, places in zip(told, calls.outcomes(told)):
                ranks = asked[reference]
                found |= set(ranks) if isinstance(places, FailedCall) else {ranks[place] for place in places}
            return found

        return Calls({reference: ranks for reference, (_, ranks) in references.items()}, True, unanswered)


def shares(num_ranks: int, most_ranks: int) -> list[range]:
    """Ranks in neighbouring shares, as few as hold at most `most_ranks` each; their sizes differ by one at most."""
    num_shares = -(-num_ranks // most_ranks)
    bounds = [share * num_ranks // num_shares for share in range(num_shares + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]
