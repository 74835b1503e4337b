"""What a fault leaves of the state, with a second fault soon after the first; and losses that overlap."""

from __future__ import annotations

import pytest

from dhp_ray.simulate.run import RunRecord
from tests.simulate.simulations import QUICK, events_of, run_of, within

SELDOM = ["num_batches=12", "faults.mirror_every_steps='4'", *QUICK]
TWICE = ["num_batches=8", "faults.mirror_every_steps='1'", *QUICK]


def faults(*each: tuple[float, str, int]) -> str:
    words = ", ".join(f"{{time_s: {time_s}, kind: {kind}, rank: {rank}}}" for time_s, kind, rank in each)
    return f"faults.events=[{words}]"


def in_generation(record: RunRecord, number: int, step: int) -> float:
    """A moment in the middle of a generation's step."""
    found = next(one for one in record.steps if one.generation == number and one.step == step)
    return 0.5 * (found.begin_s + found.end_s)


def test_a_generation_copies_the_state_that_it_began_with() -> None:
    first = within(run_of(*SELDOM), 6)
    once = run_of(*SELDOM, faults((first, "worker", 5)))
    assert events_of(once)[0] == "2: worker lost; 7 ranks go on with step 5, 1 steps run again"
    second = in_generation(once, 2, 6)
    record = run_of(*SELDOM, faults((first, "worker", 5), (second, "worker", 1)))
    assert events_of(record)[1] == "3: worker lost; 6 ranks go on with step 5, 1 steps run again"


def test_copies_that_a_fault_cut_off_never_arrive() -> None:
    """Those of step 4 are on their way when the first worker is lost, so both faults go back to step 0."""
    words = [*SELDOM, "faults.copy_s=5"]
    calm = run_of(*words)
    first = within(calm, 5)
    assert calm.steps[3].end_s + 5 > first
    once = run_of(*words, faults((first, "worker", 5)))
    assert events_of(once)[0] == "2: worker lost; 7 ranks go on with step 1, 4 steps run again"
    second = once.steps[0].begin_s + 4.0
    assert second > calm.steps[3].end_s + 5
    assert second < once.steps[0].end_s  # it waits for the copies of the state that it began with
    record = run_of(*words, faults((first, "worker", 5), (second, "worker", 1)))
    assert events_of(record)[1] == "3: worker lost; 6 ranks go on with step 1"


def test_a_lost_node_takes_with_it_who_was_to_return_there() -> None:
    words = ["num_batches=14", "faults.mirror_every_steps='1'", *QUICK, "faults.worker.return_s=5",
             "faults.node.return_s=6"]
    first = within(run_of("faults.mirror_every_steps='1'", *QUICK), 3)
    record = run_of(*words, faults((first, "worker", 5), (first + 4, "node", 4)))
    said = events_of(record)
    assert said[0].startswith("2: worker lost; 7 ranks")
    assert said[1].startswith("3: node lost; 4 ranks")
    assert said[2].startswith("4: 4 join; 8 ranks")
    # also where none of its ranks is there
    each = [(first + 0.1 * rank, "worker", rank) for rank in (4, 5, 6, 7)]
    record = run_of(*words, faults(*each, (first + 4, "node", 4)))
    joined = next(event for event in record.events if "4 join" in event.text)
    assert joined.time_s > first + 4 + 2 + 6


def test_a_fault_strikes_its_node_whatever_the_membership_is() -> None:
    first = within(run_of(*TWICE), 3)
    events = [(first, "worker", 5), (first + 0.1, "worker", 6), (first + 0.2, "worker", 7)]
    record = run_of(*TWICE, faults(*events))
    later = in_generation(record, 2, 4)
    assert events_of(run_of(*TWICE, faults(*events, (later, "node", 4))))[1].startswith("3: node lost; 4 ranks")
    # one that is lost already
    again = [*events, (first + 0.3, "worker", 6), (later, "worker", 6)]
    nobody = run_of(*TWICE, faults(*again))
    assert nobody.steps == record.steps
    assert nobody.events == record.events


def test_a_driver_is_back_once_the_step_has_ended_and_it_was_missed() -> None:
    calm = run_of(*QUICK)
    step = calm.steps[1]
    early = run_of(faults((step.begin_s + 0.01, "driver", 0)), *QUICK)
    assert early.steps[2].begin_s == pytest.approx(max(step.end_s, step.begin_s + 0.01 + 4) + 3, abs=0.1)
    late = run_of(faults((step.end_s - 0.01, "driver", 0)), *QUICK)
    assert late.steps[2].begin_s == pytest.approx(step.end_s - 0.01 + 4 + 3, abs=0.1)


def test_what_strikes_after_the_end_costs_nothing() -> None:
    words = ["duration_s=20", "faults.policy=restart", *QUICK]
    calm = run_of(*words)
    record = run_of(*words, faults((20.5, "worker", 2)))
    assert (record.steps, record.lost, record.events) == (calm.steps, [], [])
    assert record.time_s == 20.0


def test_one_checkpoint_is_written_at_a_time() -> None:
    words = ["faults.checkpoint_every_s=0.001", "faults.stage_s=2", "faults.mirror_every_steps='0'"]
    record = run_of(*words, "faults.write_s=100")
    saved = [event.seconds for event in record.events if event.kind == "checkpoint"]
    assert saved[0] == pytest.approx(2)
    assert all(90 < seconds < 102 for seconds in saved[1:])
    assert record.summary(1.0, 8)["checkpoint_s"] == pytest.approx(sum(saved))
    for_a_time = run_of(*words, "faults.write_s=100", "duration_s=20")
    assert for_a_time.time_s == 20.0


def test_a_fault_ends_the_wait_for_a_checkpoint_which_is_given_up() -> None:
    words = ["faults.checkpoint_every_s=0.001", "faults.stage_s=2", "faults.mirror_every_steps='0'",
             "faults.write_s=100", *QUICK]
    record = run_of(*words, faults((50, "worker", 2)))
    lost = next(event for event in record.events if event.kind == "generation")
    assert lost.text == "2: worker lost; 7 ranks go on with step 1, 2 steps run again"
    assert lost.time_s + lost.seconds == pytest.approx(50 + 3 + 8)


def test_groups_that_break_while_they_form_are_given_up_in_the_end() -> None:
    record = run_of("faults.every_s=0.2", "faults.worker.share=1", "faults.worker.form_s=30",
                    "faults.worker.return_s=0.01", "faults.mirror_every_steps='1'")
    assert "has failed 9 times" in record.error
