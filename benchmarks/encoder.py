"""Images encoded in their packs or apart from them: how evenly ranks encode. All modelled.

    python benchmarks/encoder.py balance     the fullest rank over the mean or the largest image, whichever is more

Mixes of text, images and videos are those of encoder_cases.py; costs are derived from the models and the devices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.encoder_cases import KINDS, batch, cluster_and_cost
from benchmarks.encoder_exact import least_s, proven_s
from dhp_ray.planner import CostModel, Plan, Sample, plan_batch
from dhp_ray.planner.plan.types import shares

LAYOUTS = ("group", "world")
PROVEN_FROM = 1.01  # above it the best assignment is looked for
CUT = "video, a piece a step"  # in place of four steps


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


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    if list(argv) != ["balance"]:
        print(f"encoder.py: {' '.join(argv) or 'nothing'}: allowed: balance", file=sys.stderr)
        return 2
    for number, row in enumerate(balance()):
        print(f"| {' | '.join(row)} |", flush=True)
        if number == 0:
            print(f"|{'---|' * len(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
