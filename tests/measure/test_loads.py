"""Packs that are measured: what they hold, and that the model takes them."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from dhp_ray.measure.loads import Sizes, image_loads, samples_of, text_loads
from dhp_ray.measure.payloads import payload_of
from dhp_ray.measure.rounds import rounds_of
from dhp_ray.model.loss import IGNORED
from dhp_ray.planner.work import TERMS, work_of
from dhp_ray.train.payload import check_payload
from tests.measure.specs import SIZES, spec
from tests.packs import PATCH_DIMS, rough_model


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_packs_fit_and_are_always_the_same_ones(quick: bool, degree: int) -> None:
    loads = [*text_loads(SIZES, quick, degree), *image_loads(SIZES, quick, degree)]
    assert all(0 < SIZES.tokens(load) <= degree * SIZES.max_tokens for load in loads)
    assert len(set(loads)) == len(loads)
    assert loads == [*text_loads(SIZES, quick, degree), *image_loads(SIZES, quick, degree)]
    assert max(map(SIZES.tokens, loads)) > 0.9 * degree * SIZES.max_tokens


@pytest.mark.parametrize("quick", [True, False])
def test_packs_tell_all_constants_apart(quick: bool) -> None:
    """The matrix of what each constant is multiplied with has full rank, also with packs of text alone."""
    rounds = [round_ for part in ("packs", "images") for round_ in rounds_of(part, spec(quick=quick))]
    found = [work_of(round_.plan).amounts for round_ in rounds]
    scaled = np.concatenate(found) / np.concatenate(found).max(axis=0)
    assert np.linalg.cond(scaled) < 100
    assert scaled.shape[1] == len(TERMS)


def test_no_pack_is_empty_on_ranks_with_hardly_any_memory() -> None:
    for max_tokens in (8, 16, 24):
        assert all(text_loads(SIZES._replace(max_tokens=max_tokens), True))


def test_without_an_encoder_there_are_no_images() -> None:
    assert image_loads(Sizes(512, (), 4), quick=True) == []


@pytest.mark.parametrize("preset", sorted(PATCH_DIMS))
def test_every_family_takes_them(preset: str) -> None:
    adapter = rough_model(preset=preset)
    grid = adapter.smallest_grid if preset == "tiny_internvl" else (1, 8, 12)
    load = ((9, (grid, grid)), (40, ()))
    for sample in samples_of(load, adapter.merge_area, "a"):
        payload = payload_of(sample, adapter, [True, False][: len(sample.vision_grids)])
        check_payload(sample, payload, adapter, (True, False)[: len(sample.vision_grids)])
        assert [pixels is None for pixels in payload.pixels] == [False, True][: len(sample.vision_grids)]
        assert sample.vision_tokens == sum(map(prod, sample.vision_grids)) // adapter.merge_area
        labelled = payload.labels != IGNORED
        assert labelled.sum() == sample.text_tokens - sample.text_tokens // 2
        assert (payload.labels[labelled] == payload.input_ids[labelled]).all()
