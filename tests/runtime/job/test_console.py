from __future__ import annotations

import io
import math
from threading import Thread
from typing import Any

import pytest

from dhp_ray.runtime.job.console import Console, now_line, step_line
from dhp_ray.runtime.messages import Notice, RunFinished, RunStarted, StepCommitted

METRICS: dict[str, Any] = {"step": 12, "loss": 2.4131, "learning_rate": 9.8e-4, "gradient_norm": 1.2,
                           "num_tokens": 2604, "num_samples": 16, "step_time_s": 0.84, "planning_time_s": 0.0031,
                           "predicted_makespan_s": 0.4, "measured_makespan_s": 0.45, "idle_fraction": 0.181,
                           "num_ranks": 4, "generation": 1,
                           "degrees": {"2": 2, "1": 9, "10": 1}, "planner": "dhp", "late": False}


class Screen(io.StringIO):
    """A terminal that keeps what is shown on it."""

    def isatty(self) -> bool:
        return True


def test_the_line_of_a_step() -> None:
    assert step_line(METRICS, 60) == (
        "step 12/60 loss 2.413 (lr 9.8e-4, norm 1.2) 3.1k tokens/s step 0.84 s plan 3 ms idle 18 % degrees 1x9 2x2 10x1"
    )
    assert step_line(METRICS | {"eval_loss": 2.5}, 0) == (
        "step 12 loss 2.413 (lr 9.8e-4, norm 1.2) eval loss 2.500 3.1k tokens/s step 0.84 s plan 3 ms idle 18 % "
        "degrees 1x9 2x2 10x1"
    )


def test_the_line_of_a_step_after_which_answers_were_generated() -> None:
    scores = {"eval_loss": 2.5, "eval_exact_match": 0.5, "eval_anls": 0.625, "eval_f1": 0.75}
    assert " eval loss 2.500 (exact match 0.500, ANLS 0.625, F1 0.750) 3.1k tokens/s " in step_line(METRICS | scores, 0)


def test_the_line_of_a_late_plan_says_which_planner_s_ran() -> None:
    line = step_line(METRICS | {"planner": "dhp_quick", "late": True}, 60)
    assert " plan 3 ms (late: dhp_quick) idle 18 % " in line


@pytest.mark.parametrize(("tokens", "shown"), [
    (1, "1.19"), (600, "714"), (839.7, "1k"), (8400, "10k"), (2_000_000, "2.38M"), (9e9, "10.7G"), (0, "0")])
def test_token_rates(tokens: float, shown: str) -> None:
    assert f") {shown} tokens/s " in step_line(METRICS | {"num_tokens": tokens}, 60)


def test_numbers_that_are_none_have_a_line_too() -> None:
    line = step_line(METRICS | {"loss": math.nan, "step_time_s": 0.0, "gradient_norm": math.inf, "learning_rate": 0.0},
                     60)
    assert "loss nan (lr 0, norm inf) 0 tokens/s" in line
    untrained = METRICS | {"loss": math.nan, "num_samples": 0, "num_tokens": 0, "gradient_norm": 0.0}
    assert step_line(untrained, 60).startswith("step 12/60 no loss (lr 9.8e-4, norm 0) 0 tokens/s step 0.84 s ")
    assert now_line(untrained) == "no loss, 0 tokens/s, idle 18 %"


class Interrupted(io.StringIO):
    """Another thread shows a line as soon as this one has begun with its own."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if text == "first":
            self.other = Thread(target=self.console.show, args=(Notice("second"),))
            self.other.start()
            self.other.join(0.2)
        return written

    console: Console
    other: Thread


def test_lines_of_two_threads_do_not_mix() -> None:
    output = Interrupted()
    output.console = Console(output)
    output.console.show(Notice("first"))
    output.other.join(10)
    assert output.getvalue() == "first\nsecond\n"


def test_plain_output_is_lines() -> None:
    output = io.StringIO()
    console = Console(output)
    console.show(RunStarted(("model tiny", "4 ranks [cpu]"), 11, 60))
    console.show(Notice("sample a[1] left out: truncated"))
    console.show(StepCommitted(METRICS))
    console.show(RunFinished("done: model in runs/default/model"))
    console.close()
    assert output.getvalue().splitlines() == ["model tiny", "4 ranks [cpu]", "sample a[1] left out: truncated",
                                              step_line(METRICS, 60),
                                              "done: model in runs/default/model"]


def test_an_error_is_left_to_the_caller() -> None:
    output = io.StringIO()
    Console(output).show(RunFinished("", "rank 2: out of memory"))
    assert output.getvalue() == ""


def test_a_terminal_shows_the_lines_and_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen = Screen()
    console = Console(screen)
    console.show(RunStarted(("model tiny",), 1, 60))
    console.show(StepCommitted(METRICS))
    console.show(Notice("sample a[1] left out: truncated"))
    console.show(RunFinished("done"))
    shown = screen.getvalue()
    assert step_line(METRICS, 60) in shown  # unbroken, though longer than the terminal is wide
    assert "sample a[1] left out: truncated" in shown
    beside = shown.replace(step_line(METRICS, 60), "")
    assert "12/60" in beside
    assert "loss 2.413, 3.1k tokens/s, idle 18 %" in beside
    assert shown.endswith("done\n")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is given back


class Full(Screen):
    """A stream that takes nothing, once `fails` is set."""

    fails: Exception | None = None

    def write(self, text: str) -> int:
        if self.fails:
            raise self.fails
        return super().write(text)


@pytest.mark.parametrize(("error", "terminal"), [
    (BrokenPipeError(32, "Broken pipe"), False), (OSError(28, "No space left on device"), False),
    (ValueError("I/O operation on closed file"), False), (OSError(5, "Input/output error"), True),
    (ValueError("I/O operation on closed file"), True)])
def test_a_stream_that_fails_does_not_end_the_run(
    error: Exception, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Full()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    console = Console(stream)
    console.show(RunStarted(("model tiny",), 1, 60))
    stream.fails = error
    for message in (StepCommitted(METRICS), Notice("sample a[1] left out"), RunFinished("done")):
        console.show(message)
    console.close()
    assert console.steps == 1
    stream.fails = None
    console.show(Notice("there is room again"))
    assert stream.getvalue().endswith("there is room again\n")


@pytest.mark.parametrize("closed", [True, False])
def test_a_run_without_output_has_a_console_too(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was closed, or none: `>&-`."""
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr("sys.stdout", stream if closed else None)
    console = Console(stream if closed else None)
    for message in (RunStarted(("model tiny",), 1, 60), StepCommitted(METRICS), RunFinished("done")):
        console.show(message)
    console.close()
    assert console.steps == 1
