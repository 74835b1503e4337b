"""Who encodes which image where any rank may: the balance of images that one rank each encodes."""

from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner.encoder.world import EVEN, FAR, _fullest_first, _longest_first, balanced_encoders
from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.schedule import firsts_of


@compiled
def longest_first(image_s, group_of_image, ranks, first_rank, speeds, least_s):
    encoder, order = np.zeros(len(image_s), dtype=np.int64), ascending(-image_s)
    end_s = _longest_first(image_s, order, group_of_image, ranks, first_rank, speeds, least_s, encoder)
    return encoder, end_s


@compiled
def fullest_first(image_s, speeds, least_s, most_s):
    encoder = np.zeros(len(image_s), dtype=np.int64)
    return _fullest_first(image_s, ascending(-image_s), speeds, least_s, most_s, encoder)


class Case(NamedTuple):
    """Images, the group of each, the ranks of each group, and their speeds."""

    images: list[float]
    group_of: list[int]
    groups: list[list[int]]
    speeds: list[float]

    @property
    def least_s(self) -> float:
        return max(sum(self.images) / sum(self.speeds), max(self.images) / max(self.speeds))

    @property
    def most_s(self) -> float:
        """All images on the fastest rank."""
        return sum(self.images) / max(self.speeds)

    def arrays(self):
        return (np.array(self.images, dtype=np.float64), np.array(self.group_of, dtype=np.int64),
                np.array([rank for group in self.groups for rank in group]),
                firsts_of([len(group) for group in self.groups]), np.array(self.speeds))

    def ends_s(self, encoder) -> list[float]:
        return [sum(image for image, where in zip(self.images, encoder) if where == rank) / speed
                for rank, speed in enumerate(self.speeds)]


@st.composite
def cases(draw, most_images=40, most_ranks=6, speeds=(0.5, 1.0, 1.5)):
    images = draw(st.lists(st.integers(1, 30), min_size=1, max_size=most_images))
    num_ranks, random = draw(st.integers(1, most_ranks)), draw(st.randoms(use_true_random=False))
    speeds = [random.choice(speeds) for _ in range(num_ranks)] if draw(st.booleans()) else [1.0] * num_ranks
    groups = [sorted(random.sample(range(num_ranks), random.randint(1, num_ranks))) for _ in range(4)]
    return Case(images, [random.randrange(4) for _ in images], groups, speeds)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_an_image_goes_home_where_that_ends_in_time_and_else_to_who_is_done_first(case):
    """The first start."""
    found, end_s = longest_first(*case.arrays(), case.least_s)
    loads = [0.0] * len(case.speeds)
    for image in sorted(range(len(case.images)), key=lambda image: -case.images[image]):
        ends = [load + case.images[image] / speed for load, speed in zip(loads, case.speeds)]
        rank, homes = int(found[image]), case.groups[case.group_of[image]]
        at_home = min(ends[member] for member in homes)
        if at_home == pytest.approx(case.least_s):  # whichever way it is rounded
            assert ends[rank] == pytest.approx(at_home if rank in homes else min(ends))
        elif at_home <= case.least_s:
            assert rank in homes
            assert ends[rank] == pytest.approx(at_home)
        else:
            assert ends[rank] == pytest.approx(min(ends))
        loads[rank] = ends[rank]
    assert end_s == pytest.approx(loads)


def best_fit(case, limit_s):
    """Largest first, each to the rank with the least room that holds it; None where one fits nowhere."""
    room = [limit_s * speed for speed in case.speeds]
    for image in sorted(case.images, reverse=True):
        holding = [rank for rank in range(len(room)) if room[rank] >= image]
        if not holding:
            return None
        room[min(holding, key=lambda rank: room[rank])] -= image
    return [limit_s - left / speed for left, speed in zip(room, case.speeds)]


@settings(max_examples=100, deadline=None)
@given(cases(speeds=(0.5123, 1.0, 1.4717)))
def test_best_fit_under_the_least_limit_that_bisection_finds(case):
    """The last start. The speeds are such that no two ranks of unequal speed have the same room."""
    image_s, *_, speeds = case.arrays()
    most_s = case.most_s
    short_s, long_s = case.least_s, most_s
    while long_s - short_s > EVEN * long_s:
        middle_s = (short_s + long_s) / 2
        short_s, long_s = (middle_s, long_s) if best_fit(case, middle_s) is None else (short_s, middle_s)
    found, expected = fullest_first(image_s, speeds, case.least_s, most_s), best_fit(case, long_s)
    if long_s == most_s or expected is None:
        assert np.isinf(found).all()
    else:
        assert sorted(found) == pytest.approx(sorted(expected))


@settings(max_examples=50, deadline=None)
@given(cases(most_images=7, most_ranks=3, speeds=[1.0]))
def test_balanced_images_are_near_the_optimum(case):
    """Of all assignments. After LPT, MULTIFIT is at most 13/11 of it (Yue 1990)."""
    best_s = min(max(case.ends_s(encoder)) for encoder in product(range(len(case.speeds)), repeat=len(case.images)))
    assert max(case.ends_s(balanced_encoders(*case.arrays()))) <= best_s * 13 / 11 * (1 + EVEN)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_balanced_images_are_no_worse_than_either_start(case):
    arrays = case.arrays()
    image_s, *_, speeds = arrays
    fullest_s = max(case.ends_s(balanced_encoders(*arrays)))
    assert fullest_s <= longest_first(*arrays, case.least_s)[1].max() * (1 + 1e-9)
    if fullest_s > case.least_s * (1 + FAR):
        assert fullest_s <= fullest_first(image_s, speeds, case.least_s, case.most_s).max() * (1 + 1e-9)


def test_the_starts_of_the_docstring():
    assert balanced_at([6, 2, 2, 2], [0, 0, 0, 1], [[0], [1]]) == [6, 6]
    assert balanced_at([5, 3, 2, 2, 2, 2], [0] * 6, [[0, 1]]) == [8, 8]


def balanced_at(images, group_of, groups):
    case = Case(images, group_of, groups, [1.0, 1.0])
    return case.ends_s(balanced_encoders(*case.arrays()))
