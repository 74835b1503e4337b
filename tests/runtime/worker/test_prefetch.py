from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dhp_ray.comm.link import Link
from dhp_ray.data.index import index_fragments
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.reader import ReadFragments, read_payloads
from dhp_ray.planner.plan import Sample
from dhp_ray.runtime.worker.prefetch import pixels_of
from dhp_ray.schema import Data
from dhp_ray.train.collate import Payload, check_payload, collate
from dhp_ray.train.pack import pack_loss
from tests.data.samples import picture, processor, talk, video, write_rows
from tests.packs import TOKEN_IDS, make_pack, plain_copy, rough_model

PROCESSOR = processor()


def film_record(folder: Path, max_image_tokens: int) -> dict[str, Any]:
    (folder / "a.mp4").write_bytes(video(30, 84, 56, rate=7))
    (folder / "a.png").write_bytes(picture(60, 90))
    row = {"id": "film", "image": "a.png", "video": "a.mp4",
           "conversations": talk("<image>Here\n<video>Where?", "Left.", "Sure?", "Yes.")}
    fragments = index_fragments(Data(format="llava", path=str(write_rows(folder / "rows.json", [row]))))
    items = [{"position": 0, "number": 0, "epoch": 0, "fragment": pickle.dumps(fragments[0])}]
    block = ReadFragments(ProcessorSpec("tiny"), str(folder), 0,
                          max_image_tokens=max_image_tokens)(pa.Table.from_pylist(items))
    return read_payloads(block, [0])[0]


def payload_of(record: dict[str, Any], here: tuple[bool, ...]) -> Payload:
    return Payload(input_ids=record["input_ids"], labels=record["labels"], grids=record["grids"],
                   pixels=pixels_of(record, here, PROCESSOR),
                   media=record["media"], seconds=record["seconds"])


def test_a_video_in_pieces_has_the_loss_of_plain_transformers(tmp_path: Path) -> None:
    record = film_record(tmp_path, max_image_tokens=12)
    sample = Sample("film", record["text_tokens"], record["vision_tokens"],
                    tuple((int(t), int(h), int(w)) for t, h, w in record["grids"]))
    assert sample.vision_grids == ((1, 6, 4), (2, 4, 6), (2, 4, 6))
    here = (True,) * len(sample.vision_grids)
    adapter, payload = rough_model(), payload_of(record, here)
    check_payload(sample, payload, adapter, here)
    pack = make_pack(0, [0], [sample])
    with torch.no_grad():
        found = pack_loss(adapter, collate(pack, {"film": payload}, 0, adapter), Link((0,), 0, None)).item()

    ids = torch.from_numpy(record["input_ids"].astype(np.int64))[None]
    labels = torch.from_numpy(record["labels"].astype(np.int64))[None]
    grids, seconds = payload.whole()
    pixels = [torch.from_numpy(patches) for patches in payload.pixels if patches is not None]
    with torch.no_grad():
        expected = plain_copy(adapter)(
            input_ids=ids, labels=labels, pixel_values=pixels[0], image_grid_thw=torch.from_numpy(grids[:1]),
            pixel_values_videos=torch.cat(pixels[1:]), video_grid_thw=torch.from_numpy(grids[1:]),
            second_per_grid_ts=torch.tensor(seconds[1:]).float(),
            mm_token_type_ids=(ids == TOKEN_IDS["image"]).int() + 2 * (ids == TOKEN_IDS["video"]).int()).loss.item()
    assert found == pytest.approx(expected * int((labels[:, 1:] != -100).sum()), rel=1e-5)


def test_only_the_pieces_of_this_rank_are_made(tmp_path: Path) -> None:
    record = film_record(tmp_path, max_image_tokens=12)
    whole = pixels_of(record, (True,) * len(record["grids"]), PROCESSOR)
    here = tuple(number % 2 == 1 for number in range(len(record["grids"])))
    for needed, patches, expected in zip(here, pixels_of(record, here, PROCESSOR), whole, strict=True):
        assert (patches is not None) == needed
        assert patches is None or np.array_equal(patches, expected)


def test_a_video_that_decodes_to_other_frames_is_no_payload(tmp_path: Path) -> None:
    record = film_record(tmp_path, max_image_tokens=0)
    sample = Sample("film", record["text_tokens"], record["vision_tokens"],
                    tuple((int(t), int(h), int(w)) for t, h, w in record["grids"]))
    other = record | {"images": [record["images"][0], video(6, 84, 56, rate=7)]}
    with pytest.raises(ValueError, match=r"^the video gives 4 frames; planned: 8"):
        payload_of(other, (True, True))
    check_payload(sample, replace(payload_of(record, (False, False)), pixels=[None, None]), rough_model(),
                  (False, False))
