"""Runs that lose workers, have some that stop, lose their driver: they go on, with every sample once and the losses of an undisturbed run."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.soak import SETTINGS
from benchmarks.worlds import data_overrides
from tests.integration.faults import Run, children, expected_ledger, kill, seconds_since
from tests.integration.jobs import ROOT, losses, train

STEPS = 50
"""Of a soak, which are compared with those of an undisturbed run; beyond, rounding alone makes runs on other numbers of ranks differ."""

COMPARED = 24
"""Of the other runs here."""

Start = Callable[..., Run]


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*data_overrides(os.environ.get("DHP_RAY_TEST_DATA", ""), tmp_path_factory.mktemp("data")), *SETTINGS, "cluster.cpus_per_worker=0.2"]


def calm_run(folder: Path, common: list[str], steps: int) -> Path:
    """The folder of a run that nothing happened to."""
    train(folder, *common, f"run.steps={steps}", "cluster.num_workers=2", "checkpoint.every_steps=0")
    return folder


@pytest.fixture(scope="session")
def undisturbed(ray_cluster: None, common: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the first steps of such a run."""
    return losses(calm_run(tmp_path_factory.mktemp("undisturbed") / "run", common, COMPARED))


@pytest.fixture(scope="session")
def reference(ray_cluster: None, common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calm_run(tmp_path_factory.mktemp("reference") / "run", common, STEPS)


@pytest.fixture
def start(ray_cluster: None, common: list[str], tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*arguments: str) -> Run:
        runs.append(Run(tmp_path / "run", *common, "cluster.num_workers=3", "checkpoint.every_steps=0", "run.steps=2000", *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def end(run: Run) -> None:
    """SIGTERM: the step under way is finished, the state saved, one line says how to go on."""
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(90) == 1, run.said()
    (line,) = run.error_lines()
    assert f"stopped after step {run.step}: SIGTERM; the newest checkpoint is step {run.step}: start the same command again" in line
    assert "Traceback" not in run.errors.read_text()
    assert run.generations == sorted(run.generations)


def check(run: Run, undisturbed: list[float]) -> None:
    """Every committed step has its samples, each once; the losses are those of a run that nothing happened to."""
    assert run.ledger == expected_ledger(run.folder, run.step)
    compared = min(run.step, COMPARED)
    assert run.losses[:compared] == pytest.approx(undisturbed[:compared], rel=1e-4)


def test_a_worker_killed_one_stopped_and_the_driver_killed(start: Start, undisturbed: list[float]) -> None:
    run = start()
    run.wait_for_step(4)
    victim, *survivors = run.pids
    moment = kill(victim)
    formed = run.wait_for_event(moment, "generation")
    (lost,) = run.events_after(moment, "worker_lost")
    assert (lost["condition"], lost["pid"], formed["survivors"]) == ("dead", victim, 2)
    assert set(survivors) <= set(run.pids)
    assert seconds_since(run.events_after(moment, "broken")[0], moment) < 3

    run.wait_for_step(run.step + 2)
    stopped = run.pids[-1]
    os.kill(stopped, signal.SIGSTOP)
    moment = time.time()
    noticed = run.wait_for_event(moment, "broken", timeout_s=60)
    assert seconds_since(noticed, moment) < 10 + 5  # hang_s, and as much as an answer may take on a busy machine
    formed = run.wait_for_event(moment, "generation", timeout_s=60)
    assert stopped not in run.pids
    assert {event["pid"]: event["condition"] for event in run.events_after(moment, "worker_lost")} == {stopped: "silent"}

    run.wait_for_step(formed["step"])
    (driver,) = children("Driver")
    workers, generation = run.pids, run.cluster["generation"]
    moment = kill(driver)
    formed = run.wait_for_event(moment, "generation")
    assert formed["cause"] == "the driver was lost"
    assert formed["generation"] > generation
    assert set(workers) <= set(run.pids)

    run.wait_for_ranks(3)
    end(run)
    check(run, undisturbed)
    again = start(f"run.steps={run.step + 2}")
    assert again.wait() == 0, again.said()
    assert f"resuming after step {run.step - 2}" in again.output.read_text()
    check(again, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "faults", "seed"), [("micro_batch", 6, 1), ("step", 6, 2), ("step", 12, 3)])
def test_a_soak(reference: Path, tmp_path: Path, sync: str, faults: int, seed: int) -> None:
    """Two nodes with two workers each, in a cluster of its own; all kinds of faults, among them a node that is lost and one that comes."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "benchmarks/soak.py", "--sync", sync, "--faults", str(faults), "--seed", str(seed), "--steps", str(STEPS),
                           "--reference", str(reference), "--folder", str(tmp_path)], cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("ok   ends by itself", "ok   ledger: 50 lines", "ok   loss", "node lost", "node added", "driver", "stop"):
        assert words in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["pool", "parent"])
def test_lockstep_goes_on_too(start: Start, undisturbed: list[float], transport: str) -> None:
    run = start("planner.sync=micro_batch", f"comm.transport={transport}")
    run.wait_for_step(4)
    moment = kill(run.pids[1])
    run.wait_for_event(moment, "generation")
    run.wait_for_ranks(3)
    moment = kill(*children("Driver"))
    formed = run.wait_for_event(moment, "generation")
    run.wait_for_step(formed["step"] + 1)
    moment = kill(*run.pids[:2])
    run.wait_for_event(moment, "generation")
    run.wait_for_ranks(3)
    end(run)
    assert not run.events("rollback") or len(run.events("rollback")) == 1  # two of three that hold each other's shards
    check(run, undisturbed)


@pytest.mark.slow
def test_all_workers_but_one_killed(start: Start, undisturbed: list[float]) -> None:
    """The one that is left has its own shard and another's: the third is lost, and the run goes back to the newest checkpoint."""
    run = start("checkpoint.every_steps=3")
    run.wait_for(lambda: run.events("checkpoint"))
    run.wait_for_step(5)
    moment = kill(*run.pids[1:])
    formed = run.wait_for_event(moment, "generation")
    assert formed["survivors"] == 1
    assert formed["version"] is None
    (rollback,) = run.events_after(moment, "rollback")
    assert rollback["step"] == formed["step"] - 1
    assert rollback["step"] % 3 == 0
    run.wait_for_ranks(3)
    end(run)
    check(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("every_steps", [3, 0])
def test_all_workers_killed_at_once(start: Start, undisturbed: list[float], every_steps: int) -> None:
    run = start(f"checkpoint.every_steps={every_steps}")
    run.wait_for_step(5)
    if every_steps:
        run.wait_for(lambda: run.events("checkpoint"))
    victims = run.pids
    moment = kill(*victims)
    formed = run.wait_for_event(moment, "generation")
    assert formed["version"] is None or run.events_after(moment, "broken")[1:]  # on a starved machine the first newcomers may break once more
    lost = [event["pid"] for event in run.events_after(moment, "worker_lost")]
    assert sorted(pid for pid in lost if pid in victims) == sorted(victims)  # each told, and replaced, once
    assert not run.events_after(moment, "newcomer_lost")
    (rollback,) = run.events_after(moment, "rollback")
    assert (rollback["step"] > 0) == bool(every_steps)
    run.wait_for_ranks(3)
    end(run)
    check(run, undisturbed)


@pytest.mark.slow
def test_all_workers_and_the_driver_killed_at_once(start: Start, undisturbed: list[float]) -> None:
    run = start("checkpoint.every_steps=3")
    run.wait_for(lambda: run.events("checkpoint"))
    moment = kill(*run.pids, *children("Driver"))
    run.wait_for_event(moment, "generation", timeout_s=180)
    run.wait_for_ranks(3)
    end(run)
    check(run, undisturbed)


@pytest.mark.slow
def test_a_worker_killed_during_a_checkpoint(start: Start, undisturbed: list[float]) -> None:
    """A save a step: whenever the kill comes, one is under way."""
    run = start("checkpoint.every_steps=1")
    for number in range(2):
        run.wait_for_step(run.step + 2)
        run.wait_for(lambda: any("manifest.json" not in os.listdir(folder) for folder in (run.folder / "checkpoints").iterdir()))
        moment = kill(run.pids[number])
        run.wait_for_event(moment, "generation")
        run.wait_for_ranks(3)
    end(run)
    check(run, undisturbed)
    assert all((folder / "manifest.json").exists() for folder in sorted((run.folder / "checkpoints").iterdir())[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, 0.3, 1.0])
def test_a_worker_killed_during_the_recovery_from_another(start: Start, undisturbed: list[float], pause_s: float) -> None:
    run = start("cluster.num_workers=4", "cluster.cpus_per_worker=0.15", "checkpoint.every_steps=4")
    run.wait_for(lambda: run.events("checkpoint"))
    first, _, third, _ = run.pids
    moment = kill(first)
    time.sleep(pause_s)
    kill(third)
    run.wait_for_event(moment, "generation")
    run.wait_for_ranks(4)
    end(run)
    check(run, undisturbed)


@pytest.mark.slow
def test_a_newcomer_killed_as_it_joins(start: Start, undisturbed: list[float]) -> None:
    run = start()
    run.wait_for_step(3)
    kill(run.pids[2])
    run.wait_for(lambda: len(run.pids) == 2)
    run.wait_for(lambda: len(run.pids) == 3)  # cluster.json is written when all have joined
    moment = kill(run.pids[-1])
    run.wait_for_event(moment, "generation")
    run.wait_for_ranks(3)
    end(run)
    check(run, undisturbed)


@pytest.mark.slow
def test_below_the_minimum_a_run_waits_for_capacity(start: Start, undisturbed: list[float]) -> None:
    run = start("cluster.min_workers=3")
    run.wait_for_step(3)
    survivors = run.pids[1:]
    moment = kill(run.pids[0])
    waiting = run.wait_for_event(moment, "waiting")
    assert (waiting["num_ranks"], waiting["have"]) == (3, 2)
    formed = run.wait_for_event(moment, "generation")
    assert (formed["survivors"], formed["newcomers"]) == (2, 1)
    assert set(survivors) <= set(run.pids)
    assert "2 workers are left, the run needs 3: waiting for capacity" in run.output.read_text()
    run.wait_for_step(formed["step"] + 1)
    end(run)
    check(run, undisturbed)


@pytest.mark.slow
def test_without_mirrors_a_lost_worker_costs_a_rollback(start: Start, undisturbed: list[float]) -> None:
    run = start("elastic.mirror_every_steps=0", "checkpoint.every_steps=4")
    run.wait_for(lambda: run.events("checkpoint"))
    run.wait_for_step(run.step + 1)
    moment = kill(run.pids[1])
    formed = run.wait_for_event(moment, "generation")
    assert formed["version"] is None
    assert formed["step"] % 4 == 1
    assert len(run.events("rollback")) <= 1
    run.wait_for_ranks(3)
    end(run)
    check(run, undisturbed)


@pytest.mark.slow
def test_mirrors_every_few_steps_cost_those_steps_at_most(start: Start, undisturbed: list[float]) -> None:
    run = start("elastic.mirror_every_steps=4")
    run.wait_for_step(11)
    moment = kill(run.pids[1])
    formed = run.wait_for_event(moment, "generation")
    assert formed["version"] is not None
    assert formed["version"] % 4 == 0
    run.wait_for_ranks(3)
    end(run)
    check(run, undisturbed)


@pytest.mark.slow
def test_a_worker_that_runs_out_of_memory_is_replaced(start: Start, undisturbed: list[float]) -> None:
    """It raises in a step, or dies of it: the others go on, and the step that it failed is run again."""
    run = start()
    run.wait_for_step(4)
    victim, survivors = run.pids[1], [run.pids[0], run.pids[2]]
    pages = int(Path(f"/proc/{victim}/statm").read_text().split()[0])
    moment = time.time()
    resource.prlimit(victim, resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
    run.wait_for_event(moment, "generation")
    lost = run.events_after(moment, "worker_lost")
    assert [event["pid"] for event in lost] == [victim]
    assert lost[0]["condition"] in ("raised", "dead")
    print(lost)
    assert set(survivors) <= set(run.pids)
    run.wait_for_ranks(3)
    end(run)
    check(run, undisturbed)


@pytest.mark.slow
def test_a_worker_slowed_from_outside_gets_less_until_it_is_well_again(start: Start) -> None:
    """It runs a third of the time. Two workers, so that nobody's share of the machine's cores is taken by a third."""
    run = start("cluster.num_workers=2", "batch.global_samples=18", "elastic.evict_below=0")
    run.wait_for_step(6)
    victim, slow = run.pids[1], threading.Event()
    slow.set()

    def duty_cycle() -> None:
        while slow.is_set():
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.1)
            os.kill(victim, signal.SIGCONT)
            time.sleep(0.05)

    begun = run.step
    cycle = threading.Thread(target=duty_cycle)
    cycle.start()
    try:
        run.wait_for_step(begun + 9, timeout_s=240)
    finally:
        slow.clear()
        cycle.join()
        os.kill(victim, signal.SIGCONT)
    ended = run.step
    run.wait_for_step(ended + 14, timeout_s=240)
    end(run)
    speeds = {step: planned_speeds(run, step) for step in range(begun, ended + 13)}
    print(begun, ended, speeds)
    assert min(speeds[step][1] for step in range(begun + 1, begun + 8)) < 0.6  # a plan is made a step ahead
    assert all(speeds[step][0] == 1.0 for step in range(begun + 5, ended))
    assert speeds[ended + 12] == (1.0, 1.0)
    assert run.events("slow")
    assert run.events("no_longer_slow")
    assert not run.events("worker_lost")


def planned_speeds(run: Run, step: int) -> tuple[float, ...]:
    """What the plan of a step took the ranks' speeds to be; all nominal where it names none."""
    found = json.loads((run.folder / f"plans/step_{step:06d}.json").read_text())["inputs"]["speeds"]
    return tuple(found) if found else (1.0,) * len(run.pids)
