"""Which makespans are tried, where a trial tells what it left over."""

from dataclasses import replace

import numpy as np
import pytest
from test_dhp import ALL_TO_ALL

from dhp_ray.planner import ClusterSpec, Sample, bounded
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.problem import problem_of
from dhp_ray.planner.step import search as search_module
from dhp_ray.planner.step.cached_groups import cached_groups_of
from dhp_ray.planner.step.rank_lists import rank_lists
from dhp_ray.planner.step.search import Search, dhp_step, item_sets
from dhp_ray.planner.step.trial import Found

TOLERANCE = 1e-3


@pytest.mark.parametrize("pack_s", [0.0, 0.05])
def test_packs_have_as_many_ranks_as_their_items_must(pack_s):
    """Also short sequences that would fill gaps, and packs made beforehand."""
    samples = [Sample(str(row), 100 + 40 * row) for row in range(20)]
    problem = problem_of(samples, ClusterSpec(8, 8, 1000), replace(ALL_TO_ALL, pack_s=pack_s), "step")
    problem.items.minimum_degree = np.full(20, 3)
    for schedule in dhp_step(bounded(problem)):
        assert np.diff(schedule.first_rank).min() >= 3
        assert sorted(schedule.rows) == list(range(20))


def test_only_schedules_shorter_than_a_given_one_are_searched_for():
    problem = bounded(problem_of([Sample(str(row), 4505) for row in range(8)], ClusterSpec(5, 8, 8192), ALL_TO_ALL,
                                 "step"))
    shortest_s = min(time_of(problem, schedule) for schedule in dhp_step(problem))
    assert dhp_step(problem, problem.lower_bound_s) == []
    assert min(time_of(problem, schedule) for schedule in dhp_step(problem, 1.1 * shortest_s)) <= shortest_s


@pytest.fixture
def search():
    return search_above(1.0)


def search_above(bound_s):
    problem = problem_of([Sample(str(row), 100 + row) for row in range(40)], ClusterSpec(4, 4, 100), ALL_TO_ALL, "step")
    items, packs = next(item_sets(problem))
    return Search(items, packs, problem.machine, rank_lists(problem.machine), cached_groups_of(problem), bound_s)


def tried(monkeypatch, search, shortest_s, told, run):
    """The makespans that `run` tries, and what it finds, where those from `shortest_s` on can be had and a trial that
    fails tells the share `told` of what its makespan lacks."""
    makespans = []

    def trial(items, single_s, makespan, *others):
        makespans.append(makespan)
        fails = makespan < shortest_s
        expected_s = makespan + told * (shortest_s - makespan) if fails else makespan
        return Found(-1 if fails else 0, makespan, None, None, None, None, np.inf, expected_s)

    monkeypatch.setattr(search_module, "try_makespan", trial)
    return makespans, run(search).makespan_s


def from_the_bound(search):
    return search.shortest(TOLERANCE, search.quick)


@pytest.mark.parametrize("shortest_s", [1.0005, 1.0043, 1.057, 1.0765, 1.4, 7.3, 250.0])
@pytest.mark.parametrize("told", [0.0, 0.01, 0.5, 0.9, 0.99, 1.0, 1.2, 3.0])
def test_what_is_found_is_within_the_tolerance(monkeypatch, search, shortest_s, told):
    makespans, found_s = tried(monkeypatch, search, shortest_s, told, from_the_bound)
    assert shortest_s <= found_s <= shortest_s + TOLERANCE * (1 + 1e-9) or found_s == makespans[0]
    assert len(set(makespans)) == len(makespans)


@pytest.mark.parametrize("shortest_s", [1.057, 1.0765, 1.4])
def test_what_a_trial_leaves_over_saves_two_trials_of_five(monkeypatch, search, shortest_s):
    told, untold = (len(tried(monkeypatch, search, shortest_s, share, from_the_bound)[0]) for share in (0.9, 0.0))
    assert told <= 0.6 * untold


@pytest.mark.parametrize("shortest_s", [1.0043, 1.057, 1.0765])
@pytest.mark.parametrize("told", [0.99, 0.999])
@pytest.mark.parametrize("bound_s", [1.0, 1.1, 1.7, 0.3])  # a step is rounded down from 1.0, up from others
def test_three_trials_are_enough_if_a_trial_tells_nearly_what_it_leaves_over(monkeypatch, bound_s, told, shortest_s):
    """The first fails and tells; the second is a step above that, and succeeds; the third is a step below it."""
    makespans, _ = tried(monkeypatch, search_above(bound_s), shortest_s * bound_s, told, from_the_bound)
    first, second, third = makespans
    assert first < third < shortest_s * bound_s <= second


def test_each_trial_lies_between_what_is_too_short_and_what_is_not(monkeypatch, search):
    best = Found(0, 1.5, None, None, None, None, np.inf, 1.5)
    for told in (0.0, 0.3, 0.9, 2.0):
        search.expected_s, search.num_failed = 0.0, 0
        makespans, _ = tried(monkeypatch, search, 1.2, told, lambda search: search.bisect(
            best, 1.0, TOLERANCE, search.quick))
        low, high = 1.0, 1.5
        for makespan in makespans:
            assert low < makespan < high
            low, high = (makespan, high) if makespan < 1.2 else (low, makespan)
        assert high - low <= TOLERANCE * (1 + 1e-9)
