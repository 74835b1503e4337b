"""Turns of tools: the ids are those that transformers makes with the model's template, and only what the assistant says
and calls is learnt.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dhp_ray.data import conversation
from dhp_ray.data.conversation import json_of, read_turns, stored_tools
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.formats import read_rows
from dhp_ray.data.formats.rows import read_row
from dhp_ray.data.index import index_fragments
from dhp_ray.data.processor import IGNORE, Encoded, ProcessorSpec
from dhp_ray.schema import Data
from tests.data.samples import processor, talk

PROCESSOR = processor()
Row = dict[str, Any]

# How Qwen2.5 renders tools (its tokenizer_config.json), with the default system turn of its vision models and {%
# generation %} around what is learnt.
NATIVE = """
{%- if messages[0]['role'] == 'system' -%}{%- set system = messages[0]['content'] -%}
{%- else -%}{%- set system = 'You are a helpful assistant.' -%}{%- endif -%}
{{- '<|im_start|>system\n' + system -}}
{%- if tools -%}
{{- '\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
{{- 'You are provided with function signatures within ' -}}
{{- '<tools></tools> XML tags:\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and ' -}}
{{- 'arguments within <tool_call></tool_call> XML tags:\n' -}}
{{- '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' -}}
{%- elif message.role == 'assistant' -%}{{- '<|im_start|>assistant\n' -}}
{%- generation -%}
{%- if message.content -%}{{- message.content + ('\n' if message.tool_calls else '') -}}{%- endif -%}
{%- for tool_call in message.tool_calls or [] -%}
{{- ('' if loop.first else '\n') + '<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' -}}
{{- tool_call.function.arguments | tojson -}}{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\n' -}}
{%- elif message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}"""

LLAMA = """
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
{%- if 'tool_calls' in message -%}
{{- raise_exception('One call, please.') if message.tool_calls | length > 1 -}}
{%- generation -%}
{%- set called = message.tool_calls[0].function -%}
{{- '{"name": "' + called.name + '", "parameters": ' + called.arguments | tojson + '}<|eot_id|>' -}}
{%- endgeneration -%}
{%- elif role == 'assistant' -%}
{%- generation -%}{{- message.content | trim + '<|eot_id|>' -}}{%- endgeneration -%}
{%- else -%}
{%- for tool in tools or [] if loop.first -%}{{- tool | tojson(indent=4) + '\\n\\n' -}}{%- endfor -%}
{{- (message.content | tojson if role == 'ipython' else message.content | trim) + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt else '' -}}
"""
SIGNATURES = [{"name": "weather", "description": "Wetter für einen Ort",
               "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
              {"name": "clock", "parameters": {"type": "object", "properties": {}}}]
TOOLS = [{"type": "function", "function": signature} for signature in SIGNATURES]
QUESTION = {"role": "user", "content": "Is it warm in Köln?"}


def call(name: str, **arguments: Any) -> Row:
    return {"type": "function", "id": "call_1", "function": {"name": name, "arguments": arguments}}


ONE = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call("weather", place="Köln")]},
       {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 21}'},
       {"role": "assistant", "content": "Yes, 21 degrees."}]
SEVERAL = [{"role": "system", "content": "Be brief."}, QUESTION,
           {"role": "assistant", "content": "I look.",
            "tool_calls": [call("weather", place="Köln", days=[1, 2], more={"a": True}), call("clock")]},
           {"role": "tool", "content": "21"}, {"role": "tool", "content": ""}, {"role": "assistant", "content": "Yes."},
           {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "", "tool_calls": [call("clock")]},
           {"role": "tool", "content": "noon"}, {"role": "assistant", "content": "Noon."}]


def encoded(conversation: list[Row], tools: Any = None) -> Encoded:
    return PROCESSOR.encode_turns(read_turns(conversation, tools), [])


def learnt(found: Encoded) -> str:
    return str(PROCESSOR.tokenizer.decode(found.labels[found.labels != IGNORE]))


def with_text_arguments(messages: list[Row]) -> list[Row]:
    """As OpenAI writes them: the arguments of a call as JSON text."""
    messages = copy.deepcopy(messages)
    for entry in (entry for message in messages for entry in message.get("tool_calls") or []):
        entry["function"]["arguments"] = json.dumps(entry["function"]["arguments"], ensure_ascii=False)
    return messages


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["none", "tools"])
@pytest.mark.parametrize("messages", [ONE, SEVERAL], ids=["one", "several"])
def test_ids_and_labels_are_those_of_the_familys_own_template(messages: list[Row], tools: list[Row] | None) -> None:
    expected = PROCESSOR.tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=NATIVE, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    found = encoded(with_text_arguments(messages), tools)
    assert PROCESSOR.tokenizer.decode(found.input_ids) == PROCESSOR.tokenizer.decode(expected["input_ids"])
    assert found.input_ids.tolist() == expected["input_ids"]
    assert (found.labels != IGNORE).tolist() == [bool(flag) for flag in expected["assistant_masks"]]


def test_only_what_the_assistant_says_and_calls_is_learnt() -> None:
    assert learnt(encoded(SEVERAL, TOOLS)) == (
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Köln", "days": [1, 2], "more": {"a": '
        'true}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>Yes.<|im_end|>'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>Noon.<|im_end|>'
    )


@pytest.mark.parametrize("tools", [TOOLS, SIGNATURES, json.dumps(SIGNATURES), [*TOOLS[:1], SIGNATURES[1]]])
def test_both_forms_are_the_same(tools: Any) -> None:
    """LLaMA-Factory's turns and column: one call an object, several a list, as JSON text."""
    calls = [{"name": "weather", "arguments": {"place": "Köln"}}, {"name": "clock", "arguments": {}}]
    openai = [QUESTION, {"role": "assistant", "tool_calls": [{"function": entry} for entry in calls[:1]]},
              {"role": "tool", "content": "21"},
              {"role": "assistant", "tool_calls": [{"function": entry} for entry in calls]},
              {"role": "tool", "content": "20"},
              {"role": "assistant", "content": "Yes."}]
    factory = [{"from": "human", "value": QUESTION["content"]},
               {"from": "function_call", "value": json.dumps(calls[0])},
               {"from": "observation", "value": "21"}, {"from": "function_call", "value": json.dumps(calls)},
               {"from": "observation", "value": "20"},
               {"from": "gpt", "value": "Yes."}]
    one, two = encoded(openai, TOOLS), encoded(factory, tools)
    assert one.input_ids.tolist() == two.input_ids.tolist()
    assert one.labels.tolist() == two.labels.tolist()


@pytest.mark.parametrize("tools", [None, [], "", "[]", " null "])
def test_no_tools_leave_the_system_turn_alone(tools: Any) -> None:
    assert encoded(ONE, tools).input_ids.tolist() == encoded(ONE).input_ids.tolist()
    assert PROCESSOR.tokenizer.decode(encoded(ONE, tools).input_ids).startswith(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>"
    )


WITH_NULL = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [
    {"id": None, "function": {"name": "weather", "arguments": {"place": "Köln", "zone": None}}}]}]


def test_nulls_of_columns_are_no_arguments() -> None:
    """A column of structs gives every call the arguments of all, and every message and tool the keys of all."""
    messages = [*WITH_NULL, {"role": "assistant", "content": "Yes.", "tool_calls": None}]
    batch = pa.RecordBatch.from_pylist([{"messages": messages, "tools": [{"name": "f", "description": None}]}])
    fields = read_row(batch, 0, 2**20).fields
    found = encoded(fields["messages"], fields["tools"])
    assert (
        learnt(found)
        == '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call><|im_end|>Yes.<|im_end|>'
    )
    assert '{"name": "f"}' in PROCESSOR.tokenizer.decode(found.input_ids)


def test_nulls_of_json_are_what_the_assistant_wrote() -> None:
    """JSON, in a file or a column, has the keys of one call alone."""
    text = '{"name": "weather", "arguments": {"place": "Köln", "zone": null}}'
    expected = f"<tool_call>\n{text}\n</tool_call><|im_end|>"
    for messages in ([QUESTION, {"from": "function_call", "value": text}], with_text_arguments(WITH_NULL),
                     WITH_NULL):
        assert learnt(encoded(messages)) == expected
    signature = [{"name": "f", "parameters": {"default": None}}]
    for tools in (signature, json.dumps(signature), [{"type": "function", "function": signature[0]}]):
        assert '"parameters": {"default": null}' in PROCESSOR.tokenizer.decode(encoded(ONE, tools).input_ids)
    for absent in ({"name": None, "arguments": None}, [None], {}):
        message = {"role": "assistant", "content": "Yes.", "function_call": absent}
        assert learnt(encoded([QUESTION, message])) == "Yes.<|im_end|>"


@pytest.mark.parametrize("calls", [None, [], "", "[]", " null "])
def test_no_calls_leave_what_the_assistant_says_alone(calls: Any) -> None:
    assert learnt(encoded([QUESTION, {"role": "assistant", "content": "Yes.",
                                      "tool_calls": calls}])) == "Yes.<|im_end|>"


def test_a_tool_may_show_a_picture() -> None:
    conversation = [QUESTION, {"role": "assistant", "tool_calls": [call("weather")]},
                    {"from": "observation", "value": "<image> seen"},
                    {"role": "assistant", "content": "Yes."}]
    found = PROCESSOR.encode(conversation, [(56, 56)])
    text = PROCESSOR.tokenizer.decode(found.input_ids)
    assert (
        "<|im_start|>user\n<tool_response>\n<|vision_start|>"
        + "<|image_pad|>" * 4
        + "<|vision_end|> seen\n</tool_response><|im_end|>"
        in text
    )
    assert not (set(found.labels.tolist()) & {PROCESSOR.token_ids["image"]})


def test_tools_are_written_as_the_template_of_the_model_writes_them() -> None:
    """Llama 3.1's writes one call without a text beside it, and what tools answer as JSON."""
    llama = ProcessorSpec("tiny_llama").load()
    llama = replace(llama, chat_template=LLAMA)
    answer = {"role": "tool", "content": 'It is "21".\n'}
    messages = [*ONE[:2], answer, ONE[3]]
    found = llama.encode_turns(read_turns(with_text_arguments(messages), SIGNATURES), [])
    messages[1] = messages[1] | {"content": ""}
    expected = llama.tokenizer.apply_chat_template(messages, tools=TOOLS, chat_template=LLAMA, return_dict=True,
                                                   return_assistant_tokens_mask=True)
    assert found.input_ids.tolist() == expected["input_ids"]
    assert (found.labels != IGNORE).tolist() == [bool(flag) for flag in expected["assistant_masks"]]
    beside, twice = {"content": "I look."}, {"tool_calls": [call("clock")] * 2}
    refused = "the chat template refuses turn 2, of the assistant: One call, please."
    for said, reason in ((beside, "the chat template changes an answer, turn 2; allowed: "), (twice, refused),
                         (beside | {"weight": 0}, "the chat template leaves out or changes turn 2, of the assistant"),
                         (twice | {"weight": 0}, refused)):
        with pytest.raises(RowError, match=f"^{re.escape(reason)}"):
            llama.encode([messages[0], messages[1] | said, *messages[2:]], [])


@pytest.mark.parametrize("preset", ["tiny_internvl", "tiny_llama", "tiny_qwen3"])
def test_a_template_that_writes_no_tools_refuses_them(preset: str) -> None:
    of = ProcessorSpec(preset).load()
    for messages, tools in ((ONE[:2], None), ([*talk("a", "b"), *ONE[2:]], None), (talk("a", "b"), TOOLS)):
        turns = read_turns(messages, tools)
        with pytest.raises(RowError) as caught:
            of.encode_turns(turns, [])
        assert str(caught.value) == ("the model's chat template does not write tools; allowed: rows without tools and "
                                     "calls, or a folder whose chat template writes them")


def test_the_older_names_of_calls_and_tools() -> None:
    """Beside a text, and in structs of a column, where other turns have a call of nulls."""
    call = {"name": "weather", "arguments": '{"city": "Bern"}'}
    older = [QUESTION | {"function_call": {"name": None, "arguments": None}},
             {"role": "assistant", "content": "Let me see.", "function_call": call},
             {"role": "function", "name": "weather", "content": "Rain"}, {"role": "assistant", "content": "It rains."}]
    newer = [QUESTION, {"role": "assistant", "content": "Let me see.", "tool_calls": [{"function": call}]},
             {"role": "tool", "content": "Rain"}, {"role": "assistant", "content": "It rains."}]
    assert read_turns(older) == read_turns(newer)
    assert read_turns(newer)[1].calls
    assert stored_tools({"functions": SIGNATURES}) == stored_tools({"functions": 1, "tools": SIGNATURES}) == SIGNATURES
    assert stored_tools({"functions": SIGNATURES, "tools": "[]"}) == SIGNATURES
    with pytest.raises(RowError, match=r"^turn 2 has tool_calls and function_call; allowed: one of them$"):
        read_turns([QUESTION, newer[1] | older[1]])


def test_a_developer_is_the_system() -> None:
    one, two = ([{"role": role, "content": "Be brief."}, QUESTION, ONE[-1]] for role in ("developer", "system"))
    assert encoded(one).input_ids.tolist() == encoded(two).input_ids.tolist()


ASKED = {"from": "human", "value": "a"}


@pytest.mark.parametrize(("conversation", "tools", "reason"), [
    ([ASKED, {"from": "function_call", "value": "weather(x)"}], None,
     "turn 2: the call of a tool is not JSON: Expecting value"),
    ([ASKED, {"from": "function_call", "value": '{"arguments": {}}'}], None,
     "turn 2: the call of a tool is {'arguments': {}}; allowed: an object with name"),
    ([ASKED, {"from": "function_call", "value": '{"name": "f", "arguments": "x"}'}], None,
     "turn 2: the arguments of f is not JSON"),
    ([ASKED, {"from": "function_call", "value": '{"name": "f", "arguments": [1]}'}], None,
     r"turn 2: the arguments of f are \[1\]; allowed: an object"),
    ([ASKED, {"from": "function_call", "value": ""}], None, "turn 2 has no text in value"),
    ([ASKED, {"from": "function_call", "value": "[]"}], None, "turn 2 has no text in value"),
    ([ASKED, {"role": "assistant", "tool_calls": [3]}], None, "turn 2: the call of a tool is 3; allowed"),
    ([ASKED, {"from": "observation", "value": "1"}, {"from": "gpt", "value": "b"}], None,
     "a tool answers where the assistant has not called one; allowed"),
    ([{"from": "function_call", "value": '{"name": "f"}'}], None, "the assistant speaks first"),
    ([ASKED, {"from": "gpt", "value": "b"}], "x", "tools is not JSON"),
    ([ASKED, {"from": "gpt", "value": "b"}], [{"description": "f"}],
     "tools hold .*; allowed: objects with name, description and parameters"),
    ([ASKED, {"from": "gpt", "value": "b"}], [{"name": "f", "parameters": b"x"}], "cannot be written as JSON"),
])
def test_what_cannot_be_rendered_is_a_bad_row(conversation: list[Row], tools: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason) as caught:
        encoded(conversation, tools)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" + "[]," * 2000 + "1]", "[" + "{}," * 2000 + "1]", "[" + "1," * 4000 + "1]"])
def test_a_text_of_too_many_values_is_not_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json_of(text, "it") == json_of(text.encode(), "it") == json.loads(text)
    monkeypatch.setattr(conversation, "MOST_VALUES", 3000)
    for given in (text, text.encode()):
        with pytest.raises(RowError, match=r"^it is not JSON: 400\d values; allowed: at most 3000$"):
            json_of(given, "it")


def test_a_row_of_too_many_values_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MOST_VALUES", 3000)
    good, bad = {"conversations": talk("a", "b")}, {"conversations": [[]] * 4000}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, (good, bad, good))))
    [fragment] = index_fragments(Data(format="llava", path=str(tmp_path / "rows.jsonl")))
    assert [row.error for row in read_rows(fragment)] == ["", "the row is not JSON: 8001 values; allowed: at most 3000",
                                                          ""]
    (tmp_path / "rows.jsonl").write_text(json.dumps(bad))
    with pytest.raises(DataError, match=r"rows\.jsonl is not JSON: 8001 values"):
        index_fragments(Data(format="llava", path=str(tmp_path / "rows.jsonl")))
