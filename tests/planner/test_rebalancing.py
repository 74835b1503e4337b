"""Exchanges between the fullest rank and others, beside a plain search of every pair of items."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.primitives.rebalancing import BETTER, EXCHANGES, Loads, rebalance


@compiled
def compiled_rebalance(loads, rank_of, ends_s, held, target_s, partners):
    rebalance(loads, rank_of, ends_s, held, target_s, partners)


PARTNERS = 4


def ends_of(seconds, rank_of, speeds, free_s=()):
    """When ranks end that are free from `free_s` on."""
    ends_s = list(free_s) or [0.0] * len(speeds)
    for item, rank in enumerate(rank_of):
        ends_s[rank] += seconds[item] / speeds[rank]
    return ends_s


def exchanged(seconds, rank_of, speeds, target_s, free_s=()):
    """Where each item is in the end: the slow and obvious reference."""
    rank_of, ranks = list(rank_of), range(len(speeds))
    for _ in range(EXCHANGES * len(speeds)):
        ends_s = ends_of(seconds, rank_of, speeds, free_s)
        *others, fullest = sorted(ranks, key=lambda rank: ends_s[rank])
        if ends_s[fullest] <= target_s:
            break
        for other in others[:PARTNERS]:
            ways = []
            for given_ in [item for item, rank in enumerate(rank_of) if rank == fullest]:
                for taken in [None, *(item for item, rank in enumerate(rank_of) if rank == other)]:
                    after = rank_of.copy()
                    after[given_] = other
                    if taken is not None:
                        after[taken] = fullest
                    ends = ends_of(seconds, after, speeds, free_s)
                    ways.append((max(ends[fullest], ends[other]), after))
            later_s, after = min(ways, default=(np.inf, rank_of))
            if later_s < ends_s[fullest] * (1 - BETTER):
                rank_of = after
                break
        else:
            break
    return rank_of


def run(seconds, rank_of, speeds, target_s, free_s=(), tokens=None, capacity=1, pack_s=0.0):
    """(rank of each item, end of each rank, tokens of each rank) after the compiled search."""
    seconds, rank_of, speeds = np.array(seconds), np.array(rank_of, dtype=np.int64), np.array(speeds)
    tokens = np.zeros(len(seconds), dtype=np.int64) if tokens is None else np.array(tokens)
    held = np.bincount(rank_of, tokens, len(speeds)).astype(np.int64)
    ends_s = np.array(ends_of(seconds, rank_of, speeds, free_s)) + -(-held // capacity) * pack_s
    compiled_rebalance(Loads(seconds, tokens, speeds, capacity, pack_s), rank_of, ends_s, held, target_s, PARTNERS)
    return rank_of.tolist(), ends_s, held


def test_the_example():
    seconds, before = [5.0, 5.0, 4.0, 4.0, 3.0, 3.0], [0, 0, 0, 1, 1, 1]
    after, ends_s, _ = run(seconds, before, [1.0, 1.0], 12.0)
    assert ends_s.tolist() == ends_of(seconds, after, [1.0, 1.0]) == [12.0, 12.0]
    assert ends_of(seconds, exchanged(seconds, before, [1.0, 1.0], 12.0), [1.0, 1.0]) == [12.0, 12.0]


@settings(max_examples=75, deadline=None)
@given(st.integers(1, 25), st.integers(1, 6), st.booleans(), st.sampled_from([1.0, 1.1]), st.integers(0, 2**32 - 1))
def test_every_pair_of_items(num_items, num_ranks, uneven, room, seed):
    generator = np.random.default_rng(seed)
    seconds, rank_of = generator.uniform(0.1, 2.0, num_items), generator.integers(0, num_ranks, num_items)
    speeds = generator.uniform(0.5, 1.5, num_ranks) if uneven else np.ones(num_ranks)
    free_s = generator.uniform(0.0, 0.5, num_ranks)  # no two ranks end together
    target_s = room * (seconds.sum() + (free_s * speeds).sum()) / speeds.sum()
    after, ends_s, _ = run(seconds, rank_of, speeds, target_s, free_s)
    assert ends_s == pytest.approx(ends_of(seconds, after, speeds, free_s))
    assert after == exchanged(seconds, rank_of, speeds, target_s, free_s)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=25), st.integers(1, 5),
       st.integers(0, 2**32 - 1))
def test_packs_that_cost_something(items, num_ranks, seed):
    """A rank's packs hold 40 tokens and cost 7 s each. Ends stay those of its items; the latest never gets later."""
    generator, (seconds, tokens) = np.random.default_rng(seed), zip(*items)
    rank_of, speeds = generator.integers(0, num_ranks, len(items)), np.ones(num_ranks)
    latest_s = []
    for target_s in (np.inf, sum(seconds) / num_ranks):
        after, ends_s, held = run(np.array(seconds, dtype=float), rank_of, speeds, target_s, (), tokens, 40, 7.0)
        assert held.tolist() == np.bincount(after, tokens, num_ranks).tolist()
        assert ends_s == pytest.approx(np.bincount(after, seconds, num_ranks) + 7.0 * -(-held // 40))
        latest_s.append(ends_s.max())
    assert all(later >= earlier for later, earlier in pairwise(latest_s))


def test_an_item_that_is_nowhere_stays_there():
    after, ends_s, _ = run([5.0, 4.0], [0, 0], [1.0, 1.0], 0.0)
    assert sorted(after) == [0, 1]
    assert ends_s.tolist() in ([5.0, 4.0], [4.0, 5.0])
    rank_of = np.array([0, -1, 0])
    ends_s = np.array([9.0, 0.0])
    loads = Loads(np.array([5.0, 8.0, 4.0]), np.zeros(3, dtype=np.int64), np.ones(2), 1, 0.0)
    compiled_rebalance(loads, rank_of, ends_s, np.zeros(2, dtype=np.int64), 0.0, PARTNERS)
    assert rank_of[1] == -1
    assert ends_s.sum() == 9.0
