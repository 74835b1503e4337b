"""What operators move through memory: formulas beside the bytes of a trace of the model's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedConfig

from dhp_ray.model.build import meta_model
from dhp_ray.planner.cost.derived import Traffic, layer_traffic
from dhp_ray.planner.plan.types import Grid
from dhp_ray.train.engine import COMPUTE_TYPES
from dhp_ray.train.pack import pack_loss
from tests.memory_trace import SilentLink, make_inputs, memory_trace
from tests.operator_trace import OperatorTrace
from tests.published_configs import QWEN3, published_config, stored_shape

ELSEWHERE = {"mm", "_grouped_mm", "addmm", "bmm", "convolution", "_flash_attention_forward",
             "_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu",
             "_scaled_dot_product_flash_attention_for_cpu_backward"}
"""Products and attention, which costs count by themselves."""


def moved(config: PreTrainedConfig, samples: Sequence[tuple[int, Sequence[Grid]]]) -> Traffic:
    """Bytes that a pack of samples (text tokens, grids of images) moves."""
    adapter = meta_model(config)
    inputs, _ = make_inputs(samples, adapter)
    forward, backward = OperatorTrace(), OperatorTrace()
    adapter.module.to(torch.bfloat16)
    with memory_trace():
        adapter.module.to_empty(device="cpu")
        on_device = replace(inputs, pixels=torch.empty(inputs.pixels.shape, dtype=COMPUTE_TYPES["bf16"]))
        with forward:
            loss = pack_loss(adapter, on_device, SilentLink(1))
        with backward:
            loss.backward()
    return Traffic(*(sum(num_bytes for name, num_bytes in trace.moved_bytes.items() if name not in ELSEWHERE)
                     for trace in (forward, backward)))


def of_one_more_layer(name: str, samples: Sequence[tuple[int, Sequence[Grid]]]) -> Traffic:
    """Bytes of the second layer of the language model, and of the encoder's if samples have images; of a Qwen3-VL,
    whose encoder has a merger with each of its first three layers, of the fourth.
    """
    fewest = 3 if name in QWEN3 else 1
    few, more = (moved(published_config(name, num_layers), samples) for num_layers in (fewest, fewest + 1))
    return Traffic(more.forward - few.forward, more.backward - few.backward)


@pytest.mark.parametrize(("name", "scaled"), [("3B", 0), pytest.param("7B", 0, marks=pytest.mark.slow),
                                              pytest.param("Qwen3-VL-2B", 0, marks=pytest.mark.slow),
                                              pytest.param("GLM-4.1V-9B", 0, marks=pytest.mark.slow),
                                              pytest.param("InternVL3-2B", 1024, marks=pytest.mark.slow)])
@pytest.mark.seconds
def test_own_operators_move_what_a_trace_counts(name: str, scaled: int) -> None:
    """`scaled`: the values that an encoder's layer multiplies by learned scales, twice, fused or not."""
    shape = stored_shape(name)
    language = layer_traffic(shape.language[0], in_encoder=False, rotates=True, fused=False)
    vision = layer_traffic(shape.vision[0], in_encoder=True, rotates=not shape.vision_projector, fused=False)
    text = of_one_more_layer(name, [(4096, [])])
    assert text.forward / 4096 == pytest.approx(language.forward, rel=0.03)
    assert text.backward / 4096 == pytest.approx(language.backward, rel=0.08)
    images, tokens, patches = of_one_more_layer(name, [(16, [(1, 32, 32)] * 8)]), 16 + 8 + 8 * 256, 8 * 1024
    assert images.forward - tokens * text.forward / 4096 == pytest.approx(
        patches * (vision.forward + 8 * scaled), rel=0.03)
    assert images.backward - tokens * text.backward / 4096 == pytest.approx(
        patches * (vision.backward + 24 * scaled), rel=0.08)


@pytest.mark.seconds
def test_experts_move_what_a_trace_counts() -> None:
    text = of_one_more_layer("Qwen3-30B-A3B", [(4096, [])])
    formula = layer_traffic(stored_shape("Qwen3-30B-A3B").language[0], in_encoder=False, rotates=True, fused=False)
    assert text.forward / 4096 == pytest.approx(formula.forward, rel=0.03)
    assert text.backward / 4096 == pytest.approx(formula.backward, rel=0.08)


def test_fused_operators_by_hand() -> None:
    """A layer of a Qwen2.5 3B: two norms and two sums of 2,048, an MLP of 11,008, 2,304 of queries and keys."""
    fused = layer_traffic(stored_shape("3B").language[0], in_encoder=False, rotates=True, fused=True)
    assert fused.forward == 2 * 2048 * (4 + 6) + 6 * 11008 + 4 * 2304
    assert fused.backward == 2 * 2048 * (6 + 6) + 10 * 11008 + 4 * 2304 + 3 * 6 * 2048
