"""Reads the configuration of a command: YAML files and `key=value` overrides, merged by OmegaConf into the schema; and
refuses values that cannot be used.

Later wins: the schema's defaults; the files that the `choices:` of the file given by `--config` (`conf/train.yaml`)
name (`model: tiny` takes `conf/model/tiny.yaml`); that file's other keys; the files chosen on the command line
(`model=small`, in place of the file's own choice); every `key=value`.
"""

from __future__ import annotations

import math
import operator
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dhp_ray.credentials import MASK, Uri, concealed, masked
from dhp_ray.errors import first_line, yaml_line
from dhp_ray.schema import MEASURE, NUMBERS, Config, ConfigError, Evaluation, Lora, Preparation

CONF = Path(__file__).resolve().parent.parent / "conf"
CHOICES = ("model", "data", "cluster")


@dataclass(frozen=True)
class Command:
    """What configures a command: its sections, the file read without `--config`, what refuses values that types admit,
    the folder of conf/ for each key that takes a file by its name. `either`: pairs of keys of which a later one
    replaces an earlier other one. `keys`: a pattern of the keys in use. `own`: what it takes beside the schema.
    """

    name: str
    schema: type
    file: Path
    check: Callable[[Any], None]
    choices: Mapping[str, str]
    either: Sequence[tuple[str, str]] = ()
    keys: str = ""
    own: Sequence[str] = ()


COMMAND_LINE = "the command line"
RESOLVED = "resolved"
"""A section of a run's config.yaml that is no part of its configuration: what its first start found out."""

UPLOADS = "working_dir_files"
"""Ray's name for the folder of a node where it unpacks the working directories of submitted jobs."""


def keys_of(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Every key, those in lists of sections too: its dotted name, its section, its field."""
    for item in fields(node):
        value, name = getattr(node, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from keys_of(value, f"{name}.")
            continue
        yield name, node, item
        for index, inner in enumerate(value if isinstance(value, list) else ()):
            if is_dataclass(inner):
                yield from keys_of(inner, f"{name}[{index}].")


def walk(node: Any) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """(dotted key, value, metadata) of every key of a configuration; a list counts as a value."""
    return [(name, getattr(section, item.name), item.metadata) for name, section, item in keys_of(node)
            if "[" not in name]


def check(config: Config) -> None:
    """Refuse values that the schema's types allow but that a run cannot use."""
    _check_values(config)
    check_device(config)
    if config.data.path and config.data.sources:
        raise ConfigError(f"data.sources: got {len(config.data.sources)} with data.path={config.data.path!r}; allowed: "
                          "at most one of the two")
    if config.data.format != "synthetic" and not (config.data.path or config.data.sources):
        raise ConfigError(f"data.path: got nothing with data.format={config.data.format}; allowed: a file or folder")
    if bool(config.model.preset) == bool(config.model.path):
        raise ConfigError(f"model.preset: got {config.model.preset!r} with model.path={config.model.path!r}; allowed: "
                          "exactly one of the two")
    check_train(config.train, config.planner.sync, "planner.sync")
    _check_lora(config)
    if config.cluster.max_workers and config.cluster.max_workers < config.cluster.num_workers:
        raise ConfigError(f"cluster.max_workers: got {config.cluster.max_workers}; allowed: 0, or at least "
                          f"cluster.num_workers ({config.cluster.num_workers})")
    if config.cluster.min_workers > config.cluster.num_workers:
        raise ConfigError(f"cluster.min_workers: got {config.cluster.min_workers}; allowed: at most "
                          f"cluster.num_workers ({config.cluster.num_workers})")
    if bool(config.eval.path) != bool(config.eval.every_steps):
        raise ConfigError(f"eval.every_steps: got {config.eval.every_steps} with eval.path={config.eval.path!r}; "
                          "allowed: both or neither")
    if config.eval.generate and not config.eval.path:
        raise ConfigError("eval.generate: got true without eval.path; allowed: false, or held-out samples to answer")
    if not config.run.dir:
        raise ConfigError("run.dir: got nothing; allowed: a folder or URI that every node reaches")


def check_train(train: Any, sync: str, sync_key: str) -> None:
    """Refuse what neither a run nor a simulation can train."""
    if len(set(train.freeze)) == 2:
        raise ConfigError("train.freeze: got vision and language; allowed: at most one of the two, or nothing is left "
                          "to train")
    if train.expert_parallel not in ("auto", "1") and sync == "step":
        raise ConfigError(f"train.expert_parallel: got {train.expert_parallel} with {sync_key}=step, where each rank "
                          f"has all experts; allowed: 1, or {sync_key}=micro_batch")


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
        raise ConfigError(f"data.min_pixels: got {config.data.min_pixels}; allowed: at most data.max_pixels "
                          f"({config.data.max_pixels})")


def check_limits(node: Any) -> None:
    """Refuse values of any schema that are beyond their limits."""
    for dotted, section, item in keys_of(node):
        _check_value(dotted, getattr(section, item.name), item.metadata)


def check_device(config: Config) -> None:
    """Refuse what the workers' device cannot do; call it again where `cluster.device=auto` is resolved."""
    if config.cluster.device == "cuda" and config.train.precision == "fp32":
        raise ConfigError("train.precision: got 'fp32' with cluster.device=cuda; allowed: bf16 (attention there has "
                          "no fp32 kernel; master weights stay fp32)")


def texts(value: Any) -> list[str]:
    """Every string inside a value."""
    if isinstance(value, (list, dict)):
        return [text for inner in (value.values() if isinstance(value, dict) else value) for text in texts(inner)]
    return [value] if isinstance(value, str) else []


def _check_value(dotted: str, value: Any, spec: Mapping[str, Any]) -> None:
    if any("://" in text and MASK in text and not isinstance(text, Uri) for text in texts(value)):
        raise ConfigError(f"{dotted}: got {value!r}, a URI as it is shown; allowed: the whole URI, with its "
                          "credentials")
    if spec["path"] and "://" in value and "URI" not in spec["path"]:
        allowed = "a file" if spec["path"] == "output file" else f"a {spec['path']}"
        raise ConfigError(f"{dotted}: got {masked(value)}; allowed: {allowed} of this machine (URIs are not read)")
    if spec["path"] and "\0" in value:
        raise ConfigError(f"{dotted}: got {value!r}; allowed: a name without a zero character")
    number = value
    for text in (value if isinstance(value, list) else [value]) if spec["choices"] else ():
        if text not in spec["choices"]:
            if not (spec["number"] and re.fullmatch(NUMBERS[spec["number"]], text)):
                raise ConfigError(f"{dotted}: got {text!r}; allowed: {_allowed(spec, str)}")
            number = float(text)
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        finite = math.isfinite(number) if isinstance(number, float) else abs(number) < 2**63
        limits = [(spec["minimum"], operator.ge), (spec["above"], operator.gt), (spec["maximum"], operator.le),
                  (spec["below"], operator.lt)]
        if not finite or not all(limit is None or holds(number, limit) for limit, holds in limits):
            allowed = _allowed(spec, str) if spec["number"] else _limits(spec) or "a finite number"
            raise ConfigError(f"{dotted}: got {brief(value)}; allowed: {allowed}")


def _limits(spec: Mapping[str, Any]) -> str:
    words = {"minimum": "at least", "above": "more than", "maximum": "at most", "below": "less than"}
    return " and ".join(f"{word} {spec[name]}" for name, word in words.items() if spec[name] is not None)


def brief(value: Any) -> str:
    """Return a value as an error shows it, without thousands of digits, which Python refuses to print."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return "a number of more than 18 digits"
    return repr(value)


def in_upload(folder: Path) -> bool:
    """Whether a folder is in Ray's copy of the working directory of a job."""
    return UPLOADS in folder.parts


def upload_warning(key: str, folder: str, working_folder: Path) -> str:
    """Return a warning if a key's folder lies in the upload of a submitted job, which Ray deletes; else ""."""
    if in_upload(working_folder) and "://" not in folder and not os.path.isabs(os.path.expanduser(folder)):
        return (f"warning: {key}={folder} is relative: it lies in {working_folder}, which Ray deletes with the job; "
                "give an absolute path or a URI that every node reaches")
    return ""


def places(config: Any) -> Iterator[tuple[str, Any, Field[Any]]]:
    """The keys of a configuration that name a path."""
    for name, section, item in keys_of(config):
        if item.metadata["path"] and (name, getattr(section, item.name)) != ("planner.cost", MEASURE):
            yield name, section, item


def make_absolute(config: Config) -> None:
    """Take relative paths from this process's folder: driver and workers may run in others, if not in Ray's copies."""
    for _, section, item in places(config):
        value = getattr(section, item.name)
        if value and "://" not in value and item.metadata["path"] != "output file":
            setattr(section, item.name, os.path.abspath(value))


def refuse_relative_run(config: Config) -> None:
    """Refuse a relative `run.dir` where the run's processes run in Ray's copies of a folder."""
    if "://" not in config.run.dir and not os.path.isabs(config.run.dir):
        raise ConfigError(f"run.dir: got {config.run.dir!r}, which is relative: it would lie in the copy of the "
                          "working directory that Ray makes on each node, and deletes; allowed: an absolute path or a "
                          "URI that every node reaches")


def local_path(name: str, text: str) -> Path:
    """The path that a word of a command names, with `~` as the user's home. Refuses a URI."""
    if "://" in text:
        raise ConfigError(f"{name}: got {masked(text)}; allowed: a path of this machine (URIs are not read)")
    return Path(os.path.expanduser(text))


def check_place(name: str, value: str, kind: str) -> None:
    """Refuse a file where a folder is wanted, and the reverse; not what is absent, or behind a URI."""
    if os.path.isfile(value) and "file" not in kind:
        raise ConfigError(f"{name}: {value} is a file; allowed: a {kind}")
    if os.path.isdir(value) and "folder" not in kind:
        raise ConfigError(f"{name}: {value} is a folder; allowed: a file")


TRAIN = Command("jobs/train.py", Config, CONF / "train.yaml", check, {group: group for group in CHOICES},
                (("model.preset", "model.path"), ("data.path", "data.sources"), ("run.steps", "run.epochs")))
PREPARE_DATA = replace(TRAIN, name="jobs/prepare_data.py", schema=Preparation,
                       keys=r"data\.(format|path|synthetic\.|min_pixels|max_pixels|video_fps|max_frames)|seed")
EVALUATE = replace(TRAIN, name="jobs/evaluate.py", schema=Evaluation, file=CONF / "evaluate.yaml",
                   check=check_evaluation,
                   keys=r"data\.(?!path|sources|shuffle)|model\.path|eval\.(?!every)"
                   r"|cluster\.(?!min_|max_)|planner\.max_sequence_tokens|comm\.timeout_s")


def load(argv: list[str], command: Command = TRAIN) -> Any:
    """Return the configuration that `argv` (`--config FILE` and `key=value`) asks for, of the command's schema; its
    URIs show no credentials. ConfigError: one line with the key, its value and what is allowed.
    """
    result = _merged(argv, command)
    command.check(result)
    return result


def _merged(argv: list[str], command: Command) -> Any:
    """What `load` returns, unchecked."""
    if not CONF.is_dir():
        raise ConfigError("dhp_ray is installed without its conf/; allowed: an editable install of a checkout "
                          "(pip install -e FOLDER)")
    path, overrides = split_arguments(argv, command.file)
    tree = _read(path)
    own = _choices(command, tree.pop("choices", None))
    tree.pop(RESOLVED, None)
    pairs = dict(_pair(text) for text in overrides)
    chosen = {name: pairs.pop(name) for name in command.choices if name in pairs}
    layers = [*_chosen(command, {group: name for group, name in own.items() if group not in chosen}),
              (str(path), dict(leaves(tree))), *_chosen(command, chosen),
              (COMMAND_LINE, {name: _value(command, name, text) for name, text in pairs.items()})]
    defaults, config = OmegaConf.structured(command.schema), OmegaConf.structured(command.schema)
    for origin, layer in layers:
        for pair in command.either:
            for name, other in (pair, pair[::-1]):
                if layer.get(name):
                    OmegaConf.update(config, other, OmegaConf.select(defaults, other))
        for dotted, value in layer.items():
            _set(command, config, dotted, value, origin)
    result = OmegaConf.to_object(config)
    for _, section, item in places(result):
        setattr(section, item.name, os.path.expanduser(getattr(section, item.name)))
    for _, section, item in keys_of(result):
        setattr(section, item.name, concealed(getattr(section, item.name)))
    return result


def split_arguments(argv: list[str], default_file: Path) -> tuple[Path, list[str]]:
    """Separate `--config FILE` (or `--config=FILE`) from the `key=value` overrides."""
    path, overrides, rest = default_file, [], list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--config":
            if not rest:
                raise ConfigError("--config: needs a file")
            path = Path(os.path.expanduser(rest.pop(0)))
        elif word.startswith("--config="):
            path = Path(os.path.expanduser(word.partition("=")[2]))
        elif word.startswith("-") or "=" not in word:
            raise ConfigError(f"{word}: not understood; allowed: --config FILE, --help and key=value")
        else:
            overrides.append(word)
    return path, overrides


def dump(config: Config) -> str:
    """Return the configuration as YAML, without credentials, for `load(["--config", file])`."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def help_text(purpose: str, argv: list[str], command: Command = TRAIN) -> str:
    """Return what `--help` prints, with the values of the file that `argv` names, else of the command's own."""
    words = [word for place, word in enumerate(argv)
             if word.partition("=")[0] == "--config" or argv[place - 1:place] == ["--config"]]
    values = _merged(words, command)
    groups = " ".join(f"[{group}=NAME]" for group in command.choices)
    lines = [f"usage: python {command.name} [--config FILE] {groups} [key=value ...]", "", purpose, ""]
    for group in command.choices:
        names = f"one of: {', '.join(_choice_names(command, group)) or '(none)'}"
        lines += textwrap.wrap(names, 118, initial_indent=f"  {group}=NAME  ", subsequent_indent=" " * 10)
    file = split_arguments(words, command.file)[0]
    lines += ["", f"Values are those of {os.path.relpath(file)}; with --config FILE --help those of FILE.", ""]
    for dotted, value, spec in walk(values):
        if not re.match(command.keys, dotted):
            continue
        words = [*spec["choices"], *filter(None, [spec["number"]])]
        allowed = f" ({'|'.join(words)})" if words else ""
        if isinstance(value, list) and any(map(is_dataclass, value)):
            value = f"[{', '.join(['{...}'] * len(value))}]"
        head = f"  {dotted}={'' if value in ('', []) else value}{allowed}"
        lines.append(f"{head:<58} {spec['text']}" if len(head) < 58 else f"{head}\n{'':<59}{spec['text']}")
    lines += ["", *textwrap.wrap("Exit status: 0 on success, 2 on a bad configuration, 1 on failure.")]
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise ConfigError(f"--config: no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} cannot be read: {first_line(error)}") from None
    except Exception as error:  # the YAML reader's own errors have no common base
        raise ConfigError(f"--config: {path} is not YAML: {yaml_line(error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"--config: {path} holds {type(tree).__name__}; allowed: sections with keys")
    return {str(name): value for name, value in tree.items()}


def _choices(command: Command, tree: Any) -> dict[str, Any]:
    """The `choices:` of a file, {group: name}."""
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"choices: got {tree!r}; allowed: {', '.join(command.choices)}, each with a name")
    for group in tree:
        if group not in command.choices:
            raise ConfigError(f"choices.{group}: no such choice; allowed: {', '.join(command.choices)}")
    return dict(tree)


def _choice_names(command: Command, group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / command.choices[group]).glob("*.yaml"))


def _chosen(command: Command, names: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`group=name`, its dotted keys and values) of each file chosen by name, {group: name}."""
    for group, folder in command.choices.items():
        if group in names:
            name, allowed = names[group], _choice_names(command, group)
            if str(name) not in allowed:
                raise ConfigError(f"{group}: got {name!r}; allowed: {', '.join(allowed)}")
            yield f"{group}={name}", dict(leaves(_read(CONF / folder / f"{name}.yaml")))


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        raise ConfigError(f"{text}: not understood; allowed: key=value")
    return name, value


def _value(command: Command, name: str, text: str) -> Any:
    """Return the value of an override, read as YAML; text for a string is taken as it is, but for quotes around it."""
    kind, _ = _keys(command.schema).get(name, (None, None))
    if kind is str and text[:1] not in ("'", '"'):
        return text
    if not text:
        return [] if kind not in (int, float, bool) else None
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]),
                                       resolve=False)["value"]  # type: ignore[index,call-overload]
    except Exception as error:  # as in _read
        if kind is str:
            return text
        raise ConfigError(f"{name}: {text!r} is not a YAML value: {yaml_line(error)}") from None
    return value if kind is not str or isinstance(value, str) else text


def leaves(tree: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and values; lists count as values."""
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, dict):
            found += leaves(value, f"{dotted}.")
        else:
            found.append((dotted, value))
    return found


def _set(command: Command, config: Any, dotted: str, value: Any, origin: str) -> None:
    keys = _keys(command.schema)
    if dotted not in (_own_keys(command) if origin == COMMAND_LINE else keys):
        other = [known.name for known in (TRAIN, PREPARE_DATA, EVALUATE) if dotted in _own_keys(known)]
        if other and issubclass(command.schema, Config):
            if origin != COMMAND_LINE:  # files are shared
                return
            raise ConfigError(f"{dotted}: no key of {command.name} ({origin}); allowed: in {' and '.join(other)} alone")
        inside = [name for name in keys if name.startswith(f"{dotted}.")]
        if inside:
            raise ConfigError(f"{dotted}: a section, not a key ({origin}); allowed: {', '.join(inside)}")
        section = dotted.rpartition(".")[0]
        known = [name for name in keys if re.match(command.keys, name)]
        near = [name for name in known if section and name.rpartition(".")[0] == section]
        near = near or [*command.own, *sorted({name.split(".")[0] for name in known})]
        raise ConfigError(f"{dotted}: no such key ({origin}); allowed: {', '.join(near)}")
    kind, spec = keys[dotted]
    if kind == list[str] and isinstance(value, str):  # a list of one, or several without brackets
        value = [name.strip() for name in value.split(",")]
    allowed = _allowed(spec, kind)
    if value is None:
        raise ConfigError(f"{dotted}: got nothing ({origin}); allowed: {allowed}")
    if str(value).lower() in ("true", "false") and "true" in spec["choices"]:
        value = str(value).lower()  # as YAML writes them, and Python
    if any("${" in text or text == "???" for text in texts(value)):
        raise ConfigError(f"{dotted}: got {value!r} ({origin}); allowed: a plain value, without ${{...}} or ???")
    mixed = kind in (bool, int, float) and isinstance(value, bool) != (kind is bool) and not isinstance(value, str)
    # OmegaConf would turn true into 1, 2 into true and 1.0 into 1
    if mixed or (kind is int and isinstance(value, float)):
        raise ConfigError(f"{dotted}: got {value!r} ({origin}); allowed: {allowed}")
    try:
        # merging turns the mappings of a list into its dataclass; a list replaces a list
        OmegaConf.update(config, dotted, value, merge=True)
    except (OmegaConfBaseException, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{dotted}: got {brief(value)} ({origin}); allowed: {allowed}") from None


def _own_keys(command: Command) -> list[str]:
    """What the command line may set: the keys in use; with the schema of a run, all of that."""
    return [name for name in _keys(command.schema) if command.schema is Config or re.match(command.keys, name)]


@cache
def _keys(owner: type, prefix: str = "") -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """{dotted key: its type and metadata} of a schema."""
    found: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    kinds = get_type_hints(owner)
    for item in fields(owner):
        kind, name = kinds[item.name], f"{prefix}{item.name}"
        is_section = isinstance(kind, type) and is_dataclass(kind)
        found |= _keys(kind, f"{name}.") if is_section else {name: (kind, item.metadata)}
    return found


def _allowed(spec: Mapping[str, Any], kind: Any) -> str:
    if spec["number"]:
        return f"{', '.join(spec['choices'])}, or a {spec['number']} of {_limits(spec)}"
    if spec["choices"]:
        return ", ".join(name or "nothing" for name in spec["choices"])
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false",
             list[str]: "a list of names"}
    if kind in names:
        return names[kind]
    inner = get_args(kind)[0]
    keys = [item.name for item in fields(inner)] if is_dataclass(inner) else []
    return f"a list of {{{', '.join(f'{name}: ...' for name in keys)}}}" if keys else "a list of numbers"
