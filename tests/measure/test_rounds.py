"""What is measured: packs, the plans that run them, and that every model takes them."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from dhp_ray.measure.member import payload_of
from dhp_ray.measure.rounds import PARTS, ROUND_TOKENS, Sizes, image_loads, text_loads
from dhp_ray.model.loss import IGNORED
from dhp_ray.planner.cost.work import TERMS, work_of
from dhp_ray.train.collate import check_payload
from tests.measure.known_world import SIZES, spec
from tests.packs import PRESETS, rough_model


def test_every_rank_runs_the_same_packs_alone() -> None:
    for part in ("packs", "images"):
        for plan in spec(3).rounds(part):
            packs = [[group.sequences for group in plan.groups if group.ranks == (rank,)]
                     for rank in range(3)]
            assert packs[0] == packs[1] == packs[2]
            assert len(set(packs[0])) == len(packs[0])
            tokens = sum(plan.samples[row].num_tokens for rows in packs[0] for row in rows)
            assert tokens <= (ROUND_TOKENS + 1) * SIZES.max_tokens
            for rank in range(3):
                assert [pack.index for pack in plan.rank_plan(1, rank).packs]


def test_rings_are_of_neighbours_inside_a_node_and_of_pairs_across_two() -> None:
    several = spec(nodes=(0, 0, 0, 0, 0, 1, 1))
    assert several.rings() == [[(0, 1), (2, 3), (5, 6)], [(0, 1, 2, 3)], [(0, 1, 2, 3, 4)], [(0, 5), (1, 6)]]
    assert spec(nodes=(0, 1)).rings() == [[(0, 1)]]
    ran = [group for plan in several.rounds("rings") for group in plan.groups]
    assert {group.ranks for group in ran} == {ranks for groups in several.rings() for ranks in groups}
    assert {group.ranks for group in ran if group.degree == 2} == {(0, 1), (2, 3), (5, 6), (0, 5), (1, 6)}


def test_rings_have_small_packs_with_and_without_images() -> None:
    """What every pack of several ranks takes shows in small ones."""
    plans = spec().rounds("rings")
    packs = [[plan.samples[row] for row in group.sequences] for plan in plans for group in plan.groups]
    for images in (False, True):
        tokens = [sum(sample.num_tokens for sample in pack) for pack in packs
                  if any(sample.vision_grids for sample in pack) is images]
        assert len(tokens) > 5
        assert sum(size < SIZES.max_tokens / 2 for size in tokens) > 3


@pytest.mark.parametrize(("changed", "left_out"), [
    ({}, set()), ({"num_ranks": 1}, {"rings", "exchanges"}), ({"sync": "micro_batch"}, set()),
    ({"sizes": SIZES._replace(grids=())}, {"images"}), ({"nodes": (0, 1)}, set())])
def test_parts_that_there_is_nothing_to_measure_of_are_left_out(changed: dict, left_out: set[str]) -> None:
    assert set(PARTS) - set(spec(**changed).parts()) == left_out


def test_a_pack_is_a_micro_batch_where_ranks_go_in_step() -> None:
    for plan in spec(sync="micro_batch").rounds("images"):
        assert len({(group.micro_batch, group.sequences) for group in plan.groups}) == len(plan.groups) // 2
        assert len(plan.rank_plan(1, 1).micro_batches) == len(plan.groups) // 2


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_packs_fit_and_are_always_the_same_ones(degree: int) -> None:
    loads = [*text_loads(SIZES, degree), *image_loads(SIZES, degree)]
    assert all(0 < SIZES.tokens(load) <= degree * SIZES.max_tokens for load in loads)
    assert len(set(loads)) == len(loads)
    assert loads == [*text_loads(SIZES, degree), *image_loads(SIZES, degree)]
    assert max(map(SIZES.tokens, loads)) > 0.9 * degree * SIZES.max_tokens


def test_packs_tell_all_constants_apart() -> None:
    """The matrix of what each constant is multiplied with has full rank, also with packs of text alone."""
    found = [work_of(plan).amounts for part in ("packs", "images") for plan in spec().rounds(part)]
    scaled = np.concatenate(found) / np.concatenate(found).max(axis=0)
    assert np.linalg.cond(scaled) < 100
    assert scaled.shape[1] == len(TERMS)


def test_no_pack_is_empty_on_ranks_with_hardly_any_memory() -> None:
    for max_tokens in (8, 16, 24):
        assert all(text_loads(SIZES._replace(max_tokens=max_tokens)))


def test_without_an_encoder_there_are_no_images() -> None:
    assert image_loads(Sizes(512, (), 4)) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_every_family_takes_them(preset: str) -> None:
    adapter = rough_model(preset=preset)
    grid = adapter.smallest_grid if preset == "tiny_internvl" else (1, 8, 12)
    load = ((9, (grid, grid) if adapter.shape.vision else ()), (40, ()))
    sizes = Sizes(512, (), adapter.merge_area)
    for sample in spec(1, sizes=sizes).plan_of([((0,), load)]).samples:
        payload = payload_of(sample, adapter, [True, False][: len(sample.vision_grids)])
        check_payload(sample, payload, adapter, (True, False)[: len(sample.vision_grids)])
        assert [pixels is None for pixels in payload.pixels] == [False, True][: len(sample.vision_grids)]
        assert sample.vision_tokens == sum(map(prod, sample.vision_grids)) // adapter.merge_area
        labelled = payload.labels != IGNORED
        assert labelled.sum() == sample.text_tokens - sample.text_tokens // 2
        assert (payload.labels[labelled] == payload.input_ids[labelled]).all()
