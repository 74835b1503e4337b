"""Packs that share links: by hand, and against a slow and obvious version."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner.schedule import firsts_of, flat
from dhp_ray.simulate.links import Links, Uses, contended, links_of, run_groups, uses_of
from dhp_ray.simulate.pack_work import PackWork
from tests.simulate.reference_links import Group, simulate


def work_of(groups: list[Group], nodes: list[int]) -> PackWork:
    ranks, degrees = flat([group.ranks for group in groups])
    zeros = np.zeros(len(groups))
    crosses = np.array([len({nodes[rank] for rank in group.ranks}) > 1 for group in groups])
    compute, transfer, hidden = (np.array([float(value) for value in column]) for column in zip(
        *((group.compute_s, group.transfer_s, group.hidden_s) for group in groups)))
    return PackWork(ranks, firsts_of(degrees), np.zeros(len(groups), dtype=np.int64), compute, zeros, transfer, hidden,
                    zeros, crosses, np.zeros(len(ranks)))


def run(groups: list[Group], nodes: list[int], links: Links, ring: bool = True) -> list[tuple[float, float]]:
    work = work_of(groups, nodes)
    zeros = np.zeros(len(links.of_node))
    return list(zip(*(array.tolist() for array in run_groups(
        np.zeros(len(nodes)), work, uses_of(work, np.array(nodes), ring), links, zeros, 0.0))))


def test_two_rings_over_one_link_have_half_of_it_each() -> None:
    nodes, one = [0, 0, 1, 1], Links(np.array([1.0, 1.0]), 2.0)
    a, b = Group((0, 2), Fraction(2), Fraction(4), Fraction(1)), Group((1, 3), Fraction(2), Fraction(1), Fraction(1))
    assert run([a], nodes, one) == [(0.0, 5.0)]
    assert run([b], nodes, one) == [(0.0, 2.0)]
    # b takes 2 + 2 - 1 with half of the link; a goes at the pace of 2 + 8 - 1 as long, and has 2/3 of its 5 s left
    assert run([a, b], nodes, one) == [(0.0, pytest.approx(3 + 5 * 2 / 3)), (0.0, 3.0)]
    two = Links(np.array([2.0, 2.0]), 4.0)
    assert run([a, b], nodes, two) == [(0.0, 5.0), (0.0, 2.0)]
    # each node could send two at a time, the network between them carries two in all
    assert run([a, b], nodes, Links(np.array([2.0, 2.0]), 2.0)) == run([a, b], nodes, one)


def test_other_traffic_that_has_ended_costs_nothing() -> None:
    nodes, one = [0, 0, 1, 1], Links(np.array([1.0, 1.0]), 2.0)
    groups = [Group(ranks, Fraction(2), Fraction(4), Fraction(1)) for ranks in ((0, 2), (1, 3))]
    work = work_of(groups, nodes)
    uses, beside = uses_of(work, np.array(nodes), True), np.array([2.0, 2.0])
    for beside_s, end_s in ((0.0, 9.0), (100.0, 17.0)):
        _, ends = run_groups(np.zeros(4), work, uses, one, beside, beside_s)
        assert ends.tolist() == [end_s, end_s]


def test_what_hides_under_attention_may_go_on_hiding() -> None:
    hidden = [Group(ranks, Fraction(5), Fraction(2), Fraction(4)) for ranks in ((0, 2), (1, 3))]
    assert run(hidden, [0, 0, 1, 1], Links(np.array([1.0, 1.0]), 2.0)) == [(0.0, 5.0), (0.0, 5.0)]


def test_links_that_groups_use() -> None:
    nodes = np.array([0, 0, 0, 1, 1, 2])
    groups = [Group(ranks, Fraction(1), Fraction(1), Fraction(0))
              for ranks in ((0, 1, 3, 5), (0, 3, 1, 4), (0, 1), (2,))]
    ring = uses_of(work_of(groups, nodes.tolist()), nodes, True)
    assert ring.first.tolist() == [0, 3, 5, 5, 5]
    assert list(zip(ring.node.tolist(), ring.links.tolist())) == [(0, 1.0), (1, 1.0), (2, 1.0), (0, 2.0), (1, 2.0)]
    to_all = uses_of(work_of(groups[:1], nodes.tolist()), nodes, False)  # of three that each sends to, so many are away
    assert list(zip(to_all.node.tolist(), to_all.links.tolist())) == [
        (0, pytest.approx(2 * 2 / 3)), (1, 1.0), (2, 1.0)]


def test_a_link_for_every_rank_is_never_shared() -> None:
    nodes = np.array([0, 0, 1, 1])
    groups = [Group(ranks, Fraction(1), Fraction(1), Fraction(0)) for ranks in ((0, 2), (1, 3))]
    uses = uses_of(work_of(groups, nodes.tolist()), nodes, True)
    assert not contended(uses, links_of(nodes, 0, 1.0))
    assert contended(uses, links_of(nodes, 1, 1.0))
    assert contended(uses, links_of(nodes, 0, 2.0))
    assert contended(uses, links_of(nodes, 0, 1.0), np.array([1.0, 1.0]))
    inside = uses_of(work_of([Group((0, 1), Fraction(1), Fraction(1), Fraction(0))], nodes.tolist()), nodes, True)
    assert not contended(inside, links_of(nodes, 1, 5.0))
    assert isinstance(inside, Uses)


numbers = st.integers(0, 12).map(lambda number: Fraction(number, 4))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_as_the_slow_version(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(2, 6))
    num_nodes = data.draw(st.integers(1, 3))
    nodes = [data.draw(st.integers(0, num_nodes - 1)) for _ in range(num_ranks)]
    groups = []
    for _ in range(data.draw(st.integers(1, 7))):
        ranks = data.draw(st.permutations(range(num_ranks)))[:data.draw(st.integers(1, num_ranks))]
        transfer = data.draw(numbers) if len(ranks) > 1 else Fraction(0)
        groups.append(Group(tuple(ranks), data.draw(numbers) + Fraction(1, 4), transfer, data.draw(numbers)))
    of_node = [data.draw(st.integers(1, 3)) for _ in range(num_nodes)]
    of_all = Fraction(sum(of_node)) / data.draw(st.sampled_from([1, 2, 3]))
    ready = [data.draw(numbers) for _ in range(num_ranks)]
    beside, beside_s = [data.draw(st.integers(0, 2)) for _ in range(num_nodes)], data.draw(numbers)
    expected = simulate(groups, nodes, of_node, of_all, ready, beside, beside_s)
    work = work_of(groups, nodes)
    starts, ends = run_groups(np.array([float(value) for value in ready]), work,
                              uses_of(work, np.array(nodes), True), Links(np.array(of_node, dtype=np.float64),
                                                                          float(of_all)),
                              np.array(beside, dtype=np.float64), float(beside_s))
    for (start, end), (expected_start, expected_end) in zip(zip(starts, ends), expected, strict=True):
        assert start == pytest.approx(float(expected_start), abs=1e-9)
        assert end == pytest.approx(float(expected_end), abs=1e-9)
