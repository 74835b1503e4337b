"""What is measured, packs from small to large in rounds (plans like those of a run), and what ranks report of them.

    packs, images     every rank runs the same packs, at the same time, each alone
    rings             neighbours on a node run packs together, in groups of 2, 4, 8, ..., all
    rings across      pairs of ranks on different nodes run packs together

A cost is a sum of terms, and the packs must separate these terms: single sequences of growing length (attention grows
with the square), as many tokens in short sequences (attention does not), few and many images of several sizes. About
half of the packs are mixed at random like batches, because these are the packs whose time is to be predicted. With
sync=micro_batch a micro-batch consists of one pack of each rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Grid, Pack, Plan, Sample
from dhp_ray.train.results import PackTime

SHORTEST = 32
"""Text tokens of the shortest sequence."""
TEXT_BESIDE_IMAGES = 40
MIXED = 8
"""Number of packs that are mixed at random."""
ROUND_TOKENS = 4
"""A round holds at most this many times the tokens of the largest pack, because its inputs are in memory together."""

PARTS = ("packs", "images", "rings", "rings across", "exchanges", "groups")
"""What is measured; the last two have no rounds (`member.py`)."""

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


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to measure, the same on all ranks: how they synchronise, the node of each rank (by number), what packs hold.
    """

    sync: str
    nodes: tuple[int, ...]
    sizes: Sizes

    @property
    def num_ranks(self) -> int:
        return len(self.nodes)

    def degrees(self) -> list[int]:
        """The degrees of rings inside a node: 2, 4, 8, ... and the largest node's number of ranks; none if that is 1.
        """
        most = max(self.nodes.count(node) for node in self.nodes)
        return sorted({*(2**power for power in range(1, most.bit_length()) if 2**power <= most), most} - {1})

    def groups(self, degree: int) -> list[tuple[int, ...]]:
        """Groups of `degree` neighbours inside each node; ranks that are left over are in none."""
        found = []
        for node in sorted(set(self.nodes)):
            ranks = [rank for rank, other in enumerate(self.nodes) if other == node]
            found += [tuple(ranks[first : first + degree]) for first in range(0, len(ranks) - degree + 1, degree)]
        return found

    def pairs_across(self) -> list[tuple[int, ...]]:
        """Pairs of ranks, one of each of the first two nodes; none if there is one node."""
        names = sorted(set(self.nodes))[:2]
        if len(names) < 2:
            return []
        both = [[rank for rank, node in enumerate(self.nodes) if node == name] for name in names]
        return [tuple(sorted(pair)) for pair in zip(*both)]

    def parts(self) -> list[str]:
        """The parts of PARTS that can be measured here."""
        several, images = self.num_ranks > 1, bool(self.sizes.grids)
        left_out = {"images": not images, "rings": not self.degrees(), "rings across": len(set(self.nodes)) == 1,
                    "exchanges": not several, "groups": not several}
        return [part for part in PARTS if not left_out.get(part)]

    def rounds(self, part: str) -> list[Plan]:
        """The rounds of a part; in each of them, a rank runs several packs, one after the other."""
        alone = [(rank,) for rank in range(self.num_ranks)]
        if part == "packs":
            return self._rounds(alone, text_loads(self.sizes))
        if part == "images":
            return self._rounds(alone, image_loads(self.sizes))
        if part == "rings":
            return [plan for degree in self.degrees()
                    for plan in self._rounds(self.groups(degree), self._ring_loads(degree), degree)]
        if part == "rings across":
            return self._rounds(self.pairs_across(), self._ring_loads(2), 2)
        return []

    def plan_of(self, packs: Sequence[tuple[tuple[int, ...], Load]]) -> Plan:
        """A plan of packs in this order. Packs of the same load have the same sequences and are in the same
        micro-batch; their images are dealt out to the ranks in turn.
        """
        samples: list[Sample] = []
        groups: list[Pack] = []
        rows: dict[Load, tuple[int, ...]] = {}
        for ranks, load in packs:
            if load not in rows:
                rows[load] = tuple(range(len(samples), len(samples) + len(load)))
                samples += [Sample(f"{len(rows) - 1}.{place}", text, self.sizes.vision_tokens(grids), grids)
                            for place, (text, grids) in enumerate(load)]
            num_images = sum(len(grids) for _, grids in load)
            encoders = tuple(ranks[image % len(ranks)] for image in range(num_images))
            micro_batch = list(rows).index(load) if self.sync == "micro_batch" else 0
            groups.append(Pack(ranks, rows[load], 0.0, 0.0, micro_batch, encoders))
        cluster = ClusterSpec.of_nodes(self.nodes, self.sizes.max_tokens)
        return Plan("measured", self.sync, cluster, tuple(samples), tuple(groups), 0.0, 0.0)

    def _ring_loads(self, degree: int) -> list[Load]:
        """Packs that show what rings add to their share of the compute: the exchange of keys and values and, with
        images, the exchange of encoded features.
        """
        every = 2 if degree > 2 else 1
        return [*text_loads(self.sizes, degree)[::every], *image_loads(self.sizes, degree)[::every]]

    def _rounds(self, groups: Sequence[tuple[int, ...]], loads: Sequence[Load], degree: int = 1) -> list[Plan]:
        return [self.plan_of([(ranks, load) for load in few for ranks in groups]) for few in self._cut(loads, degree)]

    def _cut(self, loads: Sequence[Load], degree: int) -> Iterator[list[Load]]:
        """Cut the loads into pieces whose inputs fit in memory together."""
        piece: list[Load] = []
        for load in loads:
            if piece and sum(map(self.sizes.tokens, [*piece, load])) > degree * ROUND_TOKENS * self.sizes.max_tokens:
                yield piece
                piece = []
            piece.append(load)
        if piece:
            yield piece


class StepTiming(NamedTuple):
    """One rank's account of one run of a round. The index of a pack's time is its number in the plan."""

    step_s: float
    packs: tuple[PackTime, ...]


class Exchanged(NamedTuple):
    """Every member of a ring of `degree` ranks sent a message on and received one: median seconds by its bytes."""

    degree: int
    across: bool
    seconds: dict[int, float]


@dataclass(frozen=True)
class PartResult:
    """What one rank reports of a part: the repeats of each round; or its exchanges, or the seconds to make a group."""

    rounds: list[list[StepTiming]] = field(default_factory=list)
    exchanged: list[Exchanged] = field(default_factory=list)
    group_s: list[float] = field(default_factory=list)


def text_loads(sizes: Sizes, degree: int = 1) -> list[Load]:
    """Packs without images for `degree` ranks together."""
    most = degree * sizes.max_tokens
    spaced = np.geomspace(min(SHORTEST * degree, most), most, 6)
    lengths = list(dict.fromkeys(spaced.round().astype(int).tolist()))
    found: list[Load] = [((length, ()),) for length in lengths]
    for count in (4, 16):
        found += [((length // count, ()),) * count for length in lengths[1::2] if length >= 8 * count]
    return list(dict.fromkeys([*found, *_mixed_loads(sizes, False, degree)]))


def image_loads(sizes: Sizes, degree: int = 1) -> list[Load]:
    """Packs with images for `degree` ranks together; none if the model has no encoder."""
    found: list[Load] = [((TEXT_BESIDE_IMAGES, (grid,) * count),)
                         for grid in sizes.grids for count in (1, 6)]
    if sizes.grids:
        found += _mixed_loads(sizes, True, degree)
    return list(dict.fromkeys(load for load in found if sizes.tokens(load) <= degree * sizes.max_tokens
                              and any(grids for _, grids in load)))


def _mixed_loads(sizes: Sizes, images: bool, degree: int) -> list[Load]:
    """Random packs of one to sixteen sequences, most of them short; equal arguments give equal packs."""
    drawn = random.Random(f"{sizes} {images} {degree}")
    found: list[Load] = []
    for number in range(MIXED):
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
