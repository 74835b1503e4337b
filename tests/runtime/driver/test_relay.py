"""Relays against real actors: who is called with what, in which order, and what is known while some have not answered.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from dhp_ray.data.blocks import BlockOrigin
from dhp_ray.planner.plan.types import Pack, RankPlan, Sample
from dhp_ray.runtime.driver import calls as relay_module
from dhp_ray.runtime.driver.calls import Calls, Relay, shares
from dhp_ray.runtime.driver.group import WorkerGroup, WorkerHandle
from dhp_ray.runtime.messages import GroupError, Status
from dhp_ray.runtime.rank_slices import RowIndex, unpacked_slice


class Actor:
    """Notes what it is called with."""

    def __init__(self, rank: int) -> None:
        self.rank, self.noted = rank, list[Any]()

    def describe(self, device: str, probe: str) -> dict[str, Any]:
        return {"pid": os.getpid(), "node_id": "node"}

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        """As of a worker: a mark is never empty, and time counts from when a look first finds it."""
        return Status(mark_id="run 1")

    @ray.method(concurrency_group="prefetch")
    def prefetch(self, packed: bytes, references: list[ray.ObjectRef]) -> dict[str, str]:
        plan, blocks = unpacked_slice(packed, references)
        assert plan.rank == self.rank
        return {block.origin.node: f"{ray.get(block.reference[0])} {block.rows}" for block in blocks}

    def save(self, step: int) -> None:
        self.noted.append(("save", step))
        time.sleep(0.05)

    def run(self, step: int) -> int:
        self.noted.append(("run", step))
        return self.rank

    def sleep(self, seconds: list[float]) -> float:
        time.sleep(seconds[self.rank])
        return seconds[self.rank]

    def refuse(self, rank: int) -> None:
        if rank == self.rank:
            raise ValueError(f"rank {rank} says no")

    def told(self) -> list[Any]:
        return self.noted


@pytest.fixture(scope="module")
def ranks(ray_cluster: None) -> Iterator[WorkerGroup]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the cluster's processes do not import tests
    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1, "prefetch": 1})(Actor)
    group = WorkerGroup([WorkerHandle(slot, actor.remote(slot)) for slot in range(3)])
    group.describe("cpu", "")
    group.look_s = 0.2
    yield group
    group.close_relays()
    for member in group.members:
        ray.kill(member.actor)


@pytest.fixture
def group(ranks: WorkerGroup) -> WorkerGroup:
    """Three ranks, of which one relay calls the first and another one two."""
    if ranks._relays is None:
        ranks.open_relays(2)
    return ranks


@pytest.mark.parametrize(("num_ranks", "most", "num_shares"), [(4, 4, 1), (5, 4, 2), (5, 2, 3), (4096, 256, 16)])
def test_shares_are_few_and_even(num_ranks: int, most: int, num_shares: int) -> None:
    found = shares(num_ranks, most)
    assert [rank for ranks in found for rank in ranks] == list(range(num_ranks))
    assert max(map(len, found)) <= most
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert len(found) == num_shares


def test_answers_come_by_rank_two_references_for_three(group: WorkerGroup) -> None:
    calls = group.start("run", 1)
    assert len(calls) == 2
    assert group.collect(calls) == [0, 1, 2]
    assert group.start("run", 2).answers() == [0, 1, 2]


def test_each_rank_has_its_own_slice_and_the_blocks_that_it_needs(group: WorkerGroup) -> None:
    blocks = [ray.put(word) for word in ("first", "second", "third")]
    index = RowIndex({name: (blocks[place], row) for name, (place, row) in
                      {"a": (1, 5), "b": (0, 0), "c": (1, 2), "d": (2, 4)}.items()},
                     {block: BlockOrigin(f"node {number}") for number, block in enumerate(blocks, 1)})
    packs = [Pack((), (), 1.0, index=number, samples=tuple(Sample(name, 1) for name in names))
             for number, names in enumerate(("ab", "cd", "c"))]
    slices = [RankPlan(1, 0, (), ()), RankPlan(1, 1, (), (packs[0], packs[2])), RankPlan(1, 2, (), (packs[1],))]
    assert group.collect(group.prefetch(slices, index)) == [
        {}, {"node 2": "second [2, 5]", "node 1": "first [0]"}, {"node 2": "second [2]", "node 3": "third [4]"}]


def test_ranks_are_called_in_the_driver_s_order(group: WorkerGroup) -> None:
    """A rank told to save after step n + 1 what the driver calls step n would save another state."""
    before = len(group.call("told")[0])
    calls = [group.start(method, step) for step in range(20) for method in ("run", "save")]
    for begun in calls:
        group.collect(begun)
    expected = [(method, step) for step in range(20) for method in ("run", "save")]
    assert [told[before:] for told in group.call("told")] == [expected] * 3


def test_only_ranks_that_have_not_answered_count_as_pending(group: WorkerGroup) -> None:
    calls = group.start("sleep", [0.0, 0.0, 2.0])
    first, second = calls.ranks
    deadline = time.monotonic() + 15
    while (pending := calls.pending_ranks([first, second])) != {2} and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pending == {2}
    assert ray.get(first) == [0.0]
    assert calls.pending_ranks([second]) == {2}
    assert calls.pending_ranks([first]) == set()  # as where its answer comes just when it is asked
    assert calls.pending_ranks([]) == set()
    assert group.collect(calls) == [0.0, 0.0, 2.0]


def test_a_rank_that_stands_still_is_named_and_one_that_raises(group: WorkerGroup) -> None:
    calls = group.start("sleep", [0.0, 3.0, 0.0])
    with pytest.raises(GroupError, match=r"^rank 1 \(pid \d+ on node node\) is stuck$"):
        group.collect(calls, look_s=0.1, stuck_s=0.5)
    with pytest.raises(GroupError, match=r"^rank 2 \(pid \d+ on node node\): rank 2 says no$"):
        group.call("refuse", 2)


def test_a_relay_that_answers_no_more_is_named(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no rank is taken for stuck in its place, however long ago it has answered."""
    monkeypatch.setattr(relay_module, "SURVEY_S", 0.5)
    group.call("run", 1)
    relay = relay_pid(group, 1)
    os.kill(relay, signal.SIGSTOP)
    calls = group.start("run", 2)
    with pytest.raises(GroupError, match=r"^the relay of ranks 1 to 2 answers no more$"):
        group.collect(calls, look_s=0.1, stuck_s=0.1)
    os.kill(relay, signal.SIGCONT)
    assert group.collect(calls) == [0, 1, 2]


def test_a_relay_that_is_starting_has_no_ranks_that_stand_still(group: WorkerGroup) -> None:
    group.open_relays(2)
    assert group.collect(group.start("run", 1), look_s=0.1, stuck_s=0.5) == [0, 1, 2]


def test_a_relay_that_dies_breaks_the_group_and_its_ranks_are_called_again(group: WorkerGroup) -> None:
    calls = group.start("sleep", [1.0] * 3)
    os.kill(relay_pid(group, 1), signal.SIGKILL)
    with pytest.raises(GroupError, match=r"^the relay of ranks 1 to 2 died$"):
        group.collect(calls)
    group.close_relays()
    assert group.call("run", 1) == [0, 1, 2]  # the driver's own calls
    group.open_relays(2)
    assert group.call("run", 2) == [0, 1, 2]


def test_what_cannot_be_passed_on_is_told(group: WorkerGroup) -> None:
    with pytest.raises(GroupError, match=r"^the relay of ranks (0 to 0|1 to 2): AttributeError: .*no_such_method"):
        group.call("no_such_method")


def test_slices_that_cannot_be_sent_are_told(group: WorkerGroup) -> None:
    for_two = [RankPlan(1, rank, (), ()) for rank in range(2)]
    with pytest.raises(GroupError, match=r"^the relay of ranks 1 to 2: zip\(\) argument 2 is shorter"):
        group.collect(group.prefetch(for_two, RowIndex({}, {})))
    assert group.call("run", 1) == [0, 1, 2]


def test_a_group_of_no_more_ranks_than_a_relay_has_needs_none(group: WorkerGroup) -> None:
    group.open_relays(3)
    assert len(group.start("run", 1)) == 3
    group.close_relays()


def test_no_calls_have_no_answers() -> None:
    assert not Calls()
    assert Calls().answers() == []
    assert WorkerGroup([]).collect(Calls()) == []


def relay_pid(group: WorkerGroup, place: int) -> int:
    assert group._relays is not None
    return ray.get(group._relays._relays[place].__ray_call__.remote(pid_of))


def pid_of(relay: Relay) -> int:
    return os.getpid()
