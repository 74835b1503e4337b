"""Takes batches from the stream ahead of their steps, in a thread of its own that outlives a change of membership."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from dhp_ray.config import Config
from dhp_ray.data.errors import DataError
from dhp_ray.data.mixture import Mixture
from dhp_ray.data.stream import Batch, Stream


class BatchReader:
    """Takes batches from the stream for one membership of the group.

    `batches` are those taken and not committed yet, by step: a later membership plans them again. `thread` takes them;
    None: a new one. `at_end`: a batch was asked for past the last step.
    """

    def __init__(
        self, stream: Stream | Mixture, config: Config, batches: dict[int, Batch], thread: ThreadPoolExecutor | None
    ) -> None:
        self.stream, self.config, self.batches = stream, config, batches
        self.at_end = False
        self._thread: ThreadPoolExecutor | None = thread or ThreadPoolExecutor(1, "reading")

    def end(self) -> Future[None] | None:
        """Take no further batch; the future is done when the last one has been taken. None if the thread was handed
        over.
        """
        if self._thread is None:
            return None
        idle = self._thread.submit(lambda: None)  # after whatever is being read, for an earlier membership too
        self._thread.shutdown(wait=False)
        self._thread = None
        return idle

    def hand_over(self) -> ThreadPoolExecutor | None:
        """Return the thread for the next membership's reader. A batch that is being read joins `batches` later."""
        thread, self._thread = self._thread, None
        return thread

    def reading(self, step: int) -> Future[Batch | None]:
        """Return a future of a step's batch, done at once if the batch has been taken: the thread may still be reading
        a later one that was asked for before a change of membership.
        """
        if step not in self.batches:
            assert self._thread is not None
            return self._thread.submit(self._batch, step)
        taken: Future[Batch | None] = Future()
        taken.set_result(self.batches[step])
        return taken

    def _batch(self, step: int) -> Batch | None:
        """The batch of a step: the one that an earlier membership had taken, else the stream's next one; None past the
        last step.
        """
        if 0 < self.config.run.steps < step:
            self.at_end = True
            return None
        if step not in self.batches:
            batch = self._next_batch()
            if batch is None:
                self.at_end = True
                return None
            self.batches[step] = batch
        return self.batches[step]

    def _next_batch(self) -> Batch | None:
        """The next batch of this epoch or the one after; None after `run.epochs`, unless `run.steps` says how far to
        go.

        If reading fails, the stream goes back to the batch's first row, because a later membership may ask for the
        batch again.
        """
        begin = self.stream.cursor
        try:
            return self._read_batch()
        except Exception:
            self.stream.restore(begin)
            raise

    def _read_batch(self) -> Batch | None:
        run, batch = self.config.run, self.stream.next_batch(self.config.batch.global_samples)
        while batch is None:
            if not run.steps and self.stream.epoch + 1 >= run.epochs:
                return None
            self.stream.start_epoch(self.stream.epoch + 1)
            batch = self.stream.next_batch(self.config.batch.global_samples)
            if batch is None:
                raise DataError(
                    f"batch.global_samples: got {self.config.batch.global_samples}; no epoch has so many usable "
                    "samples, and batch.drop_last=true leaves a smaller batch out"
                )
        return batch
