"""How an image is cut if several ranks encode it: between its steps in time, or tiles, which attend only to themselves.
Each part is encoded like an image of its own:

    grid (5, 4, 8) over 2 ranks    steps 0 1 2 | 3 4
"""

from __future__ import annotations

Grid = tuple[int, int, int]


def cut_in_time(grid: Grid, num_parts: int) -> list[Grid]:
    """The parts of an image, as equal as possible, larger ones first."""
    time, height, width = grid
    return [(time // num_parts + (part < time % num_parts), height, width) for part in range(num_parts)]


def shares(grid: Grid, num_parts: int) -> list[float]:
    """The share of an image's patches that each part has."""
    return [steps / grid[0] for steps, *_ in cut_in_time(grid, num_parts)]
