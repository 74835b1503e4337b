"""Runs that have to wait: for CPUs, for a rank that stands still; and runs that need not, though their workers reserve every CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from tests.integration.faults import Start, end
from tests.integration.jobs import ledger, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def test_workers_that_reserve_every_cpu_train(common: list[str], tmp_path: Path) -> None:
    every_cpu = f"cluster.cpus_per_worker={ray.cluster_resources()['CPU'] / 2:g}"
    train(tmp_path / "run", *common, "cluster.num_workers=2", every_cpu, "run.steps=6", "eval.every_steps=0", "checkpoint.every_steps=0")
    assert len(ledger(tmp_path / "run")) == 6


@pytest.fixture
def others() -> Iterator[PlacementGroup]:
    """Somebody else has every CPU."""
    reserved = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    assert reserved.wait(30)
    yield reserved
    remove_placement_group(reserved)


def test_a_long_wait_is_said_while_it_lasts_and_kept_with_its_length(others: PlacementGroup, start: Start) -> None:
    run = start("cluster.start_timeout_s=120", "elastic.hang_s=600")
    run.wait_for(lambda: "waiting for room for 3 workers: 1" in run.output.read_text())
    remove_placement_group(others)
    run.wait_for_step(4, timeout_s=240)

    stopped = run.pids[1]
    os.kill(stopped, signal.SIGSTOP)
    run.wait_for(lambda: "waiting for step" in run.output.read_text() or "waiting for the copies" in run.output.read_text())
    os.kill(stopped, signal.SIGCONT)
    run.wait_for_step(run.step + 2)
    waits = run.events("wait")
    assert waits[0]["what"] in ("the Ray cluster", "room for 3 workers")
    assert {wait["what"].split(" ")[0] for wait in waits} >= {"room"}
    (held_up,) = [wait for wait in waits if wait["what"].startswith(("step", "the copies"))][-1:]
    assert held_up["seconds"] >= 10
    assert f"waited {held_up['seconds']:.0f} s for {held_up['what']}" in run.output.read_text()
    end(run)
