"""The node of each rank, as numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def regular_nodes(num_ranks: int, ranks_per_node: int) -> tuple[int, ...]:
    """Nodes of equal size, one after another; the last one may be smaller."""
    return tuple([rank // ranks_per_node for rank in range(num_ranks)])


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
