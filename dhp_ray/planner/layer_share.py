"""The share of a pack's layers that are relieved of their activations, so that more tokens fit on a rank.

Activation offload (ByteScale, arXiv 2502.21231) moves them to host memory until the backward pass needs them;
recomputation (arXiv 1604.06174) keeps a layer's input only and runs the layer again.

On a rank with t tokens of a pack, if the share s is relieved, a moment of its pass takes F + t (a - s b) bytes. With
share 0 `from_tokens` fit, and with `share` (the largest that there is use and room for) `tokens_per_rank` fit. This
share makes t tokens fit:

    s(t) = share (1 - from_tokens / t) / (1 - from_tokens / tokens_per_rank)

Packs of up to `free_tokens` fit without it and keep everything; larger packs have this share. It is enough for all t
between the ends because s is linear in 1 / t: what a token takes, a - s b, is a line in 1 / t, and so is what it may
take, (limit - F) / t. At both ends the former is not above the latter. What is relieved, s(t) t, is linear in t.

    a 3B on H100: 2,734 tokens fit with all activations, 64,376 with none but the layers' inputs; of a pack with 8,000
    tokens a rank, (1 - 2734 / 8000) / (1 - 2734 / 64376) = 0.69 of the layers are recomputed
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from dhp_ray.planner.checks import PlanError

LEAST_LAYERS = 2
"""With offload, the least number of layers whose activations are on the device: one computes, one is being copied."""


def num_relieved(share: float, num_layers: int) -> int:
    """Number of layers that are relieved, of `num_layers`."""
    return min(num_layers, math.ceil(share * num_layers - 1e-9))  # 0.3 x 10 is a little more than 3


@dataclass(frozen=True, slots=True)
class LayerShare:
    """The share of a pack's layers, by its tokens a rank: none up to `free_tokens`, `share` at `tokens_per_rank`, the
    most that a rank holds, and the formula above between them, from `from_tokens` on (equal to `free_tokens`, or fewer
    if bytes are not linear in tokens). By default no layer is relieved; with both 0 every pack has `share`.
    """

    name: ClassVar[str] = ""
    """In messages and in a plan file's inputs."""

    share: float = 0.0
    from_tokens: int = 0
    tokens_per_rank: int = 0
    free_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0 or (
            self.share and not 0 <= self.from_tokens <= self.free_tokens < self.tokens_per_rank
        ):
            raise PlanError(
                f"{self.name}: share={self.share} from_tokens={self.from_tokens} free_tokens={self.free_tokens} "
                f"tokens_per_rank={self.tokens_per_rank}; allowed: a share from 0 to 1, and, with one above 0, "
                "from_tokens from 0 to free_tokens, and free_tokens below tokens_per_rank"
            )

    @property
    def slope(self) -> float:
        """Tokens whose share is 1, for each token beyond `from_tokens`, if there are any."""
        return self.share / (1 - self.from_tokens / self.tokens_per_rank) if self.share else 0.0

    def share_of(self, tokens: Any) -> Any:
        """The share of a pack with this many tokens a rank (numbers or arrays)."""
        if not self.share:
            return 0.0 * tokens
        return self.slope * np.maximum(0.0, 1 - self.from_tokens / tokens) * (tokens > self.free_tokens)

    def up_to(self, tokens_per_rank: int) -> Self:
        """The same share for packs of any size, none of which has more than this many tokens a rank."""
        if tokens_per_rank <= self.free_tokens:
            return type(self)()
        return replace(self, share=float(self.share_of(tokens_per_rank)), tokens_per_rank=tokens_per_rank)

    def to_json(self) -> dict[str, Any]:
        """The form in a plan file's inputs."""
        return {"share": self.share, "from_tokens": self.from_tokens, "tokens_per_rank": self.tokens_per_rank,
                "free_tokens": self.free_tokens}

    def of_load(self, share: float) -> dict[str, float]:
        """The field of `PackLoad` that has such a share, with this value."""
        return {"recomputed" if isinstance(self, Recomputation) else "offload": share}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Self:
        """Read from a plan file's inputs; older files have none."""
        return cls(**tree.get(cls.name, {}))


class Offload(LayerShare):
    """The share of a pack's layers whose activations go to host memory."""

    __slots__ = ()
    name = "offload"


class Recomputation(LayerShare):
    """The share of a pack's layers that are recomputed in the backward pass."""

    __slots__ = ()
    name = "recomputation"


NO_OFFLOAD, NO_RECOMPUTATION = Offload(), Recomputation()
