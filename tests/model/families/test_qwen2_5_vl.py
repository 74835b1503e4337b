from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from dhp_ray.model.build import build_model
from dhp_ray.model.families.qwen2_5_vl import Qwen25VL
from dhp_ray.model.files import ModelError
from tests.one_rank import errors_on_one_rank
from tests.packs import (
    TOKEN_IDS,
    make_sample,
    plain_copy,
    plain_loss,
    relative_errors,
    rough_model,
    save_model,
    stored_values,
)
from tests.ranks import run_ranks

GRIDS = [(1, 4, 8), (1, 12, 10), (2, 6, 4), (1, 2, 2)]


def one_rank(rank: int, tie: bool) -> dict[str, float]:
    """Samples with no, one and three images."""
    return errors_on_one_rank(rough_model(tie_word_embeddings=tie), {
        "text": [40], "image": [9, (1, 8, 12), 31], "images": [3, (1, 4, 4), 8, (1, 12, 6), (2, 4, 4), 20]})


@pytest.mark.parametrize("tie", [True, False])
def test_one_rank_equals_plain_transformers(tie: bool) -> None:
    errors = run_ranks(one_rank, 1, tie)[0]
    assert max(errors.values()) < 1e-5, errors


def test_images_encoded_together_equal_images_encoded_one_by_one() -> None:
    adapter = rough_model()
    pixels = [torch.randn(time * height * width, adapter.patch_dim) for time, height, width in GRIDS]
    with torch.no_grad():
        together = adapter.encode(torch.cat(pixels), adapter.encoder_arguments(GRIDS))
        alone = torch.cat([adapter.encode(patches, adapter.encoder_arguments([grid]))
                           for patches, grid in zip(pixels, GRIDS)])
    assert together.shape == (sum(time * height * width for time, height, width in GRIDS) // adapter.merge_area,
                              adapter.feature_width)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert together.std() > 0.01


def test_no_image_gives_no_features() -> None:
    adapter = rough_model()
    features = adapter.encode(torch.empty(0, adapter.patch_dim), adapter.encoder_arguments([]))
    assert features.shape == (0, adapter.feature_width)


def test_positions_are_those_of_the_paper() -> None:
    adapter = rough_model()
    image = TOKEN_IDS["image"]
    ids = torch.tensor([7, 7, *[image] * 6, 8, 8])  # a grid of 2 x 3 vision tokens after two of text
    positions = adapter.positions(ids, torch.tensor([[1, 4, 6]]))
    assert positions.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
                                  [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]]
    assert adapter.positions(torch.arange(4), torch.empty(0, 3, dtype=torch.long)).tolist() == [[0, 1, 2, 3]] * 3


def test_positions_of_a_video_keep_its_time() -> None:
    adapter = rough_model()
    video, image = TOKEN_IDS["video"], TOKEN_IDS["image"]
    # three steps in time of 1 x 2 vision tokens, 1.5 s apart; then 1 x 2 of an image
    ids = torch.tensor([7, *[video] * 6, 8, *[image] * 2, 9])
    positions = adapter.positions(ids, torch.tensor([[3, 2, 4], [1, 2, 4]]), torch.tensor([1.5, 0.0]))
    step = int(1.5 * adapter.module.config.vision_config.tokens_per_second)
    after = 1 + 2 * step + 1  # the largest position of the video, plus one
    assert positions[0].tolist() == [0, 1, 1, 1 + step, 1 + step, 1 + 2 * step, 1 + 2 * step,
                                     after, after + 1, after + 1, after + 3]
    assert positions[2].tolist() == [0, 1, 2, 1, 2, 1, 2, after, after + 1, after + 2, after + 3]


def test_saved_folder_gives_plain_transformers_the_same_loss(tmp_path: Path) -> None:
    for tie in (True, False):
        adapter = rough_model(tie_word_embeddings=tie)
        payload = make_sample("saved", [9, (1, 8, 12), 31])[1]
        expected = plain_loss(plain_copy(adapter), payload)[0].item()
        folder = tmp_path / f"tied_{tie}"
        parameters = {name: parameter.detach().clone() for name, parameter in adapter.module.named_parameters()}
        adapter.module.to(torch.bfloat16)  # what the engine holds in bf16 is not what is saved
        save_model(adapter, folder, parameters)
        module, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        assert module.dtype == torch.float32
        assert plain_loss(module, payload)[0].item() == pytest.approx(expected, rel=1e-6)
        again = stored_values(build_model("", str(folder), None, 0))
        assert max(relative_errors(again, parameters).values()) == 0.0
        assert {file.suffix for file in folder.iterdir()} == {".json", ".safetensors"}


def test_parts_and_decay() -> None:
    adapter = rough_model()
    names = [name for name, _ in adapter.module.named_parameters()]
    assert adapter.is_vision("model.visual.merger.mlp.0.weight")
    assert not adapter.is_vision("model.language_model.embed_tokens.weight")
    assert {adapter.is_vision(name) for name in names} == {True, False}
    kept = [name for name in names if not adapter.decays(name)]
    assert all(name.endswith(".bias") or "norm" in name or "ln_q" in name for name in kept)
    assert not any(name.endswith(".bias") or "norm" in name or "ln_q" in name for name in set(names) - set(kept))
    adapter.freeze(["vision"])
    assert not adapter.trains("vision")
    assert adapter.trains("language")
    adapter.freeze(["language"])
    assert not any(parameter.requires_grad for parameter in adapter.module.parameters())


@pytest.mark.parametrize(("change", "message"), [
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_attention"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1; allowed: 0"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 1e4, "mrope_section": [4, 6, 6],
                          "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}}, "rope_type is 'longrope'"),
])
def test_what_is_not_computed_exactly_is_refused(change: dict[str, object], message: str) -> None:
    text = rough_model().module.config.text_config.to_dict()
    del text["layer_types"]
    config = Qwen2_5_VLConfig(text_config=text | change, vision_config={"depth": 1, "hidden_size": 64})
    with pytest.raises(ModelError, match=f"^model: [^\n]*{message}"):
        Qwen25VL.check(config)
