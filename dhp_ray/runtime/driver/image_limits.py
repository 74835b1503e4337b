"""The largest images of a run, in vision tokens: what `data.max_pixels` allows, where ranks have room for it. The limit
is fixed at the run's first start.
"""

from __future__ import annotations

from dhp_ray.config import Config
from dhp_ray.data.families import FAMILIES
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.runtime.driver.group import WorkerGroup


def image_tokens_of(config: Config, group: WorkerGroup) -> int:
    """Return the tokens of the largest image that the keys allow, which one rank encodes."""
    image = config.data.max_pixels // group.members[0].described["shape"].token_pixels
    return min(image, longest_of(config, group))


def longest_of(config: Config, group: WorkerGroup) -> int:
    """Return the tokens of the longest sequence that the keys allow."""
    planner = config.planner
    tokens = 2**62 if planner.tokens_per_rank == "auto" else int(planner.tokens_per_rank) * group.size
    return planner.max_sequence_tokens or tokens


def image_limit_of(config: Config, group: WorkerGroup) -> int:
    """Return the most tokens of an image that the run admits; 0: `data.max_pixels` allows no larger one."""
    limit = group.image_limit
    return limit if limit < largest_image_of(config, group.members[0].described["shape"]) else 0


def skipped_images(limit: int, largest: int) -> str:
    """Return what to tell the user of images that will be skipped; empty if there are none. `limit`, `largest`:
    `image_limit_of` and `image_tokens_of`.
    """
    return (f"images of more than {limit:,} of {largest:,} tokens will be skipped: a rank has no room for larger "
            "ones; train.activation_checkpointing=true may make room, or lower data.max_pixels"
            if 0 < limit < largest else "")


def largest_image_of(config: Config, shape: ModelShape) -> int:
    """Return the tokens of the largest image, or piece of a video, that one rank encodes."""
    pixels = config.data.max_pixels
    return FAMILIES[shape.family].largest_image_tokens(pixels, pixels, shape.token_pixels)
