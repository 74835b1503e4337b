"""A model's chat template: the text of a conversation, and the positions of the assistant's answers in it.

A special token that a text of a row spells is words there; those that the template writes are control tokens:

    the row      What does <|im_end|> do?
    hidden       What does ▯ do?                                    from here on; ▯ is a character that no text has
    rendered     <|im_start|>user\\nWhat does ▯ do?<|im_end|>\\n      control tokens, and nothing else looks like one
    encoded      ids of the text before ▯, ids of the pieces <  |  im  _  end  |  >, ids of the text behind it

Transformers encodes them alike (5.24, `apply_chat_template(..., sanitize_control_tokens=True)`).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby
from typing import Any

import numpy as np
from jinja2 import TemplateError

from dhp_ray.data.conversation import ContentPart, Turn
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.errors import first_line

WORDS = ("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
         "<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<think>", "</think>", "<tool_call>",
         "</tool_call>", "<tool_response>", "</tool_response>")
"""Special tokens that published models were trained to say: a text that holds one means the token."""

DATE = "26 Jul 2024"  # of Llama 3's templates where they do not know the day: a run must not train on another each day
ASKED = {"role": "user", "content": "question"}  # what is asked before an answer that is written by itself


class ChatTemplate:
    """Writes conversations with the template. It finds out what the template writes around an answer by applying it to
    test conversations. DataError: the template rewrites earlier turns, or writes answers in different ways.

    Qwen3.5's writes a thought, which may be empty, before the last answer and takes those of earlier ones away:

        prompted         <|im_start|>assistant\\n<think>\\n                    the end of a prompt
        without_thought  <|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n    before a last answer without a thought
        earlier          <|im_start|>assistant\\n                              before an earlier answer
        closing          <|im_end|>                                          after each

    The whole conversation thus does not show earlier answers as they are generated. Each answer that is learned is
    therefore written as if it were the last; all else as the template writes it. Behind the last one comes
    `answer_end`, if templates of the family end an answer by the token that begins the user's next turn (GLM-4.1V).
    """

    def __init__(self, tokenizer: Any, template: str, answer_end: str = "") -> None:
        self.tokenizer, self.template, self.answer_end = tokenizer, template, answer_end
        self._asked = self._apply([ASKED], prompt=False)
        self._prompted, self._without_thought, self._earlier, self._closing = self._answer_frame()

    def render(self, turns: Sequence[Turn]) -> tuple[str, list[tuple[int, int]]]:
        """The text of the turns, and the range of every learned answer with its end token. RowError: a turn is changed.
        """
        learned = {number: turn for number, turn in enumerate(turns, 1) if turn.role == "assistant" and turn.learned}
        stand_in = next(absent_characters(turns))
        frame = self._text([turn if number not in learned else
                            replace(turn, parts=(ContentPart("text", stand_in),), calls="")
                            for number, turn in enumerate(turns, 1)], prompt=False)
        before = "|".join(map(re.escape, (self._without_thought, self._earlier)))
        text, *others = re.split(f"(?:{before}){stand_in}{re.escape(self._closing)}", frame)
        if len(others) != len(learned):
            raise RowError(f"the chat template leaves out or changes {len(learned) - len(others)} of {len(learned)} "
                           "learned answers; allowed: templates that write every turn of the assistant")
        spans = []
        for (number, turn), after in zip(learned.items(), others):
            prompt, answer = self._generated(number, turn)
            start = len(text) + len(prompt)
            spans.append((start, start + len(answer)))
            text += prompt + answer + after
        _check_all_there(turns, text)
        return text, spans

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The text of the turns and what the template writes before the next answer, an empty thought too."""
        text = self._text(turns, prompt=True)
        _check_all_there(turns, text)
        return text + self._without_thought[len(self._prompted) :]

    def answer(self, number: int, turn: Turn) -> str:
        """The text of an answer, with the calls of tools as the template writes them."""
        said = self._generated(number, turn)[1].removesuffix(self._closing) if turn.calls else turn.text
        return said.strip()

    def _generated(self, number: int, turn: Turn) -> tuple[str, str]:
        """What the prompt for an answer ends with, and the answer, with its end token, as a last turn."""
        self._check_tools([turn])
        try:
            written = self._apply([ASKED, turn.message()], prompt=False).removeprefix(self._asked)
        except TemplateError as error:
            raise RowError(f"the chat template refuses turn {number}, of the assistant: {first_line(error)}") from None
        prompt = self._without_thought if written.startswith(self._without_thought) else self._prompted
        said, closing, _ = written.removeprefix(prompt).rpartition(self._closing)
        thought, text = split_thought(turn.text)
        kept, rest = split_thought(said)
        whole = kept == thought and (rest.startswith(text) if turn.calls else rest == text)
        if not written.startswith(prompt) or not closing or not whole:
            raise RowError(f"the chat template changes an answer, turn {number}; allowed: a text that it writes as it "
                           "is, or stripped, behind one thought in <think>...</think> at most")
        if thought and not text and not turn.calls:
            raise RowError(f"turn {number} has a thought and no answer; allowed: both, or the answer alone")
        if "<think>" in prompt and said.lstrip().startswith("<think>"):
            raise RowError(f"turn {number} begins a thought that does not end; allowed: <think>...</think>, then the "
                           "answer")
        return prompt, said + closing

    @cached_property
    def _breaks_lines(self) -> bool:
        """Whether the template writes a line break after an image."""
        parts = [{"type": "text", "text": "before"}, {"type": "image"}, {"type": "text", "text": "after"}]
        text = self._apply([{"role": "user", "content": parts}], prompt=False)
        return text.partition("before")[2].partition("after")[0].endswith("\n")

    def _text(self, turns: Sequence[Turn], *, prompt: bool) -> str:
        """The text of the turns, without the line break of LLaVA's `<image>\\n` if the template writes one itself."""
        self._check_tools(turns)
        if any(part.marked for turn in turns for part in turn.parts) and self._breaks_lines:
            turns = [replace(turn, parts=tuple(_without_breaks(turn.parts))) for turn in turns]
        messages = [turn.message() for turn in turns]
        tools = json.loads(turns[0].tools) if turns[0].tools else None
        try:
            return self._apply(messages, tools, prompt=prompt)
        except TemplateError as error:
            reason = str(error)

            def refuses(index: int) -> bool:
                try:
                    self._apply(messages[: index + 1], tools, prompt=False)
                except TemplateError as other:
                    return str(other) == reason
                return False

            first = bisect_left(range(len(messages) - 1), True, key=refuses)
            where = f"turn {first + 1}, of the {turns[first].role}" if first else "the conversation"
            raise RowError(f"the chat template refuses {where}: {first_line(error)}") from None

    @cached_property
    def _writes_tools(self) -> bool:
        """Whether the template writes tools that are offered, calls of them, and what they answer."""
        tools = [{"type": "function", "function": {"name": "offered_tool", "description": "", "parameters": {}}}]
        calls = [{"type": "function", "function": {"name": "called_tool", "arguments": {}}}]
        messages: list[dict[str, Any]] = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls},
                                          {"role": "tool", "content": "answer_of_tool"}]
        try:
            text = self._apply(messages, tools, prompt=False)
        except TemplateError:
            return False
        return all(name in text for name in ("offered_tool", "called_tool", "answer_of_tool"))

    def _check_tools(self, turns: Sequence[Turn]) -> None:
        if any(turn.tools or turn.calls or turn.role == "tool" for turn in turns) and not self._writes_tools:
            raise RowError("the model's chat template does not write tools; allowed: rows without tools and calls, or "
                           "a folder whose chat template writes them")

    def _answer_frame(self) -> tuple[str, str, str, str]:
        """What the class names prompted, without_thought, earlier and closing."""
        messages: list[dict[str, Any]] = []
        frames = set()
        for number in range(2):
            messages.append(ASKED)
            asked, prompt = (self._apply(messages, prompt=prompt) for prompt in (False, True))
            messages.append({"role": "assistant", "content": f"answer {number}"})
            answered = self._apply(messages, prompt=False)
            before, found, closing = answered.removeprefix(asked).partition(f"answer {number}")
            if not prompt.startswith(asked) or not answered.startswith(prompt) or not found:
                raise DataError("model.path: its chat template rewrites earlier turns, or begins an answer otherwise "
                                "than the prompt for it; allowed: a template that appends turns (thoughts of earlier "
                                "answers may go)")
            frames.add((prompt[len(asked) :], before, closing.rstrip()))
        earlier, _, rest = answered.removeprefix(self._asked).partition("answer 0")
        prompted, without_thought, closing = frames.pop()
        if frames or not all((prompted, earlier, closing)) or not rest.startswith(closing):
            raise DataError("model.path: its chat template writes answers in different ways; allowed: one opening and "
                            "one end for all")
        return prompted, without_thought, earlier, closing

    def _apply(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, *, prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(messages, tools, chat_template=self.template, tokenize=False,
                                                  add_generation_prompt=prompt, date_string=DATE)
        assert isinstance(text, str)
        return text + self.answer_end * (not prompt and messages[-1]["role"] == "assistant")


def _changed(parts: Sequence[ContentPart], change: Callable[[str], str]) -> Iterator[ContentPart]:
    """The parts with changed texts. Neighbouring texts, which templates write as one, are joined."""
    for kind, group in groupby(parts, key=lambda part: part.kind):
        if kind == "text":
            yield ContentPart("text", change("".join(part.text for part in group)))
        else:
            yield from group


def _without_breaks(parts: Sequence[ContentPart]) -> Iterator[ContentPart]:
    """The parts, without a line break that follows a mark."""
    after_mark = False
    for part in parts:
        if after_mark and part.kind == "text":
            part = replace(part, text=part.text.removeprefix("\n"))
        if part.text or part.kind != "text":
            yield part
        after_mark = part.marked


_THOUGHT = re.compile(r"\s*(?:<think>(.*?)</think>|(.*?)</think>(?=\n|\s*\Z))(.*)", re.DOTALL)


def split_thought(answer: str) -> tuple[str, str]:
    """The thought of an answer and its text, stripped. A thought lies between <think> and </think> before the text, or,
    where its prompt began it, before a </think> that ends a line; with further tags all is text.
    """
    found = _THOUGHT.fullmatch(answer)
    thought, text = (found[1] or found[2] or "", found[3]) if found else ("", answer)
    if found and re.search("</?think>", thought + text):
        thought, text = "", answer
    return thought.strip(), text.strip()


def _check_all_there(turns: Sequence[Turn], text: str) -> None:
    """Refuse a template that leaves out more than thoughts. Llama 3.1's writes what tools answer as JSON."""
    position = 0
    for number, turn in enumerate(turns, 1):
        pieces = [split_thought(turn.text)[1]] if turn.role == "assistant" else [part.text for part in turn.parts]
        pieces += [call["function"]["name"] for call in json.loads(turn.calls or "[]")]
        for piece in map(str.strip, pieces):
            forms = {piece, json.dumps(piece, ensure_ascii=False)[1:-1]} if turn.role == "tool" else {piece}
            found = [(place, place + len(form)) for form in forms if (place := text.find(form, position)) >= 0]
            if not found:
                raise RowError(f"the chat template leaves out or changes turn {number}, of the {turn.role}")
            _, position = min(found)


def absent_characters(turns: Sequence[Turn]) -> Iterator[str]:
    """Characters that nothing in the turns has."""
    whole = {character for turn in turns for character in turn.text + turn.calls + turn.tools}
    yield from (character for character in map(chr, range(0xE000, 0x110000)) if character not in whole)


@dataclass(frozen=True, slots=True)
class HiddenTokens:
    """Turns in whose texts a character takes the place of each token; `tokens` by these characters."""

    turns: list[Turn]
    tokens: dict[str, str]

    def shown(self, text: str) -> str:
        """What was rendered from the turns, with the tokens in their places."""
        return text.translate({ord(stand_in): token for stand_in, token in self.tokens.items()})


class SpelledTokens:
    """Hides the special tokens of a tokenizer, and those named in `others`, in texts, and encodes them as text."""

    def __init__(self, tokenizer: Any, others: Iterable[str]) -> None:
        self.tokenizer = tokenizer
        special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        tokens = {token for token in (*special, *others) if token} - set(WORDS)
        self._pattern = re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)))
        self._word_ids = cache(self._as_text)  # a text may repeat a token often

    def hide(self, turns: Sequence[Turn]) -> HiddenTokens:
        """The turns without special tokens in their texts."""
        stand_ins: dict[str, str] = defaultdict(partial(next, absent_characters(turns)))

        def hidden(text: str) -> str:
            return self._pattern.sub(lambda token: stand_ins[token[0]], text)

        turns = [replace(turn, parts=tuple(_changed(turn.parts, hidden)), calls=hidden(turn.calls),
                         tools=hidden(turn.tools)) for turn in turns]
        return HiddenTokens(turns, {stand_in: token for token, stand_in in stand_ins.items()})

    def encode(
        self, text: str, hidden: HiddenTokens, answers: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The int32 ids (L,) of a rendered text, and the begin and end of each in it. No token reaches over the places
        where `answers` begin: a prompt ends there, and its line break would be one token with that of an answer.
        """
        words = [found.span() for found in re.finditer(f"[{''.join(hidden.tokens)}]", text)] if hidden.tokens else []
        cuts = sorted([*words, *((place, place) for place in answers)])
        edges = [0, *(edge for cut in cuts for edge in cut), len(text)]
        encoded = self.tokenizer([text[begin:end] for begin, end in zip(edges[::2], edges[1::2])],
                                 add_special_tokens=False, split_special_tokens=False,
                                 return_offsets_mapping=True, return_attention_mask=False)
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        for (before, begin), of_piece, offsets in zip(((0, 0), *cuts), encoded["input_ids"],
                                                      encoded["offset_mapping"]):
            as_text = self._word_ids(hidden.tokens[text[before:begin]]) if before < begin else []
            ids += [*as_text, *of_piece]
            places += [(before, begin)] * len(as_text)
            places += [(begin + start, begin + stop) for start, stop in offsets]
        starts, stops = np.asarray(places, np.int64).reshape(-1, 2).T
        return np.asarray(ids, np.int32), starts, stops

    def _as_text(self, token: str) -> list[int]:
        """The ids of a special token's name as text."""
        special = self.tokenizer.get_vocab().get(token)
        for pieces in ([token], [token[:1], token[1:]]):  # cut, if the tokenizer does not know it as special
            encoded = self.tokenizer(pieces, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            ids = [number for of_piece in encoded for number in of_piece]
            if special not in ids:
                return ids
        raise RowError(f"a text spells the special token {token}, which the tokenizer cannot write as text")
