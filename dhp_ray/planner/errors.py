"""Why a batch cannot be planned, or a plan must not run."""

from __future__ import annotations

from dhp_ray.errors import printable


class PlanError(ValueError):
    """A batch that cannot be planned, or a plan that must not run; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class SequenceTooLongError(PlanError):
    """A sequence that the whole cluster cannot hold."""

    def __init__(self, sample_id: str, num_tokens: int, limit: int) -> None:
        super().__init__(f"sample {sample_id}: {num_tokens} tokens; the cluster holds at most {limit} in one sequence")
        self.sample_id, self.num_tokens, self.limit = sample_id, num_tokens, limit
