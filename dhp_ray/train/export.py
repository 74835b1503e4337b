"""Writes a model that exists only in the shards of all ranks: each rank writes files of its own.

    round     files of all ranks: | f0: r0 | f1: r1 | f2: r2 |, then | f3: r0 | ...
    gather    parameter by parameter or bucket by bucket, on all ranks; only the rank that writes it keeps it
    write     all ranks at the same time; each reads what is not trained from the model's own files

A rank's host holds the file that it writes, and a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.progress import AbortedError, Progress
from dhp_ray.errors import first_line
from dhp_ray.model.export import ModelFile, tensors
from dhp_ray.model.weights import StoredWeights
from dhp_ray.train.state.checkpoint import all_well

Wanted = Iterable[tuple[str, int]]
"""Names of parameters, each with the rank that gets it."""

Gather = Callable[[Wanted], Iterator[tuple[str, Tensor | None]]]
"""Yields each wanted parameter, fp32 on the CPU, whole; None on the other ranks."""


class AllRanks:
    """Runs actions on the ranks of `group` (gloo; None: there is one rank) that may fail on one of them alone."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None, progress: Progress) -> None:
        self.rank, self.group, self.progress = rank, group, progress

    def run(self, action: Callable[[], object]) -> None:
        """Call `action` on this rank, and wait for the others. Every rank calls this.

        Raises:
            Exception: what this rank's `action` has raised.
            AbortedError: the action of another rank failed, and this rank's did not; one line.
        """
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        with self.progress.waiting("the other ranks' files of the model"):
            well = all_well(failure is None, self.group)
        if well:
            return
        lines = [""] * dist.get_world_size(self.group) if self.group is not None else []
        if lines:
            dist.all_gather_object(lines, first_line(failure) if failure else "", group=self.group)
        if failure is not None:
            raise failure
        rank = next(rank for rank, line in enumerate(lines) if line)
        raise AbortedError(f"rank {rank}: {lines[rank]}")


def write_files(
    files: Sequence[ModelFile],
    gather: Gather,
    weights: StoredWeights | None,
    world_size: int,
    all_ranks: AllRanks,
    put: Callable[[ModelFile, Mapping[str, Tensor]], None],
) -> None:
    """Call `put` with each of `files` and its tensors, on the rank that writes it. Every rank calls this, with the same
    files.

    Raises:
        As `AllRanks.run`.
    """
    for first in range(0, len(files), world_size):
        ours = files[first : first + world_size]
        values = {name: value for name, value in gather(
            (name, writer) for writer, file in enumerate(ours) for name in file.parameters) if value is not None}
        mine = ours[all_ranks.rank] if all_ranks.rank < len(ours) else None

        def write(file: ModelFile | None = mine, values: Mapping[str, Tensor] = values) -> None:
            if file is not None:
                put(file, tensors(file, values, weights))

        all_ranks.run(write)
        values.clear()
