"""Settings of `dhp_ray.fit` as Python's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dhp_ray.config import ConfigError, load
from dhp_ray.runtime.job.fit import config_of

WORDS = ["data.format=synthetic", "data.path=unused", "run.steps=7", "train.freeze=[vision]", "batch.global_samples=4"]


@pytest.mark.parametrize("overrides", [WORDS, tuple(WORDS), {
    "data.format": "synthetic", "data.path": Path("unused"), "run.steps": np.int64(7),
    "train.freeze": [np.str_("vision")], "batch.global_samples": np.uint8(4)}])
def test_values_are_those_of_the_command_line(overrides: Any) -> None:
    assert config_of(overrides) == load(WORDS)


@pytest.mark.parametrize(("overrides", "line"), [
    ({"data.path": None}, "data.path: got None; allowed: a string, number, bool, path, or a list or mapping of these"),
    ({"train.freeze": [None]}, "train.freeze: got [None]; "),
    ({"data.sources": [{"path": None}]}, "data.sources: got [{'path': None}]; "),
    ({"run.steps": object}, "run.steps: got <class 'object'>; "),
    ({"train.freeze": {"vision"}}, "train.freeze: got {'vision'}; "),
    ({"run.dir": b"mine"}, "run.dir: got b'mine'; "),
    ("run.dir=mine", "overrides: got 'run.dir=mine'; allowed: a list of key=value words, or values by key"),
    ([Path("run.dir=mine")], "overrides: got [PosixPath('run.dir=mine')]; ")])
def test_what_no_word_can_say_is_one_line(overrides: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(overrides)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
