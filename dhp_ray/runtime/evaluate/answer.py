"""A worker's result for one sample. Imports neither torch nor transformers: the code that writes it down needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """The result for sample `number` of the file. `prediction` is None if nothing was generated; `loss_sum` is summed
    over the `num_valid_tokens` of all assistant turns. `error` says why there is no answer; it is empty if there is
    one.
    """

    number: int
    id: str
    error: str = ""
    prompt: str = ""
    references: tuple[str, ...] = ()
    prediction: str | None = None
    loss_sum: float = 0.0
    num_valid_tokens: int = 0
