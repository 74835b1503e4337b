"""Evaluation on held-out samples: passes over `eval.path`, planned and run like batches, for loss and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from dhp_ray.config import Config
from dhp_ray.data.errors import DataError
from dhp_ray.data.evaluation import MeanScores, read_references, score
from dhp_ray.data.index import check_answers, held_out
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.stream import Stream
from dhp_ray.runtime.driver.dispatch import BatchReader, DispatchedStep, Dispatcher
from dhp_ray.runtime.messages import Notice, RunError, StoppingError, Tell


class HeldOut(NamedTuple):
    """The streams of `eval.path`: conversations, and, if answers are generated, prompts; each sample's references."""

    conversations: Stream
    prompts: Stream | None
    references: Mapping[str, tuple[str, ...]]


def open_held_out(config: Config) -> HeldOut | None:
    """Open the samples to evaluate, in the format of the training data; None if the run does not evaluate."""
    if not config.eval.every_steps:
        return None
    try:
        data = _one_pass(config).data
        conversations = Stream(data, config.model, config.seed)
        if not config.eval.generate:
            return HeldOut(conversations, None, {})
        max_bytes = MediaLimits.of(data).max_file_bytes
        check_answers(conversations.sources[0].fragments, max_bytes)
        prompts = Stream(data, config.model, config.seed, answer_tokens=config.eval.max_new_tokens)
        processor = ProcessorSpec.of(config.model, data).load()
        return HeldOut(conversations, prompts, read_references(prompts.sources[0].fragments, max_bytes, processor))
    except DataError as error:
        raise _of_eval(error) from None


class HeldOutEvaluation:
    """Evaluates for one membership. Batches have `batch.global_samples` samples for any number of ranks."""

    def __init__(self, held_out: HeldOut | None, training: Dispatcher, image_limit: int, tell: Tell) -> None:
        """`training`: the membership's dispatcher. `image_limit`: the most tokens of an image; 0: any."""
        self.group, self.config, self.tell, self.stopping = training.group, training.config, tell, training.stopping
        self.references = held_out.references if held_out else {}

        def dispatcher_of(stream: Stream) -> Dispatcher:
            stream.limit(self.config.planner.max_sequence_tokens, image_limit)
            config = _one_pass(self.config)
            return Dispatcher(BatchReader(stream, config), self.group, training.cluster, training.cost, config,
                              training.pool, training.generation, stopping=self.stopping)

        self.losses = dispatcher_of(held_out.conversations) if held_out else None
        self.answers = dispatcher_of(held_out.prompts) if held_out and held_out.prompts else None
        self._number = 0
        self._told: set[str] = set()

    def stop(self) -> None:
        """Stop planning; waits for a batch that is being read, unless the run is to end."""
        for dispatcher in (self.losses, self.answers):
            if dispatcher:
                dispatcher.stop()

    def when_due(self, step: int, last: bool) -> dict[str, float]:
        """After every `eval.every_steps` steps and after the `last` one return `eval_loss`, the mean over all valid
        tokens, and the mean scores if answers are generated. Either is missing if no sample has any, a sample needs
        more ranks than there are, or the run is to end. Call it between two steps.
        """
        self._number = 0
        if self.losses is None or not (last or step % self.config.eval.every_steps == 0):
            return {}
        sums = self._run_pass(self.losses, step, "evaluate", "the loss on held-out samples")
        if sums is None:
            return {}
        num_valid_tokens = sum(count for _, (_, count) in sums)
        found = {"eval_loss": sum(loss for _, (loss, _) in sums) / num_valid_tokens} if num_valid_tokens else {}
        if not found:
            self.tell(Notice(f"no loss after step {step}: no held-out sample can be used"))
        if self.answers is None:
            return found
        answers = self._run_pass(self.answers, step, "answer", "answers to held-out samples")
        if answers is None:
            return found
        means = MeanScores()
        for names, texts in answers:
            for name, text in zip(names, texts, strict=True):
                if name:
                    means.add(score(text, self.references[name]))
        scores = {f"eval_{name}": mean for name, mean in means.by_name().items()}
        if not scores:
            self.tell(Notice(f"no scores of answers after step {step}: no held-out sample can be answered"))
        return found | scores

    def _run_pass(self, dispatcher: Dispatcher, step: int, method: str, what: str
                  ) -> list[tuple[list[str], Any]] | None:
        """Return each batch's sample ids ("": unusable) and rank 0's result of `method`; None: not complete."""
        reader = dispatcher.reader
        reader.stream.start_epoch(0)
        reader.batches.clear()
        reader.at_end = False
        found: list[tuple[list[str], Any]] = []
        dispatched = self._dispatch(dispatcher)
        while dispatched:
            try:
                failures = dispatcher.failures(dispatched)
            except StoppingError:
                return None
            self._report(dispatched, failures)
            names = [sample.id for sample in dispatched.batch.samples]
            running = self.group.start(method, dispatched.step, dispatched.plan_id, failures,
                                       *([names] if method == "answer" else []))
            dispatcher.started(dispatched)
            del reader.batches[dispatched.step]  # its payload is freed once the ranks have it
            dispatched = self._dispatch(dispatcher)  # planned and sent while the workers run
            with self.group.waits.on(what):
                results = self.group.collect(running, stuck_s=self.config.comm.timeout_s)
            found.append((["" if name in failures else name for name in names], results[0]))
        if self.stopping():
            return None
        if not reader.at_end:
            self.tell(Notice(f"no evaluation after step {step}: a held-out sample needs {dispatcher.needed_ranks} "
                             "ranks"))
            return None
        return found

    def _dispatch(self, dispatcher: Dispatcher) -> DispatchedStep | None:
        """Dispatch the next batch under a number below 0: the next training step is prefetched under its own number."""
        self._number -= 1
        try:
            return dispatcher.dispatch(self._number)
        except DataError as error:
            raise _of_eval(error) from None

    def _report(self, dispatched: DispatchedStep, failures: dict[str, str]) -> None:
        for sample_id, reason in (dispatched.batch.skipped | failures).items():
            if self.config.data.on_error == "fail":
                raise RunError(f"eval.path: sample {sample_id}: {reason} (data.on_error=fail; skip leaves it out)")
            if sample_id not in self._told:
                self._told.add(sample_id)
                self.tell(Notice(f"held-out sample {sample_id} left out: {reason}"))


def _of_eval(error: DataError) -> DataError:
    return DataError(str(error).replace("data.path", "eval.path"))


def _one_pass(config: Config) -> Config:
    """Return the configuration with which a dispatcher goes once through all held-out samples."""
    return replace(config, data=held_out(config.data, config.eval.path), run=replace(config.run, steps=0, epochs=1),
                   batch=replace(config.batch, drop_last=False))
