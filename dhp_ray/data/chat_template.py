"""A model's chat template: the text of a conversation, and the positions of the assistant's answers in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from dhp_ray.data.conversation import Turn
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
        """The text of the turns, and the range [start, stop) in it of every answer with its end token.

        Raises:
            RowError: the template drops, adds or changes an answer.
        """
        text = self._apply([turn.message() for turn in turns], prompt=False)
        answers = [turn.text for turn in turns if turn.role == "assistant"]
        if text.count(self._opening) != len(answers):
            raise RowError(
                f"the chat template writes {text.count(self._opening)} turns of the assistant; the conversation has "
                f"{len(answers)}"
            )
        spans, position = [], 0
        for answer in answers:
            start = text.index(self._opening, position) + len(self._opening)
            written = next((form for form in (answer, answer.strip()) if text.startswith(form + self._closing, start)),
                           None)
            if written is None:
                raise RowError(
                    "the chat template changes an answer; allowed: a template that writes it as it is, or stripped"
                )
            position = start + len(written) + len(self._closing)
            spans.append((start, position))
        return text, spans

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The text of the turns, followed by what the template writes before the assistant's next answer."""
        return self._apply([turn.message() for turn in turns], prompt=True)

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
