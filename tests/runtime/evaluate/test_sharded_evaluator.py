"""Ranks that hold a model together: each has its rows, and answers as one that has the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dhp_ray.config import EVALUATE, Config, load
from dhp_ray.data.fragments import Fragment
from dhp_ray.data.index import held_out, index_fragments
from dhp_ray.runtime.evaluate.evaluator import Evaluator
from dhp_ray.runtime.evaluate.predictions import Answer
from tests.data.samples import picture, talk, write_rows
from tests.packs import PRESETS, TEXT_PRESETS
from tests.plain_answers import MAX_PIXELS, model_folder
from tests.ranks import run_processes

NUM_RANKS = 3


def together(rank: int, port: int, config: Config, root: str, fragment: Fragment) -> tuple[list[Answer], int, int]:
    """A rank's answers to every third row, and elements of what it holds before and of the whole."""
    evaluator = Evaluator(config, root)
    evaluator.join(5, rank, ("127.0.0.1", port))
    evaluator.load()
    held = whole = 0
    for parameter in evaluator.module.parameters():
        assert isinstance(parameter, DTensor)
        held += parameter.to_local().numel()
        whole += parameter.numel()
    answers = []
    for first in range(0, fragment.num_rows, NUM_RANKS):
        if first + rank < fragment.num_rows:
            answers.append(evaluator.answer(first + rank, fragment, first + rank))
        else:
            evaluator.take_part()
    dist.destroy_process_group()
    return answers, held, whole


QUICK = ("tiny_internvl", "tiny_qwen3_vl_moe")


@pytest.mark.parametrize("preset", [
    preset if preset in QUICK else pytest.param(preset, marks=pytest.mark.slow) for preset in PRESETS])
def test_ranks_in_step_answer_as_one_does(preset: str, tmp_path: Path) -> None:
    """Beside one another: a picture and none, a row that cannot be read, answers of other lengths, and no row."""
    (tmp_path / "wide.png").write_bytes(picture(210, 60))
    (tmp_path / "cut.png").write_bytes(picture(120, 90)[:150])
    rows: list[dict[str, Any]] = [
        {"id": "0", "image": "wide.png", "conversations": talk("<image>What?", "One.", "And here?", "Two.")},
        {"id": "1", "conversations": talk("Name a colour.", "Blue.")},
        {"id": "2", "image": "cut.png", "conversations": talk("<image>What?", "x")},
        {"id": "3", "conversations": talk("Name two.", "Red, green.")},
    ]
    path = write_rows(tmp_path / "rows.json", rows)
    folder = model_folder(tmp_path / "model", preset)
    settings = [f"model.path={folder}", f"eval.path={path}", f"data.max_pixels={MAX_PIXELS}", "cluster.device=cpu",
                "eval.max_new_tokens=5", f"cluster.num_workers={NUM_RANKS}"]
    config = load(settings, EVALUATE)
    [fragment] = index_fragments(held_out(config.data, str(path)))
    alone = Evaluator(config, str(tmp_path))
    wanted = [alone.answer(number, fragment, number) for number in range(len(rows))]
    config.eval.ranks_per_model = NUM_RANKS
    found = run_processes(together, NUM_RANKS, config, str(tmp_path), fragment)
    assert sorted((answer for answers, _, _ in found for answer in answers), key=lambda answer: answer.number) == wanted
    assert [bool(answer.error) for answer in wanted] == [preset in TEXT_PRESETS, False, True, False]
    [whole] = {whole for _, _, whole in found}
    assert sum(held for _, held, _ in found) == whole
    assert max(held for _, held, _ in found) < 0.36 * whole
