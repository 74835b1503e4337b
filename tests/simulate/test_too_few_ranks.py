"""Simulated runs that wait, because too few ranks are left, for those that come back."""

from __future__ import annotations

import pytest

from tests.simulate.simulations import QUICK, events_of, run_of, small, within

SLOW = ("num_batches=22", "faults.slow=[{ranks: '2', speed: 0.1}]", *QUICK)
"""Rank 2 is given up after 20 steps, and is as slow when it returns."""


def test_too_few_wait_for_others() -> None:
    words = ["faults.mirror_every_steps='1'", *QUICK, "faults.min_workers=5"]
    moment = within(run_of(*words), 4)
    record = run_of(*words, f"faults.events=[{{time_s: {moment}, kind: node, rank: 2}}]")
    assert events_of(record)[0].startswith("2: node lost; 8 ranks go on")
    waited = next(event for event in record.events if event.kind == "generation")
    assert waited.time_s + waited.seconds == pytest.approx(moment + 2 + 70)


def test_steps_that_the_ranks_left_do_not_hold_wait_for_others() -> None:
    """Four ranks hold the batches that are next when a node is lost, but not the last one."""
    words = ["faults.mirror_every_steps='1'", *QUICK, "cluster.memory_gib=56.4", "num_batches=12", "global_samples=12",
             "train.activation_checkpointing=false"]
    machine, batches = small(*words).machine, small(*words).batches
    assert [step for step in range(7, 13) if not machine.holds(4, max(sample.num_tokens for sample in batches(step)))
            ] == [12]
    record = run_of(*words, f"faults.events=[{{time_s: {within(run_of(*words), 7)}, kind: node, rank: 2}}]")
    assert events_of(record)[:2] == ["2: node lost; 4 ranks go on with step 7", "3: 4 join; 8 ranks go on with step 11"]
    lost, waited = (event for event in record.events if event.kind == "generation")
    assert lost.seconds < 10 < waited.seconds < 70  # of 70 s until they return, beside four steps
    assert [step.num_ranks for step in record.steps[6:]] == [4, 4, 4, 4, 8, 8]
    assert not record.error


def test_slow_ranks_leave_too_few_behind() -> None:
    """The run waits until they are replaced; another fault meanwhile finds those that stay."""
    words = [*SLOW, "faults.mirror_every_steps='1'", "faults.min_workers=8"]
    record = run_of(*words)
    [left] = [event for event in record.events if "leave" in event.text]
    assert left.text.startswith("2: 1 join and 1 leave, which are slow; 8 ranks go on with step")
    assert left.seconds == pytest.approx(50 + 0.5)
    assert not record.lost
    struck = run_of(*words, f"faults.events=[{{time_s: {left.time_s + 20}, kind: worker, rank: 5}}]")
    [again] = [event for event in struck.events if event.kind == "generation"]
    assert again.text.startswith("2: 1 leave, which are slow and worker lost; 8 ranks go on with step")
    assert again.time_s + again.seconds == pytest.approx(left.time_s + 20 + 1 + 50)
    assert not struck.lost


def test_a_node_is_lost_while_a_slow_rank_of_it_is_replaced() -> None:
    """What was to replace the rank is lost with it."""
    words = [*SLOW, "faults.mirror_every_steps='0'", "faults.min_workers=8"]
    [left] = [event for event in run_of(*words).events if "leave" in event.text]
    struck = run_of(*words, f"faults.events=[{{time_s: {left.time_s + 20}, kind: node, rank: 0}}]")
    [again] = [event for event in struck.events if event.kind == "generation"]
    assert again.time_s + again.seconds == pytest.approx(left.time_s + 20 + 2 + 70 + 8)  # what was saved is loaded
    assert not struck.lost


def test_a_fault_while_a_checkpoint_is_staged_ends_that() -> None:
    words = ["faults.mirror_every_steps='1'", *QUICK, "faults.worker.return_s=1", "faults.checkpoint_every_s=1000"]
    first = within(run_of(*words), 2)
    words[-1] = f"faults.checkpoint_every_s={first + 1}"
    words += ["faults.stage_s=30", "num_batches=12"]
    lost = f"{{time_s: {first}, kind: worker, rank: 2}}"
    saved = next(event for event in run_of(*words, f"faults.events=[{lost}]").events if event.kind == "checkpoint")
    record = run_of(*words, f"faults.events=[{lost}, {{time_s: {saved.time_s + 1}, kind: worker, rank: 5}}]")
    second = [event for event in record.events if event.kind == "generation"][1]
    assert second.seconds == pytest.approx(1 + 2)
    assert second.time_s == pytest.approx(saved.time_s + 1)
    assert not record.error


def test_steps_that_are_run_again_wait_for_the_ranks_that_they_need() -> None:
    words = [*QUICK, "faults.mirror_every_steps='0'", "cluster.memory_gib=55.9", "global_samples=12",
             "train.activation_checkpointing=false"]
    machine, batches = small(*words).machine, small(*words).batches
    held = [machine.holds(4, max(sample.num_tokens for sample in batches(step))) for step in range(1, 6)]
    assert held == [False, False, True, True, True]
    record = run_of(*words, f"faults.events=[{{time_s: {within(run_of(*words), 3)}, kind: node, rank: 2}}]")
    assert not record.error
    assert {step.num_ranks for step in record.steps[:2]} == {8}
    assert len(record.lost) == 2


def test_a_run_for_a_time_ends_while_it_waits() -> None:
    words = [*SLOW, "faults.mirror_every_steps='1'", "faults.min_workers=8"]
    [left] = [event for event in run_of(*words).events if "leave" in event.text]
    record = run_of(*words, f"duration_s={left.time_s + 10}", "faults.every_s=5", "faults.worker.share=1")
    assert record.time_s == left.time_s + 10
    assert sum(event.seconds for event in record.events) <= record.time_s


def test_ranks_that_all_restart_together_keep_slow_ones() -> None:
    record = run_of(*SLOW, "faults.policy=restart", "faults.checkpoint_every_s=1000")
    assert not record.events
    assert {step.num_ranks for step in record.steps} == {8}
