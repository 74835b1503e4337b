from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Glm4vForConditionalGeneration

from dhp_ray.model.build import build_model
from dhp_ray.model.families.glm4v import Glm4v
from dhp_ray.model.files import ModelError
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
)
from tests.ranks import run_ranks

PRESET = "tiny_glm4v"
GRIDS = [(1, 4, 8), (1, 12, 10), (2, 6, 4), (1, 2, 2), (1, 30, 16)]


def one_rank(rank: int, tie: bool, fused: bool) -> dict[str, float]:
    """Text, images, a video in two pieces beside an image."""
    samples = {"text": [40], "images": [3, (1, 4, 4), 8, (1, 12, 6), (1, 4, 4), 20],
               "video": [9, VIDEO, 31, (1, 4, 8), 7]}
    return errors_on_one_rank(rough_model(tie_word_embeddings=tie, preset=PRESET), samples, PRESET, fused)


@pytest.mark.parametrize(("tie", "fused"), [
    (False, True), *(pytest.param(tie, False, marks=pytest.mark.slow) for tie in (True, False))])
def test_one_rank_equals_transformers(tie: bool, fused: bool) -> None:
    errors = run_ranks(one_rank, 1, tie, fused)[0]
    assert max(errors.values()) < 1e-5, errors


def test_features_and_gradients_are_those_of_its_own_encoder() -> None:
    """Of images smaller and larger than its positions, and of a video, which transformers gives frame by frame."""
    adapter = rough_model(preset=PRESET)
    plain = plain_copy(adapter).model.visual  # type: ignore[union-attr]
    pixels = torch.randn(sum(time * height * width for time, height, width in GRIDS), adapter.patch_dim)
    frames = [(1, height, width) for time, height, width in GRIDS for _ in range(time)]
    wanted = plain(pixels, grid_thw=torch.tensor(frames)).pooler_output  # type: ignore[operator]
    found = adapter.encode(pixels, adapter.encoder_arguments(GRIDS))
    assert found.shape == (len(pixels) // 4, adapter.feature_width)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    found.backward(gradient)
    ours = adapter.module.model.visual  # type: ignore[union-attr]
    errors = relative_errors({name: parameter.grad for name, parameter in ours.named_parameters()},  # type: ignore
                             {name: parameter.grad for name, parameter in plain.named_parameters()})  # type: ignore
    assert max(errors.values()) < 1e-5, errors


def test_positions_are_those_of_its_own_model() -> None:
    """A step in time of a video counts as an image; both have the same token."""
    adapter = rough_model(preset=PRESET)
    image = TOKEN_IDS["image"]
    ids = torch.tensor([7, *[image] * 2, 8, *[image] * 2, 9, *[image] * 6, 9])
    found = adapter.positions(ids, torch.tensor([[2, 2, 4], [1, 4, 6]]), torch.tensor([1.5, 0.0]))
    kinds = torch.tensor([0, 2, 2, 0, 2, 2, 0, *[1] * 6, 0])
    wanted, _ = plain_copy(adapter).model.get_rope_index(  # type: ignore[union-attr, operator]
        ids[None], kinds[None], torch.tensor([[1, 4, 6]]), torch.tensor([[2, 2, 4]]))
    assert torch.equal(found, wanted[:, 0])
    assert adapter.vision_runs((3, 4, 6), True) == (6, 6, 6)


def test_dropout_in_the_encoder_is_refused() -> None:
    config = rough_model(preset=PRESET).module.config
    config.vision_config.attention_dropout = 0.1
    with pytest.raises(ModelError, match=r"^model: attention_dropout of the encoder is 0.1; allowed: 0$"):
        Glm4v.check(config)


def test_a_saved_folder_gives_transformers_the_same_loss(tmp_path: Path) -> None:
    adapter = rough_model(tie_word_embeddings=False, preset=PRESET)
    payload = make_sample("saved", [9, (1, 8, 12), VIDEO, 31], preset=PRESET)[1]
    expected = plain_loss(plain_copy(adapter), payload)[0].item()
    parameters = {name: parameter.detach().clone() for name, parameter in adapter.module.named_parameters()}
    save_model(adapter, tmp_path, parameters)
    module, report = Glm4vForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert plain_loss(module, payload)[0].item() == pytest.approx(expected, rel=1e-6)
    again = stored_values(build_model("", str(tmp_path), None, 0))
    assert max(relative_errors(again, parameters).values()) == 0.0
