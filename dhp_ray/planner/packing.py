"""Best-fit decreasing: sequences into packs, by memory alone (arXiv 2602.21788, stage 1)."""

from __future__ import annotations

import bisect

import numpy as np


def best_fit_decreasing(tokens: np.ndarray, minimum_degree: np.ndarray, tokens_per_rank: int, degree: int = 0) -> list[list[int]]:
    """Rows of each pack, longest first. O(K log K) comparisons.

    A pack holds `d * tokens_per_rank` tokens, where d is its first (longest) sequence's minimum degree, or `degree` where given; a sequence goes to the open
    pack with the least room left that still fits it. (A pack's d is never below a later sequence's: they come longest first.)
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, pack), ascending
    for row in np.argsort(-tokens, kind="stable").tolist():
        need = int(tokens[row])
        place = bisect.bisect_left(rooms, (need, -1))
        if place < len(rooms):
            room, pack = rooms.pop(place)
        else:
            room, pack = (degree or int(minimum_degree[row])) * tokens_per_rank, len(packs)
            packs.append([])
        packs[pack].append(row)
        bisect.insort(rooms, (room - need, pack))
    return packs
