"""Small real inputs that several tests of the data path share."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
from PIL import Image

from dhp_ray.data.fragments import Fragment
from dhp_ray.data.order import RowRange
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.reader import ReadFragments, make_item

MIN_PIXELS, MAX_PIXELS = 3136, 1003520


def processor() -> Processor:
    return ProcessorSpec("tiny").load()


def picture(width: int, height: int, form: str = "PNG", **options: Any) -> bytes:
    """A gradient, so that turned or cut pixels show."""
    image = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    image.paste((200, 30, 30), (0, 0, max(1, width // 3), max(1, height // 4)))
    stream = io.BytesIO()
    image.save(stream, format=form, **options)
    return stream.getvalue()


def talk(*texts: str) -> list[dict[str, str]]:
    """A conversation: the user and the assistant in turn."""
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """As JSON, or JSONL by the file's name."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) if path.suffix == ".jsonl" else "[\n" + ",\n".join(lines) + "\n]",
                    encoding="utf-8")
    return path


def video(
    num_frames: int = 20,
    width: int = 64,
    height: int = 48,
    rate: int = 10,
    form: str = "mp4",
    codec: str = "mpeg4",
    pairs: bool = False,
    **options: str,
) -> bytes:
    """A bright square that moves over a gradient; with `pairs`, every frame comes twice. `options` are the codec's."""
    stream = io.BytesIO()
    background = np.asarray(Image.linear_gradient("L").resize((width, height)).convert("RGB"))
    with av.open(stream, "w", format=form) as container:
        track = container.add_stream(codec, rate=rate, options=options)
        assert isinstance(track, av.VideoStream)
        track.width, track.height, track.pix_fmt = width, height, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number in range(num_frames):
            place = number // 2 if pairs else number
            pixels = background.copy()
            top, left = (place * 3) % (height - 8), (place * 5) % (width - 8)
            pixels[top : top + 8, left : left + 8] = (250, 40 + place * 5 % 200, 20)
            container.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(track.encode())
    return stream.getvalue()


def damaged_video(form: str = "mp4") -> bytes:
    """A video whose container reads as if all were well; its later frames are zeros."""
    data = bytearray(video(12, 56, 56, form=form))
    first, stop = (data.index(b"mdat") + 4,
                   data.index(b"moov") - 4) if form == "mp4" else (len(data) // 3, len(data) * 9 // 10)
    start = first + (stop - first) * 6 // 10
    data[start:stop] = bytes(stop - start)
    return bytes(data)


VIDEOS = [2, 9, 24]
"""Frames of the videos of random conversations."""


def random_conversation(random: np.random.Generator) -> tuple[list[dict[str, str]], list[Image.Image | bytes]]:
    """Several turns with images and videos between the words, and the images and encoded videos in their order."""
    words = ["What", "is", "that?", "<", "2.0 seconds>", "größer", "\n", " ", "and", "then", "1", "."]
    conversation: list[dict[str, str]] = []
    for number in range(2 * int(random.integers(1, 4))):
        parts = [str(random.choice(words)) for _ in range(random.integers(1, 6))]
        for _ in range(0 if number % 2 else int(random.integers(0, 3))):
            parts.insert(int(random.integers(0, len(parts) + 1)), ("<image>", "<video>")[random.integers(2)])
        conversation.append({"from": ("human", "gpt")[number % 2], "value": "".join(parts)})
    media: list[Image.Image | bytes] = []
    for mark in re.findall("<image>|<video>", "".join(turn["value"] for turn in conversation)):
        width, height = (int(side) for side in random.integers(20, 200, 2))
        media.append(video(int(random.choice(VIDEOS)), 64, 48) if mark == "<video>" else
                     Image.new("RGB", (width, height), "red"))
    return conversation, media


def read_all(read: ReadFragments, fragments: Iterable[Fragment], epoch: int = 0) -> pa.Table:
    """All blocks of fragments as one."""
    items = [make_item(epoch, [(RowRange(number, 0, fragment.num_rows), number, fragment)])
             for number, fragment in enumerate(fragments)]
    return pa.concat_tables(read(pa.Table.from_pylist(items))).combine_chunks()
