from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dhp_ray.model.families.qwen2_5_vl import mrope_positions
from tests.model.paper_positions import paper_positions

Grid = tuple[int, int, int]


def tokens(parts: list[int | tuple[Grid, float]]) -> tuple[list[bool], list[tuple[Grid, float]]]:
    """Which tokens are of a picture, and the pictures, of runs of text (their length) and pictures."""
    is_vision: list[bool] = []
    for part in parts:
        is_vision += [False] * part if isinstance(part, int) else [True] * (part[0][0] * part[0][1] * part[0][2])
    return is_vision, [part for part in parts if not isinstance(part, int)]


def positions(parts: list[int | tuple[Grid, float]]) -> list[list[int]]:
    is_vision, media = tokens(parts)
    found = mrope_positions(torch.tensor(is_vision, dtype=torch.bool), [grid for grid, _ in media],
                            [interval for _, interval in media])
    assert found.dtype == torch.int64
    return found.T.tolist()  # type: ignore[no-any-return]


MEDIA = st.tuples(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
                  st.sampled_from([0.0, 0.4, 1.0, 1.9, 2.0, 25.0]))


@given(st.lists(st.integers(0, 9) | MEDIA, max_size=8))
def test_positions_are_those_of_the_paper(parts: list[int | tuple[Grid, float]]) -> None:
    """Also of pictures beside each other, at the beginning and at the end."""
    is_vision, media = tokens(parts)
    assert positions(parts) == [list(place) for place in paper_positions(is_vision, media)]


def test_text_behind_a_long_video_goes_on_after_its_time() -> None:
    """60 s in a grid of (60, 20, 28) patches, a step a second, two positions a second."""
    found = positions([15, ((60, 10, 14), 2.0), 3])
    assert found[15] == [15, 15, 15]
    assert found[-4] == [133, 24, 28]
    assert found[-3:] == [[134] * 3, [135] * 3, [136] * 3]


def test_text_behind_a_short_video_goes_on_after_its_larger_side() -> None:
    assert positions([1, ((2, 2, 9), 2.0), 1])[-1] == [10, 10, 10]
    assert positions([1, ((2, 9, 2), 2.0), 1])[-1] == [10, 10, 10]
