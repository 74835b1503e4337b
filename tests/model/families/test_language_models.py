"""Families of text alone, beside transformers on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dhp_ray.model.build import build_model
from dhp_ray.model.families import FAMILIES
from dhp_ray.model.files import ModelError
from tests.one_rank import errors_on_one_rank
from tests.packs import (
    TEXT_PRESETS,
    make_sample,
    plain_copy,
    relative_errors,
    rough_model,
    save_model,
    stored_values,
)
from tests.ranks import run_ranks


def one_rank(rank: int, preset: str, tie: bool, fused: bool) -> dict[str, float]:
    samples = {"token": [2], "text": [40], "long": [300]}
    return errors_on_one_rank(rough_model(tie_word_embeddings=tie, preset=preset), samples, preset, fused)


@pytest.mark.parametrize("preset", TEXT_PRESETS)
@pytest.mark.parametrize(("tie", "fused"), [(True, False), (False, False), (True, True)])
def test_one_rank_equals_transformers(preset: str, tie: bool, fused: bool) -> None:
    errors = run_ranks(one_rank, 1, preset, tie, fused)[0]
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("preset", TEXT_PRESETS)
def test_there_is_no_encoder(preset: str) -> None:
    adapter = rough_model(preset=preset)
    assert (adapter.shape.vision, adapter.shape.num_parameters(without=["language"])) == ((), 0)
    assert not any(map(adapter.is_vision, dict(adapter.module.named_parameters())))
    assert not adapter.trains("vision")
    assert adapter.encode(torch.empty(0, adapter.patch_dim), adapter.encoder_arguments(())).shape == (0, 128)
    assert adapter.units() == list(adapter.language.layers)
    assert adapter.positions(torch.tensor([7, 8, 9]), torch.zeros(0, 3)).tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("preset", TEXT_PRESETS)
def test_a_saved_folder_gives_transformers_the_same_logits(tmp_path: Path, preset: str) -> None:
    adapter = rough_model(preset=preset)
    ids = torch.from_numpy(make_sample("saved", [70], preset=preset)[1].input_ids).long()[None]
    parameters = {name: parameter.detach().clone() for name, parameter in adapter.module.named_parameters()}
    save_model(adapter, tmp_path, parameters)
    assert "dhp_ring" not in (tmp_path / "config.json").read_text()
    module, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(module(ids).logits, plain_copy(adapter)(ids).logits, rtol=0, atol=0)
    again = stored_values(build_model("", str(tmp_path), None, 0))
    assert max(relative_errors(again, parameters).values()) == 0.0


@pytest.mark.parametrize(("preset", "change", "words"), [
    ("tiny_qwen3_moe", {"use_sliding_window": True}, "layers of sliding_attention; allowed: full_attention"),
    ("tiny_qwen3", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0; allowed: at least 1"),
    ("tiny_llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1; allowed: 0"),
    ("tiny_llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type is 'longrope'")])
def test_what_cannot_be_trained_is_refused(preset: str, change: dict[str, object], words: str) -> None:
    config = rough_model(preset=preset).module.config
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=f"^model: [^\n]*{words}[^\n]*$"):
        FAMILIES[config.model_type].check(config)


def test_an_older_file_without_a_part_of_the_configuration(tmp_path: Path) -> None:
    """A config.json as Llama 3 was published with: frequencies in `rope_scaling`, `rope_theta` beside it."""
    adapter = rough_model(preset="tiny_llama")
    save_model(adapter, tmp_path, dict(adapter.module.named_parameters()))
    tree = json.loads((tmp_path / "config.json").read_text())
    rope = tree.pop("rope_parameters")
    tree |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    read = build_model("", str(tmp_path), None, 0)
    assert torch.equal(read.language.rotary_emb.inv_freq, adapter.language.rotary_emb.inv_freq)
