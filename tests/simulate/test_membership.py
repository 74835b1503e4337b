"""Who is struck by a fault, and what those that are left hold, as the driver's own policy reads it."""

from __future__ import annotations

from functools import partial

import pytest

from dhp_ray.runtime.driver.elastic import surviving_state
from dhp_ray.simulate.faults import Fault, Recovery, SimulatedGeneration, held_by
from dhp_ray.simulate.settings import FaultSettings


def test_whom_a_fault_strikes() -> None:
    generation = SimulatedGeneration(1, [0, 1, 2, 4, 5, 9], 4, 0, mirrors=True)
    assert generation.nodes == (0, 0, 0, 1, 1, 2)
    lost_by = partial(Recovery(FaultSettings(), 12, True, lambda size: True, lambda time_s: None).lost_by, generation)
    assert lost_by(Fault(0, "worker", 3 / 6)) == {4}
    assert lost_by(Fault(0, "stopped", 0.999)) == {9}
    assert lost_by(Fault(0, "node", 0.0)) == {0, 1, 2}
    assert lost_by(Fault(0, "driver", 0.0)) == set()
    assert lost_by(Fault(0, "all", 0.0)) == {0, 1, 2, 4, 5, 9}
    # a given one strikes the same worker or node whatever the membership is, and nobody who is not there
    assert lost_by(Fault(0, "worker", slot=4)) == {4}
    assert lost_by(Fault(0, "worker", slot=3)) == set()
    assert lost_by(Fault(0, "node", slot=7)) == {4, 5}
    assert lost_by(Fault(0, "node", slot=12)) == set()


@pytest.mark.parametrize(("lost", "version"), [([], 9), ([0], 7), ([4, 5, 6, 7], 7), ([0, 4], None)])
def test_what_survives(lost: list[int], version: int | None) -> None:
    generation = SimulatedGeneration(3, range(8), 4, 2, mirrors=True)
    generation.newest = 9
    generation.mirrored = [(3, 10.0), (5, 20.0), (7, 30.0), (9, 40.0)]  # the copies of 9 had not arrived by 35
    replica = generation.replica_ranks
    if lost == [0, 4]:
        lost = [0, replica[0]]  # owner and replica
    survivors = [slot for slot in range(8) if slot not in lost]
    state = surviving_state(held_by(survivors, generation, 35.0))
    assert (state.version if state else None) == version
    if version == 7:  # version 5 is the other one that was mirrored; older ones are gone
        assert all(set(versions) <= {5, 7, 8, 9} for found in held_by(survivors, generation, 35.0)
                   for shards in found
                   for versions in shards.versions.values())


def test_without_mirroring_nothing_survives_a_loss() -> None:
    generation = SimulatedGeneration(1, range(4), 2, 0, mirrors=False)
    generation.newest = 3
    assert surviving_state(held_by([0, 1, 2], generation, 9.0)) is None
    assert surviving_state(held_by([0, 1, 2, 3], generation, 9.0)).version == 3  # type: ignore[union-attr]
