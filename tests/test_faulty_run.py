"""What benchmarks/faulty_run.py gives the simulator, and what comes of it."""

import pytest

from benchmarks.faulty_run import KINDS, NODE_AFTER_S, Calibration, Loss, SeenBatches, main, scaled, simulated, times_of
from dhp_ray.planner import CostModel, Sample

COST = CostModel(0.0, 1e-3, 0.0, 0.1, {"intra": 1e9, "inter": 1e9}, latency_s=0.01, fixed_s_by_sync={
    "step": 0.1, "micro_batch": 0.2})
BATCH = tuple(Sample(str(row), 100) for row in range(8))
"""0.4 s on two ranks, 0.8 s on one, and 0.1 s for the step's end."""


def test_the_faults_are_at_even_distances_and_of_both_kinds():
    assert list(times_of(1200.0)) == [(200.0, "worker"), (400.0, "node"), (600.0, "worker"), (800.0, "node"),
                                      (1000.0, "worker")]


def test_all_seconds_of_a_cost_are_scaled_and_no_bandwidth():
    twice = scaled(COST, 2.0)
    assert (twice.linear_s, twice.fixed_s, twice.latency_s) == (2e-3, 0.2, 0.02)
    assert twice.fixed_s_by_sync == {"step": 0.2, "micro_batch": 0.4}
    assert twice.bandwidth_bytes_per_s == COST.bandwidth_bytes_per_s


def test_batches_come_over_and_over():
    longer = (Sample("long", 500), *BATCH)
    batches = SeenBatches([BATCH, longer])
    assert (batches.longest_tokens, batches.longest_step) == (500, 2)
    assert [batches(step) for step in (1, 2, 3)] == [list(BATCH), list(longer), list(BATCH)]


@pytest.mark.parametrize(("seconds", "back_s"), [
    (600.0, 30.0), *(pytest.param(1200.0, back_s, marks=pytest.mark.slow) for back_s in (60.0, 0.0))])
def test_what_faults_cost_a_simulated_run(tmp_path, seconds, back_s):
    """Each takes 2 s to be seen, 3 s to form, and 5 s when the other joins; until then one rank does all the work. A
    step takes 1 s, and 1.8 s on one rank.
    """
    losses = [Loss(kind, 2.0, 3.0, 5.0 + back_s, 5.0) for kind in set(KINDS)]
    calibration = Calibration([BATCH], scaled(COST, 4.0), 0.0, 0.0, 1e6, losses)
    calm, faulty = (simulated(calibration, tmp_path, seconds, with_faults) for with_faults in (False, True))
    assert calm == pytest.approx(400 * seconds, rel=0.01)
    stands_s = 5 * (2 + 3 + 5) + 5 * 2 / 2  # half a step is lost with each fault
    alone_s = 5 * back_s
    assert faulty / calm == pytest.approx((seconds - stands_s - alone_s * (1 - 1 / 1.8)) / seconds, abs=12 / seconds)
    assert seconds / (len(KINDS) + 1) > NODE_AFTER_S


def test_too_short_a_run_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--minutes", "4"])
    assert "--minutes: got 4; allowed: at least 6, so that a lost node is back" in capsys.readouterr().err
