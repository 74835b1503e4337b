"""Our call of flash-linear-attention against the table of what it has, and the table against its wheel."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dhp_ray.model.delta_rule import CHUNK, EPSILON
from tests.contracts.calls import ROOT, signature_of
from tests.contracts.fla_operators import TABLE
from tests.contracts.wheels import wheel_of


def test_our_call_fits_the_table() -> None:
    module = ast.parse((ROOT / "dhp_ray" / "model" / "kernels" / "cuda.py").read_text(encoding="utf-8"))
    [call] = [node for node in ast.walk(module)
              if isinstance(node, ast.Call) and ast.unparse(node.func) == "chunk_gated_delta_rule"]
    signature = signature_of(TABLE["signature"])
    bound = signature.bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})
    assert list(signature.parameters)[-1] in bound.arguments
    assert TABLE["chunk"] == CHUNK


@pytest.mark.slow
def test_the_wheel_has_the_function(tmp_path: Path) -> None:
    with wheel_of("fla-core", tmp_path) as wheel:
        module = ast.parse(wheel.read(TABLE["file"]))
        norm = wheel.read("fla/modules/norm/l2norm.py").decode()
        exported = wheel.read("fla/ops/gated_delta_rule/__init__.py").decode()
    [function] = [node for node in module.body
                  if isinstance(node, ast.FunctionDef) and node.name == "chunk_gated_delta_rule"]
    names = [argument.arg for argument in function.args.args]
    defaults = dict(zip(reversed(names), (ast.literal_eval(value) for value in reversed(function.args.defaults))))
    wanted = signature_of(TABLE["signature"]).parameters
    assert names[: len(wanted)] == list(wanted)
    assert {name: each.default for name, each in wanted.items() if each.default is not each.empty} == {
        name: defaults[name] for name in wanted if name in defaults}
    assert set(names[len(wanted):]) <= defaults.keys(), "further arguments have defaults"
    assert f"kwargs.pop('chunk_size', {TABLE['chunk']})" in ast.unparse(function)
    assert "import chunk_gated_delta_rule" in exported
    assert f"def l2norm_fwd(x: torch.Tensor, eps: float = {EPSILON}".replace("1e-06", "1e-6") in norm
