"""InternVL: tiles of one size, and of several also the whole image as a tile; a video has a tile per frame."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dhp_ray.data.families.base import Clip, Medium, VisionFamily, check_shape, patches

if TYPE_CHECKING:
    from dhp_ray.planner.plan.types import Grid

OF_THE_MODEL = ("patch_size", "merge_size", "temporal_patch_size")  # settings that its image processor does not have
START, TOKEN, END = "<img>", "<IMG_CONTEXT>", "</img>"

# Renders what InternVL3's own template does.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<IMG_CONTEXT>\\n' -}}
{%- elif part['type'] == 'video' -%}
{{- '<video>\\n' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""


class InternVLFamily(VisionFamily):
    """Like InternVLProcessor, GotOcr2ImageProcessor and InternVLVideoProcessor of transformers.

        <img>[256 tokens a tile]</img>      an image
        Frame1: <img>[256 tokens]</img>     a video, one line per frame
    """

    name: ClassVar[str] = "internvl"
    chat_template: ClassVar[str] = CHAT_TEMPLATE
    tokens: ClassVar[Mapping[str, str]] = {
        "image": TOKEN, "video": TOKEN, "vision_start": START, "vision_end": END, "bos": "<|endoftext|>",
        "eos": "<|im_end|>", "pad": "<|endoftext|>"}
    marks: ClassVar[Mapping[str, str]] = {"image": re.escape(TOKEN), "video": "<video>"}
    image_text: ClassVar[str] = f"{START}{TOKEN}{END}"
    special_tokens: ClassVar[Sequence[str]] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", START, END, TOKEN,
                                               "<video>")
    named_tokens: ClassVar[Mapping[str, str]] = {
        "start_image_token": START, "end_image_token": END, "context_image_token": TOKEN, "video_token": "<video>"}
    structure_tokens: ClassVar[Sequence[str]] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", TOKEN, "<video>")
    image_processors: ClassVar[tuple[str, ...]] = ("GotOcr2ImageProcessor",)
    image_settings: ClassVar[Mapping[str, Any]] = {
        "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3,
        "rescale_factor": 1 / 255, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        "size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12,
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 1}
    merged_order: ClassVar[bool] = False

    @classmethod
    def model_settings(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        vision = config.get("vision_config") or {}
        return {"size": vision.get("image_size") or 448, "patch_size": vision.get("patch_size") or 14,
                "merge_size": round(1 / (config.get("downsample_ratio") or 0.5))}

    @classmethod
    def plain(cls, name: str, value: Any) -> Any:
        if name != "size":
            return super().plain(name, value)
        height, width = (value["height"], value["width"]) if isinstance(value, Mapping) else (
            value if isinstance(value, (list, tuple)) else (value, value))
        return {"height": int(height), "width": int(width)}

    @cached_property
    def image_processor(self) -> Any:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        return GotOcr2ImageProcessorPil(**self.tile_settings)

    @property
    def tile(self) -> tuple[int, int]:
        """Height and width of a tile in pixels."""
        return int(self.settings["size"]["height"]), int(self.settings["size"]["width"])

    @property
    def num_tiles(self) -> tuple[int, int]:
        """The least and most tiles of an image: its processor's, and with the whole no more pixels than allowed."""
        most = max(1, min(int(self.settings["max_patches"]), self.max_pixels // math.prod(self.tile) - 1))
        return min(int(self.settings["min_patches"]), most), most

    @property
    def tile_settings(self) -> dict[str, Any]:
        """The settings from which the image processor is made."""
        least, most = self.num_tiles
        known = {name: value for name, value in self.settings.items() if name not in OF_THE_MODEL}
        return known | {"crop_to_patches": True, "min_patches": least, "max_patches": most}

    def processor_files(self) -> Mapping[str, Mapping[str, Any]]:
        processor = {"processor_class": "InternVLProcessor"}
        images = self.tile_settings | processor
        video = {name: value for name, value in images.items() if not name.endswith("_patches")}
        return {"preprocessor_config.json": images | {"image_processor_type": "GotOcr2ImageProcessor"},
                # Published folders leave sampling to the caller. Engines sample themselves, and give no metadata.
                "video_preprocessor_config.json": video | {
                    "video_processor_type": "InternVLVideoProcessor", "do_sample_frames": False,
                    "fps": self.limits.video_fps, "initial_shift": True},
                "processor_config.json": processor | {"image_seq_length": math.prod(self.tile) // self.factor**2}}

    def image_patches(self, values: Any) -> np.ndarray:
        return patches(np.asarray(values, np.float32), 1, self.patch_size, 1)

    def image_grid(self, width: int, height: int) -> Grid:
        check_shape(height, width)
        count = math.prod(tiling(width, height, self.tile, *self.num_tiles))
        return (count + (count > 1), self.tile[0] // self.patch_size, self.tile[1] // self.patch_size)

    def frame_size(self, clip: Clip) -> tuple[int, int]:
        return self.tile

    def frames(self, clip: Clip) -> list[int]:
        """Evenly spread over the video, each from the middle of its part, rounded like torch, which this imports."""
        import torch

        interval = clip.num_frames / self.num_frames(clip)
        return torch.arange(interval / 2, clip.num_frames, interval).int().tolist()  # type: ignore[no-any-return]

    def video_text(self, clip: Clip) -> str:
        return "\n".join(f"Frame{number}: {self.image_text}" for number in range(1, self.num_frames(clip) + 1))

    def model_inputs(self, media: Sequence[Medium]) -> dict[str, np.ndarray]:
        """Tiles (T, 3, height, width), put together again from their patches, which come row by row."""
        if not media:
            return {}
        (_, rows, columns), size = media[0].grid, self.patch_size
        cut = np.concatenate([medium.patches for medium in media]).reshape(-1, rows, columns, 3, size, size)
        return {"pixel_values": cut.transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, rows * size, columns * size)}


def tiling(width: int, height: int, tile: tuple[int, int], least: int, most: int) -> tuple[int, int]:
    """(columns, rows) of the tiles, between `least` and `most` of them: the aspect ratio nearest to the picture's.
    Among equally near ones, the one with the most tiles that together have less than twice the picture's pixels.
    """
    shapes = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1)
              if least <= columns * rows <= most]
    best, nearest = (1, 1), np.inf
    for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        apart = abs(width / height - columns / rows)
        if apart < nearest or (apart == nearest and width * height > 0.5 * tile[0] * tile[1] * columns * rows):
            best, nearest = (columns, rows), apart
    return best
