"""Videos: the frames that a model sees, and their patches in the form of Qwen's video processors.

The patches follow `Qwen2VLVideoProcessor.patchify` (transformers), which is reimplemented here because that class needs
torchvision. The family decides which frames are taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dhp_ray.data.families.base import patches
from dhp_ray.data.processor import Processor
from dhp_ray.data.video_decoder import opened_video


def decode_video(data: bytes, processor: Processor, ranges: Sequence[range], num_steps: int) -> list[np.ndarray]:
    """Patches, float32 of shape (P, patch_dim), of each range of steps in time of the video's grid, which was planned
    with `num_steps` steps.

    Raises:
        ValueError: the decoded frames are not those that the container announced, or are damaged.
        Exception: whatever PyAV raises on bytes that do not decode.
    """
    temporal = processor.temporal_patch_size
    with opened_video(data, processor.limits) as decoder:
        clip = decoder.clip
        sampled = processor.frames(clip)
        if -(-len(sampled) // temporal) != num_steps:
            raise ValueError(f"the video gives {len(sampled)} frames; planned: {num_steps * temporal}")
        # A last step without enough frames repeats the last frame.
        numbers = [[sampled[min(place, len(sampled) - 1)]
                    for place in range(steps.start * temporal, steps.stop * temporal)] for steps in ranges]
        rows, columns = processor.frame_size(clip)
        frames = {number: _normalised(frame, rows, columns, processor)
                  for number, frame in decoder.frames(sorted({number for part in numbers for number in part}))}
    together = processor.merge_size if processor.family.merged_order else 1
    return [patches(np.stack([frames[number] for number in part]), temporal, processor.patch_size, together)
            for part in numbers]


def _normalised(frame: np.ndarray, rows: int, columns: int, processor: Processor) -> np.ndarray:
    """A frame resized and normalised, float32 (3, rows, columns)."""
    settings = processor.image_settings
    pixels = np.ascontiguousarray(frame.transpose(2, 0, 1))
    if pixels.shape[1:] != (rows, columns):
        import torch  # its bicubic filter is the one that torchvision calls; Pillow's differs by one level in places

        resized = torch.nn.functional.interpolate(
            torch.from_numpy(pixels)[None], size=(rows, columns), mode="bicubic", align_corners=False, antialias=True)
        pixels = resized[0].numpy()
    scale = np.float32(1.0 / settings["rescale_factor"])
    mean, deviation = (np.asarray(settings[name], np.float32).reshape(3, 1, 1) * scale
                       for name in ("image_mean", "image_std"))
    return (pixels.astype(np.float32) - mean) / deviation
