"""Conditions that a plan with images encoded apart from its packs must meet, in addition to `checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dhp_ray.planner.checks import PlanError
from dhp_ray.planner.image_parts import exchanges

if TYPE_CHECKING:
    from dhp_ray.planner.plan import Plan


def check_passes(plan: Plan) -> None:
    """Raise PlanError unless ranks that run micro-batches in lockstep also encode in lockstep: every image is in one of
    the passes that all ranks run.
    """
    lockstep, count = plan.vision.apart and plan.sync == "micro_batch", plan.vision.num_passes
    if lockstep != (count > 0):
        raise PlanError(f"plan: {count} encoder passes on every rank with sync={plan.sync} and images encoded by "
                        f"{plan.vision.layout}; allowed: at least 1 with sync=micro_batch and world, else 0")
    for index, group in enumerate(plan.groups):
        images = len(group.encoders) if lockstep else 0
        if len(group.passes) != images or (images and not 0 <= min(group.passes) <= max(group.passes) < count):
            raise PlanError(f"plan: group {index} has {images} images to encode in {count} passes, and passes "
                            f"{group.passes}")


def check_splits(plan: Plan) -> None:
    """Raise PlanError unless images that several ranks encode are encoded apart from the packs, by different ranks. In
    lockstep they must be in passes that all ranks run, and alone in their passes if their parts exchange.
    """
    for index, group in enumerate(plan.groups):
        for split in group.splits:
            passes = split.passes or (-1,) * len(split.ranks)
            known = 0 <= split.image < len(group.encoders) and len(split.ranks) > 1 and len(passes) == len(split.ranks)
            sound = (known and plan.vision.apart and len(set(split.ranks)) == len(split.ranks)
                     and 0 <= min(split.ranks) <= max(split.ranks) < plan.cluster.num_ranks
                     and group.encoders[split.image] == split.ranks[0]
                     and bool(split.passes) == bool(group.passes)
                     and (not split.passes or (split.passes[0] == group.passes[split.image]
                                               and 0 <= min(passes) <= max(passes) < plan.vision.num_passes)))
            if not sound:
                raise PlanError(f"plan: group {index} has encoders {group.encoders} and image {split.image} in parts "
                                f"on ranks {split.ranks}, passes {split.passes}; allowed: images encoded apart from "
                                "packs, on two ranks and more, once each, as `encoders` and `passes` begin")
    _check_lockstep(plan)


def _check_lockstep(plan: Plan) -> None:
    """Check that parts that exchange are in one pass on all of their ranks, with nothing else in it."""
    if not plan.vision.num_passes or not any(group.splits for group in plan.groups):
        return
    rings: dict[tuple[int, int], int] = {}
    others: set[tuple[int, int]] = set()
    for group in plan.groups:
        grids = [grid for row in group.pack.sequences for grid in plan.samples[row].vision_grids]
        ringed = {split.image: split for split in group.splits if exchanges(grids[split.image], len(split.ranks))}
        for split in ringed.values():
            for place in zip(split.ranks, split.passes):
                rings[place] = rings.get(place, 0) + 1
            if len(set(split.passes)) > 1:
                raise PlanError(f"plan: parts of an image that exchange are in passes {split.passes}; allowed: one")
        others |= {place for split in group.splits if split.image not in ringed
                   for place in zip(split.ranks, split.passes)}
        in_parts = {split.image for split in group.splits}
        others |= {place for image, place in enumerate(zip(group.encoders, group.passes)) if image not in in_parts}
    for (rank, number), count in rings.items():
        if count > 1 or (rank, number) in others:
            raise PlanError(f"plan: rank {rank} has more in pass {number} than a part of an image that exchanges")
