"""The loss on held-out samples: passes over `eval.path`, planned and run as training batches are, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from dhp_ray.comm.book import PoolBook
from dhp_ray.config import Config
from dhp_ray.data.errors import DataError
from dhp_ray.data.index import held_out
from dhp_ray.data.stream import Stream
from dhp_ray.planner import CostModel
from dhp_ray.planner.plan import ClusterSpec
from dhp_ray.runtime.driver.dispatch import Dispatcher
from dhp_ray.runtime.driver.group import WorkerGroup
from dhp_ray.runtime.driver.stages import DispatchedStep
from dhp_ray.runtime.messages import Message, Notice, RunError, StoppingError


def held_out_stream(config: Config) -> Stream | None:
    """The stream of `eval.path`, in the form of the training data; None where a run does not evaluate.

    Raises:
        DataError: the file cannot be used.
    """
    if not config.eval.every_steps:
        return None
    try:
        return Stream(_one_pass(config).data, config.model, config.seed)
    except DataError as error:
        raise DataError(str(error).replace("data.path", "eval.path")) from None


class Evaluation:
    """Evaluates for one membership of the group (without a stream: never).

    Its batches have `batch.global_samples` samples whatever the number of ranks, and their sums are added up in order.
    """

    def __init__(
        self,
        stream: Stream | None,
        group: WorkerGroup,
        cluster: ClusterSpec,
        cost: CostModel,
        config: Config,
        pool: PoolBook,
        generation: int = 0,
        stopping: Callable[[], str] = lambda: "",
    ) -> None:
        self.group, self.config, self.stopping = group, config, stopping
        self.dispatcher = None
        if stream:
            stream.max_tokens = config.planner.max_sequence_tokens
            stream.max_image_tokens = int(config.planner.tokens_per_rank)
            self.dispatcher = Dispatcher(stream, group, cluster, cost, _one_pass(config), pool, generation,
                                         stopping=stopping)
        self._told: set[str] = set()

    def stop(self) -> None:
        """Stop planning; waits for a batch that is being read, unless the run is to end."""
        if self.dispatcher:
            self.dispatcher.stop()

    def loss_when_due(self, step: int) -> Generator[Message, None, float | None]:
        """Mean loss over the valid tokens of all held-out samples, after the steps that `eval.every_steps` names;
        yields what the user should see. None where it is not due, cannot be had, or the run is to end before it is
        complete.

        Call it between two steps: the ranks run it in the order of calls.
        """
        if self.dispatcher is None or step % self.config.eval.every_steps:
            return None
        self.dispatcher.reader.stream.start_epoch(0)
        self.dispatcher.batches.clear()
        self.dispatcher.reader.at_end = False
        loss_sum, num_valid_tokens = 0.0, 0
        number = -1  # below 0: the next training step lies prefetched under its own number
        dispatched = self.dispatcher.dispatch(number)
        while dispatched:
            try:
                failures = self.dispatcher.failures(dispatched)
            except StoppingError:
                return None
            yield from self._tell(dispatched, failures)
            running = self.group.start("evaluate", number, dispatched.plan_id, failures)
            self.dispatcher.started(dispatched)
            del self.dispatcher.batches[number]  # its payload goes once the ranks have it
            number -= 1
            dispatched = self.dispatcher.dispatch(number)  # planned and sent while the workers run
            with self.group.waits.on("the loss on held-out samples"):
                sums: list[tuple[float, int]] = self.group.collect(running)
            loss_sum, num_valid_tokens = loss_sum + sums[0][0], num_valid_tokens + sums[0][1]
        if self.stopping():
            return None
        if not self.dispatcher.reader.at_end:
            yield Notice(
                f"no evaluation after step {step}: a held-out sample needs {self.dispatcher.needed_ranks} ranks"
            )
            return None
        return loss_sum / max(1, num_valid_tokens)

    def _tell(self, dispatched: DispatchedStep, failures: dict[str, str]) -> Generator[Message, None, None]:
        """Held-out samples that are left out, each once a run."""
        for sample_id, reason in [*((skipped.id, skipped.reason) for skipped in dispatched.batch.skipped),
                                  *failures.items()]:
            if self.config.data.on_error == "fail":
                raise RunError(f"eval.path: sample {sample_id}: {reason} (data.on_error=fail)")
            if sample_id not in self._told:
                self._told.add(sample_id)
                yield Notice(f"held-out sample {sample_id} left out: {reason}")


def _one_pass(config: Config) -> Config:
    """Return the configuration with which a dispatcher goes once through all held-out samples."""
    return replace(config, data=held_out(config.data, config.eval.path), run=replace(config.run, steps=0, epochs=1),
                   batch=replace(config.batch, drop_last=False))
