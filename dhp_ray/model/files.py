"""The files of a model's folder that say what it is and hold its weights. Needs neither torch nor transformers, so a
wrong folder is told at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from dhp_ray.errors import first_line

MODEL_TYPES = ("internvl", "qwen2_5_vl", "qwen3_vl")
"""The families of families/, as config.json names them."""

ADAPTER_SETTINGS, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
"""PEFT's names of an adapter's files, and what it puts before a model's names in them."""

BASE_KEY = "base_fingerprint"
"""Of an adapter's metadata: the fingerprint of the weights that it was trained on."""

INDEX_FILE = "model.safetensors.index.json"

FIRST_BYTES = 64
"""Read of each weight for a fingerprint, at most."""


class ModelError(ValueError):
    """A model that cannot be built or trained; the message is one line."""


def check_model_folder(path: str) -> None:
    """Refuse a folder that holds no model of a known family, or whose safetensors are missing, cut short or something
    else.

    Raises:
        ModelError: one line on what is missing or not supported.
    """
    config_tree(path)
    for file in weight_files(path):
        stored_tensors(path, file)


def config_tree(path: str) -> dict[str, Any]:
    """The content of a folder's config.json, which is of a known family."""
    folder, file = Path(path), Path(path) / "config.json"
    if not folder.is_dir():
        raise ModelError(f"model.path: no folder {path}; allowed: a local Hugging Face folder{_download_hint(path)}")
    if not file.is_file():
        raise ModelError(f"model.path: {path} has no config.json; allowed: a local Hugging Face folder")
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"model.path: {file} is not JSON: {error}") from None
    name = tree.get("model_type") if isinstance(tree, dict) else None
    if name not in MODEL_TYPES:
        raise ModelError(f"model.path: {path} holds a model of type {name!r}; allowed: {', '.join(MODEL_TYPES)}")
    return dict(tree)


def weight_files(path: str) -> list[str]:
    """The safetensors of a folder; refuses one whose are missing, in whole or in part."""
    folder = Path(path)
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({os.fspath(file) for file in weight_map.values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"model.path: {index} is not an index of safetensors: {error!r}") from None
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        found = f" (it has {pickles[0]}, which can run code when read)" if pickles else ""
        raise ModelError(f"model.path: {path} has no {missing[0]}{found}; allowed: weights as safetensors")
    return names


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file: its type as safetensors calls it, its shape, the byte of the file at which its
    values begin, and how many bytes they are.
    """

    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def stored_tensors(path: str, file: str) -> dict[str, StoredTensor]:
    """What one of a folder's safetensors holds, by name.

    Raises:
        ModelError: the file cannot be read, or its header does not fit its size.
    """
    try:
        with safe_open(Path(path) / file, framework="numpy"):
            pass  # checks the header, and says nothing of where values lie
        with open(Path(path) / file, "rb") as stored:
            length = int.from_bytes(stored.read(8), "little")
            header = json.loads(stored.read(length))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model.path: {path}: {file} cannot be read: {first_line(error)}") from None
    return {name: StoredTensor(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0],
                               entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in header.items() if name != "__metadata__"}


def fingerprint(path: str) -> str:
    """What tells the weights of a folder from others of their shapes: a digest of names, shapes, types, and of the
    first values of each.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    found = {(key, tensor): file for file in weight_files(path) for key, tensor in stored_tensors(path, file).items()}
    for (key, tensor), file in sorted(found.items()):
        try:
            with open(Path(path) / file, "rb") as stored:
                stored.seek(tensor.offset)
                values = stored.read(min(FIRST_BYTES, math.prod(tensor.shape)))
        except OSError as error:
            raise ModelError(f"model.path: {path}: {file} cannot be read: {first_line(error)}") from None
        digest.update(f"{key} {tensor.kind} {tensor.shape} ".encode() + values)
    return digest.hexdigest()


def _download_hint(path: str) -> str:
    """How to fetch a model, where the path that is no folder reads like a name on the Hub (ORGANISATION/NAME)."""
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path, re.ASCII) and not Path(path).parent.is_dir()
    return f" (`hf download {path} --local-dir FOLDER` fetches that model, then model.path=FOLDER)" if is_name else ""
