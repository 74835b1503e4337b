"""The safetensors of a model folder, read by rows of one parameter at a time: a rank reads its share and no more."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dhp_ray.model.files import ModelError, opened

STORED_TYPES = ("F64", "F32", "F16", "BF16")
"""What safetensors calls the types of plain weights; others are quantized, and mean nothing without their scales."""


class RowsOfParameter(NamedTuple):
    """Where rows of a parameter go: `into` (rows, ...) takes those from `start` on."""

    start: int
    into: Tensor


class StoredWeights:
    """What the files of a folder hold for a module, found from their headers.

    Args:
        files: names of the folder's files.
        module: gives names and shapes; its parameters may be on the meta device. A tied parameter is stored under one
        of its names or several.
        renamed: patterns of older names and what takes their place, applied in order.

    Raises:
        ModelError: one line on a file that cannot be read, or a parameter that is missing, quantized or of another
        shape.
    """

    def __init__(
        self, path: str, files: Sequence[str], module: nn.Module, renamed: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.path = path
        names_of: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names_of.setdefault(parameter, []).append(name)
        first_names = {name: names[0] for names in names_of.values() for name in names}
        shapes = {names[0]: tuple(parameter.shape) for parameter, names in names_of.items()}
        self._places: list[tuple[str, str, str]] = []  # file, what a parameter is called there, and its name
        found = set()
        for file in files:
            with opened(self.path, file, "pt") as stored:
                for key in stored.keys():  # noqa: SIM118  not a mapping
                    if (called := _renamed(key, renamed)) not in first_names:
                        continue  # of a part that the module has not
                    name = first_names[called]
                    entry = stored.get_slice(key)
                    shape, kind = tuple(entry.get_shape()), entry.get_dtype()
                    if kind not in STORED_TYPES:
                        raise ModelError(
                            f"model.path: {path}: {key} is stored as {kind}; allowed: {', '.join(STORED_TYPES)}"
                        )
                    if shape != shapes[name]:
                        raise ModelError(
                            f"model.path: {path}: {key} has shape {shape}; its config.json says {shapes[name]}"
                        )
                    self._places.append((file, key, name))
                    found.add(name)
        missing = sorted(shapes.keys() - found)
        if missing:
            raise ModelError(f"model.path: {path} lacks {len(missing)} weights, the first is {missing[0]}")

    @torch.no_grad()
    def read(self, wanted: Mapping[str, RowsOfParameter]) -> None:
        """Fill the rows of every parameter named, in the type and on the device of where they go.

        Raises:
            ModelError: a file is gone or damaged, or holds tied parameters that differ.
        """
        read_as: dict[str, str] = {}
        for file, key, name in self._places:
            start, into = wanted.get(name, RowsOfParameter(0, torch.empty(0)))
            if not into.numel():
                continue
            # for each anew: closing it gives back the pages that were read
            with opened(self.path, file, "pt") as stored:
                rows = stored.get_slice(key)[start : start + len(into)]
                if name in read_as and not torch.equal(into, rows.to(into)):
                    raise ModelError(
                        f"model.path: {self.path}: {read_as[name]} and {key} differ; "
                        "its config.json says that they are one (tie_word_embeddings)"
                    )
                into.copy_(rows)
                read_as[name] = key
                del rows


def _renamed(key: str, renamed: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in renamed:
        key = re.sub(pattern, replacement, key)
    return key
