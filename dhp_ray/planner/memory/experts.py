"""Bytes of a layer's experts (`model/experts.py`), and where ranks share them (`model/expert_parallel.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dhp_ray.planner.memory.model_shape import LayerShape

ROUTED_BYTES = 40  # of a token at one of its experts: numbers of expert and rows, int64 each, and weights
CAPACITY = 2.0
"""Room for tokens at the experts of one of the ranks that share them, over what comes there if all are used alike."""
CAPACITY_ROWS = 128  # beyond that, for small packs

Moments = dict[str, tuple[float, float]]
"""Bytes of gradients of weights that are kept to the layer's end, and of the rest, by the name of the moment."""


@dataclass(frozen=True)
class ExpertBytes:
    """Those of `layer`, c bytes a value. trained: its experts' weights or their adapters are. adapters: parameters of
    all adapters of its experts. sharing: ranks that share its experts.
    """

    layer: LayerShape
    c: int
    trained: bool
    adapters: float
    sharing: int

    @property
    def rows(self) -> float:
        """Rows of a token: its choices or, where ranks share experts, the room for as many."""
        layer, sharing = self.layer, self.sharing
        most = sharing * min(layer.experts_per_token, layer.experts // sharing)
        return min(CAPACITY * layer.experts_per_token, most) if sharing > 1 else layer.experts_per_token

    @property
    def kept(self) -> int:
        """For each token, until the backward pass."""
        layer, trained = self.layer, self.trained
        # adapters of rank r of both parameters have r (2 D + 3 F) parameters, and keep r numbers of a row each
        inner = 2 * self.adapters / (layer.experts * (2 * layer.width + 3 * layer.mlp_width))
        row = self.c * (layer.mlp_width * (2 + trained) + layer.width * trained + 2 * inner) + ROUTED_BYTES
        return math.ceil(self.rows * row) + 4 * layer.experts

    def _sizes(self, positions: int) -> tuple[float, float, float]:
        """Of rows, wide and narrow, and of their sums: a token's, or the rows of each choice before they are added;
        where ranks share experts, those of the tokens of all of them.
        """
        rows, token = positions * self.rows * self.c, self.c * self.layer.width * positions
        wide = self.layer.width * rows
        return wide, self.layer.mlp_width * rows, self.sharing * token if self.sharing > 1 else wide + token

    def forward(self, positions: int, keeps: bool, again: bool) -> float:
        """The most during the forward pass, in addition to what is kept, if the layer `keeps` that: the last product
        beside what goes into it and, of adapters, what they add; or sums. `again`: this is the second run, for which
        the gradients of other ranks' sums wait.
        """
        wide, narrow, sums = self._sizes(positions)
        residual = self.c * self.layer.width * positions
        last = wide * (1 + bool(self.adapters)) + narrow * (1 - self.trained * keeps)
        first = 0.0 if keeps else wide + 2 * narrow * (1 + bool(self.adapters))
        if self.sharing == 1:
            return residual + max(first, last, wide + sums)
        return residual + max(first, last, wide + sums, 2 * sums * (not again)) + sums * again

    def backward(self, positions: int, weights: float, added: float) -> Moments:
        """`weights` and `added`: gradients of one of the three products of experts, kept to the layer's end or added at
        once.
        """
        wide, narrow, sums = self._sizes(positions)
        if self.sharing == 1:
            sums = wide
        gone = (2 + self.trained) * narrow  # once the gate's gradient is there
        found = {"down backward": (weights, wide + narrow + added),
                 "gate backward": (weights, (6 - self.trained) * narrow),
                 "up backward": (3 * weights, wide + 2 * narrow - gone + 2 * added),
                 "rows backward": (3 * weights, (1 - self.trained) * wide + sums - gone)}
        if self.sharing > 1:
            found |= {"tokens gathered": (0.0, wide + sums), "sums scattered": (0.0, 2 * sums),
                      "gradients scattered": (3 * weights, 2 * sums - self.trained * wide - gone)}
        # the gradients of the shared expert's output and of its gate's input wait for its backward pass, which is last
        shared = 2 * self.c * self.layer.width * positions * bool(self.layer.shared_width)
        return {name: (kept, here + shared) for name, (kept, here) in found.items()}
