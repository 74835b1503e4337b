"""The output of an evaluation: one line per sample, in the order of the file, and the summary over all samples."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dhp_ray.data.evaluation import MeanScores, scores_of
from dhp_ray.runtime.evaluate.answer import Answer
from dhp_ray.runtime.messages import RunError


class Predictions:
    """Writes the lines of `eval.output`, each once all samples before it are written. Close it at the end.

    Raises:
        RunError: the file cannot be written.
    """

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
        """Summarise the samples so far: how many were answered and left out, the mean scores of the answered ones, and
        the loss per valid token.
        """
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
            scores = scores_of(answer.prediction, answer.references)
            self._scores.add(scores)
            line |= {"prediction": answer.prediction, **asdict(scores)}
        return line | {"loss": _mean_loss(answer.loss_sum, answer.num_valid_tokens),
                       "num_valid_tokens": answer.num_valid_tokens}

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(f"eval.output: {self.path} cannot be written: {error.strerror}")


def _mean_loss(loss_sum: float, num_valid_tokens: int) -> float | None:
    """None if the loss is infinite or nan: JSON has neither."""
    loss = loss_sum / max(1, num_valid_tokens)
    return loss if math.isfinite(loss) else None
