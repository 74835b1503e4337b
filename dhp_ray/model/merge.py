"""Merges an adapter (LoRA, in PEFT's form) into the weights that it belongs to: W + scale B A, file by file.

    adapter_model.safetensors   base_model.model.X.lora_A.weight, base_model.model.X.lora_B.weight
    model-0000n.safetensors     X.weight, under the name that the family's files give it
    *processor_config.json      of the adapter where it has them: the sizes of images that it was trained with
    merged                      the base's files, with X.weight changed, in its type; all else byte for byte

An adapter of experts (`lora.py`) belongs to a parameter that PEFT's settings name (`target_parameters`), which files
may have expert by expert, or transposed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import safe_open

from dhp_ray.errors import first_line
from dhp_ray.model.files import (
    ADAPTER_FILE,
    ADAPTER_PREFIX,
    ADAPTER_SETTINGS,
    BASE_KEY,
    EXPERT_PARTS,
    ModelError,
    check_model_folder,
    fingerprint,
    reading,
    stored_tensors,
    weight_files,
    write_tensors,
)
from dhp_ray.storage import check_writable

if TYPE_CHECKING:
    from torch import Tensor

    from dhp_ray.model.weights import StoredForm

HEAD = "lm_head"

IMAGE_SETTINGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of the adapter that take the place of the base's."""

LEFT_OUT = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.safetensors")
"""Files of the base that the merged folder does not get as they are."""

HARMLESS = {"peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
            "inference_mode", "runtime_config", "megatron_core", "r", "lora_alpha", "lora_dropout", "use_rslora",
            "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "eva_config",
            "qalora_group_size", "target_parameters"}
"""PEFT's settings of LoRA that are read here, or say where and how an adapter was trained: with any value the layers of
its file are W + scale B A.
"""
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "rank_pattern": (None, {}), "alpha_pattern": (None, {}), "loftq_config": (None, {}),
    "modules_to_save": (None, []), "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal")}
"""Values that leave an adapter W + scale B A, and its base as it is. All other settings, also those that we do not
know, must be OFF: PEFT has kinds of LoRA that act on some tokens alone, or change other parts.
"""
OFF = (None, False)


BASE_LAYER = ".base_layer"


def owner_of(layer: str) -> str:
    """The module that a pair of this name is of: PEFT's wrappers of several parameters lie in each other."""
    return layer.partition(BASE_LAYER)[0]


class Adapter(NamedTuple):
    """Pairs (A (rank, in), B (out, rank)) by the name of their layer, fp32, and what their product is scaled by; of E
    experts (E rank, in) and (out, rank E), by the names of its file. `parameters`: ends of the names of parameters that
    it has pairs for. `base`: the fingerprint of the weights that it was trained on; empty where the file has none (PEFT
    writes none).
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    scale: float
    parameters: tuple[str, ...]
    base: str

    def parameter_of(self, layer: str) -> str:
        """The name of the parameter of experts that the pair of this name adapts; empty: it is that of a layer."""
        owner = owner_of(layer)
        names = [f"{owner}.{name}" for name in EXPERT_PARTS if any(
            f".{owner}.{name}".endswith(f".{end}") for end in self.parameters)]
        depth = layer.count(BASE_LAYER)
        return names[-1 - depth] if owner.endswith(".experts") and depth < len(names) else ""

    def added_to(self, place: Place) -> Tensor:
        """What the adapter adds to a tensor of the base's files, fp32."""
        a, b = self.pairs[place.pair]
        rows, columns = len(b), a.shape[1]
        first, skipped = divmod(place.form.start, rows * columns)
        count = -(-(skipped + place.form.size) // (rows * columns))
        a = a.view(-1, self.rank, columns)[first : first + count]
        b = b.view(rows, self.rank, -1)[:, :, first : first + count].permute(2, 0, 1)
        return place.form._replace(start=skipped).of((b @ a) * self.scale)


class Place(NamedTuple):
    """The pair that changes a tensor of files, and how that lies in the pair's product (E, out, in)."""

    pair: str
    form: StoredForm


def merged_files(adapter_path: str, base_path: str, out: Path) -> Iterator[int]:
    """Write the folder `out`, the base with the adapter in its weights, file by file: yields for each of the base's how
    many weights have changed in it. One file is in memory at a time; `out` is there once all are written.

    ModelError: a folder holds no adapter, or no model of a known family; the adapter has parts that find no place, or
    another base; something cannot be read; `out` holds files, or is inside the base. OSError: `out` cannot be written.
    """
    from safetensors.torch import load_file  # torch takes seconds to import

    out = check_merge(adapter_path, base_path, out)
    adapter = read_adapter(adapter_path)
    files = weight_files(base_path)
    places = _places(adapter, adapter_path, base_path, files)
    if adapter.base and adapter.base != fingerprint(base_path):
        raise ModelError(f"base: the adapter in {adapter_path} was trained on other weights than those in {base_path}; "
                         "allowed: the folder that it was trained on")
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        theirs = [name for name in IMAGE_SETTINGS if (Path(adapter_path) / name).is_file()]
        _copy_base(Path(base_path), unfinished, (*LEFT_OUT, *theirs))
        for name in theirs:
            _copy("adapter", Path(adapter_path) / name, unfinished / name)
        for file in files:
            with reading(f"base: {Path(base_path) / file}"):
                with safe_open(Path(base_path) / file, framework="pt") as stored:
                    described = stored.metadata()
                tensors = load_file(Path(base_path) / file)
            changed = tensors.keys() & places.keys()
            for key in changed:
                weight = tensors[key]
                tensors[key] = (weight.float() + adapter.added_to(places[key])).to(weight.dtype)
            write_tensors(unfinished / file, tensors, described)
            yield len(changed)
        if out.is_dir():
            out.rmdir()
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_merge(adapter_path: str, base_path: str, out: Path) -> Path:
    """Refuse what can be seen to be wrong without torch; returns the folder to write, absolute."""
    _settings(Path(adapter_path))
    try:
        stored_tensors(adapter_path, ADAPTER_FILE)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path:", "adapter:", 1)) from None
    try:
        check_model_folder(base_path)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path:", "base:", 1)) from None
    out = out.expanduser().resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"out: {out} is there already; allowed: a folder that is empty, or not there")
    if out.is_relative_to(Path(base_path).resolve()):
        raise ModelError(f"out: {out} is inside the base, {base_path}; allowed: a folder elsewhere")
    check_writable(out.with_name(f".{out.name}.unfinished") / "config.json")
    return out


def _copy_base(base: Path, target: Path, left_out: Sequence[str]) -> None:
    """Copy the folder `base` without files of these patterns."""
    def refuse(error: OSError) -> None:
        raise ModelError(f"base: {error.filename} cannot be read: {error.strerror}")

    for folder, _, names in os.walk(base, onerror=refuse, followlinks=True):
        inside = target / Path(folder).relative_to(base)
        inside.mkdir(parents=True)
        for name in names:
            if not any(fnmatch(name, pattern) for pattern in left_out):
                _copy("base", Path(folder) / name, inside / name)


def _copy(key: str, source: Path, target: Path) -> None:
    """Copy a file. ModelError: it cannot be read. OSError: the target cannot be written."""
    with open(target, "wb") as written:
        for part in _parts(key, source):
            written.write(part)


def _parts(key: str, file: Path) -> Iterator[bytes]:
    if not file.is_file():
        raise ModelError(f"{key}: {file} cannot be read: a link to nothing, or no file")
    try:
        with open(file, "rb") as stored:
            while part := stored.read(2**24):
                yield part
    except OSError as error:
        raise ModelError(f"{key}: {file} cannot be read: {error.strerror}") from None


def base_of(adapter_path: str) -> str:
    """The folder that an adapter says it was trained on. ModelError: it names none that is here."""
    base = _settings(Path(adapter_path)).get("base_model_name_or_path")
    if not isinstance(base, str) or not base or not Path(base).is_dir():
        raise ModelError(f"base: the adapter in {adapter_path} names {base!r}, no folder here; allowed: base=FOLDER")
    return base


def read_adapter(path: str) -> Adapter:
    """The adapter in a folder that PEFT or a run of ours has written. ModelError: there is none, or one of a kind that
    is not merged so.
    """
    from safetensors.torch import load_file

    folder = Path(path)
    settings = _settings(folder)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if (not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float)
            or bool in (type(rank), type(alpha))):
        raise ModelError(f"adapter: {folder / ADAPTER_SETTINGS} has r={rank!r} and lora_alpha={alpha!r}; allowed: "
                         "numbers, r at least 1")
    with reading(f"adapter: {path}: {ADAPTER_FILE}"):
        tensors = load_file(folder / ADAPTER_FILE)
        with safe_open(folder / ADAPTER_FILE, framework="pt") as stored:
            base = (stored.metadata() or {}).get(BASE_KEY, "")
    pairs, parameters = {}, tuple(settings.get("target_parameters") or ())
    for name in list(tensors):
        if name.startswith(ADAPTER_PREFIX) and name.endswith(".lora_A.weight"):
            layer = name.removeprefix(ADAPTER_PREFIX).removesuffix(".lora_A.weight")
            a, b = tensors.pop(name), tensors.pop(f"{ADAPTER_PREFIX}{layer}.lora_B.weight", None)
            if (b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or len(a) % rank
                    or (len(a) != rank and not (parameters and owner_of(layer).endswith(".experts")))):
                raise ModelError(f"adapter: {path}: {layer} has no lora_A and lora_B of rank {rank}, which "
                                 f"{ADAPTER_SETTINGS} gives")
            pairs[layer] = a.float(), b.float()
    if tensors or not pairs:
        what = f"{next(iter(tensors))}, which is not merged" if tensors else "no lora_A"
        raise ModelError(f"adapter: {path} holds {what}; allowed: {ADAPTER_PREFIX}(layer).lora_A.weight and "
                         ".lora_B.weight")
    return Adapter(pairs, rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank), parameters, base)


def _settings(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a folder, which is of plain LoRA."""
    file = folder / ADAPTER_SETTINGS
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"adapter: {file} cannot be read: {first_line(error)}; allowed: a folder that PEFT or a run "
                         "with train.lora.rank has written") from None
    if not isinstance(tree, dict) or tree.get("peft_type") != "LORA":
        raise ModelError(f"adapter: {file} is not of LoRA; allowed: peft_type LORA")
    others = [f"{name}={value}, which has changed the base" if name == "init_lora_weights" else name
              for name, value in tree.items() if name not in HARMLESS
              and not any(type(value) is type(plain) and value == plain for plain in PLAIN.get(name, OFF))]
    if others:
        raise ModelError(f"adapter: {file} sets {', '.join(others)}; allowed: plain LoRA")
    parameters = tree.get("target_parameters") or []
    if not isinstance(parameters, list) or any(str(name).rpartition(".")[2] not in EXPERT_PARTS for name in parameters):
        raise ModelError(f"adapter: {file} has target_parameters={parameters!r}; allowed: names that end in "
                         f"{', '.join(EXPERT_PARTS)}")
    if not isinstance(tree.get("use_rslora", False), bool):
        raise ModelError(f"adapter: {file} has use_rslora={tree['use_rslora']!r}; allowed: true, false")
    return tree


def _places(adapter: Adapter, adapter_path: str, base_path: str, files: list[str]) -> dict[str, Place]:
    """What changes each weight that the adapter changes, by its key; every layer must find its weight."""
    from dhp_ray.model.build import read_config
    from dhp_ray.model.families import FAMILIES
    from dhp_ray.model.weights import STORED_TYPES, StoredForm, module_name, per_expert_forms

    config = read_config(base_path)
    count = getattr(config.get_text_config(), "num_experts", 0)
    renamed = FAMILIES[config.model_type].stored_names
    if config.tie_word_embeddings and HEAD in adapter.pairs:
        raise ModelError(f"adapter: {adapter_path} changes {HEAD}, which in {base_path} is the embedding too "
                         "(tie_word_embeddings): no weight can be both; allowed: an adapter without it")
    lacking, wanted = dict[str, int](), dict[str, Place]()
    for layer, (a, b) in adapter.pairs.items():
        name, its_count, shape = adapter.parameter_of(layer), len(a) // adapter.rank, (len(b), a.shape[1])
        if name and its_count != count:
            raise ModelError(f"adapter: {adapter_path}: {layer} is of {its_count} experts; {base_path} has {count}: "
                             "another base")
        whole = StoredForm(name, 0, (count, *shape)) if name else StoredForm(f"{layer}.weight", 0, shape)
        wanted |= {key: Place(layer, form) for key, form in ({whole.name: whole} | per_expert_forms(whole)).items()}
        lacking[layer] = whole.size
    places = {}
    for file in files:
        for key, stored in stored_tensors(base_path, file).items():
            if (place := wanted.get(module_name(key, renamed))) is None:
                continue
            layer, form = place
            if stored.shape != form.shape and stored.shape == form.transposed_shape:
                form = form._replace(transposed=True)
            elif stored.shape != form.shape:
                raise ModelError(f"adapter: {adapter_path}: {layer} is of a weight of shape {form.shape}; that of "
                                 f"{base_path} has {stored.shape}: another base")
            if stored.kind not in STORED_TYPES:
                raise ModelError(f"base: {base_path}: {key} is stored as {stored.kind}; allowed: "
                                 f"{', '.join(STORED_TYPES)}")
            places[key] = Place(layer, form)
            lacking[layer] -= form.size
    if missing := sorted(layer for layer, size in lacking.items() if size):
        raise ModelError(f"adapter: {adapter_path}: {len(missing)} of {len(adapter.pairs)} layers find no weight in "
                         f"{base_path}, the first is {missing[0]}: another base")
    return places
