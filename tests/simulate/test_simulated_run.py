"""Runs through many batches: as planned where nothing goes wrong, and what faults, slow ranks and late plans cost."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dhp_ray.simulate.run import SimulatedRun
from tests.simulate.simulations import QUICK, events_of, fresh_run_of, run_of, small, within


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize("planner", ["dhp", "static"])
def test_where_nothing_goes_wrong_steps_take_what_their_plans_say(sync: str, planner: str) -> None:
    record = run_of(f"sync={sync}", "cluster.ranks_per_node=8", "faults.mirror_every_steps='0'", "planning.item_s=0",
                    planner=planner)
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    for step in record.steps:
        assert step.end_s - step.begin_s == pytest.approx(step.predicted_s, abs=1e-9)
        assert step.plan_wait_s == 0.0
    assert record.time_s == record.steps[-1].end_s
    assert record.lost == record.events == []
    assert not record.error


def test_what_goes_as_planned_takes_neither_longer_nor_shorter() -> None:
    simulation = small("sync=micro_batch", "num_batches=2")
    run = SimulatedRun("dhp_paper", simulation.machine, simulation.batches)
    run.simulate()
    assert run.scale.known() == pytest.approx(1.0, rel=1e-9)


def test_the_same_settings_give_the_same_run() -> None:
    words = ["faults=elastic", "faults.every_s=7", "faults.slow=[{share: 0.2, speed: 0.5}]",
             "num_batches=12", "seed=7"]
    first, again, other = run_of(*words), fresh_run_of(*words), run_of(*words[:-1], "seed=4")
    assert (first.steps, first.events, first.lost) == (again.steps, again.events, again.lost)
    assert first.steps != other.steps
    assert events_of(first, "fault")


def test_a_lost_worker_costs_the_running_step_where_every_step_is_mirrored() -> None:
    calm = run_of("faults.mirror_every_steps='1'", *QUICK)
    moment = calm.steps[3].begin_s + 0.5 * (calm.steps[3].end_s - calm.steps[3].begin_s)
    words = [f"faults.events=[{{time_s: {moment}, kind: worker, rank: 5}}]", *QUICK]
    record = run_of("faults.mirror_every_steps='1'", *words)
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert record.steps[2] == calm.steps[2]
    assert record.lost == []
    assert events_of(record)[0] == "2: worker lost; 7 ranks go on with step 4"
    assert [step.num_ranks for step in record.steps[3:5]] == [7, 7]
    assert record.steps[3].begin_s == pytest.approx(moment + 3, abs=0.1)  # seen, formed; no plan was there
    assert record.steps[3].generation == 2


def test_the_state_is_copied_again_after_a_time_with_one_rank() -> None:
    two = ["cluster.num_ranks=2", "cluster.ranks_per_node=1", "faults.mirror_every_steps='1'", "num_batches=14",
           "global_samples=12", *QUICK, "faults.worker.return_s=5"]
    step_s = run_of(*two).steps[0].end_s
    first = f"{{time_s: {1.5 * step_s}, kind: worker, rank: 1}}"
    later = run_of(*two, f"faults.events=[{first}]").steps[11]
    second = f"{{time_s: {(later.begin_s + later.end_s) / 2}, kind: worker, rank: 1}}"
    record = run_of(*two, f"faults.events=[{first}, {second}]")
    words = events_of(record)
    assert words[0] == "2: worker lost; 1 rank goes on with step 2"
    assert ["join" in text for text in words[:3]] == [False, True, False]
    assert not any("run again" in text for text in words)
    assert record.lost == []


def test_without_copies_a_lost_worker_takes_all_back_to_the_checkpoint() -> None:
    calm = run_of("faults.mirror_every_steps='0'", *QUICK)
    moment = calm.steps[4].begin_s + 0.1
    fault = f"faults.events=[{{time_s: {moment}, kind: worker, rank: 0}}]"
    record = run_of("faults.mirror_every_steps='0'", fault, *QUICK)
    assert events_of(record)[0] == "2: worker lost; 7 ranks go on with step 1, 4 steps run again"
    assert [step.step for step in record.lost] == [1, 2, 3, 4]
    assert record.steps[0].begin_s == pytest.approx(moment + 3 + 8, abs=0.1)  # and the checkpoint is loaded
    fault = f"faults.events=[{{time_s: {calm.steps[3].begin_s + 0.1}, kind: worker, rank: 0}}]"  # step 4 is not saved
    saved = run_of("faults.mirror_every_steps='0'", fault, *QUICK, f"faults.checkpoint_every_s={calm.steps[1].end_s}")
    assert events_of(saved, "checkpoint")[0] == "after step 2"
    assert "go on with step 3" in events_of(saved)[0]
    slow = run_of("faults.mirror_every_steps='0'", fault, *QUICK, f"faults.checkpoint_every_s={calm.steps[1].end_s}",
                  "faults.write_s=100")
    assert "go on with step 1" in events_of(slow)[0]  # what was not whole yet is given up


def test_a_lost_node_is_survived_from_the_other_one() -> None:
    fault = "faults.events=[{time_s: 4, kind: node, rank: 6}]"
    record = run_of("faults.mirror_every_steps='1'", fault, *QUICK)
    assert events_of(record)[0].startswith("2: node lost; 4 ranks go on with step")
    assert not record.lost
    # one step more than the last mirrored one has run, at most
    seldom = run_of("faults.mirror_every_steps='3'", fault, *QUICK)
    assert len(seldom.lost) <= 3


def test_all_lost_at_once_begin_again_from_the_checkpoint() -> None:
    record = run_of("faults.mirror_every_steps='1'", "faults.events=[{time_s: 4, kind: all}]", *QUICK)
    assert events_of(record)[0].startswith("2: all lost; 8 ranks go on with step 1")
    assert record.steps[0].begin_s == pytest.approx(4 + 3 + 6 + 8, abs=0.1)


def test_a_lost_driver_costs_only_time() -> None:
    calm = run_of(*QUICK)
    moment = calm.steps[1].begin_s + 0.01
    record = run_of(f"faults.events=[{{time_s: {moment}, kind: driver}}]", *QUICK)
    assert record.steps[1].end_s == calm.steps[1].end_s  # workers end their step without it
    assert events_of(record) == ["2: driver lost; 8 ranks go on with step 3"]
    assert not record.lost


def test_a_fault_while_the_group_forms_begins_it_anew() -> None:
    first_s = within(run_of("faults.mirror_every_steps='1'", *QUICK), 4)
    faults = ", ".join(f"{{time_s: {first_s + later_s}, kind: worker, rank: {rank}}}"
                       for later_s, rank in ((0, 2), (2.5, 3)))
    record = run_of("faults.mirror_every_steps='1'", f"faults.events=[{faults}]", *QUICK)
    assert events_of(record)[0].startswith("2: worker, worker lost; 6 ranks go on")
    first = next(step for step in record.steps if step.generation == 2)
    assert first.begin_s == pytest.approx(first_s + 2.5 + 3, abs=0.1)


def test_what_was_lost_joins_between_two_steps() -> None:
    words = ["num_batches=14", "faults.mirror_every_steps='1'", *QUICK, "faults.worker.return_s=4"]
    moment = within(run_of(*words), 4)
    record = run_of(*words, f"faults.events=[{{time_s: {moment}, kind: worker, rank: 2}}]")
    assert events_of(record)[1].startswith("3: 1 join; 8 ranks go on with step")
    joined = next(event for event in record.events if "join" in event.text)
    assert joined.seconds == pytest.approx(0.5)
    assert joined.time_s >= moment + 1 + 4
    assert {step.num_ranks for step in record.steps} == {7, 8}


def test_a_restart_needs_all_ranks_and_goes_back() -> None:
    words = ["faults.policy=restart", "faults.checkpoint_every_s=2", "faults.write_s=1", *QUICK]
    calm = run_of(*words)
    moment = within(calm, 5)
    record = run_of(f"faults.events=[{{time_s: {moment}, kind: worker, rank: 2}}]", *words)
    assert events_of(record)[0].startswith("2: worker lost; 8 ranks go on with step")
    restarted = next(event for event in record.events if event.kind == "generation")
    assert restarted.time_s + restarted.seconds == pytest.approx(moment + 1 + 50 + 8)
    assert len(record.lost) >= 1 or "step 1" in events_of(record)[0]
    assert record.time_s > calm.time_s + 59
    assert record.summary(1.0, 8)["steps_run_again"] == len(record.lost)


def test_a_run_that_cannot_go_on_says_why() -> None:
    record = run_of("faults.mirror_every_steps='1'", "faults.events=[{time_s: 6, kind: node, rank: 2}]",
                    "faults.min_workers=8", "faults.node.return_s=0", "faults.node.seen_s=0", "num_batches=3")
    assert not record.error  # it is there again at once
    simulation = small("workload=internvid_videos", "global_samples=4")
    longest = simulation.batches.longest_tokens
    assert not simulation.machine.holds(1, 10**9)
    assert simulation.machine.holds(8, longest)


def test_plans_that_are_late_are_waited_for_or_replaced() -> None:
    late = run_of("planning.item_s=1")  # a minute for a batch
    # what waiting costs is known once the first step is committed, after the second one's plan was taken
    assert [step.late for step in late.steps] == [False] * 2 + [True] * 4
    assert late.steps[0].plan_wait_s > 24
    assert late.summary(1.0, 8)["late_plans"] == 4
    in_time = run_of("planning.item_s=0.001")
    assert [step.late for step in in_time.steps] == [False] * 6


def test_no_batch_is_empty() -> None:
    """A batch whose samples are all longer than what was looked at before the run is replaced."""
    batches = small("global_samples=1", "num_batches=100").batches
    assert all(batches(step) for step in range(1, 101))
    assert batches.left_out


def test_slow_ranks_are_measured_and_given_less() -> None:
    words = ["num_batches=8", "global_samples=48", "faults.mirror_every_steps='0'"]
    slow = run_of(*words, "faults.slow=[{ranks: '3', speed: 0.4}]", planner="dhp")
    calm = run_of(*words, planner="dhp")
    times = [step.end_s - step.begin_s for step in slow.steps]
    usual = [step.end_s - step.begin_s for step in calm.steps]
    assert times[0] > 1.5 * usual[0]  # nobody knows yet
    after = sum(usual[4:]) / sum(times[4:])
    assert after > 0.95 * (7.4 / 8)  # of what the speed that is left allows
    none_told = [time / step.predicted_s for time, step in zip(times, slow.steps)]
    assert none_told[0] > 1.5
    assert max(none_told[4:]) < 1.15


@pytest.mark.slow
def test_a_rank_that_is_far_too_slow_is_replaced_once() -> None:
    record = run_of("num_batches=40", "faults.mirror_every_steps='1'", "faults.slow=[{ranks: '2', speed: 0.1}]", *QUICK)
    assert any("1 leave, which are slow" in text for text in events_of(record))
    assert sum("leave" in text for text in events_of(record)) == 1


def test_a_run_for_a_time() -> None:
    record = run_of("duration_s=20")
    assert record.time_s == 20.0
    assert record.steps[-1].end_s <= 20.0
    summary = record.summary(80 * 2**30, 8)
    assert summary["tokens_per_s"] == pytest.approx(sum(step.num_tokens for step in record.steps) / 20)
    assert 0 < summary["memory_share"] <= 0.9


@pytest.mark.slow
def test_copies_of_the_state_hold_a_step_up_only_where_they_take_longer() -> None:
    assert run_of("faults.mirror_every_steps='1'", "faults.copy_s=0.01").time_s == pytest.approx(
        run_of("faults.mirror_every_steps='0'").time_s, rel=0.02)
    slow = run_of("faults.mirror_every_steps='1'", "faults.copy_s=60")
    assert slow.steps[-1].end_s == pytest.approx(slow.steps[0].end_s + 5 * 60, rel=1e-6)
    seldom = run_of("faults.mirror_every_steps=auto", "faults.copy_s=3")
    assert seldom.time_s < slow.time_s


def test_checkpoints_hold_steps_up() -> None:
    record = run_of("faults.checkpoint_every_s=0.001", "faults.stage_s=2", "faults.mirror_every_steps='0'")
    assert record.time_s == pytest.approx(run_of("faults.mirror_every_steps='0'").time_s + 6 * 2, rel=1e-3)


def test_a_plan_is_taken_before_the_checkpoint() -> None:
    """It may be late though it would come while the state is staged; the step begins once that is done."""
    words = ["planning.item_s=1", "faults.mirror_every_steps='0'"]
    record = run_of(*words, "faults.checkpoint_every_s=0.001", "faults.stage_s=100")
    assert [step.late for step in record.steps] == [False] * 2 + [True] * 4
    assert all(after.begin_s >= before.end_s + 100 for before, after in pairwise(record.steps))


def test_one_plan_is_made_at_a_time() -> None:
    """Also one that nobody waits for any more; a plan that has not even been begun by then is not made."""
    simulation = small("planning.item_s=1")
    dispatcher = SimulatedRun("dhp", simulation.machine, simulation.batches).dispatcher
    even = (1.0,) * 8
    first = dispatcher.begin(1, simulation.batches(1), even, 0.0)
    assert first.begun_s == 0.0
    assert dispatcher.take(first, 1.0, 1.0).late
    second = dispatcher.begin(2, simulation.batches(2), even, 4.0)
    assert second.begun_s == first.planned_s > 24
    assert dispatcher.take(second, 5.0, 1.0).late
    third = dispatcher.begin(3, simulation.batches(3), even, 8.0)
    assert third.begun_s == first.planned_s
    assert not dispatcher.take(third, third.planned_s - 0.005, 1.0).late


def test_static_too_encodes_images_apart() -> None:
    apart, inside = (run_of(*words, planner="static").first for words in (["planning.encoder=world"], []))
    assert apart is not None
    assert inside is not None
    assert apart.plan.vision.apart
    assert not inside.plan.vision.apart


def test_given_tokens_hold_after_a_fault_too() -> None:
    longest = small().batches.longest_tokens
    given, auto = (small(f"train.tokens_per_rank={tokens}").machine for tokens in (longest // 8 + 1, "auto"))
    assert given.holds(8, longest)
    assert not given.holds(4, longest)
    assert auto.holds(4, longest)
