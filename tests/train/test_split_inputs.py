"""Inputs of ranks that encode an image together: which patches each has, which rows go where, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.device import CPU
from dhp_ray.comm.pack_communicator import return_rows, send_rows
from dhp_ray.comm.transport import Transport
from dhp_ray.data.families import PRESETS
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Grid, Pack, Plan, encoded_images
from dhp_ray.train.collate import image_tokens
from dhp_ray.train.images_apart import planned_images, received_rows
from dhp_ray.train.step_inputs import StepInputs, collated
from tests.packs import PATCH_DIMS, Film, make_sample, own_payloads, rough_model, with_images_apart, with_splits
from tests.ranks import run_ranks

PARTS: dict[str, list[int | Grid | Film]] = {
    "a": [20, (1, 12, 20), 30, (1, 8, 6), 7], "b": [33], "c": [5, Film(0.5, ((3, 8, 20), (1, 8, 20))), 30],
    "d": [9, (1, 4, 4), 11]}
MADE = {preset: [make_sample(name, parts, preset=preset) for name, parts in PARTS.items()] for preset in PATCH_DIMS}
SPLITS = {3: (2, 0, 3)}
"""Of four ranks: image 3 is of c's, which has three steps in time."""


def plan_of(preset: str, sync: str = "step") -> Plan:
    """Five images on four ranks, one of which runs no pack; two packs share ranks."""
    groups = (Pack((2, 0), (0, 1), 1.0, encoders=(2, 0)),
              Pack((0,), (3,), 1.0, 0.0, int(sync == "micro_batch"), encoders=(0,)),
              Pack((2, 1), (2,), 1.0, 0.0, int(sync == "micro_batch"), encoders=(2, 1)))
    samples = tuple(sample for sample, _ in MADE[preset])
    plan = with_images_apart(Plan("listed", sync, ClusterSpec(4, 4, 700), samples, groups, 1.0, 1.0), True, 0)
    plan = with_splits(plan, SPLITS)
    plan.validate()
    return plan


def inputs_of(
    plan: Plan, rank: int, adapter: LanguageModel, preset: str, masked: Sequence[str] = ()
) -> StepInputs:
    rank_plan = plan.rank_plan(1, rank)
    payloads = {sample.id: replace(payload, masked=sample.id in masked) for sample, payload in MADE[preset]}
    own = {name: payload for pack in (*rank_plan.packs, *rank_plan.encoded)
           for name, payload in own_payloads(pack, payloads, rank).items()}
    return collated(rank_plan, own, adapter)


def numbered(plan: Plan, adapter: LanguageModel, masked: Sequence[str] = ()) -> dict[tuple[int, int], int]:
    """A number for each image token that is encoded, by pack and place in it."""
    found: dict[tuple[int, int], int] = {}
    for index, group in enumerate(plan.groups):
        start = 0
        for row in group.sequences:
            sample, payload = MADE[_preset(adapter)][row]
            tokens = image_tokens(payload, adapter) if sample.id not in masked else []
            for place in (place for of_image in tokens for place in of_image.tolist()):
                found[index, start + place] = len(found)
            start += sample.num_tokens
    return found


def rows_encoded(plan: Plan, inputs: StepInputs, numbers: dict[tuple[int, int], int], adapter: LanguageModel,
                 masked: Sequence[str]) -> list[int]:
    """The number of the token of each of a rank's rows of features, -1 of a smallest image's."""
    rank_plan, vision, tiny = inputs.plan, inputs.vision, [-1] * (prod(adapter.smallest_grid) // 4)
    assert vision is not None
    by_pass: dict[int, list[int]] = {number: [] for number in range(plan.vision.num_passes)}
    for image in planned_images(rank_plan):
        pack = rank_plan.encoded[image.pack]
        sample = pack.samples[image.sample]
        if sample.id in masked:
            continue
        payload = next(payload for other, payload in MADE[_preset(adapter)] if other.id == sample.id)
        start = sum(other.num_tokens for other in pack.samples[:image.sample])
        places = start + image_tokens(payload, adapter)[image.image]
        if image.num_parts > 1:
            area = prod(image.grid[1:]) // 4
            steps = [image.grid[0] // image.num_parts + (part < image.grid[0] % image.num_parts)
                     for part in range(image.num_parts)]
            first = sum(steps[:image.part]) * area
            places = places[first:first + steps[image.part] * area]
        by_pass.setdefault(image.number, []).extend(numbers[pack.index, place] for place in places.tolist())
    rows = [by_pass[number] or tiny for number in sorted(by_pass)]
    assert [len(of_pass) for of_pass in rows] == [found.num_rows for found in vision.passes]
    return [number for of_pass in rows for number in of_pass]


def _preset(adapter: LanguageModel) -> str:
    return next(preset for preset in PATCH_DIMS if PRESETS[preset].name == adapter.module.config.model_type)


@pytest.mark.parametrize("masked", ["", "a", "cd", "acd"])
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize("preset", PATCH_DIMS)
def test_every_token_gets_its_own_feature(preset: str, sync: str, masked: str) -> None:
    """Also where some ranks know of what cannot be used from the start, and others are told."""
    adapter, plan = rough_model(preset=preset), plan_of(preset, sync)
    assert any(group.splits for group in plan.groups)
    inputs = [inputs_of(plan, rank, adapter, preset, masked if rank % 2 else ()) for rank in range(4)]
    for own in inputs:
        own.mask(masked, adapter)
    numbers = numbered(plan, adapter, masked)
    rows = [rows_encoded(plan, own, numbers, adapter, masked) for own in inputs]
    assert sorted(number for of_rank in rows for number in of_rank if number >= 0) == sorted(numbers.values())
    for receiver, own in enumerate(inputs):
        counts, rows_of = received_rows([pack.received_from for pack in own.inputs], torch.device("cpu"))
        sent = {sender: other.vision.send_index[receiver] for sender, other in enumerate(inputs)
                if other.vision and receiver in other.vision.send_index}
        assert {sender: len(index) for sender, index in sent.items()} == counts
        received = [rows[sender][row] for sender in counts for row in sent[sender].tolist()]
        for pack, part, of_pack in zip(own.packs, own.inputs, rows_of, strict=True):
            places = part.layout.index(part.member)
            placed = {place: numbers[pack.index, place] for place in places.tolist() if (pack.index, place) in numbers}
            found = dict(zip(places[part.vision_token_index].tolist(), [received[row] for row in of_pack.tolist()],
                             strict=True))
            assert found == placed


@pytest.mark.parametrize("preset", PATCH_DIMS)
def test_a_rank_has_the_patches_of_its_parts_alone(preset: str) -> None:
    """Each once on all ranks together, in the inputs and nowhere else; also where they are collated once more."""
    adapter, plan = rough_model(preset=preset), plan_of(preset)
    whole = np.concatenate([patches for _, payload in MADE[preset] for patches in payload.pixels])
    held = []
    for rank in range(4):
        own = inputs_of(plan, rank, adapter, preset)
        before = [images.pixels.clone() for images in own.vision.passes]  # type: ignore[union-attr]
        own.vision = own._encoded(own.payloads.__getitem__, adapter)
        assert own.vision is not None
        assert all(torch.equal(images.pixels, kept) for images, kept in zip(own.vision.passes, before, strict=True))
        pixels = [rows for payload in own.payloads.values() for rows in payload.pixels if rows is not None]
        storages = {images.pixels.untyped_storage().data_ptr() for images in own.vision.passes}
        assert {torch.as_tensor(rows).untyped_storage().data_ptr() for rows in pixels} == storages
        held.append(torch.cat([images.pixels for images in own.vision.passes]))
    found = torch.cat(held)
    assert len(found) == len(whole)
    assert torch.equal(found[found[:, 0].argsort()], torch.from_numpy(whole)[torch.from_numpy(whole)[:, 0].argsort()])


def exchanged(rank: int, preset: str, sync: str) -> bool:
    """Whether features and gradients that the ranks exchange are, bit for bit, those of the whole, indexed."""
    adapter, plan = rough_model(preset=preset), plan_of(preset, sync)
    numbers = numbered(plan, adapter)
    own = inputs_of(plan, rank, adapter, preset)
    assert own.vision is not None
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(len(numbers), adapter.feature_width, generator=generator)
    gradients = torch.randn(len(numbers), adapter.feature_width, generator=generator)
    transport = Transport("parent", rank, 4, CPU, 0, timedelta(seconds=30))
    link = transport.link(range(dist.get_world_size()), 0)
    rows = torch.tensor(rows_encoded(plan, own, numbers, adapter, ""))
    mine = torch.where((rows >= 0)[:, None], whole[rows.clamp_min(0)], 0.0)
    counts, rows_of = received_rows([pack.received_from for pack in own.inputs], torch.device("cpu"))
    received = send_rows(mine, own.vision.send_index, counts, link)
    exact, gradient = True, torch.zeros_like(received)
    for pack, part, of_pack in zip(own.packs, own.inputs, rows_of, strict=True):
        places = part.layout.index(part.member)[part.vision_token_index].tolist()
        wanted = torch.tensor([numbers[pack.index, place] for place in places], dtype=torch.int64)
        exact = exact and torch.equal(received[of_pack], whole[wanted])
        gradient[of_pack] = gradients[wanted]
    found = return_rows(gradient, own.vision.send_index, counts, len(mine), link)
    transport.close()
    return exact and torch.equal(found, torch.where((rows >= 0)[:, None], gradients[rows.clamp_min(0)], 0.0))


@pytest.mark.parametrize(("preset", "sync"), [
    ("tiny_qwen3_vl", "micro_batch"), *(pytest.param(preset, sync, marks=pytest.mark.slow) for preset in PATCH_DIMS
                                        for sync in ("step", "micro_batch"))])
def test_what_is_exchanged_is_the_whole_bit_for_bit(preset: str, sync: str) -> None:
    assert all(run_ranks(exchanged, 4, preset, sync))


def test_a_payload_of_another_size_is_refused() -> None:
    adapter, plan = rough_model(), plan_of("tiny")
    rank_plan = plan.rank_plan(1, 3)
    assert any(any(here) for pack in rank_plan.encoded for here in encoded_images(pack, 3))
    payload = MADE["tiny"][2][1]
    pixels = [None if rows is None else rows[:-1] for rows in payload.pixels]
    with pytest.raises(ValueError, match=r"^sample c: image 0 has patches \(479, 1176\); its grid takes \(480, 1176\)"):
        collated(rank_plan, {sample.id: replace(found, pixels=pixels if sample.id == "c" else found.pixels)
                             for sample, found in MADE["tiny"]}, adapter)
