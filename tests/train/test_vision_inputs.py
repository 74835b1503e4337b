"""What ranks encode for one another: who sends which rows, and in which order they come."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.planner.plan import ClusterSpec, GroupPlan, Pack, Plan, RankPlan, Sample, planned_samples
from dhp_ray.train.encoder_phases import received_rows
from dhp_ray.train.payload import Payload
from dhp_ray.train.step_inputs import StepInputs, collated
from dhp_ray.train.vision_inputs import passes_of, vision_inputs
from tests.packs import TOKEN_IDS, Film, make_sample, own_payloads, rough_model, with_images_apart

MADE = [make_sample("a", [20, (1, 4, 8), 30, (1, 8, 6), 7]), make_sample("b", [33]),
        make_sample("c", [5, Film(0.5, ((2, 4, 4), (1, 4, 4))), 30]), make_sample("d", [9, (1, 4, 4), 11])]
SAMPLES = tuple(sample for sample, _ in MADE)
PAYLOADS = {sample.id: payload for sample, payload in MADE}


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    return rough_model()


def three_packs(pass_patches: int = 0) -> Plan:
    """Five images on four ranks, one of which runs no pack; two packs share ranks."""
    groups = (GroupPlan((2, 0), Pack((0, 1)), 1.0, encoders=(2, 0)), GroupPlan((0,), Pack((3,)), 1.0, encoders=(0,)),
              GroupPlan((2, 1), Pack((2,)), 1.0, encoders=(2, 1)))
    plan = Plan("listed", "step", ClusterSpec(4, 4, 200), SAMPLES, groups, 1.0, 1.0)
    plan = with_images_apart(plan, True, pass_patches)
    plan.validate()
    return plan


def inputs_of(plan: Plan, rank: int, adapter: ModelAdapter) -> StepInputs:
    rank_plan = plan.rank_plan(1, rank)
    own = {name: payload for pack in (*rank_plan.packs, *rank_plan.encoded)
           for name, payload in own_payloads(pack, PAYLOADS, rank).items()}
    return collated(rank_plan, own, adapter)


@pytest.mark.parametrize(("patches", "most", "expected"), [
    ([], 10, []), ([4, 4, 4], 0, [(0, 3)]), ([4, 4, 4], 8, [(0, 2), (2, 3)]), ([4, 4, 4], 1, [(0, 1), (1, 2), (2, 3)]),
    ([3, 9, 3, 3], 6, [(0, 1), (1, 2), (2, 4)])])
def test_passes_are_as_long_as_they_may_be(patches: list[int], most: int, expected: list[tuple[int, int]]) -> None:
    assert passes_of(patches, most) == expected


@pytest.mark.parametrize("pass_patches", [0, 40])
def test_every_image_token_gets_its_own_feature(adapter: ModelAdapter, pass_patches: int) -> None:
    """A feature stands for itself: the sample's number, its image, the token of that image."""
    plan = three_packs(pass_patches)
    inputs = [inputs_of(plan, rank, adapter) for rank in range(4)]
    features = [features_of(plan.rank_plan(1, rank)) for rank in range(4)]
    for receiver, own in enumerate(inputs):
        counts, rows_of = received_rows([pack.received_from for pack in own.inputs],
                                        torch.device("cpu"))
        received = []
        for sender, count in counts.items():
            assert inputs[sender].vision is not None
            rows = inputs[sender].vision.send_index[receiver]  # type: ignore[union-attr]
            assert len(rows) == count
            received += [features[sender][row] for row in rows.tolist()]
        for pack, part, rows in zip(own.packs, own.inputs, rows_of, strict=True):
            places = part.layout.index(part.member)[part.vision_token_index].tolist()
            wanted = tokens_of(pack.samples)
            assert [received[row] for row in rows.tolist()] == [wanted[place] for place in places]
            assert len(places) == int(sum((part.token_ids == TOKEN_IDS[name]).sum() for name in ("image", "video")))
    assert all(sum(images.num_rows for images in own.vision.passes) == len(mine)  # type: ignore[union-attr]
               for own, mine in zip(inputs, features))
    assert any(rank not in {0, 1, 2} for rank in {encoder for group in plan.groups for encoder in group.encoders})


def features_of(plan: RankPlan) -> list[tuple[str, int, int]]:
    """Rows that a rank encodes, in plan order."""
    found = []
    for pack in plan.encoded:
        encoders = iter(pack.encoders)
        for sample in pack.samples:
            for image, grid in enumerate(sample.vision_grids):
                if next(encoders) == plan.rank:
                    found += [(sample.id, image, token) for token in range(prod(grid) // 4)]
    return found


def tokens_of(samples: tuple[Sample, ...]) -> dict[int, tuple[str, int, int]]:
    """What each image token of a pack stands for, by its place."""
    found, start = {}, 0
    for sample in samples:
        ids = torch.from_numpy(PAYLOADS[sample.id].input_ids)
        places = iter(((ids == TOKEN_IDS["image"]) | (ids == TOKEN_IDS["video"])).nonzero()[:, 0].tolist())
        for image, grid in enumerate(sample.vision_grids):
            found |= {start + next(places): (sample.id, image, token) for token in range(prod(grid) // 4)}
        start += sample.num_tokens
    return found


def test_a_rank_needs_the_samples_that_it_runs_or_encodes_of() -> None:
    plan = three_packs()
    needed = [{sample.id for sample in planned_samples(plan.rank_plan(1, rank))} for rank in range(4)]
    assert needed == [{"a", "b", "c", "d"}, {"c", "d"}, {"a", "b", "c"}, {"a", "c"}]


def test_a_sample_that_cannot_be_used_is_not_encoded(adapter: ModelAdapter) -> None:
    inputs = inputs_of(three_packs(), 3, adapter)
    assert inputs.vision is not None
    before = [images.grids for images in inputs.vision.passes]
    inputs.mask(["a"], adapter)
    assert inputs.vision is not None
    (images,) = inputs.vision.passes
    assert images.grids == tuple(grid for grid in before[0] if grid not in SAMPLES[0].vision_grids)
    assert len(images.grids) == len(before[0]) - 1
    inputs.mask(["c"], adapter)
    assert inputs.vision is not None
    assert (inputs.vision.passes, inputs.vision.send_index) == ([], {})


def test_a_payload_that_is_missing_or_wrong_is_refused(adapter: ModelAdapter) -> None:
    plan = three_packs().rank_plan(1, 3)
    with pytest.raises(ValueError, match="sample a: no payload for the images that rank 3 encodes"):
        vision_inputs(plan, {}, adapter)
    short = PAYLOADS["a"].pixels[0]
    assert short is not None
    wrong: Payload = replace(PAYLOADS["a"], pixels=[short[:-1], short[:-1]])
    with pytest.raises(ValueError, match=r"sample a: image \d has patches"):
        vision_inputs(plan, {**PAYLOADS, "a": wrong}, adapter)
