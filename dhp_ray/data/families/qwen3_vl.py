"""Qwen3-VL: a time stamp before each step in time of a video, whose frames are scaled by the pixels of all frames
together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dhp_ray.data.families.base import Bounds, Clip, check_shape
from dhp_ray.data.families.qwen2_5_vl import MIN_FRAMES, Qwen25VL
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.tokenizer import CHAT_TEMPLATE, DEFAULT_SYSTEM, TOKENS

if TYPE_CHECKING:
    from dhp_ray.planner.plan import Grid  # the planner imports numba

START, VIDEO, END = (TOKENS[name] for name in ("vision_start", "video", "vision_end"))


class Qwen3VL(Qwen25VL):
    """Like Qwen3VLProcessor, Qwen2VLImageProcessor and Qwen3VLVideoProcessor of transformers, the latter with
    `cap_pixels_per_frame`: a frame has at most `data.max_pixels`, like an image.

        <0.2 seconds><|vision_start|>[video tokens]<|vision_end|><1.3 seconds><|vision_start|> ... <|vision_end|>

    The template's <|vision_start|> and <|vision_end|> around a video are replaced with it, as by the processor with
    which the weights were published (transformers 4.57). That of transformers 5.10 keeps them.
    """

    name: ClassVar[str] = "qwen3_vl"
    chat_template: ClassVar[str] = CHAT_TEMPLATE.replace(DEFAULT_SYSTEM, "")
    marks: ClassVar[Mapping[str, str]] = dict(Qwen25VL.marks) | {
        "video": "|".join(re.escape(mark) for mark in (START + VIDEO + END, VIDEO))}
    image_settings: ClassVar[Mapping[str, Any]] = dict(Qwen25VL.image_settings) | {
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
    processor_class: ClassVar[str] = "Qwen3VLProcessor"
    video_processor: ClassVar[str] = "Qwen3VLVideoProcessor"

    def video_bounds(self, bounds: Bounds) -> dict[str, Any]:
        return {"cap_pixels_per_frame": True, "max_video_tokens": bounds.maximum // bounds.factor**2,
                "size": {"shortest_edge": bounds.minimum, "longest_edge": bounds.of_video}}

    def most_frame_pixels(self, max_pixels: int) -> int:
        """The published processor rounds half the number of frames to an even number: of five frames it bounds the
        pixels of four, of nine those of eight.
        """
        return max_pixels * 5 // 4

    def frame_size(
        self, clip: Clip, num_frames: int, settings: Mapping[str, Any], bounds: Bounds
    ) -> tuple[int, int]:
        factor, height, width = bounds.factor, clip.height, clip.width
        together = int(settings["temporal_patch_size"])
        num_frames = max(together, num_frames)  # a single frame is repeated to fill a step in time
        of_frame = min(bounds.maximum // factor**2 * factor**2, bounds.of_video // num_frames)
        maximum = max(of_frame, int(bounds.minimum * 1.05)) * num_frames
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        check_shape(height, width)
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        pixels = round(num_frames / together) * together * rows * columns
        if pixels > maximum:
            shrink = math.sqrt(num_frames * height * width / maximum)
            rows = max(factor, math.floor(height / shrink / factor) * factor)
            columns = max(factor, math.floor(width / shrink / factor) * factor)
        elif pixels < bounds.minimum:
            grow = math.sqrt(bounds.minimum / (num_frames * height * width))
            rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
        return rows, columns

    def num_frames(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> int:
        wanted = int(clip.num_frames / clip.frames_per_second * limits.video_fps)
        return min(max(wanted, MIN_FRAMES), limits.max_frames, clip.num_frames)

    def frames(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> list[int]:
        """Evenly spread over the video, including the first and the last frame."""
        count = self.num_frames(clip, limits, temporal_patch_size)
        return np.linspace(0, clip.num_frames - 1, count).round().astype(int).tolist()  # type: ignore[no-any-return]

    def video_text(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> str:
        numbers = self.frames(clip, limits, temporal_patch_size)
        numbers += numbers[-1:] * (-len(numbers) % temporal_patch_size)
        return "".join(f"<{clip.middle_s(first, last):.1f} seconds>{START}{VIDEO}{END}"
                       for first, last in zip(numbers[::temporal_patch_size],
                                              numbers[temporal_patch_size - 1 :: temporal_patch_size]))

    def video_runs(self, grid: Grid, merge_area: int) -> Sequence[int]:
        time, height, width = grid
        return (height * width // merge_area,) * time
