"""One line of an error, whatever its message."""

from __future__ import annotations

from dhp_ray.errors import first_line, first_line_of, named_line


def test_one_line_of_an_error() -> None:
    assert first_line(ValueError("\n  a: got 1\nallowed: 2")) == "a: got 1"
    assert first_line(ValueError(" \n")) == first_line(ValueError()) == "ValueError"
    assert named_line(OSError("no room\nat all")) == "OSError: no room"
    assert named_line(RuntimeError()) == "RuntimeError"
    assert first_line_of("") == ""
