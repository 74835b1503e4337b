"""Items of one rank in packs: each goes to the least room, and what a trial finds room for takes no longer than its
makespan.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner import ClusterSpec, CostModel, Sample, bounded, checked_problem
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.primitives.packing import unpacked
from dhp_ray.planner.step import search as step_search
from dhp_ray.planner.step.cached_groups import cached_groups_of
from dhp_ray.planner.step.gaps import backfill
from dhp_ray.planner.step.partial_schedule import PartialSchedule
from dhp_ray.planner.step.rank_lists import rank_lists

CAPACITY = 100


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(3, 8), st.sampled_from([1e-3, 0.05]),
       st.randoms(use_true_random=False))
def test_a_schedule_takes_no_longer_than_the_trial_that_found_it(lengths, num_ranks, pack_s, random):
    """On equal ranks, images and packs of their own price included; of single sequences and of packs alike."""
    cost = CostModel(1e-6, 1e-3, 100.0, 0.0, {2: 1e5}, pack_s=pack_s, encoder_pass_s=0.02, vision_linear_s=1e-3)
    samples = [Sample(str(row), length, 0, ((1, 1, random.randint(1, 60)),) * random.choice((0, 0, 1, 3)))
               for row, length in enumerate(lengths)]
    problem = bounded(checked_problem(samples, ClusterSpec(num_ranks, num_ranks, CAPACITY), cost, sync="step"))
    machine = problem.machine
    for items, packs in step_search.item_sets(problem):
        search = step_search.Search(items, packs, machine, rank_lists(machine), cached_groups_of(problem),
                                    problem.lower_bound_s)
        for effort in (search.quick, search.thorough):
            found = search.shortest(search.tolerance, effort)
            schedule = unpacked(search.scheduled(found), packs)
            assert time_of(problem, schedule) <= found.makespan_s * (1 + 1e-9)


def test_packs_that_cannot_hold_two_items_each_cost_their_own() -> None:
    """Five items of 60 tokens on two ranks: a rank has three packs, though two would hold as many tokens."""
    cost = CostModel(0.0, 1e-3, 1e9, 0.0, {2: 1e9}, pack_s=0.05)  # a ring costs a second a token
    samples = [Sample(str(row), 60, 0, ()) for row in range(5)]
    problem = bounded(checked_problem(samples, ClusterSpec(2, 2, CAPACITY), cost, sync="step"))
    machine, [(items, packs), *_] = problem.machine, step_search.item_sets(problem)
    search = step_search.Search(items, packs, machine, rank_lists(machine), cached_groups_of(problem),
                                problem.lower_bound_s)
    found = search.shortest(search.tolerance, search.thorough)
    assert found.makespan_s == pytest.approx(3 * (0.06 + 0.05), rel=2e-3)
    assert sorted(np.diff(search.scheduled(found).first_row).tolist()) == [1] * 5


@compiled
def backfilled(items, rest, partial, makespan, machine):
    return backfill(items, rest, partial, makespan, machine)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, CAPACITY), st.integers(0, 40)), min_size=1, max_size=60),
       st.lists(st.tuples(st.sampled_from([0.7, 0.9, 1.0]), st.floats(0.0, 0.3), st.floats(0.0, 0.3)), min_size=2,
                max_size=6), st.sampled_from([0.0, 1e-3, 0.03]), st.sampled_from([0.0, 0.02]))
def test_an_item_goes_to_the_bin_with_the_least_room_that_holds_it(sequences, ranks, pack_s, encoder_pass_s):
    """Rank r has speed v, is busy for a while, idle for a while and then busy once more before its tail."""
    speeds, busy_s, idle_s = (np.array(column) for column in zip(*ranks))
    cost = CostModel(0.0, 1e-3, 1e9, 0.0, {2: 1e9}, pack_s=pack_s, encoder_pass_s=encoder_pass_s, vision_linear_s=1e-3)
    samples = [Sample(str(row), text, patches, ((1, 1, patches),) * (patches > 0))
               for row, (text, patches) in enumerate(sequences) if text + patches <= CAPACITY] or [Sample("0", 1)]
    problem = checked_problem(samples, ClusterSpec(len(ranks), 2, CAPACITY, tuple(speeds.tolist())), cost)
    items, machine, count, makespan = problem.items, problem.machine, len(ranks), 1.0
    partial = PartialSchedule(True, np.zeros(count, dtype=np.int64), np.arange(count + 1), np.arange(count),
                              busy_s + idle_s, busy_s, busy_s + idle_s + 0.2)
    rest = np.argsort(-(items.language_s + items.vision_s), kind="stable")
    room = [*((partial.start - partial.gap_start) * speeds), *((makespan - partial.free) * speeds)]
    packs = [[] for _ in room]  # of each bin: [tokens, whether it has images]

    def joined(bin_, item):
        """The newest pack of a bin that has memory for an item; the item's seconds, and what is paid once for it."""
        into = next((pack for pack in reversed(packs[bin_]) if pack[0] + item.tokens <= CAPACITY), None)
        once_s = 0.0 if into else pack_s * speeds[bin_ % count]
        if item.image_s > 0.0 and not (into and into[1]):
            once_s += encoder_pass_s
        return into, item.language_s + item.vision_s, once_s

    for row, bin_ in zip(rest.tolist(), backfilled(items, rest, partial, makespan, machine).tolist()):
        item = items[row]
        fitting = [each for each in range(len(room)) if room[each] >= sum(joined(each, item)[1:])]
        assert (bin_ < 0) == (not fitting)
        if fitting:
            assert room[bin_] == min(room[each] for each in fitting)
            into, need, once_s = joined(bin_, item)
            room[bin_] = room[bin_] - need - once_s
            if into is None:
                packs[bin_].append(into := [0, False])
            into[0], into[1] = into[0] + item.tokens, bool(into[1] or item.image_s > 0.0)
