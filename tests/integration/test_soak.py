"""Six faults and more over one short run, on nodes of a cluster of its own; benchmarks/soak.py has the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.faults import COMPARED
from tests.integration.jobs import ROOT, lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize(("sync", "faults", "seed"), [("step", 6, 2), ("micro_batch", 6, 1), ("step", 12, 3)])
def test_a_soak(reference: Path, tmp_path: Path, sync: str, faults: int, seed: int) -> None:
    soak(reference, tmp_path, sync, faults, seed)


def test_a_soak_with_images_encoded_apart(reference: Path, tmp_path: Path) -> None:
    soak(reference, tmp_path, "step", 6, 4, encoder="world")
    plans = [json.loads(path.read_text()) for path in (tmp_path / "soak" / "plans").iterdir()]
    layouts = {plan["vision"]["layout"] for plan in plans if any(group["encoders"] for group in plan["groups"])}
    assert layouts == {"world"}


def test_a_soak_with_experts_that_two_ranks_share(tmp_path: Path) -> None:
    soak(None, tmp_path, "micro_batch", 6, 1, "auto", "model=tiny_qwen3_vl_moe", "train.expert_parallel=2")


def soak(
    reference: Path | None, tmp_path: Path, sync: str, faults: int, seed: int, encoder: str = "auto",
    *overrides: str
) -> str:
    """Two nodes with two workers each, in a cluster of its own; all kinds of faults, among them a node that is lost and
    one that comes. `reference` None: an undisturbed run is made. Returns what the soak printed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "benchmarks/soak.py", "--sync", sync, "--faults", str(faults), "--seed",
                           str(seed), "--steps", str(COMPARED), "--encoder", encoder,
                           *(["--reference", str(reference)] if reference else []), "--folder", str(tmp_path),
                           *overrides], cwd=ROOT, env=environment,
                          text=True, capture_output=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("ok   ends by itself", f"ok   ledger: {COMPARED} lines", "ok   loss", "node lost", "node added",
                  "driver", "stop"):
        assert words in done.stdout
    events = EventAccumulator(str(tmp_path / "soak/tensorboard")).Reload()
    formed = [event for event in lines(tmp_path / "soak", "events.jsonl") if event["kind"] == "generation"]
    shown = {point.step: point.value for point in events.Scalars("elastic/recovery_s")}
    assert shown[formed[-1]["step"]] == pytest.approx(formed[-1]["seconds"], abs=1e-3)
    assert formed[-1]["cause"] in events.Tensors("events")[-1].tensor_proto.string_val[0].decode()
    return done.stdout
