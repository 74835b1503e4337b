"""A worker of an evaluation by itself: its answers and losses are those of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dhp_ray.config import EVALUATE, load
from dhp_ray.data.conversation import read_turns
from dhp_ray.data.evaluation import read_question
from dhp_ray.data.formats import read_rows
from dhp_ray.data.index import held_out, index_fragments
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.runtime.evaluate.evaluator import Evaluator, media_in
from dhp_ray.runtime.evaluate.predictions import Answer
from dhp_ray.train.collate import Payload
from tests.data.samples import picture, talk, video, write_rows
from tests.packs import PATCH_DIMS, TEXT_PRESETS, plain_loss
from tests.plain_answers import MAX_PIXELS, model_folder, plain_answers

NUM_TOKENS = 5


@pytest.fixture(scope="module", params=PATCH_DIMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), request.param)


def answers_of(folder: Path, place: Path, rows: list[dict[str, Any]], *settings: str) -> list[Answer]:
    path = write_rows(place / "rows.json", rows)
    config = load([f"model.path={folder}", f"eval.path={path}", f"data.max_pixels={MAX_PIXELS}", "cluster.device=cpu",
                   f"eval.max_new_tokens={NUM_TOKENS}", *settings], EVALUATE)
    [fragment] = index_fragments(held_out(config.data, str(path)))
    evaluator = Evaluator(config, str(place))
    return [evaluator.answer(7 + offset, fragment, offset) for offset in range(fragment.num_rows)]


def test_answers_are_those_of_transformers_generate(folder: Path, tmp_path: Path) -> None:
    for name, size in (("wide.png", (210, 60)), ("high.png", (70, 140)), ("small.png", (30, 30))):
        (tmp_path / name).write_bytes(picture(*size))
    rows = [{"id": "0", "image": ["wide.png", "high.png"],
             "conversations": talk("<image>What?", "One.", "<image>\nAnd here?", "Two.")},
            {"id": "1", "conversations": talk("Name a colour.", "Blue.")},
            {"id": "2", "image": ["small.png"], "conversations": talk("<image>?", "x")}]
    found = answers_of(folder, tmp_path, rows)
    assert [(answer.number, answer.id, answer.error) for answer in found] == [(7, "0", ""), (8, "1", ""), (9, "2", "")]
    images = [[tmp_path / name for name in row.get("image", [])] for row in rows]
    assert [answer.prediction for answer in found] == plain_answers(
        folder, [row["conversations"] for row in rows], images, NUM_TOKENS)  # type: ignore[misc]


def test_losses_are_those_of_training(folder: Path, tmp_path: Path) -> None:
    """With images and videos, of which one is cut in time into pieces for training."""
    from transformers import AutoModelForImageTextToText

    (tmp_path / "cat.png").write_bytes(picture(120, 90))
    (tmp_path / "long.mp4").write_bytes(video(24, 64, 48, rate=2))  # text goes on after its time
    rows = [{"id": "0", "image": "cat.png", "video": ["long.mp4"],
             "conversations": talk("<video>What moves?", "A square.", "<image> And here?", "Nothing.")},
            {"id": "1", "conversations": talk("Name a colour.", "Blue.")}]
    found = answers_of(folder, tmp_path, rows)
    module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = ProcessorSpec("", str(folder), 3136, MAX_PIXELS).load()
    [fragment] = index_fragments(held_out(load(["data=llava", "data.path=x"]).data, str(tmp_path / "rows.json")))
    for answer, row in zip(found, read_rows(fragment), strict=True):
        assert not answer.error
        assert answer.prediction is not None
        question = read_question(row, processor, str(tmp_path))
        whole, media = question.whole, media_in(question, processor)
        mean, count = plain_loss(module, Payload(
            input_ids=whole.input_ids, labels=whole.labels,
            grids=np.array([medium.grid for medium in media], np.int64).reshape(-1, 3),
            pixels=[medium.patches for medium in media], media=np.arange(len(media)),
            seconds=np.array([medium.seconds for medium in media])))
        assert answer.num_valid_tokens == count
        assert answer.loss_sum == pytest.approx(mean.item() * count, rel=1e-5)


@pytest.mark.parametrize("preset", TEXT_PRESETS)
def test_models_of_text_answer_as_by_transformers_generate(preset: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(tmp_path / "model", preset)
    (tmp_path / "cat.png").write_bytes(picture(120, 90))
    rows = [{"id": "0", "conversations": talk("Name a colour.", "Blue.")},
            {"id": "1", "image": "cat.png", "conversations": talk("<image>What?", "A cat.")}]
    answer, refused = answers_of(folder, tmp_path, rows)
    assert refused.error == "an image; allowed: text, which is all that the model takes"
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    inputs = tokenizer.apply_chat_template([{"role": "user", "content": "Name a colour."}], add_generation_prompt=True,
                                           return_dict=True, return_tensors="pt")
    tokens = module.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    assert answer.prediction == tokenizer.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    encoded = ProcessorSpec("", str(folder)).load().encode(rows[0]["conversations"], [])
    mean, count = plain_loss(module, Payload(input_ids=encoded.input_ids, labels=encoded.labels,
                                             grids=np.zeros((0, 3), np.int64), pixels=[]))
    assert (answer.loss_sum, answer.num_valid_tokens) == (pytest.approx(mean.item() * count, rel=1e-5), count)


def test_an_answer_ends_with_its_turn_though_the_folder_names_another_token(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "tiny_llama")
    evaluator = Evaluator(load([f"model.path={folder}", "eval.path=unused", "cluster.device=cpu",
                                f"eval.max_new_tokens={NUM_TOKENS}"], EVALUATE), "")
    processor = evaluator.processor
    _, prompt = processor.encode_prompt(read_turns(talk("Name a colour.", "Blue."))[:1], [])
    inputs = evaluator._inputs(prompt, [])
    tokens = evaluator.module.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    written = tokens[0, inputs["input_ids"].shape[1]:].tolist()
    assert len(written) == NUM_TOKENS
    processor.token_ids["eos"] = written[1]  # as if this were what ends a turn
    stop = written.index(written[1]) + 1
    assert evaluator.generate(prompt, []) == processor.tokenizer.decode(written[:stop], skip_special_tokens=True)


def test_a_long_video_is_put_together_again(tmp_path: Path) -> None:
    """Which is cut into entries of at most SLICE_TOKENS."""
    processor = ProcessorSpec("tiny").load()
    (tmp_path / "long.mp4").write_bytes(video(60, 560, 560, rate=2))
    path = write_rows(tmp_path / "rows.json", [{"id": "a", "video": "long.mp4",
                                                "conversations": talk("<video>What moves?", "A square.")}])
    [fragment] = index_fragments(held_out(load(["data=llava", "data.path=x"]).data, str(path)))
    question = read_question(next(read_rows(fragment)), processor, str(tmp_path))
    assert len(question.whole.grids) > 1
    [medium] = media_in(question, processor)
    assert medium.grid == (30, 40, 40)
    assert medium.patches.shape == (30 * 40 * 40, processor.family.patch_dim)
    assert medium.seconds == 1.0


def test_bad_samples_say_why(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(picture(120, 90)[:150])
    rows = [{"id": "cut", "image": "cut.png", "conversations": talk("<image>What?", "x")},
            {"id": "long", "conversations": talk("x" * 300, "y")}]
    cut, long = answers_of(folder, tmp_path, rows, "planner.max_sequence_tokens=200")
    assert cut.error.startswith("OSError: ")
    assert long.error.endswith(" tokens with the answer; allowed: at most 200")
    assert (cut.prediction, long.prediction) == (None, None)
