"""How an image is cut if several ranks encode it, one part each.

Time steps (and tiles) attend only to themselves, so an image with several is cut there first, into runs of whole steps,
each of which is encoded like a separate image. Into more parts than it has steps it is cut by its vision tokens, in the
encoder's own order, and the parts attend to one another over a ring of their ranks:

    grid (5, 4, 8) over 2 ranks    steps 0 1 2 | 3 4
    grid (1, 4, 8) over 2 ranks    tokens of the windows 0 1 | 2 3, a ring
"""

from __future__ import annotations

from math import prod

Grid = tuple[int, int, int]


def exchanges(grid: Grid, num_parts: int) -> bool:
    """Whether this many parts of an image attend to one another."""
    return num_parts > grid[0]


def cut_in_time(grid: Grid, num_parts: int) -> list[Grid]:
    """The parts of an image, as equal as possible, larger ones first."""
    time, height, width = grid
    return [(time // num_parts + (part < time % num_parts), height, width) for part in range(num_parts)]


def shares(grid: Grid, num_parts: int) -> list[float]:
    """The share of an image's patches that each part has. If the image is cut by tokens the shares count as equal; real
    parts differ by up to one window.
    """
    if exchanges(grid, num_parts):
        return [1.0 / num_parts] * num_parts
    return [steps / grid[0] for steps, *_ in cut_in_time(grid, num_parts)]


def most_parts(grid: Grid, piece_patches: float) -> int:
    """The most parts that an image can be cut into: one for each time step, or one for every `piece_patches` patches if
    the family can cut by tokens. `piece_patches` 0: the image stays whole.
    """
    if not piece_patches:
        return 1
    return max(grid[0], int(prod(grid) // piece_patches))
