from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.data.index import index_fragments
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.reader import ReadFragments, read_payloads
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Plan, RankPlan, Sample, encoded_images, planned_samples
from dhp_ray.runtime.messages import RunError
from dhp_ray.runtime.worker import prefetch
from dhp_ray.runtime.worker.prefetch import Patches, decodings, encoded_grids, futures_of, load_inputs, num_decoders
from dhp_ray.schema import Cluster, Config, Data
from dhp_ray.train.collate import Payload, check_payload, collate
from dhp_ray.train.pack import pack_loss
from tests.data.samples import picture, processor, read_all, talk, video, write_rows
from tests.packs import make_pack, plain_copy, plain_loss, rough_model, with_images_apart, with_splits

PROCESSOR = processor()


def film_record(folder: Path, max_image_tokens: int) -> dict[str, Any]:
    (folder / "a.mp4").write_bytes(video(30, 84, 56, rate=7))
    (folder / "a.png").write_bytes(picture(60, 90))
    row = {"id": "film", "image": "a.png", "video": "a.mp4",
           "conversations": talk("<image>Here\n<video>Where?", "Left.", "Sure?", "Yes.")}
    return records_of(folder, [row], max_image_tokens)[0]


def records_of(folder: Path, rows: list[dict[str, Any]], max_image_tokens: int = 0) -> list[dict[str, Any]]:
    block = block_of(folder, rows, max_image_tokens)
    return read_payloads(block, list(range(block.num_rows)))


def block_of(folder: Path, rows: list[dict[str, Any]], max_image_tokens: int = 0) -> pa.Table:
    fragments = index_fragments(Data(format="llava", path=str(write_rows(folder / "rows.json", rows))))
    return read_all(ReadFragments(ProcessorSpec("tiny"), str(folder), 0, max_image_tokens=max_image_tokens), fragments)


def sample_of(record: dict[str, Any]) -> Sample:
    return Sample(record["id"], record["text_tokens"], record["vision_tokens"],
                  tuple((int(t), int(h), int(w)) for t, h, w in record["grids"]))


def many_records(folder: Path) -> list[dict[str, Any]]:
    """Twelve samples with up to three images and a video; of three of them an image does not decode."""
    return read_payloads(*many_rows(folder))


def many_rows(folder: Path) -> tuple[pa.Table, list[int]]:
    """A block, and its rows in the order of `many_records`."""
    rows, broken = [], {"2-1.png", "6-0.png", "7-2.png"}
    for number in range(12):
        pictures = [f"{number}-{image}.png" for image in range(number % 4)]
        for image, name in enumerate(pictures):
            whole = picture(60 + 20 * number, 60 + 30 * image)
            (folder / name).write_bytes(whole[:-60] if name in broken else whole)
        film = {"video": "a.mp4"} if number % 5 == 1 else {}
        rows.append({"id": f"r{number}", "image": pictures, **film, "conversations": talk(
            "<image>" * len(pictures) + "<video>" * len(film) + "What?", "That.")})
    (folder / "a.mp4").write_bytes(video(30, 84, 56, rate=7))
    block = block_of(folder, rows)
    return block, sorted(range(block.num_rows), key=lambda row: int(block["id"][row].as_py()[1:]))


def plan_apart(samples: list[Sample]) -> Plan:
    """Two packs on ranks 0 and 1 and one on rank 0, their images encoded apart from them by three ranks."""
    packs = (((0, 1), range(5)), ((0,), range(5, 9)), ((1, 0), range(9, 12)))
    groups = tuple(Pack(ranks, tuple(rows), 1.0, encoders=tuple(
        ranks[0] for row in rows for _ in samples[row].vision_grids)) for ranks, rows in packs)
    plan = with_images_apart(Plan("listed", "step", ClusterSpec(3, 3, 10**5), tuple(samples), groups, 1.0, 1.0))
    plan.validate()
    return plan


def payload_of(record: dict[str, Any], here: Sequence[bool], processor: Processor) -> Payload:
    """A row as a payload, with the patches of these grids."""
    return prefetch.payload_of(record, [decode() for decode in decodings(record, here, processor)])


def test_a_video_in_pieces_has_the_loss_of_plain_transformers(tmp_path: Path) -> None:
    record = film_record(tmp_path, max_image_tokens=12)
    sample = sample_of(record)
    assert sample.vision_grids == ((1, 6, 4), (2, 4, 6), (2, 4, 6))
    here = (True,) * len(sample.vision_grids)
    adapter, payload = rough_model(), payload_of(record, here, PROCESSOR)
    check_payload(sample, payload, adapter, here)
    pack = make_pack(0, [0], [sample])
    with torch.no_grad():
        found = pack_loss(adapter, collate(pack, {"film": payload}, 0, adapter), PackCommunicator((0,), 0, None)).item()

    with torch.no_grad():
        expected, count = plain_loss(plain_copy(adapter), payload)
    assert found == pytest.approx(expected.item() * count, rel=1e-5)


def test_only_the_pieces_of_this_rank_are_made(tmp_path: Path) -> None:
    record = film_record(tmp_path, max_image_tokens=12)
    whole = payload_of(record, (True,) * len(record["grids"]), PROCESSOR).pixels
    here = tuple(number % 2 == 1 for number in range(len(record["grids"])))
    for needed, patches, expected in zip(here, payload_of(record, here, PROCESSOR).pixels, whole, strict=True):
        assert (patches is not None) == needed
        assert patches is None or np.array_equal(patches, expected)


def test_a_video_that_decodes_to_other_frames_is_no_payload(tmp_path: Path) -> None:
    record = film_record(tmp_path, max_image_tokens=0)
    sample = sample_of(record)
    other = record | {"images": [record["images"][0], video(6, 84, 56, rate=7)]}
    with pytest.raises(ValueError, match=r"^the video gives 4 frames; planned: 8"):
        payload_of(other, (True, True), PROCESSOR)
    check_payload(sample, replace(payload_of(record, (False, False), PROCESSOR), pixels=[None, None]), rough_model(),
                  (False, False))


def test_any_number_of_decoders_gives_the_same_payloads(tmp_path: Path) -> None:
    """Also the same reasons, in the same order."""
    records, adapter = many_records(tmp_path), rough_model()
    samples = [sample_of(record) for record in records]
    packs = (make_pack(0, [0, 1], samples[:5]), make_pack(1, [0], samples[5:]))
    inputs, failed = load_inputs(RankPlan(1, 0, (), packs), records, PROCESSOR, adapter)
    one = inputs.payloads
    assert list(one) == [sample.id for sample in samples]
    assert set(failed) == {"r6", "r7"}, "the bad image of r2 is encoded by the other rank"
    assert all(one[name].masked == (name in failed) for name in one)
    for record in records:
        if record["id"] not in ("r2", *failed):
            here = tuple(patches is not None for patches in one[record["id"]].pixels)
            assert_same(payload_of(record, here, PROCESSOR), one[record["id"]])
    assert [len(found.pixels) for found in inputs.inputs] == [
        sum(len(patches) for sample in pack.samples for patches in one[sample.id].pixels if patches is not None)
        for pack in packs]
    for count in (2, 5):
        several, reasons = load_inputs(RankPlan(1, 0, (), packs), records, PROCESSOR, adapter, count)
        assert list(several.payloads) == list(one)
        assert list(reasons.items()) == list(failed.items())
        for name, payload in several.payloads.items():
            assert_same(payload, one[name])
        for found, expected in zip(several.inputs, inputs.inputs, strict=True):
            assert torch.equal(found.pixels, expected.pixels)


def test_of_images_apart_a_rank_decodes_its_own_and_reports_the_broken_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    for name in ("decode", "decode_video"):
        function = getattr(prefetch, name)
        monkeypatch.setattr(prefetch, name, lambda data, *rest, function=function: (
            decoded.append(data), function(data, *rest))[1])
    block, rows = many_rows(tmp_path)
    records, adapter = read_payloads(block, rows), rough_model()
    plan = plan_apart([sample_of(record) for record in records])
    bad, found, reported = {"r2": 1, "r6": 0, "r7": 2}, [], []
    for rank in range(3):
        rank_plan = plan.rank_plan(1, rank)
        needed = {sample.id for sample in planned_samples(rank_plan)}
        sent = {row["id"]: row for row in read_payloads(block, [rows[place] for place, record in enumerate(records)
                                                                if record["id"] in needed], encoded_grids(rank_plan))}
        mine = {sample.id: here for pack in rank_plan.encoded
                for sample, here in zip(pack.samples, encoded_images(pack, rank)) if any(here)}
        assert sent.keys() == {sample.id for pack in rank_plan.packs for sample in pack.samples} | mine.keys()
        decoded.clear()
        inputs, failed = load_inputs(rank_plan, sent.values(), PROCESSOR, adapter)
        assert Counter(decoded) == Counter(data for row in sent.values() for data in row["images"] if data is not None)
        assert failed.keys() == {name for name, image in bad.items() if name in mine and mine[name][image]}
        assert inputs.payloads.keys() == sent.keys()
        for name in sent.keys() - failed.keys():
            here = mine.get(name, (False,) * len(sent[name]["grids"]))
            assert_same(inputs.payloads[name], payload_of(sent[name], here, PROCESSOR))
            assert [patches is not None for patches in inputs.payloads[name].pixels] == list(here)
            assert {number for number, data in enumerate(sent[name]["images"]) if data is not None} == {
                number for number, needs in zip(sent[name]["media"], here) if needs}
        assert all(len(made.pixels) == 0 for made in inputs.inputs)
        assert inputs.vision is not None
        assert [grid for images in inputs.vision.passes for grid in images.grids] == [
            grid for pack in rank_plan.encoded for sample in pack.samples if sample.id not in failed
            for grid, here in zip(sample.vision_grids, mine.get(sample.id, ())) if here]
        found.append(inputs)
        reported += failed
    assert sorted(reported) == sorted(bad), "each once"
    assert not plan.rank_plan(1, 2).packs
    for inputs in found:  # as the driver tells them
        inputs.mask(reported, adapter)
    for receiver, inputs in enumerate(found):
        counts = Counter[int]()
        for made in inputs.inputs:
            counts.update(made.received_from)
        assert counts == {sender: len(other.vision.send_index[receiver]) for sender, other in enumerate(found)
                          if other.vision and receiver in other.vision.send_index}


def test_of_an_image_in_parts_a_rank_keeps_its_own(tmp_path: Path) -> None:
    """Three ranks decode a video of four steps in time; of what they have of it each patch is on one of them."""
    record, adapter = film_record(tmp_path, max_image_tokens=0), rough_model()
    sample = sample_of(record)
    assert sample.vision_grids == ((1, 6, 4), (4, 4, 6))
    groups = (Pack((0,), (0,), 1.0, encoders=(0, 0)),)
    plan = with_images_apart(Plan("listed", "step", ClusterSpec(3, 3, 10**5), (sample,), groups, 1.0, 1.0))
    plan = with_splits(plan, {1: (2, 0, 1)})
    whole, found = payload_of(record, (True, True), PROCESSOR).pixels[1], []
    for rank in range(3):
        inputs, failed = load_inputs(plan.rank_plan(1, rank), [record], PROCESSOR, adapter)
        assert not failed
        assert inputs.vision is not None
        (images,) = inputs.vision.passes
        kept = inputs.payloads["film"].pixels[1]
        assert isinstance(kept, torch.Tensor)
        found.append(kept)
        assert kept.untyped_storage().data_ptr() == images.pixels.untyped_storage().data_ptr()
    assert sorted(map(len, found)) == [24, 24, 48]
    assert np.array_equal(np.unique(torch.cat(found).numpy(), axis=0), np.unique(np.array(whole), axis=0))


def test_each_image_that_is_decoded_or_not_shows_that_a_rank_gets_on(tmp_path: Path) -> None:
    """Those of one step may take longer than `comm.timeout_s`."""
    records, adapter, got_on = many_records(tmp_path), rough_model(), list[None]()
    plan = RankPlan(1, 0, (), (make_pack(0, [0], [sample_of(record) for record in records]),))
    _, failed = load_inputs(plan, records, PROCESSOR, adapter, on_decoded=lambda: got_on.append(None))
    assert failed
    assert len(got_on) == sum(len(set(record["media"])) for record in records)


def test_any_number_of_decoders_gives_the_same_images_apart(tmp_path: Path) -> None:
    records, adapter = many_records(tmp_path), rough_model()
    plan = plan_apart([sample_of(record) for record in records]).rank_plan(1, 0)
    one, failed = load_inputs(plan, records, PROCESSOR, adapter)
    assert failed
    for count in (2, 5):
        several, reasons = load_inputs(plan, records, PROCESSOR, adapter, count)
        assert list(reasons.items()) == list(failed.items())
        assert list(several.payloads) == list(one.payloads)
        for name, payload in several.payloads.items():
            assert_same(payload, one.payloads[name])


def test_a_row_of_an_image_alone_that_was_not_sent_is_named(tmp_path: Path) -> None:
    records = many_records(tmp_path)
    plan = plan_apart([sample_of(record) for record in records]).rank_plan(1, 2)
    names = [sample.id for sample in planned_samples(plan)]
    rows = [record for record in records if record["id"] in names[1:]]
    with pytest.raises(RunError, match=rf"^step 1: sample {names[0]} is planned for rank 2, but is not among the "):
        load_inputs(plan, rows, PROCESSOR, rough_model())


def test_a_row_that_was_not_sent_is_named(tmp_path: Path) -> None:
    records, adapter = many_records(tmp_path)[:3], rough_model()
    packs = (make_pack(0, [0], [sample_of(record) for record in records]),)
    with pytest.raises(RunError, match=r"^step 4: sample r2 is planned for rank 0, but is not among the 2 rows that"):
        load_inputs(RankPlan(4, 0, (), packs), records[:2], PROCESSOR, adapter)


def test_no_memory_to_decode_is_the_workers_failure(tmp_path: Path) -> None:
    """Not that of the sample: it would be skipped, though nothing is wrong with it."""
    (tmp_path / "a.png").write_bytes(picture(6000, 4000))  # 72 MB decoded
    [record] = records_of(tmp_path, [{"id": "r", "image": "a.png", "conversations": talk("<image>What?", "That.")}])
    plan, adapter = RankPlan(4, 0, (), (make_pack(0, [0], [sample_of(record)]),)), rough_model()
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**25
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        with pytest.raises(RunError, match=r"^step 4: no memory to decode sample r: MemoryError$"):
            load_inputs(plan, [record], PROCESSOR, adapter)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_few_images_are_decoded_ahead() -> None:
    """Decoded patches would otherwise pile up: those of a whole step in fp32, while its first pack is collated."""
    begun: list[int] = []

    def call(number: int) -> Patches:
        begun.append(number)
        return [np.full((1, 1), number, np.float32)]

    with ThreadPoolExecutor(2) as executor:
        for taken, future in enumerate(futures_of([partial(call, number) for number in range(20)], executor, 3)):
            patches, = future.result()
            assert patches is not None
            assert patches.item() == taken
            assert max(begun) <= taken + 3
    assert sorted(begun) == list(range(20))


def assert_same(found: Payload, expected: Payload) -> None:
    for name in ("input_ids", "labels", "grids", "media", "seconds"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert found.masked == expected.masked
    for ours, theirs in zip(found.pixels, expected.pixels, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or np.array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize(("cpus", "expected"), [(0.1, 1), (1.0, 1), (3.5, 3)])
def test_a_worker_has_a_decoder_for_each_of_its_cpus(cpus: float, expected: int) -> None:
    assert num_decoders(Config(cluster=Cluster(cpus_per_worker=cpus))) == expected
