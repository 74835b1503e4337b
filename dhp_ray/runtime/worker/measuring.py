"""A run's rank as a member of a measurement: what is measured for a configuration, and each part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dhp_ray.config import Config
from dhp_ray.measure.member import Member
from dhp_ray.measure.rounds import PartResult, Sizes, Spec
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.plan.types import Grid
from dhp_ray.runtime.worker.prefetch import processor_spec
from dhp_ray.runtime.worker.rank import Rank

MeasuredPart = tuple[Spec, PartResult | None]
"""What is measured, and a rank's result of one part (None: there is nothing of it to measure)."""

MAX_TOKENS = {"cpu": 4096, "cuda": 32768, "npu": 32768}
"""Longer packs are not measured, even if a rank would hold them: their time follows from the others."""
SMALLEST_SIDE = 56
"""Pixels of the smallest image's sides."""
NUM_SIDES = 4
WIDE = (5, 2)
"""Width and height of one more image are in this ratio."""


def spec_of(config: Config, shape: ModelShape, sync: str, nodes: Sequence[str], max_tokens: int) -> Spec:
    """Return what is measured for a run of this configuration; `nodes`: the node of each rank, by any name."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    grids = image_grids(config, shape, max_tokens) if shape.vision else ()
    return Spec(sync=sync, nodes=tuple(numbers[node] for node in nodes),
                sizes=Sizes(max_tokens, grids, shape.merge_area))


def image_grids(config: Config, shape: ModelShape, max_tokens: int) -> tuple[Grid, ...]:
    """Return grids of growing images, as the run's processor cuts them, up to half of a pack's tokens."""
    processor = processor_spec(config).load()
    most = math.isqrt(int(min(config.data.max_pixels, shape.token_pixels * max_tokens / 2)))
    sides = [SMALLEST_SIDE * (most / SMALLEST_SIDE) ** (step / (NUM_SIDES - 1)) for step in range(NUM_SIDES)]
    sizes = [(int(side), int(side)) for side in sides]
    sizes.append((int(sides[2] * math.sqrt(WIDE[0] / WIDE[1])), int(sides[2] * math.sqrt(WIDE[1] / WIDE[0]))))
    grids = {processor.family.written(size).pieces[0] for size in sizes if min(size) > 0}
    return tuple(sorted((grid for grid in grids if math.prod(grid) // shape.merge_area <= max_tokens / 2),
                        key=math.prod))


def measured_on(rank: Rank | None, part: str, tokens_per_rank: int) -> MeasuredPart:
    """Return a part's result on a rank that has joined, for packs of up to MAX_TOKENS; its state is useless afterwards.
    """
    assert rank is not None
    membership = rank.membership
    nodes = membership.nodes or ("",) * membership.world_size
    tokens = min(tokens_per_rank, MAX_TOKENS[rank.accelerator.name])
    spec = spec_of(rank.config, rank.adapter.shape, rank.mode.sync, nodes, tokens)
    member = Member(membership.rank, spec, rank.stepper, rank.config.train.precision)
    return spec, member.measure(part) if part in spec.parts() else None
