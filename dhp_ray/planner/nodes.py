"""The node of each rank, as numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def regular_nodes(num_ranks: int, ranks_per_node: int) -> tuple[int, ...]:
    """Nodes of equal size, one after the other; the last one may be smaller."""
    return tuple([rank // ranks_per_node for rank in range(num_ranks)])


def numbered(nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """The same nodes by numbers from 0 on, in the order in which they come first."""
    number = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    return tuple([number[node] for node in nodes])


def sizes_of(nodes: Sequence[int]) -> list[int]:
    """Ranks of each node."""
    sizes = [0] * (max(nodes, default=-1) + 1)
    for node in nodes:
        sizes[node] += 1
    return sizes
