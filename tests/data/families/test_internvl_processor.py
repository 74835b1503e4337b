"""InternVL's ids, grids and pixels against its own processor of transformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.image_utils import load_image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.processing_utils import ProcessorMixin

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.families.base import Clip
from dhp_ray.data.families.internvl import tiling
from dhp_ray.data.images import decode, image_size
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.model_folder import check_processor_files, own_pixels
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.video import decode_video, read_clip
from dhp_ray.model.build import build_model
from tests.data.samples import MIN_PIXELS, random_conversation, talk, video
from tests.data.test_video import frames_of
from tests.packs import TOKEN_IDS, save_model

LIMITS = MediaLimits()
MAX_PIXELS = 7 * 56 * 56
PROCESSOR = ProcessorSpec("tiny_internvl", "", MIN_PIXELS, MAX_PIXELS).load()
FAMILY = PROCESSOR.family


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's, as it is exported."""
    folder = tmp_path_factory.mktemp("internvl")
    adapter = build_model("tiny_internvl", "", PROCESSOR.token_ids, 0)
    save_model(adapter, folder, {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
    PROCESSOR.save(folder)
    return folder


@pytest.fixture(scope="module")
def own(folder: Path) -> InternVLProcessor:
    """Made of the same folder by transformers alone; its videos need torchvision."""
    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        return InternVLProcessor(images, tokenizer, None, image_seq_length=4, chat_template=PROCESSOR.chat_template)


def messages_of(conversation: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Of LLaVA's form: the line break after a mark is one that the template writes itself."""
    plain = [turn | {"value": re.sub("(<image>|<video>)\n", r"\1", turn["value"])} for turn in conversation]
    return [turn.message() for turn in read_turns(plain)]


def patches_of(tiles: Any) -> torch.Tensor:
    """Of tiles (T, 3, 56, 56) what a convolution of stride 14 sees, patch by patch."""
    cut = torch.nn.functional.unfold(torch.as_tensor(np.asarray(tiles)), 14, stride=14)
    return cut.transpose(1, 2).reshape(-1, 3 * 14 * 14)


def test_ids_grids_and_pixels_of_real_images(test_data: Path, own: InternVLProcessor) -> None:
    source = test_data / "nlvr"
    tiles = set()
    for row in json.loads((source / "conversations.json").read_text())[:8]:
        names = row["image"] if isinstance(row["image"], list) else [row["image"]]
        images = [(source / name).read_bytes() for name in names]
        encoded = PROCESSOR.encode(row["conversations"], [image_size(image) for image in images])
        text = own.apply_chat_template(messages_of(row["conversations"]), tokenize=False)
        expected = own(text=[text], images=[load_image(str(source / name)) for name in names], return_tensors="np")
        assert PROCESSOR.tokenizer.decode(encoded.input_ids) == own.tokenizer.decode(expected["input_ids"][0])
        assert np.array_equal(encoded.input_ids, expected["input_ids"][0])
        assert sum(grid[0] for grid in encoded.grids) == len(expected["pixel_values"])
        found = np.concatenate([decode(image, PROCESSOR.family) for image in images])
        assert np.array_equal(found, patches_of(expected["pixel_values"]).numpy())
        tiles |= {grid[0] for grid in encoded.grids}
    assert max(tiles) > 1


@pytest.mark.parametrize("frames", [1, 3, 23])
def test_ids_grids_and_pixels_of_videos(frames: int, own: InternVLProcessor) -> None:
    data = video(frames, 64, 48)
    clip = read_clip(data, LIMITS)
    conversation = talk("<video>What moves?<image>", "A square.", "<video> And here?", "The same.")
    encoded = PROCESSOR.encode(conversation, [clip, (56, 56), clip])
    taken = FAMILY.frames(clip)
    replacement = own.replace_video_token({"pixel_values_videos": np.zeros((1, len(taken), 1))}, 0)
    one = own.replace_image_token({"num_patches": [1]}, 0)
    text = own.apply_chat_template(messages_of(conversation), tokenize=False)
    text, _ = own.get_text_with_replacements([text], [one], [replacement, replacement])
    assert PROCESSOR.tokenizer.decode(encoded.input_ids) == text[0]
    assert encoded.grids == ((len(taken), 4, 4), (1, 4, 4), (len(taken), 4, 4))
    patches = decode_video(data, PROCESSOR.family, [range(len(taken))], len(taken))[0]
    shown = torch.from_numpy(np.stack([frames_of(data)[number] for number in taken])).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(shown, size=(56, 56), mode="bicubic", antialias=True)
    mean, deviation = (torch.tensor(PROCESSOR.family.settings[name]).view(3, 1, 1)
                       for name in ("image_mean", "image_std"))
    np.testing.assert_allclose(patches, patches_of((resized / 255 - mean) / deviation), atol=1e-6)
    answers = PROCESSOR.tokenizer.decode(encoded.labels[encoded.labels != -100])
    assert answers == "A square.<|im_end|>The same.<|im_end|>"


def test_ids_and_labels_of_random_conversations_with_tiles(own: InternVLProcessor) -> None:
    random = np.random.default_rng(4)
    for _ in range(40):
        conversation, media = random_conversation(random)
        sizes = [read_clip(shown, LIMITS) if isinstance(shown, bytes) else shown.size for shown in media]
        encoded = PROCESSOR.encode(conversation, sizes)
        images = [own.replace_image_token(own.image_processor(images=[shown]), 0) for shown in media
                  if not isinstance(shown, bytes)]
        videos = [own.replace_video_token({"pixel_values_videos": np.zeros((1, FAMILY.num_frames(size)))}, 0)
                  for size in sizes if isinstance(size, Clip)]
        text = own.apply_chat_template(messages_of(conversation), tokenize=False)
        text, _ = own.get_text_with_replacements([text], images, videos)
        assert encoded.input_ids.tolist() == own.tokenizer(text[0])["input_ids"]
        answers = [turn["value"] + "<|im_end|>" for turn in conversation[1::2]]
        assert PROCESSOR.tokenizer.decode(encoded.labels[encoded.labels != -100]) == "".join(answers)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3), st.integers(3, 12))
def test_tiles_are_those_of_its_own(width: int, height: int, least: int, most: int) -> None:
    assert tiling(width, height, (448, 448), least, most) == get_optimal_tiled_canvas(
        (height, width), (448, 448), least, most)


def test_a_saved_processor_takes_the_frames_that_it_is_given(tmp_path: Path) -> None:
    """Like published folders: an engine gives it the frames that it has taken itself, and no metadata."""
    PROCESSOR.save(tmp_path)
    settings = json.loads((tmp_path / "video_preprocessor_config.json").read_text())
    assert (settings["do_sample_frames"], settings["fps"]) == (False, 2.0)


@given(st.integers(1, 5000), st.floats(1, 120), st.sampled_from([0.5, 2.0, 3.7]))
def test_frames_are_taken_as_its_own_does(num_frames: int, rate: float, fps: float) -> None:
    limits, clip = MediaLimits(video_fps=fps, max_frames=64), Clip(32, 32, num_frames, rate)
    family = replace(FAMILY, limits=limits)
    count = family.num_frames(clip)
    # `InternVLVideoProcessor.sample_frames` of transformers 5.23, whose module needs torchvision to import
    shift = num_frames / count / 2
    expected = torch.arange(shift, num_frames, num_frames / count).int().tolist()
    assert family.frames(clip) == expected
    assert len(expected) == count


@pytest.mark.parametrize(("pixels", "own"), [(MAX_PIXELS, 0), (MAX_PIXELS + 3000, 0), (100 * MAX_PIXELS, 0),
                                             (MAX_PIXELS - 1, MAX_PIXELS), (100, MAX_PIXELS)])
def test_a_folder_says_how_many_pixels_its_tiles_have(pixels: int, own: int, folder: Path) -> None:
    assert own_pixels(folder, pixels) == own


def test_max_pixels_bound_the_tiles() -> None:
    assert PROCESSOR.family.grid((560, 56)) == (7, 4, 4)  # six, and the whole
    assert ProcessorSpec("tiny_internvl", "", MIN_PIXELS, 2 * 56 * 56).load().family.grid((560, 56)) == (1, 4, 4)
    assert ProcessorSpec("tiny_internvl", "", MIN_PIXELS, 3000).load().family.grid((560, 56)) == (1, 4, 4)
    with pytest.raises(RowError, match="aspect ratio"):
        PROCESSOR.family.grid((56 * 201, 56))


def test_a_saved_processor_loads_as_the_same(folder: Path) -> None:
    check_processor_files(folder)
    loaded = ProcessorSpec("", str(folder), MIN_PIXELS, MAX_PIXELS).load()
    conversation = talk("<video>\nWhich?<image>", "the left")
    found, wanted = (processor.encode(conversation, [Clip(64, 48, 20, 10.0), (70, 190)])
                     for processor in (loaded, PROCESSOR))
    assert np.array_equal(found.input_ids, wanted.input_ids)
    assert (found.grids, found.seconds) == (wanted.grids, wanted.seconds)
    assert loaded.token_ids == PROCESSOR.token_ids == TOKEN_IDS | {"video": TOKEN_IDS["image"]}


@pytest.mark.parametrize(("of_model", "of_images"), [
    ({"image_size": 56}, {"size": {"height": 56, "width": 56}}), ({"image_size": [56, 56]}, {"size": 56}),
    ({"patch_size": 14}, {}), ({}, {"min_patches": 30})])
def test_sizes_are_written_in_several_ways(
    folder: Path, tmp_path: Path, of_model: dict[str, Any], of_images: dict[str, Any]
) -> None:
    PROCESSOR.save(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= of_model
    (tmp_path / "config.json").write_text(json.dumps(config))
    images = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images | of_images))
    loaded = ProcessorSpec("", str(tmp_path), MIN_PIXELS, MAX_PIXELS).load()
    assert loaded.family.grid((112, 56))[1:] == (4, 4)
    [tiles] = loaded.family.image_processor(images=[Image.new("RGB", (112, 56))])["num_patches"]
    assert tiles == loaded.family.grid((112, 56))[0]


@pytest.mark.parametrize("values", [{"image_size": "large"}, {"patch_size": [14, 7]}])
def test_sizes_that_are_none_are_refused_in_one_line(folder: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    PROCESSOR.save(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= values
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"^model.path: [^\n]*config.json[^\n]*$"):
        check_processor_files(tmp_path)


def test_text_may_hold_tags() -> None:
    encoded = PROCESSOR.encode(talk("Write the page. <image>", "<p><img></p>"), [(56, 56)])
    assert "<p><img></p><|im_end|>" in PROCESSOR.tokenizer.decode(encoded.input_ids)
    assert not {PROCESSOR.tokenizer.get_vocab()[token] for token in ("<img>", "<video>")} & set(
        PROCESSOR.encode(talk("Write <img>.", "<video></video>"), []).input_ids.tolist())


def test_tiles_of_another_size_than_the_models(folder: Path, tmp_path: Path) -> None:
    PROCESSOR.save(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["image_size"] = [112, 112]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"^model.path: [^\n]*: size is [^\n]*56[^\n]* in preprocessor_config.json, "
                                        r"[^\n]*112[^\n]* in config.json; allowed: the same$"):
        check_processor_files(tmp_path)
