"""The safetensors of a model folder, read by intervals of flattened parameters: a rank reads its share and no more."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dhp_ray.errors import first_line
from dhp_ray.model.files import ModelError, fingerprint, stored_tensors

STORED_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What safetensors calls the types of plain weights; others are quantized, and mean nothing without their scales."""

READ_BYTES = 4 * 2**20
"""Read at a time: the host memory that reading takes."""


class Interval(NamedTuple):
    """Elements of the flattened parameter `name`, and where they go: `into` (n,) takes those from `start` on."""

    name: str
    start: int
    into: Tensor


class StoredKey(NamedTuple):
    """A tensor of a folder's files: `num_bytes` from byte `offset` of `file` on, under `key`, of type `kind` as
    safetensors calls it. It is the module's parameter `name`; empty: of a part that the module has not.
    """

    file: str
    key: str
    name: str
    kind: str
    offset: int
    num_bytes: int


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
        self.bytes_read = 0
        """Bytes of values read so far."""
        self.drawn: dict[str, Callable[[], Tensor]] = {}
        """By name, what gives the first values of parameters that no file holds, whole and fp32."""
        names_of: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names_of.setdefault(parameter, []).append(name)
        first_names = {name: names[0] for names in names_of.values() for name in names}
        shapes = {names[0]: tuple(parameter.shape) for parameter, names in names_of.items()}
        self.keys: list[StoredKey] = []
        """All that the files hold; a tied parameter under each of its names that they have."""
        for file in files:
            for key, (kind, shape, offset, num_bytes) in stored_tensors(path, file).items():
                name = first_names.get(module_name(key, renamed), "")
                self.keys.append(StoredKey(file, key, name, kind, offset, num_bytes))
                if not name:
                    continue
                if kind not in STORED_TYPES:
                    raise ModelError(
                        f"model.path: {path}: {key} is stored as {kind}; allowed: {', '.join(STORED_TYPES)}"
                    )
                if shape != shapes[name]:
                    raise ModelError(
                        f"model.path: {path}: {key} has shape {shape}; its config.json says {shapes[name]}"
                    )
        self._parameters = sorted((stored for stored in self.keys if stored.name),
                                  key=lambda stored: (stored.file, stored.offset))  # read from first to last
        missing = sorted(shapes.keys() - {stored.name for stored in self._parameters})
        if missing:
            raise ModelError(f"model.path: {path} lacks {len(missing)} weights, the first is {missing[0]}")

    @cached_property
    def fingerprint(self) -> str:
        """What tells these weights from others, as they were when this was first asked for."""
        return fingerprint(self.path)

    @torch.no_grad()
    def read(self, wanted: Iterable[Interval]) -> None:
        """Fill every interval, in the type and on the device of where it goes. Not a collective.

        Raises:
            ModelError: a file is gone or damaged, or holds tied parameters that differ.
        """
        intervals: dict[str, list[Interval]] = {}
        for interval in wanted:
            if interval.into.numel():
                intervals.setdefault(interval.name, []).append(interval)
        for name in intervals.keys() & self.drawn.keys():
            values = self.drawn[name]().view(-1)
            for interval in intervals.pop(name):
                interval.into.copy_(values[interval.start : interval.start + interval.into.numel()])
        read_as: dict[str, str] = {}
        longest = max((interval.into.numel() for found in intervals.values() for interval in found), default=0)
        raw = torch.empty(min(READ_BYTES, longest * torch.float64.itemsize), dtype=torch.uint8)
        for stored in self._parameters:
            for interval in intervals.get(stored.name, []):
                for into, values in self._values(stored, interval, raw):
                    if stored.name not in read_as:
                        into.copy_(values)
                    elif not torch.equal(into, values.to(into)):
                        raise ModelError(
                            f"model.path: {self.path}: {read_as[stored.name]} and {stored.key} differ; "
                            "its config.json says that they are one (tie_word_embeddings)"
                        )
            read_as.setdefault(stored.name, stored.key)

    def tensor(self, stored: StoredKey) -> Tensor:
        """A tensor as it is stored, in memory of its own."""
        try:
            with safe_open(Path(self.path) / stored.file, framework="pt") as file:
                found: Tensor = file.get_tensor(stored.key).clone()  # what it gives lies in the mapped file
                return found
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model.path: {self.path}: {stored.file} cannot be read: {first_line(error)}") from None

    def _values(self, stored: StoredKey, interval: Interval, raw: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """An interval part by part: where it goes, and its values, which lie in `raw` until the next part."""
        kind = STORED_TYPES[stored.kind]
        # plain reads: memory that is mapped counts as this process's until the file is closed, and moves page by page
        try:
            with open(Path(self.path) / stored.file, "rb", buffering=0) as file:
                file.seek(stored.offset + interval.start * kind.itemsize)
                for into in interval.into.split(len(raw) // kind.itemsize):
                    part = raw[: into.numel() * kind.itemsize]
                    _fill(part, file)
                    self.bytes_read += part.numel()
                    values = part.view(kind)
                    # rounded to fp32 first, whatever it goes to
                    yield into, values.float() if kind == torch.float64 else values
        except OSError as error:
            raise ModelError(f"model.path: {self.path}: {stored.file} cannot be read: {first_line(error)}") from None


def _fill(part: Tensor, stored: FileIO) -> None:
    room = part.numpy().data
    while room:
        count = stored.readinto(room)
        if not count:
            raise OSError(f"it ends {len(room)} bytes too early")
        room = room[count:]


def module_name(key: str, renamed: Sequence[tuple[str, str]]) -> str:
    """The module's name of what files call `key`; `renamed` as for `StoredWeights`."""
    for pattern, replacement in renamed:
        key = re.sub(pattern, replacement, key)
    return key
