from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from dhp_ray.model.build import build_model
from dhp_ray.model.families.qwen3_vl import Qwen3VL
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

PRESET = "tiny_qwen3_vl"
GRIDS = [(1, 4, 8), (1, 12, 10), (2, 6, 4), (1, 2, 2)]


def one_rank(rank: int, tie: bool, fused: bool) -> dict[str, float]:
    """Text, images, a video in two pieces beside an image."""
    samples = {"text": [40], "images": [3, (1, 4, 4), 8, (1, 12, 6), (2, 4, 4), 20],
               "video": [9, VIDEO, 31, (1, 4, 8), 7]}
    return errors_on_one_rank(rough_model(tie_word_embeddings=tie, preset=PRESET), samples, PRESET, fused)


@pytest.mark.parametrize(("tie", "fused"), [(True, False), (False, False), (True, True)])
def test_one_rank_equals_transformers(tie: bool, fused: bool) -> None:
    errors = run_ranks(one_rank, 1, tie, fused)[0]
    assert max(errors.values()) < 1e-5, errors


def test_features_have_all_levels_and_gradients() -> None:
    """By transformers' own encoder, which gives each level for itself."""
    adapter = rough_model(preset=PRESET)
    plain = plain_copy(adapter).model.visual  # type: ignore[union-attr]
    pixels = torch.randn(sum(time * height * width for time, height, width in GRIDS), adapter.patch_dim)
    wanted = plain(pixels, grid_thw=torch.tensor(GRIDS))  # type: ignore[operator]
    wanted = torch.cat((wanted.pooler_output, *wanted.deepstack_features), 1)
    found = adapter.encode(pixels, adapter.encoder_arguments(GRIDS))
    assert found.shape == (sum(time * height * width for time, height, width in GRIDS) // 4, 3 * 128)
    assert found.shape[1] == adapter.feature_width
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    found.backward(gradient)
    ours = adapter.module.model.visual  # type: ignore[union-attr]
    errors = relative_errors({name: parameter.grad for name, parameter in ours.named_parameters()},  # type: ignore
                             {name: parameter.grad for name, parameter in plain.named_parameters()})  # type: ignore
    assert max(errors.values()) < 1e-5, errors


def test_a_video_is_a_run_of_tokens_for_each_step_in_time() -> None:
    adapter = rough_model(preset=PRESET)
    assert adapter.vision_runs((3, 4, 6), True) == (6, 6, 6)
    assert adapter.vision_runs((1, 4, 6), False) == (6,)
    image, video = TOKEN_IDS["image"], TOKEN_IDS["video"]
    # two steps in time of 1 x 2 vision tokens, each behind a time stamp of one token; then 1 x 2 of an image
    ids = torch.tensor([7, *[video] * 2, 8, *[video] * 2, 9, *[image] * 2, 9])
    positions = adapter.positions(ids, torch.tensor([[2, 2, 4], [1, 2, 4]]), torch.tensor([1.5, 0.0]))
    assert positions.tolist() == [[0, 1, 1, 3, 4, 4, 6, 7, 7, 9], [0, 1, 1, 3, 4, 4, 6, 7, 7, 9],
                                  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("levels", [[0, 0], [0, 3], [0, 1, 2, 2]])
def test_levels_that_the_encoder_does_not_give_are_refused(levels: list[int]) -> None:
    config = rough_model(preset=PRESET).module.config
    config.vision_config.deepstack_visual_indexes = levels
    with pytest.raises(ModelError, match=r"^model: deepstack_visual_indexes are [^\n]*; allowed: different ones of 3"):
        Qwen3VL.check(config)


def test_a_saved_folder_gives_transformers_the_same_loss(tmp_path: Path) -> None:
    adapter = rough_model(preset=PRESET)
    payload = make_sample("saved", [9, (1, 8, 12), VIDEO, 31], preset=PRESET)[1]
    expected = plain_loss(plain_copy(adapter), payload)[0].item()
    parameters = {name: parameter.detach().clone() for name, parameter in adapter.module.named_parameters()}
    save_model(adapter, tmp_path, parameters)
    module, report = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert plain_loss(module, payload)[0].item() == pytest.approx(expected, rel=1e-6)
    again = stored_values(build_model("", str(tmp_path), None, 0))
    assert max(relative_errors(again, parameters).values()) == 0.0
