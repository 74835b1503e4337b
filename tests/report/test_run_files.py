from __future__ import annotations

from pathlib import Path

import pytest

from dhp_ray.report.run_files import read_run
from dhp_ray.schema import ConfigError
from dhp_ray.storage import Folder, StorageError
from tests.report.runs import write_run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    run = read_run(Folder(str(tmp_path)))
    assert [line["step"] for line in run.metrics] == run.plan_steps == [1, 2, 3]
    assert [event["kind"] for event in run.events] == ["started"]
    assert [line["id"] for line in run.skipped] == ["row-x"]
    assert run.plan(2)["num_ranks"] == 4
    assert "seed: 0" in run.config


def test_a_line_that_is_being_written_is_left_out_and_the_file_left_alone(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert [line["step"] for line in read_run(Folder(str(tmp_path))).metrics] == [1, 2]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(("name", "content", "words"), [
    ("metrics.jsonl", "[1]\n", "metrics.jsonl: line 1 is not a JSON object"),
    ("metrics.jsonl", '{"a":' * 200_000 + "\n", "metrics.jsonl: line 1 is not a JSON object"),
    ("events.jsonl", '{"kind": "a"}\nx\n', "events.jsonl: line 2 is not a JSON object"),
    ("plans/step_000002.json", "nothing", "plans/step_000002.json: not a JSON object"),
    ("plans/step_000002.json", "[]", "plans/step_000002.json: not a JSON object")])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    write_run(tmp_path, 2)
    (tmp_path / name).write_text(content)
    with pytest.raises(StorageError, match=words):
        read_run(Folder(str(tmp_path))).plan(2)


def test_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir: no run in .*absent \(it has no config\.yaml\)"):
        read_run(Folder(str(tmp_path / "absent")))
