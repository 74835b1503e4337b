"""What a layer that is recomputed keeps of its first run for the second one, besides its input.

torch's checkpoint runs such a layer again in the backward pass. Experts must not be chosen again, since scores that
differ in their last bit may choose others. And with `attention`, a layer of the language model keeps the output of
attention and its log-sum-exp: of long sequences attention is the largest part of a layer, and between ranks it is an
exchange. A gated delta net keeps the outputs and states of its runs. Within a sliding window keys and values are
exchanged again, since those that a member has received are not kept. (An encoder's images are short.)

    first run    norm, queries, keys, values, attention, product, MLP       kept: input, output and log-sum-exp
    second run   norm, queries, keys, values,          , product, MLP       attention neither computes nor exchanges
    backward     needs all of them, as that of a layer that kept everything
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Keeps:
    """What layers keep that are recomputed. May change between two packs."""

    attention: bool = False


class _Kept:
    """The results that a layer keeps, in the order of their making. `attention`: whether those of attention are."""

    def __init__(self, attention: bool) -> None:
        self.attention = attention
        self._results: deque[tuple[Tensor, ...]] = deque()
        self._runs_again = False

    @contextmanager
    def run(self, again: bool) -> Iterator[None]:
        self._runs_again, token = again, _kept.set(self)
        try:
            yield
        finally:
            _kept.reset(token)

    def result(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if self._runs_again:
            return self._results.popleft()  # for the one backward pass of a layer
        found = compute()
        # autograd gives those that a function returns their graph, which would keep this object, which keeps them
        self._results.append(tuple(tensor.detach() for tensor in found))
        return found


_kept: ContextVar[_Kept | None] = ContextVar("kept by the layer that runs", default=None)


def checkpoint_contexts(keeps: Keeps) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a layer's first run and of its second, as torch's checkpoint asks for them."""
    kept = _Kept(keeps.attention)
    return kept.run(again=False), kept.run(again=True)


def once(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What `compute` returns, in the first run of a layer; in a second run the same tensors. They have no graph."""
    kept = _kept.get()
    return compute() if kept is None else kept.result(compute)


def attention_once(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`once` if layers keep the results of attention; otherwise `compute` runs each time."""
    kept = _kept.get()
    return kept.result(compute) if kept is not None and kept.attention else compute()
