"""Reads the configuration of a run: YAML files and `key=value` overrides, merged by OmegaConf into the schema.

Later wins: the schema's defaults, the file given by `--config` (`conf/train.yaml`), the files chosen by name
(`model=tiny` takes `conf/model/tiny.yaml`; a file's own `choices:` are the defaults), then every `key=value`.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dhp_ray.constraints import brief, check, check_device, check_evaluation, expand_homes, texts, walk
from dhp_ray.credentials import concealed
from dhp_ray.errors import first_line
from dhp_ray.schema import Config, ConfigError, Evaluation, Preparation

__all__ = [
    "CHOICES",
    "CONF",
    "EVALUATE",
    "PREPARE_DATA",
    "RESOLVED",
    "TRAIN",
    "Command",
    "Config",
    "ConfigError",
    "check",
    "check_device",
    "dump",
    "help_text",
    "load",
]

CONF = Path(__file__).resolve().parent.parent / "conf"
CHOICES = ("model", "data", "cluster")


@dataclass(frozen=True)
class Command:
    """What a command is configured by: a dataclass of sections; the file that is read without `--config`; what refuses
    values that the types admit; the folder of conf/ for each key that takes a file by its name. `either`: pairs of keys
    that exclude each other: one given on the command line takes the place of the other in a file. `keys`: a pattern of
    those keys that the command uses. `own`: what it takes beside the schema, and reads itself.
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

GONE: dict[str, tuple[Sequence[Any] | None, str]] = {
    "cluster.ranks_per_relay": ((256,), "256, which is fixed"),
    "data.decoders": ((0,), "cluster.cpus_per_worker, which decides"),
    "data.max_decoded_pixels": ((64_000_000,), "64 times data.max_pixels, at least 64000000, which is fixed"),
    "data.max_video_seconds": ((3600,), "data.max_frames / data.video_fps, at least 3600, which is fixed"),
    "data.shuffle_window_mb": ((2048,), "2048, which is fixed; data.shuffle_window may be lower"),
    "elastic.hang_factor": ((60,), "60, which is fixed"),
    "elastic.patience": ((20,), "20, which is fixed"),
    "planner.max_image_tokens": (None, "data.max_pixels, as far as ranks have room"),
    "planner.refit": (("auto",), "auto, which is fixed"),
    "train.bucket_mb": ((64,), "64, which is fixed"),
    "train.fused_operators": (("auto",), "auto, which is fixed"),
    "train.sharding": (("whole", "auto"), "planner.sync=micro_batch, which shards over all ranks"),
}
"""Keys that no longer exist: values that files of older runs may still have, because they mean what is done now (None:
any), and what to use in place of others.
"""

TRAIN = Command("jobs/train.py", Config, CONF / "train.yaml", check, {group: group for group in CHOICES},
                (("model.preset", "model.path"), ("data.path", "data.sources")))
PREPARE_DATA = replace(TRAIN, name="jobs/prepare_data.py", schema=Preparation,
                       keys=r"data\.(format|path|synthetic\.|min_pixels|max_pixels|video_fps|max_frames)|seed")
EVALUATE = replace(TRAIN, name="jobs/evaluate.py", schema=Evaluation, file=CONF / "evaluate.yaml",
                   check=check_evaluation,
                   keys=r"data\.(?!path|sources|shuffle)|model\.path|eval\.(?!every)"
                   r"|cluster\.(?!min_|max_)|planner\.max_sequence_tokens|comm\.timeout_s")


def load(argv: list[str], command: Command = TRAIN) -> Any:
    """Return the configuration that `argv` (`--config FILE` and `key=value`) asks for, an object of the command's
    schema. URIs in it show no credentials (dhp_ray/credentials.py).

    Raises:
        ConfigError: one line with the key, its value and what is allowed.
    """
    path, overrides = split_arguments(argv, command.file)
    tree = _read(path)
    names = _choices(command, tree.pop("choices", None))
    tree.pop(RESOLVED, None)
    pairs = [_pair(text) for text in overrides]
    names |= {name: value for name, value in pairs if name in command.choices}
    layers = [(str(path), tree)]
    layers += [(f"{group}={names[group]}", _read(_choice_file(command, group, names[group])))
               for group in command.choices if group in names]
    config = OmegaConf.structured(command.schema)
    for origin, layer in layers:
        for dotted, value in _leaves(layer):
            _set(command, config, dotted, value, origin)
    given = {name: text for name, text in pairs if name not in command.choices}
    for first, second in command.either:
        for name, other in ((first, second), (second, first)):
            if given.get(name) and other not in given:
                given = {other: ""} | given
    for name, text in given.items():
        _set(command, config, name, _value(command, name, text), COMMAND_LINE)
    result = OmegaConf.to_object(config)
    expand_homes(result)
    _conceal(result)
    command.check(result)
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
    """Return the configuration as YAML, without credentials: `load(["--config", file])` returns it again, or asks for
    them.
    """
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def help_text(purpose: str, command: Command = TRAIN) -> str:
    """Return the page that `--help` prints."""
    groups = " ".join(f"[{group}=NAME]" for group in command.choices)
    lines = [f"usage: python {command.name} [--config FILE] {groups} [key=value ...]", "", purpose, ""]
    for group in command.choices:
        names = f"one of: {', '.join(_choice_names(command, group)) or '(none)'}"
        lines += textwrap.wrap(names, 118, initial_indent=f"  {group}=NAME  ", subsequent_indent=" " * 10)
    for dotted, value, spec in walk(command.schema()):
        if not re.match(command.keys, dotted):
            continue
        allowed = f" ({'|'.join(spec['choices'])})" if spec["choices"] else ""
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
        raise ConfigError(f"--config: {path} is not YAML: {first_line(error)}") from None
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


def _choice_file(command: Command, group: str, name: Any) -> Path:
    if str(name) not in _choice_names(command, group):
        raise ConfigError(f"{group}: got {name!r}; allowed: {', '.join(_choice_names(command, group))}")
    return CONF / command.choices[group] / f"{name}.yaml"


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        raise ConfigError(f"{text}: not understood; allowed: key=value")
    return name, value


def _value(command: Command, name: str, text: str) -> Any:
    """Return the value of an override, read as YAML, so that lists and numbers work; text for a string is taken as it
    is.
    """
    kind = _types(command.schema).get(name)
    if not text:
        return [] if kind not in (int, float, str, bool) else "" if kind is str else None
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]),
                                       resolve=False)["value"]  # type: ignore[index,call-overload]
    except Exception as error:  # as in _read
        if kind is str:
            return text
        raise ConfigError(f"{name}: {text!r} is not a YAML value: {first_line(error)}") from None
    return text if kind is str and not isinstance(value, str) and value is not None else value


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


def _set(command: Command, config: Any, dotted: str, value: Any, origin: str) -> None:
    types, choices = _types(command.schema), _choices_of(command, dotted)
    if dotted in GONE:
        neutral, instead = GONE[dotted]
        if (value in neutral) if neutral else (origin != COMMAND_LINE):
            return
        raise ConfigError(f"{dotted}: got {value!r} ({origin}), which no longer exists; allowed: {instead}")
    if dotted not in types:
        other = [known.name for known in (PREPARE_DATA, EVALUATE) if dotted in _types(known.schema)]
        if other and issubclass(command.schema, Config):
            if origin != COMMAND_LINE:  # files are shared
                return
            raise ConfigError(f"{dotted}: no key of {command.name} ({origin}); allowed: in {other[0]} alone")
        inside = [name for name in types if name.startswith(f"{dotted}.")]
        if inside:
            raise ConfigError(f"{dotted}: a section, not a key ({origin}); allowed: {', '.join(inside)}")
        section = dotted.rpartition(".")[0]
        known = [name for name in types if re.match(command.keys, name)]
        near = [name for name in known if section and name.rpartition(".")[0] == section]
        near = near or [*command.own, *sorted({name.split(".")[0] for name in known})]
        raise ConfigError(f"{dotted}: no such key ({origin}); allowed: {', '.join(near)}")
    kind = types[dotted]
    if kind == list[str] and isinstance(value, str):  # a list of one, or several without brackets
        value = [name.strip() for name in value.split(",")]
    allowed = _allowed(choices, kind)
    if value is None:
        raise ConfigError(f"{dotted}: got nothing ({origin}); allowed: {allowed}")
    if str(value).lower() in ("true", "false") and "true" in choices:
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


@cache
def _types(owner: Any = Config, prefix: str = "") -> dict[str, Any]:
    """{dotted key: its type} of the schema."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(owner).items():
        section = isinstance(kind, type) and is_dataclass(kind)
        found |= _types(kind, f"{prefix}{name}.") if section else {f"{prefix}{name}": kind}
    return found


def _allowed(choices: tuple[str, ...], kind: Any) -> str:
    if choices:
        return ", ".join(choices)
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false",
             list[str]: "a list of names"}
    if kind in names:
        return names[kind]
    inner = get_args(kind)[0]
    keys = [item.name for item in fields(inner)] if is_dataclass(inner) else []
    return f"a list of {{{', '.join(f'{name}: ...' for name in keys)}}}" if keys else "a list of numbers"


def _choices_of(command: Command, dotted: str) -> tuple[str, ...]:
    specs = {name: spec for name, _, spec in walk(command.schema())}
    found: tuple[str, ...] = specs[dotted]["choices"] if dotted in specs else ()
    return found


def _conceal(node: Any) -> None:
    """Hide the credentials of every URI in a configuration, or in a part of it."""
    for item in fields(node):
        value = getattr(node, item.name)
        for inner in value if isinstance(value, list) else [value]:
            if is_dataclass(inner):
                _conceal(inner)
        setattr(node, item.name, concealed(value))
