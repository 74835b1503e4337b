"""Norms, rotations and SwiGLU by fused operators: what the model computes with them is what transformers does.

The operators themselves run on their devices alone. Here they are in plain torch, behind their own signatures
(tests/contracts); on a CUDA device with Liger its own are compared.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from dhp_ray.comm.device import CPU
from dhp_ray.comm.transport import Transport
from dhp_ray.data.families import preset_token_ids
from dhp_ray.model.build import model_shape
from dhp_ray.model.fused import (
    FusedAttention,
    FusedMLP,
    FusedNorm,
    operators_of,
    unfused_notice,
    unfused_states_notice,
)
from dhp_ray.model.kernels import cuda, npu
from dhp_ray.train.collate import collate
from dhp_ray.train.pack import pack_loss
from tests.contracts.liger_operators import liger_ops
from tests.contracts.npu_operators import torch_npu
from tests.packs import (
    make_pack,
    make_sample,
    plain_copy,
    plain_gradients,
    plain_loss,
    relative_errors,
    rough_model,
)
from tests.ranks import run_ranks

OPERATORS = {"npu": npu, "liger": cuda}


def stand_in(kind: str) -> None:
    """The operators in plain torch, where `import` finds them."""
    if kind == "npu":
        sys.modules["torch_npu"] = torch_npu()  # type: ignore[assignment]
    else:
        sys.modules["liger_kernel"] = ModuleType("liger_kernel")
        sys.modules["liger_kernel.ops"] = liger_ops()  # type: ignore[assignment]


def fused(rank: int, kind: str, recomputes: bool) -> tuple[float, dict[str, float], bool]:
    """Errors of loss and gradients against plain transformers, over text and images; whether names are the same."""
    stand_in(kind)
    adapter = rough_model()
    plain = plain_copy(adapter)
    names = [name for name, _ in adapter.module.named_parameters()]
    adapter.fuse(OPERATORS[kind])
    if recomputes:
        adapter.set_activation_checkpointing()
    sample, payload = make_sample("images", [3, (1, 4, 4), 8, (1, 12, 6), (2, 4, 4), 20])
    link = Transport("pool", 0, 1, CPU, 4, timedelta(seconds=30)).link((0,), 0)
    loss = pack_loss(adapter, collate(make_pack(0, [0], [sample]), {"images": payload}, 0, adapter), link)
    loss.backward()
    mean, count = plain_loss(plain, payload)
    _, wanted = plain_gradients(plain, [payload])
    found = {name: parameter.grad for name, parameter in adapter.module.named_parameters()}
    return (abs(loss.item() / count - mean.item()) / mean.item(), relative_errors(found, wanted),
            [name for name, _ in adapter.module.named_parameters()] == names)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_loss_and_gradients_are_those_of_transformers(kind: str, recomputes: bool) -> None:
    loss_error, errors, same_names = run_ranks(fused, 1, kind, recomputes)[0]
    assert loss_error < 1e-6
    assert max(errors.values()) < 1e-5, errors
    assert same_names


def test_every_norm_rotation_and_mlp_is_replaced() -> None:
    adapter = rough_model()
    plain = adapter.module
    num_norms = sum("RMSNorm" in type(module).__name__ for module in plain.modules())
    num_mlps = sum(hasattr(module, "act_fn") for module in plain.modules())
    num_layers = len(plain.model.language_model.layers)  # type: ignore[arg-type]
    adapter.fuse(npu)
    modules = list(plain.modules())
    assert sum(isinstance(module, FusedNorm) for module in modules) == num_norms > 0
    assert sum(isinstance(module, FusedMLP) for module in modules) == num_mlps > 0
    assert sum(isinstance(module, FusedAttention) for module in modules) == num_layers
    blocks: Any = plain.model.visual.blocks
    assert all(block.attn.operators is npu for block in blocks)


def test_what_no_operator_computes_stays() -> None:
    """Another activation; rotations that are scaled, as yarn's are: npu_rotary_mul takes none beyond 1."""
    adapter = rough_model()
    language: Any = adapter.module.model.language_model
    language.config.hidden_act, language.rotary_emb.attention_scaling = "gelu", 1.2
    adapter.fuse(npu)
    assert not any(isinstance(module, (FusedMLP, FusedAttention)) for module in language.modules())
    assert isinstance(language.norm, FusedNorm)


def test_operators_are_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert operators_of("cpu") is None
    assert operators_of("npu") is npu
    monkeypatch.setattr("dhp_ray.model.fused.find_spec", lambda name: None)
    assert operators_of("cuda") is None
    assert "pip install -e '.[cuda]'" in unfused_notice("cuda")
    assert "\n" not in unfused_notice("cuda")
    assert unfused_notice("cpu") == unfused_notice("npu") == ""
    monkeypatch.setattr("dhp_ray.model.fused.find_spec", lambda name: name == "liger_kernel")
    assert operators_of("cuda") is cuda
    assert unfused_notice("cuda") == ""


def test_a_model_with_states_is_told_that_no_kernel_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with_states, without = (model_shape(preset, "", preset_token_ids(preset)).language
                            for preset in ("tiny_qwen3_5", "tiny_qwen3_vl"))
    monkeypatch.setattr("dhp_ray.model.kernels.cuda.find_spec", lambda name: None)
    cuda.has_gated_delta_rule.cache_clear()
    assert "pip install -e '.[cuda]'" in unfused_states_notice("cuda", with_states)
    assert "\n" not in unfused_states_notice("cuda", with_states)
    assert unfused_states_notice("cuda", without) == unfused_states_notice("cpu", with_states) == ""
    monkeypatch.setattr(cuda, "has_gated_delta_rule", lambda: True)
    assert unfused_states_notice("cuda", with_states) == ""


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and find_spec("liger_kernel")), reason="needs CUDA and Liger")
@pytest.mark.parametrize("heads", [2, 16])
def test_operators_of_liger_equal_the_definition_on_a_device(heads: int) -> None:
    """In bf16, against fp64: outputs and gradients."""
    torch.manual_seed(0)
    q, k, x, up = (torch.randn(1, heads, 50, 80, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    weight, angles = torch.randn(80, device="cuda", dtype=torch.bfloat16), torch.randn(1, 50, 40, device="cuda")
    cos, sin = (torch.cat((table, table), -1).bfloat16() for table in (angles.cos(), angles.sin()))
    ops = liger_ops()

    def results(inputs: list[torch.Tensor], plain: bool) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        a, b, y, z, w = (leaf * 1 for leaf in leaves)
        tables = (cos.to(a.dtype), sin.to(a.dtype))
        rotated = ops.LigerRopeFunction.apply(a, b, *tables) if plain else cuda.rotary(a, b, *tables)
        normed = (ops.LigerRMSNormFunction.apply(y, w, 1e-6, 0.0, "llama", False) if plain
                  else cuda.rms_norm(y, w, 1e-6))
        product = ops.LigerSiLUMulFunction.apply(y, z) if plain else cuda.swiglu(y * 1, z)
        outputs = [*rotated, normed, product]
        slope = torch.linspace(-1, 1, 80, device="cuda", dtype=a.dtype)
        torch.stack([(output * slope).sum() for output in outputs]).sum().backward()
        return [*outputs, *(leaf.grad for leaf in leaves)]  # type: ignore[misc]

    wide = [tensor.double() for tensor in (q, k, x, up, weight)]
    for found, wanted in zip(results([q, k, x, up, weight], False), results(wide, True)):
        torch.testing.assert_close(found.double(), wanted, rtol=3e-2, atol=3e-2 * wanted.abs().max().item())
