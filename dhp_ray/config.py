"""The configuration of a run: a dataclass schema, merged by OmegaConf from YAML files and `key=value` overrides.

Later wins: the defaults below, the file given by `--config` (`conf/train.yaml`), the files chosen by name
(`model=tiny` takes `conf/model/tiny.yaml`; a file's own `choices:` are the defaults), then every `key=value`.
"""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

CONF = Path(__file__).resolve().parent.parent / "conf"
CHOICES = ("model", "data", "cluster")


class ConfigError(ValueError):
    """One line for the user: the key, what is wrong with its value, and what is allowed."""


def key(default: Any, text: str, *, choices: tuple[Any, ...] = (), minimum: float | None = None,
        above: float | None = None, maximum: float | None = None) -> Any:
    """A field of the schema: its default, its line in `--help`, and the values that it admits."""
    metadata = {"text": text, "choices": choices, "minimum": minimum, "above": above, "maximum": maximum}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Run:
    dir: str = key("runs/default", "folder or URI of the run's files; every node must reach it")
    steps: int = key(0, "optimizer steps in all; 0: as many as `run.epochs` take", minimum=0)
    epochs: int = key(1, "passes over the data when run.steps is 0", minimum=1)
    resume: str = key("auto", "auto continues the run in run.dir; never refuses a folder that holds one", choices=("auto", "never"))


@dataclass(kw_only=True)
class Synthetic:
    num_samples: int = key(512, "samples that jobs/prepare_data.py writes", minimum=1)
    short_median_tokens: float = key(110.0, "median length of the short samples", above=0)
    short_sigma: float = key(0.5, "spread (sigma of the logarithm) of the short samples", minimum=0)
    long_fraction: float = key(0.06, "share of long samples", minimum=0, maximum=1)
    long_median_tokens: float = key(900.0, "median length of the long samples", above=0)
    long_sigma: float = key(0.5, "spread (sigma of the logarithm) of the long samples", minimum=0)
    max_tokens: int = key(1800, "longest sample", minimum=64)
    rows_per_group: int = key(32, "rows of a parquet row group: the unit that the stream shuffles", minimum=1)


@dataclass(kw_only=True)
class Source:
    path: str = key("", "file or folder of this source")
    weight: float = key(1.0, "share of this source in the mixture", above=0)


@dataclass(kw_only=True)
class Data:
    format: str = key("synthetic", "layout of the samples", choices=("llava", "parquet", "webdataset", "synthetic"))
    path: str = key("", "file or folder of the samples")
    image_root: str = key("", "folder that image names are relative to; empty: the folder of data.path")
    sources: list[Source] = key([], "several sources mixed by weight, in place of data.path: [{path: a, weight: 1}, ...]")
    min_pixels: int = key(3136, "an image with fewer pixels is scaled up to this many", minimum=1)
    max_pixels: int = key(1003520, "an image with more pixels is scaled down to this many", minimum=1)
    on_error: str = key("skip", "a bad sample is left out and listed in skipped.jsonl, or ends the run", choices=("skip", "fail"))
    synthetic: Synthetic = field(default_factory=Synthetic)


@dataclass(kw_only=True)
class Batch:
    global_samples: int = key(16, "samples of one optimizer step (per device x accumulation x devices elsewhere)", minimum=1)
    drop_last: bool = key(False, "leave out an epoch's last batch when it is not full")


@dataclass(kw_only=True)
class Model:
    preset: str = key("", "a model built from a configuration of ours, with fresh weights (see conf/model)")
    path: str = key("", "local Hugging Face folder with safetensors, tokenizer and image processor")


@dataclass(kw_only=True)
class Cluster:
    num_workers: int = key(2, "workers (ranks) at start", minimum=1)
    min_workers: int = key(1, "a run already going waits for capacity below this many", minimum=1)
    max_workers: int = key(0, "a run already going grows to at most this many; 0: cluster.num_workers", minimum=0)
    device: str = key("auto", "where workers compute", choices=("auto", "cpu", "cuda", "npu"))
    cpus_per_worker: float = key(1.0, "CPUs that each worker reserves", above=0)
    start_timeout_s: float = key(10.0, "seconds to wait for room for num_workers (600 with an autoscaler)", above=0)


@dataclass(kw_only=True)
class Planner:
    name: str = key("dhp", "planner; `jobs/plan.py --help` lists them")
    sync: str = key("step", "ranks meet at the end of each step, or after each micro-batch", choices=("step", "micro_batch"))
    cost: str = key("", "cost file; empty: conf/cost/<device>.yaml")
    tokens_per_rank: str = key("auto", "most tokens of one pack on one rank: a number, or auto (from the device's memory)")


@dataclass(kw_only=True)
class Comm:
    transport: str = key("pool", "process groups made for each plan, or the ring over one parent group", choices=("pool", "parent"))
    pool_groups: int = key(64, "process groups kept at most; a plan's further ones use the parent group", minimum=1)
    timeout_s: float = key(600.0, "seconds after which a collective counts as stuck", above=0)


@dataclass(kw_only=True)
class Checkpoint:
    every_steps: int = key(20, "save after this many steps; 0: only at the end", minimum=0)
    keep: int = key(2, "newest checkpoints kept", minimum=1)


@dataclass(kw_only=True)
class Eval:
    path: str = key("", "held-out samples, in the form of data.format")
    every_steps: int = key(0, "evaluate after this many steps; 0: never", minimum=0)


@dataclass(kw_only=True)
class Train:
    learning_rate: float = key(1e-3, "peak learning rate", above=0)
    vision_learning_rate: float = key(0.0, "peak learning rate of the vision encoder; 0: train.learning_rate", minimum=0)
    warmup_steps: int = key(0, "steps of linear warm-up", minimum=0)
    schedule: str = key("cosine", "learning rate after the warm-up", choices=("cosine", "constant"))
    min_learning_rate_ratio: float = key(0.1, "where the cosine ends, as a share of the peak", minimum=0, maximum=1)
    weight_decay: float = key(0.01, "AdamW's decay of matrices; biases and norms have none", minimum=0)
    adam_beta1: float = key(0.9, "AdamW's first beta", minimum=0, maximum=1)
    adam_beta2: float = key(0.95, "AdamW's second beta", minimum=0, maximum=1)
    adam_eps: float = key(1e-8, "AdamW's epsilon", above=0)
    clip_norm: float = key(1.0, "largest global gradient norm; 0: no clipping", minimum=0)
    precision: str = key("fp32", "computing type; master weights and moments are fp32", choices=("fp32", "bf16"))
    freeze: list[str] = key([], "parts left as they are: vision, language")
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass")
    bucket_mb: float = key(64.0, "megabytes of gradients reduced in one collective", above=0)


@dataclass(kw_only=True)
class Config:
    """Everything that a run is made from. Section and key names are those of the command line."""

    run: Run = field(default_factory=Run)
    seed: int = key(0, "seed of weights and data order", minimum=0)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    model: Model = field(default_factory=Model)
    cluster: Cluster = field(default_factory=Cluster)
    planner: Planner = field(default_factory=Planner)
    comm: Comm = field(default_factory=Comm)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    eval: Eval = field(default_factory=Eval)
    train: Train = field(default_factory=Train)


def load(argv: list[str], default_file: Path = CONF / "train.yaml") -> Config:
    """The configuration that `argv` (`--config FILE` and `key=value`) asks for.

    Raises:
        ConfigError: one line with the key, its value and what is allowed.
    """
    path, overrides = split_arguments(argv, default_file)
    tree = _read(path)
    names = dict(tree.pop("choices", {}) or {})
    unknown = set(names) - set(CHOICES)
    if unknown:
        raise ConfigError(f"choices.{sorted(unknown)[0]}: not a choice; allowed: {', '.join(CHOICES)}")
    pairs = [_pair(text) for text in overrides]
    names |= {name: value for name, value in pairs if name in CHOICES}
    layers = [(str(path), tree)]
    layers += [(f"{group}={names[group]}", _read(_choice_file(group, names[group]))) for group in CHOICES if group in names]
    config = OmegaConf.structured(Config)
    for origin, layer in layers:
        for dotted, value in _leaves(layer):
            _set(config, dotted, value, origin)
    for name, value in pairs:
        if name not in CHOICES:
            _set(config, name, _value(name, value), "the command line")
    named = {name for name, _ in pairs}
    if "model.path" in named and "model.preset" not in named:
        config.model.preset = ""  # a folder on the command line replaces the preset that a file chose
    result = OmegaConf.to_object(config)
    assert isinstance(result, Config)
    check(result)
    return result


def split_arguments(argv: list[str], default_file: Path) -> tuple[Path, list[str]]:
    """`--config FILE` (or `--config=FILE`) apart from the `key=value` overrides."""
    path, overrides, rest = default_file, [], list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--config":
            if not rest:
                raise ConfigError("--config: needs a file")
            path = Path(rest.pop(0))
        elif word.startswith("--config="):
            path = Path(word.partition("=")[2])
        elif word.startswith("-") or "=" not in word:
            raise ConfigError(f"{word}: not understood; allowed: --config FILE, --help and key=value")
        else:
            overrides.append(word)
    return path, overrides


def check(config: Config) -> None:
    """Refuse values that the schema's types admit and a run cannot use."""
    for dotted, value, spec in _walk(config):
        _check_value(dotted, value, spec)
    if bool(config.model.preset) == bool(config.model.path):
        raise ConfigError(f"model.preset: got {config.model.preset!r} with model.path={config.model.path!r}; allowed: exactly one of the two")
    tokens = config.planner.tokens_per_rank
    if tokens != "auto" and not re.fullmatch(r"[1-9]\d*", tokens):
        raise ConfigError(f"planner.tokens_per_rank: got {tokens!r}; allowed: auto, or a whole number of at least 1")
    if config.data.min_pixels > config.data.max_pixels:
        raise ConfigError(f"data.min_pixels: got {config.data.min_pixels}; allowed: at most data.max_pixels ({config.data.max_pixels})")
    for part in config.train.freeze:
        if part not in ("vision", "language"):
            raise ConfigError(f"train.freeze: got {part!r}; allowed: vision, language")
    if len(set(config.train.freeze)) == 2:
        raise ConfigError("train.freeze: got vision and language; allowed: at most one of the two, or nothing is left to train")
    if config.cluster.max_workers and config.cluster.max_workers < config.cluster.num_workers:
        raise ConfigError(f"cluster.max_workers: got {config.cluster.max_workers}; allowed: 0, or at least cluster.num_workers ({config.cluster.num_workers})")
    if config.cluster.min_workers > config.cluster.num_workers:
        raise ConfigError(f"cluster.min_workers: got {config.cluster.min_workers}; allowed: at most cluster.num_workers ({config.cluster.num_workers})")
    if bool(config.eval.path) != bool(config.eval.every_steps):
        raise ConfigError(f"eval.every_steps: got {config.eval.every_steps} with eval.path={config.eval.path!r}; allowed: both or neither")


def dump(config: Config) -> str:
    """The configuration as YAML: `load(["--config", file])` gives it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def help_text(command: str, purpose: str) -> str:
    """The page that `--help` prints."""
    lines = [f"usage: {command} [--config FILE] [model=NAME] [data=NAME] [cluster=NAME] [key=value ...]", "", purpose, ""]
    for group in CHOICES:
        lines.append(f"  {group}=NAME  one of: {', '.join(_choice_names(group)) or '(none)'}")
    for dotted, value, spec in _walk(Config(), ):
        allowed = f" ({'|'.join(map(str, spec['choices']))})" if spec["choices"] else ""
        head = f"  {dotted}={'' if value in ('', [], None) else value}{allowed}"
        lines.append(f"{head:<58} {spec['text']}" if len(head) < 58 else f"{head}\n{'':<59}{spec['text']}")
    lines += ["", *textwrap.wrap("Exit status: 0 on success, 2 on a bad configuration, 1 on failure.")]
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise ConfigError(f"--config: no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} cannot be read: {_first_line(error)}") from None
    except Exception as error:  # the YAML reader's own errors have no common base
        raise ConfigError(f"--config: {path} is not YAML: {_first_line(error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"--config: {path} holds {type(tree).__name__}; allowed: sections with keys")
    return {str(name): value for name, value in tree.items()}


def _choice_names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _choice_file(group: str, name: Any) -> Path:
    if str(name) not in _choice_names(group):
        raise ConfigError(f"{group}: got {name!r}; allowed: {', '.join(_choice_names(group))}")
    return CONF / group / f"{name}.yaml"


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        raise ConfigError(f"{text}: not understood; allowed: key=value")
    return name, value


def _value(name: str, text: str) -> Any:
    """The value of an override, read as YAML (so that lists and numbers work)."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index,call-overload]
    except Exception as error:  # as in _read
        raise ConfigError(f"{name}: {text!r} is not a YAML value: {_first_line(error)}") from None


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and values; lists count as values."""
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, dict):
            found += _leaves(value, f"{dotted}.")
        else:
            found.append((dotted, value))
    return found


def _set(config: Any, dotted: str, value: Any, origin: str) -> None:
    known = [name for name, _, _ in _walk(Config())]
    if dotted not in known:
        inside = [name for name in known if name.startswith(f"{dotted}.")]
        if inside:
            raise ConfigError(f"{dotted}: a section, not a key ({origin}); allowed: {', '.join(inside)}")
        section = dotted.rpartition(".")[0]
        near = [name for name in known if name.rpartition(".")[0] == section] or sorted({name.split(".")[0] for name in known})
        raise ConfigError(f"{dotted}: no such key ({origin}); allowed: {', '.join(near)}")
    expected = _type_name(dotted)
    if value is None:
        raise ConfigError(f"{dotted}: got nothing ({origin}); allowed: {expected}")
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{dotted}: got {value!r} ({origin}); allowed: a plain value, without ${{...}}")
    if expected == "a whole number" and isinstance(value, (bool, float)) or expected == "a number" and isinstance(value, bool):
        raise ConfigError(f"{dotted}: got {value!r} ({origin}); allowed: {expected}")
    try:
        OmegaConf.update(config, dotted, value, merge=False)
    except (ConfigKeyError, ValidationError, OmegaConfBaseException, TypeError, ValueError):
        raise ConfigError(f"{dotted}: got {value!r} ({origin}); allowed: {expected}") from None


def _walk(node: Any, prefix: str = "") -> list[tuple[str, Any, dict[str, Any]]]:
    """(dotted key, value, metadata) of every key of a configuration."""
    found: list[tuple[str, Any, dict[str, Any]]] = []
    for item in fields(node):
        value = getattr(node, item.name)
        if is_dataclass(value) and item.default is MISSING:
            found += _walk(value, f"{prefix}{item.name}.")
        else:
            found.append((f"{prefix}{item.name}", value, dict(item.metadata)))
    return found


def _type_name(dotted: str) -> str:
    owner: Any = Config
    *sections, name = dotted.split(".")
    for section in sections:
        owner = get_type_hints(owner)[section]
    spec = {item.name: item.metadata for item in fields(owner)}[name]
    if spec["choices"]:
        return ", ".join(map(str, spec["choices"]))
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", list[str]: "a list of names"}
    return names.get(get_type_hints(owner)[name], "a list of {path: ..., weight: ...}")


def _check_value(dotted: str, value: Any, spec: dict[str, Any]) -> None:
    if spec["choices"] and value not in spec["choices"]:
        raise ConfigError(f"{dotted}: got {value!r}; allowed: {', '.join(map(str, spec['choices']))}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        limits = [(spec["minimum"], "at least", lambda v, m: v >= m), (spec["above"], "more than", lambda v, m: v > m),
                  (spec["maximum"], "at most", lambda v, m: v <= m)]
        wanted = " and ".join(f"{word} {limit:g}" for limit, word, _ in limits if limit is not None)
        if not math.isfinite(value) or any(limit is not None and not holds(value, limit) for limit, _, holds in limits):
            raise ConfigError(f"{dotted}: got {value!r}; allowed: {wanted or 'a finite number'}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
