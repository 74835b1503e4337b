"""Batches and costs of benchmarks/encoder.py."""

from __future__ import annotations

import random

from dhp_ray.planner import ClusterSpec, CostModel, Sample
from dhp_ray.planner.plan.types import Grid
from dhp_ray.simulate.machine import SimulatedCluster
from dhp_ray.simulate.settings import load_simulation

KINDS = {"text": (0.90, 0.08, 0.01, 0.01), "image": (0.20, 0.55, 0.20, 0.05), "video": (0.35, 0.15, 0.10, 0.40),
         "mixed": (0.40, 0.30, 0.20, 0.10)}
"""Shares of samples without an image, with one, with five to forty, and with a video of 16 to 128 frames."""


def batch(kind: str, num_samples: int, seed: int) -> list[Sample]:
    """Samples of a mix: text of a median of 300 tokens, images of 256 to 4,096 patches."""
    random_ = random.Random(f"{kind} {seed}")
    found = []
    for index in range(num_samples):
        what = random_.choices(("text", "image", "many", "video"), KINDS[kind])[0]
        grids: list[Grid] = []
        if what in ("image", "many"):
            for _ in range(1 if what == "image" else random_.randint(5, 40)):
                side = 2 * random_.randint(8, 32)
                grids.append((1, side, 2 * random_.randint(8, 32)))
        elif what == "video":  # cut in time, four steps a piece
            height, width = 2 * random_.randint(8, 16), 2 * random_.randint(8, 16)
            grids = [(4, height, width)] * random_.randint(2, 16)
        text = int(min(20_000, random_.lognormvariate(5.7, 1.2))) + 1
        found.append(Sample(str(index), text, sum(time * height * width for time, height, width in grids) // 4,
                            tuple(grids)))
    return found


def images_each(num_samples: int, num_images: int = 4) -> list[Sample]:
    """Text of 20 to 2,000 tokens and so many images of 1,024 patches a sample."""
    random_ = random.Random(num_samples)
    return [Sample(str(index), int(20 * 100 ** random_.random()), num_images * 256,
                   ((1, 32, 32),) * num_images)
            for index in range(num_samples)]


def cluster_and_cost(num_ranks: int) -> tuple[ClusterSpec, CostModel]:
    """So many H100, 8 a node, and what a run there would plan with: a 3B in sync=step, all packs recomputed."""
    words = ["cluster=h100", f"cluster.num_ranks={num_ranks}", "model=qwen2_5_vl_3b", "sync=step",
             "train.activation_checkpointing=true", "faults.mirror_every_steps='0'"]
    place = SimulatedCluster(load_simulation(words), 40_000, []).first
    return place.cluster, place.cost
