from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.types import Pack, Sample
from dhp_ray.train.collate import PackInputs, Payload, check_payload, collate, placeholder
from tests.packs import TOKEN_IDS, make_pack, make_sample, own_payloads, rough_model


@pytest.fixture(scope="module")
def adapter() -> LanguageModel:
    return rough_model()


def three_samples() -> tuple[list[Sample], dict[str, Payload]]:
    made = [make_sample("a", [3, (1, 4, 8), 9, (1, 4, 4), 5]), make_sample("b", [17]), make_sample("c", [(2, 4, 6), 4])]
    return [sample for sample, _ in made], {sample.id: payload for sample, payload in made}


def shards(pack: Pack, payloads: dict[str, Payload], adapter: LanguageModel) -> list[PackInputs]:
    """Every member's inputs, each with the pixels of its own images alone."""
    return [collate(pack, own_payloads(pack, payloads, rank), rank, adapter) for rank in pack.ranks]


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_shards_hold_every_token_once_with_its_label_and_position(degree: int, adapter: LanguageModel) -> None:
    samples, payloads = three_samples()
    pack = make_pack(4, [10 + member for member in range(degree)], samples)
    inputs = shards(pack, payloads, adapter)
    total = sum(sample.num_tokens for sample in samples)
    ids, labels, positions = torch.full((total,), -1), torch.full((total,), -1), torch.full((3, total), -1)
    for part in inputs:
        index = part.layout.index(part.member)
        assert (ids[index] == -1).all()
        ids[index], labels[index], positions[:, index] = part.token_ids, part.labels, part.positions
        assert part.num_valid_tokens == int((part.labels != -100).sum())
        assert torch.equal(part.valid_index, (part.labels != -100).nonzero()[:, 0])
        assert len(part.segments) == degree
        assert part.segments[part.member].query_offsets[-1] == len(part.token_ids)
        assert part.num_images == 3

    start = 0
    for sample in samples:
        payload, stop = payloads[sample.id], start + sample.num_tokens
        assert ids[start:stop].tolist() == payload.input_ids.tolist()
        # the last token of a sequence predicts nothing: its neighbour is another sequence
        assert labels[start:stop].tolist() == [*payload.labels[1:].tolist(), -100]
        expected = adapter.positions(torch.from_numpy(payload.input_ids), torch.from_numpy(payload.grids))
        assert torch.equal(positions[:, start:stop], expected)
        start = stop


@pytest.mark.parametrize("encoders", [(0, 1, 2), (2, 2, 2), (2, 0, 1), (1, 0, 0)])
def test_every_image_token_gets_its_own_feature(encoders: tuple[int, ...], adapter: LanguageModel) -> None:
    samples, payloads = three_samples()
    inputs = shards(make_pack(0, [0, 1, 2], samples, encoders), payloads, adapter)
    # Stand for a feature by (image, token of that image); member m's features are those of its images in order.
    counts = [8, 4, 12]
    features = [[(image, token) for image in range(3) if encoders[image] == member for token in range(counts[image])]
                for member in range(3)]
    placed: dict[int, tuple[int, int]] = {}
    for receiver in inputs:
        assert [len(sender.send_index[receiver.member]) for sender in inputs] == receiver.receive_counts
        received = [features[sender.member][row] for sender in inputs
                    for row in sender.send_index[receiver.member].tolist()]
        whole = receiver.layout.index(receiver.member)[receiver.vision_token_index].tolist()
        assert (receiver.token_ids[receiver.vision_token_index] == TOKEN_IDS["image"]).all()
        assert len(received) == len(whole) == int((receiver.token_ids == TOKEN_IDS["image"]).sum())
        placed |= dict(zip(whole, received))
    packed = np.concatenate([payloads[sample.id].input_ids for sample in samples])
    expected = [(image, token) for image in range(3) for token in range(counts[image])]
    assert [placed[position] for position in np.flatnonzero(packed == TOKEN_IDS["image"])] == expected


def test_a_rank_gets_the_pixels_of_its_own_images_alone(adapter: LanguageModel) -> None:
    samples, payloads = three_samples()
    inputs = shards(make_pack(0, [5, 3], samples, (1, 0, 1)), payloads, adapter)
    assert inputs[0].grids == ((1, 4, 4),)
    assert inputs[1].grids == ((1, 4, 8), (2, 4, 6))
    assert torch.equal(inputs[0].pixels, torch.from_numpy(payloads["a"].pixels[1]))
    assert torch.equal(inputs[1].pixels,
                       torch.from_numpy(np.concatenate([payloads["a"].pixels[0], payloads["c"].pixels[0]])))


def test_a_placeholder_keeps_its_place_and_counts_for_nothing(adapter: LanguageModel) -> None:
    samples, payloads = three_samples()
    whole = shards(make_pack(0, [0, 1], samples), payloads, adapter)
    for masked in (replace(payloads["a"], masked=True), placeholder(samples[0])):
        inputs = shards(make_pack(0, [0, 1], samples, (0, 0, 1)), payloads | {"a": masked}, adapter)
        for part, before in zip(inputs, whole):
            assert torch.equal(part.layout.index(part.member), before.layout.index(part.member))
            first = part.layout.index(part.member) < samples[0].num_tokens
            assert (part.labels[first] == -100).all()
            assert torch.equal(part.labels[~first], before.labels[~first])
            assert part.num_images == 1
            assert sum(part.receive_counts) == int((part.token_ids[~first] == TOKEN_IDS["image"]).sum())
        assert len(inputs[0].pixels) == 0
        assert inputs[1].grids == ((2, 4, 6),)


def test_inputs_move_to_a_device(adapter: LanguageModel) -> None:
    samples, payloads = three_samples()
    moved = shards(make_pack(0, [0, 1], samples), payloads, adapter)[0].map(lambda tensor: tensor.to("meta"))
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)] + moved.send_index
    assert len(tensors) == 6 + 2
    assert all(tensor.is_meta for tensor in tensors)


def test_a_payload_that_is_not_what_was_planned_is_named(adapter: LanguageModel) -> None:
    sample, payload = make_sample("odd", [3, (1, 4, 8), 9])
    check_payload(sample, payload, adapter, (True,))
    cut = replace(payload, input_ids=payload.input_ids[:-1], labels=payload.labels[:-1])
    text = payload.input_ids.copy()
    text[4] = 65  # the first image token
    wide = payload.input_ids.copy()
    wide[0] = 264
    broken = {
        r"21 token ids and 21 labels; planned: 22 of each": cut,
        r"22 token ids and 21 labels; planned: 22 of each": replace(payload, labels=payload.labels[:-1]),
        r"token ids from \d+ to 264; the model has 0 to 263": replace(payload, input_ids=wide),
        r"1 images of grids \(\(1, 8, 4\),\); planned: \(\(1, 4, 8\),\)": replace(payload,
                                                                                  grids=payload.grids[:, [0, 2, 1]]),
        r"runs of \[7\] image or video tokens; its images and videos take \[8\]": replace(payload, input_ids=text),
        r"image 0 has patches None; its grid takes \(32, 1176\)": replace(payload, pixels=[None]),
        r"image 0 has patches \(31, 1176\); its grid takes \(32, 1176\)": replace(payload,
                                                                                  pixels=[payload.pixels[0][:31]]),
    }
    for message, bad in broken.items():
        with pytest.raises(ValueError, match=f"^sample odd: {message}$"):
            check_payload(sample, bad, adapter, (True,))
        with pytest.raises(ValueError, match=f"^sample odd: {message}$"):
            collate(make_pack(0, [0], [sample]), {"odd": bad}, 0, adapter)
    check_payload(sample, replace(payload, pixels=[None]), adapter, (False,))
    with pytest.raises(ValueError, match=r"^sample odd: no payload for pack 0$"):
        collate(make_pack(0, [0], [sample]), {}, 0, adapter)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    match value:
        case torch.Tensor():
            yield value
        case dict():
            yield from tensors_in(list(value.values()))
        case list() | tuple():
            for element in value:
                yield from tensors_in(element)
        case _ if is_dataclass(value):
            yield from tensors_in(vars(value))


def test_inputs_go_to_a_device_whole(adapter: LanguageModel) -> None:
    samples, payloads = three_samples()
    for part in shards(make_pack(0, [0, 1, 2], samples), payloads, adapter):
        before, after = list(tensors_in(part)), list(tensors_in(part.map(lambda tensor: tensor.to("meta"))))
        assert {tensor.device.type for tensor in before} == {"cpu"}
        assert {tensor.device.type for tensor in after} == {"meta"}
        assert [tensor.shape for tensor in after] == [tensor.shape for tensor in before]
        assert {len(part.send_index), len(part.segments), len(part.encoder) - 1} == {3}


def video_sample() -> tuple[Sample, Payload]:
    """Text, a video in three pieces of time, text, an image, text."""
    video, image = TOKEN_IDS["video"], TOKEN_IDS["image"]
    grids = [(2, 4, 4), (2, 4, 4), (1, 4, 4), (1, 4, 8)]
    ids = np.array([7, 7, *[video] * 20, 8, *[image] * 8, 9, 9], np.int32)
    random = np.random.default_rng(3)
    pixels: list[np.ndarray | None] = [random.standard_normal((int(np.prod(grid)), 1176), np.float32) for grid in grids]
    payload = Payload(input_ids=ids, labels=ids.copy(), grids=np.array(grids), pixels=pixels,
                      media=np.array([0, 0, 0, 1]), seconds=np.array([0.5, 0.5, 0.5, 0.0]))
    return Sample("film", 5, 28, tuple(grids)), payload


def test_pieces_of_a_video_make_one_video(adapter: LanguageModel) -> None:
    sample, payload = video_sample()
    grids, seconds = payload.whole()
    assert (grids.tolist(), seconds.tolist()) == ([[5, 4, 4], [1, 4, 8]], [0.5, 0.0])
    inputs = shards(make_pack(0, [0, 1, 2], [sample], (1, 0, 2, 1)), {"film": payload}, adapter)
    assert [part.grids for part in inputs] == [((2, 4, 4),), ((2, 4, 4), (1, 4, 8)), ((1, 4, 4),)]
    assert sum(len(part.vision_token_index) for part in inputs) == 28
    whole = replace(payload, grids=grids, media=np.array([0, 1]), seconds=seconds)
    expected = adapter.positions(torch.from_numpy(payload.input_ids), torch.from_numpy(grids),
                                 torch.from_numpy(seconds))
    positions = torch.full((3, len(payload.input_ids)), -1)
    for part in inputs:
        positions[:, part.layout.index(part.member)] = part.positions
    assert torch.equal(positions, expected)
    assert whole.whole()[0].tolist() == grids.tolist()


def test_pieces_of_a_video_have_the_features_of_the_whole(adapter: LanguageModel) -> None:
    _, payload = video_sample()
    pixels = [torch.from_numpy(patches) for patches in payload.pixels[:3] if patches is not None]
    whole = adapter.encode(torch.cat(pixels), adapter.encoder_arguments([(5, 4, 4)]))
    pieces = [adapter.encode(patches, adapter.encoder_arguments([payload.grids[number].tolist()]))
              for number, patches in enumerate(pixels)]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-5, atol=1e-5)


def test_a_video_in_the_place_of_an_image_is_refused(adapter: LanguageModel) -> None:
    sample, payload = video_sample()
    check_payload(sample, payload, adapter, (True,) * 4)
    with pytest.raises(
        ValueError,
        match=r"^sample film: runs of \[20, 8\] image or video tokens; its images and videos take \[8, 8, 4, 8\]",
    ):
        check_payload(sample, replace(payload, media=None, seconds=None), adapter)
    with pytest.raises(ValueError, match=r"take \[20, 8\]"):
        check_payload(sample, replace(payload, seconds=np.array([0.0, 0.0, 0.0, 0.5])), adapter)
