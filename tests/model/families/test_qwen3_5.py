"""Qwen3.5 beside transformers on one rank: gated delta nets, gated attention, the encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForConditionalGeneration

from dhp_ray.model.build import build_model
from dhp_ray.model.families.qwen3_5 import Qwen35
from dhp_ray.model.files import ModelError
from dhp_ray.train.collate import collate
from dhp_ray.train.pack import pack_loss
from tests.one_rank import VIDEO, errors_on_one_rank, link_of_one_rank
from tests.packs import make_pack, make_sample, plain_copy, rough_model, save_model
from tests.ranks import run_ranks

PRESET, EXPERTS = "tiny_qwen3_5", "tiny_qwen3_5_moe"


def one_rank(rank: int, preset: str, tie: bool, fused: bool) -> dict[str, float]:
    samples = {"token": [2], "text": [200], "images": [3, (1, 4, 4), 8, (1, 12, 6), (2, 4, 4), 20],
               "video": [9, VIDEO, 31, (1, 4, 8), 7]}
    return errors_on_one_rank(rough_model(tie_word_embeddings=tie, preset=preset), samples, preset, fused)


@pytest.mark.parametrize(("preset", "tie", "fused"), [
    (PRESET, True, False), (PRESET, False, True), (EXPERTS, False, True),
    pytest.param(EXPERTS, True, False, marks=pytest.mark.slow)])
def test_one_rank_equals_transformers(preset: str, tie: bool, fused: bool) -> None:
    errors = run_ranks(one_rank, 1, preset, tie, fused)[0]
    assert max(errors.values()) < 2e-5, errors


def pack_and_alone(rank: int, preset: str) -> list[float]:
    """How far hidden states of each sequence in a pack are from those of the sequence alone, in fp64."""
    adapter = rough_model(preset=preset)
    adapter.module.double()
    made = [make_sample(name, [length], preset=preset) for name, length in (("a", 2), ("b", 130), ("c", 1), ("d", 64))]
    payloads = {sample.id: payload for sample, payload in made}
    samples, found = [sample for sample, _ in made], list[torch.Tensor]()
    adapter.loss_sum = lambda hidden, *_: found.append(hidden) or hidden.sum()  # type: ignore
    for pack in (samples, *([sample] for sample in samples)):
        inputs = collate(make_pack(0, [0], pack), payloads, 0, adapter)
        pack_loss(adapter, inputs, link_of_one_rank())
    together, *alone = found
    parts = together.split([sample.num_tokens for sample in samples])
    return [float((here - there).abs().max()) for here, there in zip(parts, alone, strict=True)]


@pytest.mark.parametrize(("preset", "tolerance"), [(PRESET, 1e-12), (EXPERTS, 1e-5)])  # routers compute in fp32
def test_a_pack_is_its_sequences_alone(preset: str, tolerance: float) -> None:
    assert max(run_ranks(pack_and_alone, 1, preset)[0]) < tolerance


def test_a_folder_keeps_the_type_of_each_tensor_and_tensors_that_the_model_does_not_have(tmp_path: Path) -> None:
    """As published: bf16, but for decays and gated norms in fp32; a head that predicts a further token is copied. What
    was trained loads in transformers under equal keys.
    """
    adapter = rough_model(preset=PRESET)
    given = {name: parameter.detach() for name, parameter in adapter.module.named_parameters()}
    save_model(adapter, tmp_path / "given", given)
    file = tmp_path / "given" / "model.safetensors"
    further = {"mtp.fc.weight": torch.randn(8, 16).bfloat16(), "mtp.norm.weight": torch.randn(8)}
    stored = {name: value if name.endswith(("A_log", "linear_attn.norm.weight")) else value.bfloat16()
              for name, value in load_file(file).items()} | further
    save_file(stored, file, metadata={"format": "pt"})
    again = build_model("", str(tmp_path / "given"), None, 0)
    trained = {name: value + 1.001 for name, value in given.items()}
    save_model(again, tmp_path / "made", trained)
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert made.keys() == stored.keys()
    assert all(torch.equal(made[name], value) for name, value in further.items())
    assert {name: value.dtype for name, value in made.items()} == {name: value.dtype for name, value in stored.items()}
    module, report = Qwen3_5ForConditionalGeneration.from_pretrained(
        tmp_path / "made", dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    assert all(torch.equal(value, trained[name].to(stored[name].dtype).float())
               for name, value in module.named_parameters())


@pytest.mark.parametrize(("change", "words"), [
    ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention; allowed: full_attention, linear_attention"),
    ({"linear_num_key_heads": 3}, "linear_num_value_heads is 4; allowed: multiples of 3, its linear_num_key_heads"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu' with gated delta nets; allowed: silu")])
def test_what_cannot_be_trained_is_refused(change: dict[str, object], words: str) -> None:
    config = plain_copy(rough_model(preset=PRESET)).config
    for name, value in change.items():
        setattr(config.text_config, name, value)
    with pytest.raises(ModelError, match=f"^model: [^\n]*{words}[^\n]*$"):
        Qwen35.check(config)
