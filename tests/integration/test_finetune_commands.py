"""The commands of docs/fine-tuning.md, with a small folder of each family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

from tests.data.samples import picture
from tests.integration.jobs import losses
from tests.integration.test_families import write
from tests.packs import PATCH_DIMS
from tests.readme import ROOT, section

pytestmark = pytest.mark.slow
NUM_ROWS = 40
COMMANDS = section("Fine-tune a Hugging Face model").partition("```\n")[2].partition("```")[0].splitlines()


def test_the_first_three_set_up_a_checkout() -> None:
    assert [command.split()[0] for command in COMMANDS] == ["git", "make", ".", "python", "python"]
    assert COMMANDS[1:3] == ["make train", ". .venv/bin/activate"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("preset", PATCH_DIMS)
def test_the_others_train_each_family(preset: str, tmp_path: Path) -> None:
    for name in ("jobs", "conf", "dhp_ray"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my" / "images").mkdir(parents=True)
    write(tmp_path / "runs" / "default" / "model", preset)
    rows = []
    for number in range(NUM_ROWS):
        (tmp_path / "my" / "images" / f"{number}.png").write_bytes(picture(60 + 9 * number, 400 - 8 * number))
        asked = {"from": "human", "value": f"<image>\nWhat is number {number}?"}
        rows.append({"id": str(number), "image": f"images/{number}.png",
                     "conversations": [asked, {"from": "gpt", "value": "A cat on a red mat."}]})
    (tmp_path / "my" / "chat.json").write_text(json.dumps(rows))
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    for command in COMMANDS[3:]:
        done = subprocess.run([sys.executable, *command.split()[1:]], cwd=tmp_path, env=alone, text=True,
                              capture_output=True, timeout=300)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    folder = tmp_path / "runs" / "mine"
    assert len(losses(folder)) == NUM_ROWS // 16 + 1
    assert (folder / "skipped.jsonl").read_text() == ""
    assert (folder / "report.html").exists()
    AutoModelForImageTextToText.from_pretrained(folder / "model")
