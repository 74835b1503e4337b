"""A slow and obvious version of `dhp_ray/simulate/links.py`: at every event, all that runs is looked at anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass
class Group:
    """A pack on its ranks, in ring order; seconds of computing, of its exchanges alone, and what hides them."""

    ranks: tuple[int, ...]
    compute_s: Fraction
    transfer_s: Fraction
    hidden_s: Fraction


def leaving(group: Group, node_of: Sequence[int], node: int) -> int:
    """How often the ring goes from a rank of this node to one of another."""
    following = (*group.ranks[1:], group.ranks[0])
    return sum(node_of[rank] == node != node_of[other] for rank, other in zip(group.ranks, following))


def simulate(
    groups: Sequence[Group], node_of: Sequence[int], links_of_node: Sequence[int], links_of_all: Fraction,
    ready_s: Sequence[Fraction], beside: Sequence[int], beside_s: Fraction,
) -> list[tuple[Fraction, Fraction]]:
    """(start, end) of each group: it begins once all groups before it that share a rank have ended, and its ranks are
    ready."""
    starts: dict[int, Fraction] = {}
    ends: dict[int, Fraction] = {}
    done = dict.fromkeys(range(len(groups)), Fraction(0))  # share of each group
    now = Fraction(0)
    while len(ends) < len(groups):
        for index, group in enumerate(groups):
            before = [other for other in range(index) if set(groups[other].ranks) & set(group.ranks)]
            if index not in starts and all(other in ends for other in before) and all(
                    ready_s[rank] <= now for rank in group.ranks):
                starts[index] = now
        running = [index for index in starts if index not in ends]
        busy = [sum(leaving(groups[index], node_of, node) for index in running)
                + (beside[node] if now < beside_s else 0) for node in range(len(links_of_node))]
        times = {}
        for index in running:
            group, share = groups[index], Fraction(1)
            for node, links in enumerate(links_of_node):
                if leaving(group, node_of, node):
                    share = min(share, Fraction(links, busy[node]), links_of_all / sum(busy))
            times[index] = group.compute_s + max(Fraction(0), group.transfer_s / share - group.hidden_s)
        moments = [now + (1 - done[index]) * times[index] for index in running]
        moments += [moment for moment in (*ready_s, beside_s) if moment > now]
        then = min(moments)
        for index in running:
            done[index] = done[index] + (then - now) / times[index] if times[index] else Fraction(1)
            if done[index] == 1:
                ends[index] = then
        now = then
    return [(starts[index], ends[index]) for index in range(len(groups))]
