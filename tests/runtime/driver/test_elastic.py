"""Decisions about the group: plain functions, literal answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain, count, permutations, takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhp_ray.runtime.driver.elastic import (
    MAX_FAILURES,
    Condition,
    Failures,
    ProgressWatchdog,
    Stop,
    SurvivingState,
    Wait,
    condition_of,
    replica_ranks_of,
    shortage,
    surviving_state,
)
from dhp_ray.runtime.driver.session import LOOKS_PER_HANG, STUCK_SHARE
from dhp_ray.runtime.messages import HeldShards, Status

HEALTHY, DEAD, UNRESPONSIVE, RAISED, STUCK = (
    Condition.HEALTHY, Condition.DEAD, Condition.UNRESPONSIVE, Condition.RAISED, Condition.STUCK)
COMPUTES = Status(mark_id="run 41")
WAITS = Status(mark_id="run 42", waits_for_peers=True)


@pytest.mark.parametrize(
    ("status", "overdue", "condition"),
    [
        (COMPUTES, False, HEALTHY),
        (COMPUTES, True, STUCK),
        (Status(answered=False), False, UNRESPONSIVE),
        (Status(dead=True), False, DEAD),
        (Status(dead=True, answered=False, error="x"), True, DEAD),
        (Status(error="KeyError: 'x'"), False, RAISED),
        (Status(error="KeyError: 'x'", waits_for_peers=True), True, RAISED),
    ],
)
def test_the_condition_of_a_worker(status: Status, overdue: bool, condition: Condition) -> None:
    assert condition_of(status, overdue) is condition


def first_overdue_s(marks: Sequence[tuple[float, Status]], limit_s: float, look_s: float, end_s: float) -> float:
    """When a rank is first found to stand still by looks every `look_s` seconds; inf: never until `end_s`. `marks`:
    what it reports from when on.
    """
    watchdog = ProgressWatchdog(1, limit_s, 0.0)
    for now_s in takewhile(lambda now_s: now_s <= end_s, count(look_s, look_s)):
        report = [report for since_s, report in marks if since_s <= now_s][-1]
        if watchdog.overdue(0, report, now_s):
            return now_s
    return math.inf


@pytest.mark.parametrize("layer_s", [1e-3, 1.0])
def test_layers_30_times_slower_than_predicted_are_no_watchdog(layer_s: float) -> None:
    found_within_s = max(10.0, 60 * layer_s)
    marks = [(30 * layer_s * number, Status(mark_id=f"run {number}")) for number in range(40)]
    assert first_overdue_s(marks, STUCK_SHARE * found_within_s, 10.0 / LOOKS_PER_HANG, marks[-1][0]) == math.inf


@pytest.mark.parametrize("layer_s", [1e-3, 1.0])
@pytest.mark.parametrize("begun_s", [0.0, 3.0, 3.76, 100.0])
def test_an_operation_that_never_ends_is_found(layer_s: float, begun_s: float) -> None:
    found_within_s = max(10.0, 60 * layer_s)
    marks = [(now_s * begun_s / 100, Status(mark_id=f"run {now_s}")) for now_s in range(101)]
    found_s = first_overdue_s(marks, STUCK_SHARE * found_within_s, 10.0 / LOOKS_PER_HANG, begun_s + 2 * found_within_s)
    assert STUCK_SHARE * found_within_s <= found_s - begun_s <= found_within_s


def test_a_rank_that_waits_for_its_peers_never_stands_still() -> None:
    """The one that it waits for is to blame; from the end of the wait on it may be its own fault again."""
    assert first_overdue_s([(0.0, WAITS)], 7.5, 1.25, 1000.0) == math.inf
    assert 500.0 < first_overdue_s([(0.0, WAITS), (500.0, COMPUTES)], 7.5, 1.25, 1000.0) <= 510.0


@pytest.mark.parametrize(("healthy", "newcomers", "min_ranks", "max_ranks", "found"), [
    (3, 0, 1, 3, None), (3, 2, 1, 3, None), (2, 1, 3, 3, None), (0, 2, 2, 3, None), (5, 0, 1, 3, None),
    (0, 0, 1, 3, Wait(1, 0)), (2, 0, 3, 3, Wait(3, 2)),  # below the minimum
    (0, 5, 4, 4, None), (0, 3, 4, 4, Wait(4, 3))])
def test_a_run_goes_on_once_there_are_enough(
    healthy: int, newcomers: int, min_ranks: int, max_ranks: int, found: Wait | None
) -> None:
    assert shortage(healthy, newcomers, min_ranks, max_ranks) == found


def test_a_sequence_that_the_run_can_never_hold_ends_it() -> None:
    match shortage(2, 0, 5, 4):
        case Stop(reason):
            assert (
                reason
                == "the next batch has a sequence that needs 5 ranks, and the run has at most 4 (cluster.max_workers)"
            )
        case other:
            raise AssertionError(other)


def test_a_step_that_a_worker_raises_in_twice_or_that_breaks_too_often_is_hopeless() -> None:
    failures = Failures()
    assert not failures.hopeless(7)
    assert not failures.with_one(7, raised=True).hopeless(7)
    assert failures.with_one(7, raised=True).with_one(7, raised=True).hopeless(7)
    assert not failures.with_one(7, raised=True).with_one(8, raised=True).hopeless(8)  # twice, but in two steps
    assert not failures.with_one(7, raised=True).with_one(7, raised=False).hopeless(7)
    for _ in range(MAX_FAILURES):
        failures = failures.with_one(7, raised=False)
        assert not failures.hopeless(7)
    assert failures.with_one(7, raised=False).hopeless(7)
    assert not failures.with_one(7, raised=False).hopeless(8)


@given(st.integers(0, 6), st.integers(0, 4), st.integers(1, 6), st.integers(1, 6))
def test_a_shortage_is_one_and_says_how_large_it_is(healthy: int, newcomers: int, low: int, high: int) -> None:
    match shortage(healthy, newcomers, low, high):
        case None:
            assert low <= min(healthy + newcomers, high)
        case Wait(num_ranks, have):
            assert have < num_ranks == low <= high
            assert have == healthy + max(0, min(newcomers, high - healthy))
        case Stop():
            assert low > high


def held(generation: int, world_size: int, **versions: list[int]) -> HeldShards:
    """held(2, 3, r0=[7, 8]): versions 7 and 8 of rank 0's shard."""
    return HeldShards(generation, world_size, {int(name[1:]): found for name, found in versions.items()})


def test_the_newest_whole_version_survives() -> None:
    """Ranks 0 and 1 of three live; rank 2's replica rank is rank 0. Rank 2 died before its copy of version 8 had gone
    out.
    """
    zero, one = [held(1, 3, r0=[8, 7], r2=[7])], [held(1, 3, r1=[8, 7], r0=[7, 8])]
    assert surviving_state([zero, one]) == SurvivingState(1, 7, ((0, 2), (1,)))
    zero = [held(1, 3, r0=[8, 7], r2=[7, 8])]
    assert surviving_state([zero, one]) == SurvivingState(1, 8, ((0, 2), (1,)))


def test_every_shard_is_supplied_once_by_whoever_supplies_least() -> None:
    all_of_it = [held(1, 4, r0=[3], r1=[3], r2=[3], r3=[3])]
    assert surviving_state([all_of_it, all_of_it]) == SurvivingState(1, 3, ((0, 2), (1, 3)))
    assert surviving_state([[held(1, 2, r0=[3])], all_of_it[:0],
                            [held(1, 2, r0=[3], r1=[3])]]) == SurvivingState(1, 3, ((0,), (), (1,)))


def test_a_shard_that_nobody_has_means_an_earlier_version_or_none() -> None:
    assert surviving_state([[held(1, 3, r0=[8, 7], r1=[8])]]) is None
    assert surviving_state([[held(1, 3, r0=[8, 7], r1=[8], r2=[6])],
                            [held(1, 3, r1=[6], r0=[6])]]) == SurvivingState(1, 6, ((2,), (0, 1)))
    assert surviving_state([]) is None
    assert surviving_state([[], []]) is None


def test_versions_of_two_generations_are_not_mixed() -> None:
    """Generation 2 broke before all of its mirrors stood: what is left of generation 1 is whole."""
    before = [held(1, 2, r0=[5], r1=[5]), held(2, 3, r0=[5])]
    assert surviving_state([before, [held(2, 3, r1=[5])]]) == SurvivingState(1, 5, ((0, 1), ()))
    # of equal versions the later generation's
    assert surviving_state([before, [held(2, 3, r1=[5], r2=[5])]]) == SurvivingState(2, 5, ((0,), (1, 2)))
    assert surviving_state([[held(1, 2, r0=[5], r1=[5])], [held(2, 1, r0=[4])]]) == SurvivingState(1, 5, ((0, 1), ()))


def test_a_version_of_which_nobody_knows_the_step_does_not_count() -> None:
    """Costs were being measured when the driver was lost: what that leaves is the state after no step. Or a generation
    went back to a checkpoint of version 5 and broke before its first step, while workers had version 7 from before.
    """
    measured = [held(1, 1, r0=[5, 6])]
    assert surviving_state([measured], known={0}) is None
    both = [held(1, 2, r0=[7], r1=[7]), held(2, 1, r0=[5])]
    assert surviving_state([both], known={5}) == SurvivingState(2, 5, ((0,),))
    assert surviving_state([both], known={5, 7}) == SurvivingState(1, 7, ((0, 1),))


def test_a_newcomer_supplies_nothing() -> None:
    assert surviving_state([[held(3, 1, r0=[2, 1])], []]) == SurvivingState(3, 2, ((0,), ()))


@pytest.mark.parametrize(("nodes", "replica_ranks"), [
    ("", ()),
    ("a", ()),
    ("aa", (1, 0)),
    ("aaa", (1, 2, 0)),
    ("ab", (1, 0)),
    ("aabb", (2, 3, 0, 1)),
    ("aaab", (3, 3, 3, 0)),  # node b alone is another one
    ("abc", (1, 2, 0)),
])
def test_which_rank_holds_whose_replica(nodes: str, replica_ranks: tuple[int, ...]) -> None:
    assert replica_ranks_of(list(nodes)) == replica_ranks


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=24))
def test_a_replica_is_with_the_next_of_those_that_hold_fewest(nodes: list[str]) -> None:
    held = Counter[int]()
    for rank, replica_rank in enumerate(replica_ranks_of(nodes)):
        others = [other for other in range(len(nodes)) if nodes[other] != nodes[rank]] or [
            other for other in range(len(nodes)) if other != rank]
        assert replica_rank == min(others, key=lambda other: (held[other], (other - rank) % len(nodes)))
        held[replica_rank] += 1


class Counted(dict[int, list[int]]):
    """A dictionary that counts how often one of its entries is asked for, over all of them."""

    asked = 0

    def get(self, *arguments: Any) -> Any:
        Counted.asked += 1
        return super().get(*arguments)

    def items(self) -> Any:
        Counted.asked += len(self)
        return super().items()


class CountedNodes(list[str]):
    asked = 0

    def __getitem__(self, place: Any) -> Any:
        self.asked += 1
        return super().__getitem__(place)


def test_decisions_about_many_ranks_look_at_each_a_few_times() -> None:
    num_ranks = 800
    nodes = CountedNodes(str(rank // 8) for rank in range(num_ranks))
    replica_ranks = replica_ranks_of(nodes)
    assert nodes.asked <= 24 * num_ranks
    owners = {replica_rank: owner for owner, replica_rank in enumerate(replica_ranks)}
    assert surviving_state([[HeldShards(1, num_ranks, Counted({rank: [4], owners[rank]: [4]}))]
                            for rank in range(8, num_ranks)]) is not None
    assert Counted.asked <= 4 * num_ranks


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_the_loss_of_a_rank_or_a_node_leaves_every_shard(ranks_of_nodes: list[int]) -> None:
    nodes = [str(node) for node, number in enumerate(ranks_of_nodes) for _ in range(number)]
    replica_ranks = replica_ranks_of(nodes)
    if len(nodes) < 2:
        assert replica_ranks == ()
        return
    lost_together = [{rank} for rank in range(len(nodes))]
    if len(ranks_of_nodes) > 1:
        lost_together += [{rank for rank, node in enumerate(nodes) if node == lost} for lost in set(nodes)]
    for lost in lost_together:
        assert all(owner not in lost or replica_rank not in lost
                   for owner, replica_rank in enumerate(replica_ranks)), (nodes, replica_ranks, lost)
    kept = [replica_ranks.count(rank) for rank in range(len(nodes))]
    if len(set(ranks_of_nodes)) == 1:
        assert set(kept) == {1}  # nobody keeps more than one where nodes are alike


def test_the_loss_of_any_one_of_three_ranks_is_survived_whatever_they_had_finished() -> None:
    """Each survivor is in version 4 or already in 5; what they kept for others is 4, and for some 5 as well."""
    replica_ranks = replica_ranks_of(["a", "b", "c"])
    for lost, ahead in permutations(range(3), 2):
        found = []
        for rank in range(3):
            if rank == lost:
                continue
            own = [5, 4] if rank == ahead else [4, 3]
            kept = {owner: [4] for owner in range(3) if replica_ranks[owner] == rank}
            found.append([HeldShards(1, 3, {rank: own, **kept})])
        surviving = surviving_state(found)
        assert surviving is not None
        assert surviving.version == 4
        assert sorted(chain(*surviving.owners)) == [0, 1, 2]
