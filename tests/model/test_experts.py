"""Layers with experts beside transformers, and their files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from dhp_ray.model import experts
from dhp_ray.model.build import build_model
from dhp_ray.model.experts import Router
from dhp_ray.model.families import FAMILIES
from dhp_ray.model.files import ModelError, fingerprint
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.recomputation import Keeps, checkpoint_contexts
from dhp_ray.model.weights import Interval
from tests.one_rank import errors_on_one_rank
from tests.packs import (
    EXPERT_PRESETS,
    plain_copy,
    relative_errors,
    rough_model,
    save_model,
    stored_values,
)
from tests.plain_answers import transpose_experts
from tests.ranks import run_ranks


def one_rank(rank: int, preset: str, recomputes: bool) -> dict[str, float]:
    adapter = rough_model(preset=preset)
    if recomputes:
        adapter.set_activation_checkpointing()
    samples = {"token": [2], "text": [40], "images": [5, (1, 4, 6), 9, (1, 8, 6), 20]}
    return errors_on_one_rank(adapter, samples, preset)


@pytest.mark.parametrize(("preset", "recomputes"), [(EXPERT_PRESETS[0], False), (EXPERT_PRESETS[1], True)])
def test_one_rank_equals_transformers(preset: str, recomputes: bool) -> None:
    errors = run_ranks(one_rank, 1, preset, recomputes)[0]
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("shares", [(0.0, 1.0), (1.0, 0.0), (0.25, 0.75)], ids=str)
def test_any_number_of_rows_an_expert(shares: tuple[float, float]) -> None:
    """All tokens to two experts of six, or some to all but one: what comes out, and every gradient, is the loop's over
    experts; an expert without a token has gradients of 0.
    """
    module = plain_copy(rough_model(preset="tiny_qwen3_moe")).model.layers[0].mlp.experts.double()
    torch.manual_seed(0)
    near, far = torch.tensor([4, 1]).expand(40, 2), torch.stack([torch.randperm(5)[:2] for _ in range(40)])
    chosen = torch.cat([near[: int(40 * shares[0])], far[: int(40 * shares[1])]])
    hidden = torch.randn(len(chosen), 128, dtype=torch.float64)
    weights = torch.rand(len(chosen), 2, dtype=torch.float64)
    results = []
    for run in (type(module).forward.__wrapped__, experts.run_experts):
        module.zero_grad()
        inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        out = run(module, inputs[0], chosen, inputs[1])
        out.square().sum().backward()
        results.append({"out": out.detach(), "hidden": inputs[0].grad, "weights": inputs[1].grad,
                        **{name: parameter.grad.clone() for name, parameter in module.named_parameters()}})
    wanted, found = results
    assert max(relative_errors(found, wanted).values()) < 1e-12
    assert not found["gate_up_proj"][5].any()


def test_a_second_run_does_not_choose_again() -> None:
    router = Router(SimpleNamespace(weight=nn.Parameter(torch.randn(6, 8)), top_k=2))
    hidden, runs = torch.randn(10, 8, requires_grad=True), []

    def layer(x: Tensor) -> Tensor:
        _, weights, chosen = router(x)
        runs.append(chosen)
        return weights.sum() + weights.square().sum()

    found = checkpoint(layer, hidden, use_reentrant=False, context_fn=lambda: checkpoint_contexts(Keeps()))
    with torch.no_grad():
        router.weight.neg_()  # as if rounding had changed what is largest
    found.backward()
    assert len(runs) == 2
    assert torch.equal(*runs)
    assert not torch.equal(router(hidden)[2], runs[0])


@pytest.mark.parametrize("preset", EXPERT_PRESETS)
def test_a_saved_folder_gives_transformers_the_same_logits(tmp_path: Path, preset: str) -> None:
    adapter = rough_model(preset=preset)
    parameters = {name: parameter.detach().clone() for name, parameter in adapter.module.named_parameters()}
    save_model(adapter, tmp_path / "ours", parameters)
    plain_copy(adapter).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    loader = AutoModelForCausalLM if preset == "tiny_qwen3_moe" else AutoModelForImageTextToText
    module, report = loader.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    ids = torch.arange(3, 60)[None]
    torch.testing.assert_close(module(ids).logits, plain_copy(adapter)(ids).logits, rtol=1e-4, atol=1e-5)
    again = stored_values(build_model("", str(tmp_path / "ours"), None, 0))
    assert max(relative_errors(again, parameters).values()) == 0.0


def published(folder: Path, preset: str) -> dict[str, Tensor]:
    """A folder as its models are published: Qwen3-VL's experts transposed; returns the module's parameters."""
    adapter = rough_model(preset=preset)
    save_model(adapter, folder, dict(adapter.module.named_parameters()))
    if preset == "tiny_qwen3_vl_moe":
        transpose_experts(folder)
    return {name: parameter.detach() for name, parameter in adapter.module.named_parameters()}


@pytest.mark.parametrize("preset", EXPERT_PRESETS)
def test_any_interval_of_experts_is_read_as_published(tmp_path: Path, preset: str) -> None:
    values = published(tmp_path, preset)
    read = build_model("", str(tmp_path), None, 0).weights
    assert read is not None
    for name, value in values.items():
        size = value.numel()
        for start, stop in ((0, size), (0, 1), (size - 1, size), (size // 3, min(size, 2 * size // 3 + 5)), (7, 7)):
            into = torch.full((stop - start,), torch.nan)
            read.read([Interval(name, start, into)])
            assert torch.equal(into, value.flatten()[start:stop]), name


@pytest.mark.parametrize("preset", EXPERT_PRESETS)
def test_an_export_has_the_form_of_the_folder_that_it_began_with(tmp_path: Path, preset: str) -> None:
    """All trained: every key, shape and type; with a frozen language model its experts byte for byte."""
    published(tmp_path / "given", preset)
    given = load_file(tmp_path / "given" / "model.safetensors")
    save_file({key: tensor.bfloat16() for key, tensor in given.items()}, tmp_path / "given" / "model.safetensors",
              {"format": "pt"})
    adapter = build_model("", str(tmp_path / "given"), None, 0)
    values = {name: 2 * value for name, value in stored_values(adapter).items()}
    save_model(adapter, tmp_path / "trained", values)
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    assert trained.keys() == given.keys()
    for key, tensor in given.items():
        assert trained[key].dtype == torch.bfloat16
        assert torch.equal(trained[key], 2 * tensor.bfloat16()), key
    adapter.freeze(["language"])
    save_model(adapter, tmp_path / "frozen", values)
    frozen = load_file(tmp_path / "frozen" / "model.safetensors")
    assert all(torch.equal(frozen[key], tensor.bfloat16()) for key, tensor in given.items() if ".experts." in key)
    assert fingerprint(str(tmp_path / "frozen"))


@pytest.mark.parametrize(("gone", "words"), [
    ("model.layers.1.mlp.experts.4.up_proj.weight", "lacks 1 weights, the first is model.layers.1.mlp.experts.4.up_"),
    ("model.layers.1.mlp.experts.", "lacks 2 weights, the first is model.layers.1.mlp.experts.down_proj")])
def test_a_missing_expert_is_named(tmp_path: Path, gone: str, words: str) -> None:
    published(tmp_path, "tiny_qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({key: tensor for key, tensor in tensors.items() if not key.startswith(gone)},
              tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=words):
        build_model("", str(tmp_path), None, 0)


def test_experts_in_two_forms_are_refused(tmp_path: Path) -> None:
    values = published(tmp_path, "tiny_qwen3_moe")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: values[name]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"has {name.removesuffix('down_proj')}0.down_proj.weight in {name} too; "):
        build_model("", str(tmp_path), None, 0)


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    published(tmp_path, "tiny_qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.experts.2.down_proj.weight"
    save_file(tensors | {key: tensors[key].t().contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"experts.2.down_proj.weight has shape \(96, 128\); its config.json says \("):
        build_model("", str(tmp_path), None, 0)


@pytest.mark.parametrize(("change", "words"), [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu' with experts; allowed: silu"),
    ({"moe_intermediate_size": 100}, "moe_intermediate_size is 100; allowed: multiples of 8"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7; allowed: 1 to 6, its experts")])
def test_experts_that_cannot_be_trained_are_refused(change: dict[str, object], words: str) -> None:
    config = rough_model(preset="tiny_qwen3_moe").module.config
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=f"^model: [^\n]*{words}$"):
        FAMILIES["qwen3_moe"].check(config)


def dense_layers(layers: list[int]) -> LanguageModel:
    config = rough_model(preset="tiny_qwen3_moe").module.config
    config.mlp_only_layers = layers
    family = FAMILIES["qwen3_moe"]
    return family(family.model_class(config))


def of_two_kinds(rank: int, layers: list[int]) -> dict[str, float]:
    return errors_on_one_rank(dense_layers(layers), {"text": [40]}, "tiny_qwen3_moe")


@pytest.mark.parametrize("layers", [[1], [0, 1, 2]], ids=str)
def test_layers_without_experts_beside_those_with_some(layers: list[int]) -> None:
    adapter = dense_layers(layers)
    kinds = {layer.experts: (layer.count, layer.mlp_width, layer.parameters_used == layer.num_parameters)
             for layer in adapter.shape.language}
    assert kinds == ({0: (3, 352, True)} if len(layers) == 3 else {6: (2, 96, False), 0: (1, 352, True)})
    assert adapter.num_experts == (0 if len(layers) == 3 else 6)
    errors = run_ranks(of_two_kinds, 1, layers)[0]
    assert max(errors.values()) < 1e-5, errors
