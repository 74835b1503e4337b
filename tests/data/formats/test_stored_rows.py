from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dhp_ray.data.conversation import read_turns, stored_tools, stored_turns
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.formats import read_rows
from dhp_ray.data.formats.rows import check_columns
from dhp_ray.data.index import index_fragments
from dhp_ray.schema import Data
from tests.data.samples import talk, write_rows


def test_conversations_are_lists_or_json_text() -> None:
    assert stored_turns({"conversations": talk("a", "b")}) == talk("a", "b")
    assert stored_turns({"conversations": json.dumps(talk("a", "b"))}) == talk("a", "b")
    for value, reason in ((None, "no conversations"), (3, "conversations holds int"),
                          ('"a"', "conversations holds str"), ("[{", "conversations is not JSON")):
        with pytest.raises(RowError, match=reason):
            stored_turns({"conversations": value})


def test_messages_stand_in_for_conversations() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    as_text = {"messages": json.dumps(messages), "conversations": None}
    assert stored_turns({"messages": messages}) == stored_turns(as_text) == messages
    assert stored_turns({"messages": messages, "conversations": talk("a", "b")}) == talk("a", "b")
    with pytest.raises(RowError, match="messages is not JSON"):
        stored_turns({"messages": "["})


def test_a_column_with_the_system_text_comes_first() -> None:
    french = "Answer in French."
    assert stored_turns({"conversations": talk("a", "b"), "system": french}) == [
        {"role": "system", "content": french}, *talk("a", "b")]
    assert stored_turns({"conversations": talk("a", "b"), "system": ""}) == talk("a", "b")
    own = [{"from": "developer", "value": "Answer in German."}, *talk("a", "b")]
    assert stored_turns({"conversations": own, "system": french}) == own
    for content in ("", [], [{"type": "text", "text": ""}], [""]):
        empty = {"role": "system", "content": content}
        assert stored_turns({"messages": [empty, *talk("a", "b")], "system": french}) == [
            {"role": "system", "content": french}, *talk("a", "b")]
    with pytest.raises(RowError, match="system holds int; allowed: a text"):
        stored_turns({"conversations": talk("a", "b"), "system": 3})


def test_what_fills_marks_of_ms_swift_is_refused() -> None:
    objects = {"ref": ["a cat"], "bbox": [[1, 2, 3, 4]]}
    row = {"conversations": talk("Where is <ref-object>?", "At <bbox>.")}
    assert stored_turns({"conversations": talk("a", "b"), "objects": objects}) == talk("a", "b")
    for empty in (None, [], {"ref": None}):
        assert stored_turns(row | {"objects": empty, "audios": empty}) == row["conversations"]
    with pytest.raises(RowError, match=r"^objects are to fill <ref-object> \(ms-swift\); allowed: texts with"):
        stored_turns(row | {"objects": objects})
    for column in ("audio", "audios"):
        with pytest.raises(RowError, match=rf"^{column} holds \['a\.wav'\]; allowed: images and videos$"):
            stored_turns(row | {column: ["a.wav"]})


def test_columns_of_what_is_refused_are_read(tmp_path: Path) -> None:
    rows = [{"messages": json.dumps(talk("a", "At <bbox>.")), "objects": {"bbox": [[1, 2]]}, "functions": "[]"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    [fragment] = index_fragments(Data(format="parquet", path=str(tmp_path)))
    assert [dict(row.fields) for row in read_rows(fragment)] == rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_nan_is_null(name: str, tmp_path: Path) -> None:
    """pandas has it for what a row does not have, and Python's json writes it."""
    nan, path = float("nan"), tmp_path / name
    turns = [turn | {"weight": weight, "train_detail": nan} for turn, weight in zip(talk("a", "b"), (nan, 1.0))]
    rows = [{"id": "1", "conversations": turns, "tools": nan, "answers": [nan]}]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_rows(path, rows)
    [fragment] = index_fragments(Data(format="parquet" if path.suffix == ".parquet" else "llava", path=str(path)))
    [row] = read_rows(fragment)
    assert "nan" not in str(dict(row.fields)).lower()
    assert [turn.text for turn in read_turns(stored_turns(row.fields), stored_tools(row.fields))] == ["a", "b"]


@pytest.mark.parametrize(("column", "value"), [
    ("image", {"path": "a.png"}), ("image", {"image": "a.png"}), ("images", [{"type": "image", "image": "a.png"}]),
    ("video", {"video": "a.mp4", "fps": 4}), ("videos", [{"path": "a.mp4"}]), ("videos", [[{"path": "f.png"}]]),
    ("videos", [[{"image": "f.png"}]])])
def test_columns_may_hold_mappings(column: str, value: object) -> None:
    check_columns(pa.Table.from_pylist([{"messages": "[]", column: value}]).schema, "a.parquet")


@pytest.mark.parametrize(("column", "value"), [
    ("image", {"fps": 4}), ("image", {"video": "a.mp4"}), ("videos", [[{"video": "a.mp4"}]]), ("images", [["a.png"]])])
def test_columns_that_hold_no_media_are_refused(column: str, value: object) -> None:
    with pytest.raises(DataError, match=f"column {column} holds .*; allowed: bytes, string, struct with bytes or path"):
        check_columns(pa.Table.from_pylist([{"messages": "[]", column: value}]).schema, "a.parquet")


def as_strings(values: list[bytes]) -> pa.Array:
    """As writers leave them that do not look."""
    return pa.array(values, pa.binary()).view(pa.string())


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("turns", ["text", "structs"])
def test_a_string_that_is_not_utf_8_makes_one_bad_row(kind: str, turns: str, tmp_path: Path) -> None:
    """Also where it lies in a list of structs; as an id, the row has none."""
    bad = b"\xff\xfe"
    texts = [b"first", bad, b"third", b"fourth"]
    column = as_strings([text if text == bad else json.dumps(talk("a", text.decode())).encode() for text in texts])
    if turns == "structs":
        ends = pa.array(range(len(texts) + 1), pa.int32())
        column = pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays(
            [pa.array(["gpt"] * len(texts)), as_strings(texts)], ["from", "value"]))
    table = pa.table({"id": as_strings([b"one", b"two", bad, b"four"]), "conversations": column})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "rows.parquet")
    else:
        with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "rows.arrow"}]}))
    [fragment] = index_fragments(Data(format="huggingface", path=str(tmp_path)))
    rows = list(read_rows(fragment))
    assert [row.id for row in rows] == ["one", "two", "rows#000002", "four"]
    said = "a string of the row is not UTF-8"
    assert [row.error.partition(":")[0] for row in rows] == ["", said, said, ""]
    few_bytes = list(read_rows(fragment, max_bytes=1))
    assert [row.id for row in few_bytes] == [row.id for row in rows]
    assert all(row.error.startswith("the row has ") for row in few_bytes)
