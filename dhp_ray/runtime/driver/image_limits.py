"""The largest images of a run, in vision tokens: what `data.max_pixels` allows, and what ranks have room for
(`planner.max_image_tokens`, fixed at the run's first start).
"""

from __future__ import annotations

from dhp_ray.config import Config
from dhp_ray.data.families import FAMILIES
from dhp_ray.planner.model_shape import ModelShape
from dhp_ray.runtime.driver.group import WorkerGroup
from dhp_ray.schema import Planner


def image_tokens_of(config: Config, group: WorkerGroup) -> int:
    """Return the tokens of the largest image of the run, which one rank encodes: `data.max_pixels` and, as far as they
    are set, `planner.max_sequence_tokens`, `planner.max_image_tokens` and `planner.tokens_per_rank` limit it.
    """
    planner, image = config.planner, config.data.max_pixels // group.members[0].described["shape"].token_pixels
    tokens = image if planner.tokens_per_rank == "auto" else int(planner.tokens_per_rank)
    return min(image, planner.max_sequence_tokens or image, planner.max_image_tokens or tokens)


def image_limit_of(config: Config, group: WorkerGroup) -> int:
    """Return the most tokens of an image that the run admits; 0: `data.max_pixels` allows no larger one."""
    limit = config.planner.max_image_tokens
    return limit if limit < largest_image_of(config, group.members[0].described["shape"]) else 0


def skipped_images(given: Planner, limit: int, largest: int) -> str:
    """Return what to tell the user of images that will be skipped, with the key that limits them; empty if there are
    none. `given`: the keys before any limit was resolved; `limit`, `largest`: `image_limit_of` and, before that,
    `image_tokens_of`.
    """
    if given.max_image_tokens:  # also where the default file sets it
        return f"images of more than {limit:,} tokens will be skipped: planner.max_image_tokens" if limit else ""
    if given.tokens_per_rank == "auto":
        return (f"images of more than {limit:,} of {largest:,} tokens will be skipped: a rank has no room for larger "
                "ones; train.activation_checkpointing=true may make room, or lower data.max_pixels"
                if 0 < limit < largest else "")
    return (f"images of more than {limit:,} tokens will be skipped: that is planner.tokens_per_rank, and "
            "planner.max_image_tokens is not set" if limit else "")


def largest_image_of(config: Config, shape: ModelShape) -> int:
    """Return the tokens of the largest image, or piece of a video, that one rank encodes."""
    pixels = config.data.max_pixels
    return FAMILIES[shape.family].largest_image_tokens(pixels, pixels, shape.token_pixels)
