"""Videos whose frames are files: the encoded frames one after the other, behind a header that says how many a second.
They are used as a clip of these frames without loss.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from dhp_ray.data.errors import RowError

MAGIC = b"dhp_ray frames 1"
_HEADER = struct.Struct("<dI")


def packed(frames: Sequence[bytes], frames_per_second: Any) -> bytes:
    """The bytes of a video from those of its frames.

    Raises:
        RowError: there is no frame, or the rate is none.
    """
    rate = frames_per_second
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= sys.float_info.max:
        raise RowError(f"fps is {repr(rate)[:40]}; allowed: a number of frames a second, above 0")
    if not frames:
        raise RowError("a video of no frames; allowed: at least one")
    lengths = struct.pack(f"<{len(frames)}Q", *map(len, frames))
    return b"".join([MAGIC, _HEADER.pack(rate, len(frames)), lengths, *frames])


def unpacked(data: bytes) -> tuple[list[bytes], float]:
    """The frames of a packed video, and how many come a second.

    Raises:
        RowError: the bytes are cut short.
    """
    begin = len(MAGIC) + _HEADER.size
    try:
        rate, count = _HEADER.unpack_from(data, len(MAGIC))
        stops = [*accumulate(struct.unpack_from(f"<{count}Q", data, begin), initial=begin + 8 * count)]
    except struct.error:
        raise RowError("the header of a video of files is cut short") from None
    if stops[-1] != len(data):
        raise RowError(f"a video of files has {len(data)} bytes; allowed: {stops[-1]}, as its header says")
    return [data[start:stop] for start, stop in pairwise(stops)], rate
