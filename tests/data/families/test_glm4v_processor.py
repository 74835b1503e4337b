"""GLM-4.1V's ids, labels, grids and pixels against its own processor of transformers."""

from __future__ import annotations

import json
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
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.processing_utils import ProcessorMixin
from transformers.video_utils import VideoMetadata

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.errors import RowError
from dhp_ray.data.families.base import Clip
from dhp_ray.data.images import decode, image_size
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.model_folder import check_processor_files, own_pixels
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.video import decode_video, read_clip
from tests.data.samples import random_conversation, talk, video
from tests.data.test_video import frames_of

LIMITS = MediaLimits()
PROCESSOR = ProcessorSpec("tiny_glm4v").load()
FAMILY = PROCESSOR.family
# GLM-4.1V-9B-Thinking's, with the spaces that jinja takes away
TEMPLATE = """[gMASK]<sop>
{%- for msg in messages %}
    {%- if msg.role == 'system' %}
<|system|>
{{ msg.content }}
    {%- elif msg.role == 'user' %}
<|user|>{{ '\\n' }}
        {%- if msg.content is string %}
{{ msg.content }}
        {%- else %}
            {%- for item in msg.content %}
                {%- if item.type == 'video' or 'video' in item %}
<|begin_of_video|><|video|><|end_of_video|>
                {%- elif item.type == 'image' or 'image' in item %}
<|begin_of_image|><|image|><|end_of_image|>
                {%- elif item.type == 'text' %}
{{ item.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
    {%- elif msg.role == 'assistant' %}
<|assistant|>
{{ msg.content }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


class VideoProcessor(Glm4vVideoProcessor):
    """The family's own without torchvision: what it has of it, resizing and normalising, in torch."""

    def convert_to_rgb(self, video: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return video

    def resize(self, videos: torch.Tensor, size: Any, resample: Any, factor: int,  # type: ignore
               temporal_factor: int, **_: Any) -> torch.Tensor:
        shape = smart_resize(videos.shape[1], *videos.shape[-2:], temporal_factor, factor, size.shortest_edge,
                             size.longest_edge)
        frames = torch.nn.functional.interpolate(videos.flatten(0, 1), size=shape, mode="bicubic", antialias=True)
        return frames.unflatten(0, videos.shape[:2])

    def rescale_and_normalize(self, images: torch.Tensor, do_rescale: Any, rescale_factor: float,  # type: ignore
                              do_normalize: Any, image_mean: Any, image_std: Any) -> torch.Tensor:
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (image_mean, image_std))
        return (images.float() * rescale_factor - mean) / deviation


def own_processor(ours: Processor) -> Glm4vProcessor:
    """Of transformers, with the sizes and the frames a second of ours."""
    settings = dict(ours.family.processor_files()["video_preprocessor_config.json"])
    check = ProcessorMixin.check_argument_for_proper_class
    try:
        ProcessorMixin.check_argument_for_proper_class = lambda *_: None  # type: ignore[method-assign]
        return Glm4vProcessor(ours.family.image_processor, ours.tokenizer, VideoProcessor(**settings), TEMPLATE)
    finally:
        ProcessorMixin.check_argument_for_proper_class = check  # type: ignore[method-assign]


OWN = own_processor(PROCESSOR)


def text_of(conversation: list[dict[str, Any]]) -> str:
    """With what ends the last answer, which its own template leaves to the user's next turn."""
    turns = [turn.message() for turn in read_turns(conversation)]
    return str(OWN.apply_chat_template(turns, tokenize=False)) + "<|user|>"


def test_answers_end_with_the_token_of_the_users_turn() -> None:
    conversation = [{"from": "system", "value": "Be short."}, *talk("a", "b", "c", "d")]
    encoded = PROCESSOR.encode(conversation, [])
    assert PROCESSOR.tokenizer.decode(encoded.input_ids) == text_of(conversation) == (
        "[gMASK]<sop><|system|>\nBe short.<|user|>\na<|assistant|>\nb<|user|>\nc<|assistant|>\nd<|user|>")
    assert PROCESSOR.tokenizer.decode(encoded.labels[encoded.labels != -100]) == "b<|user|>d<|user|>"
    prompt, _ = PROCESSOR.encode_prompt(read_turns(conversation)[:2], [])
    assert prompt == "[gMASK]<sop><|system|>\nBe short.<|user|>\na<|assistant|>\n"
    assert PROCESSOR.end_ids(None) == [PROCESSOR.token_ids["eos"]]


def test_a_folders_own_template_gives_the_same(tmp_path: Path) -> None:
    PROCESSOR.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "glm4v"}')
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    conversation = talk("<video>\nWhich?<image>", "the left", "Sure?", "Yes.")
    found, wanted = (processor.encode(conversation, [Clip(64, 48, 20, 10.0), (70, 90)])
                     for processor in (ProcessorSpec(path=str(tmp_path)).load(), PROCESSOR))
    assert np.array_equal(found.input_ids, wanted.input_ids)
    assert np.array_equal(found.labels, wanted.labels)


def test_ids_grids_and_pixels_of_real_images(test_data: Path) -> None:
    folder = test_data / "nlvr"
    for row in json.loads((folder / "conversations.json").read_text())[:8]:
        names = row["image"] if isinstance(row["image"], list) else [row["image"]]
        images = [(folder / name).read_bytes() for name in names]
        encoded = PROCESSOR.encode(row["conversations"], [image_size(image) for image in images])
        expected = OWN(text=[text_of(row["conversations"])], images=[load_image(str(folder / name)) for name in names],
                       return_tensors="np")
        assert np.array_equal(encoded.input_ids, expected["input_ids"][0])
        assert np.array_equal(np.array(encoded.grids), expected["image_grid_thw"])
        assert np.array_equal(np.concatenate([decode(image, FAMILY) for image in images]), expected["pixel_values"])


@pytest.mark.parametrize("frames", [1, 2, 7, 23, 40])
@pytest.mark.parametrize("size", [(64, 48), (30, 20), (320, 240)])
def test_ids_grids_and_pixels_of_videos(frames: int, size: tuple[int, int]) -> None:
    data = video(frames, *size)
    clip = read_clip(data, LIMITS)
    conversation = talk("<video>What moves?", "A square.", "<video> And here?", "The same.")
    encoded = PROCESSOR.encode(conversation, [clip, clip])
    shown = torch.from_numpy(np.stack(frames_of(data))).permute(0, 3, 1, 2)
    expected = OWN(text=[text_of(conversation)], videos=[shown, shown], return_tensors="np", do_sample_frames=True,
                   video_metadata=[metadata(clip)] * 2)
    assert PROCESSOR.tokenizer.decode(encoded.input_ids) == PROCESSOR.tokenizer.decode(expected["input_ids"][0])
    assert [list(grid) for grid in encoded.grids] == expected["video_grid_thw"].tolist()
    patches = decode_video(data, FAMILY, [range(encoded.grids[0][0])], encoded.grids[0][0])[0]
    np.testing.assert_allclose(np.concatenate([patches, patches]), expected["pixel_values_videos"], atol=2e-6)
    assert encoded.vision_tokens == int((expected["mm_token_type_ids"] == 2).sum())


def metadata(clip: Clip) -> VideoMetadata:
    """As its readers of videos give it."""
    return VideoMetadata(total_num_frames=clip.num_frames, fps=clip.frames_per_second,
                         duration=clip.num_frames / clip.frames_per_second)


def test_ids_and_labels_of_random_conversations() -> None:
    random = np.random.default_rng(4)
    for _ in range(12):
        conversation, media = random_conversation(random)
        images = [shown for shown in media if isinstance(shown, Image.Image)]
        videos = [shown for shown in media if isinstance(shown, bytes)]
        encoded = PROCESSOR.encode(conversation, [read_clip(shown, LIMITS) if isinstance(shown, bytes) else shown.size
                                                  for shown in media])
        frames = [torch.from_numpy(np.stack(frames_of(data))).permute(0, 3, 1, 2) for data in videos]
        of_videos = [metadata(read_clip(data, LIMITS)) for data in videos]
        text = text_of(conversation)
        expected = OWN(text=[text], images=images or None, videos=frames or None, return_tensors="np",
                       do_sample_frames=True, **({"video_metadata": of_videos} if videos else {}))
        assert np.array_equal(encoded.input_ids, expected["input_ids"][0]), text
        answers = [turn["value"] + "<|user|>" for turn in conversation[1::2]]
        assert PROCESSOR.tokenizer.decode(encoded.labels[encoded.labels != -100]) == "".join(answers)


@given(st.integers(1, 5000), st.floats(1, 120), st.sampled_from([0.5, 2.0, 3.7]), st.sampled_from([4, 5, 64, 768]))
def test_frames_are_taken_as_its_own_does(num_frames: int, rate: float, fps: float, max_frames: int) -> None:
    limits, clip = MediaLimits(video_fps=fps, max_frames=max_frames), Clip(32, 32, num_frames, rate)
    family = replace(FAMILY, limits=limits)
    own = Glm4vVideoProcessor(**family.processor_files()["video_preprocessor_config.json"])
    assert family.frames(clip) == own.sample_frames(metadata(clip)).tolist()
    assert family.num_frames(clip) <= max(2, max_frames + max_frames % 2)


@pytest.mark.parametrize("seconds", [1, 10, 300])
@pytest.mark.parametrize(("fps", "max_frames"), [(30.0, 16), (8.0, 4), (30.0, 5)])
def test_a_second_of_more_frames_than_allowed_is_cut(fps: float, max_frames: int, seconds: int) -> None:
    family = replace(FAMILY, limits=MediaLimits(video_fps=fps, max_frames=max_frames))
    frames = family.frames(Clip(32, 32, 30 * seconds, 30.0))
    assert len(set(frames)) == max_frames
    assert frames[0] == 0


@given(st.integers(1, 300), st.integers(1, 3000), st.integers(1, 3000),
       st.sampled_from([(4096, 1003520, 25165824), (3136, 50176, 786432), (131072, 786432, 25165824)]))
def test_sizes_are_those_of_its_own(
    num_frames: int, height: int, width: int, bounds: tuple[int, int, int]
) -> None:
    """Of images, and of frames, which also have no more pixels than images."""
    minimum, maximum, of_video = bounds
    clip = Clip(width, height, num_frames, 2.0)
    family = replace(FAMILY, min_pixels=minimum, min_video_pixels=minimum, max_pixels=maximum, video_pixels=of_video)
    taken = family.num_frames(clip)
    try:
        of_image = smart_resize(2, height, width, 2, 28, 2 * minimum, 2 * maximum)
        of_frame = smart_resize(taken, height, width, 2, 28, minimum, max(min(of_video, maximum * taken), minimum))
    except ValueError:
        with pytest.raises(RowError, match="aspect ratio"):
            family.frame_size(clip)
    else:
        assert family.grid((width, height)) == (1, of_image[0] // 14, of_image[1] // 14)
        assert family.frame_size(clip) == of_frame
        assume(max(height, width) < 100 * min(height, width))
        assert of_frame[0] * of_frame[1] // 784 <= family.largest_image_tokens(0, maximum, 784)


PUBLISHED = {"size": {"shortest_edge": 12544, "longest_edge": 9633792}, "patch_size": 14, "temporal_patch_size": 2,
             "merge_size": 2, "do_rescale": True}


@pytest.mark.parametrize("kind", ["Glm4v", "Glm46V"])
def test_a_published_folder(kind: str, tmp_path: Path) -> None:
    """Its bounds of pixels are of two frames; with the processor of GLM-4.6V it takes no videos."""
    PROCESSOR.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "glm4v"}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(
        PUBLISHED | {"image_processor_type": f"{kind}ImageProcessor", "processor_class": f"{kind}Processor"}))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(
        PUBLISHED | {"size": {"shortest_edge": 12544, "longest_edge": 47040000}}))
    check_processor_files(tmp_path)
    loaded = ProcessorSpec(path=str(tmp_path), max_pixels=4816896).load()
    assert (loaded.family.min_pixels, loaded.family.min_video_pixels, loaded.family.video_pixels) == (
        6272, 12544, 47040000)
    assert (own_pixels(tmp_path, 4816896), own_pixels(tmp_path, 1003520)) == (0, 4816896)
    loaded.save(tmp_path / "again")
    stored = json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())
    assert stored["size"] == PUBLISHED["size"]
    assert (stored["image_processor_type"], stored["processor_class"]) == (f"{kind}ImageProcessor", f"{kind}Processor")
    conversation, clip = talk("<video>Which?", "That."), Clip(64, 48, 20, 10.0)
    if kind == "Glm4v":
        assert loaded.encode(conversation, [clip]).vision_tokens
    else:
        with pytest.raises(RowError, match=r"^a video; allowed: images, of glm4v models with GLM-4.6V's processor"):
            loaded.encode(conversation, [clip])
