"""What a worker says of one sample. Neither torch nor transformers here: who writes it down needs none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What came of sample `number` of the file. `prediction` is None where nothing was generated; `loss_sum` is over
    the `num_valid_tokens` of all turns of the assistant. `error` says why there is no answer; empty: there is one.
    """

    number: int
    id: str
    error: str = ""
    prompt: str = ""
    references: tuple[str, ...] = ()
    prediction: str | None = None
    loss_sum: float = 0.0
    num_valid_tokens: int = 0
