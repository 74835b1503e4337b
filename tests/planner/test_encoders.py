"""Who encodes which image: each goes to the member that would finish it first."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.encoder.members import encoders_of, fullest_member_s
from dhp_ray.planner.primitives.best_fit import Packs
from dhp_ray.planner.problem import DEGREES, packed, problem_of, times_at
from dhp_ray.planner.schedule import Schedule, firsts_of
from dhp_ray.planner.timeline import times_of


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 50), max_size=8), min_size=1, max_size=6), st.integers(1, 5), st.booleans(),
       st.booleans(), st.randoms(use_true_random=False))
def test_each_image_goes_to_the_member_with_room_that_finishes_it_first(
    images, degree, uneven, has_large_ones, random
):
    """Room for as many patches as the mean and the largest image."""
    speeds = np.array([random.choice([0.5, 1.0, 2.0]) if uneven else 1.0 for _ in range(degree + 1)])
    cut = random.randint(1, len(images))
    sizes = [cut, len(images) - cut] if cut < len(images) else [cut]
    ranks = np.array([*range(1, degree + 1), *([0] if len(sizes) > 1 else [])])
    schedule = Schedule(np.arange(len(images)), firsts_of(sizes), ranks, firsts_of([degree, 1][:len(sizes)]),
                        np.zeros(len(sizes), dtype=np.int64))
    flat = np.array([float(seconds) for row in images for seconds in row])
    patches = np.array([float(random.randint(1, 9)) for _ in flat]) if has_large_ones else flat
    first_member = schedule.first_rank
    encoders, first, longest_s = encoders_of(schedule, firsts_of([len(row) for row in images]), flat, patches, speeds)
    for group, rows in enumerate([images[:cut], images[cut:]][:len(sizes)]):
        seconds = [value for row in rows for value in row]
        paces = speeds[schedule.ranks[schedule.first_rank[group]:schedule.first_rank[group + 1]]]
        owner = [row for row, of_row in enumerate(rows) for _ in of_row]
        held = patches[first[group]:first[group + 1]].tolist()
        longest_first, by_sequence = (dealt(seconds, held, order, paces) for order in (
            sorted(range(len(seconds)), key=lambda image: -seconds[image]),
            sorted(range(len(seconds)), key=lambda image: (owner[image], -seconds[image]))))
        wanted, fullest = by_sequence if by_sequence[1] < longest_first[1] else longest_first
        longest_first = sorted(range(len(seconds)), key=lambda image: -seconds[image])
        for _, run in groupby(longest_first, key=lambda image: (seconds[image], held[image])):
            alike = list(run)  # neighbours to one member
            for image, member in zip(alike, sorted((wanted[image] for image in alike),
                                                   key=lambda member: schedule.ranks[first_member[group] + member])):
                wanted[image] = member
        members = schedule.ranks[schedule.first_rank[group]:schedule.first_rank[group + 1]]
        assert encoders[first[group]:first[group + 1]].tolist() == [members[member] for member in wanted]
        assert longest_s[group] == fullest
        found = np.bincount(encoders[first[group]:first[group + 1]], held, minlength=len(speeds))
        assert found.max() <= sum(held) / len(members) + max(held, default=0)


def dealt(
    seconds: Sequence[float], patches: Sequence[float], order: Sequence[int], paces: Sequence[float]
) -> tuple[list[int], float]:
    """(the member that finishes each image first, images taken in this order; seconds of the fullest member)"""
    loads, held, found = [0.0] * len(paces), [0.0] * len(paces), [0] * len(seconds)
    most = sum(patches) / len(paces) + max(patches, default=0.0)
    for image in order:
        found[image] = min((member for member in range(len(paces)) if held[member] + patches[image] <= most),
                           key=lambda member: (loads[member] + seconds[image] / paces[member], member))
        loads[found[image]] += seconds[image] / paces[found[image]]
        held[found[image]] += patches[image]
    return found, max(loads)


def test_without_vision_costs_patches_are_dealt_out_and_cost_nothing():
    cost = CostModel(1e-9, 1e-4, 0.0, 0.0, {2: 1e9})
    samples = [Sample("0", 10, 100, ((1, 10, 10), (1, 2, 2), (1, 9, 10)))]
    plan = plan_batch(samples, ClusterSpec(2, 2, 60), cost, planner="static")
    assert plan.groups[0].encoders == (0, 1, 1)
    assert plan.groups[0].predicted_time_s == cost.pack_time_s([110], (0, 1), plan.cluster)


def test_a_member_takes_neighbouring_entries_of_a_video():
    """Ten entries of one length and a last one, shorter, on three members."""
    schedule = Schedule(np.array([0]), np.array([0, 1]), np.array([4, 5, 7]), np.array([0, 3]),
                        np.zeros(1, dtype=np.int64))
    encoders, _, longest_s = encoders_of(schedule, np.array([0, 11]), np.array([2.0] * 10 + [1.0]),
                                         np.array([2.0] * 10 + [1.0]), np.ones(8))
    assert encoders.tolist() == [4, 4, 4, 4, 5, 5, 5, 7, 7, 7, 5]
    assert longest_s.tolist() == [8.0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0, 1, 4, 5, 16]), max_size=20), min_size=1, max_size=8),
       st.integers(1, DEGREES + 3), st.booleans(), st.randoms(use_true_random=False))
def test_what_the_search_takes_a_pack_for_is_what_it_is_priced_at(images, degree, has_vision_cost, random):
    """Single sequences on up to DEGREES ranks. On more, and of packs, baselines take images as dealt out evenly."""
    vision_s = 3e-3 if has_vision_cost else 0.0
    cost = CostModel(1e-9, 1e-4, 100.0, 0.0, {2: 1e6}, encoder_pass_s=0.01 * has_vision_cost, vision_linear_s=vision_s)
    samples = [Sample(str(row), random.randint(1, 90), 0, tuple((1, 1, patches) for patches in of_sample))
               for row, of_sample in enumerate(images)]
    problem = problem_of(samples, ClusterSpec(degree, degree, 10_000), cost, "step")
    sizes = firsts_of([random.randint(1, 3) for _ in images])
    first = np.array([*sizes[sizes < len(samples)], len(samples)])
    packs = Packs(np.array(random.sample(range(len(samples)), len(samples))), first)
    for items, rows, begins in ((problem.items, np.arange(len(samples)), np.arange(len(samples) + 1)),
                                (packed(problem, packs), packs.rows, packs.first)):
        count = len(begins) - 1
        schedule = Schedule(rows, begins, np.tile(np.arange(degree), count), firsts_of([degree] * count),
                            np.zeros(count, dtype=np.int64))
        found, priced = times_at(items, degree, problem.machine), times_of(problem, schedule).pack_s
        if degree <= DEGREES and items is problem.items:
            np.testing.assert_allclose(found, priced, rtol=1e-12)
        else:
            assert (found <= priced * (1 + 1e-12)).all()


def test_the_member_with_most_to_encode():
    """The example of `members.py`, and a pack without images."""
    found = fullest_member_s(np.array([0, 1]), np.array([0, 1, 2]), np.array([0, 5, 5]),
                             np.array([3.0, 2.0, 3.0, 2.0, 3.0]), np.ones(5), 6)
    assert found.tolist() == [[13.0, 7.0, 5.0, 4.0, 3.0, 3.0], [0.0] * 6]


def test_a_fast_member_takes_no_more_images_than_memory_was_counted_for():
    """Nine equal images on members of speeds 4 and 1: by time alone 8 and 1; room is for 4.5 and one more."""
    schedule = Schedule(np.array([0]), np.array([0, 1]), np.array([0, 1]), np.array([0, 2]),
                        np.zeros(1, dtype=np.int64))
    encoders, _, longest_s = encoders_of(schedule, np.array([0, 9]), np.ones(9), np.full(9, 16.0),
                                         np.array([4.0, 1.0]))
    assert np.bincount(encoders).tolist() == [5, 4]
    assert longest_s.tolist() == [4.0]
