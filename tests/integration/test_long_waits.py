"""A run that waits for CPUs and for a rank that stands still; one that need not, though its workers reserve every CPU.
"""

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
    train(tmp_path / "run", *common, "cluster.num_workers=2", every_cpu, "run.steps=6", "checkpoint.every_steps=0")
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
    said_before, kept_before = run.output.read_text().count("waiting for "), len(run.events("wait"))
    run.wait_for(lambda: run.output.read_text().count("waiting for ") > said_before)
    os.kill(stopped, signal.SIGCONT)
    run.wait_for(lambda: len(run.events("wait")) > kept_before)
    run.wait_for_step(run.step + 2)
    waits = run.events("wait")
    assert "room for 3 workers" in [wait["what"] for wait in waits[:kept_before]]
    held_up = waits[kept_before]  # a step, or the images or copies of one: wherever the ranks were just then
    assert held_up["seconds"] >= 10
    assert " step " in f" {held_up['what']} "
    assert f"waited {held_up['seconds']:.0f} s for {held_up['what']}" in run.output.read_text()
    end(run)
