"""When what goes wrong: all of it follows from the seed."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest

from dhp_ray.simulate.faults import Fault, Speeds, faults_of
from dhp_ray.simulate.settings import Event, FaultKind, FaultSettings, Slow


def test_faults_come_at_random_as_often_as_told() -> None:
    settings = FaultSettings(every_s=600, worker=FaultKind(share=3), node=FaultKind(share=1))
    found = list(islice(faults_of(settings, 0), 4000))
    gaps = [after.time_s - before.time_s for before, after in pairwise(found)]
    assert np.mean(gaps) == pytest.approx(600, rel=0.05)
    assert np.std(gaps) == pytest.approx(600, rel=0.08)  # as independent ones do
    counts = Counter(fault.kind for fault in found)
    assert counts["worker"] / counts["node"] == pytest.approx(3, rel=0.1)
    assert set(counts) == {"worker", "node"}
    assert found == list(islice(faults_of(settings, 0), 4000))
    assert found[0] != next(faults_of(settings, 1))


def test_given_faults_come_in_between() -> None:
    events = [Event(time_s=50, kind="all"), Event(time_s=10, kind="node", rank=3)]
    assert list(faults_of(FaultSettings(events=events), 0)) == [Fault(10.0, "node", slot=3), Fault(50.0, "all", slot=0)]
    both = list(islice(faults_of(FaultSettings(events=events, every_s=20, worker=FaultKind(share=1)), 0), 12))
    assert [fault.time_s for fault in both] == sorted(fault.time_s for fault in both)
    assert {"node", "all", "worker"} == {fault.kind for fault in both}


def test_ranks_are_slow_in_their_steps() -> None:
    speeds = Speeds(FaultSettings(slow=[Slow(ranks="1,3", speed=0.5, first_step=3, last_step=4), Slow(share=0.25,
                                                                                                 speed=0.5)]), 8, 0)
    assert not speeds.even
    at_first, in_between = speeds.at(1), speeds.at(3)
    assert sorted(at_first.tolist()) == [0.5] * 2 + [1.0] * 6
    assert in_between.tolist() == [speed * (0.5 if rank in (1, 3) else 1) for rank, speed in enumerate(at_first)]
    assert speeds.at(5).tolist() == at_first.tolist()
    assert speeds.stretch(1, 1, 4) is None


def test_speeds_and_packs_spread() -> None:
    assert Speeds(FaultSettings(), 8, 0).even
    speeds = Speeds(FaultSettings(spread=0.1, noise=0.2), 4000, 0)
    assert np.log(speeds.at(1)).std() == pytest.approx(0.1, rel=0.05)
    assert speeds.at(1).tolist() == speeds.at(9).tolist()
    stretch = speeds.stretch(5, 5, 4000)
    assert stretch is not None
    assert np.log(stretch).std() == pytest.approx(0.2, rel=0.05)
    assert stretch.tolist() == speeds.stretch(5, 5, 4000).tolist()  # type: ignore[union-attr]
    assert stretch.tolist() != speeds.stretch(5, 6, 4000).tolist()  # type: ignore[union-attr]  # run again
