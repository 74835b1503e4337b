from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import InternVLConfig, InternVLForConditionalGeneration

from dhp_ray.model.build import build_model
from dhp_ray.model.families.internvl import InternVL
from dhp_ray.model.files import ModelError
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.train.collate import check_payload
from tests.one_rank import VIDEO, errors_on_one_rank
from tests.packs import (
    TOKEN_IDS,
    make_sample,
    plain_copy,
    plain_loss,
    relative_errors,
    rough_model,
    save_model,
    stored_values,
    tiles_of,
)
from tests.ranks import run_ranks

PRESET = "tiny_internvl"


def changed(**values: Any) -> InternVLConfig:
    """The tiny model's configuration with other values, of the sections `text` and `vision` or of the whole."""
    tree = build_model(PRESET, "", TOKEN_IDS, 0).module.config.to_dict()
    for section in ("text", "vision"):
        tree[f"{section}_config"] |= values.pop(section, {})
    return InternVLConfig.from_dict(tree | values)


def over_qwen3() -> LanguageModel:
    """As InternVL3.5 is: norms of heads in the language model; here also in the encoder, whose norms are RMS norms. And
    with frequencies that transformers changes for long sequences, as InternVL3's.
    """
    text = {"model_type": "qwen3", "head_dim": 32, "attention_bias": False, "max_position_embeddings": 90,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    module = InternVLForConditionalGeneration(changed(text=text, vision={"use_qk_norm": True, "norm_type": "rms_norm"}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.06)
    return InternVL(module)


def one_rank(rank: int, qwen3: bool, fused: bool) -> dict[str, float]:
    """Text, images, a video in two pieces beside an image."""
    samples = {"text": [40], "images": [3, (1, 4, 4), 8, (5, 4, 4), 20], "video": [9, VIDEO, 31, (1, 4, 4), 7]}
    return errors_on_one_rank(over_qwen3() if qwen3 else rough_model(preset=PRESET), samples, PRESET, fused)


@pytest.mark.parametrize(("qwen3", "fused"), [(False, False), (True, False), (True, True)])
def test_one_rank_equals_what_transformers_computes(qwen3: bool, fused: bool) -> None:
    errors = run_ranks(one_rank, 1, qwen3, fused)[0]
    assert max(errors.values()) < 1e-5, errors


def test_features_are_those_of_transformers() -> None:
    adapter = rough_model(preset=PRESET)
    grids = [(3, 4, 4), (1, 4, 4)]
    pixels = torch.randn(4 * 16, adapter.patch_dim)
    plain: Any = plain_copy(adapter)
    wanted = plain.model.get_image_features(pixel_values=tiles_of(pixels, plain), vision_feature_layer=-1,
                                            vision_feature_select_strategy="default").pooler_output
    found = adapter.encode(pixels, adapter.encoder_arguments(grids))
    torch.testing.assert_close(found, wanted.flatten(0, 1), rtol=1e-5, atol=1e-5)
    assert found.shape == (16, adapter.feature_width)
    assert adapter.encode(pixels[:0], adapter.encoder_arguments([])).shape == (0, adapter.feature_width)
    assert adapter.smallest_grid == (1, 4, 4)
    with pytest.raises(ValueError, match="allowed: tiles of 4 x 4 patches"):
        adapter.encoder_arguments([(1, 4, 6)])


def test_a_sequence_for_which_frequencies_would_change_is_refused() -> None:
    adapter = over_qwen3()
    assert rough_model(preset=PRESET).longest_sequence is None
    assert adapter.longest_sequence == 90
    sample, payload = make_sample("long", [91], preset=PRESET)
    check_payload(*make_sample("fits", [90], preset=PRESET), adapter)
    with pytest.raises(ValueError, match=r"^sample long: 91 tokens; [^\n]* the model has positions for 90 \(max_pos"):
        check_payload(sample, payload, adapter)


def test_each_frame_of_a_video_is_a_run_of_tokens() -> None:
    adapter = rough_model(preset=PRESET)
    assert adapter.vision_runs((3, 4, 4), True) == (4, 4, 4)
    assert adapter.vision_runs((3, 4, 4), False) == (12,)
    assert adapter.positions(torch.tensor([1, 261, 261, 2]), torch.tensor([[1, 4, 4]])).tolist() == [[0, 1, 2, 3]] * 3


def test_a_shape_counts_every_parameter() -> None:
    for adapter in (rough_model(preset=PRESET), over_qwen3()):
        shape = adapter.shape
        assert shape.num_parameters() == sum(parameter.numel() for parameter in adapter.module.parameters())


def test_folders_of_both_layouts_of_names(tmp_path: Path) -> None:
    """As transformers saves it, and as it is published."""
    adapter = rough_model(preset=PRESET)
    payload = make_sample("saved", [9, (3, 4, 4), VIDEO, 31], preset=PRESET)[1]
    expected = plain_loss(plain_copy(adapter), payload)[0].item()
    parameters = {name: parameter.detach().clone() for name, parameter in adapter.module.named_parameters()}
    save_model(adapter, tmp_path, parameters)
    module, report = InternVLForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert plain_loss(module, payload)[0].item() == pytest.approx(expected, rel=1e-6)
    weights = load_file(tmp_path / "model.safetensors")
    for begin, old in (("model.language_model.", "language_model.model."), ("model.vision_tower.", "vision_tower."),
                       ("", "")):
        again = stored_values(build_model("", str(tmp_path), None, 0))
        assert max(relative_errors(again, parameters).values()) == 0.0
        weights = {old + name.removeprefix(begin) if name.startswith(begin) else name: value
                   for name, value in weights.items()}
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("change", "message"), [
    ({"vision_feature_layer": -2}, "vision_feature_layer=-2 with vision_feature_select_strategy='default'; allowed"),
    ({"vision": {"attention_dropout": 0.1}}, "attention_dropout is 0.1; allowed: 0"),
    ({"text": {"model_type": "llama"}}, "an InternVL over 'llama'; allowed: qwen2, qwen3"),
])
def test_what_is_not_computed_exactly_is_refused_too(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^model: [^\n]*{message}"):
        InternVL.check(changed(**change))
