"""Computes grids of patches from the sizes of images and videos by the family's rules. This decodes nothing and needs
no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dhp_ray.data.clip import Clip
from dhp_ray.data.families.base import Bounds, Family
from dhp_ray.data.media import MediaLimits
from dhp_ray.planner.plan import Grid

VIDEO_PIXELS = 25_165_824
"""The most pixels of all frames of a video, if the family bounds them and the folder does not say: the published value
of Qwen3-VL.
"""
SLICE_TOKENS = 1024
"""The most tokens of an entry into which a longer video is cut in time, so that several members can encode it: patches
of a frame pair attend only to each other. Members encode whole entries, so large entries leave members waiting
(benchmarks/scale.py slices).
"""

Size = tuple[int, int] | Clip
"""The size of an image, (width, height) in pixels, or of a video."""


def grid_of(
    family: Family, size: Size, settings: Mapping[str, Any], bounds: Bounds, limits: MediaLimits
) -> Grid:
    """Patches (time, height, width) of an image or of a whole video.

    Raises:
        RowError: an image or video that the family refuses.
    """
    if not isinstance(size, Clip):
        return family.image_grid(*size, settings, bounds)
    together = int(settings["temporal_patch_size"])
    num_frames = family.num_frames(size, limits, together)
    rows, columns = family.frame_size(size, num_frames, settings, bounds)
    return (-(-num_frames // together), rows // bounds.patch_size, columns // bounds.patch_size)


def largest_image_tokens(family: Family, max_pixels: int, frame_pixels: int, token_pixels: int) -> int:
    """Vision tokens of the largest entry that one rank encodes: an image of `max_pixels`, or a piece of a video whose
    frames have at most `frame_pixels` before the family rounds.
    """
    return max(SLICE_TOKENS, max_pixels // token_pixels, family.most_frame_pixels(frame_pixels) // token_pixels)


def pieces_of(size: Size, grid: Grid, merge_area: int, slice_tokens: int = SLICE_TOKENS) -> list[Grid]:
    """The grids into which an image or a video is cut: a video is cut in time, into pieces of at most `slice_tokens`
    tokens or of one step in time.
    """
    if not isinstance(size, Clip):
        return [grid]
    steps, rows, columns = grid
    length = max(1, slice_tokens * merge_area // (rows * columns))
    return [(min(length, steps - first), rows, columns) for first in range(0, steps, length)]
