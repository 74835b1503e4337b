"""Frames that are decoded from a key frame on are those that are decoded from the start."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest

from dhp_ray.data.errors import RowError
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.video import opened_video, read_clip
from tests.data.samples import video

LIMITS = MediaLimits()
NUM_FRAMES = 60
WANTED = ([0], [59], [11], [12], [13, 14], [31, 37, 43], [46, 47, 48, 49], list(range(0, 60, 7)))
BFRAMES = {"bf": "3", "g": "12"}
FORMS = [
    ("mp4", "libx264", BFRAMES), ("mp4", "libx264", {"bf": "0", "g": "10"}), ("mov", "libx264", BFRAMES),
    ("matroska", "libx264", BFRAMES), ("mp4", "libx264", {**BFRAMES, "x264-params": "open-gop=1:scenecut=0"}),
    ("matroska", "libx264", {**BFRAMES, "x264-params": "open-gop=1:scenecut=0"}),
    ("mp4", "libx265", {"x265-params": "keyint=12:min-keyint=12:bframes=3:open-gop=1:log-level=none"}),
    ("matroska", "libx265", {"x265-params": "keyint=12:bframes=3:open-gop=0:log-level=none"}),
    ("mp4", "mpeg4", {"bf": "2", "g": "12"}), ("matroska", "mpeg2video", {"bf": "2", "g": "12"}),
    ("mp4", "mpeg2video", {"bf": "2", "g": "12"}), ("mov", "mjpeg", {}),
    ("webm", "libvpx-vp9", {"g": "12", "lag-in-frames": "16", "auto-alt-ref": "1"}), ("webm", "libvpx", {"g": "12"}),
]
"""Containers that say when a frame is shown, and codecs with key frames, most with frames stored out of their order.
None is made by libsvtav1: as root it makes the whole process a real-time one, which starves all others."""


def made(form: str, codec: str, options: dict[str, str], num_frames: int = NUM_FRAMES) -> bytes:
    if codec not in av.codecs_available:
        pytest.skip(f"this build of PyAV has no {codec}")
    return video(num_frames, form=form, codec=codec, **options)


def from_the_start(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def decoded(data: bytes, wanted: list[int]) -> tuple[dict[int, np.ndarray], int]:
    with opened_video(data, LIMITS) as decoder:
        return dict(decoder.frames(wanted)), decoder.num_decoded  # type: ignore[union-attr]


def assert_equal(found: dict[int, np.ndarray], frames: list[np.ndarray], wanted: list[int]) -> None:
    assert sorted(found) == wanted
    for number in wanted:
        assert np.array_equal(found[number], frames[number]), number


@pytest.mark.parametrize(("form", "codec", "options"), FORMS)
def test_frames_are_those_decoded_from_the_start(form: str, codec: str, options: dict[str, str]) -> None:
    data = made(form, codec, options)
    frames = from_the_start(data)
    assert len(frames) == read_clip(data, LIMITS).num_frames == NUM_FRAMES
    counts = []
    for wanted in WANTED:
        found, num_decoded = decoded(data, wanted)
        assert_equal(found, frames, wanted)
        counts.append(num_decoded)
    assert counts[0] == 1
    assert counts[1] <= 16, "the last frame lies in the last of five groups of twelve"


@pytest.mark.parametrize(("form", "codec", "options"), [
    ("avi", "mpeg4", {"bf": "2", "g": "12"}), ("avi", "libx264", BFRAMES),
    ("matroska", "libx264", {"x264-params": "intra-refresh=1:keyint=20:bframes=0"}),
    ("mp4", "libx264", {"x264-params": "intra-refresh=1:keyint=20:bframes=0"})])
def test_what_no_key_frame_begins_is_decoded_from_the_start(form: str, codec: str, options: dict[str, str]) -> None:
    """AVI stores no time of a frame; with intra refresh, what is marked as a key frame is whole some frames later."""
    data = made(form, codec, options)
    frames = from_the_start(data)
    for wanted in WANTED:
        assert_equal(decoded(data, wanted)[0], frames, wanted)


def test_far_fewer_frames_are_decoded_for_a_piece_at_the_end() -> None:
    data = made("mp4", "libx264", BFRAMES, 600)
    found, num_decoded = decoded(data, [595, 596, 599])
    assert_equal(found, from_the_start(data), [595, 596, 599])
    assert num_decoded <= 16


def test_damage_behind_a_key_frame_is_told_and_damage_before_it_does_not_matter() -> None:
    data = bytearray(made("matroska", "mpeg4", {"g": "10"}))
    whole = from_the_start(bytes(data))
    with av.open(io.BytesIO(bytes(data))) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    place = data.index(packets[15])
    data[place + 8:place + len(packets[15])] = bytes(len(packets[15]) - 8)
    found, _ = decoded(bytes(data), [25, 26])
    assert_equal(found, whole, [25, 26])
    with pytest.raises(ValueError, match=r"frame 1\d of the video is damaged|not decode after frame 1\d"):
        decoded(bytes(data), [12, 15, 16])


def encoded(
    times_ms: list[int], form: str = "mp4", codec: str = "libx264", turned: dict[str, Any] | None = None, **options: str
) -> bytes:
    """Frames that are shown at these times, each brighter than the one before; their upper left corner is white."""
    if codec not in av.codecs_available:
        pytest.skip(f"this build of PyAV has no {codec}")
    stream = io.BytesIO()
    with av.open(stream, "w", format=form) as container:
        track = container.add_stream(codec, rate=30, options=options)
        assert isinstance(track, av.VideoStream)
        track.width, track.height, track.pix_fmt = 64, 48, "yuv420p"
        track.time_base = track.codec_context.time_base = Fraction(1, 1000)
        if turned:
            track.set_display_rotation(**turned)
        for number, time_ms in enumerate(times_ms):
            pixels = np.full((48, 64, 3), number * 8, np.uint8)
            pixels[:12, :20] = 255
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time_ms, Fraction(1, 1000)
            container.mux(track.encode(frame))
        container.mux(track.encode())
    return stream.getvalue()


CONTAINERS = [("mp4", "libx264"), ("mov", "mpeg4"), ("matroska", "libx264"), ("webm", "libvpx-vp9")]
SLOWING = [*range(0, 1200, 120), *range(1200, 13_200, 1000)]  # 8 frames a second, then one


@pytest.mark.parametrize(("form", "codec"), CONTAINERS)
def test_a_clip_of_variable_rate_has_its_true_times(form: str, codec: str) -> None:
    clip = read_clip(encoded(SLOWING, form, codec), LIMITS)
    assert clip.times == pytest.approx([time / 1000 for time in SLOWING])
    assert clip.frames_per_second == pytest.approx(21 / 12.2)
    with opened_video(encoded(SLOWING, form, codec), LIMITS) as decoder:
        assert decoder.clip == clip
    # 22 frames in 12.8 s: at 2 a second all are taken
    qwen2_5, qwen3 = (ProcessorSpec(preset).load().family for preset in ("tiny", "tiny_qwen3_vl"))
    taken = qwen3.frames(clip)
    stamps = [(SLOWING[first] + SLOWING[last]) / 2000 for first, last in zip(taken[::2], taken[1::2])]
    assert qwen3.video_text(clip) == "".join(
        f"<{stamp:.1f} seconds><|vision_start|><|video_pad|><|vision_end|>" for stamp in stamps)
    count = qwen2_5.num_frames(clip)
    assert qwen2_5.written(clip).seconds * count / 2 == pytest.approx(22 / 21 * 12.2)


@pytest.mark.parametrize(("form", "codec"), CONTAINERS)
def test_rounded_times_are_evenly_spaced(form: str, codec: str) -> None:
    """Of 30 frames a second, in whole milliseconds, beginning later than 0."""
    clip = read_clip(encoded([500 + round(number * 1000 / 30) for number in range(31)], form, codec), LIMITS)
    assert clip.times == ()
    assert clip.frames_per_second == pytest.approx(30, abs=0.02)


def test_a_clip_whose_true_times_are_long_is_refused() -> None:
    data = encoded([0, 100, 200, 300, 5_000_000], "matroska")
    with pytest.raises(RowError, match=r"a video of 6250 s \(5 frames\); allowed: at most 3600 s"):
        read_clip(data, LIMITS)


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize(("form", "codec"), CONTAINERS)
def test_frames_are_upright_by_the_display_matrix(form: str, codec: str, degrees: int, flipped: bool) -> None:
    times = list(range(0, 2000, 100))
    as_stored = from_the_start(encoded(times, form, codec, g="5"))
    upright = [np.rot90(frame, degrees // 90) for frame in as_stored]
    upright = [frame[:, ::-1] for frame in upright] if flipped else upright
    data = encoded(times, form, codec, {"degrees": degrees, "hflip": flipped}, g="5")
    clip = read_clip(data, LIMITS)
    assert (clip.height, clip.width) == upright[0].shape[:2]
    for wanted in ([0], [0, 7, 19], [18]):
        assert_equal(decoded(data, wanted)[0], upright, wanted)


def test_a_display_matrix_of_no_right_angle_turns_nothing() -> None:
    data = encoded([0, 100, 200], turned={"degrees": 45})
    assert_equal(decoded(data, [0, 2])[0], from_the_start(data), [0, 2])


def test_no_frame_is_decoded_of_a_video_that_is_not_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    datas = [encoded([0, 100, 200], form, codec) for form, codec in CONTAINERS]
    opened = []
    opening = av.open
    monkeypatch.setattr("av.open", lambda *given, **options: opened.append(given) or opening(*given, **options))
    for data in datas:
        read_clip(data, LIMITS)
    assert len(opened) == len(datas)
