"""A video whose frames are files is the clip of these frames without loss."""

from __future__ import annotations

import base64
import io
import json
import math
import tarfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.evaluation import read_question
from dhp_ray.data.families.base import Clip
from dhp_ray.data.formats import read_rows
from dhp_ray.data.formats.rows import Row
from dhp_ray.data.index import index_fragments
from dhp_ray.data.media import FRAMES_MAGIC, MediaLimits, file_bytes, pack_frames, read_media
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.reader import ReadFragments, read_contents, read_payloads
from dhp_ray.data.video import decode_video, read_clip
from dhp_ray.schema import Data
from tests.data.samples import MAX_PIXELS, MIN_PIXELS, picture, read_all, talk
from tests.packs import PATCH_DIMS

LIMITS = MediaLimits()
PROCESSORS = {preset: ProcessorSpec(preset).load() for preset in PATCH_DIMS}


def drawings(count: int, width: int = 90, height: int = 60) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [np.kron(random.integers(0, 256, (height // 6, width // 6, 3), np.uint8), np.ones((6, 6, 1), np.uint8))
            for _ in range(count)]


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def lossless(frames: list[np.ndarray], rate: Fraction) -> bytes:
    stream = io.BytesIO()
    with av.open(stream, "w", format="matroska") as container:
        track = container.add_stream("ffv1", rate=rate)
        track.width, track.height, track.pix_fmt = frames[0].shape[1], frames[0].shape[0], "bgr0"
        for pixels in frames:
            container.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(track.encode())
    return stream.getvalue()


def learned(processor: Processor, data: bytes) -> tuple[Any, np.ndarray]:
    """What a conversation about a video becomes: its encoding and its patches."""
    encoded = processor.encode(talk("<video>\nWhat?", "This."), [read_clip(data, processor.family.limits)])
    steps = sum(grid[0] for grid in encoded.grids)
    return encoded, decode_video(data, processor.family, [range(steps)], steps)[0]


@pytest.mark.parametrize(("count", "rate"), [(1, 2), (2, 2), (7, 2), (8, 2), (24, 8), (9, 0.5), (31, 29.97)])
@pytest.mark.parametrize("preset", PROCESSORS)
def test_tokens_times_and_pixels_are_those_of_a_lossless_clip(preset: str, count: int, rate: float) -> None:
    processor, frames = PROCESSORS[preset], drawings(count)
    ours, pixels = learned(processor, pack_frames([png(frame) for frame in frames], rate))
    clips, expected = learned(processor, lossless(frames, Fraction(rate).limit_denominator(1001)))
    assert ours.input_ids.tolist() == clips.input_ids.tolist()
    assert ours.labels.tolist() == clips.labels.tolist()
    assert (ours.grids, ours.media) == (clips.grids, clips.media)
    assert ours.seconds == pytest.approx(clips.seconds, rel=1e-4)
    assert np.array_equal(pixels, expected)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, frame in enumerate(drawings(6)):
        (tmp_path / f"f{number}.png").write_bytes(png(frame))
    return tmp_path


def shown(root: Path, content: Any, **fields: Any) -> list[bytes]:
    turns = read_turns([{"role": "user", "content": content}, {"role": "assistant", "content": "a"}])
    return list(read_media(fields, turns, str(root), LIMITS).values())


def test_every_form_of_a_list_of_frames(root: Path) -> None:
    names = [f"f{number}.png" for number in range(6)]
    frames = [(root / name).read_bytes() for name in names]
    uris = ["data:image/png;base64," + base64.b64encode(frame).decode() for frame in frames]
    mappings = [[{key: name} for name in names] for key in ("path", "image", "url")]
    for form in (names, [str(root / name) for name in names], frames, uris, [{"bytes": frame} for frame in frames],
                 *mappings):
        assert shown(root, "<video>", videos=[form]) == [pack_frames(frames, 2.0)]
        assert shown(root, "<video>", video=[form]) == [pack_frames(frames, 2.0)]
        assert shown(root, "<video>", videos=[{"video": form, "fps": 4}]) == [pack_frames(frames, 4)]
        assert shown(root, "<video>", video={"type": "video", "video": form, "fps": 4}) == [pack_frames(frames, 4)]
        assert shown(root, "<video>", video={"path": form, "fps": 4}) == [pack_frames(frames, 4)]
        assert shown(root, "<video>", video={"video": form, "fps": None}) == [pack_frames(frames, 2.0)]
        assert shown(root, [{"type": "video", "video": form, "fps": 3}]) == [pack_frames(frames, 3)]
        assert shown(root, [{"type": "video", "video": form}]) == [pack_frames(frames, 2.0)]
    assert shown(root, "<video><image><video>", videos=[names[:1], names[1:]], images=names[:1]) == [
        pack_frames(frames[:1], 2.0), frames[0], pack_frames(frames[1:], 2.0)]
    for form in (names, *mappings):
        assert file_bytes({"videos": [form]}, str(root)) == sum(map(len, frames))
    assert file_bytes({"messages": [{"role": "user", "content": [{"type": "video", "video": names}]}]},
                      str(root)) == sum(map(len, frames))


def test_without_a_rate_every_frame_is_taken(root: Path) -> None:
    """Whatever `data.video_fps` is."""
    for fps in (0.5, 2.0, 7.0):
        processor = ProcessorSpec("tiny_internvl", "", MIN_PIXELS, MAX_PIXELS, MediaLimits(video_fps=fps)).load()
        row = Row("a", {"conversations": talk("<video>", "a"), "videos": [[f"f{number}.png" for number in range(6)]]})
        _, _, (clip,) = read_contents(row, processor, str(root))
        assert processor.family.frames(clip) == list(range(6))  # type: ignore[arg-type]
    question = read_question(row, processor, str(root))
    assert question.prompt.vision_tokens == question.whole.vision_tokens == 6 * 4


@pytest.mark.parametrize(("videos", "reason"), [
    ([[]], "video 1: a video of no frames; allowed: at least one"),
    ([["f0.png", "f9.png"]], r"video 1: frame 2: f9\.png: no such file below data\.image_root"),
    ([["f0.png", "../f1.png"]], "video 1: frame 2: '../f1.png' is not a relative file name"),
    ([["f0.png", "small.png"]], "video 1: frame 2 has 30x40 pixels, the first 90x60; allowed: frames of one size"),
    ([["f0.png", b"no picture"]], "video 1: frame 2: header cannot be read: not an image of a known format"),
    ([["f0.png", None]], "video 1: frame 2: got NoneType"),
    ([["f0.png", ["f1.png"]]], "video 1: frame 2: got list"),
    ([{"video": ["f0.png"], "fps": 0}], "video 1: fps is 0; allowed: a number of frames a second, above 0"),
    ([{"video": ["f0.png"], "fps": "2"}], "video 1: fps is '2'"),
    ([{"video": ["f0.png"], "fps": 10**400}], "video 1: fps is 10{39}; allowed: a number of frames a second, above 0"),
    ([{"video": ["f0.png"], "fps": math.nan}], "video 1: fps is nan"),
    ([{"video": ["f0.png"], "fps": True}], "video 1: fps is True"),
    ([{"video": ["f0.png"] * 3, "fps": 0.0005}], r"video 1: a video of 6000 s \(3 frames\); allowed: at most 3600 s"),
    ([FRAMES_MAGIC], "video 1: the header of a video of files is cut short"),
    ([pack_frames([b"x"], 2)[:-1]], "video 1: a video of files has 36 bytes; allowed: 37, as its header says"),
    ([pack_frames([b"x"], 2) + b"x"], "video 1: a video of files has 38 bytes; allowed: 37, as its header says"),
    ([pack_frames([b"x"], 2)[:-9]], "video 1: the header of a video of files is cut short"),
    ([pack_frames([b"x"], 2)[:24] + b"\xff" * 4 + bytes(32)], "video 1: the header of a video of files is cut short"),
])
def test_frames_that_cannot_be_used_are_a_bad_row(root: Path, videos: Any, reason: str) -> None:
    (root / "small.png").write_bytes(picture(30, 40))
    row = Row("a", {"conversations": talk("<video>", "a"), "videos": videos})
    with pytest.raises(RowError, match=reason) as caught:
        read_contents(row, PROCESSORS["tiny"], str(root))
    assert "\n" not in str(caught.value)


def test_all_frames_together_are_limited(root: Path) -> None:
    size = (root / "f0.png").stat().st_size
    turns = read_turns(talk("<video>", "a"))
    with pytest.raises(RowError, match=r"the video has 0\.0 MB; allowed: at most .* \(data\.max_file_mb\)"):
        read_media({"videos": [["f0.png"] * 3]}, turns, str(root), MediaLimits(max_file_bytes=2 * size))
    assert read_media({"videos": [["f0.png"] * 2]}, turns, str(root), MediaLimits(max_file_bytes=2 * size))


def test_frames_are_upright_and_on_white(tmp_path: Path) -> None:
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGBA", (60, 90), (0, 0, 0, 0)).save(stream, "PNG", exif=exif)
    data = pack_frames([stream.getvalue(), png(np.full((60, 90, 3), 255, np.uint8))], 2)
    assert read_clip(data, LIMITS) == Clip(90, 60, 2, 2.0)
    first, second = learned(PROCESSORS["tiny_internvl"], data)[1].reshape(2, -1)
    assert np.array_equal(first, second)


def stored(form: str, folder: Path, frames: list[bytes]) -> Path:
    row = {"id": "a", "conversations": talk("<video>", "a")}
    if form == "webdataset":
        names = [f"{number}.png" for number in range(len(frames))]
        members = [("a.json", json.dumps(row | {"videos": [names]}).encode()),
                   *((f"a.{name}", frame) for name, frame in zip(names, frames))]
        with tarfile.open(folder / "a.tar", "w") as archive:
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return folder / "a.tar"
    table = pa.Table.from_pylist([row | {"videos": [frames] if form == "parquet" else [{"video": frames, "fps": 2.0}]}])
    if form == "parquet":
        pq.write_table(table, folder / "a.parquet")
        return folder / "a.parquet"
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return folder / "a.arrow"


@pytest.mark.parametrize("form", ["webdataset", "parquet", "huggingface"])
def test_frames_come_with_the_rows_of_every_format(form: str, tmp_path: Path) -> None:
    frames = [png(frame) for frame in drawings(5)]
    [fragment] = index_fragments(Data(format=form, path=str(stored(form, tmp_path, frames))))
    assert not next(read_rows(fragment)).error
    block = read_all(ReadFragments(ProcessorSpec("tiny"), str(tmp_path), 0), [fragment])
    [record] = read_payloads(block, [0])
    assert (record["error"], record["images"]) == ("", [pack_frames(frames, 2.0)])
    assert record["seconds"].tolist() == [1.25]


def test_a_list_of_lists_of_images_is_no_column(tmp_path: Path) -> None:
    rows = [{"id": "a", "conversations": talk("a", "b"), "images": [[b"x"]]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column images holds list"):
        index_fragments(Data(format="parquet", path=str(tmp_path / "a.parquet")))
