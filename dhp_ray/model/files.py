"""The files of a model folder: its configuration and its weights. This module needs neither torch nor transformers, so
a wrong folder is reported at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from dhp_ray.credentials import MOST_OF_ERROR, shown
from dhp_ray.errors import first_line
from dhp_ray.json_object import json_object

if TYPE_CHECKING:
    from torch import Tensor

EXPERT_TYPES = ("qwen3_5_moe", "qwen3_moe", "qwen3_vl_moe")
"""Those of MODEL_TYPES that have experts."""

EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The parameters of a module of experts, in its order, and what files call their parts for each expert."""
MODEL_TYPES = ("glm4v", "internvl", "llama", "qwen2_5_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe",
               "qwen3_vl", "qwen3_vl_moe")
"""The supported model families, as config.json names them."""

ADAPTER_SETTINGS, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
"""PEFT's names for the files of an adapter, and its prefix of parameter names."""

BASE_KEY = "base_fingerprint"
"""Metadata key in an adapter's file: the fingerprint of the weights that it was trained on."""

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"

FIRST_BYTES = 64
"""The most bytes of each weight that a fingerprint reads."""


class ModelError(ValueError):
    """A model that cannot be built or trained; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message, MOST_OF_ERROR))


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Put this around the reading of a file of safetensors. ModelError: `what` cannot be read."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{what} cannot be read: {first_line(error)}") from None


def check_model_folder(path: str) -> None:
    """Refuse (ModelError) a folder without a model of a known family, or with settings or safetensors that are missing,
    truncated or of another format.
    """
    config_tree(path)
    if (generation := Path(path) / GENERATION_FILE).is_file():
        json_object(generation, "model.path", ModelError)
    for file in weight_files(path):
        stored_tensors(path, file)


def config_tree(path: str) -> dict[str, Any]:
    """The content of a folder's config.json. It must be of a known family."""
    folder, file = Path(path), Path(path) / CONFIG_FILE
    if not folder.is_dir():
        raise ModelError(f"model.path: no folder {path}; allowed: a local Hugging Face folder{_download_hint(path)}")
    if not file.is_file() and (folder / ADAPTER_SETTINGS).is_file():
        raise ModelError(f"model.path: {path} holds an adapter; allowed: the model that `python jobs/merge.py "
                         f"adapter={path} out=FOLDER` makes of it")
    if not file.is_file():
        raise ModelError(f"model.path: {path} has no config.json; allowed: a local Hugging Face folder")
    tree = json_object(file, "model.path", ModelError)
    name = tree.get("model_type")
    if name == "internvl_chat":
        raise ModelError(f"model.path: {path} holds a model of type {name!r}, which brings its own code; allowed: the "
                         "same model in the form of transformers, from the repository whose name ends in -hf or -HF")
    if name not in MODEL_TYPES:
        raise ModelError(f"model.path: {path} holds a model of type {name!r}; allowed: {', '.join(MODEL_TYPES)}")
    return tree


def weight_files(path: str) -> list[str]:
    """Names of a folder's safetensors files: those that its index names, or the one file without an index. Others are
    not read. Refuse a folder in which some or all are missing, and one that transformers would read otherwise.
    """
    folder = Path(path)
    index = folder / INDEX_FILE
    if (folder / ADAPTER_SETTINGS).is_file():
        raise ModelError(f"model.path: {path} holds a model and an adapter ({ADAPTER_SETTINGS}), in whose place "
                         "transformers reads the adapter's base; allowed: one of them, the other elsewhere")
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({os.fspath(file) for file in weight_map.values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ModelError(f"model.path: {index} is not an index of safetensors: {error!r}") from None
    else:
        names = [WEIGHTS_FILE]
    if names != [WEIGHTS_FILE] and (folder / WEIGHTS_FILE).is_file():
        raise ModelError(f"model.path: {path} holds two sets of weights: {WEIGHTS_FILE}, and what {INDEX_FILE} names "
                         f"({len(names)} file{'s' if len(names) > 1 else ''}); allowed: one of them")
    named, read = config_tree(path).get("transformers_weights"), INDEX_FILE if index.is_file() else WEIGHTS_FILE
    if named not in (None, read):
        raise ModelError(f"model.path: {path} holds {read}, and its config.json names {named!r} "
                         "(transformers_weights); allowed: one of them")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        found = f" (it has {pickles[0]}, which can run code when read)" if pickles else ""
        raise ModelError(f"model.path: {path} has no {missing[0]}{found}; allowed: weights as safetensors")
    return names


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file: its type by safetensors' name, its shape, the offset of its first byte, and its
    size in bytes.
    """

    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def stored_tensors(path: str, file: str) -> dict[str, StoredTensor]:
    """The tensors in one of a folder's safetensors files, by name. ModelError: the file cannot be read, or its header
    does not fit its size.
    """
    with reading(f"model.path: {path}: {file}"):
        with safe_open(Path(path) / file, framework="numpy"):
            pass  # checks the header, and says nothing of where values lie
        with open(Path(path) / file, "rb") as stored:
            length = int.from_bytes(stored.read(8), "little")
            header = json.loads(stored.read(length))
    return {name: StoredTensor(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0],
                               entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in header.items() if name != "__metadata__"}


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
    """Write a safetensors file that is as readable as any new one: safetensors makes its owner's alone. OSError: it
    cannot be written.
    """
    from safetensors.torch import save_file  # imports torch

    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(dict(tensors), file, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:  # also of a full disk
        raise OSError(first_line(error)) from None
    if file.stat().st_mode != mode:
        file.chmod(stat.S_IMODE(mode))


def fingerprint(path: str) -> str:
    """A digest that distinguishes weights of equal shapes: of names, shapes, types, and the first values of each
    weight. ModelError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    found = {(key, tensor): file for file in weight_files(path) for key, tensor in stored_tensors(path, file).items()}
    for (key, tensor), file in sorted(found.items()):
        with reading(f"model.path: {path}: {file}"), open(Path(path) / file, "rb") as stored:
            stored.seek(tensor.offset)
            values = stored.read(min(FIRST_BYTES, math.prod(tensor.shape)))
        digest.update(f"{key} {tensor.kind} {tensor.shape} ".encode() + values)
    return digest.hexdigest()


def _download_hint(path: str) -> str:
    """How to download a model, if the missing path looks like a name on the Hub (ORGANISATION/NAME)."""
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path, re.ASCII) and not Path(path).parent.is_dir()
    return f" (`hf download {path} --local-dir FOLDER` fetches that model, then model.path=FOLDER)" if is_name else ""
