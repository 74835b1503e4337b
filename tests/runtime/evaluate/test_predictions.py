"""What an evaluation writes: in the order of the file, whatever the order of the answers; and its sums."""

from __future__ import annotations

import json
import math
from pathlib import Path
from time import perf_counter

import pytest

from dhp_ray.runtime.evaluate.predictions import Answer, Predictions
from dhp_ray.runtime.messages import RunError

ANSWERS = [Answer(0, "a", "", "Which?", ("red",), "Red.", 2.0, 4), Answer(1, "b", "image 1: damaged"),
           Answer(2, "c", "", "Who?", ("Ann", "Anna"), "Bob", 1.0, 1)]


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_lines_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    predictions = Predictions(str(path), 3)
    predictions.add(ANSWERS[2])
    assert (ids(path), predictions.done) == ([], 0)
    predictions.add(ANSWERS[0])
    assert (ids(path), predictions.done) == (["a"], 1)
    predictions.add(ANSWERS[1])
    assert (ids(path), predictions.done) == (["a", "b", "c"], 3)
    predictions.close()
    first, second, third = map(json.loads, path.read_text().splitlines())
    assert first == {"id": "a", "prompt": "Which?", "references": ["red"], "prediction": "Red.", "exact_match": 1.0,
                     "anls": 0.75, "f1": 1.0, "loss": 0.5, "num_valid_tokens": 4}
    assert second == {"id": "b", "error": "image 1: damaged"}
    assert (third["exact_match"], third["loss"]) == (0.0, 1.0)
    assert predictions.summary() == {"num_samples": 2, "num_left_out": 1, "loss": 0.6, "num_valid_tokens": 5,
                                     "exact_match": 0.5, "anls": 0.375, "f1": 0.5}


def test_without_answers_there_are_no_scores(tmp_path: Path) -> None:
    predictions = Predictions(str(tmp_path / "out.jsonl"), 1)
    predictions.add(Answer(0, "a", "", "Which?", ("red",), None, 2.0, 4))
    predictions.close()
    assert predictions.summary() == {"num_samples": 1, "num_left_out": 0, "loss": 0.5, "num_valid_tokens": 4}
    assert "prediction" not in json.loads((tmp_path / "out.jsonl").read_text())


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    """JSON has no NaN."""
    for loss in (math.nan, math.inf):
        predictions = Predictions(str(tmp_path / "out.jsonl"), 2)
        predictions.add(Answer(0, "a", "", "Which?", ("red",), None, loss, 4))
        predictions.add(Answer(1, "b", "", "Which?", ("red",), None, 2.0, 4))
        predictions.close()
        written = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "out.jsonl").open()]
        assert [line["loss"] for line in written] == [None, 0.5]
        assert predictions.summary() == {"num_samples": 2, "num_left_out": 0, "loss": None, "num_valid_tokens": 8}


def test_a_summary_takes_as_long_after_many_samples(tmp_path: Path) -> None:
    """It is shown after every sample."""
    predictions = Predictions(str(tmp_path / "out.jsonl"), 2000)
    for number in range(2000):
        predictions.add(Answer(number, "a", "", "Which?", ("red",), "red", 2.0, 4))
    predictions.close()
    begun = perf_counter()
    for _ in range(2000):
        summary = predictions.summary()
    assert perf_counter() - begun < 1
    assert (summary["num_samples"], summary["f1"]) == (2000, 1)


def test_text_that_is_no_utf_8_is_written(tmp_path: Path) -> None:
    predictions = Predictions(str(tmp_path / "out.jsonl"), 1)
    predictions.add(Answer(0, "a", "", "größer \ud800?", ("ja",), "ja", 1.0, 1))
    predictions.close()
    assert json.loads((tmp_path / "out.jsonl").read_text())["prompt"].startswith("größer ")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for name in ("taken/out.jsonl", "."):
        with pytest.raises(RunError, match=r"eval.output: .+ cannot be written: \w+"):
            Predictions(str(tmp_path / name), 1)
