"""Qwen2.5-VL: images of any shape, videos as one run of tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dhp_ray.data.families.base import Clip, Medium, VisionFamily, check_shape

if TYPE_CHECKING:
    from dhp_ray.planner.plan.types import Grid

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
                  "<|video_pad|>")
TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>",
          "vision_end": "<|vision_end|>", "bos": "<|endoftext|>", "eos": "<|im_end|>", "pad": "<|endoftext|>"}
"""By purpose, with the names that the Qwen families use."""

# Renders what Qwen2.5-VL's own template does, and tools as that of Qwen2.5. Jinja's whitespace control (-) keeps it
# readable here.
CHAT_TEMPLATE = """
{%- set images = namespace(count=0) -%}
{%- set videos = namespace(count=0) -%}
{%- set system = 'You are a helpful assistant.' -%}
{%- macro offered(before) -%}
{%- if tools -%}
{{- before + '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' -}}
{{- '<tool_call></tool_call> XML tags:\\n' -}}
{{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' -}}
{%- endif -%}
{%- endmacro -%}
{%- if messages[0]['role'] != 'system' and (system or tools) -%}
{{- '<|im_start|>system\\n' + system + offered('\\n\\n' if system else '') + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set tool = message['role'] == 'tool' -%}
{%- if not (tool and loop.previtem['role'] == 'tool') -%}
{{- '<|im_start|>' + ('user' if tool else message['role']) -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' if tool else '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{%- set images.count = images.count + 1 -%}
{{- 'Picture ' ~ images.count ~ ': ' if add_vision_id else '' -}}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{%- set videos.count = videos.count + 1 -%}
{{- 'Video ' ~ videos.count ~ ': ' if add_vision_id else '' -}}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- offered('\\n\\n') if loop.first and message['role'] == 'system' -}}
{%- for call in message['tool_calls'] or [] -%}
{{- ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n{"name": "' + call['function']['name'] -}}
{{- '", "arguments": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '\\n</tool_response>' if tool -}}
{{- '<|im_end|>\\n' if not (tool and loop.nextitem and loop.nextitem['role'] == 'tool') -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""

DEFAULT_SYSTEM = "You are a helpful assistant."  # the system turn that the template writes if a conversation has none


class Qwen25VLFamily(VisionFamily):
    """Like Qwen2_5_VLProcessor, Qwen2VLImageProcessor and Qwen2VLVideoProcessor of transformers."""

    name: ClassVar[str] = "qwen2_5_vl"
    chat_template: ClassVar[str] = CHAT_TEMPLATE
    tokens: ClassVar[Mapping[str, str]] = TOKENS
    marks: ClassVar[Mapping[str, str]] = {kind: re.escape(TOKENS[kind]) for kind in ("image", "video")}
    image_text: ClassVar[str] = TOKENS["image"]
    special_tokens: ClassVar[Sequence[str]] = SPECIAL_TOKENS
    structure_tokens: ClassVar[Sequence[str]] = (*SPECIAL_TOKENS, "<|vision_pad|>")
    image_processors: ClassVar[tuple[str, ...]] = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
    image_settings: ClassVar[Mapping[str, Any]] = {
        "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    least_frames: ClassVar[int] = 4
    processor_class: ClassVar[str] = "Qwen2_5_VLProcessor"
    video_processor: ClassVar[str] = "Qwen2VLVideoProcessor"

    @classmethod
    def model_settings(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        vision = config.get("vision_config") or {}
        names = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size",
                 "merge_size": "spatial_merge_size"}
        return {name: vision[stored] for name, stored in names.items() if vision.get(stored) is not None}

    @cached_property
    def image_processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(**self.sized_settings)

    def processor_files(self) -> Mapping[str, Mapping[str, Any]]:
        processor = {"processor_class": self.processor_class}
        images = self.sized_settings | processor
        video = images | {"video_processor_type": self.video_processor, "do_sample_frames": True,
                          "fps": self.limits.video_fps, "min_frames": self.least_frames,
                          "max_frames": self.limits.max_frames}
        return {"preprocessor_config.json": images | {"image_processor_type": "Qwen2VLImageProcessor"},
                "video_preprocessor_config.json": video | self.video_settings,
                "processor_config.json": processor}

    @property
    def sized_settings(self) -> dict[str, Any]:
        """The settings of the image processor, with the pixels allowed here in place of the folder's."""
        others = {name: value for name, value in self.settings.items() if name not in ("min_pixels", "max_pixels")}
        return others | {"size": {"shortest_edge": self.frames_of_image * self.min_pixels,
                                  "longest_edge": self.frames_of_image * self.max_pixels}}

    @property
    def video_settings(self) -> dict[str, Any]:
        """The settings that tell the video processor to what size frames are scaled, where it is not that of images."""
        return {"cap_pixels_per_frame": False,
                "size": {"shortest_edge": self.min_video_pixels, "longest_edge": self.max_pixels}}

    def image_grid(self, width: int, height: int) -> Grid:
        rows, columns = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return (1, rows // self.patch_size, columns // self.patch_size)

    def frame_size(self, clip: Clip) -> tuple[int, int]:
        return smart_resize(clip.height, clip.width, self.factor, self.min_video_pixels, self.max_pixels)

    def num_frames(self, clip: Clip) -> int:
        return math.ceil(clip.num_frames / self._interval(clip))

    def frames(self, clip: Clip) -> list[int]:
        """Evenly spread over the video, rounded like torch, which this imports."""
        import torch

        numbers = torch.arange(0, clip.num_frames, self._interval(clip), dtype=torch.float32).int()
        return numbers.clamp_(max=clip.num_frames - 1).tolist()  # rounding can give one frame too many

    def video_text(self, clip: Clip) -> str:
        return self.tokens["video"]

    def video_runs(self, grid: Grid) -> Sequence[int]:
        return (math.prod(grid) // self.merge_size**2,)

    def model_inputs(self, media: Sequence[Medium]) -> dict[str, np.ndarray]:
        inputs: dict[str, np.ndarray] = {}
        for values, grids, of_video in (("pixel_values", "image_grid_thw", False),
                                        ("pixel_values_videos", "video_grid_thw", True)):
            if chosen := [medium for medium in media if bool(medium.seconds) == of_video]:
                inputs |= {values: np.concatenate([medium.patches for medium in chosen]),
                           grids: np.array([medium.grid for medium in chosen], np.int64)}
        return inputs

    def _interval(self, clip: Clip) -> float:
        """The distance in frames from one taken frame to the next."""
        together = self.temporal_patch_size
        most = min(self.limits.max_frames, clip.num_frames) // together * together
        wanted = min(max(clip.num_frames / clip.frames_per_second * self.limits.video_fps, self.least_frames), most,
                     clip.num_frames)
        return clip.num_frames / max(1, math.floor(wanted / together) * together)


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, num_frames: int = 1, num_counted: int = 1
) -> tuple[int, int]:
    """(height, width) in multiples of `factor`, between the bounds (Qwen2-VL, 2.1) on the pixels of `num_frames`, of
    which `num_counted` decide whether one is exceeded. RowError: ratio above 200.
    """
    check_shape(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if num_counted * rows * columns > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif num_counted * rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns
