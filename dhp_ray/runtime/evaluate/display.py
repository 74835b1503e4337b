"""Progress of an evaluation: a bar on a terminal, otherwise a line now and then; and the summary line at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

NUM_LINES = 20
"""The maximum number of progress lines if the output is not a terminal."""


class Display:
    """Shows an evaluation of `total` samples on `stream`. Close it before anything else is printed there."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream, self._total = stream, total
        columns = (TextColumn("samples"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
                   TimeRemainingColumn(), TextColumn("{task.fields[now]}", markup=False))
        self._bar = Progress(*columns, console=Console(file=stream), disable=not stream.isatty(),
                             redirect_stdout=False, redirect_stderr=False)
        self._task = self._bar.add_task("", total=total, now="")
        self._bar.start()
        self._shown = 0

    def show(self, done: int, summary: Mapping[str, Any]) -> None:
        """Show that `done` samples are done, with their means so far."""
        self._bar.update(self._task, completed=done, now=means_line(summary))
        every = -(-self._total // NUM_LINES)
        if self._bar.disable and (done // every > self._shown // every or done == self._total > self._shown):
            print(f"{done}/{self._total} samples: {means_line(summary)}", file=self._stream, flush=True)
        self._shown = done

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        if self._bar.disable:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def means_line(summary: Mapping[str, Any]) -> str:
    """`loss 0.693, exact match 0.512, ANLS 0.530, F1 0.524`; a loss that is not finite is None in the summary and
    printed as nan.
    """
    names = {"loss": "loss", "exact_match": "exact match", "anls": "ANLS", "f1": "F1"}
    return ", ".join(f"{words} {math.nan if summary[name] is None else summary[name]:.3f}"
                     for name, words in names.items() if name in summary)


def summary_line(summary: Mapping[str, Any], output: str) -> str:
    """`12 samples, 1 left out: loss 0.693, exact match 0.512, ANLS 0.530, F1 0.524; one line each in out.jsonl`."""
    left_out = f", {summary['num_left_out']} left out" if summary["num_left_out"] else ""
    return f"{summary['num_samples']} samples{left_out}: {means_line(summary)}; one line each in {output}"
