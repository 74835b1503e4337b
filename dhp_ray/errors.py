"""One line of an error, for the user, a log or a peer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def printable(text: str) -> str:
    """The text on one line, with escapes for characters that a terminal obeys, or that hide or reorder others."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line)


def counted(number: int, noun: str) -> str:
    """The number with its noun, of one or of several: 1 rank, 2 ranks."""
    return f"{number} {noun}{'s' * (number != 1)}"


def first_line_of(text: str) -> str:
    """The first line of a text; empty if there is none."""
    return (text.strip().splitlines() or [""])[0]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's name when it has none."""
    return first_line_of(str(error)) or type(error).__name__


def named_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line_of(str(error))}".removesuffix(": ")


def yaml_line(error: BaseException) -> str:
    """What a reader of YAML found, and the line: the message of its error begins with what it was doing."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}: {problem}" if problem and mark else first_line(error)


@contextmanager
def about(kind: type[Exception], what: object) -> Iterator[None]:
    """Let errors of this kind begin with what they are about."""
    try:
        yield
    except kind as error:
        raise kind(f"{what}: {error}") from None
