"""The process of an evaluation: it starts the workers, hands each a sample as soon as it is free, and writes down what
they answer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import ActorPool
from ray.util.placement_group import remove_placement_group

from dhp_ray.config import Config, ConfigError
from dhp_ray.constraints import upload_warning
from dhp_ray.data.errors import DataError
from dhp_ray.data.fragments import Fragment, Fragments
from dhp_ray.data.index import held_out, image_root, index_fragments
from dhp_ray.errors import first_line
from dhp_ray.runtime.evaluate.answer import Answer
from dhp_ray.runtime.evaluate.display import Display, summary_line
from dhp_ray.runtime.evaluate.predictions import Predictions
from dhp_ray.runtime.job.ending import Ending
from dhp_ray.runtime.job.head import connect
from dhp_ray.runtime.job.preflight import device_of
from dhp_ray.runtime.job.roster import actor_options, bundle_of, reserve
from dhp_ray.runtime.messages import Notice, RunError
from dhp_ray.runtime.waits import Waits
from dhp_ray.runtime.worker.failures import words_of

MAX_RESTARTS = 3
"""Of a worker that dies: Ray starts it anew, and the sample that it was at again."""


def evaluate(config: Config, ending: Ending) -> int:
    """Evaluate as the configuration says, or until a signal to `ending`; the exit status. Every failure is one line on
    standard error.
    """
    waits = Waits(_say)
    try:
        if warning := upload_warning("eval.output", config.eval.output, Path.cwd()):
            _say(Notice(warning))
        with waits.on("the Ray cluster"):
            connect()
        ending.take_signals()  # ray.init has its own handler of SIGTERM, which leaves whatever is going on
        _run(config, waits)
    except (KeyboardInterrupt, SystemExit):  # the latter comes from Ray's handler
        ending.tell()
        return 1
    except (ConfigError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        ending.over()
        waits.close()
        ray.shutdown()
    return 0


def _run(config: Config, waits: Waits) -> None:
    started = time.monotonic()
    data = held_out(config.data, config.eval.path)
    try:
        fragments, root = index_fragments(data), image_root(data)
    except DataError as error:
        raise RunError(str(error).replace("data.path", "eval.path")) from None
    accelerator = device_of(config.cluster.device, ray.cluster_resources())
    config.cluster.device = accelerator.name
    room = reserve(config, bundle_of(config, accelerator), waits)
    predictions = display = None
    workers = []
    try:
        from dhp_ray.runtime.evaluate.evaluator import Evaluator  # transformers takes seconds to import

        actor: Any = ray.remote(max_restarts=MAX_RESTARTS, max_task_retries=MAX_RESTARTS)(Evaluator)
        workers = [actor.options(**actor_options(config, accelerator, room, place)).remote(config, root)
                   for place in range(config.cluster.num_workers)]
        with waits.on("the workers to load the model"):
            _collect([worker.load.remote() for worker in workers])
        predictions = Predictions(config.eval.output, fragments.num_rows)
        display = Display(sys.stdout, fragments.num_rows)
        for answer in _answers(workers, fragments):
            _take(answer, config, predictions, display)
    finally:
        if display:
            display.close()
        if predictions:
            predictions.close()
        for worker in workers:
            ray.kill(worker)
        remove_placement_group(room)
    assert predictions
    _report(predictions, config, time.monotonic() - started)


def _answers(workers: list[Any], fragments: Fragments) -> Iterator[Answer]:
    """The answers to all samples, as they come. Each worker has one sample at a time."""
    pool = ActorPool(workers)
    for number, fragment, offset in _samples(fragments):
        while not pool.has_free():
            yield _next(pool)
        pool.submit(lambda worker, sample: worker.answer.remote(*sample), (number, fragment, offset))
    while pool.has_next():
        yield _next(pool)


def _samples(fragments: Fragments) -> Iterator[tuple[int, Fragment, int]]:
    """Number of each sample in the file, its fragment and its place there."""
    number = 0
    for fragment in fragments:
        for offset in range(fragment.num_rows):
            yield number, fragment, offset
            number += 1


def _next(pool: ActorPool) -> Answer:
    try:
        answer: Answer = pool.get_next_unordered()
    except RayError as error:
        raise _failure(error) from None
    return answer


def _collect(references: list[Any]) -> None:
    try:
        ray.get(references)
    except RayError as error:
        raise _failure(error) from None


def _failure(error: RayError) -> RunError:
    cause = getattr(error, "cause", None)
    if isinstance(error, RayTaskError):
        return RunError(words_of(cause) if isinstance(cause, Exception) else first_line(error))
    return RunError(f"a worker of the evaluation is lost: {first_line(error)}")


def _take(answer: Answer, config: Config, predictions: Predictions, display: Display) -> None:
    """Write an answer down, or say why there is none.

    Raises:
        RunError: there is none, and `data.on_error` is fail.
    """
    if answer.error:
        if config.data.on_error == "fail":
            raise RunError(f"eval.path: sample {answer.id}: {answer.error} (data.on_error=fail)")
        display.say(f"sample {answer.id} left out: {answer.error}")
    predictions.add(answer)
    display.show(predictions.done, predictions.summary())


def _report(predictions: Predictions, config: Config, seconds: float) -> None:
    summary = predictions.summary()
    if not summary["num_samples"]:
        raise RunError(f"eval.path: {config.eval.path}: none of the {summary['num_left_out']} samples can be evaluated;"
                       f" {config.eval.output} says why")
    print(summary_line(summary, config.eval.output))
    print(json.dumps(summary | {"seconds": round(seconds, 1), "num_workers": config.cluster.num_workers}), flush=True)


def _say(notice: Notice) -> None:
    print(notice.text, flush=True)
