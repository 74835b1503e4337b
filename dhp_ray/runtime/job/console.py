"""What the user sees of a run: one line per step, and below them a progress bar if the output is a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from threading import RLock
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dhp_ray.runtime.messages import Message, Notice, RunFinished, RunStarted, StepCommitted


class Console:
    """Shows the driver's messages on `stream`, each whole, from any thread; None: output was closed at the start."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._bar: Progress | None = None
        self._lock = RLock()
        self._total_steps = 0
        self.steps = 0  # that have been shown

    def show(self, message: Message) -> None:
        """Show one message, on lines of its own. An error is left to the caller, who knows the exit status."""
        with self._lock:
            match message:
                case RunStarted():
                    self._total_steps = message.total_steps
                    self._print(*message.lines)
                    self._open_bar(message.first_step - 1)
                case StepCommitted():
                    self.steps += 1
                    self._print(step_line(message.metrics, self._total_steps))
                    if self._bar:
                        self._bar.update(self._bar.task_ids[0], completed=message.metrics["step"],
                                         now=now_line(message.metrics))
                case Notice():
                    self._print(message.text)
                case RunFinished():
                    self.close()
                    if message.text:
                        self._print(message.text)

    def close(self) -> None:
        """Take the progress bar down; lines can still follow."""
        with self._lock:
            if self._bar:
                with suppress(OSError, ValueError):
                    self._bar.stop()
                self._bar = None

    def _print(self, *lines: str) -> None:
        for line in lines:
            with suppress(OSError, ValueError):  # a full disk, or a stream that is closed: the run goes on
                if self._bar:
                    self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)  # above the bar
                else:
                    print(line, file=self._stream, flush=True)

    def _open_bar(self, done: int) -> None:
        if self._bar is None and self._is_terminal():
            self._bar = progress_bar("step", self._stream)
            self._bar.add_task("", completed=done, total=self._total_steps or None, now="")
            self._bar.start()

    def _is_terminal(self) -> bool:
        with suppress(OSError, ValueError):  # as above
            return self._stream is not None and self._stream.isatty()
        return False


def progress_bar(what: str, stream: TextIO | None, disable: bool = False) -> Progress:
    """Return a bar of `what` is counted, with the text of its task's field `now` at the end."""
    return Progress(TextColumn(what), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
                    TimeRemainingColumn(), TextColumn("{task.fields[now]}", markup=False),
                    console=Terminal(file=stream), disable=disable, redirect_stdout=False, redirect_stderr=False)


def step_line(metrics: Mapping[str, Any], total_steps: int) -> str:
    """`step 12/60 loss 2.413 (lr 9.8e-4, norm 1.2) 3.1k tokens/s step 0.84 s plan 3 ms idle 18 % degrees 1x9 2x2`.

    `degrees` lists degree x number of packs; `plan 3 ms (late: dhp_quick)`: the planner whose plan ran instead of one
    that came too late. `total_steps` 0: not known.
    """
    place = f"step {metrics['step']}/{total_steps}" if total_steps else f"step {metrics['step']}"
    counts = sorted((int(degree), count) for degree, count in metrics["degrees"].items())
    degrees = " ".join(f"{degree}x{count}" for degree, count in counts)
    words = [place, _loss(metrics),
             f"(lr {_short_exponent(metrics['learning_rate'])}, norm {metrics['gradient_norm']:.3g})"]
    if "eval_loss" in metrics:
        words.append(f"eval loss {metrics['eval_loss']:.3f}")
    if "eval_exact_match" in metrics:
        words.append(f"(exact match {metrics['eval_exact_match']:.3f}, ANLS {metrics['eval_anls']:.3f}, "
                     f"F1 {metrics['eval_f1']:.3f})")
    late = f" (late: {metrics['planner']})" if metrics["late"] else ""
    words += [f"{_rate(metrics)} tokens/s", f"step {metrics['step_time_s']:.2f} s",
              f"plan {1e3 * metrics['planning_time_s']:.0f} ms{late}",
              f"idle {100 * metrics['idle_fraction']:.0f} %", f"degrees {degrees}"]
    return " ".join(words)


def now_line(metrics: Mapping[str, Any]) -> str:
    """Return the text next to the bar: `loss 2.413, 3.1k tokens/s, idle 18 %`."""
    return f"{_loss(metrics)}, {_rate(metrics)} tokens/s, idle {100 * metrics['idle_fraction']:.0f} %"


def _loss(metrics: Mapping[str, Any]) -> str:
    return f"loss {metrics['loss']:.3f}" if metrics["num_samples"] else "no loss"


def _rate(metrics: Mapping[str, Any]) -> str:
    return _thousands(metrics["num_tokens"] / metrics["step_time_s"] if metrics["step_time_s"] > 0 else 0.0)


def _short_exponent(value: float) -> str:
    """9.8e-4: as `%.1e`, without the exponent's padding."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if float(digits) else "0"


def _thousands(value: float) -> str:
    for unit in ("", "k", "M"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000.0
    return f"{value:.3g}G"
