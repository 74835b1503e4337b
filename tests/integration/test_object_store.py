"""Runs on an S3 server: trained, killed with everything that it had on this machine, resumed from there on a fresh
disk; buckets that cannot be used.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from dhp_ray.storage import Folder
from tests.data.samples import talk, write_rows
from tests.integration.jobs import ROOT, command, losses, refused, run


def fresh_disk() -> dict[str, str]:
    """An environment whose temporary files, caches and Ray sessions lie in a new folder. Its name is short: Ray puts
    sockets there.
    """
    disk = tempfile.mkdtemp(prefix="disk_")
    return {"TMPDIR": disk, "RAY_TMPDIR": disk, "DHP_RAY_CACHE": f"{disk}/cache", "HOME": disk}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_trained_killed_and_resumed_from_the_bucket(object_store: str, tmp_path: Path) -> None:
    folder = Folder(f"s3://bucket/{tmp_path.name}/run{object_store}")
    data = tmp_path / "synthetic.parquet"
    assert run("prepare_data.py", f"data.path={data}", "data.synthetic.num_samples=48",
               "data.synthetic.max_tokens=700", "data.synthetic.long_median_tokens=500").status == 0
    arguments = [f"data.path={data}", "cluster.num_workers=2", "planner.tokens_per_rank=400", "batch.global_samples=4",
                 "run.steps=16", "checkpoint.every_steps=3"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}

    disks = [fresh_disk() for _ in range(3)]
    try:
        whole = subprocess.run(command("train.py", f"run.dir={tmp_path / 'whole'}", *arguments), cwd=ROOT,
                               env=environment | disks[0], text=True,
                               capture_output=True, timeout=400, check=False)
        assert whole.returncode == 0, whole.stdout + whole.stderr

        killed = subprocess.Popen(command("train.py", f"run.dir={folder.uri}", *arguments), cwd=ROOT,
                                  env=environment | disks[1],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            deadline = time.monotonic() + 300
            while not any("manifest" in name for step in folder.names("checkpoints")
                          for name in folder.names(f"checkpoints/{step}")):
                assert killed.poll() is None, "ended before its first checkpoint"
                assert time.monotonic() < deadline
                time.sleep(0.2)
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
            killed.wait()
        assert not folder.exists("model")
        shutil.rmtree(disks[1]["TMPDIR"], ignore_errors=True)

        resumed = subprocess.run(command("train.py", f"run.dir={folder.uri}", *arguments), cwd=ROOT,
                                 env=environment | disks[2], text=True, capture_output=True,
                                 timeout=400, check=False)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert "resuming after step" in resumed.stdout
    finally:
        for disk in disks:
            shutil.rmtree(disk["TMPDIR"], ignore_errors=True)

    metrics = [json.loads(line) for line in folder.read("metrics.jsonl").decode().splitlines()]
    ledger = folder.read("ledger.jsonl").decode()
    assert [line["step"] for line in metrics] == list(range(1, 17))
    assert ledger == (tmp_path / "whole" / "ledger.jsonl").read_text()
    assert [line["loss"] for line in metrics] == pytest.approx(losses(tmp_path / "whole"), rel=2e-3)
    assert "model.safetensors" in folder.names("model")
    assert folder.names("tensorboard")
    assert run("report.py", f"run.dir={folder.uri}").status == 0
    assert folder.exists("report.html")


@pytest.mark.slow
def test_a_bucket_without_permission_is_one_line(ray_cluster: None, object_store: str, tmp_path: Path) -> None:
    """Its policy denies what writes an object; the server calls the start of an upload in parts by its method,
    PostObject.
    """
    rows = write_rows(tmp_path / "rows.json", [{"id": "colour", "conversations": talk("Name a colour.", "Red.")}])
    denied = {"Effect": "Deny", "Principal": "*", "Action": ["s3:PutObject", "s3:PostObject"],
              "Resource": "arn:aws:s3:::closed/*"}
    address = f"http://{object_store.partition('endpoint_override=')[2].partition('&')[0]}/closed"
    for url, body in ((address, None),
                      (f"{address}?policy", json.dumps({"Version": "2012-10-17", "Statement": [denied]}).encode())):
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="PUT")
        urllib.request.urlopen(request).close()
    line = refused(1, f"run.dir=s3://test:secret@closed/run{object_store}", "data=llava", f"data.path={rows}",
                   "cluster.num_workers=1")
    assert line.startswith("error: run.dir: s3://***@closed/run/")
    assert "cannot be written" in line
    assert "ACCESS_DENIED" in line
    assert "secret" not in line


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_one_line(object_store: str, tmp_path: Path) -> None:
    data = tmp_path / "synthetic.parquet"
    assert run("prepare_data.py", f"data.path={data}", "data.synthetic.num_samples=16").status == 0
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | fresh_disk()
    done = subprocess.run(command("train.py", f"run.dir=s3://absent/run{object_store}", f"data.path={data}",
                                  "cluster.num_workers=1"), cwd=ROOT, env=environment, text=True,
                          capture_output=True, timeout=200, check=False)
    shutil.rmtree(environment["TMPDIR"], ignore_errors=True)
    assert done.returncode == 1, done.stdout + done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "s3://absent/run" in said[0]
    assert "Traceback" not in done.stdout + done.stderr
