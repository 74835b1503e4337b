from __future__ import annotations

import json

import pytest

from dhp_ray.data.errors import RowError
from dhp_ray.data.formats.stored_rows import conversation_of
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
