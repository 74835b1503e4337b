"""What is measured, packs from small to large in rounds (plans like those of a run), and what ranks report of them.

    packs, images     every rank runs the same packs, at the same time, each alone
    rings             neighbours on a node run packs together, in groups of 2, 4, 8, ..., all, and then pairs of ranks
                      on different nodes

A cost is a sum of terms, and the packs must separate these terms: single sequences of growing length (attention grows
with the square), as many tokens in short sequences (attention does not), few and many images of several sizes. With
sync=micro_batch a micro-batch consists of one pack of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isqrt, prod, sqrt
from typing import NamedTuple

import numpy as np

from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.plan.cluster import ClusterSpec, numbered
from dhp_ray.planner.plan.types import Grid, Pack, Plan, Sample
from dhp_ray.schema import Config
from dhp_ray.train.results import PackTime

MAX_TOKENS = {"cpu": 4096, "cuda": 32768, "npu": 32768}  # of a pack: the time of longer ones follows
SMALLEST_SIDE = 56  # pixels of the smallest image's sides
NUM_SIDES = 4
WIDE = (5, 2)  # width and height of one more image are in this ratio
SHORTEST = 32  # text tokens of the shortest sequence
TEXT_BESIDE_IMAGES = 40
ROUND_TOKENS = 4
"""A round holds at most this many times the tokens of the largest pack, because its inputs are in memory together."""

PARTS = ("packs", "images", "rings", "exchanges")  # what is measured; the last has no rounds (`member.py`)

Load = tuple[tuple[int, tuple[Grid, ...]], ...]
"""A pack: for each of its sequences, the number of text tokens and the grids of its images."""


class Sizes(NamedTuple):
    """At most `max_tokens` tokens a rank, `grids` of images, ascending, `merge_area` patches in a vision token."""

    max_tokens: int
    grids: tuple[Grid, ...]
    merge_area: int

    def tokens(self, load: Load) -> int:
        return sum(text + self.vision_tokens(grids) for text, grids in load)

    def vision_tokens(self, grids: Sequence[Grid]) -> int:
        return sum(map(prod, grids)) // self.merge_area


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to measure, alike on all ranks: in which mode, on which nodes (by rank), with packs of which sizes."""

    sync: str
    nodes: tuple[int, ...]
    sizes: Sizes

    @property
    def num_ranks(self) -> int:
        return len(self.nodes)

    def rings(self) -> list[list[tuple[int, ...]]]:
        """All rings, those that run at a time together: of 2, 4, ... and all neighbours on a node; of two nodes."""
        numbers = sorted(set(self.nodes))
        by_node = [[rank for rank, node in enumerate(self.nodes) if node == number] for number in numbers]
        most = max(map(len, by_node))
        degrees = {*(2**power for power in range(1, most.bit_length())), most} - {1}
        found = [[tuple(ranks[first : first + degree]) for ranks in by_node
                  for first in range(0, len(ranks) - degree + 1, degree)] for degree in sorted(degrees)]
        return found + [[tuple(sorted(pair)) for pair in zip(*by_node[:2])]] * (len(by_node) > 1)

    def parts(self) -> list[str]:
        """The parts of PARTS that can be measured here."""
        left_out = {"images"} if not self.sizes.grids else set[str]()
        if self.num_ranks == 1:
            left_out |= {"rings", "exchanges"}
        return [part for part in PARTS if part not in left_out]

    def rounds(self, part: str) -> list[Plan]:
        """The rounds of a part; in each of them, a rank runs several packs, one after the other."""
        alone = [(rank,) for rank in range(self.num_ranks)]
        if part == "packs":
            return self._rounds(alone, text_loads(self.sizes))
        if part == "images":
            return self._rounds(alone, image_loads(self.sizes))
        if part == "rings":
            return [plan for groups in self.rings() for plan in self._rounds(groups, self._ring_loads(len(groups[0])))]
        return []

    def plan_of(self, packs: Sequence[tuple[tuple[int, ...], Load]]) -> Plan:
        """A plan of packs in this order; those of one load share sequences and micro-batch, and deal out images."""
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
        """Packs that show what rings add: exchanges of keys and values, and of encoded features."""
        every = 2 if degree > 2 else 1
        return [*text_loads(self.sizes, degree)[::every], *image_loads(self.sizes, degree)[::every]]

    def _rounds(self, groups: Sequence[tuple[int, ...]], loads: Sequence[Load]) -> list[Plan]:
        """Rounds in which every group runs each load. The inputs of a round fit in memory together."""
        pieces: list[list[Load]] = [[]]
        for load in loads:
            room = len(groups[0]) * ROUND_TOKENS * self.sizes.max_tokens
            if pieces[-1] and sum(map(self.sizes.tokens, [*pieces[-1], load])) > room:
                pieces.append([])
            pieces[-1].append(load)
        return [self.plan_of([(ranks, load) for load in piece for ranks in groups]) for piece in pieces if piece]


def spec_of(config: Config, shape: ModelShape, sync: str, nodes: Sequence[str], max_tokens: int) -> Spec:
    """What is measured for a run of this configuration; `nodes`: the node of each rank, by any name."""
    grids = image_grids(config, shape, max_tokens) if shape.vision else ()
    return Spec(sync=sync, nodes=numbered(nodes), sizes=Sizes(max_tokens, grids, shape.merge_area))


def image_grids(config: Config, shape: ModelShape, max_tokens: int) -> tuple[Grid, ...]:
    """Grids of growing images, as the run's processor cuts them, up to half of a pack's tokens."""
    processor = ProcessorSpec.of(config.model, config.data).load()
    most = isqrt(int(min(config.data.max_pixels, shape.token_pixels * max_tokens / 2)))
    sides = [SMALLEST_SIDE * (most / SMALLEST_SIDE) ** (step / (NUM_SIDES - 1)) for step in range(NUM_SIDES)]
    sizes = [(int(side), int(side)) for side in sides]
    sizes.append((int(sides[2] * sqrt(WIDE[0] / WIDE[1])), int(sides[2] * sqrt(WIDE[1] / WIDE[0]))))
    grids = {processor.family.written(size).pieces[0] for size in sizes if min(size) > 0}
    return tuple(sorted((grid for grid in grids if prod(grid) // shape.merge_area <= max_tokens / 2),
                        key=prod))


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
    """What one rank reports of a part: the repeats of each round, or its exchanges."""

    rounds: list[list[StepTiming]] = field(default_factory=list)
    exchanged: list[Exchanged] = field(default_factory=list)


def text_loads(sizes: Sizes, degree: int = 1) -> list[Load]:
    """Packs without images for `degree` ranks together."""
    most = degree * sizes.max_tokens
    spaced = np.geomspace(min(SHORTEST * degree, most), most, 6)
    lengths = list(dict.fromkeys(spaced.round().astype(int).tolist()))
    found: list[Load] = [((length, ()),) for length in lengths]
    for count in (4, 16):
        found += [((length // count, ()),) * count for length in lengths[1::2] if length >= 8 * count]
    return list(dict.fromkeys(found))


def image_loads(sizes: Sizes, degree: int = 1) -> list[Load]:
    """Packs with images for `degree` ranks together; none if the model has no encoder."""
    found: list[Load] = [((TEXT_BESIDE_IMAGES, (grid,) * count),) for grid in sizes.grids for count in (1, 6)]
    return [load for load in found if sizes.tokens(load) <= degree * sizes.max_tokens]
