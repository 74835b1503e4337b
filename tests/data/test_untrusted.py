"""Whatever the bytes: a row is used, or it is left out with one line. Nothing is raised, nothing hangs."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from transformers.image_utils import load_image

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.images import FORMATS, decode, image_size
from dhp_ray.data.index import index_fragments
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.reader import ReadFragments, read_payloads
from dhp_ray.data.video import decode_video, read_clip
from dhp_ray.schema import Data
from tests.data.samples import picture, processor, read_all, talk, video, write_rows

PROCESSOR = processor()
SEEDS = [picture(60, 40), picture(60, 40, "JPEG"), picture(60, 40, "WEBP"), picture(60, 40, "GIF"),
         picture(60, 40, "TIFF"), picture(60, 40, "BMP"),
         *([picture(60, 40, "AVIF")] if "AVIF" in FORMATS else [])]
FILMS = [video(6, 56, 56), video(6, 56, 56, form="matroska"), video(6, 56, 56, form="avi")]
SLOW = settings(max_examples=60, deadline=None,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def records(path: Path, root: Path) -> list[dict[str, Any]]:
    return records_of(Data(format="llava", path=str(path)), root)


def records_of(data: Data, root: Path) -> list[dict[str, Any]]:
    block = read_all(ReadFragments(ProcessorSpec("tiny"), str(root), 0), index_fragments(data))
    return read_payloads(block, list(range(block.num_rows)))


def assert_one_line(error: Exception, named: str = "") -> None:
    assert str(error)
    assert "\n" not in str(error)
    assert named in str(error)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.sampled_from(
    ["<image>", "<video>", "user", "assistant", "human", "gpt", "text", "image", "image_url", "a.png", "../a.png",
     "data:image/png;base64,AAAA", "<|im_end|>"])
KEYS = st.sampled_from(["id", "conversations", "messages", "from", "value", "role", "content", "type", "text", "image",
                        "images", "image_url", "url", "video",
                        "videos", "path", "bytes"]) | st.text(max_size=3)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
                    max_leaves=12)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "function_call"])
TURNS = st.lists(st.fixed_dictionaries({"role": ROLES, "content": JSON})
                 | st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "robot"]), "value": JSON}) | JSON,
                 max_size=4)
COLUMNS = {"id": JSON, "messages": TURNS | JSON, "conversations": TURNS | JSON, "image": JSON, "images": JSON,
           "video": JSON}
ROWS = st.lists(st.fixed_dictionaries({}, optional=COLUMNS), min_size=1, max_size=4)


@SLOW
@given(rows=ROWS)
def test_any_conversation_is_used_or_named(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(SEEDS[0])
    good = {"id": "good", "conversations": talk("a", "b")}
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [good, *rows]))
    found = records(tmp_path / "rows.jsonl", tmp_path)
    assert len({record["id"] for record in found}) == len(found) == len(rows) + 1
    for record in found:
        assert record["id"]
        assert "\n" not in record["error"] + record["id"]
        assert "Traceback" not in record["error"]
        assert bool(record["error"]) != bool(len(record["input_ids"]))
    assert not next(record for record in found if record["id"] == "good")["error"]


@SLOW
@given(content=st.binary(max_size=200), start=st.integers(0, 200))
def test_any_bytes_for_a_file_are_rows_or_one_line(content: bytes, start: int, tmp_path: Path) -> None:
    text = json.dumps([{"conversations": talk("a", "b"), "id": "x"}] * 2).encode()
    (tmp_path / "rows.json").write_bytes(text[:start] + content + text[start + len(content):])
    try:
        found = records(tmp_path / "rows.json", tmp_path)
    except DataError as error:
        assert_one_line(error, "rows.json")
    else:
        assert all(record["id"] and "\n" not in record["error"] for record in found)


@st.composite
def damaged(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A real file with bytes changed, cut or put in."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data) - 1) | st.integers(0, min(120, len(data) - 1)))
        part = draw(st.binary(max_size=8))
        data[place : place + draw(st.sampled_from([len(part), 0, 200]))] = part
        data = data or bytearray(b"x")
    return bytes(data)


def stored_rows(form: str) -> bytes:
    """Three good rows, as a file of a format."""
    rows = [{"id": f"row-{number}", "image": SEEDS[number], "conversations": talk("<image>?", "a")}
            for number in range(3)]
    stream = io.BytesIO()
    if form == "webdataset":
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for row in rows:
                for name, content in (("json", json.dumps({"conversations": row["conversations"]}).encode()),
                                      ("png", row["image"])):
                    member = tarfile.TarInfo(f"{row['id']}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), stream, row_group_size=2)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return stream.getvalue()


@pytest.mark.parametrize("form", ["webdataset", "parquet", "huggingface"])
@settings(SLOW, max_examples=40)
@given(data=st.data())
def test_any_bytes_for_a_stored_set_are_rows_or_one_line(form: str, data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / {"webdataset": "a.tar", "parquet": "a.parquet", "huggingface": "a.arrow"}[form]
    path.write_bytes(data.draw(damaged([stored_rows(form)])))
    try:
        found = records_of(Data(format=form, path=str(path)), tmp_path)
    except DataError as error:
        assert_one_line(error, path.name)
    else:
        assert all(record["id"] and "\n" not in record["id"] + record["error"] for record in found)


@settings(SLOW, max_examples=30)
@given(damaged(SEEDS) | st.binary(max_size=300))
def test_any_image_bytes_are_patches_of_the_planned_grid_or_an_error(data: bytes) -> None:
    try:
        size = image_size(data, 10**5)
        grid = PROCESSOR.family.grid(size)
    except RowError as error:
        assert_one_line(error)
        return
    try:
        patches = decode(data, PROCESSOR.family)
    except Exception:  # what a worker reports as the sample's reason
        return
    # A picture whose metadata is read otherwise with its pixels has another grid: the worker compares, and it becomes a
    # placeholder.
    assert patches.shape[1] == PROCESSOR.family.patch_dim
    assert sorted((grid[1], grid[2])) == sorted((grid[1], len(patches) // grid[1]))


@SLOW
@given(damaged(FILMS) | st.binary(max_size=300))
def test_any_video_bytes_are_the_planned_patches_or_one_line(data: bytes) -> None:
    try:
        clip = read_clip(data, MediaLimits(max_decoded_pixels=10**5, max_video_seconds=60))
        grid = PROCESSOR.encode_turns(read_turns(talk("<video>", "a")), [clip], slice_tokens=10**6).grids[0]
    except RowError as error:
        assert_one_line(error)
        return
    assert clip.width * clip.height <= 10**5
    assert clip.num_frames <= 60 * 240
    try:
        patches = decode_video(data, PROCESSOR.family, [range(grid[0])], grid[0])
    except (ValueError, av.FFmpegError):  # what a worker reports as the sample's reason
        return
    assert patches[0].shape == (np.prod(grid), PROCESSOR.family.patch_dim)


AVIF = ["AVIF"] if "AVIF" in FORMATS else []
FORMS = {"RGB": ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "PPM", "GIF", *AVIF], "RGBA": ["PNG", "WEBP", "TIFF", *AVIF],
         "L": ["PNG", "JPEG", "GIF", "PPM"], "LA": ["PNG"],
         "P": ["PNG", "GIF", "BMP"], "1": ["PNG", "BMP", "TIFF"], "CMYK": ["JPEG", "TIFF"], "I;16": ["PNG", "TIFF"]}
SIDES = st.tuples(st.integers(1, 400), st.integers(1, 400)) | st.tuples(st.integers(1, 3), st.integers(195, 620))
# most pictures: as they are, shrunk, enlarged
COUNTING = [PROCESSOR, ProcessorSpec("tiny", "", 3136, 12544).load(), ProcessorSpec("tiny", "", 100352, 200704).load()]


@st.composite
def pictures(draw: st.DrawFn) -> bytes:
    """A picture of any mode, form and shape, with an orientation in EXIF, in XMP, in both or in neither."""
    mode = draw(st.sampled_from(sorted(FORMS)))
    form = draw(st.sampled_from(FORMS[mode]))
    width, height = draw(SIDES)
    image = Image.linear_gradient("L").resize(draw(st.sampled_from([(width, height), (height, width)])))
    image = image.convert("I;16") if mode == "I;16" else image.convert(mode)
    options: dict[str, Any] = {}
    orientation, other = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    if orientation and form in ("PNG", "JPEG", "WEBP", "TIFF", "AVIF"):
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = orientation
    if other and form in ("PNG", "JPEG", "WEBP"):
        xmp = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{other}"/></x:xmpmeta>'
        if form == "PNG":
            options["pnginfo"] = PngInfo()
            options["pnginfo"].add_itxt("XML:com.adobe.xmp", xmp)
        else:
            options["xmp"] = xmp.encode()
    if mode == "P" and form != "BMP" and draw(st.booleans()):
        options["transparency"] = 0
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pictures(), st.sampled_from(COUNTING))
def test_the_headers_token_count_is_the_real_processors(data: bytes, ours: Processor) -> None:
    with Image.open(io.BytesIO(data)) as opened:
        upright = load_image(opened)
    try:
        encoded = ours.encode(talk("<image>", "a"), [image_size(data)])
    except RowError as error:
        assert_one_line(error, "aspect ratio")
        with pytest.raises(ValueError, match="aspect ratio"):
            ours.family.image_processor(images=[upright], return_tensors="np")
        return
    expected = ours.family.image_processor(images=[upright], return_tensors="np")
    assert encoded.grids == tuple(tuple(grid) for grid in expected["image_grid_thw"].tolist())
    assert (
        encoded.vision_tokens
        == len(expected["pixel_values"]) // 4
        == int((encoded.input_ids == ours.token_ids["image"]).sum())
    )


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is large."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0" * 1000)),
              (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(body)) + kind + body
                                           + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks)


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ((9000, 9000), "9000x9000 pixels; allowed: at most 64000000 (by data.max_pixels)"),
        ((10000, 10000), "10000x10000 pixels; allowed"),
        ((60000, 60000), "header cannot be read: Image size"),
    ],
)
def test_decompression_bombs_are_refused_undecoded(
    size: tuple[int, int], reason: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "bomb.png").write_bytes(bomb(*size))
    rows = [{"id": "bomb", "image": "bomb.png", "conversations": talk("<image>", "a")},
            {"id": "good", "conversations": talk("a", "b")}]
    found = {record["id"]: record["error"] for record in records(write_rows(tmp_path / "rows.json", rows), tmp_path)}
    assert found["bomb"].startswith(f"image 1: {reason}")
    assert found["good"] == ""


def test_an_image_larger_than_a_rank_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(280, 280))
    (tmp_path / "a.mp4").write_bytes(video(8, 56, 56))
    rows = [{"id": "image", "image": "a.png", "conversations": talk("<image>", "a")},
            {"id": "video", "video": "a.mp4", "conversations": talk("<video>", "a")}]
    fragments = index_fragments(Data(format="llava", path=str(write_rows(tmp_path / "rows.json", rows))))
    block = read_all(ReadFragments(ProcessorSpec("tiny"), str(tmp_path), 0, max_image_tokens=6), fragments)
    found = {record["id"]: record for record in read_payloads(block, [0, 1])}
    assert found["image"]["error"] == "image 1 alone takes 100 tokens; a rank holds at most 6"
    assert found["video"]["error"] == ""  # cut in time, for several ranks
    assert np.array_equal(found["video"]["media"], [0, 0])
    assert found["video"]["grids"].tolist() == [[1, 4, 4], [1, 4, 4]]
