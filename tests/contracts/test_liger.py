"""Our calls of Liger against the table of what it has, and the table against its wheel."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator

import pytest

from tests.contracts.calls import ROOT, signature_of
from tests.contracts.liger_operators import TABLE
from tests.contracts.wheels import wheel_of

KERNEL = ROOT / "dhp_ray" / "model" / "kernels" / "cuda.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel that the extra `cuda` asks for, as a file: without a device it cannot be imported."""
    with wheel_of("liger-kernel", tmp_path_factory.mktemp("wheel")) as opened:
        yield opened


def test_our_calls_fit_the_table() -> None:
    """By position: `apply` of an autograd function takes nothing else."""
    calls = [node for node in ast.walk(ast.parse(KERNEL.read_text()))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "apply"]
    called = {ast.unparse(call.func).removesuffix(".apply"): call for call in calls}
    assert called.keys() == TABLE.keys()
    for name, call in called.items():
        assert not call.keywords
        signature_of(TABLE[name]["signature"]).bind(*call.args)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_the_wheel_has_the_functions(wheel: zipfile.ZipFile, name: str) -> None:
    module = ast.parse(wheel.read(TABLE[name]["file"]))
    function = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
    forward = next(node for node in function.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    names = [argument.arg for argument in forward.args.args[1:]]
    defaults = dict(zip(reversed(names), (ast.literal_eval(value) for value in reversed(forward.args.defaults))))
    wanted = signature_of(TABLE[name]["signature"]).parameters
    assert names[: len(wanted)] == list(wanted)
    assert {key: parameter.default for key, parameter in wanted.items() if key in defaults} == {
        key: defaults[key] for key in wanted if key in defaults}
    assert set(names[len(wanted):]) <= defaults.keys(), "further arguments have defaults"
    assert f"import {name}" in wheel.read("liger_kernel/ops/__init__.py").decode()
