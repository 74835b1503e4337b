"""The ranks that a batch is planned for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from dhp_ray.planner.checks import PlanError
from dhp_ray.planner.layer_share import NO_OFFLOAD, NO_RECOMPUTATION, LayerShare, Offload, Recomputation
from dhp_ray.planner.nodes import numbered, regular_nodes, sizes_of


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
            if not 0.0 < speed < float("inf"):
                raise PlanError(f"cluster: rank {rank} has speed {speed}; it must be above 0 and finite")
        regular = regular_nodes(self.num_ranks, self.ranks_per_node)
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
        numbers = numbered(nodes)
        return cls(len(numbers), max(sizes_of(numbers), default=0), tokens_per_rank, speeds, numbers, offload,
                   recomputation)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> ClusterSpec:
        """The cluster of a plan file; older files have no `inputs.nodes`."""
        speeds, nodes = tree["inputs"]["speeds"], tree["inputs"].get("nodes", ())
        return cls(tree["num_ranks"], tree["ranks_per_node"], tree["tokens_per_rank"], tuple(speeds), tuple(nodes),
                   Offload.from_json(tree["inputs"]), Recomputation.from_json(tree["inputs"]))

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
