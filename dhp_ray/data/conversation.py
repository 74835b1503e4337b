"""Conversations in the forms of common data sets: their checked turns, and the messages that chat templates take.

    LLaVA    [{"from": "human", "value": "<image>\\nWhat is this?"}, {"from": "gpt", "value": "A cat."}, ...]
    OpenAI   [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}, ...]

Tool calls are LLaMA-Factory's turns `function_call` and `observation`, or OpenAI's `tool_calls` and `tool` turns (once
`function_call` and `function` turns).

A mark (`<image>`, `<video>`) in a turn of the user or of a tool, or a part without a source, stands for the row's next
image or video; a part may instead give its `index`, from 0, or its own source (see `media_keys`). Behind a backslash
(`\\<image>`), in a part of type text and in all other turns a mark is a word. A turn of the assistant with
`"weight": 0` (OpenAI), `"loss": false` (ms-swift), or `"train": false` or `"training": false` (Axolotl) is not learned.
Its thought lies in <think>...</think> before the text, or beside it in `reasoning_content` (Qwen, DeepSeek),
`reasoning` or `thinking`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dhp_ray.data.errors import RowError
from dhp_ray.errors import about, first_line

IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"
MARKS = {IMAGE_MARK: "image", VIDEO_MARK: "video"}
MEDIA = tuple(MARKS.values())
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "function_call": "assistant",
         "observation": "tool", "tool": "tool", "function": "tool",
         "system": "system", "developer": "system"}
LEARNED = ("weight", "loss", "train", "training")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MOST_VALUES = 2**21  # commas and brackets in a text: a value takes some 200 bytes of memory, and three to write
EMPTY = (None, "", b"")
OWN_SETTINGS = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "video_start",
                "video_end", "nframes", "min_frames", "max_frames", "sample_fps", "raw_fps")
"""Keys of qwen-vl-utils by which one image or video is shown otherwise than all others."""
CONVERSATION_COLUMNS = ("conversations", "messages")
AUDIO_COLUMNS = ("audio", "audios")
_JSON = json.JSONDecoder(parse_constant=lambda name: None)  # NaN and Infinity are no JSON
_MARK = re.compile(rf"(?<!\\)({'|'.join(MARKS)})")
_PLACE = re.compile("<bbox>|<ref-object>")
_WORD = re.compile(rf"\\(?={'|'.join(MARKS)})")


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Text, image or video. `source`: None: the row's next one, or that of `index`. `marked`: by a mark in a text."""

    kind: str
    text: str = ""
    source: Any = None
    marked: bool = False
    index: int | None = None
    fps: Any = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn; `role`: system, user, assistant or tool. `learned`: an answer has labels. JSON texts, lists in OpenAI's
    form: `calls`, what an answer calls; `tools`, in the first turn what may be called.
    """

    role: str
    parts: tuple[ContentPart, ...]
    learned: bool = True
    calls: str = ""
    tools: str = ""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def media(self) -> list[ContentPart]:
        return [part for part in self.parts if part.kind != "text"]

    def message(self) -> dict[str, Any]:
        """The turn in the form of chat templates, with images and videos as parts between the texts."""
        content = [{"type": "text", "text": part.text} if part.kind == "text" else {"type": part.kind}
                   for part in self.parts]
        return {"role": self.role, "content": content if self.media else self.text} | (
            {"tool_calls": json.loads(self.calls)} if self.calls else {})


def stored_turns(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The stored turns of a row, after its `system`. RowError: none, or what cannot be used beside them."""
    name = next((name for name in CONVERSATION_COLUMNS if fields.get(name) is not None), None)
    turns = fields.get(name) if name else None
    if isinstance(turns, str):
        turns = json_of(turns, str(name))
    if not isinstance(turns, list):
        held = f"{name} holds {type(turns).__name__}" if name else "no conversations"
        raise RowError(f"{held}; allowed: conversations, a list of turns with from and value, or messages, with role "
                       "and content")
    if _holds_any(fields.get("objects")) and (mark := _PLACE.search(str(turns))):
        raise RowError(f"objects are to fill {mark[0]} (ms-swift); allowed: texts with the names and places themselves")
    if audio := next((column for column in AUDIO_COLUMNS if _holds_any(fields.get(column))), ""):
        raise RowError(f"{audio} holds {_brief(fields[audio])}; allowed: images and videos")
    system = fields.get("system")
    if system is not None and not isinstance(system, str):
        raise RowError(f"system holds {type(system).__name__}; allowed: a text")
    if system and turns and stored_role(turns[0]) == "system":  # the turn counts, unless it has no text
        return turns if _turn(1, turns[0]).text else [{"role": "system", "content": system}, *turns[1:]]
    return [{"role": "system", "content": system}, *turns] if system else turns


def stored_tools(fields: Mapping[str, Any]) -> Any:
    """What the assistant of a row may call, as stored; `functions` is OpenAI's older name."""
    return fields["tools"] if _holds_any(fields.get("tools")) else fields.get("functions")


def stored_role(turn: Any) -> str:
    """The role of a stored turn, as in `Turn`; empty if it has none that is known."""
    if not isinstance(turn, Mapping):
        return ""
    return ROLES.get(str(turn.get("role") if turn.get("from") is None else turn.get("from")), "")


def read_turns(conversation: Sequence[Mapping[str, Any]], tools: Any = None) -> list[Turn]:
    """The turns of a conversation in either form; the assistant may call `tools`. RowError: it cannot be used."""
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise RowError("the conversation is empty; allowed: a list of turns with from and value, or role and content")
    turns = [_turn(number, turn) for number, turn in enumerate(conversation, 1)]
    if any(turn.role == "tool" and before not in ("assistant", "tool")
           for turn, before in zip(turns, ["", *(turn.role for turn in turns)])):
        raise RowError("a tool answers where the assistant has not called one; allowed: turns of tools after one of "
                       "the assistant")
    spoken = [turn.role for turn in turns if turn.role != "system"]
    if "assistant" not in spoken:
        raise RowError("no turn of the assistant: nothing to learn from")
    if not any(turn.learned for turn in turns if turn.role == "assistant"):
        raise RowError("no turn of the assistant has a weight: nothing to learn from")
    if spoken[0] != "user":
        raise RowError("the assistant speaks first; allowed: a turn of the user before it")
    return [replace(turns[0], tools=_tools(tools)), *turns[1:]] if _holds_any(tools) else turns


def last_answer(turns: Sequence[Turn]) -> int:
    """The index of the assistant's last turn, from 0."""
    return max(number for number, turn in enumerate(turns) if turn.role == "assistant")


def right_answers(fields: Mapping[str, Any], answer: str) -> tuple[str, ...]:
    """The assistant's own answer, and the texts in the row's `answers`. RowError: these are no texts."""
    others: Any = fields.get("answers")
    others = [] if others is None else [others] if isinstance(others, str) else others
    if not isinstance(others, list) or not all(isinstance(text, str) for text in others):
        raise RowError(f"answers holds {str(others)[:80]!r}; allowed: a text, or a list of texts")
    return tuple(dict.fromkeys((answer, *others)))


def check_counts(turns: Sequence[Turn], counts: Mapping[str, int]) -> None:
    """Refuse other numbers of marks than of images or videos, or `index`es that do not name each of them once."""
    for mark, kind in MARKS.items():
        marks = [part.index for turn in turns for part in turn.parts if part.kind == kind and part.source is None]
        if len(marks) != counts.get(kind, 0):
            raise RowError(f"{len(marks)} {mark} marks for {counts.get(kind, 0)} {kind}s; allowed: as many marks as "
                           f"{kind}s (\\{mark} is a word; {IMAGE_MARK} stands for a video in a row without images)")
        if set(marks) not in ({None}, set(range(len(marks)))):
            raise RowError(f"the {kind}s of a row have the index {', '.join(map(str, marks))}; allowed: each from 0 to "
                           f"{len(marks) - 1} once, or none")


def own_media(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(kind, source) of the images and videos that a row's turns bring. RowError: no turns, or own settings."""
    contents = [turn.get("content") for turn in stored_turns(fields) if isinstance(turn, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    return [(kind, part) for part in parts if (kind := _shown_by(part)) and holds_media(part, kind)]


def unwrap(value: Any, kind: str) -> tuple[Any, Any]:
    """(name, bytes or frames; frames a second, if given) of an image or video. RowError: it has settings of its own."""
    rate = None
    while isinstance(value, Mapping):
        if own := next((name for name in OWN_SETTINGS if value.get(name)), ""):
            raise RowError(f"an image or video has its own {own}, {_brief(value[own])}; allowed: those of the run "
                           "(data.min_pixels, data.max_pixels, data.video_fps, data.max_frames)")
        rate = value.get("fps") if value.get("fps") is not None else rate
        name = next((name for name in media_keys(kind) if value.get(name) not in EMPTY), None)
        value = value[name] if name else None
        if name == "base64" and isinstance(value, str) and not value.startswith("data:"):
            value = f"data:;base64,{value}"
    return value, rate


def holds_media(value: Any, kind: str) -> bool:
    """Whether a value holds an image or video: not if it is null or empty, or a mapping with such values."""
    return unwrap(value, kind)[0] not in EMPTY


def media_keys(kind: str) -> tuple[str, ...]:
    """The keys under which a mapping holds an image or video; the first that is not empty counts."""
    return kind, f"{kind}_url", "url", "bytes", "path", "base64"


def _shown_by(part: Mapping[str, Any]) -> str:
    """The kind of what a part shows, by its `type`; empty if that is neither an image nor a video."""
    return next((kind for kind in MEDIA if part.get("type") in (kind, f"{kind}_url")), "")


def _turn(number: int, turn: Any) -> Turn:
    if not isinstance(turn, Mapping):
        raise RowError(f"turn {number} holds {type(turn).__name__}; allowed: an object with from and value, or role "
                       "and content")
    openai = turn.get("role") is not None and turn.get("from") is None
    role, content = (turn.get("role"), turn.get("content")) if openai else (turn.get("from"), turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"turn {number} is from {_brief(role)}; allowed: {', '.join(ROLES)}")
    called = [turn[name] for name in ("tool_calls", "function_call")
              if ROLES[role] == "assistant" and _holds_any(turn.get(name))]
    if len(called) > 1:
        raise RowError(f"turn {number} has tool_calls and function_call; allowed: one of them")
    items = content if openai and isinstance(content, Sequence) and not isinstance(content, str | bytes) else None
    calls = content if role == "function_call" else called[0] if called else None
    if role == "function_call":
        parts = []
    elif isinstance(content, str):
        parts = _marked(content) if ROLES[role] in ("user", "tool") else [ContentPart("text", content)] * bool(content)
    elif items is not None:
        parts = [part for item in items for part in [_part(number, item)] if part.kind != "text" or part.text]
    else:
        parts = []
    with about(RowError, f"turn {number}"):
        calls = _calls(calls) if _holds_any(calls) else ""
    may_be_empty = ROLES[role] == "tool" or (ROLES[role] == "system" and (content == "" or items is not None))
    if not parts and not calls and not may_be_empty:
        held = "no text" if not content or isinstance(content, str) or items is not None else _brief(content)
        raise RowError(f"turn {number} has {held} in {'content' if openai else 'value'}; allowed: a text")
    thoughts = [name for name in THOUGHTS if ROLES[role] == "assistant" and turn.get(name)]
    if any(turn[name] != turn[thoughts[0]] for name in thoughts):
        raise RowError(f"turn {number} has {' and '.join(thoughts)}, which differ; allowed: one of them")
    for name in thoughts[:1]:
        if not isinstance(turn[name], str):
            raise RowError(f"turn {number} has {name} {_brief(turn[name])}; allowed: a text")
        if "</think>" in "".join(part.text for part in parts):
            raise RowError(f"turn {number} has {name}, and </think> in its text; allowed: one of them")
        if thought := turn[name].strip():
            parts = [ContentPart("text", f"<think>\n{thought}\n</think>\n\n"), *parts]
    result = Turn(ROLES[role], tuple(parts), _learned(number, turn, ROLES[role]), calls)
    _check_text(f"turn {number}", result.text + calls)
    if result.media and result.role not in ("user", "tool"):
        raise RowError(f"turn {number}: <{result.media[0].kind}> in a turn of the {result.role}; allowed: in turns of "
                       "the user")
    return result


def _learned(number: int, turn: Mapping[str, Any], role: str) -> bool:
    """Whether no key of an answer says that it is not learned. None counts as absent."""
    found = {name: turn[name] for name in LEARNED if turn.get(name) is not None}
    if details := next((name for name in ("train_detail", "training_detail") if turn.get(name)), ""):
        raise RowError(f"turn {number} has {details}; allowed: train, true or false, for a whole turn")
    if role != "assistant":
        if trained := next((name for name in ("train", "training") if found.get(name)), ""):
            raise RowError(f"turn {number}, of the {role}, has {trained} {_brief(found[trained])}; allowed: in turns "
                           "of the assistant, which alone are learned")
        return True
    for name, value in found.items():
        if value not in (0, 1):  # also False and True
            raise RowError(f"turn {number} has {name} {_brief(value)}; allowed: 0 or false, 1 or true")
    return all(found.values())


def _check_text(where: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"{where} is not UTF-8 text: {first_line(error)}") from None


def _marked(text: str) -> list[ContentPart]:
    """The text and the marks in their order."""
    return [ContentPart(MARKS[piece], marked=True) if piece in MARKS else ContentPart("text", _WORD.sub("", piece))
            for piece in _MARK.split(text) if piece]


def _part(number: int, item: Any) -> ContentPart:
    """One part of OpenAI's content, by its `type`; keys with the value null count as absent."""
    if isinstance(item, str):
        return ContentPart("text", item)
    if not isinstance(item, Mapping):
        raise RowError(f"turn {number} has a part that holds {type(item).__name__}; allowed: an object with type")
    kind, text = item.get("type"), item.get("text")
    if kind == "text":
        if not isinstance(text, str):
            raise RowError(f"turn {number} has a part text with {_brief(text)}; allowed: a text")
        return ContentPart("text", text)
    if shows := _shown_by(item):
        with about(RowError, f"turn {number}"):
            given = holds_media(item, shows)
        if kind != shows and not given:
            raise RowError(f"turn {number} has a part {kind} without url")
        index = item.get("index")
        if index is not None:
            # pandas makes floats of a column with nulls; JSON's 1e999 is infinite
            if not isinstance(index, int | float) or (isinstance(index, float) and not index.is_integer()):
                raise RowError(f"turn {number} has a part of the index {_brief(index)}; allowed: a number from 0 on")
            index = int(index)
        return ContentPart(shows, source=item if given else None, index=index, fps=None if given else item.get("fps"))
    raise RowError(f"turn {number} has a part of the type {_brief(kind)}; allowed: text, image, image_url, video")


def _brief(value: Any) -> str:
    return repr(value)[:100]


def _holds_any(value: Any) -> bool:
    """Whether stored tools or calls hold any: the value may be null, empty, only nulls, or an empty list as text."""
    if isinstance(value, list | Mapping):
        return any(item is not None for item in (value.values() if isinstance(value, Mapping) else value))
    return bool(value) and not (isinstance(value, str) and value.strip() in ("", "[]", "null"))


def _tools(tools: Any) -> str:
    """`Turn.tools` of a list, or JSON text of one, of functions, alone or inside {"type": "function", ...}."""
    tools = json_of(tools, "tools") if isinstance(tools, str) else tools
    found = []
    for tool in tools if isinstance(tools, list) else [tools]:
        signature = (tool.get("function") or tool) if isinstance(tool, Mapping) else None
        if not isinstance(signature, Mapping) or not isinstance(signature.get("name"), str):
            raise RowError(f"tools hold {_brief(tool)}; allowed: objects with name, description and parameters")
        found.append(tool if tool is not signature else {"type": "function", "function": tool})
    text = _json(found)
    _check_text("tools", text)
    return text


def _calls(calls: Any) -> str:
    """`Turn.calls` of one or several calls, or JSON text of them, alone or inside OpenAI's {"function": ...}."""
    calls = json_of(calls, "the call of a tool") if isinstance(calls, str) else calls
    return _json([_call(call) for call in (calls if isinstance(calls, list) else [calls])])


def _call(call: Any) -> dict[str, Any]:
    inner = call
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        inner = call["function"]
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RowError(f"the call of a tool is {_brief(call)}; allowed: an object with name and arguments")
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = json_of(arguments, f"the arguments of {name[:50]}")
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RowError(f"the arguments of {name[:50]} are {_brief(arguments)}; allowed: an object")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def json_of(text: str | bytes, what: str) -> Any:
    """What a row's JSON text, which may be hostile, holds; null for NaN, which pandas and Python write for what is not
    there. RowError: it is no JSON, or too much.
    """
    try:
        count = sum(map(text.count, ",[{")) if isinstance(text, str) else sum(map(text.count, (b",", b"[", b"{")))
        if count > MOST_VALUES:
            raise ValueError(f"{count} values; allowed: at most {MOST_VALUES}")
        return _JSON.decode(text if isinstance(text, str) else text.decode(json.detect_encoding(text), "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} is not JSON: {first_line(error)}") from None


def _json(tree: Any) -> str:
    try:
        return json.dumps(tree, ensure_ascii=False)
    except (TypeError, ValueError) as error:  # a column may hold bytes or dates
        raise RowError(f"tools or their arguments cannot be written as JSON: {first_line(error)}") from None
