"""Which plans are measured on which ranks."""

from __future__ import annotations

import pytest

from dhp_ray.measure.rounds import PARTS, PASSES, ROUND_TOKENS, parts_of, passes_of, rounds_of
from tests.measure.specs import SIZES, spec


def test_every_rank_runs_the_same_packs_alone() -> None:
    for part in ("packs", "images"):
        for round_ in rounds_of(part, spec(3)):
            packs = [[group.pack.sequences for group in round_.plan.groups if group.ranks == (rank,)]
                     for rank in range(3)]
            assert packs[0] == packs[1] == packs[2]
            assert len(set(packs[0])) == len(packs[0])
            tokens = sum(round_.plan.samples[row].num_tokens for rows in packs[0] for row in rows)
            assert tokens <= (ROUND_TOKENS + 1) * SIZES.max_tokens
            for rank in range(3):
                assert [pack.index for pack in round_.plan.rank_plan(1, rank).packs]


def test_rings_are_of_neighbours_inside_a_node_and_of_pairs_across_two() -> None:
    several = spec(nodes=(0, 0, 0, 0, 0, 1, 1))
    assert several.degrees() == [2, 4, 5]
    assert several.groups(2) == [(0, 1), (2, 3), (5, 6)]
    assert several.groups(5) == [(0, 1, 2, 3, 4)]
    assert several.pairs_across() == [(0, 5), (1, 6)]
    assert {group.ranks for round_ in rounds_of("rings across", several) for group in round_.plan.groups} == {
        (0, 5), (1, 6)}
    degrees = {group.degree for round_ in rounds_of("rings", several) for group in round_.plan.groups}
    assert degrees == {2, 4, 5}
    assert all(round_.plan.cluster.crosses(group.ranks) for round_ in rounds_of("rings across", several)
               for group in round_.plan.groups)


def test_rings_have_small_packs_with_and_without_images() -> None:
    """What every pack of several ranks takes shows in small ones."""
    plans = [round_.plan for round_ in rounds_of("rings", spec(quick=False))]
    packs = [[plan.samples[row] for row in group.pack.sequences] for plan in plans for group in plan.groups]
    for images in (False, True):
        tokens = [sum(sample.num_tokens for sample in pack) for pack in packs
                  if any(sample.vision_grids for sample in pack) is images]
        assert len(tokens) > 7
        assert sum(size < SIZES.max_tokens / 2 for size in tokens) > 3


@pytest.mark.parametrize(("changed", "left_out"), [
    ({}, {"rings across"}), ({"num_ranks": 1}, {"rings", "rings across", "exchanges", "groups"}),
    ({"sync": "micro_batch"}, {"rings across", "apart"}),
    ({"sizes": SIZES._replace(grids=())}, {"rings across", "images", "apart"}),
    ({"nodes": (0, 1)}, {"rings"})])
def test_parts_that_there_is_nothing_to_measure_of_are_left_out(changed: dict, left_out: set[str]) -> None:
    assert set(PARTS) - set(parts_of(spec(**changed))) == left_out


def test_passes_go_over_all_parts_with_rounds_before_the_next_begins() -> None:
    parts = parts_of(spec(quick=False))
    order = passes_of(parts, spec(quick=False).num_passes)
    rounds = ["packs", "images", "apart", "rings"]
    assert order == [*rounds * PASSES, "exchanges", "groups", "memory"]
    assert [part for part in order if rounds_of(part, spec(quick=False))] == rounds * PASSES
    assert passes_of(parts, spec(quick=True).num_passes) == parts


def test_a_pack_is_a_micro_batch_where_ranks_go_in_step() -> None:
    for round_ in rounds_of("images", spec(sync="micro_batch")):
        assert len({(group.micro_batch, group.pack) for group in round_.plan.groups}) == len(round_.plan.groups) // 2
        assert round_.plan.rank_plan(1, 1).num_micro_batches == len(round_.plan.groups) // 2


def test_images_apart_are_encoded_by_the_rank_that_has_them() -> None:
    for round_ in rounds_of("apart", spec()):
        assert round_.plan.vision.apart
        for group in round_.plan.groups:
            assert set(group.encoders) == set(group.ranks)
