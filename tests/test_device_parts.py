"""Pieces of the parts of benchmarks/device.py, each by itself: settings, batches, FLOPs, reads of a device, figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device_parts.parity import Degree, holds
from benchmarks.device_parts.reads import Place, counted
from benchmarks.device_parts.record import Record
from benchmarks.device_parts.settings import LIMITS_S, WORLD_LIMITS_S, Settings, SettingsError
from benchmarks.device_parts.step import flops_of, sizes_of
from benchmarks.device_parts.workload import LARGE, batch_of, choose_preset, config_of, num_parameters
from dhp_ray.model.presets import preset_config
from tests.packs import TOKEN_IDS

CPU = torch.device("cpu")


def test_settings_are_handed_on_whole() -> None:
    settings = Settings.of(["device=cpu", "preset=3b", "parts=abort,step", "out=somewhere", "limit_s=2.5"])
    assert Settings.of(settings.arguments()) == settings
    assert settings.out == Path.cwd() / "somewhere"
    assert Settings.of(["parts=step,abort,step"]).parts == ("step", "abort")
    assert sum(LIMITS_S.values()) == sum(WORLD_LIMITS_S.values()) == 600


def test_a_preset_that_is_unknown_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^preset: got '9b'; allowed: auto, tiny, 2b, 3b, 7b$"):
        Settings.of(["preset=9b"])


def test_large_presets_have_the_parameters_of_published_models() -> None:
    found = {preset: num_parameters(preset) for preset in LARGE}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert 2.0e9 < found["2b"] < 2.4e9
    assert found["3b"] == 3_754_622_976  # Qwen2.5-VL-3B
    assert found["7b"] == 8_292_166_656  # Qwen2.5-VL-7B


def test_the_cpu_takes_the_tiny_preset() -> None:
    assert choose_preset("auto", CPU) == choose_preset("tiny", CPU) == "tiny"
    assert config_of("tiny").to_dict() == preset_config("tiny", TOKEN_IDS).to_dict()


@pytest.mark.parametrize("with_images", [False, True])
def test_batches_have_the_lengths_that_they_are_asked_for(with_images: bool) -> None:
    batch = batch_of([128, 64, 33, 1], CPU, with_images)
    assert [sample.num_tokens for sample, _ in batch] == [128, 64, 33, 1]
    assert [len(payload.input_ids) for _, payload in batch] == [128, 64, 33, 1]
    assert [len(payload.grids) for _, payload in batch] == ([4, 2, 1, 0] if with_images else [0] * 4)


def test_flops_of_a_batch_are_those_that_torch_counts() -> None:
    """Up to the encoder's convolution and attention, which torch counts otherwise, and to the causal mask."""
    from torch.utils.flop_counter import FlopCounterMode

    from dhp_ray.model.families.qwen2_5_vl import Qwen25VL

    config = config_of("tiny")
    module = Qwen25VL.model_class(config)
    module.set_attn_implementation("sdpa")
    ids = torch.arange(200)[None]
    with FlopCounterMode(display=False) as counter:
        module(input_ids=ids, labels=ids).loss.backward()
    found = flops_of(config, sizes_of(config), batch_of([200], CPU, False))
    assert found == pytest.approx(counter.get_total_flops(), rel=0.15)


def reads_in(program: Callable[[], Any]) -> list[Place]:
    with counted(CPU) as found:
        program()
    return list(found.elements())


@pytest.mark.parametrize("read", [
    lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: bool(x.any()), lambda x: int(x[0]), lambda x: x.cpu(),
    lambda x: x[x > 1], lambda x: (x > 1).nonzero(), lambda x: torch.arange(x[1]), lambda x: x.unique(),
    lambda x: x.repeat_interleave(x), lambda x: x.numpy(), lambda x: torch.equal(x, x),
    lambda x: x.masked_select(x > 1), lambda x: torch.tensor([1, 2]) + x[1:], lambda x: x.new_tensor([3]),
])
def test_a_read_is_found(read: Callable[[torch.Tensor], Any]) -> None:
    numbers = torch.tensor([1, 2, 3])
    found = reads_in(lambda: read(numbers))
    assert found
    assert {place.line.partition(":")[0] for place in found} == {"tests/test_device_parts.py"}


def test_what_reads_nothing_is_not_counted() -> None:
    numbers, index = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1])
    assert reads_in(lambda: (numbers * numbers)[index].sum().backward()) == []


def test_a_read_in_the_backward_pass_is_found() -> None:
    numbers = torch.tensor([1.0, 2.0], requires_grad=True)
    numbers.register_hook(lambda gradient: print(gradient.sum().item()))
    assert len(reads_in(lambda: numbers.sum().backward())) == 1


def test_bf16_is_held_to_what_it_costs_at_degree_1() -> None:
    alone = Degree("pool", 1, 1e-3, 2e-2, 4e-2, "a")
    assert holds(alone._replace(degree=2, gradients=2.5e-2), alone, "bf16")
    assert not holds(alone._replace(degree=2, gradients=4e-2), alone, "bf16")
    assert not holds(alone._replace(degree=2, loss=1e-2), alone, "bf16")
    assert not holds(alone, alone, "fp32")


def test_figures_are_written_as_they_come(tmp_path: Path) -> None:
    record = Record(tmp_path, "step", "a command", "cpu")
    record.table(["a", "b"])
    record.row("first", {"x": 1}, ["1", "a | b"])
    assert json.loads((tmp_path / "step.json").read_text())["figures"] == {"first": {"x": 1}}
    assert (tmp_path / "step.md").read_text() == "| a | b |\n|---|---|\n| 1 | a / b |\n"
    assert not list(tmp_path.glob("*.partial"))
