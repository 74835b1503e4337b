"""Frames that are decoded from a key frame on are those that are decoded from the start."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from dhp_ray.data.media import MediaLimits
from dhp_ray.data.video_decoder import VideoDecoder, clip_of
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
    with VideoDecoder(data, LIMITS) as decoder:
        return dict(decoder.frames(wanted)), decoder.num_decoded


def assert_equal(found: dict[int, np.ndarray], frames: list[np.ndarray], wanted: list[int]) -> None:
    assert sorted(found) == wanted
    for number in wanted:
        assert np.array_equal(found[number], frames[number]), number


@pytest.mark.parametrize(("form", "codec", "options"), FORMS)
def test_frames_are_those_decoded_from_the_start(form: str, codec: str, options: dict[str, str]) -> None:
    data = made(form, codec, options)
    frames = from_the_start(data)
    assert len(frames) == clip_of(data, LIMITS).num_frames == NUM_FRAMES
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
