from __future__ import annotations

import io
import math
from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.errors import RowError
from dhp_ray.data.families.base import Clip
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.video import decode_video, read_clip
from tests.data.samples import damaged_video, processor, talk, video

PROCESSOR = processor()
FAMILY = PROCESSOR.family
LIMITS = MediaLimits()


def frames_of(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def decoded(data: bytes) -> np.ndarray:
    steps = math.ceil(PROCESSOR.family.num_frames(read_clip(data, LIMITS)) / 2)
    return decode_video(data, PROCESSOR.family, [range(steps)], steps)[0]


@pytest.mark.parametrize(("form", "codec"), [("mp4", "mpeg4"), ("mp4", "libx264"), ("mov", "mpeg4"),
                                             ("matroska", "libx264"), ("webm", "libvpx-vp9"),
                                             ("avi", "mpeg4")])
def test_the_container_tells_what_decodes(form: str, codec: str) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"this build of PyAV has no {codec}")
    data = video(form=form, codec=codec)
    clip = read_clip(data, LIMITS)
    assert clip == Clip(64, 48, 20, 10.0)
    assert len(frames_of(data)) == clip.num_frames
    encoded = PROCESSOR.encode(talk("<video>What?", "A square."), [clip])
    assert encoded.grids == ((2, 4, 4),)
    assert encoded.seconds == (1.0,)
    assert decoded(data).shape == (2 * 4 * 4, PROCESSOR.family.patch_dim)


def reference_indices(num_frames: int, rate: float, fps: float, max_frames: int) -> list[int]:
    """`Qwen2VLVideoProcessor.sample_frames` of transformers 5.23, whose module needs torchvision to import."""
    most = math.floor(min(max_frames, num_frames) / 2) * 2
    wanted = math.floor(min(max(num_frames / rate * fps, 4), most, num_frames) / 2) * 2
    # It forgets that rounding can name one frame more than there are (99 frames at 1 a second, fps 1).
    return torch.arange(0, num_frames, num_frames / wanted).int().clamp(max=num_frames - 1).tolist()


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 200_000), st.floats(0.5, 240), st.sampled_from([0.5, 1.0, 2.0, 3.7, 30.0]),
       st.sampled_from([4, 5, 64, 768]))
def test_frames_are_taken_as_transformers_does(num_frames: int, rate: float, fps: float, max_frames: int) -> None:
    limits = MediaLimits(video_fps=fps, max_frames=max_frames)
    clip = Clip(28, 28, num_frames, rate)
    family = replace(FAMILY, limits=limits)
    taken = family.frames(clip)
    assert taken == reference_indices(num_frames, rate, fps, max_frames)
    assert len(taken) == family.num_frames(clip)


def test_a_video_of_one_frame_repeats_it() -> None:
    data = video(1, 56, 56)
    patches = decoded(data).reshape(16, 3, 2, 14, 14)
    assert PROCESSOR.encode(talk("<video>", "a"), [read_clip(data, LIMITS)]).grids == ((1, 4, 4),)
    assert np.array_equal(patches[:, :, 0], patches[:, :, 1])


def test_patches_equal_the_video_processors() -> None:
    pytest.importorskip("torchvision", reason="Qwen2VLVideoProcessor needs torchvision, which does not import here",
                        exc_type=Exception)
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    for size in ((56, 84), (90, 70), (640, 480)):
        data = video(23, *size)
        clip, frames = read_clip(data, LIMITS), np.stack(frames_of(data))
        theirs = Qwen2VLVideoProcessor(size={"shortest_edge": PROCESSOR.family.min_video_pixels,
                                             "longest_edge": PROCESSOR.family.max_pixels}, cap_pixels_per_frame=False)
        expected = theirs([torch.from_numpy(frames).permute(0, 3, 1, 2)], do_sample_frames=True, fps=LIMITS.video_fps,
                          return_tensors="np",
                          video_metadata=[VideoMetadata(total_num_frames=clip.num_frames, fps=clip.frames_per_second)])
        encoded = PROCESSOR.encode(talk("<video>", "a"), [clip])
        assert [list(grid) for grid in encoded.grids] == expected["video_grid_thw"].tolist()
        np.testing.assert_allclose(decoded(data), expected["pixel_values_videos"], atol=1e-6)


def test_pairs_of_equal_frames_are_the_image_processors_patches() -> None:
    data = video(8, 84, 56, rate=2, pairs=True, codec="mpeg4")
    clip = read_clip(data, LIMITS)
    assert FAMILY.frames(clip) == list(range(8))
    frames = frames_of(data)
    patches = decoded(data).reshape(4, 24, 3, 2, 14, 14)
    for step in range(4):
        for half in range(2):
            frame = Image.fromarray(frames[2 * step + half])
            image = PROCESSOR.family.image_processor(images=[frame], return_tensors="np")["pixel_values"]
            np.testing.assert_allclose(patches[step, :, :, half], image.reshape(24, 3, 2, 14, 14)[:, :, 0], atol=1e-5)


def test_a_resized_frame_is_the_image_processors_within_rounding() -> None:
    """Two bicubic filters, Pillow's and the one that torchvision calls, which round their sums apart in places."""
    data = video(4, 90, 70)
    [frame, *_] = frames_of(data)
    image = FAMILY.image_processor(images=[Image.fromarray(frame)], return_tensors="np")["pixel_values"]
    patches = decoded(data).reshape(2, -1, 3, 2, 14, 14)[0, :, :, 0]
    differences = np.abs(patches - image.reshape(-1, 3, 2, 14, 14)[:, :, 0]) * 255 * 0.27
    assert differences.max() < 4
    assert differences.mean() < 0.05


def test_a_long_video_is_cut_in_time() -> None:
    data = video(40, 56, 56, rate=4)
    clip = read_clip(data, LIMITS)
    turns = read_turns(talk("<video>and<image>", "a"))
    whole = PROCESSOR.encode_turns(turns, [clip, (56, 56)])
    cut = PROCESSOR.encode_turns(turns, [clip, (56, 56)], slice_tokens=12)
    assert whole.grids == ((10, 4, 4), (1, 4, 4))
    assert cut.grids == ((3, 4, 4), (3, 4, 4), (3, 4, 4), (1, 4, 4), (1, 4, 4))
    assert (cut.media, cut.seconds) == ((0, 0, 0, 0, 1), (1.0, 1.0, 1.0, 1.0, 0.0))
    assert np.array_equal(whole.input_ids, cut.input_ids)
    assert (whole.vision_tokens, cut.vision_tokens) == (44, 44)
    pieces = decode_video(data, PROCESSOR.family, [range(0, 3), range(3, 6), range(6, 9), range(9, 10)], 10)
    assert np.array_equal(np.concatenate(pieces), decoded(data))
    assert np.array_equal(decode_video(data, PROCESSOR.family, [range(6, 9)], 10)[0], pieces[2])


def test_ids_and_labels_of_a_video() -> None:
    encoded = PROCESSOR.encode(talk("<video>Where?", "left", "<image>Here?", "no"), [Clip(56, 84, 10, 5.0), (56, 56)])
    ids = encoded.input_ids.tolist()
    assert (ids.count(PROCESSOR.token_ids["video"]), ids.count(PROCESSOR.token_ids["image"])) == (2 * 6, 4)
    assert encoded.text_tokens == len(ids) - 16
    assert PROCESSOR.tokenizer.decode(encoded.labels[encoded.labels != -100]) == "left<|im_end|>no<|im_end|>"
    with pytest.raises(RowError, match="or in another order"):
        PROCESSOR.encode(talk("<image><video>", "a"), [Clip(56, 84, 10, 5.0), (56, 56)])


@pytest.mark.parametrize(("data", "limits", "reason"), [
    (b"", LIMITS, "not a video of a known format; allowed: MP4 or MOV, WebM or Matroska, AVI"),
    (b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:10.0,\nfile:///etc/hostname\n", LIMITS,
     "not a video of a known format"),
    (b"ffconcat version 1.0\nfile /etc/hostname\n", LIMITS, "not a video of a known format"),
    (b"\x00\x00\x00\x18ftypmp42" + b"\0" * 200, LIMITS, "not a video that can be read|no video stream"),
    (b"\x1a\x45\xdf\xa3 nothing", LIMITS, "not a video that can be read|no video stream"),
    (video(), MediaLimits(max_decoded_pixels=64 * 48 - 1),
     r"frames of 64x48 pixels; allowed: at most 3071 pixels \(by data.max_pixels\)"),
    (video(30, rate=10), MediaLimits(max_video_seconds=2.5),
     r"a video of 3 s \(30 frames\); allowed: at most 2.5 s \(by data.max_frames and data.video_fps\)"),
    (video(300, 16, 16, rate=1000), MediaLimits(max_video_seconds=1), "a video of 1 s"),
])
def test_what_is_no_usable_video_is_a_bad_row(data: bytes, limits: MediaLimits, reason: str) -> None:
    with pytest.raises(RowError, match=reason) as caught:
        read_clip(data, limits)
    assert "\n" not in str(caught.value)


def test_a_cut_video_does_not_decode_to_other_frames() -> None:
    """Matroska has no index at its end, so a file cut short still has a header; what is announced is what comes out, or
    an error.
    """
    data = video(30, form="matroska")
    for stop in range(600, len(data), 500):
        try:
            clip = read_clip(data[:stop], LIMITS)
        except RowError:
            continue
        grids = PROCESSOR.encode(talk("<video>", "a"), [clip]).grids
        try:
            patches = decode_video(data[:stop], PROCESSOR.family, [range(grids[0][0])], grids[0][0])[0]
        except (ValueError, av.FFmpegError):
            continue
        assert len(patches) == math.prod(grids[0])


@pytest.mark.parametrize(("form", "reason"),
                         [("mp4", "the video does not decode after frame 2: Invalid data found when processing input"),
                                              ("matroska", "frame 1 of the video is damaged")])
def test_a_damaged_frame_is_not_trained_on(form: str, reason: str) -> None:
    """Of a frame that it can read in part FFmpeg makes up the rest, and says so in a flag alone."""
    data = damaged_video(form)
    grid = PROCESSOR.encode(talk("<video>", "a"), [read_clip(data, LIMITS)]).grids[0]
    with pytest.raises(ValueError, match=reason):
        decode_video(data, PROCESSOR.family, [range(grid[0])], grid[0])
