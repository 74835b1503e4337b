"""When what goes wrong: all of it follows from the seed."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest

from dhp_ray.simulate.faults import Fault, faults_of, speeds_of
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


def test_ranks_that_are_slow() -> None:
    assert (speeds_of(FaultSettings(), 8, 0) == 1).all()
    settings = FaultSettings(slow=[Slow(ranks="1,3", speed=0.5), Slow(share=0.25, speed=0.4)])
    speeds = speeds_of(settings, 8, 0)
    assert sorted(speeds / np.where(np.isin(range(8), (1, 3)), 0.5, 1.0)) == [0.4] * 2 + [1.0] * 6
    assert speeds.tolist() == speeds_of(settings, 8, 0).tolist()
