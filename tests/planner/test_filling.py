"""Packs of a micro-batch take as long as the search counts them, images included."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner import ClusterSpec, CostModel, Sample, bounded, checked_problem
from dhp_ray.planner.layer_share import NO_RECOMPUTATION, Recomputation
from dhp_ray.planner.micro_batch.filling import fill_micro_batch
from dhp_ray.planner.micro_batch.makespans import ENCODE_FACTORS, encode_shares_of
from dhp_ray.planner.micro_batch.placing import ranks_of
from dhp_ray.planner.micro_batch.search import MicroBatchSearch, least_degrees
from dhp_ray.planner.pricing import micro_batches_s, times_of
from dhp_ray.planner.schedule import Schedule, by_owner, firsts_of
from dhp_ray.planner.step.cached_groups import cached_groups_of


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 250), st.lists(st.integers(1, 80), max_size=7)), min_size=1, max_size=40),
       st.integers(2, 7), st.booleans(), st.sampled_from([0.0, 0.2]), st.booleans(), st.randoms(use_true_random=False))
def test_no_pack_takes_longer_than_the_search_takes_it_for(sequences, num_ranks, uneven, gather_s, again, random):
    """On one node, so that no group crosses nodes. Joined sequences' images are dealt to the same ranks. On ranks of
    unequal speed memory limits what a fast one encodes, which the search does not know: there are none then.
    """
    cost = CostModel(1e-6, 1e-3, 100.0, 0.05, {2: 1e5}, pack_s=0.01, encoder_pass_s=0.02, vision_linear_s=5e-3,
                     gather_s=gather_s)
    speeds = tuple(random.choice([0.5, 0.8, 1.0]) for _ in range(num_ranks)) if uneven else ()
    cluster = ClusterSpec(num_ranks, num_ranks, 100, speeds,
                          recomputation=Recomputation(0.8, 75, 150, 100) if again else NO_RECOMPUTATION)
    samples = [Sample(str(row), length, 0, tuple((1, 1, patches) for patches in images if not uneven))
               for row, (length, images) in enumerate(sequences) if length <= cluster.max_tokens]
    if not samples:
        return
    problem = bounded(checked_problem(samples, cluster, cost, sync="micro_batch"))
    machine, pool = problem.machine, cached_groups_of(problem)
    for part in MicroBatchSearch(problem, machine, least_degrees(range(1, num_ranks + 1), num_ranks)).run():
        members, first = by_owner(part.packed.pack, len(part.packed.degree))
        first_rank = firsts_of(part.packed.degree)
        schedule = Schedule(part.rows[members], first, ranks_of(first_rank, machine, pool), first_rank,
                            np.zeros(len(first) - 1, dtype=np.int64))
        times = times_of(problem, schedule)
        assert (times.pack_s <= part.packed.time * (1 + 1e-9)).all()
        (seconds,) = micro_batches_s(schedule.micro_batch, times)
        assert seconds <= part.time_s * (1 + 1e-9)
        if np.allclose(times.pack_s, part.packed.time, rtol=1e-9):  # images are dealt out as the search did
            assert seconds == pytest.approx(part.time_s)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 250), st.lists(st.integers(1, 80), max_size=7)), min_size=1, max_size=40),
       st.integers(2, 7), st.sampled_from([0.2, 0.5, 0.8]), st.floats(0.1, 3.0))
def test_encoding_takes_its_share_of_the_makespan_at_most(sequences, num_ranks, encode_share, makespan):
    cost = CostModel(1e-6, 1e-3, 100.0, 0.0, {2: 1e5}, pack_s=0.01, encoder_pass_s=0.02, vision_linear_s=5e-3)
    samples = [Sample(str(row), length, 0, tuple((1, 1, patches) for patches in images))
               for row, (length, images) in enumerate(sequences)]
    problem = bounded(checked_problem(samples, ClusterSpec(num_ranks, num_ranks, 250), cost, sync="micro_batch"))
    search = MicroBatchSearch(problem, problem.machine, least_degrees(range(1, num_ranks + 1), num_ranks))
    packed = fill_micro_batch(search.items, search.images, search.order, search.value, makespan, encode_share,
                              search.ranks, False)
    if not len(packed.degree):
        return
    members, first = by_owner(packed.pack[packed.pack >= 0], len(packed.degree))
    rows, first_rank = search.order[packed.pack >= 0][members], firsts_of(packed.degree)
    schedule = Schedule(rows, first, ranks_of(first_rank, problem.machine, cached_groups_of(problem)), first_rank,
                        np.zeros(len(first) - 1, dtype=np.int64))
    times = times_of(problem, schedule)
    assert (times.encode_s <= encode_share * makespan * (1 + 1e-9)).all()
    assert (times.rest_s <= (1 - encode_share) * makespan * (1 + 1e-9)).all()
    assert packed.seconds <= packed.makespan * (1 + 1e-9) <= makespan * (1 + 1e-9)


def test_images_and_text_of_equal_seconds_are_spread_over_the_packs():
    """On two ranks, 4 sequences of 40 s of images and 10 s of text, and 4 of 50 s of text. Under a limit of 200 s alone
    one pack may take all images and the other all text: 160 s + 200 s, or two micro-batches of 200 s and 20 s twice.
    Spread evenly, each pack encodes for 80 s and takes 120 s for the rest.
    """
    samples = [*(Sample(f"image {row}", 10, 0, ((1, 1, 40),)) for row in range(4)),
               *(Sample(f"text {row}", 50) for row in range(4))]
    cost = CostModel(0.0, 1.0, 0.0, 20.0, {2: 1e5}, vision_linear_s=1.0)
    problem = bounded(checked_problem(samples, ClusterSpec(2, 2, 240), cost, sync="micro_batch"))
    search = MicroBatchSearch(problem, problem.machine, least_degrees([1, 2], 2))
    assert sum(part.time_s + cost.fixed_s for part in search.run()) == pytest.approx(220.0)


@pytest.mark.parametrize("least", [1, 3, 5, 8])
def test_packs_have_the_least_degree_or_all_ranks_that_are_left(least):
    """Eight sequences of 4,505 tokens fit five ranks of 8,192 at once in packs of three and two, or one of five."""
    cost = CostModel(1e-9, 1e-4, 1e5, 0.1, {2: 1e10})
    samples = [Sample(str(row), 4505) for row in range(8)]
    problem = bounded(checked_problem(samples, ClusterSpec(5, 8, 8192), cost, sync="micro_batch"))
    parts = MicroBatchSearch(problem, problem.machine, least_degrees(range(1, 6), 5), min(least, 5)).run()
    assert (len(parts) == 1) == (least > 1)
    for part in parts:
        *given, last = part.packed.degree.tolist()
        assert all(degree >= min(least, 5) for degree in given)
        assert last >= min(least, 5 - sum(given))


def test_shares_of_encoding_follow_the_work():
    """Without images nothing is limited; a share of 1 or more would leave no time for the rest."""
    cost = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1e5}, vision_linear_s=1.0)
    for patches, text, shares in ((0, 10, [0.0]), (10, 10, np.array(ENCODE_FACTORS) / 2),
                                  (990, 10, np.array(ENCODE_FACTORS)[:5] * 0.99)):
        samples = [Sample("a", text, 0, ((1, 1, patches),) if patches else ())]
        problem = bounded(checked_problem(samples, ClusterSpec(2, 2, 100), cost, sync="micro_batch"))
        assert encode_shares_of(problem.items, np.array([0])) == pytest.approx(shares)
