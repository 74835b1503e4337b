"""The process of an evaluation: it hands each worker a sample as soon as it is free, and writes down the answers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import remove_placement_group

from dhp_ray.config import upload_warning
from dhp_ray.data.errors import DataError
from dhp_ray.data.fragments import Fragment, Fragments
from dhp_ray.data.index import held_out, image_root, index_fragments
from dhp_ray.data.model_folder import own_pixels
from dhp_ray.errors import first_line
from dhp_ray.runtime.evaluate.predictions import Answer, Display, Predictions, summary_line
from dhp_ray.runtime.job.job import actor_options, bundle_of, on_cluster, rendezvous_store, reserve
from dhp_ray.runtime.job.preflight import device_of
from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.runtime.messages import Notice, RunError, words_of
from dhp_ray.runtime.waits import Waits
from dhp_ray.schema import Evaluation

MAX_RESTARTS = 3  # how often Ray restarts a worker that dies, and retries the sample that it was working on


def evaluate(config: Evaluation, signals: ShutdownSignals) -> int:
    """Evaluate as configured, or until a signal; return the exit status. Failures are one line on standard error."""
    for warning in (upload_warning("eval.output", config.eval.output, Path.cwd()), pixels_warning(config)):
        if warning:
            _say(Notice(warning))
    return on_cluster(config, _say, signals, partial(_run, config))


def pixels_warning(config: Evaluation) -> str:
    """A line if images are scaled otherwise than the model's folder says; else empty."""
    own = own_pixels(Path(config.model.path), config.data.max_pixels)
    if not own:
        return ""
    return (f"images have at most {config.data.max_pixels} pixels (data.max_pixels), those of the model's own "
            f"processor {own}: data.max_pixels={own} shows them as it does")


def _run(config: Evaluation, waits: Waits) -> int:
    started = time.monotonic()
    data = held_out(config.data, config.eval.path)
    try:
        fragments, root = index_fragments(data), image_root(data)
    except DataError as error:
        raise RunError(str(error).replace("data.path", "eval.path")) from None
    accelerator = device_of(config.cluster.device, ray.cluster_resources())
    config.cluster.device = accelerator.name
    with ExitStack() as stack:
        room = reserve(config, bundle_of(config, accelerator), waits)
        stack.callback(remove_placement_group, room)
        from dhp_ray.runtime.evaluate.evaluator import Evaluator  # transformers takes seconds to import

        size = config.eval.ranks_per_model
        restarts = MAX_RESTARTS if size == 1 else 0  # one restarted rank cannot rejoin the others
        actor: Any = ray.remote(max_restarts=restarts, max_task_retries=restarts)(Evaluator)
        workers = [actor.options(**actor_options(config, accelerator, room, place)).remote(config, root)
                   for place in range(config.cluster.num_workers)]
        for worker in workers:
            stack.callback(ray.kill, worker)
        groups = [workers[first : first + size] for first in range(0, len(workers), size)]
        with waits.on("the workers to load the model"):
            if size > 1:
                store = rendezvous_store(ray.util.get_node_ip_address())  # it listens until the end
                _collect([worker.join.remote(number, rank, (store.host, store.port))
                          for number, group in enumerate(groups) for rank, worker in enumerate(group)])
            _collect([worker.load.remote() for worker in workers])
        predictions = Predictions(config.eval.output, fragments.num_rows)
        stack.callback(predictions.close)
        display = Display(sys.stdout, fragments.num_rows)
        stack.callback(display.close)
        for answer in _answers(groups, fragments):
            _take(answer, config, predictions, display)
    _report(predictions, config, time.monotonic() - started)
    return 0


def _answers(groups: list[list[Any]], fragments: Fragments) -> Iterator[Answer]:
    """Yield answers as they arrive. A group takes as many samples at a time as it has workers."""
    samples, free = _samples(fragments), list(range(len(groups)))
    group_of: dict[Any, int] = {}  # the group of each call under way
    while True:
        while free and (some := list(islice(samples, len(groups[free[-1]])))):
            place = free.pop()
            for worker, sample in zip_longest(groups[place], some):
                group_of[worker.answer.remote(*sample) if sample else worker.take_part.remote()] = place
        if not group_of:
            return
        [done], _ = ray.wait(list(group_of), num_returns=1)
        place = group_of.pop(done)
        if place not in group_of.values():
            free.append(place)
        if answer := _collect([done])[0]:
            yield answer


def _samples(fragments: Fragments) -> Iterator[tuple[int, Fragment, int]]:
    number = 0
    for fragment in fragments:
        for offset in range(fragment.num_rows):
            yield number, fragment, offset
            number += 1


def _collect(references: list[Any]) -> list[Any]:
    try:
        return ray.get(references)
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        raise RunError(words_of(cause) if isinstance(cause, Exception) else first_line(error)) from None
    except RayError as error:
        raise RunError(f"a worker of the evaluation is lost: {first_line(error)}") from None


def _take(answer: Answer, config: Evaluation, predictions: Predictions, display: Display) -> None:
    """Write an answer down, or say why there is none, which ends the evaluation if `data.on_error` is fail."""
    if answer.error:
        if config.data.on_error == "fail":
            raise RunError(f"eval.path: sample {answer.id}: {answer.error} (data.on_error=fail)")
        display.say(f"sample {answer.id} left out: {answer.error}")
    predictions.add(answer)
    display.show(predictions.done, predictions.summary())


def _report(predictions: Predictions, config: Evaluation, seconds: float) -> None:
    summary = predictions.summary()
    if not summary["num_samples"]:
        raise RunError(f"eval.path: {config.eval.path}: none of the {summary['num_left_out']} samples can be evaluated;"
                       f" {config.eval.output} says why")
    print(summary_line(summary, config.eval.output))
    print(json.dumps(summary | {"seconds": round(seconds, 1), "num_workers": config.cluster.num_workers}), flush=True)


def _say(notice: Notice) -> None:
    print(notice.text, flush=True)
