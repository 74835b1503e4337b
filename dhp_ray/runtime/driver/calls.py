"""Calls of one method to all ranks, and their outcomes.

    few ranks    driver -> rank              a reference for each rank
    many ranks   driver -> relay -> rank     a reference for each relay, with the answers of all its ranks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from dhp_ray.errors import first_line_of
from dhp_ray.runtime.messages import RunError

SURVEY_S = 4.0
"""How long the control thread of a worker or of a relay may take to answer."""

GATHER_S = 0.002
"""Answers that arrive this soon after the first are taken together with it; if they were taken one at a time, each wait
would scan all that are pending.
"""


class FailedCall(NamedTuple):
    """A call that raised `words`, or whose process died: the process of one rank, or the relay of several."""

    ranks: range
    died: bool
    words: str = ""
    relay: bool = False

    def of(self, first_rank: int) -> FailedCall:
        """The same failure, with ranks counted from `first_rank`."""
        return self._replace(ranks=range(first_rank + self.ranks.start, first_rank + self.ranks.stop))


Outcome = list[Any] | FailedCall
"""The outcome of a reference: the answers of its ranks, in order, or the first failure among them."""


@dataclass(frozen=True)
class Calls:
    """References of calls, and the ranks whose answers each one returns. `unanswered` is for relayed calls: it returns
    the ranks of some references that have not answered yet, and raises GroupError if a relay no longer answers.
    """

    ranks: Mapping[ray.ObjectRef, range] = field(default_factory=dict)
    relayed: bool = False
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
        """Return all answers by rank, as soon as they are there.

        Raises:
            RunError: a call failed; `outcomes` tells all about it.
        """
        found: list[Any] = []
        for outcome in self.outcomes(list(self.ranks)):
            if isinstance(outcome, FailedCall):
                raise RunError(f"a call to rank {outcome.ranks.start} failed: {outcome.words}")
            found += outcome
        return found

    def _outcome(self, reference: ray.ObjectRef, value: Any) -> Outcome:
        ranks = self.ranks[reference]
        if isinstance(value, RayError):
            return _failed(ranks, value, self.relayed)
        if not self.relayed:
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


def _failed(ranks: range, error: RayError, relay: bool) -> FailedCall:
    if isinstance(error, RayTaskError):
        return FailedCall(ranks, False, _words(error), relay)
    return FailedCall(ranks, True, "", relay)  # actor died, was killed for memory, or the answer was lost with its node


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


def _words(error: RayTaskError) -> str:
    cause = getattr(error, "cause", None) or error
    text = first_line_of(str(cause))
    return text if isinstance(cause, (ValueError, OSError, RunError)) and text else f"{type(cause).__name__}: {text}"
