"""Images encoded in their packs or apart from them: balance and times. All modelled.

    python benchmarks/encoder.py balance     the fullest rank over the mean or the largest image, whichever is more
    python benchmarks/encoder.py rows        feature rows that are encoded on another rank than the one that needs them
    python benchmarks/encoder.py timeline    predicted makespans beside a plain-Python timeline

Mixes of text, images and videos are those of encoder_cases.py; costs are derived from the models and the devices.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.encoder_cases import KINDS, batch, cluster_and_cost
from benchmarks.encoder_exact import least_s, proven_s
from dhp_ray.config import CONF
from dhp_ray.model.layout import PackLayout
from dhp_ray.model.vision_language_model import VisionLanguageModel
from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, plan_batch, plan_starts
from dhp_ray.planner.plan.types import VisionPlan, cut_in_time, encoding_ranks, shares
from dhp_ray.train.collate import Payload
from dhp_ray.train.images_apart import vision_inputs
from tests.packs import Film, make_sample, rough_model
from tests.planner.reference_encoder import timeline

LAYOUTS = ("group", "world")
PROVEN_FROM = 1.01  # above it the best assignment is looked for
CUT = "video, a piece a step"  # in place of four steps
MERGE_AREA = 4  # patches of a token, in all models here


class Balance(NamedTuple):
    """Seconds of encoding of the fullest rank of a plan, over the mean or the largest image, whichever is more; and the
    same of the best assignment, as far as that is proven."""

    ratio: float
    least: float


def balance_of(plan: Plan, cost: CostModel, prove: bool = False) -> Balance:
    """That of a plan for equal ranks."""
    loads = np.zeros(plan.cluster.num_ranks)
    for group in plan.groups:
        seconds = [image_s for row in group.sequences for image_s in cost.image_s(plan.samples[row])]
        grids = [grid for row in group.sequences for grid in plan.samples[row].vision_grids]
        parts = {split.image: split.ranks for split in group.splits}
        for image, (encoder, grid, image_s) in enumerate(zip(group.encoders, grids, seconds)):
            ranks = parts.get(image, (encoder,))
            loads[list(ranks)] += [share * image_s for share in shares(grid, len(ranks))]
    images = np.array([image_s for sample in plan.samples for image_s in cost.image_s(sample)])
    if not len(images):
        return Balance(1.0, 1.0)
    even_s, fullest_s = least_s(images, len(loads)), float(loads.max())
    proven = proven_s(images, len(loads), fullest_s) if prove and fullest_s > PROVEN_FROM * even_s else even_s
    return Balance(fullest_s / even_s, proven / even_s)


def balance(
    rank_counts: Sequence[int] = (8, 64, 512), sizes: Sequence[int] = (1, 8, 16)
) -> Iterator[list[str]]:
    """The largest ratio of three batches of so many samples a rank, of a 3B on H100. `proven`: no assignment of whole
    images of the batch with the largest ratio of `world` is below that."""
    yield ["mix", "ranks", *(name for size in sizes for name in (f"group, {size} a rank", "world", "proven"))]
    for kind in (*KINDS, CUT):
        for num_ranks in rank_counts:
            cluster, cost = cluster_and_cost(num_ranks)
            cells = []
            for size in sizes:
                batches = [cut_at_each_step(batch("video", size * num_ranks, seed)) if kind == CUT
                           else batch(kind, size * num_ranks, seed) for seed in range(3)]
                group, world = (max(balance_of(plan_batch(samples, cluster, cost, encoder=layout), cost,
                                               prove=layout == "world") for samples in batches) for layout in LAYOUTS)
                cells += [f"{group.ratio:.3f}", f"{world.ratio:.3f}",
                          f"{world.least:.3f}" if world.ratio > PROVEN_FROM else "-"]
            yield [kind, str(num_ranks), *cells]


def cut_at_each_step(samples: Sequence[Sample]) -> list[Sample]:
    """The same with videos in pieces of one step."""
    return [replace(sample, vision_grids=tuple((1, height, width) for time, height, width in sample.vision_grids
                                               for _ in range(time))) for sample in samples]


def rows_elsewhere(plan: Plan, marks: int = 0) -> int:
    """Image tokens that lie on another rank than the one that encodes them. Of a sample images come first, with so many
    tokens before and after each, and then text."""
    found = 0
    for group in plan.groups:
        samples = [plan.samples[row] for row in group.sequences]
        layout = PackLayout(tuple(sample.num_tokens for sample in samples), group.degree)
        encoder_of, start = np.full(sum(layout.lengths), -1), 0
        encoders = iter(encoding_ranks(group.encoders, group.splits))
        for sample in samples:
            place = start
            for grid in sample.vision_grids:
                stop = place + marks + prod(grid) // MERGE_AREA
                ranks = next(encoders)
                encoder_of[place + marks : stop] = np.repeat(
                    ranks, [prod(part) // MERGE_AREA for part in cut_in_time(grid, len(ranks))])
                place = stop + marks
            start += sample.num_tokens
        for member, rank in enumerate(group.ranks):
            here = encoder_of[layout.index(member).numpy()]
            found += int(((here >= 0) & (here != rank)).sum())
    return found


def rows_sent(plan: Plan, payloads: Mapping[str, Payload], adapter: VisionLanguageModel) -> int:
    """The same from what the ranks of a plan with images apart send one another."""
    sent = {rank: vision_inputs(plan.rank_plan(1, rank), payloads.__getitem__, adapter).send_index
            for rank in range(plan.cluster.num_ranks)}
    return sum(len(rows) for rank, index in sent.items() for other, rows in index.items() if other != rank)


def tiny_batch(seed: int, num_samples: int = 12) -> tuple[list[Sample], dict[str, Payload]]:
    """Samples of the tiny model, images and pieces of videos first."""
    random_, made = random.Random(seed), []
    for index in range(num_samples):
        images = [(1, 2 * random_.randint(2, 6), 2 * random_.randint(2, 6)) for _ in range(random_.choice((0, 1, 5)))]
        films = [Film(0.5, ((2, 4, 2 * random_.randint(2, 5)),)) for _ in range(random_.choice((0, 0, 2)))]
        made.append(make_sample(f"{seed} {index}", [*images, *films, random_.randint(5, 60)]))
    return [sample for sample, _ in made], {sample.id: payload for sample, payload in made}


def rows(rank_counts: Sequence[int] = (8, 64), tiny_counts: Sequence[int] = (2, 3, 5)) -> Iterator[list[str]]:
    """Sums over three batches; of the tiny model also what its inputs send."""
    yield ["batch", "ranks", "rows", "elsewhere: group", "world", "sent in world"]
    adapter, cost = rough_model(), CostModel.load(CONF / "cost" / "cpu.yaml")
    for num_ranks in tiny_counts:
        made = [tiny_batch(seed) for seed in range(3)]
        tiny = ClusterSpec(num_ranks, num_ranks, 128)
        plans = {layout: [plan_batch(samples, tiny, cost, encoder=layout) for samples, _ in made] for layout in LAYOUTS}
        sent = sum(rows_sent(plan, payloads, adapter) for plan, (_, payloads) in zip(plans["world"], made))
        yield ["tiny", str(num_ranks), *elsewhere(plans, marks=1), f"{sent:,}"]
    for kind in KINDS:
        for num_ranks in rank_counts:
            cluster, cost = cluster_and_cost(num_ranks)
            plans = {layout: [plan_batch(batch(kind, 8 * num_ranks, seed), cluster, cost, encoder=layout)
                              for seed in range(3)] for layout in LAYOUTS}
            yield [kind, str(num_ranks), *elsewhere(plans), "-"]


def elsewhere(plans: Mapping[str, Sequence[Plan]], marks: int = 0) -> list[str]:
    """Rows of all plans of a layout, and those elsewhere in each layout."""
    total = sum(sample.vision_tokens for plan in plans["world"] for sample in plan.samples)
    found = [sum(rows_elsewhere(plan, marks) for plan in plans[layout]) for layout in LAYOUTS]
    return [f"{total:,}", *(f"{count:,} ({100 * count / total:.0f} %)" for count in found)]


def timelines(rank_counts: Sequence[int] = (8, 64)) -> Iterator[list[str]]:
    """Largest relative difference over three batches, speeds of 0.5 to 1 on every fourth rank. Encoded again: the same
    plan whose activations are not kept. Frozen: nothing of the encoder is trained."""
    yield ["mix", "ranks", *LAYOUTS, "world, encoded again", "world, frozen"]
    for kind in KINDS:
        for num_ranks in rank_counts:
            cluster, cost = cluster_and_cost(num_ranks)
            speeds = tuple(0.5 + 0.25 * (rank % 3) if rank % 4 == 0 else 1.0 for rank in range(num_ranks))
            slowed = ClusterSpec(num_ranks, cluster.ranks_per_node, cluster.tokens_per_rank, speeds)
            found = [differences(batch(kind, 8 * num_ranks, seed), slowed, cost) for seed in range(3)]
            yield [kind, str(num_ranks), *(f"{max(column):.1e}" for column in zip(*found))]


def differences(samples: Sequence[Sample], cluster: ClusterSpec, cost: CostModel) -> list[float]:
    """Of the four columns."""
    group, world = (plan_batch(samples, cluster, cost, encoder=layout) for layout in LAYOUTS)
    frozen_cost = replace(cost, vision_forward=1.0)
    frozen = plan_batch(samples, cluster, frozen_cost, encoder="world")
    again = replace(world, vision=VisionPlan("world", keeps=False))
    again = replace(again, predicted_time_s=plan_starts(again)[1])
    return [difference(group, cost), difference(world, cost), difference(again, cost), difference(frozen, frozen_cost)]


def difference(plan: Plan, cost: CostModel) -> float:
    return abs(timeline(plan, cost) / plan.predicted_time_s - 1)


TABLES = {"balance": balance, "rows": rows, "timeline": timelines}


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    if len(argv) != 1 or argv[0] not in TABLES:
        print(f"encoder.py: {' '.join(argv) or 'nothing'}: allowed: one of {', '.join(TABLES)}", file=sys.stderr)
        return 2
    for number, row in enumerate(TABLES[argv[0]]()):  # type: ignore[operator]
        print(f"| {' | '.join(row)} |", flush=True)
        if number == 0:
            print(f"|{'---|' * len(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
