"""Any override and any file: a valid configuration, or an error of one line."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dhp_ray.config import CHOICES, Config, ConfigError, check, dump, load, walk
from tests.test_config import KEYS

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.dates(),
                    st.sampled_from(["${x}", "???", "${", "auto"]))
inner_names = st.one_of(st.text(max_size=5), st.integers())
values = st.recursive(scalars, lambda inner: st.one_of(st.lists(inner, max_size=3),
                                                       st.dictionaries(inner_names, inner, max_size=3)), max_leaves=5)
names = st.one_of(st.sampled_from([*KEYS, *CHOICES, "run", "data.synthetic", "choices", "choices.model"]),
                  st.text(max_size=12))
fuzz = settings(max_examples=50, deadline=None,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def loads_or_is_refused(argv: list[str]) -> Config | None:
    """A valid configuration, or None after an error of one line that begins with a key. Any other exception fails the
    test.
    """
    said = ""
    try:
        config = load(argv)
    except ConfigError as error:
        said = str(error)
    if said:
        assert re.fullmatch(r"\S.*: \S.*", said)
        return None
    check(config)
    for _, value, _ in walk(config):
        assert not isinstance(value, float) or math.isfinite(value)
    return config


@fuzz
@given(name=names, text=st.one_of(st.text(max_size=20),
                                  values.map(lambda value: yaml.safe_dump(value, default_flow_style=True).strip())))
def test_any_override_loads_or_is_one_line(bare: list[str], tmp_path: Path, name: str, text: str) -> None:
    config = loads_or_is_refused([*bare, f"{name}={text}"])
    if config:
        path = tmp_path / "again.yaml"
        path.write_text(dump(config), encoding="utf-8", newline="")
        assert load(["--config", str(path)]) == config


@fuzz
@given(tree=st.dictionaries(names, values, max_size=3))
def test_any_file_loads_or_is_one_line(tmp_path: Path, tree: dict[str, Any]) -> None:
    nested: dict[str, Any] = {"model": {"preset": "tiny"}}
    for name, value in tree.items():
        section, _, key = name.rpartition(".")
        place = nested.setdefault(section, {}) if section else nested
        if isinstance(place, dict):
            place[key] = value
    path = tmp_path / "fuzz.yaml"
    path.write_text(yaml.safe_dump(nested), encoding="utf-8")
    loads_or_is_refused(["--config", str(path)])


@fuzz
@given(content=st.binary(max_size=60))
def test_any_bytes_load_or_are_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(content)
    loads_or_is_refused(["--config", str(path)])
