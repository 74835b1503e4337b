from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from dhp_ray import compatibility
from tests.ranks import run_ranks

PACKAGE = Path(compatibility.__file__).parent
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if path != Path(compatibility.__file__))


def reduced_and_gathered(rank: int) -> tuple[list[float], list[float]]:
    """What two ranks get, each of its own rows 1, 2 or 10, 20; a warning fails."""
    warnings.simplefilter("error")
    mine, whole = torch.empty(1), torch.empty(2)
    compatibility.reduce_scatter_single(mine, torch.tensor([1.0, 2.0]) * 10**rank)
    work = compatibility.all_gather_single(whole, mine, group=None, async_op=True)
    assert work is not None
    work.wait()
    return mine.tolist(), whole.tolist()


def test_collectives_reduce_and_gather() -> None:
    assert run_ranks(reduced_and_gathered, 2) == [([11.0], [11.0, 22.0]), ([22.0], [11.0, 22.0])]


class Layer(nn.Module):
    """What a model of transformers is asked; `called` is how."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[str, object]] = []

    def disable_input_require_grads(self) -> None:
        self.called.append(("disable_input_require_grads", None))


class Newer(Layer):
    def activation_checkpointing_enable(self, options: object) -> None:
        self.called.append(("activation_checkpointing_enable", options))

    def gradient_checkpointing_enable(self, options: object) -> None:
        raise AssertionError("the newer one warns of this name")


class Older(Layer):
    def gradient_checkpointing_enable(self, options: object) -> None:
        self.called.append(("gradient_checkpointing_enable", options))


@pytest.mark.parametrize(("kind", "name"), [(Newer, "activation_checkpointing"), (Older, "gradient_checkpointing")])
def test_activations_are_checkpointed_by_the_name_that_there_is(kind: type[Layer], name: str) -> None:
    model = kind()
    contexts = object()
    compatibility.checkpoint_activations(model, contexts)
    assert model.called == [(f"{name}_enable", {"use_reentrant": False, "context_fn": contexts}),
                            ("disable_input_require_grads", None)]


def test_no_other_module_asks_for_a_version() -> None:
    """Nor looks whether torch or transformers has a name."""
    found = []
    for path in OTHERS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            asks = isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.__version__",
                                                                            "transformers.__version__")
            looks = (isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr")
                     and ast.unparse(node.args[0]).partition(".")[0] in ("torch", "dist", "transformers"))
            if asks or looks:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert found == []
