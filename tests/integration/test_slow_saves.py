"""A storage that takes longer for a checkpoint than the run does until the next one."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest

from tests.data.samples import picture, talk, write_rows
from tests.integration.jobs import lines, losses, train

SETTINGS = ["data=llava", "cluster.device=cpu", "cluster.num_workers=2", "planner.tokens_per_rank=256",
            "batch.global_samples=2", "train.min_learning_rate_ratio=1", "elastic.evict_below=0", "run.steps=24",
            "checkpoint.every_steps=8", "comm.timeout_s=20"]

SLOW_S = 25.0
"""Longer than a rank may stand still by default (`elastic.hang_s`, 10 seconds), and than a collective may take here."""


@pytest.mark.slow
def test_ranks_that_wait_for_a_slow_checkpoint_are_not_stuck(ray_cluster: None, tmp_path: Path) -> None:
    """Rank 0's file of the first checkpoint is a pipe: opening it takes until somebody reads. (It then fails, since a
    pipe has no positions.)
    """
    (tmp_path / "a.png").write_bytes(picture(84, 56))
    rows = [{"id": f"row-{number}", "image": "a.png", "conversations": talk("<image>\nWhat is it?", f"Thing {number}.")}
            for number in range(12)]
    run_dir = tmp_path / "run"
    folder = run_dir / "checkpoints/step_000008/generation_1"

    def slow() -> None:
        while not lines(run_dir, "events.jsonl"):  # a run that begins deletes what it finds of checkpoints
            time.sleep(0.02)
        folder.mkdir(parents=True)
        os.mkfifo(folder / "__0_0.distcp")
        while len(losses(run_dir)) < 15:  # the next save is that of step 16
            time.sleep(0.05)
        time.sleep(SLOW_S)
        (folder / "__0_0.distcp").read_bytes()

    threading.Thread(target=slow, daemon=True).start()
    ended = train(run_dir, f"data.path={write_rows(tmp_path / 'rows.json', rows)}", *SETTINGS)
    assert "checkpoint not saved (rank 0): step 8: " in ended.output
    assert re.search(r"waiting for the checkpoint of step 8: \d+ s so far", ended.output)
    assert [event["kind"] for event in lines(run_dir, "events.jsonl")
            if event["kind"] in ("broken", "worker_lost", "generation")] == []
    assert len(losses(run_dir)) == 24
    assert [event["step"] for event in lines(run_dir, "events.jsonl") if event["kind"] == "checkpoint"] == [16, 24]
