"""What an evaluation writes and shows: a line per sample, its progress, the summary. Neither torch nor transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dhp_ray.data.evaluation import MeanScores, score
from dhp_ray.runtime.job.console import progress_bar
from dhp_ray.runtime.messages import RunError


@dataclass(frozen=True)
class Answer:
    """The result for sample `number`, of all assistant turns. `error`: why there is none."""

    number: int
    id: str
    error: str = ""
    prompt: str = ""
    references: tuple[str, ...] = ()
    prediction: str | None = None
    loss_sum: float = 0.0
    num_valid_tokens: int = 0


class Predictions:
    """Writes the lines of `eval.output`, each once all before it are written. Close it at the end."""

    def __init__(self, path: str, num_samples: int) -> None:
        self.path, self.num_samples = path, num_samples
        self.done = self.num_failed = self.num_valid_tokens = 0
        self.loss_sum = 0.0
        self._scores = MeanScores()
        self._waiting: dict[int, Answer] = {}
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise self._unwritable(error) from None

    def add(self, answer: Answer) -> None:
        """Add the answer to a sample; answers may come in any order. Sums are formed in the order of the file."""
        self._waiting[answer.number] = answer
        while self.done in self._waiting:
            line = json.dumps(self._line(self._waiting.pop(self.done)), ensure_ascii=False)
            self.done += 1
            try:
                self._file.write(line.encode("utf-8", "backslashreplace").decode() + "\n")
                self._file.flush()
            except OSError as error:
                raise self._unwritable(error) from None

    def close(self) -> None:
        self._file.close()

    def summary(self) -> dict[str, Any]:
        """Summarise the samples so far: the answered and the left out, mean scores, and the loss per valid token."""
        num_answered = self.done - self.num_failed
        return {"num_samples": num_answered, "num_left_out": self.num_failed,
                "loss": _mean_loss(self.loss_sum, self.num_valid_tokens), "num_valid_tokens": self.num_valid_tokens,
                **self._scores.by_name()}

    def _line(self, answer: Answer) -> dict[str, Any]:
        if answer.error:
            self.num_failed += 1
            return {"id": answer.id, "error": answer.error}
        self.loss_sum += answer.loss_sum
        self.num_valid_tokens += answer.num_valid_tokens
        line: dict[str, Any] = {"id": answer.id, "prompt": answer.prompt, "references": list(answer.references)}
        if answer.prediction is not None:
            scores = score(answer.prediction, answer.references)
            self._scores.add(scores)
            line |= {"prediction": answer.prediction, **scores._asdict()}
        return line | {"loss": _mean_loss(answer.loss_sum, answer.num_valid_tokens),
                       "num_valid_tokens": answer.num_valid_tokens}

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(f"eval.output: {self.path} cannot be written: {error.strerror}")


def _mean_loss(loss_sum: float, num_valid_tokens: int) -> float | None:
    """None if the loss is infinite or nan: JSON has neither."""
    loss = loss_sum / max(1, num_valid_tokens)
    return loss if math.isfinite(loss) else None


NUM_LINES = 20  # the maximum number of progress lines if the output is not a terminal


class Display:
    """Shows an evaluation of `total` samples on `stream`. Close it before anything else is printed there."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream, self._total = stream, total
        self._bar = progress_bar("samples", stream, disable=not stream.isatty())
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
    """`loss 0.693, exact match 0.512, ANLS 0.530, F1 0.524`; a loss that is None is printed as nan."""
    names = {"loss": "loss", "exact_match": "exact match", "anls": "ANLS", "f1": "F1"}
    return ", ".join(f"{words} {math.nan if summary[name] is None else summary[name]:.3f}"
                     for name, words in names.items() if name in summary)


def summary_line(summary: Mapping[str, Any], output: str) -> str:
    """`12 samples, 1 left out: loss 0.693, exact match 0.512, ANLS 0.530, F1 0.524; one line each in out.jsonl`."""
    left_out = f", {summary['num_left_out']} left out" if summary["num_left_out"] else ""
    return f"{summary['num_samples']} samples{left_out}: {means_line(summary)}; one line each in {output}"
