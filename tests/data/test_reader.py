from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.data import FORMS, task_of
from dhp_ray.data.conversation import read_turns
from dhp_ray.data.fragments import Fragment
from dhp_ray.data.images import decode, image_size
from dhp_ray.data.index import index_fragments
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.order import RowRange, row_order
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.reader import PAYLOAD, UNREADABLE, ReadFragments, make_item, read_payloads
from dhp_ray.schema import Data
from tests.data.samples import picture, processor, read_all, talk, write_rows

PROCESSOR = processor()


def block_of(
    path: Path, root: Path, *, max_tokens: int = 0, seed: int = 0, epoch: int = 0, answer_tokens: int = 0
) -> pa.Table:
    """All fragments of the file, as the reading stage makes them."""
    read = ReadFragments(ProcessorSpec("tiny"), str(root), seed, max_tokens, answer_tokens=answer_tokens)
    return read_all(read, index_fragments(Data(format="llava", path=str(path))), epoch)


def whole_item(fragment: Fragment) -> dict[str, Any]:
    return make_item(0, [(RowRange(0, 0, fragment.num_rows), 0, fragment)])


def records(block: pa.Table) -> dict[str, dict[str, Any]]:
    return {record["id"]: record for record in read_payloads(block, list(range(block.num_rows)))}


def test_a_file_that_has_changed_since_it_was_indexed_is_one_row_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"conversations": [talk("a", "b")] * 5}), path)
    (fragment,) = index_fragments(Data(format="parquet", path=str(path)))
    pq.write_table(pa.table({"conversations": [talk("a", "b")] * 3}), path)
    read = ReadFragments(ProcessorSpec("tiny"), str(tmp_path), 0)
    for block in (read_all(read, [fragment]), read.block(whole_item(fragment), [4])):
        (row,) = block.to_pylist()
        assert row["row"] == UNREADABLE
        assert row["error"] == "it has changed since it was indexed: 3 rows are where there were 5"


def test_no_memory_to_read_a_row_is_the_tasks_failure(tmp_path: Path) -> None:
    """Not that of the row: it would be skipped, though nothing is wrong with it."""
    (tmp_path / "a.png").write_bytes(picture(20, 20) + bytes(2**27))
    path = write_rows(tmp_path / "rows.json", [{"id": "a", "image": "a.png", "conversations": talk("<image>", "b")}])
    fragments = index_fragments(Data(format="llava", path=str(path)))
    read = ReadFragments(ProcessorSpec("tiny"), str(tmp_path), 0)
    assert read_all(read, fragments)["error"].to_pylist() == [""]
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**25
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        [row] = read_all(read, fragments).to_pylist()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (row["row"], row["id"], row["error"]) == (UNREADABLE, str(path), "MemoryError")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_large_rows_take_little_memory(form: str, tmp_path: Path) -> None:
    rows, errors, largest, peak, _ = task_of(form, tmp_path, 48)
    assert (rows, errors) == ((64, 64) if form == "zeros" else (48, 0))
    assert largest < 280 * 2**20
    assert peak < (1000 if form == "zeros" else 1500) * 2**20


def test_a_row_of_several_files_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.bmp").write_bytes(picture(20, 20, "BMP"))  # of 1254 bytes
    rows = [{"id": str(number), "images": ["a.bmp"] * number, "conversations": talk("<image>" * number, "b")}
            for number in (1, 2, 3)]
    path = write_rows(tmp_path / "rows.json", rows)
    spec = ProcessorSpec("tiny", limits=MediaLimits(max_file_bytes=3000))
    found = read_all(ReadFragments(spec, str(tmp_path), 0), index_fragments(Data(format="llava", path=str(path))))
    assert found["error"].to_pylist() == ["", "", "the row has 0.0 MB; allowed: at most 0.00286102 (data.max_file_mb)"]


def test_prompts_have_room_for_answers(tmp_path: Path) -> None:
    """What stands behind the last question is left out, with its images."""
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(picture(100, 60))
    talked = talk("<image>What?", "One.", "And?", "Two.", "<image>Thanks.")
    path = write_rows(tmp_path / "rows.json", [
        {"id": "good", "image": ["a.png", "b.png"], "conversations": talked, "answers": ["2"]},
        {"id": "bad", "conversations": talk("What?", "x"), "answers": 3}])
    found = records(block_of(path, tmp_path, answer_tokens=4))
    good, pad = found["good"], PROCESSOR.token_ids["pad"]
    text, prompt = PROCESSOR.encode_prompt(read_turns(talked)[:3], [(100, 60)])
    assert text.endswith("And?<|im_end|>\n<|im_start|>assistant\n")
    assert good["input_ids"].tolist() == [*prompt.input_ids.tolist(), *[pad] * 4]
    assert good["labels"].tolist() == [*[-100] * len(prompt.input_ids), *[pad] * 4]
    assert (len(good["grids"]), good["images"]) == (1, [picture(100, 60)])
    assert good["text_tokens"] + good["vision_tokens"] == len(good["input_ids"])
    assert found["bad"]["error"] == "answers holds '3'; allowed: a text, or a list of texts"


def test_bad_rows_keep_their_place_and_break_nothing(tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(picture(100, 60))
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "narrow.png").write_bytes(picture(2, 500))
    rows = {
        "good": ({"image": "good.png", "conversations": talk("<image>\nWhat?", "A gradient.")}, ""),
        "plain": ({"conversations": talk("2 + 2?", "4")}, ""),
        "absent": ({"image": "absent.png", "conversations": talk("<image>", "a")},
                   "image 1: absent.png: no such file below data.image_root"),
        "header": ({"image": ["good.png", "text.png"], "conversations": talk("<image><image>", "a")},
                   "image 2: header cannot be read: not an image"),
        "narrow": ({"image": "narrow.png", "conversations": talk("<image>", "a")},
                   "an image of 2x500 pixels has the aspect ratio 250; allowed: at most 200"),
        "marks": ({"image": "good.png", "conversations": talk("What?", "a")}, "0 <image> marks for 1 images"),
        "escape": ({"image": "../good.png", "conversations": talk("<image>", "a")},
                   "image 1: '../good.png' is not a relative file name"),
        "empty": ({"conversations": []}, "the conversation is empty"),
        "missing": ({"text": "a"}, "no conversations"),
        "role": ({"conversations": [{"from": "robot", "value": "a"}]}, "turn 1 is from 'robot'"),
        "smuggled": ({"conversations": talk("<|image_pad|>", "a")}, ""),
        "long": ({"conversations": talk("a" * 2000, "a")},
                 "2060 tokens in one sequence; allowed: at most 2000 (planner.max_sequence_tokens)"),
        "odd": ({"conversations": [{"from": ["human"], "value": "a"}]}, "turn 1 is from ['human']"),
    }
    path = write_rows(tmp_path / "rows.json", [{"id": name, **row} for name, (row, _) in rows.items()])
    block = block_of(path, tmp_path, max_tokens=2000)
    assert block.schema.equals(PAYLOAD)
    found = records(block)
    assert set(found) == set(rows)
    for name, (_, reason) in rows.items():
        assert found[name]["error"].startswith(reason), name
        assert bool(found[name]["error"]) == bool(reason)
        assert "\n" not in found[name]["error"]
        assert bool(len(found[name]["input_ids"])) != bool(reason)
    assert found["good"]["images"] == [(tmp_path / "good.png").read_bytes()]
    assert found["good"]["grids"].tolist() == [[1, 4, 8]]
    assert found["plain"]["grids"].shape == (0, 3)


def test_lengths_from_headers_are_those_of_the_decoded_images(test_data: Path, tmp_path: Path) -> None:
    rows = json.loads((test_data / "nlvr/conversations.json").read_text())[:40]
    block = block_of(write_rows(tmp_path / "rows.json", rows), test_data / "nlvr")
    assert block.num_rows == 40
    for record in records(block).values():
        assert not record["error"]
        pixels = [decode(image, PROCESSOR.family) for image in record["images"]]
        patches = [int(np.prod(grid)) for grid in record["grids"]]
        assert [len(image) for image in pixels] == patches
        assert (
            record["vision_tokens"]
            == sum(patches) // 4
            == int((record["input_ids"] == PROCESSOR.token_ids["image"]).sum())
        )
        assert record["text_tokens"] + record["vision_tokens"] == len(record["input_ids"]) == len(record["labels"])
        expected = PROCESSOR.encode(next(row for row in rows if row["id"] == record["id"])["conversations"],
                                    [image_size(image) for image in record["images"]])
        assert np.array_equal(record["input_ids"], expected.input_ids)
        assert np.array_equal(record["labels"], expected.labels)


def test_rows_of_a_fragment_are_shuffled(tmp_path: Path) -> None:
    rows = [{"id": str(number), "conversations": talk("a", "b")} for number in range(40)]
    path = write_rows(tmp_path / "rows.json", rows)
    block = block_of(path, tmp_path, seed=5, epoch=2)
    assert block["position"].to_pylist() == [0] * 32 + [1] * 8
    assert block["id"].to_pylist() == [str(row) for row in range(40)]
    places = block["row"].to_pylist()
    assert [places[:32].index(place) for place in range(32)] == row_order(5, 2, 0, 32)
    assert [places[32:].index(place) for place in range(8)] == row_order(5, 2, 1, 8)


def test_large_rows_are_several_blocks(tmp_path: Path) -> None:
    """Of the files that rows name the index knows nothing."""
    (tmp_path / "a.bmp").write_bytes(picture(20, 20, "BMP"))  # of 1254 bytes
    rows = [{"id": str(number), "image": "a.bmp", "conversations": talk("<image>", "b")} for number in range(8)]
    path = write_rows(tmp_path / "rows.json", rows)
    [fragment] = index_fragments(Data(format="llava", path=str(path)))
    read = ReadFragments(ProcessorSpec("tiny"), str(tmp_path), 5, most_bytes=3000)
    item = make_item(0, [(RowRange(0, 1, 8), 0, fragment)])
    blocks = list(read(pa.Table.from_pylist([item])))
    assert [block.num_rows for block in blocks] == [3, 3, 1]
    order = row_order(5, 0, 0, 8)
    found = [row for block in blocks for row in block.select(["id", "row"]).to_pylist()]
    assert found == [{"id": str(row), "row": order.index(row)} for row in sorted(order[1:])]
    assert read.block(item, [5, 3]) == blocks[1].take([2, 0])
    both = make_item(0, [(RowRange(0, 1, 3), 0, fragment), (RowRange(7, 4, 8), 0, fragment)])
    found = pa.concat_tables(read(pa.Table.from_pylist([both])))
    assert found["position"].to_pylist() == [0, 0, 7, 7, 7, 7]
    assert found["id"].to_pylist() == [str(row) for row in sorted(order[1:3]) + sorted(order[4:])]
    assert read.block(both, [4, 1]) == found.take([4, 1])
    path.unlink()
    [row] = next(read(pa.Table.from_pylist([item]))).to_pylist()
    assert (row["row"], row["id"], row["error"]) == (UNREADABLE, str(path), "No such file or directory")


@pytest.mark.parametrize("rows", [[], [1], [2, 0]])
def test_rows_of_a_block_come_as_asked(rows: list[int], tmp_path: Path) -> None:
    stored = [{"id": str(number), "conversations": talk("a", "b" * (number + 1))} for number in range(3)]
    path = write_rows(tmp_path / "rows.json", stored)
    block = block_of(path, tmp_path)
    ids = block["id"].to_pylist()
    found = read_payloads(block, rows)
    assert [record["id"] for record in found] == [ids[row] for row in rows]
    for record in found:
        assert int((record["labels"] != -100).sum()) == int(record["id"]) + 2
        record["input_ids"][0] = 7  # the reader's own copy: blocks in the object store cannot be written to
