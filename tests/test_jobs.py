"""The entry points' own main functions, given anything: an exit status and one line, never a traceback."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_config_fuzz import names, values

ROOT = Path(__file__).parent.parent
PLAN_ARGUMENTS = ["num_ranks", "ranks_per_node", "nodes", "speeds", "sync", "planner", "cost", "out", "lengths",
                  "replay"]
texts = st.text(max_size=20) | values.map(lambda value: yaml.safe_dump(value, default_flow_style=True).strip())
words = st.builds("{}={}".format, names,
                  texts) | st.text(max_size=20) | st.builds("--config={}".format, st.text(max_size=8))
fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def entry(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"jobs_{name}", ROOT / "jobs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ended(main: Callable[[list[str]], int], argv: list[str]) -> tuple[int, str, list[str]]:
    """Exit status, what was printed, and the lines on standard error."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = main(argv)
    return status, output.getvalue(), errors.getvalue().splitlines()


@pytest.mark.parametrize("name", ["train", "prepare_data", "evaluate"])
@fuzz
@given(argv=st.lists(words.filter(lambda word: word not in ("-h", "--help")), max_size=4),
       last=st.sampled_from(["run.steps=-1", "seed=x", "run.resume=maybe"]))
def test_any_overrides_end_in_one_line(name: str, argv: list[str], last: str) -> None:
    """Among them one that is wrong, and comes last, so that nothing starts."""
    status, output, errors = ended(entry(name).main, [*argv, last])
    assert (status, output) == (2, "")
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert ": " in errors[0].removeprefix("error: ")


@fuzz
@given(argv=st.lists(st.builds("{}={}".format, st.sampled_from(PLAN_ARGUMENTS), st.text(max_size=12))
                     | st.text(max_size=12), min_size=1, max_size=4))
def test_any_arguments_of_a_plan_end_in_one_line(argv: list[str]) -> None:
    status, output, errors = ended(entry("plan").main, [word for word in argv if word not in ("-h", "--help")] or ["x"])
    assert (status, output) == (2, "")
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
