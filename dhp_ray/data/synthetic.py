"""A rendered training set: documents, charts and short clips, with questions that the pictures answer.

    document  lines of words                    "read"     the words
    chart     a title over coloured bars        "tallest"  the title and the colour of the tallest bar
    clip      a square moving over a board      "path"     the title, which runs over the frames, and the square's cells

Lengths, in tokens of the byte-level tokenizer and merged patches, follow a mixture of two lognormals (short samples and
a long tail, `data.synthetic.*`). Each sample is built to a length drawn from it: pictures take their share, and text
fills the rest to the letter. This text is drawn in the picture and repeated in the answer.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

from dhp_ray.data.conversation import IMAGE_MARK
from dhp_ray.data.errors import DataError
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.errors import first_line
from dhp_ray.schema import PreparedData
from dhp_ray.storage import replacing

CELL = 28  # pixels of a merged patch
LETTER_WIDTH, LINE_HEIGHT = 6, 14
WORDS = ("sun", "moon", "star", "tree", "leaf", "bird", "fish", "stone", "sand", "wind", "rain", "snow")
COLOURS = {"red": (214, 39, 40), "blue": (31, 119, 180), "green": (44, 160, 44), "gold": (230, 180, 30),
           "black": (30, 30, 30)}
KINDS = ("document", "chart", "clip")
BOARD = 3  # a clip's square moves over BOARD x BOARD cells
FORM = 1  # to be raised when the same parameters give other samples
METADATA = b"dhp_ray.synthetic"
SCHEMA = pa.schema([
    ("id", pa.string()), ("images", pa.list_(pa.binary())),
    ("conversations", pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())])))])


@dataclass(frozen=True)
class Pictures:
    """The pictures of a sample, to be drawn with any title, and the question and answer about them."""

    sizes: list[tuple[int, int]]
    draw: Callable[[str], list[Image.Image]]
    question: str
    answer: str  # follows the title


def parameters(data: PreparedData, seed: int) -> dict[str, Any]:
    """Everything that the samples depend on; it is stored in the file."""
    return asdict(data.synthetic) | {"seed": seed, "min_pixels": data.min_pixels, "max_pixels": data.max_pixels,
                                     "form": FORM}


def stored_parameters(path: str | Path) -> dict[str, Any] | None:
    """The parameters of a file of `write`; None: another program made it. DataError: it is not parquet."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data.path: {path} is not parquet: {first_line(error)}") from None
    return json.loads(metadata[METADATA]) if METADATA in metadata else None


def write(path: str | Path, data: PreparedData, seed: int, progress: Callable[[int], None] = lambda _: None) -> None:
    """Write all samples as parquet, atomically; `progress` is called with the number that is done."""
    processor = ProcessorSpec("tiny", "", data.min_pixels, data.max_pixels).load()
    schema = SCHEMA.with_metadata({METADATA: json.dumps(parameters(data, seed)).encode()})
    # pictures are compressed already
    with replacing(Path(path)) as unfinished, pq.ParquetWriter(unfinished, schema, compression="none") as writer:
        for first in range(0, data.synthetic.num_samples, data.synthetic.rows_per_group):
            stop = min(first + data.synthetic.rows_per_group, data.synthetic.num_samples)
            rows = []
            for index in range(first, stop):
                rows.append(sample(index, data, seed, processor))
                progress(index + 1)
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def sample(index: int, data: PreparedData, seed: int, processor: Processor) -> dict[str, Any]:
    """Row `index` of the set: id, encoded images and a conversation. It depends only on the arguments."""
    random = np.random.default_rng([seed, index])
    num_tokens = target_tokens(random, data)
    kind = KINDS[random.integers(len(KINDS))]
    pictures = {"document": _document, "chart": _chart, "clip": _clip}[kind](random, num_tokens)
    shortest = len(processor.encode(_conversation(pictures, "."), pictures.sizes).input_ids) - 1
    title = _words(random, max(3, num_tokens - shortest))
    drawn = pictures.draw(title)
    return {"id": f"{kind}-{index:06d}", "images": [_encode(image) for image in drawn],
            "conversations": _conversation(pictures, title)}


def target_tokens(random: np.random.Generator, data: PreparedData) -> int:
    shape = data.synthetic
    is_long = random.random() < shape.long_fraction
    median, sigma = (shape.long_median_tokens,
                     shape.long_sigma) if is_long else (shape.short_median_tokens, shape.short_sigma)
    return min(shape.max_tokens, round(math.exp(random.normal(math.log(median), sigma))))


def _document(random: np.random.Generator, num_tokens: int) -> Pictures:
    columns = 4 if num_tokens < 200 else 8
    letters = columns * CELL // LETTER_WIDTH
    # A merged patch is two lines high: a row of them costs `columns` tokens and holds twice `letters` letters.
    rows = max(1, math.ceil((num_tokens - 68) / (columns + 2 * letters)))
    size = (columns * CELL, rows * CELL)
    return Pictures([size], lambda title: [_written(Image.new("RGB", size, "white"), title)], "read", "")


def _chart(random: np.random.Generator, num_tokens: int) -> Pictures:
    area = 0.6 * (num_tokens - 75)  # in merged patches, as are height and width
    height = max(2, int(math.sqrt(max(0.0, area) * 0.7)))
    width = max(2, int(area // height))
    names = [str(name) for name in random.permutation(list(COLOURS))]
    values = random.permutation(np.arange(2, 2 + len(names)))
    size = (width * CELL, height * CELL)

    def draw(title: str) -> list[Image.Image]:
        image = Image.new("RGB", size, "white")
        canvas, step = ImageDraw.Draw(image), size[0] // len(names)
        for place, (name, value) in enumerate(zip(names, values)):
            top = size[1] - int(size[1] * 0.7 * value / (1 + len(names)))
            canvas.rectangle([place * step + 1, top, (place + 1) * step - 1, size[1]], fill=COLOURS[name])
        return [_written(image, title)]

    return Pictures([size], draw, "tallest", f": {names[int(np.argmax(values))]}")


def _clip(random: np.random.Generator, num_tokens: int) -> Pictures:
    num_frames = min(16, max(2, num_tokens // 60))
    side = max(2, int(math.sqrt(max(0.0, 0.7 * (num_tokens - 75) / num_frames - 5))))
    size = (side * CELL, side * CELL)
    column, row = (int(place) for place in random.integers(BOARD, size=2))
    across, down = ((1, 0), (0, 1), (1, 1), (2, 1))[random.integers(4)]
    cells = [((column + across * frame) % BOARD, (row + down * frame) % BOARD) for frame in range(num_frames)]
    colour = COLOURS[str(random.choice(list(COLOURS)))]

    def draw(title: str) -> list[Image.Image]:
        frames = []
        letters = (size[0] // LETTER_WIDTH) * (size[1] // LINE_HEIGHT)
        for frame, (x, y) in enumerate(cells):
            image = Image.new("RGB", size, "white")
            step = size[0] / BOARD
            ImageDraw.Draw(image).rectangle([x * step, y * step, (x + 1) * step - 1, (y + 1) * step - 1], fill=colour)
            frames.append(_written(image, title[frame * letters : (frame + 1) * letters]))
        return frames

    return Pictures([size] * num_frames, draw, "path", ": " + " ".join(f"{'abc'[x]}{y + 1}" for x, y in cells))


def _written(image: Image.Image, text: str) -> Image.Image:
    """The picture with lines of text written on it, from the top."""
    letters = image.width // LETTER_WIDTH
    lines = [text[start : start + letters] for start in range(0, len(text), letters)]
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default_imagefont()
    for number, line in enumerate(lines):
        canvas.text((0, number * LINE_HEIGHT), line, fill=(90, 90, 90), font=font)
    return image


def _words(random: np.random.Generator, length: int) -> str:
    words = random.choice(WORDS, size=length // 4 + 1)
    text = " ".join(words)
    return text[: length - 1] + "." if len(text) >= length else text.ljust(length, ".")


def _conversation(pictures: Pictures, title: str) -> list[dict[str, str]]:
    marks = IMAGE_MARK * len(pictures.sizes)
    return [{"from": "human", "value": f"{marks}{pictures.question}"},
            {"from": "gpt", "value": f"{title}{pictures.answer}"}]


def _encode(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG", compress_level=3)
    return stream.getvalue()
