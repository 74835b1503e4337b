"""The ranks that a batch is planned for: their nodes, speeds and memory, and the layers of larger packs that are
relieved of their activations so that more tokens fit on a rank.

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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from dhp_ray.planner.errors import PlanError


def numbered(nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """The same nodes as numbers from 0 on, in the order of their first appearance."""
    number = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    return tuple([number[node] for node in nodes])


def sizes_of(nodes: Sequence[int]) -> list[int]:
    """Number of ranks of each node."""
    sizes = [0] * (max(nodes, default=-1) + 1)
    for node in nodes:
        sizes[node] += 1
    return sizes


LEAST_LAYERS = 2
"""With offload, the least number of layers whose activations are on the device: one computes, one is being copied."""


def num_relieved(share: float, num_layers: int) -> int:
    return min(num_layers, math.ceil(share * num_layers - 1e-9))  # 0.3 x 10 is a little more than 3


@dataclass(frozen=True, slots=True)
class LayerShare:
    """The share of a pack's layers, by its tokens a rank: none up to `free_tokens`, `share` at `tokens_per_rank`, the
    most that a rank holds, and the formula above between them, from `from_tokens` on (equal to `free_tokens`, or fewer
    if bytes are not linear in tokens). By default no layer is relieved; with both 0 every pack has `share`.
    """

    share: float = 0.0
    from_tokens: int = 0
    tokens_per_rank: int = 0
    free_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0 or (
            self.share and not 0 <= self.from_tokens <= self.free_tokens < self.tokens_per_rank
        ):
            raise PlanError(
                f"{type(self).__name__.lower()}: share={self.share} from_tokens={self.from_tokens} "
                f"free_tokens={self.free_tokens} tokens_per_rank={self.tokens_per_rank}; allowed: a share from 0 to 1, "
                "and, with one above 0, from_tokens from 0 to free_tokens, and free_tokens below tokens_per_rank"
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

    def of_load(self, share: float) -> dict[str, float]:
        """The field of `PackLoad` that has such a share, with this value."""
        return {"recomputed" if isinstance(self, Recomputation) else "offload": share}


class Offload(LayerShare):
    """The share of a pack's layers whose activations go to host memory."""

    __slots__ = ()


class Recomputation(LayerShare):
    """The share of a pack's layers that are recomputed in the backward pass, but for attention."""

    __slots__ = ()


NO_OFFLOAD, NO_RECOMPUTATION = Offload(), Recomputation()


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Ranks, nodes, the tokens that one rank holds at a time, and each rank's speed (1.0 = nominal).

    `tokens_per_rank`: the most tokens of a pack on each rank that keeps all of its activations (or recomputes all of
    its layers, if the run always does). With `offload` a pack may have more, which moves some to host memory; with
    `recomputation` likewise, and some of its layers run again. A cluster has at most one of the two.

    `nodes`: the node of each rank, in any order, of any size; empty: every `ranks_per_node` ranks are a node. If both
    are given and differ, `nodes` counts, and `ranks_per_node` becomes the size of the largest node.
    """

    num_ranks: int
    ranks_per_node: int
    tokens_per_rank: int
    speeds: tuple[float, ...] = ()
    nodes: tuple[int, ...] = ()
    offload: Offload = NO_OFFLOAD
    recomputation: Recomputation = NO_RECOMPUTATION

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.ranks_per_node < 1 or self.tokens_per_rank < 1:
            raise PlanError(
                f"cluster: num_ranks={self.num_ranks} ranks_per_node={self.ranks_per_node} "
                f"tokens_per_rank={self.tokens_per_rank}; each must be at least 1"
            )
        if self.offload.share and self.recomputation.share:
            raise PlanError("cluster: offload and recomputation; packs that hold more tokens use one of them")
        if not self.speeds:
            object.__setattr__(self, "speeds", (1.0,) * self.num_ranks)
        if len(self.speeds) != self.num_ranks:
            raise PlanError(f"cluster: {len(self.speeds)} speeds for {self.num_ranks} ranks")
        for rank, speed in enumerate(self.speeds):
            if not 1e-9 <= speed <= 1e9:  # times are then finite
                raise PlanError(f"cluster: rank {rank} has speed {speed}; it must be from 1e-9 to 1e9")
        regular = tuple([rank // self.ranks_per_node for rank in range(self.num_ranks)])
        object.__setattr__(self, "nodes", numbered(self.nodes or regular))
        if len(self.nodes) != self.num_ranks:
            raise PlanError(f"cluster: nodes of {len(self.nodes)} ranks for {self.num_ranks} ranks")
        if self.nodes != regular:
            object.__setattr__(self, "ranks_per_node", max(sizes_of(self.nodes)))

    @classmethod
    def of_nodes(
        cls, nodes: Sequence[Hashable], tokens_per_rank: int, speeds: tuple[float, ...] = (),
        offload: Offload = NO_OFFLOAD, recomputation: Recomputation = NO_RECOMPUTATION,
    ) -> ClusterSpec:
        """The cluster whose ranks are on these nodes, given by numbers or names."""
        return cls(len(nodes), 1, tokens_per_rank, speeds, numbered(nodes), offload, recomputation)

    @property
    def max_tokens(self) -> int:
        """Length of the longest admissible sequence."""
        return self.num_ranks * self.most_tokens_per_rank

    @property
    def most_tokens_per_rank(self) -> int:
        """Tokens of the largest pack that one rank holds."""
        return max(self.tokens_per_rank, self.layer_share.tokens_per_rank)

    @property
    def layer_share(self) -> LayerShare:
        """The layers of packs with more than `tokens_per_rank` that are moved or recomputed."""
        return self.offload if self.offload.share else self.recomputation

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks are on more than one node."""
        return len({self.nodes[rank] for rank in ranks}) > 1
