"""The rounds of a measurement: plans like those of a run, which all ranks run several times.

    packs, images     every rank runs the same packs, at the same time, each alone
    apart             every rank encodes the same images in the phases around its packs (sync=step)
    rings             neighbours on a node run packs together, in groups of 2, 4, 8, ..., all
    rings across      pairs of ranks on different nodes run packs together

With sync=micro_batch a micro-batch consists of one pack of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dhp_ray.measure.loads import (
    TEXT_BESIDE_IMAGES,
    Load,
    Sizes,
    distinct,
    image_loads,
    samples_of,
    text_loads,
)
from dhp_ray.planner.cluster import ClusterSpec
from dhp_ray.planner.plan import GroupPlan, Pack, Plan, Sample, VisionPlan

ROUND_TOKENS = 4
"""A round holds at most this many times the tokens of the largest pack, because its inputs are in memory together."""

PARTS_OF_ROUNDS = ("packs", "images", "apart", "rings", "rings across")
PARTS = (*PARTS_OF_ROUNDS, "exchanges", "groups", "memory")
"""What is measured; the last three have no rounds (`links.py`, `memory.py`)."""
PASSES = 3
"""Within a mode, all rounds are run in this many passes, so that a slow minute of the machine falls on all of them
alike."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What to measure, the same on all ranks: how they synchronise, the node of each rank (by number), what packs hold;
    `quick`: fewer packs and fewer repeats.
    """

    sync: str
    nodes: tuple[int, ...]
    sizes: Sizes
    quick: bool = False

    @property
    def num_ranks(self) -> int:
        return len(self.nodes)

    @property
    def num_passes(self) -> int:
        """Passes over all rounds: one if `quick`."""
        return 1 if self.quick else PASSES

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


class Round(NamedTuple):
    """A plan to measure, and the part that it belongs to."""

    part: str
    plan: Plan


def parts_of(spec: Spec) -> list[str]:
    """The parts of PARTS that can be measured here."""
    several, images = spec.num_ranks > 1, bool(spec.sizes.grids)
    left_out = {"images": not images, "apart": not images or spec.sync == "micro_batch",
                "rings": not spec.degrees(), "rings across": len(set(spec.nodes)) == 1, "exchanges": not several,
                "groups": not several}
    return [part for part in PARTS if not left_out.get(part)]


def passes_of(parts: Sequence[str], num_passes: int) -> list[str]:
    """The parts in the order in which they are measured: those that have rounds once a pass, the others at the end.

    Example: packs, rings and groups in two passes are measured as packs, rings, packs, rings, groups.
    """
    of_rounds = [part for part in parts if part in PARTS_OF_ROUNDS]
    return of_rounds * num_passes + [part for part in parts if part not in PARTS_OF_ROUNDS]


def rounds_of(part: str, spec: Spec) -> list[Round]:
    """The rounds of a part; in each of them, a rank runs several packs, one after the other."""
    alone = [(rank,) for rank in range(spec.num_ranks)]
    if part == "packs":
        return _rounds(part, spec, alone, text_loads(spec.sizes, spec.quick))
    if part == "images":
        return _rounds(part, spec, alone, image_loads(spec.sizes, spec.quick))
    if part == "apart":
        loads = [load for load in image_loads(spec.sizes, spec.quick) if sum(len(grids) for _, grids in load) > 1]
        return [Round(part, plan_of([(ranks, load) for ranks in alone], spec, VisionPlan("world")))
                for load in loads[-(3 if spec.quick else 8) :]]
    if part == "rings":
        return [round_ for degree in spec.degrees()
                for round_ in _rounds(part, spec, spec.groups(degree), _ring_loads(spec, degree), degree)]
    if part == "rings across":
        return _rounds(part, spec, spec.pairs_across(), _ring_loads(spec, 2), 2)
    return []


def _ring_loads(spec: Spec, degree: int) -> list[Load]:
    """Packs that show what rings add to their share of the compute: the exchange of keys and values and, with images,
    the exchange of encoded features.
    """
    text = text_loads(spec.sizes, True, degree)
    images, every = image_loads(spec.sizes, True, degree), 2 if degree > 2 and spec.quick else 1
    return distinct([*text[::every], *images[::every]])


def _rounds(
    part: str, spec: Spec, groups: Sequence[tuple[int, ...]], loads: Sequence[Load], degree: int = 1
) -> list[Round]:
    return [Round(part, plan_of([(ranks, load) for load in few for ranks in groups], spec))
            for few in _cut(loads, spec.sizes, degree)]


def _cut(loads: Sequence[Load], sizes: Sizes, degree: int) -> Iterator[list[Load]]:
    """Cut the loads into pieces whose inputs fit in memory together."""
    piece: list[Load] = []
    for load in loads:
        if piece and sum(map(sizes.tokens, [*piece, load])) > degree * ROUND_TOKENS * sizes.max_tokens:
            yield piece
            piece = []
        piece.append(load)
    if piece:
        yield piece


def plan_of(packs: Sequence[tuple[tuple[int, ...], Load]], spec: Spec, vision: VisionPlan | None = None) -> Plan:
    """A plan of packs in this order. Packs of the same load have the same sequences and are in the same micro-batch;
    their images are dealt out to the ranks in turn.
    """
    samples: list[Sample] = []
    groups: list[GroupPlan] = []
    rows: dict[Load, Pack] = {}
    for ranks, load in packs:
        if load not in rows:
            made = samples_of(load, spec.sizes.merge_area, str(len(rows)))
            rows[load] = Pack(tuple(range(len(samples), len(samples) + len(made))))
            samples += made
        num_images = sum(len(grids) for _, grids in load)
        encoders = tuple(ranks[image % len(ranks)] for image in range(num_images))
        micro_batch = list(rows).index(load) if spec.sync == "micro_batch" else 0
        groups.append(GroupPlan(ranks, rows[load], 0.0, 0.0, micro_batch, encoders))
    cluster = ClusterSpec.of_nodes(spec.nodes, spec.sizes.max_tokens)
    return Plan("measured", spec.sync, cluster, tuple(samples), tuple(groups), 0.0, 0.0,
                vision=vision or VisionPlan())


def memory_loads(spec: Spec) -> list[Load]:
    """The packs whose memory is measured, the smaller one first."""
    most = spec.sizes.max_tokens
    return [((max(1, most // 4), ()),), ((most, ()),)] if most > TEXT_BESIDE_IMAGES else [((most, ()),)]
