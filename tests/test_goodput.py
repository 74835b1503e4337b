"""benchmarks/goodput.py: the faults and the slow ranks of its tables."""

from __future__ import annotations

import pytest

from benchmarks.goodput import EVERY_S, SITUATIONS, SYSTEMS, faults_of, known_rate, main
from dhp_ray.simulate.settings import load_simulation


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_a_fault_every_ten_minutes_of_ranks_that_the_cluster_has(system: object) -> None:
    faults = faults_of(system, 300.0)  # type: ignore[arg-type]
    assert [event.time_s for event in faults.events] == [EVERY_S * number for number in range(1, 6)]
    assert [event.kind for event in faults.events] == ["worker", "node"] * 2 + ["worker"]
    assert all(0 <= event.rank < 1024 for event in faults.events)
    assert (faults.mirror_every_steps == "0") == (faults.policy == "restart")


def test_unknown_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert capsys.readouterr().err == "goodput.py: nonsense: no such table; allowed: goodput, stragglers\n"


@pytest.mark.slow
def test_slow_ranks_that_are_known_cost_little_more_than_they_must() -> None:
    """8 ranks, one at 1 / 2.57: seven and a bit of eight is allowed."""
    settings = load_simulation(["cluster.num_ranks=8", "global_samples=96", "num_batches=60", "planning.encoder=group",
                                "model=qwen2_5_vl_3b"])
    rates = SITUATIONS["one rank"]
    kept = known_rate(settings, rates, "dhp") / known_rate(settings, (), "dhp")
    allowed = (7 + 1 / rates[0]) / 8
    assert 0.9 * allowed <= kept <= 1.02 * allowed
