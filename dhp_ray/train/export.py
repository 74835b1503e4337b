"""Writes a model that exists only in the shards of all ranks: each rank writes its own files.

    round     files of all ranks: | f0: r0 | f1: r1 | f2: r2 |, then | f3: r0 | ...
    gather    one parameter or bucket after another, on all ranks; only the rank that writes it keeps it
    write     all ranks at the same time; each reads untrained values from the model's own files

A rank's host holds the file that it writes, and one bucket.
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
"""Names of parameters, each with the rank that needs it."""

Gather = Callable[[Wanted], Iterator[tuple[str, Tensor | None]]]
"""Yields each wanted parameter, fp32 on the CPU, whole; None on the ranks that do not need it."""


class AllRanks:
    """The ranks of `group` (gloo; None: a single rank) when they do something that may fail on one of them only."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None, progress: Progress) -> None:
        self.rank, self.group, self.progress = rank, group, progress

    def run(self, action: Callable[[], object]) -> None:
        """Call `action` on this rank and wait for the others. Every rank must call this.

        Raises:
            Exception: the error of this rank's `action`.
            AbortedError: the action of another rank failed, and this one did not; one line.
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
    """Call `put` with the tensors of each of `files`, on the rank that writes the file. Every rank must call this with
    the same files.

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
