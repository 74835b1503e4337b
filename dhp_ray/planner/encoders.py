"""Which member of a group encodes which image: longest first, each to the member that would finish it first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def encoders_of(image_s: Sequence[float], speeds: Sequence[float]) -> tuple[tuple[int, ...], float]:
    """The member that encodes each image, and the seconds of the member that takes longest.

    `image_s`: cost of each image on a nominal rank, in order; `speeds`: one a member. Longest processing time first (Graham 1969), O(n log(n d)); ties go to
    the earlier image and the lower member, so every member computes the same.
    """
    if len(speeds) == 1:
        return (0,) * len(image_s), sum(image_s) / speeds[0]
    members = [0] * len(image_s)
    if not image_s:
        return (), 0.0
    if len(set(speeds)) == 1:
        free = [(0.0, member) for member in range(len(speeds))]
        for index in sorted(range(len(image_s)), key=lambda index: -image_s[index]):
            busy, member = heapq.heappop(free)
            members[index] = member
            heapq.heappush(free, (busy + image_s[index] / speeds[0], member))
        return tuple(members), max(busy for busy, _ in free)
    loads = [0.0] * len(speeds)
    for index in sorted(range(len(image_s)), key=lambda index: -image_s[index]):
        member = min(range(len(speeds)), key=lambda member: (loads[member] + image_s[index] / speeds[member], member))
        loads[member] += image_s[index] / speeds[member]
        members[index] = member
    return tuple(members), max(loads)
