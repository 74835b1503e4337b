"""One line of an error, whatever its message."""

from __future__ import annotations

import pytest

from dhp_ray.credentials import shown
from dhp_ray.errors import counted, first_line, first_line_of, named_line, printable
from dhp_ray.planner import PlanError
from dhp_ray.schema import ConfigError


def test_one_line_of_an_error() -> None:
    assert first_line(ValueError("\n  a: got 1\nallowed: 2")) == "a: got 1"
    assert first_line(ValueError(" \n")) == first_line(ValueError()) == "ValueError"
    assert named_line(OSError("no room\nat all")) == "OSError: no room"
    assert named_line(RuntimeError()) == "RuntimeError"
    assert first_line_of("") == ""


def test_a_number_has_its_noun() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_what_is_shown_has_no_control_characters_and_is_short() -> None:
    assert printable("a\x1b]0;title\x07\n b\x9bc\u202ed größer") == r"a\x1b]0;title\x07 b\x9bc\u202ed größer"
    assert shown("x" * 10**6) == "x" * 199 + "…"
    assert shown("s3://KEY:" + "y" * 500 + "@bucket") == "s3://***@bucket"


@pytest.mark.parametrize("kind", [ConfigError, PlanError])
def test_errors_hold_nothing_that_a_terminal_obeys(kind: type[Exception]) -> None:
    assert str(kind("a\x1b]0;title\x07\nb")) == "a\\x1b]0;title\\x07 b"
