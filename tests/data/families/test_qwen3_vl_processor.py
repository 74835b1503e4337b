"""Qwen3-VL's ids, labels, grids and pixels against its own processor of transformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.processing_utils import ProcessorMixin
from transformers.video_utils import VideoMetadata

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.families import FAMILIES, PRESETS
from dhp_ray.data.families.base import Clip
from dhp_ray.data.images import decode, image_size
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.model_folder import check_processor_files
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.video import decode_video, read_clip
from dhp_ray.model.presets import PRESETS as MODEL_PRESETS
from dhp_ray.schema import Data, Model
from tests.data.samples import random_conversation, talk, video
from tests.data.test_video import frames_of
from tests.packs import config_of_preset

LIMITS = MediaLimits()
PROCESSOR = ProcessorSpec("tiny_qwen3_vl").load()
FAMILY = PROCESSOR.family


class VideoProcessor(Qwen3VLVideoProcessor):
    """The family's own without torchvision: what it has of it, resizing and normalising, in torch."""

    def convert_to_rgb(self, video: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return video

    def resize(self, videos: torch.Tensor, size: Any, resample: Any, factor: int, temporal_factor: int,  # type: ignore
               cap_pixels_per_frame: bool | None = None, **_: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            sizes: list[Any] = []
            patch.setattr("transformers.video_processing_utils.BaseVideoProcessor.resize",
                          lambda self, image, size, resample: sizes.append((size.height, size.width)) or image)
            super().resize(videos, size, resample, factor, temporal_factor, cap_pixels_per_frame)
        frames = torch.nn.functional.interpolate(videos.flatten(0, 1), size=sizes[0], mode="bicubic", antialias=True)
        return frames.unflatten(0, videos.shape[:2])

    def rescale_and_normalize(self, images: torch.Tensor, do_rescale: Any, rescale_factor: float,  # type: ignore
                              do_normalize: Any, image_mean: Any, image_std: Any) -> torch.Tensor:
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (image_mean, image_std))
        return (images.float() * rescale_factor - mean) / deviation


def own_processor(ours: Processor) -> Qwen3VLProcessor:
    """Of transformers, with the sizes and the frames a second of ours."""
    files = ours.family.processor_files()
    settings = dict(files["video_preprocessor_config.json"])
    own = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    own.image_token, own.video_token = "<|image_pad|>", "<|video_pad|>"
    own.vision_start_token, own.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    own.image_token_id, own.video_token_id = (ours.token_ids[kind] for kind in ("image", "video"))
    check = ProcessorMixin.check_argument_for_proper_class
    try:
        ProcessorMixin.check_argument_for_proper_class = lambda *_: None  # type: ignore[method-assign]
        ProcessorMixin.__init__(own, ours.family.image_processor, ours.tokenizer, VideoProcessor(**settings),
                                chat_template=ours.chat_template)
    finally:
        ProcessorMixin.check_argument_for_proper_class = check  # type: ignore[method-assign]
    return own


OWN = own_processor(PROCESSOR)


def as_published(text: str) -> str:
    """A prompt for transformers from 5.10, which keeps the template's tokens around a video; 4.57, with which the
    weights were published, replaces them with it.
    """
    return text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")


@pytest.mark.parametrize("template", [FAMILY.chat_template, FAMILY.chat_template.replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")])
def test_only_the_steps_in_time_of_a_video_lie_between_vision_tokens(template: str) -> None:
    """Also if the template writes none."""
    processor = ProcessorSpec("tiny_qwen3_vl").load()
    processor = replace(processor, chat_template=template)
    clip = Clip(64, 48, 20, 10.0)
    encoded = processor.encode(talk("<video>Which?<image>", "That."), [clip, (70, 90)])
    text = re.sub(r"(<\|\w+_pad\|>)+", r"\1", processor.tokenizer.decode(encoded.input_ids))
    assert text == ("<|im_start|>user\n<0.3 seconds><|vision_start|><|video_pad|><|vision_end|><1.6 seconds>"
                    "<|vision_start|><|video_pad|><|vision_end|>Which?<|vision_start|><|image_pad|><|vision_end|>"
                    "<|im_end|>\n<|im_start|>assistant\nThat.<|im_end|>\n")


def test_ids_grids_and_pixels_of_real_images(test_data: Path) -> None:
    folder = test_data / "nlvr"
    rows = json.loads((folder / "conversations.json").read_text())
    for row in rows[:8]:
        names = row["image"] if isinstance(row["image"], list) else [row["image"]]
        images = [(folder / name).read_bytes() for name in names]
        encoded = PROCESSOR.encode(row["conversations"], [image_size(image) for image in images])
        turns = read_turns(row["conversations"])
        text = OWN.apply_chat_template([turn.message() for turn in turns], tokenize=False)
        expected = OWN(text=[text], images=[load_image(str(folder / name)) for name in names], return_tensors="np")
        assert np.array_equal(encoded.input_ids, expected["input_ids"][0])
        assert np.array_equal(np.array(encoded.grids), expected["image_grid_thw"])
        pixels = np.concatenate([decode(image, FAMILY) for image in images])
        assert np.array_equal(pixels, expected["pixel_values"])


@pytest.mark.parametrize("frames", [1, 2, 7, 23, 40])
@pytest.mark.parametrize("size", [(64, 48), (30, 20), (320, 240)])
def test_ids_grids_and_pixels_of_videos(frames: int, size: tuple[int, int]) -> None:
    data = video(frames, *size)
    clip = read_clip(data, LIMITS)
    conversation = talk("<video>What moves?", "A square.", "<video> And here?", "The same.")
    encoded = PROCESSOR.encode(conversation, [clip, clip])
    shown = torch.from_numpy(np.stack(frames_of(data))).permute(0, 3, 1, 2)
    if frames == 1:
        shown = shown.repeat(2, 1, 1, 1)  # which its own processor refuses: a step in time has two frames
    text = as_published(OWN.apply_chat_template([turn.message() for turn in read_turns(conversation)],
                                                    tokenize=False))
    expected = OWN(text=[text], videos=[shown, shown], return_tensors="np", do_sample_frames=True,
                   video_metadata=[VideoMetadata(total_num_frames=len(shown), fps=clip.frames_per_second)] * 2)
    if frames > 1:
        assert PROCESSOR.tokenizer.decode(encoded.input_ids) == PROCESSOR.tokenizer.decode(expected["input_ids"][0])
    assert [list(grid) for grid in encoded.grids] == expected["video_grid_thw"].tolist()
    patches = decode_video(data, PROCESSOR.family, [range(encoded.grids[0][0])], encoded.grids[0][0])[0]
    np.testing.assert_allclose(np.concatenate([patches, patches]), expected["pixel_values_videos"], atol=2e-6)
    answers = PROCESSOR.tokenizer.decode(encoded.labels[encoded.labels != -100])
    assert answers == "A square.<|im_end|>The same.<|im_end|>"
    assert encoded.vision_tokens == int((expected["input_ids"] == OWN.video_token_id).sum())


def test_ids_and_labels_of_random_conversations() -> None:
    random = np.random.default_rng(4)
    for _ in range(40):
        conversation, media = random_conversation(random)
        images = [shown for shown in media if isinstance(shown, Image.Image)]
        videos = [shown for shown in media if isinstance(shown, bytes)]
        encoded = PROCESSOR.encode(conversation, [read_clip(shown, LIMITS) if isinstance(shown, bytes) else shown.size
                                                  for shown in media])
        text = as_published(OWN.apply_chat_template([turn.message() for turn in read_turns(conversation)],
                                                    tokenize=False))
        frames = [torch.from_numpy(np.stack(frames_of(data))).permute(0, 3, 1, 2) for data in videos]
        metadata = [VideoMetadata(total_num_frames=len(shown), fps=10.0) for shown in frames]
        expected = OWN(text=[text], images=images or None, videos=frames or None, return_tensors="np",
                       do_sample_frames=True, **({"video_metadata": metadata} if videos else {}))
        assert np.array_equal(encoded.input_ids, expected["input_ids"][0]), text
        answers = [turn["value"] + "<|im_end|>" for turn in conversation[1::2]]
        assert PROCESSOR.tokenizer.decode(encoded.labels[encoded.labels != -100]) == "".join(answers)


@given(st.integers(2, 5000), st.floats(1, 120), st.sampled_from([0.5, 2.0, 3.7]), st.sampled_from([4, 5, 64, 768]))
def test_frames_are_taken_as_its_own_does(num_frames: int, rate: float, fps: float, max_frames: int) -> None:
    own = Qwen3VLVideoProcessor(min_frames=4, max_frames=max_frames)
    expected = own.sample_frames(VideoMetadata(total_num_frames=num_frames, fps=rate), fps=fps)
    limits, clip = MediaLimits(video_fps=fps, max_frames=max_frames), Clip(32, 32, num_frames, rate)
    family = replace(FAMILY, limits=limits)
    assert family.frames(clip) == expected.tolist()
    assert family.num_frames(clip) == len(expected)


@given(st.integers(2, 300), st.integers(1, 3000), st.integers(1, 3000),
       st.sampled_from([(4096, 1003520, 25165824), (3136, 50176, 786432), (131072, 786432, 25165824)]))
def test_frames_are_scaled_as_its_own_does(
    num_frames: int, height: int, width: int, bounds: tuple[int, int, int]
) -> None:
    minimum, maximum, of_video = bounds
    family = replace(FAMILY, min_video_pixels=minimum, max_pixels=maximum, video_pixels=of_video)
    of_frame = max(min(maximum // 1024 * 1024, of_video // num_frames), int(minimum * 1.05))
    try:
        expected = smart_resize(num_frames, height, width, 2, 32, minimum, of_frame * num_frames)
    except ValueError:
        with pytest.raises(RowError, match="aspect ratio"):
            family.frame_size(Clip(width, height, num_frames, 1.0))
    else:
        assume(min(expected) > 0)
        found = family.frame_size(Clip(width, height, num_frames, 1.0))
        assert found == expected


def test_a_saved_processor_loads_as_the_same(tmp_path: Path) -> None:
    PROCESSOR.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    check_processor_files(tmp_path)
    loaded = ProcessorSpec(path=str(tmp_path)).load()
    clip = Clip(64, 48, 20, 10.0)
    conversation = talk("<video>\nWhich?<image>", "the left")
    found, wanted = (processor.encode(conversation, [clip, (70, 90)]) for processor in (loaded, PROCESSOR))
    assert np.array_equal(found.input_ids, wanted.input_ids)
    assert (found.grids, found.seconds) == (wanted.grids, wanted.seconds)
    assert loaded.family == FAMILY


EDGES = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
OF_VIDEO = {"shortest_edge": 40_000, "longest_edge": 25_165_824}


@pytest.mark.parametrize(("images", "videos", "of_video"), [
    ({"size": EDGES}, {"size": OF_VIDEO}, 40_000),  # as published
    ({"min_pixels": 65_536, "max_pixels": 16_777_216, "size": None}, {"size": EDGES, "min_pixels": 40_000}, 40_000),
    ({"min_pixels": 65_536, "size": EDGES | {"shortest_edge": 3136}}, None, 65_536)])
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_small_has_the_least_size_of_the_folders_own_processors(
    images: dict[str, Any], videos: dict[str, Any] | None, of_video: int, nested: bool, tmp_path: Path
) -> None:
    """In training, evaluation and the folder that a run writes, unless `data.min_pixels` is given."""
    def written(kind: str, settings: dict[str, Any] | None) -> dict[str, Any]:
        file = tmp_path / f"{kind}preprocessor_config.json"
        found: dict[str, Any] = json.loads(file.read_text()) | (settings or {})
        file.write_text(json.dumps(found))
        if nested or settings is None:
            file.unlink()
        return found

    PROCESSOR.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    stored, of_videos = written("", images), written("video_", videos)
    if nested:
        (tmp_path / "processor_config.json").write_text(json.dumps(
            {"image_processor": stored} | ({"video_processor": of_videos} if videos else {})))

    model, clip = Model(path=str(tmp_path)), Clip(64, 48, 4, 2.0)
    loaded = ProcessorSpec.of(model, Data()).load()
    own = Qwen2VLImageProcessorPil(**{**stored, "min_pixels": stored.get("min_pixels") or 65_536})
    small = Image.new("RGB", (100, 100))
    expected = own(images=[small], return_tensors="np")["image_grid_thw"].tolist()
    assert [list(loaded.family.grid((100, 100)))] == expected == [[1, 16, 16]]
    assert loaded.family.frame_size(clip) == smart_resize(4, 48, 64, 2, 32, of_video, 10**6)
    loaded.save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3_vl"}')
    again = ProcessorSpec.of(Model(path=str(tmp_path / "model")), Data()).load()
    assert (again.family.min_pixels, again.family.min_video_pixels) == (65_536, of_video)
    for least, most, allowed in ((3136, 1_003_520, 3136), (0, 20_000, 20_000)):
        family = ProcessorSpec.of(model, Data(min_pixels=least, max_pixels=most)).load().family
        assert (family.min_pixels, family.min_video_pixels) == (allowed, allowed)


def test_a_preset_scales_small_images_up_to_four_tokens() -> None:
    for preset in PRESETS:
        for settings in ({}, {"min_pixels": 3136}):
            family = ProcessorSpec.of(Model(preset=preset), Data(**settings)).load().family
            assert (family.min_pixels, family.min_video_pixels) == (3136, 3136)


def test_a_processor_of_other_patches_than_the_models(tmp_path: Path) -> None:
    PROCESSOR.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {"patch_size": 14}}')
    with pytest.raises(DataError, match=r"^model.path: [^\n]*: patch_size is 16 in preprocessor_config.json, 14 in "
                                        r"config.json; allowed: the same$"):
        check_processor_files(tmp_path)


def test_a_model_of_no_known_family(tmp_path: Path) -> None:
    PROCESSOR.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(DataError, match=r"^model.path: [^\n]*config.json is of a model of type 'llava'; allowed: "
                                        f"{', '.join(FAMILIES)}$"):
        ProcessorSpec(path=str(tmp_path)).load()


def test_presets_have_the_families_of_their_models() -> None:
    assert {name: config_of_preset(name).model_type for name in MODEL_PRESETS} == {
        name: family.name for name, family in PRESETS.items()}


@given(st.integers(32, 3000), st.integers(32, 3000), st.integers(1, 40))
def test_no_entry_of_a_video_is_larger_than_memory_is_kept_for(height: int, width: int, num_frames: int) -> None:
    """Of five frames the family bounds four."""
    assume(max(height, width) < 100 * min(height, width))
    family = replace(FAMILY, min_video_pixels=4096, video_pixels=10**9)
    rows, columns = family.frame_size(Clip(width, height, num_frames, 2.0))
    assert rows * columns // 1024 <= family.largest_image_tokens(0, family.max_pixels, 1024)
