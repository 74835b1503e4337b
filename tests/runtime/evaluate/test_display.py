"""What a user sees of an evaluation: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io

from dhp_ray.runtime.evaluate.predictions import NUM_LINES, Display, means_line, summary_line

SUMMARY = {"num_samples": 2, "num_left_out": 1, "loss": 0.6, "num_valid_tokens": 5, "exact_match": 0.5, "anls": 0.375,
           "f1": 0.5}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_has_a_line_now_and_then() -> None:
    stream = io.StringIO()
    display = Display(stream, 1000)
    display.say("sample a left out: damaged")
    for done in (0, 1, 60, 60, *range(61, 1001)):
        display.show(done, SUMMARY)
    display.close()
    first, *lines = stream.getvalue().splitlines()
    assert first == "sample a left out: damaged"
    assert len(lines) == NUM_LINES
    assert lines[0] == "60/1000 samples: loss 0.600, exact match 0.500, ANLS 0.375, F1 0.500"
    assert lines[-1].startswith("1000/1000 samples: ")


def test_a_terminal_has_a_bar() -> None:
    stream = Terminal()
    display = Display(stream, 3)
    display.say("sample [a] left out: damaged")
    display.show(2, SUMMARY)
    display.close()
    assert "sample [a] left out: damaged" in stream.getvalue()
    assert "2/3" in stream.getvalue()
    assert "2/3 samples" not in stream.getvalue()


def test_the_last_line() -> None:
    assert summary_line(SUMMARY, "out.jsonl") == (
        "2 samples, 1 left out: loss 0.600, exact match 0.500, ANLS 0.375, F1 0.500; one line each in out.jsonl")
    alone = {"num_samples": 2, "num_left_out": 0, "loss": 0.6, "num_valid_tokens": 5}
    assert means_line(alone) == "loss 0.600"
    assert means_line(alone | {"loss": None}) == "loss nan"
    assert summary_line(alone, "x") == "2 samples: loss 0.600; one line each in x"
