"""jobs/evaluate.py as a user calls it: answers are those of transformers' `generate` on any number of workers, and what
is wrong is one line.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from dhp_ray.config import EVALUATE, load
from dhp_ray.data.evaluation import score
from dhp_ray.runtime.evaluate.evaluation import pixels_warning
from tests.checkout import job_of
from tests.data.samples import picture, talk, write_rows
from tests.integration.faults import children, kill
from tests.integration.jobs import Ended, run, start
from tests.packs import PATCH_DIMS
from tests.plain_answers import MAX_PIXELS, model_folder, plain_answers

NUM_TOKENS = 6
NUM_IMAGES = 50


def evaluate(folder: Path, path: Path, output: Path, *arguments: str) -> Ended:
    return run("evaluate.py", f"model.path={folder}", f"eval.path={path}", f"eval.output={output}",
               f"data.max_pixels={MAX_PIXELS}", f"eval.max_new_tokens={NUM_TOKENS}", "cluster.device=cpu",
               "cluster.cpus_per_worker=0.2", *arguments)


def test_a_line_says_that_images_are_scaled_otherwise_than_by_the_folder(tiny: Path) -> None:
    def warning(pixels: int) -> str:
        return pixels_warning(load([f"model.path={tiny}", "eval.path=x", f"data.max_pixels={pixels}"],
                                   EVALUATE))

    assert warning(MAX_PIXELS) == ""
    assert warning(2 * MAX_PIXELS) == (
        f"images have at most {2 * MAX_PIXELS} pixels (data.max_pixels), those of the model's own processor "
        f"{MAX_PIXELS}: data.max_pixels={MAX_PIXELS} shows them as it does")


def predictions(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(status: int, *arguments: str) -> str:
    """The one line that an evaluation ends with that must fail."""
    ended = run("evaluate.py", "cluster.device=cpu", "cluster.cpus_per_worker=0.2", *arguments)
    assert ended.status == status, ended.output + ended.errors
    [line] = ended.error_lines
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("tiny"), "tiny")


def held_out(test_data: Path, count: int) -> list[dict[str, Any]]:
    """Conversations with `count` images in all."""
    rows = json.loads((test_data / "nlvr" / "conversations.json").read_text())
    found: list[dict[str, Any]] = []
    for row in rows:
        row = row | {"image": row["image"] if isinstance(row["image"], list) else [row["image"]]}
        if len(row["image"]) <= min(3, count):
            found.append(row)
            count -= len(row["image"])
    assert count == 0
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", PATCH_DIMS)
def test_answers_are_those_of_transformers_on_any_number_of_workers(
    preset: str, ray_cluster: None, test_data: Path, tmp_path: Path
) -> None:
    """On 50 real images, some conversations with several of them and with earlier answers."""
    folder = model_folder(tmp_path / "model", preset)
    rows = held_out(test_data, NUM_IMAGES)
    path = write_rows(tmp_path / "held_out.json", rows)
    written = []
    for num_workers, ranks_per_model in ((1, 1), (3, 1), (3, 3), (4, 2)):
        output = tmp_path / f"{num_workers}.jsonl"
        ended = evaluate(folder, path, output, f"data.image_root={test_data / 'nlvr'}",
                         f"cluster.num_workers={num_workers}", f"eval.ranks_per_model={ranks_per_model}")
        assert ended.status == 0, ended.output + ended.errors
        written.append(output.read_text())
    assert written == [written[0]] * 4
    found = predictions(tmp_path / "1.jsonl")
    assert [line["id"] for line in found] == [row["id"] for row in rows]
    wanted = plain_answers(folder, [row["conversations"] for row in rows],
                           [[test_data / "nlvr" / name for name in row["image"]] for row in rows], NUM_TOKENS)
    assert [line["prediction"] for line in found] == wanted
    assert len(set(wanted)) > 3


def test_what_it_writes_and_prints(ray_cluster: None, tiny: Path, tmp_path: Path) -> None:
    """Two samples that can be used, and two that cannot, in the order of the file; the means of the former."""
    (tmp_path / "cat.png").write_bytes(picture(120, 90))
    rows = [{"id": "cat", "image": "cat.png", "answers": ["a cat", "Cat"],
             "conversations": talk("<image>What is this?", "A cat.", "And its colour?", "Red.")},
            {"id": "absent", "image": "none.png", "conversations": talk("<image>What is this?", "A dog.")},
            {"id": "silent", "conversations": talk("Hello?")},
            {"id": "plain", "conversations": talk("Name a colour.", "Blue.")}]
    path = write_rows(tmp_path / "rows.json", rows)
    ended = evaluate(tiny, path, tmp_path / "new" / "out.jsonl", "cluster.num_workers=2")
    assert ended.status == 0, ended.output + ended.errors
    assert ended.error_lines == []
    cat, absent, silent, plain = predictions(tmp_path / "new" / "out.jsonl")
    assert absent == {"id": "absent", "error": f"image 1: none.png: no such file below data.image_root ({tmp_path})"}
    assert silent == {"id": "silent", "error": "no turn of the assistant: nothing to learn from"}
    assert cat["references"] == ["Red.", "a cat", "Cat"]
    assert cat["prompt"].endswith("A cat.<|im_end|>\n<|im_start|>user\nAnd its colour?<|im_end|>\n"
                                  "<|im_start|>assistant\n")
    assert (cat["num_valid_tokens"], plain["num_valid_tokens"]) == (12, 6)
    for line in (cat, plain):
        scores = score(line["prediction"], line["references"])
        assert (line["exact_match"], line["anls"], line["f1"]) == (scores.exact_match, scores.anls, scores.f1)
    *lines, words, numbers = ended.output.splitlines()
    summary = json.loads(numbers)
    assert summary["loss"] == pytest.approx((12 * cat["loss"] + 6 * plain["loss"]) / 18)
    assert [summary[name] for name in ("num_samples", "num_left_out", "num_valid_tokens", "num_workers")] == [
        2, 2, 18, 2]
    assert words.startswith(f"2 samples, 2 left out: loss {summary['loss']:.3f}, exact match ")
    assert {line for line in lines if "left out" in line} == {
        f"sample absent left out: {absent['error']}", f"sample silent left out: {silent['error']}"}
    assert lines[-1].startswith("4/4 samples: loss ")


@pytest.mark.slow
def test_a_bad_sample_ends_it_when_asked(ray_cluster: None, tiny: Path, tmp_path: Path) -> None:
    rows = [{"id": "cat", "image": "none.png", "conversations": talk("<image>What is this?", "A cat.")}]
    path = write_rows(tmp_path / "rows.json", rows)
    where = [f"model.path={tiny}", f"eval.path={path}", f"eval.output={tmp_path / 'out.jsonl'}"]
    assert refused(1, *where, "data.on_error=fail") == (
        f"eval.path: sample cat: image 1: none.png: no such file below data.image_root ({tmp_path}) "
        "(data.on_error=fail)")
    ended = run("evaluate.py", *where, "cluster.cpus_per_worker=0.2")
    assert (ended.status, ended.error_lines) == (1, [
        f"error: eval.path: {path}: none of the 1 samples can be evaluated; {tmp_path / 'out.jsonl'} says why"])


@pytest.mark.slow
def test_a_sample_that_is_too_long_is_left_out(ray_cluster: None, tiny: Path, tmp_path: Path) -> None:
    rows = [{"id": name, "conversations": talk("x" * length, "Blue.")} for name, length in (("a", 9), ("b", 400))]
    ended = evaluate(tiny, write_rows(tmp_path / "rows.json", rows), tmp_path / "out.jsonl",
                     "planner.max_sequence_tokens=300")
    assert ended.status == 0, ended.errors
    first, second = predictions(tmp_path / "out.jsonl")
    assert "prediction" in first
    assert second["error"].endswith("tokens with the answer; allowed: at most 300")


@pytest.mark.slow
def test_the_loss_alone(ray_cluster: None, tiny: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"id": "a", "conversations": talk("Name a colour.", "Blue.")}])
    ended = evaluate(tiny, path, tmp_path / "out.jsonl", "eval.generate=false")
    assert ended.status == 0, ended.errors
    assert predictions(tmp_path / "out.jsonl")[0].keys() == {"id", "prompt", "references", "loss", "num_valid_tokens"}
    assert json.loads(ended.output.splitlines()[-1]).keys() == {
        "num_samples", "num_left_out", "loss", "num_valid_tokens", "seconds", "num_workers"}


@pytest.mark.slow
def test_weights_that_are_not_the_models(ray_cluster: None, tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    weights.pop(name)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = write_rows(tmp_path / "rows.json", [{"id": "a", "conversations": talk("Name a colour.", "Blue.")}])
    line = refused(1, f"model.path={folder}", f"eval.path={path}", f"eval.output={tmp_path / 'out.jsonl'}")
    assert line.startswith(f"model.path: {folder} lacks 1 weights of its model, such as ")


@pytest.mark.slow
def test_ctrl_c_ends_it_in_one_line(ray_cluster: None, tiny: Path, tmp_path: Path) -> None:
    rows = [{"id": str(number), "conversations": talk("Name a colour.", "Blue.")} for number in range(2000)]
    path = write_rows(tmp_path / "rows.json", rows)
    process = start("evaluate.py", f"model.path={tiny}", f"eval.path={path}", "cluster.cpus_per_worker=0.2",
                    f"eval.output={tmp_path / 'out.jsonl'}")
    assert process.stdout
    next(line for line in process.stdout if " samples: " in line)  # a twentieth is done
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (
        1, "error: stopped before the end: Ctrl-C; start the same command again\n")
    assert len(predictions(tmp_path / "out.jsonl")) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_model", [1, 2])
def test_a_worker_that_dies(ranks_per_model: int, ray_cluster: None, tiny: Path, tmp_path: Path) -> None:
    """It is replaced, and the sample that it was at is answered; where it held a part of a model, that is the end."""
    rows = [{"id": str(number), "conversations": talk(f"Name colour {number}.", "Blue.")} for number in range(300)]
    path = write_rows(tmp_path / "rows.json", rows)
    process = start("evaluate.py", f"model.path={tiny}", f"eval.path={path}", "cluster.cpus_per_worker=0.2",
                    "cluster.num_workers=2", f"eval.output={tmp_path / 'out.jsonl'}",
                    f"eval.ranks_per_model={ranks_per_model}")
    assert process.stdout
    next(line for line in process.stdout if " samples: " in line)  # a twentieth is done
    kill(children("Evaluator")[0])
    output, errors = process.communicate(timeout=120)
    if ranks_per_model == 2:
        assert process.returncode == 1
        [line] = errors.splitlines()
        assert line.startswith("error: a worker of the evaluation is lost: ")
        return
    assert process.returncode == 0, errors
    assert json.loads(output.splitlines()[-1])["num_samples"] == 300
    assert [line["id"] for line in predictions(tmp_path / "out.jsonl")] == [row["id"] for row in rows]


@pytest.mark.parametrize(("words", "line"), [
    (["eval.paht=x"], "eval.paht: no such key (the command line); allowed: eval.path, "),
    (["model.path="], "model.path: got nothing; allowed: a local Hugging Face folder"),
    (["model.path={folder}/none"], "model.path: no folder {folder}/none; allowed: a local Hugging Face folder"),
    (["model.path={folder}"], "model.path: {folder} has no config.json; allowed: a local Hugging Face folder"),
    (["eval.path="], "eval.path: got nothing; allowed: a file or folder of held-out samples"),
    (["eval.path={folder}/none.json"], "eval.path: no file or folder {folder}/none.json"),
    (["eval.output={folder}/rows.json"],
     "eval.output: got '{folder}/rows.json', the file of eval.path; allowed: another file"),
    (["eval.output=s3://bucket/out.jsonl"], "eval.output: got s3://bucket/out.jsonl; allowed: a file of this machine"),
    (["eval.output={folder}/link.json"],
     "eval.output: got '{folder}/link.json', the file of eval.path; allowed: another file"),
    (["eval.path={folder}", "eval.output={folder}/new/../new/out.jsonl"],
     "eval.output: got '{folder}/new/../new/out.jsonl', inside eval.path ({folder}); allowed: a file outside of it"),
    (["eval.path={folder}/silent.json"], "eval.path: none of the 3 samples has an answer; allowed: at least one "
     "conversation in which the assistant speaks"),
    (["eval.max_new_tokens=0"], "eval.max_new_tokens: got 0; allowed: at least 1"),
    (["cluster.num_workers=3", "eval.ranks_per_model=2"], "eval.ranks_per_model: got 2; allowed: what divides "
     "cluster.num_workers (3)"),
    (["cluster.num_workers=0"], "cluster.num_workers: got 0; allowed: at least 1")])
def test_what_is_wrong_is_told_in_one_line(
    words: list[str], line: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.json", [{"id": "a", "conversations": talk("Name a colour.", "Blue.")}])
    write_rows(tmp_path / "silent.json", [{"conversations": talk("Hello?")}, {"conversations": []},
                                          {"conversations": talk("Is it?")}])
    (tmp_path / "link.json").symlink_to(tmp_path / "rows.json")
    given = [f"model.path={tiny}", f"eval.path={tmp_path / 'rows.json'}", "cluster.device=cpu",
             *(word.format(folder=tmp_path) for word in words)]
    assert job_of("evaluate").main(given) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith(f"error: {line.format(folder=tmp_path)}")
    assert errors.count("\n") == 1
