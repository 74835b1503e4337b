"""Videos: their frames counted from the container, the frames that a model sees, and their patches as Qwen2-VL's video
processor makes them.

Which frames are taken follows `Qwen2VLVideoProcessor.sample_frames` (transformers), the patches its `patchify`; both
are written anew here because that class needs torchvision. A video is as the container stores it: not turned by its
display matrix.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import av
import numpy as np

from dhp_ray.data.clip import Clip
from dhp_ray.data.errors import RowError
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.processor import Processor
from dhp_ray.errors import first_line

MAX_FRAMES_PER_SECOND = 240  # a file that claims more is made to be long while it looks short
CONTAINERS = "MP4 or MOV, WebM or Matroska, AVI"
av.logging.set_level(None)


def clip_of(data: bytes, limits: MediaLimits) -> Clip:
    """What an encoded video consists of. Walks over the container's packets; decodes none.

    Raises:
        RowError: it cannot be read, is too long, or its frames are too large.
    """
    try:
        with _opened(data) as (container, stream):
            rate = stream.average_rate or stream.guessed_rate
            count = sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)
            clip = Clip(stream.codec_context.width, stream.codec_context.height, count, float(rate or 0))
    except RowError:
        raise
    except Exception as error:  # as for images: foreign bytes make readers raise errors of many kinds
        raise RowError(f"not a video that can be read: {first_line(error)}; allowed: {CONTAINERS}") from None
    if min(clip.width, clip.height, clip.num_frames) < 1 or not 0 < clip.frames_per_second < math.inf:
        raise RowError(
            f"a video of {clip.num_frames} frames of {clip.width}x{clip.height} pixels, "
            f"{clip.frames_per_second:g} a second; allowed: at least one frame, and a rate"
        )
    if clip.width * clip.height > limits.max_decoded_pixels:
        raise RowError(
            f"frames of {clip.width}x{clip.height} pixels; allowed: at most {limits.max_decoded_pixels} pixels "
            "(data.max_decoded_pixels)"
        )
    seconds = max(clip.num_frames / clip.frames_per_second, clip.num_frames / MAX_FRAMES_PER_SECOND)
    if seconds > limits.max_video_seconds:
        raise RowError(
            f"a video of {seconds:.0f} s ({clip.num_frames} frames); allowed: at most {limits.max_video_seconds:g} s "
            "(data.max_video_seconds)"
        )
    return clip


def decode_video(data: bytes, processor: Processor, ranges: Sequence[range], num_steps: int) -> list[np.ndarray]:
    """Patches, float32 of shape (P, patch_dim), of each range of steps in time of the video's grid, which was planned
    with `num_steps`.

    Raises:
        ValueError: the frames that come out are not those that the container announced, or are damaged.
        Exception: whatever PyAV raises on bytes that do not decode.
    """
    clip, temporal = clip_of(data, processor.limits), processor.temporal_patch_size
    sampled = clip.sampled(processor.limits, temporal)
    if -(-len(sampled) // temporal) != num_steps:
        raise ValueError(f"the video gives {len(sampled)} frames; planned: {num_steps * temporal}")
    # A last step that lacks frames repeats the last one.
    numbers = [[sampled[min(place, len(sampled) - 1)] for place in range(steps.start * temporal, steps.stop * temporal)]
               for steps in ranges]
    rows, columns = processor.resized(clip.width, clip.height)
    frames = {number: _normalised(frame, rows, columns, processor)
              for number, frame in _frames(data, clip, {n for part in numbers for n in part})}
    return [patches(np.stack([frames[number] for number in part]), temporal, processor.patch_size, processor.merge_size)
            for part in numbers]


def patches(frames: np.ndarray, temporal_patch_size: int, patch_size: int, merge_size: int) -> np.ndarray:
    """Frames (T, 3, H, W), T a multiple of `temporal_patch_size`, to patches (P, 3 x temporal_patch_size x patch_size x
    patch_size).
    """
    time, channels, height, width = frames.shape
    cut = frames.reshape(time // temporal_patch_size, temporal_patch_size, channels, height // patch_size // merge_size,
                         merge_size, patch_size,
                         width // patch_size // merge_size, merge_size, patch_size)
    ordered = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(-1, channels * temporal_patch_size * patch_size**2)


def _frames(data: bytes, clip: Clip, wanted: set[int]) -> Iterator[tuple[int, np.ndarray]]:
    """The wanted frames, uint8 (height, width, 3), with their numbers."""
    last, missing, number = max(wanted), set(wanted), -1
    with _opened(data) as (container, stream):
        stream.codec_context.thread_count = 1  # beside a worker that trains
        try:
            for number, frame in enumerate(container.decode(stream)):
                if number in missing:
                    if (frame.width, frame.height) != (clip.width, clip.height):
                        raise ValueError(
                            f"frame {number} has {frame.width}x{frame.height} pixels; the video's header says "
                            f"{clip.width}x{clip.height}"
                        )
                    if frame.is_corrupt:
                        raise ValueError(f"frame {number} of the video is damaged")
                    missing.discard(number)
                    yield number, frame.to_ndarray(format="rgb24")
                if number >= last:
                    break
        except av.FFmpegError as error:
            raise ValueError(f"the video does not decode after frame {number}: {error.strerror}") from None
    if missing:
        raise ValueError(f"the video ends before frame {min(missing)} of {clip.num_frames}")


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


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream.

    The kind is told from the first bytes and given to FFmpeg: left to guess, it also takes playlists, which name other
    files and URLs to open.
    """
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        kind = "mov"
    elif data[:4] == b"\x1a\x45\xdf\xa3":
        kind = "matroska"
    elif data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        kind = "avi"
    else:
        raise RowError(f"not a video of a known format; allowed: {CONTAINERS}")
    with av.open(io.BytesIO(data), format=kind, options={"enable_drefs": "0"} if kind == "mov" else {}) as container:
        stream = next(iter(container.streams.video), None)
        if stream is None:
            raise RowError("the file has no video stream")
        yield container, stream
