"""The safetensors of a model folder, read by intervals of flattened parameters: a rank reads its share and no more."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dhp_ray.model.files import EXPERT_PARTS, ModelError, fingerprint, reading, stored_tensors

STORED_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What safetensors calls the types of plain weights; others are quantized, and mean nothing without their scales."""

READ_BYTES = 4 * 2**20
"""Read at a time: the host memory that reading takes, or twice a matrix of transposed experts if that is more."""


class Interval(NamedTuple):
    """Elements of the flattened parameter `name`, and where they go: `into` (n,) takes those from `start` on."""

    name: str
    start: int
    into: Tensor


class StoredForm(NamedTuple):
    """How a tensor of files lies in the module's parameter `name`: as its elements from `start` on, in `shape`;
    `transposed`: the files have its last two dimensions in the other order; `experts_last`: its first dimension last,
    and as one with the second to last.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    transposed: bool = False
    experts_last: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_experts(self) -> bool:
        """Whether it is all of a layer's experts, by the names that transformers gives them."""
        return len(self.shape) == 3 and self.name.rpartition(".")[0].endswith(".experts")

    @property
    def transposed_shape(self) -> tuple[int, ...]:
        """The shape that files may have instead."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.is_experts else self.shape

    def of(self, parameter: Tensor) -> Tensor:
        """The tensor as files have it, of the whole parameter."""
        part = parameter.reshape(-1)[self.start : self.start + self.size].view(self.shape)
        if self.experts_last:
            return part.permute(1, 2, 0).flatten(1)
        return part.transpose(-2, -1) if self.transposed else part


NOWHERE = StoredForm("", 0, ())
"""The form of a tensor of a part that the module does not have."""


class StoredKey(NamedTuple):
    """A tensor of a folder's files: `num_bytes` from byte `offset` of `file` on, under `key`, of type `kind` as
    safetensors calls it.
    """

    file: str
    key: str
    form: StoredForm
    kind: str
    offset: int
    num_bytes: int


class StoredWeights:
    """What `files` of a folder hold for a module, found from their headers. The module gives names and shapes, and may
    be on the meta device. A tied parameter is stored under one of its names or several. `renamed`: patterns of older
    names and what takes their place, applied in order.

    ModelError: a file cannot be read, or a parameter is missing, quantized or of another shape.
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
        forms: dict[str, StoredForm] = {}
        for parameter, names in names_of.items():
            whole = StoredForm(names[0], 0, tuple(parameter.shape))
            forms |= dict.fromkeys(names, whole) | per_expert_forms(whole)
        self.keys: list[StoredKey] = []
        """All that the files hold; a tied parameter under each of its names that they have."""
        for file in files:
            for key, (kind, shape, offset, num_bytes) in stored_tensors(path, file).items():
                form = forms.get(module_name(key, renamed), NOWHERE)
                if shape != form.shape and shape == form.transposed_shape:
                    form = form._replace(transposed=True)
                self.keys.append(StoredKey(file, key, form, kind, offset, num_bytes))
                if not form.name:
                    continue
                if kind not in STORED_TYPES:
                    raise ModelError(
                        f"model.path: {path}: {key} is stored as {kind}; allowed: {', '.join(STORED_TYPES)}"
                    )
                if shape not in (form.shape, form.transposed_shape):
                    raise ModelError(
                        f"model.path: {path}: {key} has shape {shape}; its config.json says {form.shape}"
                    )
        self._parameters = sorted((stored for stored in self.keys if stored.form.name),
                                  key=lambda stored: (stored.file, stored.offset))  # read from first to last
        there = {stored.form._replace(transposed=False) for stored in self._parameters}
        for stored in self._parameters:
            if stored.form.size < forms[stored.form.name].size and forms[stored.form.name] in there:
                raise ModelError(
                    f"model.path: {path} has {stored.key} in {stored.form.name} too; allowed: one of them"
                )
        missing = sorted(key for names in names_of.values() for key in _missing(forms[names[0]], there))
        if missing:
            raise ModelError(f"model.path: {path} lacks {len(missing)} weights, the first is {missing[0]}")

    @cached_property
    def fingerprint(self) -> str:
        """What tells these weights from others, as they were when this was first asked for."""
        return fingerprint(self.path)

    @torch.no_grad()
    def read(self, wanted: Iterable[Interval]) -> None:
        """Fill every interval, in the type and on the device of where it goes. Not a collective. ModelError: a file is
        gone or damaged, or holds tied parameters that differ.
        """
        intervals: dict[str, list[Interval]] = {}
        for interval in wanted:
            if interval.into.numel():
                intervals.setdefault(interval.name, []).append(interval)
        for name in intervals.keys() & self.drawn.keys():
            values = self.drawn[name]().view(-1)
            for interval in intervals.pop(name):
                interval.into.copy_(values[interval.start : interval.start + interval.into.numel()])
        read_as: dict[StoredForm, str] = {}
        longest = max((interval.into.numel() for found in intervals.values() for interval in found), default=0)
        raw = torch.empty(min(READ_BYTES, longest * torch.float64.itemsize), dtype=torch.uint8)
        for stored in self._parameters:
            for interval in intervals.get(stored.form.name, []):
                for into, values in self._values(stored, interval, raw):
                    if stored.form not in read_as:
                        into.copy_(values)
                    elif not torch.equal(into, values.to(into)):
                        raise ModelError(
                            f"model.path: {self.path}: {read_as[stored.form]} and {stored.key} differ; "
                            "its config.json says that they are one (tie_word_embeddings)"
                        )
            read_as.setdefault(stored.form, stored.key)

    def tensor(self, stored: StoredKey) -> Tensor:
        """A tensor as it is stored, in memory of its own."""
        with self._reading(stored), safe_open(Path(self.path) / stored.file, framework="pt") as file:
            found: Tensor = file.get_tensor(stored.key).clone()  # what it gives lies in the mapped file
        return found

    def _reading(self, stored: StoredKey) -> AbstractContextManager[None]:
        return reading(f"model.path: {self.path}: {stored.file}")

    def _values(self, stored: StoredKey, interval: Interval, raw: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What a stored tensor has of an interval, part by part: where it goes, and its values, which lie in `raw`
        until the next part.
        """
        kind, form = STORED_TYPES[stored.kind], stored.form
        begin = max(interval.start, form.start)
        into = interval.into[begin - interval.start : max(begin, form.start + form.size) - interval.start]
        if not into.numel():
            return
        # plain reads: memory that is mapped counts as this process's until the file is closed, and moves page by page
        with self._reading(stored), open(Path(self.path) / stored.file, "rb", buffering=0) as file:
            if form.transposed:
                parts = self._transposed_parts(file, stored, begin - form.start, into)
            else:
                file.seek(stored.offset + (begin - form.start) * kind.itemsize)
                parts = ((part, self._read(file, raw[: part.numel() * kind.itemsize]).view(kind))
                         for part in into.split(len(raw) // kind.itemsize))
            for part, values in parts:
                # rounded to fp32 first, whatever it goes to
                yield part, values.float() if kind == torch.float64 else values

    def _transposed_parts(
        self, file: FileIO, stored: StoredKey, first: int, into: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Elements of a transposed tensor from `first` on, matrix by matrix: each is read whole."""
        kind, (rows, columns) = STORED_TYPES[stored.kind], stored.form.shape[-2:]
        while into.numel():
            number, skipped = divmod(first, rows * columns)
            file.seek(stored.offset + number * rows * columns * kind.itemsize)
            matrix = self._read(file, torch.empty(rows * columns * kind.itemsize, dtype=torch.uint8)).view(kind)
            values = matrix.view(columns, rows).t().reshape(-1)[skipped:][: into.numel()]
            yield into[: len(values)], values
            first, into = first + len(values), into[len(values):]

    def _read(self, file: FileIO, part: Tensor) -> Tensor:
        """Fill a part (bytes) from where the file is."""
        room = part.numpy().data
        self.bytes_read += len(room)
        while room:
            count = file.readinto(room)
            if not count:
                raise OSError(f"it ends {len(room)} bytes too early")
            room = room[count:]
        return part


def module_name(key: str, renamed: Sequence[tuple[str, str]]) -> str:
    """The module's name of what files call `key`; `renamed` as for `StoredWeights`."""
    for pattern, replacement in renamed:
        key = re.sub(pattern, replacement, key)
    return key


def per_expert_forms(whole: StoredForm) -> dict[str, StoredForm]:
    """The keys and forms of a layer's experts in files that have each by itself; nothing for other parameters.

        mlp.experts.gate_up_proj (E, 2 F, D)   mlp.experts.0.gate_proj.weight, mlp.experts.0.up_proj.weight (F, D), ...
        mlp.experts.down_proj (E, D, F)        mlp.experts.0.down_proj.weight (D, F), ...
    """
    layer, _, name = whole.name.rpartition(".")
    parts = EXPERT_PARTS.get(name, ())
    if not whole.is_experts or not parts:
        return {}
    count, rows, columns = whole.shape
    shape = (rows // len(parts), columns)
    return {f"{layer}.{expert}.{part}.weight": StoredForm(
        whole.name, (expert * len(parts) + place) * math.prod(shape), shape)
        for expert in range(count) for place, part in enumerate(parts)}


def _missing(whole: StoredForm, there: Collection[StoredForm]) -> list[str]:
    """The keys that files lack of a parameter, by its own name unless they have some of its experts."""
    if whole in there:
        return []
    parts = per_expert_forms(whole)
    lacking = [key for key, form in parts.items() if form not in there]
    return [whole.name] if len(lacking) == len(parts) else lacking
