"""GLM-4.1V: a step in time of a video is written as an image, with its second behind it; bounds of pixels count all
frames, of which an image has two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dhp_ray.data.errors import RowError
from dhp_ray.data.families.base import SLICE_TOKENS, Clip, Medium, Size, Written
from dhp_ray.data.families.qwen2_5_vl import Qwen25VLFamily
from dhp_ray.data.families.qwen3_vl import Qwen3VLFamily, resized

if TYPE_CHECKING:
    from dhp_ray.planner.plan.types import Grid

START, IMAGE, END = "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"
VIDEO_START, VIDEO, VIDEO_END = "<|begin_of_video|>", "<|video|>", "<|end_of_video|>"
USER = "<|user|>"

# Renders what GLM-4.1V's own template does.
CHAT_TEMPLATE = """
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'video' -%}
{{- '<|begin_of_video|><|video|><|end_of_video|>' -}}
{%- elif part['type'] == 'image' -%}
{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt else '' -}}
"""


class Glm4vFamily(Qwen3VLFamily):
    """Like Glm4vProcessor, Glm4vImageProcessor and Glm4vVideoProcessor of transformers, but that a frame has at most
    `data.max_pixels`, like an image.

        <|begin_of_video|><|begin_of_image|>[image tokens]<|end_of_image|>0<|begin_of_image|> ... 1<|end_of_video|>

    GLM-4.6V-Flash is the same model with a processor that takes other frames of a video.
    """

    name: ClassVar[str] = "glm4v"
    chat_template: ClassVar[str] = CHAT_TEMPLATE
    tokens: ClassVar[Mapping[str, str]] = {
        "image": IMAGE, "video": IMAGE, "vision_start": START, "vision_end": END, "video_start": VIDEO_START,
        "video_end": VIDEO_END, "bos": "<|endoftext|>", "eos": USER, "pad": "<|endoftext|>"}
    marks: ClassVar[Mapping[str, str]] = {"image": re.escape(IMAGE), "video": re.escape(VIDEO)}
    image_text: ClassVar[str] = IMAGE
    answer_end: ClassVar[str] = USER
    special_tokens: ClassVar[Sequence[str]] = (
        "<|endoftext|>", "<|assistant|>", USER, START, END, IMAGE, VIDEO, "[gMASK]", "<sop>", "<|system|>",
        "<|observation|>", VIDEO_START, VIDEO_END)
    structure_tokens: ClassVar[Sequence[str]] = special_tokens
    image_processors: ClassVar[tuple[str, ...]] = ("Glm4vImageProcessor", "Glm46VImageProcessor")
    image_settings: ClassVar[Mapping[str, Any]] = dict(Qwen25VLFamily.image_settings) | {
        "image_processor_type": "Glm4vImageProcessor"}
    frames_of_image: ClassVar[int] = 2

    @cached_property
    def image_processor(self) -> Any:
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        return Glm4vImageProcessorPil(**self.sized_settings)

    def processor_files(self) -> Mapping[str, Mapping[str, Any]]:
        kind = str(self.settings["image_processor_type"]).partition("Image")[0]
        processor, images = {"processor_class": f"{kind}Processor"}, self.sized_settings
        video = {"video_processor_type": f"{kind}VideoProcessor", "do_sample_frames": True,
                 "fps": self.limits.video_fps, "max_duration": self.most_seconds,
                 "size": {"shortest_edge": self.min_video_pixels, "longest_edge": self.video_pixels}}
        return {"preprocessor_config.json": images | processor, "processor_config.json": processor,
                "video_preprocessor_config.json": {
                    name: value for name, value in (images | processor | video).items()
                    if name != "image_processor_type"}}

    @property
    def most_seconds(self) -> int:
        """Of longer videos as many frames are taken as of one that lasts so long."""
        return max(1, int(self.limits.max_frames / self.limits.video_fps))

    def written(self, size: Size, slice_tokens: int = SLICE_TOKENS) -> Written:
        if isinstance(size, Clip) and self.settings["image_processor_type"].startswith("Glm46V"):
            raise RowError("a video; allowed: images, of glm4v models with GLM-4.6V's processor, which takes other "
                           "frames")
        return super().written(size, slice_tokens)

    def image_grid(self, width: int, height: int) -> Grid:
        most = self.temporal_patch_size
        rows, columns = resized(most, height, width, self.factor, most, most * self.min_pixels, most * self.max_pixels)
        return (1, rows // self.patch_size, columns // self.patch_size)

    @classmethod
    def most_frame_pixels(cls, max_pixels: int) -> int:
        return max_pixels

    def frame_size(self, clip: Clip) -> tuple[int, int]:
        num_frames = self.num_frames(clip)
        most = max(min(self.video_pixels, num_frames * self.max_pixels), self.min_video_pixels)
        return resized(num_frames, clip.height, clip.width, self.factor, self.temporal_patch_size,
                       self.min_video_pixels, most)

    def num_frames(self, clip: Clip) -> int:
        return len(self.frames(clip))

    def frames(self, clip: Clip) -> list[int]:
        """The first one of each part of a second, an even number: the last one may come twice."""
        rate, seconds = clip.frames_per_second, clip.num_frames / clip.frames_per_second
        most = min(int(self.most_seconds * self.limits.video_fps), self.limits.max_frames)
        count = max(1, math.floor(seconds * self.limits.video_fps))
        if seconds <= self.most_seconds and count <= most:
            found = [math.ceil(number * rate / self.limits.video_fps) for number in range(count)]
        elif most >= clip.num_frames:
            found = list(range(clip.num_frames))
        else:
            found = [math.ceil(second * rate) for second in np.linspace(0, seconds, most)]
        found = list(dict.fromkeys(min(number, clip.num_frames - 1) for number in found))
        return found + found[-1:] * (len(found) % 2)

    def video_text(self, clip: Clip) -> str:
        return "".join(f"{START}{IMAGE}{END}{int(clip.middle_s(first, first))}"
                       for first in self.frames(clip)[:: self.temporal_patch_size])

    def model_inputs(self, media: Sequence[Medium]) -> dict[str, np.ndarray]:
        """A step in time is an image: the model of transformers takes no videos beside images."""
        if not media:
            return {}
        grids = [(1, *medium.grid[1:]) for medium in media for _ in range(medium.grid[0])]
        return {"pixel_values": np.concatenate([medium.patches for medium in media]),
                "image_grid_thw": np.array(grids, np.int64)}
