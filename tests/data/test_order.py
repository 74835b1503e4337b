from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.data.order import FIRST_ROWS, EpochOrder, Share, fragment_order, row_order

Row = tuple[int, int]
"""Position of the fragment, place in it."""


def rows_from(order: EpochOrder, num_rows: int = 0) -> list[tuple[Row, int]]:
    """The rows after so many, each with the fragments read by then, as the stream takes them."""
    first, floor, left_out = order.start_at(num_rows)
    found: list[tuple[Row, int]] = []
    opened: list[tuple[float, Row]] = []
    for position in range(first, len(order)):
        for place, where in enumerate(order.places(position).tolist()):
            if where >= floor:
                heapq.heappush(opened, (where, (position, place)))
        known = order.begins[position + 1] if position + 1 < len(order) else math.inf
        while opened and opened[0][0] < known:
            found.append((heapq.heappop(opened)[1], position + 1))
    return found[left_out:]


def order_of(
    sizes: list[int], window: tuple[int, float], num_bytes: list[int] | None = None, seed: int = 3, epoch: int = 1
) -> EpochOrder:
    return EpochOrder(seed, epoch, np.array(sizes), np.array(num_bytes or [0] * len(sizes)), *window)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1000)), min_size=1, max_size=30),
    st.integers(0, 400),
    st.integers(1, 10_000),
    st.data(),
)
def test_every_row_comes_once_and_any_row_can_be_resumed_at(
    fragments: list[tuple[int, int]], rows: int, num_bytes: int, data: st.DataObject
) -> None:
    sizes, weights = (list(column) for column in zip(*fragments))
    order = order_of(sizes, (rows, num_bytes), weights)
    whole = [row for row, _ in rows_from(order)]
    assert sorted(whole) == [(position, place) for position, size in enumerate(order.sizes) for place in range(size)]
    for start in [0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=5))]:
        assert [row for row, _ in rows_from(order, start)] == whole[start:]


def shares_from(order: EpochOrder, num_rows: int) -> list[Share]:
    """All that is read to continue after so many rows."""
    opening, position = order.opening(num_rows)
    return opening + [order.whole(number) for number in range(position, len(order))]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 1000)), min_size=1, max_size=30), st.integers(0, 2000),
       st.integers(1, 10_000), st.data())
def test_what_is_read_first_does_not_change_the_order(
    fragments: list[tuple[int, int]], rows: int, num_bytes: int, data: st.DataObject
) -> None:
    sizes, weights = (list(column) for column in zip(*fragments))
    order = order_of(sizes, (rows, num_bytes), weights)
    start = data.draw(st.integers(0, sum(sizes)))
    shares = shares_from(order, start)
    found: list[Row] = []
    opened: list[tuple[float, Row]] = []
    for number, share in enumerate(shares):
        for position, first, stop in share.parts:
            places = order.places(position)
            assert places[first] >= share.begin
            for place in range(first, stop):
                heapq.heappush(opened, (places[place], (position, place)))
        known = shares[number + 1].begin if number + 1 < len(shares) else math.inf
        while opened and opened[0][0] < known:
            found.append(heapq.heappop(opened)[1])
    assert found[order.start_at(start)[2] :] == [row for row, _ in rows_from(order, start)]


@pytest.mark.parametrize("start", [0, 5000])
def test_few_rows_are_read_before_the_first_ones(start: int) -> None:
    order = order_of([100] * 400, (4096, 1e9))
    shares = shares_from(order, start)
    left_out = order.start_at(start)[2]
    rows, known = np.cumsum([share.num_rows for share in shares]), np.array([share.begin for share in shares])
    read = rows[np.searchsorted(known, known[0], side="right") - 1] if not start else left_out + FIRST_ROWS
    assert read == left_out + FIRST_ROWS
    assert read in rows[:5]
    assert sum(share.num_rows for share in shares) == 40_000 - start + left_out


def test_resuming_reads_no_more_than_the_window() -> None:
    order = order_of([32] * 400, (640, 1e9))
    for start in (1000, 6400, 12_000):
        first, _, _ = order.start_at(start)
        assert start // 32 - 24 <= first <= start // 32 + 1


@pytest.mark.parametrize("window", [(100, 1e9), (10**6, 800), (500, 300),
                                    (10**6, 1)])
def test_what_is_open_is_within_the_window_and_one_fragment(window: tuple[int, float]) -> None:
    sizes, num_bytes = np.random.default_rng(1).integers(1, 50, 80), np.random.default_rng(2).integers(1, 100, 80)
    order = EpochOrder(3, 0, sizes, num_bytes, *window)
    rows = rows_from(order)
    last = {row[0]: number for number, (row, _) in enumerate(rows)}
    sizes, num_bytes = sizes[order.fragments], num_bytes[order.fragments]
    for number, (_, read) in enumerate(rows):
        still = [position for position in range(read) if last[position] >= number]
        assert sizes[still].sum() <= window[0] + sizes[still].max()
        assert num_bytes[still].sum() <= window[1] + num_bytes[still].max()


def test_without_a_window_fragments_follow_one_another() -> None:
    for rows in (0, 1):
        order = order_of([5, 7, 300, 2], (rows, 1e9))
        expected = [(position, place) for position, size in enumerate(order.sizes) for place in range(size)]
        assert [row for row, _ in rows_from(order)] == expected


def shares_of(sources: np.ndarray, batch: int = 64) -> float:
    """The most frequent source's share of a batch, in the mean."""
    batches = [sources[start : start + batch] for start in range(0, len(sources), batch)]
    return float(np.mean([np.bincount(each).max() / batch for each in batches]))


def test_a_window_of_a_tenth_mixes_almost_like_a_perfect_shuffle() -> None:
    """40,000 rows sorted by four sources, in 400 row groups."""
    perfect = shares_of(np.random.default_rng(0).permutation(np.arange(40_000) // 10_000))
    order = order_of([100] * 400, (4000, 1e9))
    rows = rows_from(order)
    assert shares_of(np.array([order.fragments[position] // 100 for (position, _), _ in rows])) <= 1.15 * perfect
    apart = order_of([100] * 400, (0, 1e9))
    sources = np.array([apart.fragments[position] // 100 for (position, _), _ in rows_from(apart)])
    assert shares_of(sources) > 2.5 * perfect


@pytest.mark.parametrize(("group", "window", "opened"), [
    (100, (4096, 2**31), 16), (100, (1200, 2**31), 12), (32, (4096, 2**31), 16),
    (256, (4096, 2**31), 16), (100, (4096, 95e6), 9),
    (100, (100_000, 1e15), 16)])
def test_the_first_batches_are_mixed(group: int, window: tuple[int, float], opened: int) -> None:
    """12,000 rows of 100 kB, sorted by four sources, in row groups; a perfect shuffle has 0.33."""
    sizes = np.full(12_000 // group, group)
    for seed in range(6):
        order = EpochOrder(seed, 0, sizes, sizes * 10**5, *window)
        rows = rows_from(order)
        assert rows[0][1] == opened
        sources = np.array([order.fragments[position] * 4 // len(sizes) for (position, _), _ in rows[: 40 * 64]])
        shares = [shares_of(batch) for batch in sources.reshape(40, 64)]
        assert np.mean(shares) <= 0.40
        assert max(shares) <= 0.5


def test_all_fragments_of_a_small_set_are_open_at_once() -> None:
    assert rows_from(order_of([10] * 7, (4096, 1e9)))[0][1] == 7


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 31, 120])
def test_fragments_in_a_row_are_from_everywhere_in_the_set(num_fragments: int) -> None:
    """So a prefix has as much of each quarter as of the others; and where a fragment comes is by chance."""
    for seed in range(20):
        order = fragment_order(seed, 0, num_fragments)
        assert sorted(order) == list(range(num_fragments))
        quarters = order * 4 // num_fragments
        for start in range(0, num_fragments - 15, 8):
            assert np.bincount(quarters[start : start + 16], minlength=4).max() <= 6
    firsts = [int(fragment_order(seed, 0, num_fragments)[0]) for seed in range(200)]
    assert len(set(firsts)) >= min(num_fragments, 25)


def test_the_order_is_that_of_seed_epoch_and_fragment() -> None:
    assert sorted(fragment_order(3, 1, 50)) == list(range(50))
    assert len({tuple(fragment_order(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}) == 9
    assert sorted(row_order(3, 1, 7, 32)) == list(range(32))
    assert len({tuple(row_order(seed, epoch, number, 32)) for seed in range(3) for epoch in range(3)
                for number in range(3)}) == 27
    places = [tuple(order_of([8, 8], (100, 1e9), seed=seed, epoch=epoch).places(0)) for seed in range(3)
              for epoch in range(3) for _ in range(2)]
    assert len(set(places)) == 9
