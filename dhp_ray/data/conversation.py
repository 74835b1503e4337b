"""LLaVA conversations: their turns, checked, and the messages that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dhp_ray.data.errors import RowError, first_line

IMAGE_MARK = "<image>"
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says. `role` is system, user or assistant; `<image>` in `text` stands for the next image."""

    role: str
    text: str

    def message(self) -> dict[str, Any]:
        """The turn as chat templates take it, images as parts between the texts around them."""
        if IMAGE_MARK not in self.text:
            return {"role": self.role, "content": self.text}
        parts: list[dict[str, Any]] = []
        for index, text in enumerate(self.text.split(IMAGE_MARK)):
            parts += [{"type": "image"}] if index else []
            parts += [{"type": "text", "text": text}] if text else []
        return {"role": self.role, "content": parts}


def turns_of(conversation: Sequence[Mapping[str, Any]], num_images: int, reserved: Sequence[str]) -> list[Turn]:
    """The turns of `[{"from": "human", "value": "<image>\\nWhat is this?"}, {"from": "gpt", "value": "A cat."}, ...]`.

    Raises:
        RowError: an empty conversation, an unknown role, nothing that the assistant says, other marks than images, or
            a text that spells one of the `reserved` tokens.
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise RowError("the conversation is empty; allowed: a list of turns with from and value")
    turns = [_turn(number, turn, reserved) for number, turn in enumerate(conversation, 1)]
    spoken = [turn.role for turn in turns if turn.role != "system"]
    if "assistant" not in spoken:
        raise RowError("no turn of the assistant: nothing to learn from")
    if spoken[0] != "user":
        raise RowError("the assistant speaks first; allowed: a turn of the user before it")
    marks = sum(turn.text.count(IMAGE_MARK) for turn in turns)
    if marks != num_images:
        raise RowError(f"{marks} {IMAGE_MARK} marks for {num_images} images; allowed: as many marks as images")
    return turns


def _turn(number: int, turn: Any, reserved: Sequence[str]) -> Turn:
    if not isinstance(turn, Mapping):
        raise RowError(f"turn {number} holds {type(turn).__name__}; allowed: an object with from and value")
    role, text = turn.get("from"), turn.get("value")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"turn {number} is from {role!r}; allowed: {', '.join(ROLES)}")
    if not isinstance(text, str) or not text:
        raise RowError(f"turn {number} has no text in value")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"turn {number} is not UTF-8 text: {first_line(error)}") from None
    found = next((token for token in reserved if token in text), None)
    if found:
        raise RowError(f"turn {number} spells the special token {found}; allowed: text without special tokens")
    if ROLES[role] != "user" and IMAGE_MARK in text:
        raise RowError(f"turn {number}: {IMAGE_MARK} in a turn of the {ROLES[role]}; allowed: in turns of the user")
    return Turn(ROLES[role], text)
