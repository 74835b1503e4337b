"""The trained values of a checkpoint, read without an engine, on one host."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dhp_ray.errors import named_line
from dhp_ray.model.weights import StoredWeights
from dhp_ray.train.state.checkpoint import DESCRIPTION, compare_base, compare_shapes
from dhp_ray.train.state.intervals import Intervals, LoadPlanner


class StoredValues:
    """The values in `folder`, the `tensors_folder` of a checkpoint on this machine. `name` is its name in errors.

    Args:
        shapes: those of the model's trained parameters.
        others: the other parameters that `gather` may be asked for.
        base: the files that these come from; None: there are none.

    Raises:
        ValueError: the checkpoint is of another model, or of another `base`, or damaged; one line.
    """

    def __init__(
        self, name: str, folder: Path, shapes: Mapping[str, tuple[int, ...]], others: Mapping[str, Tensor],
        base: StoredWeights | None = None,
    ) -> None:
        self.name, self.folder, self.shapes, self.others = name, folder, dict(shapes), others
        try:
            description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            saved = {key: tuple(shape) for key, shape in description["shapes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{name}/{DESCRIPTION}: cannot be read: {named_line(error)}") from None
        compare_shapes(name, saved, self.shapes)
        compare_base(name, description.get("base", ""), base)

    def gather(self, wanted: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Tensor | None]]:
        """As `Engine.gather`, for one rank; all that is wanted is read at once.

        Raises:
            ValueError: tensors cannot be read; one line.
        """
        names = [name for name, _ in wanted]
        found = self._read([name for name in names if name in self.shapes])
        for name in names:
            yield name, found.pop(name) if name in found else self.others[name].detach().float()

    def _read(self, names: Iterable[str]) -> dict[str, Tensor]:
        found = {name: torch.empty(self.shapes[name]) for name in names}
        entries = {f"value.{name}": Intervals(value.numel(), {0: value.view(-1)}) for name, value in found.items()}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is intended
                dcp.load(entries, storage_reader=dcp.FileSystemReader(self.folder),
                         planner=LoadPlanner(flatten_state_dict=False), no_dist=True)
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise ValueError(f"{self.name}: cannot be read: {named_line(cause)}") from None
        return found
