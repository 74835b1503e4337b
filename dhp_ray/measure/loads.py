"""Chooses the packs to measure: their sequences of text and images, from small to large, and the samples that they are
made of.

A cost is a sum of terms, and the packs must separate these terms: single sequences of growing length (attention grows
with the square), as many tokens in short sequences (attention does not), few and many images of several sizes. About
half of the packs are mixed at random like batches, because these are the packs whose time is to be predicted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.plan import Grid, Sample

SHORTEST = 32
"""Text tokens of the shortest sequence."""
TEXT_BESIDE_IMAGES = 40
MIXED, MIXED_QUICK = 14, 6
"""Number of packs that are mixed at random."""

Load = tuple[tuple[int, tuple[Grid, ...]], ...]
"""A pack: for each of its sequences, the number of text tokens and the grids of its images."""


class Sizes(NamedTuple):
    """What packs may hold: at most `max_tokens` tokens a rank, `grids` of images from small to large (none: the model
    has no encoder), and `merge_area`, the number of patches in one vision token.
    """

    max_tokens: int
    grids: tuple[Grid, ...]
    merge_area: int

    def tokens(self, load: Load) -> int:
        return sum(text + self.vision_tokens(grids) for text, grids in load)

    def vision_tokens(self, grids: Sequence[Grid]) -> int:
        return sum(map(prod, grids)) // self.merge_area

    def fits(self, load: Load, degree: int = 1) -> bool:
        return self.tokens(load) <= degree * self.max_tokens


def text_loads(sizes: Sizes, quick: bool, degree: int = 1) -> list[Load]:
    """Packs without images for `degree` ranks together."""
    most = degree * sizes.max_tokens
    lengths = geometric(min(SHORTEST * degree, most), most, 5 if quick else 8)
    found: list[Load] = [((length, ()),) for length in lengths]
    for count in (4, 16):
        found += [((length // count, ()),) * count for length in lengths[2 if quick else 1 :: 2] if length >= 8 * count]
    return distinct([*found, *mixed_loads(sizes, MIXED_QUICK if quick else MIXED, False, degree)])


def image_loads(sizes: Sizes, quick: bool, degree: int = 1) -> list[Load]:
    """Packs with images for `degree` ranks together; none if the model has no encoder."""
    found: list[Load] = []
    for grid in sizes.grids:
        found += [((TEXT_BESIDE_IMAGES, (grid,) * count),) for count in ((1, 6) if quick else (1, 3, 9))]
    if sizes.grids:
        found += mixed_loads(sizes, MIXED_QUICK if quick else MIXED, True, degree)
    return distinct([load for load in found if sizes.fits(load, degree) and any(grids for _, grids in load)])


def mixed_loads(sizes: Sizes, count: int, images: bool, degree: int = 1) -> list[Load]:
    """Random packs of one to sixteen sequences, most of them short; equal arguments give equal packs."""
    drawn = random.Random(f"{sizes} {images} {degree}")
    found: list[Load] = []
    for number in range(count):
        room = degree * sizes.max_tokens * (0.25, 0.5, 1.0)[number % 3]
        wanted = (1, 2, 3, 5, 8, 16)[number % 6]
        load: Load = ()
        for _ in range(wanted):
            text = max(8, min(int(room / 2), int(drawn.lognormvariate(0.0, 0.9) * room / (2 * wanted))))
            grids = drawn.choices(sizes.grids, k=drawn.randint(1 - bool(load), 3)) if images else []
            while grids and sizes.tokens((*load, (text, tuple(grids)))) > room:
                grids.remove(max(grids, key=prod))
            if sizes.tokens((*load, (text, tuple(grids)))) <= room:
                load = (*load, (text, tuple(grids)))
        if load:
            found.append(load)
    return found


def geometric(first: int, last: int, count: int) -> list[int]:
    """Whole numbers from `first` to `last` at about equal ratios, without duplicates."""
    return list(dict.fromkeys(round(value) for value in np.geomspace(first, last, count)))


def distinct(loads: Sequence[Load]) -> list[Load]:
    return list(dict.fromkeys(loads))


def samples_of(load: Load, merge_area: int, name: str) -> tuple[Sample, ...]:
    """The sequences of a pack as samples with unique ids."""
    return tuple(Sample(f"{name}.{place}", text, sum(map(prod, grids)) // merge_area, grids)
                 for place, (text, grids) in enumerate(load))
