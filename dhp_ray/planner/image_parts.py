"""How an image is cut that several ranks encode, a part each.

Steps in time (and tiles) attend to themselves alone, so an image of several is cut there first, into runs of whole
steps: each is encoded as an image of its own. Into more parts than it has steps it is cut by its vision tokens, in the
encoder's own order, and the parts attend to one another over a ring of their ranks:

    grid (5, 4, 8) over 2 ranks    steps 0 1 2 | 3 4
    grid (1, 4, 8) over 2 ranks    tokens of the windows 0 1 | 2 3, a ring
"""

from __future__ import annotations

from math import prod

Grid = tuple[int, int, int]


def exchanges(grid: Grid, num_parts: int) -> bool:
    """Whether so many parts of an image attend to one another."""
    return num_parts > grid[0]


def cut_in_time(grid: Grid, num_parts: int) -> list[Grid]:
    """The parts of an image, as equal as can be, larger ones first."""
    time, height, width = grid
    return [(time // num_parts + (part < time % num_parts), height, width) for part in range(num_parts)]


def shares(grid: Grid, num_parts: int) -> list[float]:
    """Of an image's patches; where it is cut by tokens, but for the windows at the cuts."""
    if exchanges(grid, num_parts):
        return [1.0 / num_parts] * num_parts
    return [steps / grid[0] for steps, *_ in cut_in_time(grid, num_parts)]


def most_parts(grid: Grid, piece_patches: float) -> int:
    """Of an image that is cut by tokens between pieces of at most so many patches; 0: it is not cut at all."""
    if not piece_patches:
        return 1
    return max(grid[0], int(prod(grid) // piece_patches))
