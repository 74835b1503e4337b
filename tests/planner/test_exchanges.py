"""Exchanges between the packs of a micro-batch plan: shorter, the same groups, memory kept, near a slow search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL, RING

from dhp_ray.planner import ClusterSpec, CostModel, Sample, checked_problem
from dhp_ray.planner.baselines.static import Layout, uniform
from dhp_ray.planner.layer_share import Recomputation
from dhp_ray.planner.micro_batch.exchanges import with_exchanges
from dhp_ray.planner.micro_batch.search import least_degrees, micro_batch_schedule
from dhp_ray.planner.parts import BETTER
from dhp_ray.planner.pricing import time_of, times_of
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule, firsts_of


def schedule_of(packs: list[list[int]], degrees: list[int], micro_batch: list[int]) -> Schedule:
    """Packs on neighbouring ranks, from rank 0 on in each micro-batch."""
    used: dict[int, int] = {}
    ranks: list[int] = []
    for degree, number in zip(degrees, micro_batch, strict=True):
        begin = used.get(number, 0)
        ranks += range(begin, begin + degree)
        used[number] = begin + degree
    return Schedule(np.concatenate([np.array(pack) for pack in packs]), firsts_of([len(pack) for pack in packs]),
                    np.array(ranks), firsts_of(degrees), np.array(micro_batch))


def exchanged(problem: Problem, schedule: Schedule) -> Schedule:
    return with_exchanges(problem, schedule)[0]


def packs_of(schedule: Schedule) -> list[list[int]]:
    return [schedule.rows[begin:end].tolist() for begin, end in zip(schedule.first_row, schedule.first_row[1:])]


def at_most(most: int, rows: list[int]) -> list[list[int]]:
    """All choices of up to `most` of the rows."""
    return [list(chosen) for count in range(most + 1) for chosen in combinations(rows, count)]


def best_exchange(problem: Problem, schedule: Schedule, most: int = 2) -> Schedule | None:
    """Slow and obvious: of all exchanges of at most `most` sequences the one after which the step is shortest, if it is
    shorter."""
    packs, degree = packs_of(schedule), np.diff(schedule.first_rank)
    best, best_s = None, time_of(problem, schedule) * (1 - BETTER)
    for giver, other in combinations(range(len(packs)), 2):
        for gives, taken in product(at_most(most, packs[giver]), at_most(most, packs[other])):
            changed = [list(rows) for rows in packs]
            changed[giver] = [row for row in packs[giver] if row not in gives] + taken
            changed[other] = [row for row in packs[other] if row not in taken] + gives
            tokens = [sum(problem.samples[one].num_tokens for one in rows) for rows in changed]
            if not all(changed) or any(held > each * problem.cluster.tokens_per_rank
                                       for held, each in zip(tokens, degree)):
                continue
            trial = schedule._replace(rows=np.concatenate([np.array(rows) for rows in changed]),
                                      first_row=firsts_of([len(rows) for rows in changed]))
            if (trial_s := time_of(problem, trial)) < best_s:
                best, best_s = trial, trial_s
    return best


def check(problem: Problem, before: Schedule, exchanged: Callable[[Problem, Schedule], Schedule]) -> None:
    """Each sequence runs once, on the same groups, in their memory, and the step is no longer."""
    in_order = np.concatenate([np.sort(pack) for pack in packs_of(before)])  # images are dealt to members in it
    before = before._replace(rows=in_order)
    after = exchanged(problem, before)
    assert time_of(problem, after) <= time_of(problem, before) * (1 + 1e-12)
    assert sorted(after.rows.tolist()) == list(range(len(problem.samples)))
    assert all(packs_of(after))
    for kept in ("ranks", "first_rank", "micro_batch"):
        assert (getattr(after, kept) == getattr(before, kept)).all()
    tokens = np.add.reduceat(problem.items.tokens[after.rows], after.first_row[:-1])
    assert (tokens <= np.diff(after.first_rank) * problem.cluster.tokens_per_rank).all()


def test_the_module_s_example() -> None:
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0},
                     vision_linear_s=1.0)
    images = [Sample(name, 0, 3, ((1, 3, 1),)) for name in ("i", "j")]
    texts = [Sample(f"t{row}", tokens) for row, tokens in enumerate((4, 4, 3, 3))]
    problem = checked_problem([*images, *texts], ClusterSpec(2, 2, 10), cost, sync="micro_batch")
    before = schedule_of([[0, 1, 2], [3, 4, 5]], [1, 1], [0, 0])
    after = exchanged(problem, before)
    assert (time_of(problem, before), time_of(problem, after)) == (16.0, 13.0)
    assert times_of(problem, before).encode_s.tolist() == [6.0, 0.0]
    assert times_of(problem, after).encode_s.tolist() == [3.0, 3.0]
    assert [sum(problem.samples[row].num_tokens for row in pack) for pack in packs_of(after)] == [10, 10]
    assert sorted(sum(row < 2 for row in pack) for pack in packs_of(after)) == [1, 1], "an image each"


def test_a_sequence_moves_to_another_micro_batch_that_has_time_for_it() -> None:
    """The first of two micro-batches takes 7 s, for a pack of 5 and 2 s. In the second one a rank has 6 s left.
    Inside the first one nothing helps."""
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0})
    samples = [Sample(str(row), tokens) for row, tokens in enumerate((5, 2, 5, 7, 1))]
    problem = checked_problem(samples, ClusterSpec(2, 2, 10), cost, sync="micro_batch")
    before = schedule_of([[0, 1], [2], [3], [4]], [1, 1, 1, 1], [0, 0, 1, 1])
    after = exchanged(problem, before)
    assert (time_of(problem, before), time_of(problem, after)) == (14.0, 12.0)
    assert {0, 1, 2} != {row for pack in packs_of(after)[:2] for row in pack}


def test_packs_are_not_made_more_even_if_the_micro_batch_becomes_longer() -> None:
    """A pack encodes for 4 s and takes 1 + 2 s for its text, beside one of 4 s of text: 4 + 4 s. With the text of 2 s
    in the other pack they would take 5 and 6 s rather than 7 and 4, and the micro-batch 4 + 6 s."""
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0},
                     vision_linear_s=1.0)
    samples = [Sample("image", 0, 1, ((1, 4, 1),)), Sample("short", 2), Sample("long", 4)]
    problem = checked_problem(samples, ClusterSpec(2, 2, 10), cost, sync="micro_batch")
    before = schedule_of([[0, 1], [2]], [1, 1], [0, 0])
    assert time_of(problem, before) == 8.0
    assert packs_of(exchanged(problem, before)) == packs_of(before)


def test_sequences_of_equal_work_change_packs_where_that_evens_out_the_encoding() -> None:
    """Two of 4 s of images and 1 s of text, 8 + 2 s, beside two of 5 s of text: 8 + 10 s. One for one makes 4 + 6 s of
    both packs."""
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0},
                     vision_linear_s=1.0)
    images = [Sample(f"i{row}", 0, 1, ((1, 4, 1),)) for row in range(2)]
    samples = [*images, *(Sample(f"t{row}", 5) for row in range(2))]
    problem = checked_problem(samples, ClusterSpec(2, 2, 12), cost, sync="micro_batch")
    before = schedule_of([[0, 1], [2, 3]], [1, 1], [0, 0])
    assert (time_of(problem, before), time_of(problem, exchanged(problem, before))) == (18.0, 10.0)


def test_nothing_moves_between_micro_batches_that_take_as_long_together_as_before() -> None:
    """One rank; 10 + 6 s, of which 2 s might move to and fro."""
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0})
    samples = [Sample(str(row), tokens) for row, tokens in enumerate((5, 3, 2, 4, 2))]
    problem = checked_problem(samples, ClusterSpec(1, 1, 20), cost, sync="micro_batch")
    before = schedule_of([[0, 1, 2], [3, 4]], [1, 1], [0, 1])
    assert packs_of(exchanged(problem, before)) == packs_of(before)


def test_one_sequence_is_exchanged_for_two() -> None:
    """Two of 7 s beside 4, 4, 2 and 2 s: 7 s for 4 and 2 s helps, no sequence alone does."""
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0})
    samples = [Sample(str(row), tokens) for row, tokens in enumerate((7, 7, 4, 4, 2, 2))]
    problem = checked_problem(samples, ClusterSpec(2, 2, 20), cost, sync="micro_batch")
    before = schedule_of([[0, 1], [2, 3, 4, 5]], [1, 1], [0, 0])
    assert best_exchange(problem, before, most=1) is None
    assert (time_of(problem, before), time_of(problem, exchanged(problem, before))) == (14.0, 13.0)


def test_what_a_pack_recomputes_is_estimated() -> None:
    """Four of 5 tokens (100 s) beside 4, 4, 4, 3, 3 and 2 (70 s). A rank recomputes all layers beyond 20 tokens: the
    eight exchanges of 5 for 3, which would help most, take longer. 5 for 3 and 2 helps, then 5 and 3 for two of 4."""
    cost = CostModel(1.0, linear_s=0.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0})
    samples = [Sample(str(row), tokens) for row, tokens in enumerate((5, 5, 5, 5, 4, 4, 4, 3, 3, 2))]
    cluster = ClusterSpec(2, 2, 20, recomputation=Recomputation(1.0, 0, 40, 20))
    problem = checked_problem(samples, cluster, cost, sync="micro_batch")
    before = schedule_of([[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], [1, 1], [0, 0])
    assert (time_of(problem, before), time_of(problem, exchanged(problem, before))) == (100.0, 86.0)


def test_a_batch_of_very_many_sequences_is_left_as_it_is() -> None:
    """One turn would compare 400 million exchanges."""
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0})
    samples = [Sample(str(row), 1 + row % 3) for row in range(40_000)]
    problem = checked_problem(samples, ClusterSpec(2, 2, 100_000), cost, sync="micro_batch")
    before = schedule_of([list(range(0, 40_000, 2)), list(range(1, 40_000, 2))], [1, 1], [0, 0])
    assert packs_of(exchanged(problem, before)) == packs_of(before)


def test_no_more_exchanges_are_compared_than_there_is_time_for() -> None:
    """The first turn would compare 50: those of the longest pack's nothing and four sequences with the nothing of both
    packs and all eight sequences."""
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0})
    samples = [Sample(str(row), tokens) for row, tokens in enumerate((5, 5, 4, 4, 2, 2, 1, 1))]
    problem = checked_problem(samples, ClusterSpec(2, 2, 100), cost, sync="micro_batch")
    before = schedule_of([[0, 1, 2, 3], [4, 5, 6, 7]], [1, 1], [0, 0])
    after, compared = with_exchanges(problem, before, 49.0)
    assert packs_of(after) == packs_of(before)
    assert compared < 50.0  # parts were listed, nothing else
    after, compared = with_exchanges(problem, before, 1e4)
    assert time_of(problem, after) == 12.0
    assert 50.0 < compared < 1e4


def test_of_two_packs_that_take_equally_long_one_after_the_other_gets_shorter() -> None:
    """5 and 4 twice, beside 1, 1 and 1: after the first exchange the micro-batch still takes 9 s."""
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0})
    samples = [Sample(str(row), tokens) for row, tokens in enumerate((5, 4, 5, 4, 1, 1, 1))]
    problem = checked_problem(samples, ClusterSpec(3, 3, 10), cost, sync="micro_batch")
    before = schedule_of([[0, 1], [2, 3], [4, 5, 6]], [1, 1, 1], [0, 0, 0])
    assert time_of(problem, before) == 9.0
    assert time_of(problem, exchanged(problem, before)) <= 8.0


def test_exchanges_that_undo_one_another_end() -> None:
    """5 and 5 beside 10, and 5 and 4 beside 10 in another micro-batch, which may swap 5 and 4 for ever: the giver's
    pack gets shorter, and no micro-batch longer."""
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0})
    samples = [Sample(str(row), tokens) for row, tokens in enumerate((5, 5, 10, 5, 4, 10))]
    problem = checked_problem(samples, ClusterSpec(2, 2, 10), cost, sync="micro_batch")
    before = schedule_of([[0, 1], [2], [3, 4], [5]], [1, 1, 1, 1], [0, 0, 1, 1])
    after, compared = with_exchanges(problem, before)
    assert time_of(problem, after) == time_of(problem, before) == 20.0
    assert compared < 2000.0


def test_two_sequences_are_exchanged_for_one() -> None:
    """7, 7, 3 and 3 s beside 9 and 9 s: 3 and 7 s for 9 s."""
    cost = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0})
    samples = [Sample(str(row), tokens) for row, tokens in enumerate((7, 7, 3, 3, 9, 9))]
    problem = checked_problem(samples, ClusterSpec(2, 2, 20), cost, sync="micro_batch")
    before = schedule_of([[0, 1, 2, 3], [4, 5]], [1, 1], [0, 0])
    assert best_exchange(problem, before, most=1) is None
    assert (time_of(problem, before), time_of(problem, exchanged(problem, before))) == (20.0, 19.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6000), st.integers(0, 3)), min_size=2, max_size=40), st.integers(1, 9),
       st.integers(1, 3), st.sampled_from([ALL_TO_ALL, RING]), st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def test_shorter_with_the_same_groups_in_their_memory(
    lengths: list[tuple[int, int]], num_ranks: int, degree: int, cost: CostModel, uneven: bool, by_search: bool,
    seed: int,
) -> None:
    speeds = tuple(np.random.default_rng(seed).uniform(0.5, 1.0, num_ranks)) if uneven else ()
    cluster = ClusterSpec(num_ranks, 4, 8192, speeds)
    cost = replace(cost, vision_linear_s=1e-4, encoder_pass_s=0.01)
    samples = [Sample(str(row), tokens, 0, tuple((1, 16, 8 * (row % 3 + image)) for image in range(1, images + 1)))
               for row, (tokens, images) in enumerate(lengths)]
    problem = checked_problem(samples, cluster, cost, sync="micro_batch")
    if by_search:
        before = micro_batch_schedule(problem, problem.machine, least_degrees(range(1, num_ranks + 1), num_ranks))
    else:
        before = uniform(problem, Layout(min(degree, num_ranks), 8192))
    check(problem, before, exchanged)


@pytest.mark.parametrize("num_batches", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_near_a_slow_search_that_always_makes_the_best_exchange(num_batches: int) -> None:
    """Five sequences a rank, random packs; the best exchange of all is looked for by exact times."""
    ratios = []
    for seed in range(num_batches):
        generator = np.random.default_rng(seed)
        samples = [Sample(str(row), int(tokens), 0, ((1, 16, 16),) * int(images))
                   for row, (tokens, images) in enumerate(zip(generator.integers(200, 3000, 15),
                                                              generator.integers(0, 3, 15)))]
        problem = checked_problem(samples, ClusterSpec(3, 4, 8192), replace(ALL_TO_ALL, vision_linear_s=1e-4),
                                  sync="micro_batch")
        before = uniform(problem, Layout(1, 6000))
        slow = before
        while (better := best_exchange(problem, slow)) is not None:
            slow = better
        ratios.append(time_of(problem, exchanged(problem, before)) / time_of(problem, slow))
    assert max(ratios) < 1.1
    assert np.mean(ratios) < 1.03
