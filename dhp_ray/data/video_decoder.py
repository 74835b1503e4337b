"""Decodes chosen frames of a video, beginning at the key frame before them.

    packets, as stored     I0 P3 B1 B2 | I4 P7 B5 B6 | I8 ...      read once; each says when its frame is shown
    wanted: 5, 6           decoding begins with I4 and ends when 6 has come

The number of a frame is its place in the order of presentation. If packets do not say when they are shown, as in AVI,
or if the frames from a key frame on are incomplete or out of order, decoding begins with the first packet and numbers
the frames as they come.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import av
import numpy as np

from dhp_ray.data.clip import Clip
from dhp_ray.data.errors import RowError
from dhp_ray.data.media import MediaLimits
from dhp_ray.errors import first_line

MAX_FRAMES_PER_SECOND = 240  # a file that claims more is made to look shorter than it is
CONTAINERS = "MP4 or MOV, WebM or Matroska, AVI"
av.logging.set_level(None)


class VideoDecoder:
    """The packets of one encoded video, in memory; a context manager that closes the video.

    Raises:
        RowError: the video cannot be read, is too long, or its frames are too large.
    """

    clip: Clip
    num_decoded = 0
    """The number of frames decoded so far, wanted or not."""

    def __init__(self, data: bytes, limits: MediaLimits) -> None:
        with ExitStack() as stack:
            with _reading():
                container, self._stream = stack.enter_context(_opened(data))
                self._packets = list(container.demux(self._stream))
                self._is_avi = container.format.name == "avi"
                self.clip = _clip(self._stream, sum(map(_shows, self._packets)), limits)
            self._stack = stack.pop_all()
        self._stream.codec_context.thread_count = 1  # other decoders and a worker that trains run at the same time

    def __enter__(self) -> VideoDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._packets = []
        self._stack.close()

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The frames with these numbers, uint8 (height, width, 3), each with its number. If decoding had to start
        again, a frame may come twice: the later one counts. May be called only once.

        Raises:
            ValueError: the frames are not those that the container announced, or are damaged.
        """
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
        """The number of the frame that is shown at each time; empty if the packets do not tell.

        AVI has no such times. If frames have to be reordered but no packet is out of order, the times were made up.
        """
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
        except av.FFmpegError as error:
            raise ValueError(f"the video does not decode after frame {number}: {error.strerror}") from None
        raise ValueError(f"the video ends before frame {min(missing)} of {self.clip.num_frames}")

    def _checked(self, number: int, frame: Any) -> np.ndarray:
        if (frame.width, frame.height) != (self.clip.width, self.clip.height):
            raise ValueError(
                f"frame {number} has {frame.width}x{frame.height} pixels; the video's header says "
                f"{self.clip.width}x{self.clip.height}"
            )
        if frame.is_corrupt:
            raise ValueError(f"frame {number} of the video is damaged")
        pixels: np.ndarray = frame.to_ndarray(format="rgb24")
        return pixels


def clip_of(data: bytes, limits: MediaLimits) -> Clip:
    """The description of an encoded video. Reads the container's packets and decodes none.

    Raises:
        RowError: the video cannot be read, is too long, or its frames are too large.
    """
    with _reading(), _opened(data) as (container, stream):
        return _clip(stream, sum(map(_shows, container.demux(stream))), limits)


def _shows(packet: Any) -> bool:
    """Whether a packet holds a frame that is shown."""
    return bool(packet.size) and not packet.is_discard


def _clip(stream: Any, num_frames: int, limits: MediaLimits) -> Clip:
    rate = stream.average_rate or stream.guessed_rate
    clip = Clip(stream.codec_context.width, stream.codec_context.height, num_frames, float(rate or 0))
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


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except RowError:
        raise
    except Exception as error:  # as for images: foreign bytes make readers raise errors of many kinds
        raise RowError(f"not a video that can be read: {first_line(error)}; allowed: {CONTAINERS}") from None


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream.

    The format is detected from the first bytes and passed to FFmpeg. If FFmpeg guessed, it would also accept playlists,
    which name other files and URLs to open.
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
