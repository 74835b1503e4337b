from __future__ import annotations

import json

import pyarrow as pa
import pytest

from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.formats.stored_rows import check_columns, conversation_of
from tests.data.samples import talk


def test_conversations_are_lists_or_json_text() -> None:
    assert conversation_of({"conversations": talk("a", "b")}) == talk("a", "b")
    assert conversation_of({"conversations": json.dumps(talk("a", "b"))}) == talk("a", "b")
    for value, reason in ((None, "no conversations"), (3, "no conversations"), ('"a"', "no conversations"),
                          ("[{", "conversations is not JSON")):
        with pytest.raises(RowError, match=reason):
            conversation_of({"conversations": value})


def test_messages_stand_in_for_conversations() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    as_text = {"messages": json.dumps(messages), "conversations": None}
    assert conversation_of({"messages": messages}) == conversation_of(as_text) == messages
    assert conversation_of({"messages": messages, "conversations": talk("a", "b")}) == talk("a", "b")
    with pytest.raises(RowError, match="messages is not JSON"):
        conversation_of({"messages": "["})


def test_a_column_with_the_system_text_comes_first() -> None:
    french = "Answer in French."
    assert conversation_of({"conversations": talk("a", "b"), "system": french}) == [
        {"role": "system", "content": french}, *talk("a", "b")]
    assert conversation_of({"conversations": talk("a", "b"), "system": ""}) == talk("a", "b")
    own = [{"from": "developer", "value": "Answer in German."}, *talk("a", "b")]
    assert conversation_of({"conversations": own, "system": french}) == own
    with pytest.raises(RowError, match="system holds int; allowed: a text"):
        conversation_of({"conversations": talk("a", "b"), "system": 3})


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
