"""A model's chat template: the text of a conversation, and the positions of the assistant's answers in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from dhp_ray.data.conversation import ContentPart, Turn
from dhp_ray.data.errors import DataError, RowError


class ChatTemplate:
    """Writes conversations with the template. It finds out what the template writes around an answer by applying it to
    test conversations.

    Raises:
        DataError: the template rewrites earlier turns, or writes answers in different ways.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.tokenizer, self.template = tokenizer, template
        self._opening, self._closing = self._answer_frame()

    @cached_property
    def default_system(self) -> str:
        """The text of the system turn that the template adds if a conversation has none; empty: it adds none."""
        asked = {"role": "user", "content": "question"}
        given = self._apply([{"role": "system", "content": "instruction"}, asked], prompt=False)
        default = self._apply([asked], prompt=False)
        before, _, after = given.partition("instruction")
        if not default.startswith(before) or not default.endswith(after):
            return ""
        return default[len(before) : len(default) - len(after)]

    def render(self, turns: Sequence[Turn]) -> tuple[str, list[tuple[int, int]]]:
        """The text of the turns, and the range [start, stop) in it of every answer that is learned, with its end token.

        Raises:
            RowError: the template drops or changes a text, or adds an answer.
        """
        text = self._text(turns, prompt=False)
        answers = sum(turn.role == "assistant" for turn in turns)
        if text.count(self._opening) != answers:
            raise RowError(
                f"the chat template writes {text.count(self._opening)} turns of the assistant; the conversation has "
                f"{answers}"
            )
        spans, position = [], 0
        for turn in (turn for turn in turns if turn.role == "assistant"):
            start = text.index(self._opening, position) + len(self._opening)
            written = next((form for form in (turn.text, turn.text.strip())
                            if text.startswith(form + self._closing, start)), None)
            if written is None:
                raise RowError(
                    "the chat template changes an answer; allowed: a template that writes it as it is, or stripped"
                )
            position = start + len(written) + len(self._closing)
            if turn.learned:
                spans.append((start, position))
        _check_all_there(turns, text)
        return text, spans

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The text of the turns, followed by what the template writes before the assistant's next answer."""
        text = self._text(turns, prompt=True)
        _check_all_there(turns, text)
        return text

    @cached_property
    def _breaks_lines(self) -> bool:
        """Whether the template writes a line break after an image."""
        parts = [{"type": "text", "text": "before"}, {"type": "image"}, {"type": "text", "text": "after"}]
        text = self._apply([{"role": "user", "content": parts}], prompt=False)
        return text.partition("before")[2].partition("after")[0].endswith("\n")

    def _text(self, turns: Sequence[Turn], *, prompt: bool) -> str:
        """The text of the turns. If the template writes a line break after an image, that of LLaVA's `<image>\\n` is
        left out.
        """
        if any(part.marked for turn in turns for part in turn.parts) and self._breaks_lines:
            turns = [replace(turn, parts=tuple(_without_breaks(turn.parts))) for turn in turns]
        return self._apply([turn.message() for turn in turns], prompt=prompt)

    def _answer_frame(self) -> tuple[str, str]:
        """What the template writes before an answer (its generation prompt) and after it (what the text has beyond the
        prompt and the answer).
        """
        messages: list[dict[str, Any]] = []
        frames = set()
        for number in range(2):
            messages.append({"role": "user", "content": f"question {number}"})
            asked, prompt = self._apply(messages, prompt=False), self._apply(messages, prompt=True)
            messages.append({"role": "assistant", "content": f"answer {number}"})
            answered = self._apply(messages, prompt=False)
            start = len(prompt) + len(f"answer {number}")
            if not prompt.startswith(asked) or not answered.startswith(f"{prompt}answer {number}"):
                raise DataError(
                    "model.path: its chat template rewrites earlier turns; allowed: a template that only appends"
                )
            frames.add((prompt[len(asked) :], answered[start:].rstrip()))
        opening, closing = frames.pop()
        if frames or not opening:
            raise DataError(
                "model.path: its chat template writes answers in different ways; allowed: one opening and one end for "
                "all"
            )
        return opening, closing

    def _apply(self, messages: list[dict[str, Any]], *, prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=False, add_generation_prompt=prompt)
        assert isinstance(text, str)
        return text


def _without_breaks(parts: Sequence[ContentPart]) -> Iterator[ContentPart]:
    """The parts, without a line break that follows a mark."""
    after_mark = False
    for part in parts:
        if after_mark and part.kind == "text":
            part = replace(part, text=part.text.removeprefix("\n"))
        if part.text or part.kind != "text":
            yield part
        after_mark = part.marked


def _check_all_there(turns: Sequence[Turn], text: str) -> None:
    """Refuse a conversation of which the template leaves something out.

    Raises:
        RowError: a text is not in what the template writes, after those before it.
    """
    position = 0
    for number, turn in enumerate(turns, 1):
        for part in turn.parts:
            found = text.find(part.text.strip(), position)
            if found < 0:
                raise RowError(f"the chat template leaves out or changes turn {number}, of the {turn.role}")
            position = found + len(part.text.strip())
