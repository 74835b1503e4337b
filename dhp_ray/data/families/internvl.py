"""InternVL: an image is cut into tiles of one size, followed by the whole image as one more tile if there are several;
a video has one tile per frame.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dhp_ray.data.families.base import Bounds, Clip, Family, Medium, check_shape, patches
from dhp_ray.data.media import MediaLimits

if TYPE_CHECKING:
    from dhp_ray.planner.plan import Grid  # the planner imports numba

OF_THE_MODEL = ("patch_size", "merge_size", "temporal_patch_size")
"""Settings that its image processor does not have."""

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


class InternVL(Family):
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

    def of_model(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        vision = config.get("vision_config") or {}
        return {"size": vision.get("image_size") or 448, "patch_size": vision.get("patch_size") or 14,
                "merge_size": round(1 / (config.get("downsample_ratio") or 0.5))}

    def plain(self, name: str, value: Any) -> Any:
        if name != "size":
            return super().plain(name, value)
        height, width = (value["height"], value["width"]) if isinstance(value, Mapping) else (
            value if isinstance(value, (list, tuple)) else (value, value))
        return {"height": int(height), "width": int(width)}

    def image_processor(self, settings: Mapping[str, Any], bounds: Bounds) -> Any:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        return GotOcr2ImageProcessorPil(**self.image_files(settings, bounds))

    def image_files(self, settings: Mapping[str, Any], bounds: Bounds) -> dict[str, Any]:
        """The settings from which the image processor is made."""
        known = {name: value for name, value in settings.items() if name not in OF_THE_MODEL}
        most = self.most_tiles(settings, bounds)
        return known | {"crop_to_patches": True, "min_patches": min(int(settings["min_patches"]), most),
                        "max_patches": most}

    def processor_files(
        self, settings: Mapping[str, Any], bounds: Bounds, limits: MediaLimits
    ) -> Mapping[str, Mapping[str, Any]]:
        height, width = _tile(settings)
        processor = {"processor_class": "InternVLProcessor"}
        images = self.image_files(settings, bounds) | processor
        video = {name: value for name, value in images.items() if not name.endswith("_patches")}
        return {"preprocessor_config.json": images | {"image_processor_type": "GotOcr2ImageProcessor"},
                # Published folders leave sampling to the caller. Engines sample themselves, and give no metadata.
                "video_preprocessor_config.json": video | {
                    "video_processor_type": "InternVLVideoProcessor", "do_sample_frames": False,
                    "fps": limits.video_fps, "initial_shift": True},
                "processor_config.json": processor | {
                    "image_seq_length": height * width // bounds.factor**2}}

    def most_tiles(self, settings: Mapping[str, Any], bounds: Bounds) -> int:
        """The most tiles into which an image is cut: at most those of its processor, and with the tile of the whole
        image no more pixels than allowed.
        """
        height, width = _tile(settings)
        return max(1, min(int(settings["max_patches"]), bounds.maximum // (height * width) - 1))

    def image_patches(self, values: Any, bounds: Bounds) -> np.ndarray:
        return patches(np.asarray(values, np.float32), 1, bounds.patch_size, 1)

    def image_grid(self, width: int, height: int, settings: Mapping[str, Any], bounds: Bounds) -> Grid:
        check_shape(height, width)
        tile = _tile(settings)
        most = self.most_tiles(settings, bounds)
        columns, rows = tiling(width, height, tile, min(int(settings["min_patches"]), most), most)
        count = rows * columns
        return (count + (count > 1), tile[0] // bounds.patch_size, tile[1] // bounds.patch_size)

    def frame_size(
        self, clip: Clip, num_frames: int, settings: Mapping[str, Any], bounds: Bounds
    ) -> tuple[int, int]:
        return _tile(settings)

    def num_frames(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> int:
        wanted = int(clip.num_frames / clip.frames_per_second * limits.video_fps)
        return min(max(1, wanted), limits.max_frames, clip.num_frames)

    def frames(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> list[int]:
        """Evenly spread over the video, each from the middle of its part, rounded like torch, which this imports."""
        import torch

        interval = clip.num_frames / self.num_frames(clip, limits, temporal_patch_size)
        return torch.arange(interval / 2, clip.num_frames, interval).int().tolist()  # type: ignore[no-any-return]

    def video_text(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> str:
        count = self.num_frames(clip, limits, temporal_patch_size)
        return "\n".join(f"Frame{number}: {START}{TOKEN}{END}" for number in range(1, count + 1))

    def image_text(self) -> str:
        return f"{START}{TOKEN}{END}"

    def video_runs(self, grid: Grid, merge_area: int) -> Sequence[int]:
        time, height, width = grid
        return (height * width // merge_area,) * time

    def model_inputs(self, media: Sequence[Medium], bounds: Bounds) -> dict[str, np.ndarray]:
        """Tiles (T, 3, height, width), put together again from their patches, which come row by row."""
        if not media:
            return {}
        (_, rows, columns), size = media[0].grid, bounds.patch_size
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


def _tile(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width of a tile in pixels."""
    return int(settings["size"]["height"]), int(settings["size"]["width"])
