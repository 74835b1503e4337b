"""A model as files in the Hugging Face format: which tensor is in which file, and the values that are written.

    entries    of a folder's model: exactly the keys of its files, each in its type there. Tensors that are not trained
               are copied byte for byte, also those that are not parameters of the module (other heads)
               of a preset: its parameters in fp32, under the names that transformers uses
               of adapters (LoRA): only the adapters, in fp32, under PEFT's names
    files      entries in the module's order, cut into files of which a host holds one at a time; rank k % N writes
               file k

    model-00001-of-00003.safetensors ..., model.safetensors.index.json; a single file is named model.safetensors

A model that exists only in the shards of all ranks is written by all of them:

    round     files of all ranks: | f0: r0 | f1: r1 | f2: r2 |, then | f3: r0 | ...
    gather    parameter by parameter, on all ranks; only the rank that writes it keeps it
    write     all ranks at the same time; each reads what is not trained from the model's own files

A rank's host holds the file that it writes, in fp32, and a parameter while it is cut or transposed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from dhp_ray.comm.progress import AbortedError, Progress
from dhp_ray.errors import first_line
from dhp_ray.model.files import (
    ADAPTER_FILE,
    ADAPTER_PREFIX,
    BASE_KEY,
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    ModelError,
    config_tree,
    write_tensors,
)
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.lora import stored_form, write_settings
from dhp_ray.model.weights import STORED_TYPES, StoredForm, StoredKey, StoredWeights, per_expert_forms
from dhp_ray.planner.memory.host import LARGEST_FILE_BYTES, SMALLEST_FILE_BYTES
from dhp_ray.storage import storage_errors

Wanted = Iterable[tuple[str, int]]
"""Names of parameters, each with the rank that gets it."""

Gather = Callable[[Wanted], Iterator[tuple[str, Tensor | None]]]
"""Yields each wanted parameter, fp32 on the CPU, whole; None on the other ranks."""


class Entry(NamedTuple):
    """A tensor of the export, under `key`: either what `form` takes of a parameter, in `dtype`, or `copied` from the
    model's folder.
    """

    key: str
    form: StoredForm
    num_bytes: int
    copied: StoredKey | None = None
    dtype: torch.dtype = torch.float32

    @property
    def host_bytes(self) -> int:
        """What it takes in memory at most: parameters are gathered in fp32."""
        return max(self.num_bytes, 4 * self.form.size if self.copied is None else 0)


class ModelFile(NamedTuple):
    """A file of the export. `metadata` is written to its header."""

    name: str
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"})

    @property
    def num_bytes(self) -> int:
        """Total size of its tensors."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters in this file, without repetition."""
        return list(dict.fromkeys(entry.form.name for entry in self.entries if entry.copied is None))


def entries(adapter: LanguageModel) -> list[Entry]:
    """All tensors of an adapter's export, in the module's order, followed by tensors that the module does not have.
    ModelError: transformers stores the model in a form that is not its parameters under other names.
    """
    parameters = dict(adapter.module.named_parameters())
    if adapter.lora is not None:
        return [trained_entry(ADAPTER_PREFIX + name, stored_form(name, adapter.shapes[name]))
                for name, parameter in parameters.items() if parameter.requires_grad]
    if adapter.weights is None:
        return [trained_entry(key, form) for key, form in stored_forms(on_meta(adapter)).items()]
    order = {name: place for place, name in enumerate(parameters)}
    types: dict[StoredForm, torch.dtype] = {}
    for stored in adapter.weights.keys:
        if stored.form.name:  # what is tied has the same values under both keys: they are compared when read
            kind = STORED_TYPES[stored.kind]
            types[stored.form] = torch.promote_types(kind, types.get(stored.form, kind))
    found = [trained_entry(stored.key, stored.form, types[stored.form])
             if stored.form.name and parameters[stored.form.name].requires_grad
             else Entry(stored.key, stored.form, stored.num_bytes, stored) for stored in adapter.weights.keys]
    return sorted(found, key=lambda entry: (order.get(entry.form.name, len(order)), entry.form.start))


def trained_entry(key: str, form: StoredForm, dtype: torch.dtype = torch.float32) -> Entry:
    return Entry(key, form, dtype.itemsize * form.size, dtype=dtype)


def files_of(
    adapter: LanguageModel,
    num_ranks: int,
    smallest_bytes: int = SMALLEST_FILE_BYTES,
) -> list[ModelFile]:
    """The files of an adapter's export if `num_ranks` ranks write them. LoRA adapters are one file."""
    found = entries(adapter)
    if adapter.lora is None:
        return files(found, num_ranks, smallest_bytes)
    base = {} if adapter.weights is None else {BASE_KEY: adapter.weights.fingerprint}
    return [ModelFile(ADAPTER_FILE, tuple(found), {"format": "pt"} | base)]


def files(
    tensors: Sequence[Entry],
    num_ranks: int,
    smallest_bytes: int = SMALLEST_FILE_BYTES,
    largest_bytes: int = LARGEST_FILE_BYTES,
) -> list[ModelFile]:
    """The files of an export if `num_ranks` ranks write them. No file takes more than half of a rank's share in memory,
    so that the rank which gathers it has room, except that files may take `smallest_bytes`, and a parameter is never
    cut, also if it is several tensors. Rank k % num_ranks writes file k.
    """
    total = sum(entry.host_bytes for entry in tensors)
    most = min(max(-(-total // (2 * num_ranks)), smallest_bytes), largest_bytes)
    parts: list[list[Entry]] = [[]]
    size = 0
    for _, of_parameter in groupby(tensors, key=lambda entry: entry.form.name or entry.key):
        entries = list(of_parameter)
        num_bytes = sum(entry.host_bytes for entry in entries)
        if parts[-1] and size + num_bytes > most:
            parts.append([])
            size = 0
        parts[-1] += entries
        size += num_bytes
    if len(parts) == 1:
        return [ModelFile("model.safetensors", tuple(parts[0]))]
    return [ModelFile(f"model-{number:05d}-of-{len(parts):05d}.safetensors", tuple(part))
            for number, part in enumerate(parts, 1)]


def on_meta(adapter: LanguageModel) -> PreTrainedModel:
    """A copy of the adapter's model on the meta device, without anything that an engine added."""
    module = adapter.module
    with torch.device("meta"):
        return type(module)(module.config.__class__.from_dict(module.config.to_dict()))


def stored_forms(module: PreTrainedModel) -> dict[str, StoredForm]:
    """What `save_pretrained` of transformers stores of the module's parameters, by key, in their order. ModelError: it
    stores one in a form that is not known here.
    """
    state = {name: parameter.detach() for name, parameter in module.named_parameters()}
    stored = revert_weight_conversion(module, dict(state))
    names = {id(tensor): name for name, tensor in state.items()}
    keys = {names[id(tensor)]: key for key, tensor in stored.items() if id(tensor) in names}
    forms: dict[str, StoredForm] = {}
    for name, tensor in state.items():
        whole = StoredForm(name, 0, tuple(tensor.shape))
        found = {keys[name]: whole} if name in keys else per_expert_forms(whole)
        if not found or any(key not in stored or tuple(stored[key].shape) != form.shape for key, form in found.items()):
            raise ModelError(f"model: cannot be saved: transformers stores {name} in another form; allowed: a model "
                             "whose parameters are stored one by one, or experts by expert")
        forms |= found
    return forms


def tensors(file: ModelFile, values: dict[str, Tensor], weights: StoredWeights | None) -> dict[str, Tensor]:
    """The tensors of a file, by key. `values`: the file's `parameters` in fp32, on the CPU; they are taken out."""
    last = {entry.form.name: entry for entry in file.entries}
    found: dict[str, Tensor] = {}
    used: set[StoredForm] = set()
    for entry in file.entries:
        if entry.copied is not None:
            assert weights is not None
            found[entry.key] = weights.tensor(entry.copied)
        else:  # safetensors takes no memory twice, nor parts of one
            whole = values[entry.form.name]
            value = entry.form.of(whole)
            shared = value.dtype == entry.dtype and (entry.form in used or value.numel() < whole.numel())
            found[entry.key] = (value.clone(memory_format=torch.contiguous_format) if shared
                                else value.to(entry.dtype).contiguous())
            used.add(entry.form)
            if last[entry.form.name] is entry:
                del values[entry.form.name], whole
    return found


def write_file(folder: Path, file: ModelFile, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of the export to `folder` and flush it to disk. StorageError: it cannot be written."""
    path = folder / file.name
    with storage_errors(str(path), "cannot be written"):
        write_tensors(path, tensors, file.metadata)
        with open(path, "rb") as written:
            os.fsync(written.fileno())


def write_description(adapter: LanguageModel, files: Sequence[ModelFile], folder: Path) -> None:
    """Write config.json, generation_config.json (a folder's own ones as they are, since other versions of transformers
    read them too) and, if there are several files, the index; for adapters only adapter_config.json. ModelError: the
    folder has no config.json any more. StorageError: a file cannot be read or written.
    """
    if adapter.lora is not None:
        with storage_errors(str(folder), "cannot be written"):
            write_settings(folder, adapter.module, adapter.lora, adapter.weights.path if adapter.weights else "")
        return
    given = own_settings(adapter.weights.path) if adapter.weights else {}
    with storage_errors(str(folder), "cannot be written"):
        for name, content in given.items():
            (folder / name).write_bytes(content)
        if not given:
            module = on_meta(adapter)
            module.config.dtype = "float32"
            module.config.architectures = [type(module).__name__]
            module.config.save_pretrained(folder)
            if module.can_generate() and adapter.module.generation_config is not None:
                adapter.module.generation_config.save_pretrained(folder)
        if len(files) > 1:
            places = {entry.key: file.name for file in files for entry in file.entries}
            index = {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": places}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def own_settings(path: str) -> dict[str, bytes]:
    """The settings of the model in a folder, by file: all that they say is true of the trained model too."""
    tree = config_tree(path)
    with storage_errors(f"model.path: {path}", "cannot be read"):
        found = {name: (Path(path) / name).read_bytes() for name in (CONFIG_FILE, GENERATION_FILE)
                 if (Path(path) / name).is_file()}
    if tree.pop("transformers_weights", None) is not None:  # names the file of weights: there may be others now
        found[CONFIG_FILE] = json.dumps(tree, indent=2).encode()
    return found


class AllRanks:
    """Runs actions on the ranks of `group` (gloo; None: there is one rank) that may fail on one of them alone."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None, progress: Progress) -> None:
        self.rank, self.group, self.progress = rank, group, progress

    def run(self, action: Callable[[], object]) -> None:
        """Call `action` on this rank, and wait for the others. Every rank calls this. Raises what this rank's `action`
        has raised; AbortedError, one line: another rank's failed, and this one's did not.
        """
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        lines = [""] * (self.group.size() if self.group is not None else 0)
        if lines:
            with self.progress.waiting("the other ranks' files of the model"):
                dist.all_gather_object(lines, first_line(failure) if failure else "", group=self.group)
        if failure is not None:
            raise failure
        for rank, line in enumerate(lines):
            if line:
                raise AbortedError(f"rank {rank}: {line}")


def write_files(
    files: Sequence[ModelFile],
    gather: Gather,
    weights: StoredWeights | None,
    world_size: int,
    all_ranks: AllRanks,
    put: Callable[[ModelFile, Mapping[str, Tensor]], None],
) -> None:
    """Call `put` with each of `files` and its tensors, on the rank that writes it. Every rank calls this alike."""
    for first in range(0, len(files), world_size):
        ours = files[first : first + world_size]
        values = {name: value for name, value in gather(
            (name, writer) for writer, file in enumerate(ours) for name in file.parameters) if value is not None}
        mine = ours[all_ranks.rank] if all_ranks.rank < len(ours) else None

        def write(file: ModelFile | None = mine, values: dict[str, Tensor] = values) -> None:
            if file is not None:
                put(file, tensors(file, values, weights))

        all_ranks.run(write)
        values.clear()
