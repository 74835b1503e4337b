"""What ranks encode for one another: who sends which rows, and in which order they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch

from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Grid, Pack, Plan, RankPlan, Sample, VisionPlan, planned_samples
from dhp_ray.train.collate import Payload
from dhp_ray.train.images_apart import VisionInputs, received_rows, vision_inputs
from dhp_ray.train.step_inputs import StepInputs, collated
from tests.packs import PATCH_DIMS, TOKEN_IDS, Film, make_sample, own_payloads, rough_model, with_images_apart

PARTS: dict[str, list[int | Grid | Film]] = {
    "a": [20, (1, 4, 8), 30, (1, 8, 6), 7], "b": [33], "c": [5, Film(0.5, ((2, 4, 4), (1, 4, 4))), 30],
    "d": [9, (1, 4, 4), 11]}
MADE = {preset: [make_sample(name, parts, preset=preset) for name, parts in PARTS.items()] for preset in PATCH_DIMS}
SAMPLES = tuple(sample for sample, _ in MADE["tiny"])
PAYLOADS = {sample.id: payload for sample, payload in MADE["tiny"]}


@pytest.fixture(scope="module")
def adapter() -> LanguageModel:
    return rough_model()


def three_packs(pass_patches: int = 0, preset: str = "tiny") -> Plan:
    """Five images on four ranks, one of which runs no pack; two packs share ranks."""
    groups = (Pack((2, 0), (0, 1), 1.0, encoders=(2, 0)), Pack((0,), (3,), 1.0, encoders=(0,)),
              Pack((2, 1), (2,), 1.0, encoders=(2, 1)))
    samples = tuple(sample for sample, _ in MADE[preset])
    plan = Plan("listed", "step", ClusterSpec(4, 4, 200), samples, groups, 1.0, 1.0)
    plan = with_images_apart(plan, True, pass_patches)
    plan.validate()
    return plan


def inputs_of(
    plan: Plan, rank: int, adapter: LanguageModel, masked: Sequence[str] = (), preset: str = "tiny"
) -> StepInputs:
    """Of one rank, which knows from the start that `masked` cannot be used."""
    rank_plan = plan.rank_plan(1, rank)
    payloads = {sample.id: replace(payload, masked=sample.id in masked) for sample, payload in MADE[preset]}
    own = {name: payload for pack in (*rank_plan.packs, *rank_plan.encoded)
           for name, payload in own_payloads(pack, payloads, rank).items()}
    return collated(rank_plan, own, adapter)


@pytest.mark.parametrize(("patches", "most", "expected"), [
    ([16, 16, 16], 0, [[0, 1, 2]]), ([16, 16, 16], 32, [[0, 1], [2]]), ([16, 16, 16], 4, [[0], [1], [2]]),
    ([12, 36, 12, 12], 24, [[0], [1], [2, 3]])])
def test_passes_are_as_long_as_they_may_be_and_take_the_pixels(
    patches: list[int], most: int, expected: list[list[int]], adapter: LanguageModel
) -> None:
    sample, payload = make_sample("e", [3, *((1, 2, count // 2) for count in patches), 2])
    payload.pixels[:] = [np.full((count, adapter.patch_dim), image, np.float32) for image, count in enumerate(patches)]
    found = encoded_of(sample, payload, most, adapter).passes
    assert [[round(grid_pixels[0, 0].item()) for grid_pixels in of_pass.pixels.split(
        [prod(grid) for grid in of_pass.grids])] for of_pass in found] == expected
    assert [of_pass.num_rows for of_pass in found] == [sum(patches[image] for image in images) // 4
                                                       for images in expected]
    for of_pass, images in zip(found, expected):
        for image in images:
            kept = payload.pixels[image]
            assert isinstance(kept, torch.Tensor)
            assert bool((kept == image).all())
            assert kept.untyped_storage().data_ptr() == of_pass.pixels.untyped_storage().data_ptr()


def encoded_of(
    sample: Sample, payload: Payload, most: int, adapter: LanguageModel, passes: tuple[int, ...] = (),
    num_passes: int = 0,
) -> VisionInputs:
    """Of one rank that encodes all images of a sample."""
    pack = Pack((0,), (), 1.0, encoders=(0,) * len(sample.vision_grids), passes=passes, samples=(sample,))
    plan = RankPlan(1, 0, (), (pack,), vision=VisionPlan("world", True, most, num_passes), encoded=(pack,))
    return vision_inputs(plan, {sample.id: payload}.__getitem__, adapter)


@pytest.mark.parametrize("masked", [False, True])
def test_in_lockstep_a_rank_runs_the_passes_of_the_plan(masked: bool, adapter: LanguageModel) -> None:
    """Whatever can be used: a pass without an image has a smallest one, whose features go nowhere."""
    sample, payload = make_sample("e", [3, (1, 4, 4), 5, (1, 4, 6), (1, 4, 8), 2])
    found = encoded_of(sample, replace(payload, masked=masked), 0, adapter, (2, 0, 2), 4)
    tiny = (1, 2, 2)
    assert [of_pass.grids for of_pass in found.passes] == (
        [(tiny,)] * 4 if masked else [((1, 4, 6),), (tiny,), ((1, 4, 4), (1, 4, 8)), (tiny,)])
    assert [of_pass.num_rows for of_pass in found.passes] == ([1] * 4 if masked else [6, 1, 4 + 8, 1])
    # rows of the second image come first, then one that nobody takes
    assert {rank: rows.tolist() for rank, rows in found.send_index.items()} == (
        {} if masked else {0: [*range(7, 11), *range(6), *range(11, 19)]})


@pytest.mark.parametrize(("preset", "pass_patches"), [
    ("tiny", 0), ("tiny", 40), ("tiny_qwen3_vl", 40), ("tiny_internvl", 20)])
def test_every_image_token_gets_its_own_feature(preset: str, pass_patches: int) -> None:
    adapter, plan = rough_model(preset=preset), three_packs(pass_patches, preset)
    inputs = [inputs_of(plan, rank, adapter, preset=preset) for rank in range(4)]
    check_exchange(plan, inputs, (), preset)
    assert any(encoder == 3 for group in plan.groups for encoder in group.encoders)
    passes = [len(own.vision.passes) for own in inputs if own.vision]
    assert max(passes) == (1 if pass_patches == 0 else 2)


@pytest.mark.parametrize("masked", ["a", "c", "d", "ac", "acd"])
def test_nor_do_features_of_others_change_places_where_samples_cannot_be_used(
    adapter: LanguageModel, masked: str
) -> None:
    """Known to some ranks from the start, and told to the others later."""
    plan = three_packs()
    inputs = [inputs_of(plan, rank, adapter, masked if rank % 2 else ()) for rank in range(4)]
    for own in inputs:
        own.mask(masked, adapter)
    check_exchange(plan, inputs, masked)


def check_exchange(plan: Plan, inputs: Sequence[StepInputs], masked: Sequence[str], preset: str = "tiny") -> None:
    """Exchange features that stand for themselves: the sample's name, its image, the token of that image."""
    features = [features_of(plan.rank_plan(1, rank), masked) for rank in range(4)]
    payloads = {sample.id: payload for sample, payload in MADE[preset]}
    for own, mine in zip(inputs, features):
        assert own.vision is not None
        assert sum(images.num_rows for images in own.vision.passes) == len(mine)
        images_of = list(dict.fromkeys((name, image) for name, image, _ in mine))
        assert [grid for images in own.vision.passes for grid in images.grids] == [
            tuple(payloads[name].grids[image]) for name, image in images_of]
        assert [patches for images in own.vision.passes for patches in images.pixels.tolist()] == [
            patches for name, image in images_of for patches in torch.as_tensor(payloads[name].pixels[image]).tolist()]
    for receiver, own in enumerate(inputs):
        counts, rows_of = received_rows([pack.received_from for pack in own.inputs], torch.device("cpu"))
        sent = {sender: other.vision.send_index[receiver] for sender, other in enumerate(inputs)
                if other.vision and receiver in other.vision.send_index}
        assert {sender: len(rows) for sender, rows in sent.items()} == counts
        received = [features[sender][row] for sender in counts for row in sent[sender].tolist()]
        for pack, part, rows in zip(own.packs, own.inputs, rows_of, strict=True):
            places = part.layout.index(part.member)[part.vision_token_index].tolist()
            placed = {place: found for place, found in tokens_of(pack.samples, payloads, masked).items()
                      if place in part.layout.index(part.member).tolist()}
            assert dict(zip(places, [received[row] for row in rows.tolist()], strict=True)) == placed


def features_of(plan: RankPlan, masked: Sequence[str]) -> list[tuple[str, int, int]]:
    """Rows that a rank encodes, in plan order."""
    found = []
    for pack in plan.encoded:
        encoders = iter(pack.encoders)
        for sample in pack.samples:
            for image, grid in enumerate(sample.vision_grids):
                if next(encoders) == plan.rank and sample.id not in masked:
                    found += [(sample.id, image, token) for token in range(prod(grid) // 4)]
    return found


def tokens_of(
    samples: Sequence[Sample], payloads: Mapping[str, Payload], masked: Sequence[str]
) -> dict[int, tuple[str, int, int]]:
    """What each image token of a pack stands for, by its place."""
    found: dict[int, tuple[str, int, int]] = {}
    start = 0
    for sample in samples:
        ids = torch.from_numpy(payloads[sample.id].input_ids)
        places = iter(((ids == TOKEN_IDS["image"]) | (ids == TOKEN_IDS["video"])).nonzero()[:, 0].tolist())
        for image, grid in enumerate(sample.vision_grids if sample.id not in masked else ()):
            found |= {start + next(places): (sample.id, image, token) for token in range(prod(grid) // 4)}
        start += sample.num_tokens
    return found


def test_patches_lie_in_the_inputs_alone(adapter: LanguageModel) -> None:
    """Also those of a sample whose other images are encoded elsewhere, and after another sample is made anew."""
    inputs = inputs_of(three_packs(40), 3, adapter)
    for masked in ((), ("a",)):
        inputs.mask(masked, adapter)
        assert inputs.vision is not None
        held = [pixels for payload in inputs.payloads.values() for pixels in payload.pixels if pixels is not None]
        assert all(isinstance(pixels, torch.Tensor) for pixels in held)
        assert ({pixels.untyped_storage().data_ptr() for pixels in held}  # type: ignore[union-attr]
                == {images.pixels.untyped_storage().data_ptr() for images in inputs.vision.passes})
        assert sum(map(len, held)) == sum(len(images.pixels) for images in inputs.vision.passes) > 0


def test_a_rank_needs_the_samples_that_it_runs_or_encodes_of() -> None:
    plan = three_packs()
    needed = [{sample.id for sample in planned_samples(plan.rank_plan(1, rank))} for rank in range(4)]
    assert needed == [{"a", "b", "c", "d"}, {"c", "d"}, {"a", "b", "c"}, {"a", "c"}]


def test_a_sample_that_cannot_be_used_is_not_encoded(adapter: LanguageModel) -> None:
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


def test_a_payload_that_is_wrong_is_refused(adapter: LanguageModel) -> None:
    plan = three_packs().rank_plan(1, 3)
    good = PAYLOADS["a"]
    short = good.pixels[0]
    assert short is not None
    for wrong, message in (
        (replace(good, pixels=[short[:-1], None]), r"image 0 has patches \(31, 1176\); its grid takes \(32, 1176\)"),
        (replace(good, pixels=[None, None]), r"image 0 has patches None; its grid takes \(32, 1176\)"),
        (replace(good, grids=good.grids[::-1], pixels=good.pixels[::-1]), r"2 images of grids \(\(1, 8, 6\), .*"),
        (replace(good, input_ids=good.input_ids[:-1]), r"80 token ids and 81 labels; planned: 81 of each"),
    ):
        with pytest.raises(ValueError, match=f"^sample a: {message}$"):
            vision_inputs(plan, {**PAYLOADS, "a": wrong}.__getitem__, adapter)
