"""What a plan must fulfil whose images are encoded apart from its packs, beside `checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dhp_ray.planner.checks import PlanError

if TYPE_CHECKING:
    from dhp_ray.planner.plan import Plan


def check_passes(plan: Plan) -> None:
    """Raise PlanError unless ranks that run micro-batches in lockstep encode in lockstep too: every image is in one of
    the passes that all of them run."""
    lockstep, count = plan.vision.apart and plan.sync == "micro_batch", plan.vision.num_passes
    if lockstep != (count > 0):
        raise PlanError(f"plan: {count} encoder passes on every rank with sync={plan.sync} and images encoded by "
                        f"{plan.vision.layout}; allowed: at least 1 with sync=micro_batch and world, else 0")
    for index, group in enumerate(plan.groups):
        images = len(group.encoders) if lockstep else 0
        if len(group.passes) != images or (images and not 0 <= min(group.passes) <= max(group.passes) < count):
            raise PlanError(f"plan: group {index} has {images} images to encode in {count} passes, and passes "
                            f"{group.passes}")
