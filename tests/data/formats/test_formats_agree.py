"""The same 13 conversations in every format are the same sequences, pixels and losses."""

from __future__ import annotations

import base64
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.data.conversation import ROLES, read_turns
from dhp_ray.data.evaluation import read_references
from dhp_ray.data.formats import read_texts
from dhp_ray.data.index import image_root, index_fragments
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.reader import ReadFragments, read_payloads
from dhp_ray.model.build import build_model
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.types import Pack, Sample
from dhp_ray.runtime.worker.prefetch import decodings, payload_of
from dhp_ray.schema import Data, Model
from dhp_ray.train.collate import Payload, collate
from dhp_ray.train.pack import pack_loss
from tests.data.samples import picture, processor, read_all, talk, video, write_rows
from tests.packs import TOKEN_IDS, plain_copy, plain_loss

PROCESSOR = processor()
PICTURES = {f"{number}.png": picture(60 + 20 * number, 90)
            for number in range(3)} | {"turned.jpg": picture(120, 60, "JPEG", quality=90)}
FILM = {"film.mp4": video(24, 84, 56)}
Row = dict[str, Any]
CALL = {"name": "scale", "arguments": {"factor": 2, "part": "top"}}
TOOLS = [{"name": "scale", "description": "Enlarge a part.",
          "parameters": {"type": "object", "properties": {"factor": {"type": "number"}}}}]


def rows() -> list[Row]:
    """Several turns, none to three images, a video beside an image, and in the last calls of a tool that shows an
    image.
    """
    names = list(PICTURES)
    made = []
    for number in range(11):
        shown = [names[(number + place) % len(names)] for place in range(number % 4)]
        first = "".join(f"<image>\nPicture {place}. " for place in range(len(shown) - (number == 7))) + "What is it?"
        second = "And <image> this?" if number == 7 else "Sure?"
        made.append({"id": f"talk-{number:02d}", "images": shown, "videos": [],
                     "conversations": talk(first, f"Thing {number}.", second, "größer " * number + "yes")})
    film = talk("<image>\n<video>\nWhere does it go?", "Down.", "And then?", "Right.")
    made.append({"id": "talk-11", "images": names[:1], "videos": ["film.mp4"],
                 "conversations": [{"from": "system", "value": "Be brief."}, *film]})
    made.append({"id": "talk-12", "images": names[:2], "videos": [], "tools": json.dumps(TOOLS), "conversations": [
        {"from": "human", "value": "<image>\nWhat is at the top?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "<image>\nscaled"}, {"from": "gpt", "value": "A red block."}]})
    return made


def messages_of(row: Row, with_sources: bool) -> list[Row]:
    """The conversation in OpenAI's form, with parts that take the columns' next, or bring what they show."""
    media = iter([*row["images"], *row["videos"]])  # the only video comes last
    messages: list[Row] = []
    for stored in row["conversations"]:
        if stored["from"] == "function_call":
            calls = [{"id": "call", "type": "function",
                      "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            continue
        turn = read_turns(talk(stored["value"], "yes"))[0]
        parts: list[Row] = []
        for part in turn.parts:
            if part.kind == "text":
                parts.append({"type": "text", "text": part.text})
            elif not with_sources:
                parts.append({"type": part.kind})
            else:
                name = next(media)
                uri = f"data:image/png;base64,{base64.b64encode(PICTURES[name]).decode()}" if name in PICTURES else ""
                parts.append({"type": "image_url", "image_url": {"url": uri}} if uri
                             else {"type": "video", "video": name})
        messages.append({"role": ROLES[stored["from"]], "content": parts if turn.media or with_sources else turn.text})
    return messages


def write_llava(folder: Path) -> Data:
    write_files(folder)
    write_rows(folder / "rows.json", [{key: value for key, value in row.items() if value} for row in rows()])
    return Data(format="llava", path=str(folder / "rows.json"))


def write_jsonl(folder: Path) -> Data:
    write_files(folder)
    renamed = [row | {"image": row["images"][0] if len(row["images"]) == 1 else row["images"], "images": None}
               for row in rows()]
    write_rows(folder / "rows.jsonl", renamed)
    return Data(format="llava", path=str(folder))


def write_messages(folder: Path) -> Data:
    write_files(folder)
    write_rows(folder / "rows.jsonl", [{"id": row["id"], "tools": row.get("tools"),
                                        "messages": messages_of(row, with_sources=True)} for row in rows()])
    return Data(format="llava", path=str(folder))


def table(messages: bool) -> pa.Table:
    """With the images and videos in the rows; the talks as structs, or as JSON text."""
    found = []
    for row in rows():
        talks: Row = (
            {"messages": json.dumps(messages_of(row, with_sources=False))}
            if messages
            else {"conversations": row["conversations"]}
        )
        found.append({"id": row["id"], "images": [{"bytes": PICTURES[name], "path": None} for name in row["images"]],
                      "videos": [FILM[name] for name in row["videos"]], "tools": row.get("tools"), **talks})
    return pa.Table.from_pylist(found)


def write_parquet(folder: Path) -> Data:
    pq.write_table(table(messages=False), folder / "rows.parquet", row_group_size=5)
    return Data(format="parquet", path=str(folder))


def write_saved_set(folder: Path) -> Data:
    """As `datasets.Dataset.save_to_disk` does, in two files, inside a set of one split."""
    split = folder / "train"
    split.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table(messages=True).slice(0, 7), table(messages=True).slice(7))):
        with pa.OSFile(str(split / name), "wb") as file, pa.ipc.new_stream(file, part.schema) as writer:
            writer.write_table(part, max_chunksize=3)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (split / "state.json").write_text(json.dumps(state))
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return Data(format="huggingface", path=str(folder))


def write_hub_folder(folder: Path) -> Data:
    (folder / "data").mkdir()
    pq.write_table(table(messages=True), folder / "data" / "train-00000-of-00001.parquet")
    return Data(format="huggingface", path=str(folder))


def write_shards(folder: Path) -> Data:
    for shard, part in enumerate((rows()[:5], rows()[5:])):
        form = tarfile.GNU_FORMAT if shard else tarfile.PAX_FORMAT
        with tarfile.open(folder / f"{shard:04d}.tar", "w", format=form) as archive:
            for row in part:
                names = {name: f"{place}.{name.rpartition('.')[2]}"
                         for place, name in enumerate([*row["images"], *row["videos"]])}
                fields = {"conversations": row["conversations"], "tools": json.loads(row.get("tools", "[]"))}
                fields |= {"images": [names[name] for name in row["images"]]} if shard == 0 else {}
                members = {"json": json.dumps(fields).encode()}
                members |= {own: (PICTURES | FILM)[name] for name, own in names.items()}
                for extension, content in members.items():
                    member = tarfile.TarInfo(f"{row['id']}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return Data(format="webdataset", path=str(folder))


def write_files(folder: Path) -> None:
    for name, content in (PICTURES | FILM).items():
        (folder / name).write_bytes(content)


def records(data: Data) -> dict[str, Row]:
    block = read_all(ReadFragments(ProcessorSpec.of(Model(preset="tiny"), data), image_root(data), 0),
                     index_fragments(data))
    return {record["id"]: record for record in read_payloads(block, list(range(block.num_rows)))}


def payload(record: Row) -> Payload:
    return payload_of(record, [decode() for decode in decodings(record, (True,) * len(record["grids"]), PROCESSOR)])


def loss_and_gradient(adapter: LanguageModel, record: Row) -> tuple[float, torch.Tensor]:
    """Of a record as a sequence of its own: the loss sum, and its gradient at the input embeddings and at the patches'
    projection.
    """
    sample = Sample(record["id"], record["text_tokens"], record["vision_tokens"],
                    tuple(tuple(grid) for grid in record["grids"].tolist()))
    pack = Pack((0,), (), 0.0, encoders=(0,) * len(sample.vision_grids), index=0, samples=(sample,))
    adapter.module.zero_grad()
    loss = pack_loss(adapter, collate(pack, {sample.id: payload(record)}, 0, adapter), PackCommunicator((0,), 0, None))
    loss.backward()
    model = adapter.module.model
    gradients = [model.language_model.embed_tokens.weight.grad, model.visual.patch_embed.proj.weight.grad]
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


@pytest.fixture(scope="module")
def adapter() -> LanguageModel:
    return build_model("tiny", "", PROCESSOR.token_ids, 0)


@pytest.fixture(scope="module")
def expected(
    adapter: LanguageModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Row, float, torch.Tensor]]:
    """Records, losses and gradients of the LLaVA file."""
    found = records(write_llava(tmp_path_factory.mktemp("expected")))
    return {name: (record, *loss_and_gradient(adapter, record)) for name, record in found.items()}


@pytest.mark.parametrize("write", [write_jsonl, write_messages, write_parquet, write_saved_set, write_hub_folder,
                                   write_shards])
def test_every_format_gives_the_same_sequences_pixels_and_losses(
        write: Callable[[Path], Data], adapter: LanguageModel,
        expected: dict[str, tuple[Row, float, torch.Tensor]], tmp_path: Path) -> None:
    found = records(write(tmp_path))
    assert sorted(found) == sorted(expected) == sorted(row["id"] for row in rows())
    for name, (record, loss, gradient) in expected.items():
        other = found[name]
        assert (record["error"], other["error"]) == ("", ""), name
        for key in ("input_ids", "labels", "grids", "media", "seconds"):
            assert np.array_equal(record[key], other[key]), (name, key)
        for one, two in zip(payload(record).pixels, payload(other).pixels, strict=True):
            assert one is not None
            assert np.array_equal(one, two), name
        found_loss, found_gradient = loss_and_gradient(adapter, other)
        assert found_loss == loss, name  # the same sums in the same order: equal to the last bit
        assert torch.equal(found_gradient, gradient), name


@pytest.mark.parametrize("write", [write_llava, write_parquet, write_saved_set, write_hub_folder, write_shards])
def test_texts_are_read_without_images_and_videos(write: Callable[[Path], Data], tmp_path: Path) -> None:
    fragments = index_fragments(write(tmp_path))
    texts = [row for fragment in fragments for row in read_texts(fragment, 2**20)]
    assert sorted(row.id for row in texts) == [row["id"] for row in rows()]
    for row in texts:
        stored = pickle.dumps((row.fields, row.members))
        assert not any(content in stored for content in (PICTURES | FILM).values())
    answers = {row["id"]: (row["conversations"][-1]["value"],) for row in rows()}
    assert read_references(fragments, 2**20, PROCESSOR) == answers


def test_the_losses_are_those_of_plain_transformers(
    adapter: LanguageModel, expected: dict[str, tuple[Row, float, torch.Tensor]]
) -> None:
    plain = plain_copy(adapter)
    assert PROCESSOR.token_ids.items() >= TOKEN_IDS.items()  # those of `plain_loss`
    assert len({loss for _, loss, _ in expected.values()}) == len(expected)
    for name, (record, loss, _) in expected.items():
        with torch.no_grad():
            mean, count = plain_loss(plain, payload(record))
        assert loss / count == pytest.approx(mean.item(), rel=1e-6), name
        assert count > 0


def test_the_film_is_a_video(expected: dict[str, tuple[Row, float, torch.Tensor]]) -> None:
    film = expected["talk-11"][0]
    assert film["grids"][1][0] > 1
    assert film["seconds"][0] == 0 < film["seconds"][1]
    assert (film["input_ids"] == PROCESSOR.token_ids["video"]).sum() == np.prod(film["grids"][1]) // 4
