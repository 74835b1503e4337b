"""Qwen3-VL and Qwen3.5: a time stamp before each step in time of a video; frames are scaled by the pixels of all
together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dhp_ray.data.families.base import Clip, VisionFamily
from dhp_ray.data.families.qwen2_5_vl import CHAT_TEMPLATE, DEFAULT_SYSTEM, TOKENS, Qwen25VLFamily, smart_resize

START, VIDEO, END = (TOKENS[name] for name in ("vision_start", "video", "vision_end"))


class Qwen3VLFamily(Qwen25VLFamily):
    """Like Qwen3VLProcessor, Qwen2VLImageProcessor and Qwen3VLVideoProcessor of transformers, the latter with
    `cap_pixels_per_frame`: a frame has at most `data.max_pixels`, like an image.

        <0.2 seconds><|vision_start|>[video tokens]<|vision_end|><1.3 seconds><|vision_start|> ... <|vision_end|>

    The template's <|vision_start|> and <|vision_end|> around a video are replaced with it, as by the processor with
    which the weights were published (transformers 4.57). That of transformers 5.10 keeps them.
    """

    name: ClassVar[str] = "qwen3_vl"
    chat_template: ClassVar[str] = CHAT_TEMPLATE.replace(DEFAULT_SYSTEM, "")
    marks: ClassVar[Mapping[str, str]] = dict(Qwen25VLFamily.marks) | {
        "video": "|".join(re.escape(mark) for mark in (START + VIDEO + END, VIDEO))}
    image_settings: ClassVar[Mapping[str, Any]] = dict(Qwen25VLFamily.image_settings) | {
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
    processor_class: ClassVar[str] = "Qwen3VLProcessor"
    video_processor: ClassVar[str] = "Qwen3VLVideoProcessor"

    @property
    def video_settings(self) -> dict[str, Any]:
        return {"cap_pixels_per_frame": True, "max_video_tokens": self.max_pixels // self.factor**2,
                "size": {"shortest_edge": self.min_video_pixels, "longest_edge": self.video_pixels}}

    @classmethod
    def most_frame_pixels(cls, max_pixels: int) -> int:
        """The published processor rounds half the frames to an even number: of five it bounds the pixels of four."""
        return max_pixels * 5 // 4

    def frame_size(self, clip: Clip) -> tuple[int, int]:
        factor, together = self.factor, self.temporal_patch_size
        num_frames = max(together, self.num_frames(clip))  # a single frame is repeated to fill a step in time
        of_frame = min(self.max_pixels // factor**2 * factor**2, self.video_pixels // num_frames)
        maximum = max(of_frame, int(self.min_video_pixels * 1.05)) * num_frames
        return resized(num_frames, clip.height, clip.width, factor, together, self.min_video_pixels, maximum)

    def frames(self, clip: Clip) -> list[int]:
        """Evenly spread over the video, including the first and the last frame."""
        return np.linspace(  # type: ignore[no-any-return]
            0, clip.num_frames - 1, self.num_frames(clip)).round().astype(int).tolist()

    def video_text(self, clip: Clip) -> str:
        numbers, together = self.frames(clip), self.temporal_patch_size
        numbers += numbers[-1:] * (-len(numbers) % together)
        return "".join(f"<{clip.middle_s(first, last):.1f} seconds>{START}{VIDEO}{END}"
                       for first, last in zip(numbers[::together], numbers[together - 1 :: together]))

    num_frames = VisionFamily.num_frames
    video_runs = VisionFamily.video_runs  # one for each step in time


def resized(
    num_frames: int, height: int, width: int, factor: int, together: int, minimum: int, maximum: int
) -> tuple[int, int]:
    """(height, width) of a video's frames in multiples of `factor`: all frames, of which so many make a step in time,
    `together` have between `minimum` and `maximum` pixels. RowError: ratio above 200.
    """
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return smart_resize(height, width, factor, minimum, maximum, num_frames, round(num_frames / together) * together)


class Qwen3VLMoeFamily(Qwen3VLFamily):
    name: ClassVar[str] = "qwen3_vl_moe"


class Qwen35Family(Qwen3VLFamily):
    name: ClassVar[str] = "qwen3_5"


class Qwen35MoeFamily(Qwen3VLFamily):
    name: ClassVar[str] = "qwen3_5_moe"
