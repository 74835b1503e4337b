"""When packs run whose exchanges share the links between nodes.

    node 0   rank 0 |--- pack a ------------|           a's ring leaves node 0 once, and so does b's: if the node has
             rank 1      |--- pack b --|                one link, each has half of it while both run
    node 1   rank 2 |--- pack a ------------|
             rank 3      |--- pack b --|

A ring that crosses nodes occupies one link of a node for each time that it leaves this node. If rings leave a node more
often than it has links, they share the links equally, and the slowest link of a ring sets its pace. So the time of a
pack changes whenever another pack that shares a node with it begins or ends: these are the events.

A pack occupies its links as long as it runs, even while attention hides its exchanges, so that no pack comes out
shorter than it would be. Inside a node every rank has its own link, and nothing is shared.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.schedule import by_owner
from dhp_ray.simulate.pack_work import PackWork


class Links(NamedTuple):
    """The capacity of the network between nodes, in links of one rank: `of_node` from each node, `of_all` in all."""

    of_node: np.ndarray
    of_all: float


class Uses(NamedTuple):
    """How many links of which nodes each group occupies: `node[first[g]:first[g + 1]]`, and `links` likewise."""

    first: np.ndarray
    node: np.ndarray
    links: np.ndarray


def links_of(nodes: np.ndarray, links_per_node: int, oversubscription: float) -> Links:
    """The links of these ranks' nodes; `links_per_node` 0: one for each rank of a node."""
    sizes = np.bincount(nodes).astype(np.float64)
    of_node = np.where(sizes > 0, links_per_node or sizes, 0.0)
    return Links(of_node, float(of_node.sum()) / oversubscription)


def uses_of(work: PackWork, nodes: np.ndarray, ring: bool) -> Uses:
    """The links that each group needs; none for groups inside a node.

    ring: a rank sends only to the next rank of its group; otherwise to all others, and the share that leaves the node
    counts.
    """
    degrees, group = work.degrees, np.repeat(np.arange(len(work.degrees)), work.degrees)
    node = nodes[work.ranks]
    if ring:
        following = np.arange(1, len(work.ranks) + 1)
        following[work.first_rank[1:] - 1] = work.first_rank[:-1]
        amount = (node != node[following]).astype(np.float64)
    else:
        amount = np.ones(len(work.ranks))
    crossing = work.crosses[group]
    key, place = np.unique(group[crossing] * (int(nodes.max()) + 1) + node[crossing], return_inverse=True)
    count = np.bincount(place, amount[crossing], len(key))
    owner, of_node = np.divmod(key, int(nodes.max()) + 1)
    if not ring:
        count = count * (degrees[owner] - count) / np.maximum(1, degrees[owner] - 1)
    order, first = by_owner(owner, len(degrees))
    return Uses(first, of_node[order], count[order])


def contended(uses: Uses, links: Links, beside: np.ndarray | None = None) -> bool:
    """Whether groups would share a link if all of them ran at once; `beside`: links of each node that other traffic
    occupies.
    """
    wanted = np.bincount(uses.node, uses.links, len(links.of_node)) + (0.0 if beside is None else beside)
    return bool(len(uses.node)) and bool((wanted > links.of_node).any() or wanted.sum() > links.of_all)


def run_groups(
    ready_s: np.ndarray, work: PackWork, uses: Uses, links: Links, beside: np.ndarray, beside_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (start, end) of each group. A rank is ready at `ready_s` and runs its groups in order; a group begins as
    soon as all of its ranks are free. For the first `beside_s` seconds other traffic occupies `beside` links of each
    node.
    """
    return _run_groups(ready_s, work.ranks, work.first_rank, work.compute_s, work.transfer_s, work.hidden_s, uses.first,
                       uses.node, uses.links, links.of_node, links.of_all, beside, beside_s)


@compiled
def _run_groups(
    ready_s: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray, compute_s: np.ndarray, transfer_s: np.ndarray,
    hidden_s: np.ndarray, first_use: np.ndarray, use_node: np.ndarray, use_links: np.ndarray, of_node: np.ndarray,
    of_all: float, beside: np.ndarray, beside_s: float,
) -> tuple[np.ndarray, np.ndarray]:
    num_groups, num_ranks = len(compute_s), len(ready_s)
    queue_first = np.zeros(num_ranks + 1, dtype=np.int64)  # where the groups of each rank begin in `queue`
    for rank in ranks:
        queue_first[rank + 1] += 1
    for rank in range(num_ranks):
        queue_first[rank + 1] += queue_first[rank]
    queue, place = np.empty(len(ranks), dtype=np.int64), queue_first[:-1].copy()
    for group in range(num_groups):
        for rank in ranks[first_rank[group] : first_rank[group + 1]]:
            queue[place[rank]] = group
            place[rank] += 1
    place[:] = queue_first[:-1]
    missing = first_rank[1:] - first_rank[:-1]  # members that are not free yet
    starts, ends = np.zeros(num_groups), np.zeros(num_groups)
    left, since, pace = np.ones(num_groups), np.zeros(num_groups), np.zeros(num_groups)
    turn = np.zeros(num_groups, dtype=np.int64)  # number of a group's latest end in the heap; older ones are void
    crossing, num_crossing = np.empty(num_groups, dtype=np.int64), 0  # groups that run and use links
    where = np.empty(num_groups, dtype=np.int64)
    load, load_of_all = beside.copy(), beside.sum()
    heap = [(beside_s, 0, num_groups)]  # seconds, turn, group; a negative number is a rank that is ready
    for rank in range(num_ranks):
        if queue_first[rank] < queue_first[rank + 1]:
            heap.append((ready_s[rank], 0, -1 - rank))
    heapify(heap)
    free = np.empty(num_ranks, dtype=np.int64)
    while heap:
        now, number, event = heappop(heap)
        num_free, changed = 0, False
        if event == num_groups:
            load -= beside
            load_of_all -= beside.sum()
            changed = True
        elif event < 0:
            free[0], num_free = -1 - event, 1
        elif number == turn[event]:
            ends[event] = now
            for rank in ranks[first_rank[event] : first_rank[event + 1]]:
                place[rank] += 1
                if place[rank] < queue_first[rank + 1]:
                    free[num_free] = rank
                    num_free += 1
            if first_use[event] < first_use[event + 1]:
                changed, num_crossing = True, num_crossing - 1
                crossing[where[event]] = crossing[num_crossing]
                where[crossing[num_crossing]] = where[event]
                for use in range(first_use[event], first_use[event + 1]):
                    load[use_node[use]] -= use_links[use]
                    load_of_all -= use_links[use]
        for rank in free[:num_free]:
            group = queue[place[rank]]
            missing[group] -= 1
            if missing[group]:
                continue
            starts[group] = since[group] = now
            if first_use[group] == first_use[group + 1]:
                time_s = compute_s[group] + max(0.0, transfer_s[group] - hidden_s[group])
                heappush(heap, (now + time_s, 0, group))
                continue
            changed, where[group], pace[group] = True, num_crossing, 0.0
            crossing[num_crossing] = group
            num_crossing += 1
            for use in range(first_use[group], first_use[group + 1]):
                load[use_node[use]] += use_links[use]
                load_of_all += use_links[use]
        if not changed:
            continue
        for group in crossing[:num_crossing]:
            share = min(1.0, of_all / load_of_all)
            for use in range(first_use[group], first_use[group + 1]):
                share = min(share, of_node[use_node[use]] / load[use_node[use]])
            time_s = compute_s[group] + max(0.0, transfer_s[group] / share - hidden_s[group])
            if time_s == pace[group]:
                continue
            if pace[group] > 0.0:
                left[group] = max(0.0, left[group] - (now - since[group]) / pace[group])
            since[group], pace[group] = now, time_s
            turn[group] += 1
            heappush(heap, (now + left[group] * time_s, turn[group], group))
    return starts, ends
