"""Tools, their calls by the assistant and their answers, as text in the form of the Qwen family.

    system      ...\\n\\n# Tools ... <tools>\\n{"type": "function", "function": {...}}\\n</tools> ...
    assistant   what it says\\n<tool_call>\\n{"name": "zoom", "arguments": {"factor": 2}}\\n</tool_call>
    user        <tool_response>\\nwhat the tool answers\\n</tool_response>

Qwen2.5's text template renders tools this way, but the templates of its vision models leave calls out. As text of the
turns, tools are the same for both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dhp_ray.data.errors import RowError
from dhp_ray.data.json_values import parsed
from dhp_ray.errors import first_line

RESPONSE_BEGIN, RESPONSE_END = "<tool_response>\n", "\n</tool_response>"
_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    "tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def calls_text(calls: Any) -> str:
    """What the assistant writes to call tools: one call or several, as JSON text or objects.

    A call is {"name": ..., "arguments": {...} or JSON text}, alone or as the `function` of one of OpenAI's tool_calls.
    Keys with the value null count as absent, because a column of structs gives every call the arguments of all calls;
    in JSON text they do not.

    Raises:
        RowError: not JSON, or a call without a name or with arguments that are not an object.
    """
    calls = _read(calls, "the call of a tool")
    return "\n".join(_call_text(call) for call in (calls if isinstance(calls, list) else [calls]))


def tools_text(system: str, tools: Any) -> str:
    """The system turn of a conversation that offers tools: its own text, then the signatures of the tools.

    `tools`: a list of {"name": ..., "parameters": ...}, alone or as the `function` of {"type": "function"}, or such a
    list as JSON text; nulls are treated as in calls.

    Raises:
        RowError: `tools` has another form.
    """
    tools = _read(tools, "tools")
    lines = []
    for tool in tools if isinstance(tools, list) else [tools]:
        signature = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(signature, Mapping) or not isinstance(signature.get("name"), str):
            raise RowError(f"tools hold {repr(tool)[:100]}; allowed: objects with name, description and parameters")
        lines.append("\n" + _json(tool if tool is not signature else {"type": "function", "function": tool}))
    return (f"{system}\n\n" if system else "") + _TOOLS.format(tools="".join(lines))


def holds_any(value: Any) -> bool:
    """Whether stored tools or calls hold any: the value may be null, empty, or an empty list as text."""
    return bool(value) and not (isinstance(value, str) and value.strip() in ("", "[]", "null"))


def _call_text(call: Any) -> str:
    inner = call
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        inner = call["function"]
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RowError(f"the call of a tool is {repr(call)[:100]}; allowed: an object with name and arguments")
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = _read(arguments, f"the arguments of {name[:50]}")
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RowError(f"the arguments of {name[:50]} are {repr(arguments)[:100]}; allowed: an object")
    return f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>"


def _read(value: Any, what: str) -> Any:
    """A value that may be stored as JSON text; otherwise, keys with the value null are left out."""
    if not isinstance(value, str):
        return _present(value)
    try:
        return parsed(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} is not JSON: {first_line(error)}") from None


def _present(value: Any) -> Any:
    """The value without keys that hold null."""
    if isinstance(value, Mapping):
        return {name: _present(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_present(inner) for inner in value]
    return value


def _json(tree: Any) -> str:
    """JSON in the form of the filter `tojson` of transformers' templates."""
    try:
        return json.dumps(tree, ensure_ascii=False)
    except (TypeError, ValueError) as error:  # a column may hold bytes or dates
        raise RowError(f"tools or their arguments cannot be written as JSON: {first_line(error)}") from None
