"""Calls of one method on all ranks, and their results.

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
"""Answers that arrive within this time after the first one are handled together with it. Otherwise each answer would
need its own wait over all pending calls.
"""


class FailedCall(NamedTuple):
    """A call that raised `words` or whose process died: the call of one rank, or of the relay of several ranks."""

    ranks: range
    died: bool
    words: str = ""
    relay: bool = False

    def of(self, first_rank: int) -> FailedCall:
        """The same failure, with ranks counted from `first_rank`."""
        return self._replace(ranks=range(first_rank + self.ranks.start, first_rank + self.ranks.stop))


Outcome = list[Any] | FailedCall
"""The result of a reference: the answers of its ranks, in order, or the first failure among them."""


@dataclass(frozen=True)
class Calls:
    """References of calls, and the ranks whose answers each returns.

    unanswered: for relayed calls, returns the ranks behind some references that have not answered yet. It raises
    GroupError for a relay that no longer answers.
    """

    ranks: Mapping[ray.ObjectRef, range] = field(default_factory=dict)
    relayed: bool = False
    unanswered: Callable[[Collection[ray.ObjectRef]], set[int]] | None = None

    def __len__(self) -> int:
        """Number of references."""
        return len(self.ranks)

    def pending_ranks(self, pending: Collection[ray.ObjectRef]) -> set[int]:
        """The ranks behind the references `pending` that have not answered."""
        if self.unanswered:
            return self.unanswered(pending)
        return {rank for reference in pending for rank in self.ranks[reference]}

    def outcomes(self, ready: Sequence[ray.ObjectRef]) -> list[Outcome]:
        """The results of references. Waits for those that are not ready."""
        return [self._outcome(reference, value) for reference, value in zip(ready, _values(ready))]

    def answers(self) -> list[Any]:
        """Wait for all answers and return them by rank.

        Raises:
            RunError: a call failed. `outcomes` tells which one and why.
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
    """Calls made directly to the ranks, in rank order."""
    return Calls({reference: range(rank, rank + 1) for rank, reference in enumerate(references)})


def relay_of(ranks: range) -> str:
    """The name of a relay in messages."""
    return f"the relay of ranks {ranks.start} to {ranks.stop - 1}"


def answered(references: list[ray.ObjectRef], timeout_s: float | None) -> list[ray.ObjectRef]:
    """Wait until at least one call ends, or for `timeout_s`; return the calls that have ended."""
    first, others = ray.wait(references, num_returns=1, timeout=timeout_s)
    if not (first and others):
        return first
    return first + ray.wait(others, num_returns=len(others), timeout=GATHER_S)[0]


def _failed(ranks: range, error: RayError, relay: bool) -> FailedCall:
    if isinstance(error, RayTaskError):
        return FailedCall(ranks, False, _words(error), relay)
    return FailedCall(ranks, True, "", relay)  # its actor died, was killed for memory, or its answer went with its node


def _values(references: Sequence[ray.ObjectRef]) -> list[Any]:
    """The results of calls that have ended, in order; a call that failed gives the error that Ray raises."""
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
