"""The checks of a configuration's values, beyond their types."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from dhp_ray.credentials import MASK, Uri, masked
from dhp_ray.schema import MAX_MIRROR_STEPS, MEASURE, Config, ConfigError, Evaluation, Lora

UPLOADS = "working_dir_files"
"""Ray's name for the folder of a node where it unpacks the working directories of submitted jobs."""


def check(config: Config) -> None:
    """Refuse values that the schema's types allow but that a run cannot use."""
    _check_values(config)
    check_device(config)
    if config.data.path and config.data.sources:
        raise ConfigError(
            f"data.sources: got {len(config.data.sources)} with data.path={config.data.path!r}; allowed: at most one "
            "of the two"
        )
    if config.data.format != "synthetic" and not (config.data.path or config.data.sources):
        raise ConfigError(f"data.path: got nothing with data.format={config.data.format}; allowed: a file or folder")
    if bool(config.model.preset) == bool(config.model.path):
        raise ConfigError(
            f"model.preset: got {config.model.preset!r} with model.path={config.model.path!r}; allowed: exactly one of "
            "the two"
        )
    tokens = config.planner.tokens_per_rank
    for name, number in (("planner.tokens_per_rank", tokens), ("comm.pool_groups", config.comm.pool_groups)):
        if number != "auto" and not re.fullmatch(r"[1-9][0-9]{0,17}", number):
            raise ConfigError(f"{name}: got {number!r}; allowed: auto, or a whole number of at least 1")
    check_offload(config.train.activation_offload)
    every = config.elastic.mirror_every_steps
    if every != "auto" and not (re.fullmatch(r"0|[1-9][0-9]{0,3}", every) and int(every) <= MAX_MIRROR_STEPS):
        raise ConfigError(
            f"elastic.mirror_every_steps: got {every!r}; allowed: auto, or a whole number from 0 to {MAX_MIRROR_STEPS}"
        )
    for part in config.train.freeze:
        if part not in ("vision", "language"):
            raise ConfigError(f"train.freeze: got {part!r}; allowed: vision, language")
    if len(set(config.train.freeze)) == 2:
        raise ConfigError(
            "train.freeze: got vision and language; allowed: at most one of the two, or nothing is left to train"
        )
    _check_lora(config)
    if config.cluster.max_workers and config.cluster.max_workers < config.cluster.num_workers:
        raise ConfigError(
            f"cluster.max_workers: got {config.cluster.max_workers}; allowed: 0, or at least cluster.num_workers "
            f"({config.cluster.num_workers})"
        )
    if config.cluster.min_workers > config.cluster.num_workers:
        raise ConfigError(
            f"cluster.min_workers: got {config.cluster.min_workers}; allowed: at most cluster.num_workers "
            f"({config.cluster.num_workers})"
        )
    if bool(config.eval.path) != bool(config.eval.every_steps):
        raise ConfigError(
            f"eval.every_steps: got {config.eval.every_steps} with eval.path={config.eval.path!r}; allowed: both or "
            "neither"
        )
    if config.eval.generate and not config.eval.path:
        raise ConfigError("eval.generate: got true without eval.path; allowed: false, or held-out samples to answer")
    if not config.run.dir:
        raise ConfigError("run.dir: got nothing; allowed: a folder or URI that every node reaches")


def _check_lora(config: Config) -> None:
    lora = config.train.lora
    if not lora.rank:
        for name, value in (("alpha", lora.alpha), ("targets", lora.targets), ("dropout", lora.dropout)):
            if value != getattr(Lora(), name):
                raise ConfigError(f"train.lora.rank: got 0 with train.lora.{name}={value}; allowed: at least 1")
    elif config.model.preset:
        raise ConfigError(f"train.lora.rank: got {lora.rank} with model.preset={config.model.preset}; allowed: 0, or a "
                          "model.path that the adapter is of")
    if not lora.targets:
        raise ConfigError("train.lora.targets: got []; allowed: all-linear, or ends of layers' names such as q_proj")


def check_evaluation(config: Evaluation) -> None:
    """Refuse values that `jobs/evaluate.py` cannot use."""
    _check_values(config)
    for name, value, allowed in (("model.path", config.model.path, "a local Hugging Face folder"),
                                 ("eval.path", config.eval.path, "a file or folder of held-out samples"),
                                 ("eval.output", config.eval.output, "a file name")):
        if not value:
            raise ConfigError(f"{name}: got nothing; allowed: {allowed}")
    if config.cluster.num_workers % config.eval.ranks_per_model:
        raise ConfigError(f"eval.ranks_per_model: got {config.eval.ranks_per_model}; allowed: what divides "
                          f"cluster.num_workers ({config.cluster.num_workers})")


def _check_values(config: Config) -> None:
    """Refuse values beyond their limits, sources without a path, and a `data.min_pixels` above `data.max_pixels`."""
    check_limits(config)
    for index, source in enumerate(config.data.sources):
        if not source.path:
            raise ConfigError(f"data.sources[{index}].path: got nothing; allowed: a file or folder")
    if config.data.min_pixels > config.data.max_pixels:
        raise ConfigError(
            f"data.min_pixels: got {config.data.min_pixels}; allowed: at most data.max_pixels "
            f"({config.data.max_pixels})"
        )


def check_limits(node: Any, prefix: str = "") -> None:
    """Refuse values of any schema that are beyond their limits, those of lists of sections included."""
    for dotted, value, spec in walk(node, prefix):
        _check_value(dotted, value, spec)
        for index, inner in enumerate(value if isinstance(value, list) else ()):
            if is_dataclass(inner):
                check_limits(inner, f"{dotted}[{index}].")


def check_offload(setting: str) -> None:
    """Refuse a `train.activation_offload` that is neither off, auto nor a share."""
    if setting in ("off", "auto") or (re.fullmatch(r"[01](\.[0-9]{1,17})?", setting) and 0 < float(setting) <= 1):
        return
    raise ConfigError(f"train.activation_offload: got {setting!r}; allowed: off, auto, or a share above 0, up to 1")


def check_device(config: Config) -> None:
    """Refuse what the workers' device cannot do; if `cluster.device` is auto, call it again once the device is known.

    Raises:
        ConfigError: fp32 on a GPU: the attention kernels there compute in bf16 alone.
    """
    if config.cluster.device == "cuda" and config.train.precision == "fp32":
        raise ConfigError(
            "train.precision: got 'fp32' with cluster.device=cuda; allowed: bf16 (attention there has no fp32 kernel; "
            "master weights stay fp32)"
        )


def in_upload(folder: Path) -> bool:
    """Whether a folder is in Ray's copy of the working directory of a job."""
    return UPLOADS in folder.parts


def upload_warning(key: str, folder: str, working_folder: Path) -> str:
    """Return a warning if a key's folder or file is inside the upload of a submitted job: each node has its own copy of
    that, and Ray deletes it. Empty if it is not.

    The job's working folder shows this, not the fact that it was submitted: a job may have changed to a folder that
    stays.
    """
    if in_upload(working_folder) and "://" not in folder and not os.path.isabs(os.path.expanduser(folder)):
        return (f"warning: {key}={folder} is relative: it lies in {working_folder}, which Ray deletes with the job; "
                "give an absolute path or a URI that every node reaches")
    return ""


def places(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Every key of a configuration that names a path, those of lists of sections included: its dotted name, the section
    that has it, and its field.
    """
    for item in fields(node):
        value = getattr(node, item.name)
        name = f"{prefix}{item.name}"
        if item.metadata.get("path") and (name, value) != ("planner.cost", MEASURE):
            yield name, node, item
        for index, inner in enumerate(value if isinstance(value, list) else [value]):
            if is_dataclass(inner):
                yield from places(inner, name + (f"[{index}]." if isinstance(value, list) else "."))


def expand_homes(config: Any) -> None:
    """Replace a leading `~` of every path by the user's home."""
    for _, section, item in places(config):
        setattr(section, item.name, os.path.expanduser(getattr(section, item.name)))


def make_absolute(config: Config) -> None:
    """Take relative paths from this process's folder, for a driver and workers that may run in other ones. Not where
    all of them run in Ray's copies of a folder: what is in it is read from there.
    """
    for _, section, item in places(config):
        value = getattr(section, item.name)
        if value and "://" not in value and item.metadata["path"] != "output file":
            setattr(section, item.name, os.path.abspath(value))


def refuse_relative_run(config: Config) -> None:
    """Refuse a relative `run.dir` where the run's processes run in Ray's copies of a folder.

    Raises:
        ConfigError: one line with the key, its value and what is allowed.
    """
    if "://" not in config.run.dir and not os.path.isabs(config.run.dir):
        raise ConfigError(f"run.dir: got {config.run.dir!r}, which is relative: it would lie in the copy of the "
                          "working directory that Ray makes on each node, and deletes; allowed: an absolute path or a "
                          "URI that every node reaches")


def local_path(name: str, text: str) -> Path:
    """The path that a word of a command names, with `~` as the user's home.

    Raises:
        ConfigError: it is a URI.
    """
    if "://" in text:
        raise ConfigError(f"{name}: got {masked(text)}; allowed: a path of this machine (URIs are not read)")
    return Path(os.path.expanduser(text))


def check_place(name: str, value: str, kind: str) -> None:
    """Refuse a file where a folder is wanted, and the reverse. What is absent, or behind a URI, is not looked at here.

    Raises:
        ConfigError: one line with the key, its value and what is allowed.
    """
    if os.path.isfile(value) and "file" not in kind:
        raise ConfigError(f"{name}: {value} is a file; allowed: a {kind}")
    if os.path.isdir(value) and "folder" not in kind:
        raise ConfigError(f"{name}: {value} is a folder; allowed: a file")


def walk(node: Any, prefix: str = "") -> list[tuple[str, Any, dict[str, Any]]]:
    """(dotted key, value, metadata) of every key of a configuration."""
    found: list[tuple[str, Any, dict[str, Any]]] = []
    for item in fields(node):
        value = getattr(node, item.name)
        if is_dataclass(value) and item.default is MISSING:
            found += walk(value, f"{prefix}{item.name}.")
        else:
            found.append((f"{prefix}{item.name}", value, dict(item.metadata)))
    return found


def texts(value: Any) -> list[str]:
    """Every string inside a value."""
    if isinstance(value, (list, dict)):
        return [text for inner in (value.values() if isinstance(value, dict) else value) for text in texts(inner)]
    return [value] if isinstance(value, str) else []


def _check_value(dotted: str, value: Any, spec: dict[str, Any]) -> None:
    if any("://" in text and MASK in text and not isinstance(text, Uri) for text in texts(value)):
        raise ConfigError(
            f"{dotted}: got {value!r}, a URI as it is shown; allowed: the whole URI, with its credentials"
        )
    if spec["path"] and "://" in value and "URI" not in spec["path"]:
        allowed = "a file" if spec["path"] == "output file" else f"a {spec['path']}"
        raise ConfigError(f"{dotted}: got {masked(value)}; allowed: {allowed} of this machine (URIs are not read)")
    if spec["path"] and "\0" in value:
        raise ConfigError(f"{dotted}: got {value!r}; allowed: a name without a zero character")
    if spec["choices"] and value not in spec["choices"]:
        raise ConfigError(f"{dotted}: got {value!r}; allowed: {', '.join(spec['choices'])}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        limits = [(spec["minimum"], "at least", lambda v, m: v >= m), (spec["above"], "more than", lambda v, m: v > m),
                  (spec["maximum"], "at most", lambda v, m: v <= m), (spec["below"], "less than", lambda v, m: v < m)]
        limits = [limit for limit in limits if limit[0] is not None]
        wanted = " and ".join(f"{word} {limit}" for limit, word, _ in limits)
        finite = math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63
        if not finite or any(not holds(value, limit) for limit, _, holds in limits):
            raise ConfigError(f"{dotted}: got {brief(value)}; allowed: {wanted or 'a finite number'}")


def brief(value: Any) -> str:
    """Return a value as an error shows it, without the thousands of digits of a huge number (Python refuses to print
    it).
    """
    if isinstance(value, int) and abs(value) >= 2**63:
        return "a number of more than 18 digits"
    return repr(value)
