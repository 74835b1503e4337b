"""Videos: the frames that a model sees, and their patches as Qwen2VLVideoProcessor of transformers makes them, which
needs torchvision. Decoding begins at the key frame before the first frame that is wanted.

    packets, as stored     I0 P3 B1 B2 | I4 P7 B5 B6 | I8 ...      read once; each says when its frame is shown
    wanted: 5, 6           decoding begins with I4 and ends when 6 has come

The number of a frame is its place in the order of presentation. If packets do not say when they are shown, as in AVI,
or if frames are incomplete or out of order, decoding begins with the first packet and numbers the frames as they come.

Frames are upright by the container's display matrix, as of torchcodec (from 0.11) and OpenCV. The times of a clip of
variable frame rate are those of its packets; which frames are taken follows from their numbers, as in transformers.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.sidedata.sidedata import Type as SideData

from dhp_ray.data.errors import RowError
from dhp_ray.data.families.base import Clip, VisionFamily, patches
from dhp_ray.data.images import decode_rgb, image_size
from dhp_ray.data.media import FRAMES_MAGIC, MediaLimits, unpack_frames
from dhp_ray.errors import about, first_line

MAX_FRAMES_PER_SECOND = 240  # a file that claims more is made to look shorter than it is
CONTAINERS = "MP4 or MOV, WebM or Matroska, AVI"
EVEN_S = 0.01  # frames whose times are so near to evenly spaced ones are taken as such: containers round times
_NOT_TURNED = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
"""The display matrix of a MOV whose frames are shown as stored."""
_CLUSTER, _PROJECTION = b"\x1f\x43\xb6\x75", b"\x76\x70"
"""Ids of Matroska: the first frames, and what may turn frames, in the header before them."""
Matrix = tuple[int, int, int, int]
"""Where a display matrix moves a pixel: (x, y) to (a x + c y, b x + d y), in the order a, b, c, d."""
av.logging.set_level(None)


def decode_video(data: bytes, family: VisionFamily, ranges: Sequence[range], num_steps: int) -> list[np.ndarray]:
    """Patches, float32 (P, patch_dim), of each range of steps in time. ValueError, or PyAV's: not as announced."""
    temporal = family.temporal_patch_size
    with opened_video(data, family.limits) as decoder:
        clip = decoder.clip
        sampled = family.frames(clip)
        if -(-len(sampled) // temporal) != num_steps:
            raise ValueError(f"the video gives {len(sampled)} frames; planned: {num_steps * temporal}")
        # A last step without enough frames repeats the last frame.
        numbers = [[sampled[min(place, len(sampled) - 1)]
                    for place in range(steps.start * temporal, steps.stop * temporal)] for steps in ranges]
        rows, columns = family.frame_size(clip)
        frames = {number: _normalised(frame, rows, columns, family)
                  for number, frame in decoder.frames(sorted({number for part in numbers for number in part}))}
    together = family.merge_size if family.merged_order else 1
    return [patches(np.stack([frames[number] for number in part]), temporal, family.patch_size, together)
            for part in numbers]


def _normalised(frame: np.ndarray, rows: int, columns: int, family: VisionFamily) -> np.ndarray:
    """A frame resized and normalised, float32 (3, rows, columns)."""
    settings = family.settings
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


class VideoDecoder:
    """The packets of an opened video, in memory. `num_decoded`: the frames decoded so far, wanted or not."""

    def __init__(self, container: Any, stream: Any, data: bytes, limits: MediaLimits) -> None:
        self._stream, self._packets = stream, list(container.demux(stream))
        self._is_avi = container.format.name == "avi"
        stored = _clip(stream, self._packets, limits)
        self._matrix = _matrix(data)
        self.clip = _turned(stored, self._matrix)
        self.num_decoded = 0
        stream.codec_context.thread_count = 1  # other decoders and a worker that trains run at the same time

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """(number, frame), uint8 (height, width, 3), of these frames. Call it once. ValueError: they are damaged."""
        times = self._times()
        start = self._start(times, set(wanted))
        if start:
            try:
                yield from self._from(start, times, set(wanted))
                return
            except ValueError:  # frames before the key frame are needed, or some are damaged, which is raised below
                self._stream.codec_context.flush_buffers()
        yield from self._from(0, {}, set(wanted))

    def _times(self) -> dict[int, int]:
        """The number of the frame shown at each time; empty if packets do not tell (AVI), or times were made up."""
        shown = [packet.pts for packet in self._packets if _shows(packet)]
        if self._is_avi or None in shown or len(set(shown)) < len(shown):
            return {}
        ordered = sorted(shown)
        if ordered == shown and self._stream.codec_context.has_b_frames:
            return {}
        return {time: number for number, time in enumerate(ordered)}

    def _start(self, times: dict[int, int], wanted: set[int]) -> int:
        """The index of the last key frame that is neither stored nor shown after a wanted frame; 0: none is known."""
        first, start = min(wanted), 0
        for place, packet in enumerate(self._packets if times else ()):
            if not _shows(packet):
                continue
            number = times[packet.pts]
            if packet.is_keyframe and number <= first:
                start = place
            if number in wanted:
                return start
        return 0

    def _from(self, start: int, times: dict[int, int], missing: set[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The missing frames, numbered by `times`, or one after the other if `times` is empty."""
        number = -1
        try:
            for frame in (frame for packet in self._packets[start:] for frame in packet.decode()):
                self.num_decoded += 1
                before, number = number, times.get(frame.pts, -1) if times else number + 1
                if number < 0 or (number != before + 1 and before >= 0):
                    raise ValueError(f"frame {number} of the video comes after frame {before}")
                if number in missing:
                    missing.discard(number)
                    yield number, self._checked(number, frame)
                if not missing:
                    return
        except MemoryError:  # of the machine, not of the video
            raise
        except av.FFmpegError as error:
            raise ValueError(f"the video does not decode after frame {number}: {error.strerror}") from None
        raise ValueError(f"the video ends before frame {min(missing)} of {self.clip.num_frames}")

    def _checked(self, number: int, frame: Any) -> np.ndarray:
        if frame.is_corrupt:
            raise ValueError(f"frame {number} of the video is damaged")
        pixels: np.ndarray = _upright(frame.to_ndarray(format="rgb24"), self._matrix)
        if pixels.shape[:2] != (self.clip.height, self.clip.width):
            raise ValueError(f"frame {number} has {frame.width}x{frame.height} pixels; the video's header says others")
        return pixels


class FrameFiles:
    """A video whose frames are files, in memory; used like a `VideoDecoder`."""

    def __init__(self, data: bytes, limits: MediaLimits) -> None:
        self._frames, rate = unpack_frames(data)
        self._max_pixels = limits.max_decoded_pixels
        sizes = []
        for number, frame in enumerate(self._frames, 1):
            with about(RowError, f"frame {number}"):
                sizes.append(image_size(frame, self._max_pixels))
            if sizes[-1] != sizes[0]:
                raise RowError(f"frame {number} has {'x'.join(map(str, sizes[-1]))} pixels, the first "
                               f"{'x'.join(map(str, sizes[0]))}; allowed: frames of one size")
        self.clip = _checked(Clip(*(sizes[0] if sizes else (0, 0)), len(sizes), rate), limits)

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """As those of a `VideoDecoder`, or whatever Pillow raises on bytes that do not decode."""
        for number in wanted:
            yield number, np.asarray(decode_rgb(self._frames[number], self._max_pixels))


@contextmanager
def opened_video(data: bytes, limits: MediaLimits) -> Iterator[VideoDecoder | FrameFiles]:
    """What gives the frames of a video. Raises as `read_clip`."""
    if data.startswith(FRAMES_MAGIC):
        yield FrameFiles(data, limits)
        return
    with ExitStack() as stack:
        with _reading():
            decoder = VideoDecoder(*stack.enter_context(_opened(data)), data, limits)
        yield decoder


def read_clip(data: bytes, limits: MediaLimits) -> Clip:
    """The description of an encoded video. RowError: it cannot be read, or is too long or too large."""
    if data.startswith(FRAMES_MAGIC):
        return FrameFiles(data, limits).clip
    with _reading():
        with _opened(data) as (container, stream):
            clip = _clip(stream, container.demux(stream), limits)
        return _turned(clip, _matrix(data))


def _shows(packet: Any) -> bool:
    return bool(packet.size) and not packet.is_discard


def _clip(stream: Any, packets: Iterable[Any], limits: MediaLimits) -> Clip:
    """The clip as it is stored, not turned."""
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    shown = [packet.pts for packet in packets if _shows(packet)]
    rate, times = _rate_and_times(shown, stream.time_base, rate)
    return _checked(Clip(stream.codec_context.width, stream.codec_context.height, len(shown), rate, times), limits)


def _rate_and_times(
    shown: Sequence[int | None], tick_s: Fraction | None, rate: float
) -> tuple[float, tuple[float, ...]]:
    """Frames a second, and times that do not follow from that rate. `shown`: of each frame, in ticks."""
    known = sorted(tick for tick in shown if tick is not None)
    if tick_s is None or len(known) < max(2, len(shown)):
        return rate, ()
    ticks = np.array([tick - known[0] for tick in known], np.float64)
    times = ticks * tick_s.numerator / tick_s.denominator
    if np.diff(times).min() <= 0 or (rate > 0 and np.abs(times - np.arange(len(times)) / rate).max() <= EVEN_S):
        return rate, ()
    return float((len(times) - 1) / times[-1]), tuple(times.tolist())


def _turned(clip: Clip, matrix: Matrix | None) -> Clip:
    return clip if matrix is None or matrix[0] else replace(clip, width=clip.height, height=clip.width)


def _matrix(data: bytes) -> Matrix | None:
    """The display matrix of a video whose limits have been checked, with entries -1, 0 and 1; None if frames are
    upright as stored. Only a decoded frame tells it, so one is decoded, unless the header has no other matrix.
    """
    may_turn = (_PROJECTION in data[:max(0, data.find(_CLUSTER))] if data.startswith(b"\x1a\x45\xdf\xa3") else
                data.count(b"mvhd") + data.count(b"tkhd") > data.count(_NOT_TURNED))
    if data.startswith(b"RIFF") or not may_turn:
        return None
    try:
        with _opened(data) as (container, stream):
            stream.codec_context.thread_count = 1
            frame = next(container.decode(stream), None)
    except av.FFmpegError:  # of a damaged video, which is told when it is decoded
        return None
    found = None if frame is None else frame.side_data.get(SideData.DISPLAYMATRIX)
    if found is None:
        return None
    a, b, _, c, d = struct.unpack("=5i", bytes(found)[:20])
    if max(abs(b), abs(c)) * 100 < min(abs(a), abs(d)):
        matrix = (int(math.copysign(1, a)), 0, 0, int(math.copysign(1, d)))
    elif max(abs(a), abs(d)) * 100 < min(abs(b), abs(c)):
        matrix = (0, int(math.copysign(1, b)), int(math.copysign(1, c)), 0)
    else:  # not by right angles
        return None
    return None if matrix == (1, 0, 0, 1) else matrix


def _upright(pixels: np.ndarray, matrix: Matrix | None) -> np.ndarray:
    """A frame (height, width, 3), moved as the display matrix says."""
    if matrix is None:
        return pixels
    a, b, c, d = matrix
    turned = pixels if a else pixels.transpose(1, 0, 2)
    return turned[::b + d, ::a + c]


def _checked(clip: Clip, limits: MediaLimits) -> Clip:
    """The clip, unless it has no frame or no rate, is too long, or has frames that are too large."""
    if min(clip.width, clip.height, clip.num_frames) < 1 or not 0 < clip.frames_per_second < math.inf:
        raise RowError(f"a video of {clip.num_frames} frames of {clip.width}x{clip.height} pixels, "
                       f"{clip.frames_per_second:g} a second; allowed: at least one frame, and a rate")
    if clip.width * clip.height > limits.max_decoded_pixels:
        raise RowError(f"frames of {clip.width}x{clip.height} pixels; allowed: at most {limits.max_decoded_pixels} "
                       "pixels (by data.max_pixels)")
    seconds = max(clip.num_frames / clip.frames_per_second, clip.num_frames / MAX_FRAMES_PER_SECOND)
    if seconds > limits.max_video_seconds:
        raise RowError(f"a video of {seconds:.0f} s ({clip.num_frames} frames); allowed: at most "
                       f"{limits.max_video_seconds:g} s (by data.max_frames and data.video_fps)")
    return clip


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except RowError:
        raise
    except Exception as error:  # as for images: foreign bytes make readers raise errors of many kinds
        if isinstance(error, MemoryError) and not isinstance(error, av.FFmpegError):
            raise  # of the machine; FFmpeg's own may come from a size in a damaged header
        raise RowError(f"not a video that can be read: {first_line(error)}; allowed: {CONTAINERS}") from None


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream. FFmpeg must not guess: playlists name URLs to open."""
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
