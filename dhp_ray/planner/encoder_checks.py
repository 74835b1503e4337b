"""Conditions that a plan with images encoded apart from its packs must meet, in addition to `checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dhp_ray.planner.checks import PlanError

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
    """Raise PlanError unless images that several ranks encode are encoded apart from the packs, by different ranks, at
    most one for each step in time. In lockstep they must be in passes that all ranks run.
    """
    for index, group in enumerate(plan.groups):
        grids = [grid for row in group.pack.sequences if group.splits for grid in plan.samples[row].vision_grids]
        for split in group.splits:
            passes = split.passes or (-1,) * len(split.ranks)
            known = 0 <= split.image < len(group.encoders) and len(split.ranks) > 1 and len(passes) == len(split.ranks)
            if known and len(split.ranks) > grids[split.image][0]:
                raise PlanError(f"plan: group {index} has image {split.image} of {grids[split.image][0]} steps in time "
                                f"in {len(split.ranks)} parts; allowed: at most as many as it has steps")
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
