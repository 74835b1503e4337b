"""Reads the encoded images and videos of a row. Nothing outside the image root is ever opened."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

from dhp_ray.credentials import masked
from dhp_ray.data.conversation import MEDIA, Turn, check_counts, holds_media, own_media, unwrap
from dhp_ray.data.errors import RowError
from dhp_ray.errors import about
from dhp_ray.schema import Data

FRAMES_MAGIC = b"dhp_ray frames 1"
_FRAMES_HEADER = struct.Struct("<dI")
_DATA = re.compile("data:", re.IGNORECASE)
_DATA_URI = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(;[\w.+-]+=[\w.+-]*)*;base64,", re.ASCII | re.IGNORECASE)
_NAME_CHARACTERS = 4096  # what Linux opens; looking up the folders of a far longer name takes minutes


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of an image or a video. Input is untrusted, so each limit is checked before anything is decoded."""

    max_decoded_pixels: int = 64_000_000
    max_file_bytes: int = 512 * 2**20
    video_fps: float = 2.0
    max_frames: int = 768
    max_video_seconds: float = 3600.0

    @classmethod
    def of(cls, data: Data) -> MediaLimits:
        """As images and videos that are to be larger, or longer, need them."""
        least = cls()
        return cls(max(least.max_decoded_pixels, 64 * data.max_pixels), int(data.max_file_mb * 2**20), data.video_fps,
                   data.max_frames, max(least.max_video_seconds, data.max_frames / data.video_fps))


def read_media(fields: Mapping[str, Any], turns: Sequence[Turn], image_root: str, limits: MediaLimits,
               members: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """The encoded images and videos of a row, in the order of the conversation, by what errors call them ("image 1").

    Names are of files below `image_root`, or of `members` if given, or data: URIs. A video may be a list of its frames,
    or {"video": such a list, "fps": 2}; without fps `video_fps` of them come a second. RowError: one is missing,
    outside of the root or with settings of its own; or marks do not agree with columns.
    """
    stored = {kind: column_media(fields, kind) for kind in MEDIA}
    check_counts(turns, {kind: len(values) for kind, values in stored.items()})
    following = {kind: iter(values) for kind, values in stored.items()}
    numbers = {kind: count(1) for kind in MEDIA}
    most, total = limits.max_file_bytes, 0
    found: dict[str, bytes] = {}
    for part in (part for turn in turns for part in turn.media):
        name = f"{part.kind} {next(numbers[part.kind])}"
        with about(RowError, name):
            given = (part.source if part.source is not None else next(following[part.kind]) if part.index is None
                     else stored[part.kind][part.index])
            source, rate = unwrap(given, part.kind)
            rate = part.fps if rate is None else rate
            if part.kind != "video" or not isinstance(source, list):
                if part.kind == "video" and _number(rate) not in (None, limits.video_fps):
                    raise RowError(f"fps is {repr(rate)[:40]} for a video file; allowed: {limits.video_fps:g} "
                                   "(data.video_fps)")
                found[name] = _encoded(source, image_root, most, members)
            else:
                encoded = list(_encoded_frames(source, image_root, most, members))
                found[name] = pack_frames(encoded, limits.video_fps if rate is None else rate)
        total += len(found[name])
        if len(found) > 1:
            _check_size("the row", total, most)
    return found


def _number(rate: Any) -> Any:
    """A rate as a number, also of a text."""
    with suppress(TypeError, ValueError):
        return float(rate)
    return rate


def with_videos(fields: Mapping[str, Any], turns: Sequence[Turn]) -> list[Turn]:
    """The turns; in a row of videos alone, without marks for them, those for images stand for them (LLaVA-NeXT)."""
    if (not column_media(fields, "video") or column_media(fields, "image")
            or not all(part.kind == "image" and part.marked for turn in turns for part in turn.media)):
        return list(turns)
    return [replace(turn, parts=tuple(replace(part, kind="video") if part.marked else part for part in turn.parts))
            for turn in turns]


def column_media(fields: Mapping[str, Any], kind: str) -> list[Any]:
    """The images or videos in a row's columns (`images`, else `image`), but for nulls and empty texts."""
    for column in (fields.get(f"{kind}s"), fields.get(kind)):
        values = column if isinstance(column, list) else [column]
        if found := [value for value in values if holds_media(value, kind)]:
            return found
    return []


def frame_sources(value: Any) -> list[Any]:
    """The names or bytes of a video's frames; none if it is a clip."""
    source, _ = unwrap(value, "video")
    return [unwrap(frame, "image")[0] for frame in source] if isinstance(source, list) else []


def file_bytes(fields: Mapping[str, Any], image_root: str) -> int:
    """Total bytes of the files that the columns or the turns of a row name; missing files count as 0."""
    named = [(kind, value) for kind in MEDIA for value in column_media(fields, kind)]
    with suppress(RowError):
        named += own_media(fields)
    total = 0
    for name in [file for kind, medium in named for file in (frame_sources(medium) or [unwrap(medium, kind)[0]])]:
        if isinstance(name, str):
            with suppress(RowError, OSError, ValueError):
                total += os.path.getsize(resolve(image_root, name))
    return total


def resolve(image_root: str, name: str) -> Path:
    """The path of a file below the root, after links. RowError: it is a URL, too long, or outside."""
    name = name.removeprefix("file://")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) or _DATA.match(name):
        raise RowError(f"{_short(name)} is a URL; allowed: a file name below data.image_root")
    if len(name) > _NAME_CHARACTERS:
        raise RowError(f"{_short(name)}: File name too long")
    if not name or "\0" in name or ".." in Path(name).parts:
        raise RowError(f"{_short(name)!r} is not a relative file name; allowed: one below data.image_root, "
                       f"without '..' (data.image_root is {image_root})")
    root = Path(os.path.realpath(image_root))
    path = Path(os.path.realpath(root / name))
    if path.is_relative_to(root):
        return path
    raise RowError(f"{_short(name)} leads out of data.image_root ({image_root}){_way_out(root, root / name)}")


def _way_out(root: Path, path: Path) -> str:
    """The rest of the line on a path that leads out of the root: the link by which it does, if any; what is allowed."""
    for link in (*reversed(path.parents), path):
        if os.path.islink(link) and Path(os.path.realpath(link.parent)).is_relative_to(root):
            target = Path(os.path.realpath(link))
            if not target.is_relative_to(root):
                folder = target if target.is_dir() else target.parent
                return (f": {link} is a link to {target}; allowed: files below it, also after links: copy them there, "
                        f"or set data.image_root={folder} and name files below that")
    return "; allowed: files below it"


def _encoded_frames(
    frames: Sequence[Any], image_root: str, max_file_bytes: int, members: Mapping[str, bytes] | None
) -> Iterator[bytes]:
    """The encoded frames of a video, which together have at most `max_file_bytes`."""
    total = 0
    for number, frame in enumerate(frames, 1):
        with about(RowError, f"frame {number}"):
            encoded = _encoded(unwrap(frame, "image")[0], image_root, max_file_bytes, members)
        total += len(encoded)
        _check_size("the video", total, max_file_bytes)
        yield encoded


def _encoded(value: Any, image_root: str, max_file_bytes: int, members: Mapping[str, bytes] | None) -> bytes:
    if isinstance(value, str) and _DATA.match(value):
        value = _from_data_uri(value)
    if members is not None and isinstance(value, str):
        if value not in members:
            raise RowError(f"{_short(value)} is no member of the sample; it has "
                           f"{', '.join(sorted(members)[:6]) or 'none'}")
        value = members[value]
    if isinstance(value, bytes):
        _check_size("it", len(value), max_file_bytes)
        return value
    if not isinstance(value, str):
        raise RowError(f"got {type(value).__name__}; allowed: a file name or encoded bytes")
    try:
        path = resolve(image_root, value)
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise RowError(f"{_short(value)} is not a file")
        _check_size(value, status.st_size, max_file_bytes)
        return path.read_bytes()
    except FileNotFoundError:
        raise RowError(f"{_short(value)}: no such file below data.image_root ({image_root})") from None
    except OSError as error:
        raise RowError(f"{_short(value)}: {error.strerror}") from None
    except UnicodeEncodeError:
        raise RowError(f"{_short(value)!r} is not a file name") from None


def _from_data_uri(text: str) -> bytes:
    head = _DATA_URI.match(text)
    try:
        if head is None:
            raise ValueError
        return base64.b64decode("".join(text[head.end():].split()), validate=True)
    except (ValueError, binascii.Error):
        raise RowError(f"{text[:40]!r} is not a data URI; allowed: data:image/png;base64,... or a file name") from None


def _check_size(name: str, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise RowError(f"{_short(name)} has {num_bytes / 2**20:.1f} MB; allowed: at most {limit / 2**20:g} "
                       "(data.max_file_mb)")


def _short(name: str) -> str:
    """A name for a line, without credentials; it may be a whole picture."""
    shown = masked(name[:_NAME_CHARACTERS])
    return shown if len(shown) <= 120 else f"{shown[:80]}... ({len(name)} characters)"


def pack_frames(frames: Sequence[bytes], frames_per_second: Any) -> bytes:
    """The bytes of a video of encoded frames: rate and lengths, then the frames. RowError: no frame or no rate."""
    rate = frames_per_second
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= sys.float_info.max:
        raise RowError(f"fps is {repr(rate)[:40]}; allowed: a number of frames a second, above 0")
    if not frames:
        raise RowError("a video of no frames; allowed: at least one")
    lengths = struct.pack(f"<{len(frames)}Q", *map(len, frames))
    return b"".join([FRAMES_MAGIC, _FRAMES_HEADER.pack(rate, len(frames)), lengths, *frames])


def unpack_frames(data: bytes) -> tuple[list[bytes], float]:
    """The frames of a packed video, and how many come a second. RowError: the bytes are cut short."""
    begin = len(FRAMES_MAGIC) + _FRAMES_HEADER.size
    try:
        rate, count = _FRAMES_HEADER.unpack_from(data, len(FRAMES_MAGIC))
        stops = [*accumulate(struct.unpack_from(f"<{count}Q", data, begin), initial=begin + 8 * count)]
    except struct.error:
        raise RowError("the header of a video of files is cut short") from None
    if stops[-1] != len(data):
        raise RowError(f"a video of files has {len(data)} bytes; allowed: {stops[-1]}, as its header says")
    return [data[start:stop] for start, stop in pairwise(stops)], rate
