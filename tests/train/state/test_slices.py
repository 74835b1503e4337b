"""How units are cut over the ranks of a node: nothing is lost, nothing twice."""

from __future__ import annotations

import random

import pytest

from dhp_ray.train.state.buckets import FlatLayout
from dhp_ray.train.state.slices import HeldMap, Slices, Unit


def example(seed):
    rng = random.Random(seed)
    units, shapes = [], {}
    for number in range(rng.randint(1, 5)):
        own = {f"{number}.{name}": (rng.randint(1, 40), rng.randint(1, 9)) for name in range(rng.randint(1, 4))}
        frozen = {name for name in own if rng.random() < 0.3}
        units.append(Unit.of(own, frozen))
        shapes |= {name: shape for name, shape in own.items() if name not in frozen}
    table = (rng.randint(2, 50), 7)
    units.append(Unit.of({"table": table}, row=7))
    shapes["table"] = table
    names = list(shapes)
    rng.shuffle(names)
    return units, {name: shapes[name] for name in names}


@pytest.mark.parametrize("seed", range(30))
def test_members_have_every_trained_element_once(seed):
    units, shapes = example(seed)
    layout = FlatLayout(shapes, 3, 50)
    for num_members in (1, 2, 3, 5):
        for width, trained_only in ((4, True), (2, False)):
            slices = Slices(units, num_members, width, trained_only)
            held = slices.pieces(units, layout)
            covered = sorted(element for piece in held for element in range(piece.start, piece.stop))
            assert covered == sorted(element for name in shapes for element in range(
                layout.interval(name).start, layout.interval(name).stop))
            for member in range(num_members):
                places = [place for piece in held if piece.member == member
                          for place in range(piece.offset, piece.offset + piece.stop - piece.start)]
                assert len(places) == len(set(places))
                assert all(0 <= place < slices.region for place in places)


@pytest.mark.parametrize("seed", range(10))
def test_ranges_are_found_in_order(seed):
    units, shapes = example(seed)
    layout = FlatLayout(shapes, 3, 50)
    held = Slices(units, 3, 4, True).pieces(units, layout)
    finder, rng = HeldMap(held), random.Random(seed)
    for _ in range(50):
        start = rng.randrange(layout.size)
        stop = rng.randint(start + 1, layout.size)
        expected = [(max(piece.start, start), min(piece.stop, stop), piece.member) for piece in held
                    if max(piece.start, start) < min(piece.stop, stop)]
        assert [piece[:3] for piece in finder.within(start, stop)] == expected


def test_rows_are_not_cut():
    unit = Unit.of({"table": (31, 12)}, row=12)
    for width in (2, 4):
        slices = Slices([unit], 4, width, False)
        assert all(start % 12 == 0 for start, _ in (slices.of_member(0, member) for member in range(4)))
        assert slices.of_member(0, 3)[1] == 31 * 12


def test_a_unit_without_trained_parameters_has_no_sums():
    unit = Unit.of({"a": (5, 5), "b": (3,)}, {"a", "b"})
    assert Slices([unit], 2, 4, trained_only=True).region == 0
    assert Slices([unit], 2, 4, trained_only=False).region >= 28 // 2
