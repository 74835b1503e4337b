"""TensorBoard itself, started on a run's files, looked at in a browser without a window."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dhp_ray.config import load
from dhp_ray.runtime.driver.commit import step_metrics
from dhp_ray.runtime.records.tensorboard import ScalarLog, StepPictures, cluster_text
from dhp_ray.storage import Folder
from tests.report.browser import open_page
from tests.report.runs import plan_of, results_of

EXTRA = {"applied": True, "epoch": 0, "num_valid_tokens": 80, "data_wait_s": 0.01, "lower_bound_s": 0.3,
         "prefetch_wait_s": 0.0, "pool_hits": 5}


def write_events(folder: Path) -> None:
    log, watch = ScalarLog(Folder(str(folder / "tensorboard")), 1), StepPictures(Folder(str(folder)), 4)
    log.text("configuration", "```yaml\nseed: 0\n```")
    log.text("cluster", cluster_text([{"rank": 0, "pid": 1, "node_id": "a", "device": "cpu"}]))
    log.hyperparameters(load([]))
    for step in range(1, 9):
        plan = plan_of(step)
        results = results_of(plan, step)
        log.step(step_metrics(plan, results, 0.5, 1.0, 1), EXTRA)
        watch.step(step, plan, results, log)
        watch.close()
    log.close()


@pytest.mark.slow
def test_tensorboard_shows_a_run(tmp_path: Path) -> None:
    """The screenshot goes to DHP_RAY_TEST_ARTIFACTS where that names a folder, else to the test's own."""
    write_events(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("tensorboard")), "--logdir", str(tmp_path / "tensorboard"), "--host",
               "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"{address}/data/plugin/images/tags") as answer:
                    if b"plan/planned_and_measured" in answer.read():
                        break
            except (urllib.error.URLError, ConnectionError):
                pass
            assert time.monotonic() < deadline, "TensorBoard does not answer"
            time.sleep(0.5)
        picture = Path(os.environ.get("DHP_RAY_TEST_ARTIFACTS", tmp_path)) / "tensorboard.png"
        document = open_page(f"{address}/#timeseries", tmp_path / "profile", picture, patience_ms=30_000, height=2400)
    finally:
        server.terminate()
        server.wait(20)
    # the first cards of the page; others wait until they are scrolled to
    for tag in ("balance/", "elastic/", "loss/", "plan/"):
        assert tag in document or tag.rstrip("/") in document, tag
    shown = np.asarray(Image.open(picture).convert("RGB"))
    assert (shown.max(axis=2).astype(int) - shown.min(axis=2) > 60).mean() > 0.003, "curves are drawn"
