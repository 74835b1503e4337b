"""Who is struck by a fault, and what those that are left hold, as the driver's own policy reads it."""

from __future__ import annotations

import pytest

from dhp_ray.runtime.driver.elastic import surviving_state
from dhp_ray.simulate.faults import Fault
from dhp_ray.simulate.membership import generation_of, held_by


def test_whom_a_fault_strikes() -> None:
    generation = generation_of(1, [0, 1, 2, 4, 5, 9], 4, 0, mirrors=True)
    assert generation.nodes == (0, 0, 0, 1, 1, 2)
    assert generation.struck(Fault(0, "worker", 3 / 6)) == {4}
    assert generation.struck(Fault(0, "stopped", 0.999)) == {9}
    assert generation.struck(Fault(0, "node", 0.0)) == {0, 1, 2}
    assert generation.struck(Fault(0, "driver", 0.0)) == set()
    assert generation.struck(Fault(0, "all", 0.0)) == {0, 1, 2, 4, 5, 9}


@pytest.mark.parametrize(("lost", "version"), [([], 9), ([0], 7), ([4, 5, 6, 7], 7), ([0, 4], None)])
def test_what_survives(lost: list[int], version: int | None) -> None:
    generation = generation_of(3, range(8), 4, 2, mirrors=True)
    generation.newest = 9
    generation.mirrored = [(3, 10.0), (5, 20.0), (7, 30.0), (9, 40.0)]  # the copies of 9 had not arrived by 35
    replica = generation.replica_ranks()
    if lost == [0, 4]:
        lost = [0, replica[0]]  # owner and replica
    survivors = [slot for slot in range(8) if slot not in lost]
    state = surviving_state(held_by(survivors, [generation], 35.0))
    assert (state.version if state else None) == version
    if version == 7:  # version 5 is the other one that was mirrored; older ones are gone
        held = held_by(survivors, [generation], 35.0)
        assert all(set(versions) <= {5, 7, 8, 9} for found in held for shards in found
                   for versions in shards.versions.values())


def test_the_state_before_counts_until_a_step_has_been_taken() -> None:
    before = generation_of(1, range(4), 2, 0, mirrors=True)
    before.newest, before.mirrored = 5, [(5, 1.0)]
    now = generation_of(2, [0, 1, 2], 2, 5, mirrors=True)  # nothing is mirrored yet
    assert surviving_state(held_by([0, 1], [now], 9.0)) is None
    state = surviving_state(held_by([1, 2], [now, before], 9.0))
    assert state is None or state.version == 5


def test_without_mirroring_nothing_survives_a_loss() -> None:
    generation = generation_of(1, range(4), 2, 0, mirrors=False)
    generation.newest = 3
    assert surviving_state(held_by([0, 1, 2], [generation], 9.0)) is None
    assert surviving_state(held_by([0, 1, 2, 3], [generation], 9.0)).version == 3  # type: ignore[union-attr]
