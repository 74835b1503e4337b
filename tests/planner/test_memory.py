"""The memory model, and workspace.py, against passes traced on fake tensors: real layers, engines, attention and loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from transformers import PreTrainedConfig, Qwen3Config

from dhp_ray.model.build import adapter_sizes, meta_model
from dhp_ray.model.lora import LoraSettings
from dhp_ray.model.loss import CHUNK_ELEMENTS, CHUNKS_PER_PRODUCT
from dhp_ray.planner.memory.model import (
    CHUNKS_HELD,
    LOGITS_HELD,
    MemoryModel,
    MemorySettings,
    PackLoad,
)
from dhp_ray.planner.memory.model_shape import ModelShape
from tests.memory_trace import fake_world, traced
from tests.published_configs import GLM, INTERNVL, QWEN3, TEXT, published_config, shape_of

TILES = 0
"""In place of the largest image's side, of a model whose images are tiles."""
WORLD = {"step": 1, "micro_batch": 8}
"""Ranks of a trace: the flat engine's collectives are none on one rank."""


def settings_of(sync: str, recomputes: bool | str, frozen: tuple[str, ...]) -> MemorySettings:
    return MemorySettings(sync=sync, world_size=WORLD[sync], precision="bf16", recomputes=bool(recomputes),
                          frozen=frozen, keeps_attention=recomputes is not True)


def random_samples(seed: int, images: bool, largest: int) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Text of 10 to 20,000 tokens, evenly by size, and images of up to `largest` x `largest` vision tokens, or of
    tiles.
    """
    random_ = random.Random(seed)
    if largest == TILES:
        grids = [(random_.randint(1, 5), 32, 32) for _ in range(random_.randint(1, 3))]
    else:
        grids = [(1, 2 * random_.randint(2, largest), 2 * random_.randint(2, largest))
                 for _ in range(random_.randint(1, 3))]
    texts = [int(10 ** random_.uniform(1, 4.3)) for _ in range(random_.randint(1, 4))]
    return [(text, grids if images and not place else []) for place, text in enumerate(texts)]


def check(
    name: str, settings: MemorySettings, seed: int, degree: int, num_layers: int = 4, largest: int = 22,
    lora: LoraSettings | None = None, share: float = 0.0, recomputed: float = 0.0,
) -> None:
    """Resident bytes within 1 %, and what a pack on `degree` ranks adds to them within 5 %, on the device and, where a
    share of its activations is moved there, in host memory. `recomputed`: the share of its layers that run again. 0
    layers: all.
    """
    check_config(published_config(name, num_layers), shape_of(name, num_layers), settings, seed, degree, largest, lora,
                 share, recomputed)


def check_config(
    config: PreTrainedConfig, shape: ModelShape, settings: MemorySettings, seed: int, degree: int, largest: int = 22,
    lora: LoraSettings | None = None, share: float = 0.0, recomputed: float = 0.0,
) -> None:
    # a pack without a trained part has nothing to keep
    images = hasattr(config, "vision_config") and (seed % 3 > 0 or "language" in settings.frozen)
    found_bytes = traced(config, random_samples(seed, images, largest), settings, degree, lora, share,
                         recomputed)
    if lora is not None:
        settings = replace(settings, adapters=adapter_sizes(config, settings.frozen, lora), drops=lora.dropout > 0)
    found = MemoryModel(shape, settings)
    assert sum(found.resident().values()) == pytest.approx(found_bytes.resident_bytes, rel=0.01)
    moments = {name: sum(terms.values()) for name, terms in found.moments(found_bytes.load).items()}
    moments.pop("update", 0.0)  # is not traced
    assert max(moments.values()) == pytest.approx(found_bytes.pack_bytes, rel=0.05), moments
    assert found.moved_bytes(found_bytes.load) == pytest.approx(found_bytes.host_bytes, rel=0.05)


def slow(*cases: tuple[object, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@contextmanager
def world_of(mode: str) -> Iterator[None]:
    with fake_world(WORLD[mode]) if WORLD[mode] > 1 else nullcontext():
        yield


@pytest.mark.parametrize(("mode", "recomputes", "frozen", "seed", "degree"), [
    ("step", "selective", ("language",), 2, 2),
    *slow(("step", True, ("language",), 2, 2), ("micro_batch", "selective", (), 1, 3), ("step", False, (), 1, 1),
          ("micro_batch", False, ("vision",), 0, 1), ("micro_batch", True, (), 1, 3))],
    ids=str)
@pytest.mark.seconds
def test_predicted_peaks_are_the_traced_ones(
    mode: str, recomputes: bool | str, frozen: tuple[str, ...], seed: int, degree: int
) -> None:
    with world_of(mode):
        check("3B", settings_of(mode, recomputes, frozen), seed, degree, num_layers=2, largest=8)


@pytest.mark.parametrize(("mode", "recomputes", "frozen", "seed"), [
    ("step", False, ("language",), 2), ("micro_batch", True, ("language",), 5),
    ("micro_batch", True, ("vision",), 16)], ids=str)
@pytest.mark.slow  # in make test: the encoder's unit, below
def test_predicted_peaks_of_qwen3_vl_are_the_traced_ones(
    mode: str, recomputes: bool, frozen: tuple[str, ...], seed: int
) -> None:
    with world_of(mode):
        check("Qwen3-VL-2B", settings_of(mode, recomputes, frozen), seed, 1, num_layers=3, largest=20)


@pytest.mark.parametrize(("mode", "recomputes", "frozen", "seed", "degree"), [
    ("step", False, (), 1, 1), ("step", True, (), 2, 2), ("step", False, ("language",), 2, 1),
    ("micro_batch", False, (), 4, 3), ("micro_batch", True, ("vision",), 4, 1), ("micro_batch", "selective", (), 1, 2),
    ("step", True, ("language",), 5, 1)], ids=str)
@pytest.mark.slow
def test_predicted_peaks_of_glm_are_the_traced_ones(
    mode: str, recomputes: bool | str, frozen: tuple[str, ...], seed: int, degree: int
) -> None:
    with world_of(mode):
        check("GLM-4.1V-9B", settings_of(mode, recomputes, frozen), seed, degree, num_layers=3, largest=20)


@pytest.mark.parametrize(("mode", "recomputes", "frozen", "seed"), [
    ("step", True, ("language",), 5), *slow(("micro_batch", True, ("vision",), 4))], ids=str)
@pytest.mark.seconds
def test_predicted_peaks_of_internvl_are_the_traced_ones(
    mode: str, recomputes: bool, frozen: tuple[str, ...], seed: int
) -> None:
    with world_of(mode):
        check("InternVL3-1B", settings_of(mode, recomputes, frozen), seed, 1, num_layers=2, largest=TILES)


def with_windows(window: int, **settings: int) -> PreTrainedConfig:
    """Four layers of a Qwen3-4B, of which three attend within a window."""
    tree = published_config("Qwen3-4B", 4).to_dict()
    return Qwen3Config.from_dict(tree | {"use_sliding_window": True, "sliding_window": window, "layer_types": [
        *["sliding_attention"] * 3, "full_attention"]} | settings)


@pytest.mark.parametrize(("mode", "recomputes", "seed", "degree", "window"), [
    ("step", False, 2, 1, 1024), ("step", False, 1, 3, 4096), ("micro_batch", "selective", 2, 3, 256),
    *slow(("step", "selective", 3, 8, 4096), ("micro_batch", True, 1, 2, 1024), ("micro_batch", False, 4, 5, 4096))])
def test_predicted_peaks_with_sliding_windows_are_the_traced_ones(
    mode: str, recomputes: bool | str, seed: int, degree: int, window: int
) -> None:
    config = with_windows(window)
    with world_of(mode):
        check_config(config, meta_model(config).shape, settings_of(mode, recomputes, ()), seed, degree)


def test_a_kernel_has_room_for_all_that_short_chunks_look_back_on() -> None:
    """Nearly three times as many keys as queries. The vocabulary is small, so that a layer needs more than the loss."""
    config, settings = with_windows(1024, vocab_size=1024), settings_of("step", "selective", ())
    found = traced(config, [(10_240, ())], settings, 8)
    moments = MemoryModel(meta_model(config).shape, settings).moments(found.load)
    moments.pop("update")
    assert found.pack_bytes <= max(sum(terms.values()) for terms in moments.values()) < 1.1 * found.pack_bytes


@pytest.mark.parametrize(("name", "mode", "recomputes", "degree", "share"), [
    ("Qwen3-4B", "micro_batch", True, 2, 0.0),
    *slow(("Llama-3-8B", "step", False, 1, 0.0), ("Llama-3-8B", "micro_batch", False, 3, 0.0),
          ("Qwen3-8B", "step", True, 2, 0.0), ("Qwen3-4B", "step", False, 1, 0.5))], ids=str)
@pytest.mark.seconds
def test_predicted_peaks_of_models_of_text_are_the_traced_ones(
    name: str, mode: str, recomputes: bool, degree: int, share: float
) -> None:
    with world_of(mode):
        check(name, settings_of(mode, recomputes, ()), 1, degree, num_layers=2, share=share)


@pytest.mark.parametrize(("name", "mode", "recomputes", "seed", "degree"), slow(
    ("Qwen3.5-9B", "step", False, 1, 1), ("Qwen3.5-9B", "step", True, 2, 1), ("Qwen3.5-9B", "micro_batch", True, 3, 2),
    ("Qwen3.5-9B", "step", False, 4, 3), ("Qwen3.5-9B", "step", "selective", 2, 1),
    ("Qwen3.5-9B", "micro_batch", "selective", 3, 2), ("Qwen3.5-35B-A3B", "step", False, 1, 1),
    ("Qwen3.5-35B-A3B", "step", True, 2, 1), ("Qwen3.5-35B-A3B", "micro_batch", True, 3, 2),
    ("Qwen3.5-35B-A3B", "micro_batch", False, 4, 3)), ids=str)
@pytest.mark.timeout(900)
def test_predicted_peaks_of_gated_delta_nets_are_the_traced_ones(
    name: str, mode: str, recomputes: bool, seed: int, degree: int
) -> None:
    with world_of(mode):
        check(name, settings_of(mode, recomputes, ()), seed, degree, num_layers=4, largest=20)


@pytest.mark.parametrize(("name", "recomputes", "seed", "degree", "sharing"), [
    ("Qwen3-30B-A3B", False, 4, 3, 2), *slow(
        ("Qwen3-30B-A3B", False, 2, 2, 8), ("Qwen3-30B-A3B", True, 1, 1, 8), ("Qwen3-30B-A3B", False, 2, 1, 4),
        ("Qwen3-VL-30B-A3B", True, 1, 1, 2), ("Qwen3-235B-A22B", True, 2, 2, 8), ("Qwen3-235B-A22B", False, 3, 1, 8),
        ("Qwen3-VL-235B-A22B", True, 4, 1, 8), ("Qwen3.5-35B-A3B", True, 1, 1, 8))], ids=str)
@pytest.mark.seconds
def test_predicted_peaks_where_ranks_share_experts_are_the_traced_ones(
    name: str, recomputes: bool, seed: int, degree: int, sharing: int
) -> None:
    with world_of("micro_batch"):
        check(name, replace(settings_of("micro_batch", recomputes, ()), expert_parallel=sharing), seed, degree,
              num_layers=4, largest=20)


@pytest.mark.parametrize(("name", "mode", "recomputes", "seed", "degree", "share", "recomputed"), [
    ("Qwen3-30B-A3B", "step", False, 1, 1, 0.0, 0.0),  # with micro_batch: where ranks share them, above
    *slow(("Qwen3-30B-A3B", "micro_batch", False, 2, 2, 0.0, 0.0), ("Qwen3-30B-A3B", "step", True, 2, 3, 0.0, 0.0),
          ("Qwen3-30B-A3B", "micro_batch", True, 1, 1, 0.0, 0.0), ("Qwen3-30B-A3B", "step", False, 3, 1, 0.5, 0.0),
          ("Qwen3-30B-A3B", "micro_batch", False, 4, 3, 0.0, 0.5), ("Qwen3-VL-30B-A3B", "step", True, 1, 1, 0.0, 0.0),
          ("Qwen3-VL-30B-A3B", "micro_batch", False, 2, 2, 0.0, 0.0),
          ("Qwen3-235B-A22B", "micro_batch", False, 2, 2, 0.0, 0.0),
          ("Qwen3-VL-235B-A22B", "micro_batch", True, 4, 1, 0.0, 0.0))], ids=str)
@pytest.mark.seconds
def test_predicted_peaks_of_models_with_experts_are_the_traced_ones(
    name: str, mode: str, recomputes: bool, seed: int, degree: int, share: float, recomputed: float
) -> None:
    with world_of(mode):
        check(name, settings_of(mode, recomputes, ()), seed, degree, num_layers=4, largest=20, share=share,
              recomputed=recomputed)


@pytest.mark.parametrize("name", ["Qwen3-VL-2B", *slow(("Qwen3-VL-8B",))])
@pytest.mark.seconds
def test_a_unit_of_the_encoder_is_there_while_gradients_of_the_root_are_added_and_reduced(name: str) -> None:
    """With tied weights and without."""
    with world_of("micro_batch"):
        check(name, settings_of("micro_batch", False, ()), seed=1, degree=2, num_layers=2, largest=8)


@pytest.mark.slow
def test_what_ranks_gather_does_not_grow_with_them() -> None:
    """InternVL's positions are a table of one row, which FSDP would pad to a row a rank."""
    settings, peaks = settings_of("micro_batch", True, ("language",)), []
    for num_ranks in (8, 64):
        with fake_world(num_ranks):
            found = traced(published_config("InternVL3-38B", 1), [(500, [(1, 32, 32)])],
                           replace(settings, world_size=num_ranks))
        peaks.append(found.pack_bytes)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


@pytest.mark.parametrize(("name", "mode", "recomputes", "frozen", "seed", "degree", "share"), [
    ("3B", "step", False, (), 9, 1, 1.0),
    *slow(("InternVL3-38B", "step", True, ("language",), 11, 2, 0.25),
          ("InternVL3-1B", "micro_batch", True, (), 2, 2, 0.5), ("Qwen3-VL-2B", "micro_batch", False, (), 1, 1, 1.0),
          ("Qwen3-VL-2B", "step", True, ("language",), 5, 1, 1.0), ("3B", "step", False, (), 2, 1, 0.5))], ids=str)
@pytest.mark.seconds
def test_predicted_peaks_with_activations_in_host_memory_are_the_traced_ones(
    name: str, mode: str, recomputes: bool, frozen: tuple[str, ...], seed: int, degree: int, share: float
) -> None:
    with world_of(mode):
        check(name, settings_of(mode, recomputes, frozen), seed, degree, num_layers=4,
              largest=TILES if name in INTERNVL else 20, share=share)


@pytest.mark.parametrize(("name", "mode", "frozen", "seed", "degree", "recomputed"), [
    ("3B", "step", (), 3, 1, 0.5),
    *slow(("InternVL3-1B", "micro_batch", (), 2, 2, 0.75), ("3B", "step", ("vision",), 1, 2, 0.75),
          ("3B", "micro_batch", (), 3, 1, 0.25),
          ("Qwen3-VL-2B", "step", ("language",), 5, 1, 0.5),
          ("Qwen3-VL-2B", "micro_batch", (), 1, 1, 1.0), ("InternVL3-1B", "step", (), 11, 1, 0.5),
          ("InternVL3-1B", "micro_batch", ("vision",), 4, 3, 0.5))], ids=str)
@pytest.mark.seconds
def test_predicted_peaks_with_layers_that_run_again_are_the_traced_ones(
    name: str, mode: str, frozen: tuple[str, ...], seed: int, degree: int, recomputed: float
) -> None:
    with world_of(mode):
        check(name, settings_of(mode, False, frozen), seed, degree, num_layers=4,
              largest=TILES if name in INTERNVL else 20, recomputed=recomputed)


def test_what_moves_leaves_the_device() -> None:
    """Of 36 layers without recomputation 18: what is gone there is what is here, as long as two stay."""
    memory, load = MemoryModel(shape_of("3B"), settings_of("step", False, ())), PackLoad(20_000, 0, 20_000)
    half, whole = load._replace(offload=0.5), load._replace(offload=1.0)
    on_device = {each: sum(memory.moments(each)["language, MLP backward"].values()) for each in (load, half, whole)}
    assert memory.moved_bytes(whole) == 36 * 20_000 * memory.layer_bytes("language", memory.shape.language[0])
    assert on_device[load] - on_device[half] == pytest.approx(memory.moved_bytes(half))
    assert on_device[load] - on_device[whole] == pytest.approx(34 / 36 * memory.moved_bytes(whole))


LORA = LoraSettings(32, 64.0, ("all-linear",))


@pytest.mark.parametrize(("mode", "recomputes", "frozen", "seed", "degree"), [
    ("step", False, (), 1, 1),
    *slow(("micro_batch", True, ("vision",), 1, 2), ("step", True, ("vision",), 2, 2),
          ("micro_batch", False, (), 1, 1), ("micro_batch", True, ("language",), 1, 1))], ids=str)
def test_predicted_peaks_with_adapters_are_the_traced_ones(
    mode: str, recomputes: bool, frozen: tuple[str, ...], seed: int, degree: int
) -> None:
    with world_of(mode):
        check("3B", settings_of(mode, recomputes, frozen), seed, degree, num_layers=2, largest=8, lora=LORA)


EXPERTS_LORA = replace(LORA, targets=("all-linear", "experts.gate_up_proj", "experts.down_proj"))


@pytest.mark.parametrize(("name", "mode", "recomputes", "seed", "degree", "sharing", "lora"), [
    ("Qwen3-30B-A3B", "step", True, 2, 1, 1, LORA),  # rows that autograd does not keep are gone after their product
    ("Qwen3-30B-A3B", "micro_batch", False, 2, 2, 4, EXPERTS_LORA),  # beside them the head, which is gathered ahead
    *slow(
        ("Qwen3-30B-A3B", "step", False, 1, 1, 1, EXPERTS_LORA), ("Qwen3-30B-A3B", "step", False, 1, 1, 1, LORA),
        ("Qwen3-30B-A3B", "micro_batch", True, 1, 1, 8, EXPERTS_LORA),
        ("Qwen3-30B-A3B", "micro_batch", True, 1, 1, 8, LORA), ("Qwen3-30B-A3B", "micro_batch", True, 2, 1, 2, LORA),
        ("Qwen3-30B-A3B", "step", True, 2, 3, 1, EXPERTS_LORA),
        ("Qwen3-30B-A3B", "micro_batch", True, 1, 1, 1, EXPERTS_LORA),
        ("Qwen3-30B-A3B", "micro_batch", True, 1, 1, 1, replace(EXPERTS_LORA, rank=128)),
        ("Qwen3-30B-A3B", "micro_batch", True, 1, 1, 8, replace(EXPERTS_LORA, rank=128)),
        ("Qwen3-30B-A3B", "step", True, 2, 1, 1, replace(EXPERTS_LORA, rank=128)),
        ("Qwen3-VL-30B-A3B", "micro_batch", False, 2, 2, 2, EXPERTS_LORA),
        ("Qwen3.5-35B-A3B", "micro_batch", True, 1, 1, 8, EXPERTS_LORA),
        ("Qwen3.5-35B-A3B", "micro_batch", True, 2, 1, 4, LORA))],
    ids=str)
@pytest.mark.seconds
def test_predicted_peaks_of_models_with_experts_and_adapters_are_the_traced_ones(
    name: str, mode: str, recomputes: bool, seed: int, degree: int, sharing: int, lora: LoraSettings
) -> None:
    with world_of(mode):
        check(name, replace(settings_of(mode, recomputes, ()), expert_parallel=sharing), seed, degree, num_layers=3,
              largest=20, lora=lora)


@pytest.mark.parametrize(("mode", "recomputes", "seed", "degree"), [
    ("step", True, 2, 2), *slow(("micro_batch", True, 1, 2), ("step", False, 1, 1))], ids=str)
def test_predicted_peaks_with_dropout_are_the_traced_ones(mode: str, recomputes: bool, seed: int, degree: int) -> None:
    with world_of(mode):
        check("3B", settings_of(mode, recomputes, ("vision",)), seed, degree, num_layers=2, largest=8,
              lora=replace(LORA, dropout=0.1))


CASES = list(product((False, True), ((), ("vision",), ("language",))))
"""Recomputation, and what is frozen."""


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("first", range(0, 25, 5))
@pytest.mark.parametrize("mode", WORLD)
@pytest.mark.parametrize("name", [*TEXT, *QWEN3, *GLM, *INTERNVL])
def test_predicted_peaks_are_the_traced_ones_everywhere(name: str, mode: str, first: int) -> None:
    """75 packs a model, over all modes, degrees 1 to 3, with and without recomputation, each part frozen; every second
    one with a share in host memory.
    """
    with world_of(mode):
        for seed in range(first, first + 5):
            recomputes, frozen = CASES[seed % len(CASES)]
            check(name, settings_of(mode, recomputes, frozen), seed, degree=1 + seed // len(CASES) % 3,
                  largest=TILES if name in INTERNVL else 22, share=(0.0, 0.5, 0.0, 1.0, 0.0, 0.25)[seed % 6])


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", WORLD)
@pytest.mark.parametrize("name", [*TEXT, *QWEN3, *GLM, *INTERNVL])
def test_predicted_peaks_are_the_traced_ones_at_full_depth(name: str, mode: str) -> None:
    with world_of(mode):
        check(name, settings_of(mode, mode != "micro_batch", ()), seed=1, degree=2, num_layers=0,
              largest=TILES if name in INTERNVL else 8, share=0.5)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("recomputes", [False, True])
def test_traced_peaks_grow_evenly_with_depth(recomputes: bool) -> None:
    """So packs at few layers stand for those at many."""
    settings = settings_of("step", recomputes, ())
    peaks = [traced(published_config("3B", layers), [(6000, [(1, 20, 20)])], settings).pack_bytes
             for layers in (2, 4, 6)]
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.01)


def model(name: str = "7B", **changed: object) -> MemoryModel:
    settings = MemorySettings(sync="step", world_size=64, precision="bf16", recomputes=True)
    return MemoryModel(shape_of(name), replace(settings, **changed))  # type: ignore[arg-type]


def test_resident_bytes_by_hand() -> None:
    """A 3B on two ranks, bf16: P = 3,754,622,976."""
    size, half = 3_754_622_976, 1_877_311_488
    assert model("3B", world_size=2).resident() == {
        "parameters": 2 * size, "gradients": 4 * size + 4 * half, "state, version in force": 12 * half,
        "state, version before": 12 * half, "communicators": 0}
    assert model("3B", world_size=2, sync="micro_batch").resident()["parameters"] == 4 * half
    frozen = model("3B", world_size=2, frozen=("language",)).resident()
    assert frozen["parameters"] == 2 * size
    assert frozen["gradients"] == 6 * model("3B").shape.num_parameters(without=["language"])


def test_gloo_copies_the_gradients_that_it_reduces() -> None:
    """Two buckets of 64 MiB for each of four ranks; a device's library reduces them in place."""
    update = {device: model("3B", world_size=4, device=device).moments(PackLoad(4096, 0, 1))["update"]
              for device in ("cpu", "cuda")}
    assert sum(update["cpu"].values()) - sum(update["cuda"].values()) == 2 * 4 * 64 * 2**20


def test_the_loss_holds_what_the_memory_model_counts() -> None:
    assert (LOGITS_HELD, CHUNKS_HELD) == (CHUNK_ELEMENTS, CHUNKS_PER_PRODUCT)


def test_tokens_that_fit_are_the_most_that_do() -> None:
    found = model()
    tokens = found.tokens_that_fit(72e9)
    assert found.memory(found.worst_load(tokens)).device_bytes <= 72e9
    assert found.memory(found.worst_load(tokens + 1)).device_bytes > 72e9
    assert model(recomputes=False).tokens_that_fit(72e9) < tokens / 5
    assert model(sync="micro_batch").tokens_that_fit(72e9) > tokens
    assert model("72B").tokens_that_fit(72e9) == 0


def test_a_token_of_a_7b_without_recomputation_takes_megabytes() -> None:
    """6.4 MB for text; 8.4 MB more for a vision token, whose four patches the encoder keeps."""
    found = model(recomputes=False, world_size=1)

    def bytes_of(load: PackLoad) -> float:
        return sum(found.memory(load).pack.values())

    text = bytes_of(PackLoad(40000, 0, 40000)) - bytes_of(PackLoad(20000, 0, 20000))
    vision = bytes_of(PackLoad(40000, 40000, 0, 160000)) - bytes_of(PackLoad(20000, 20000, 0, 80000))
    assert text / 20000 == pytest.approx(6.4e6, rel=0.02)
    assert vision / 20000 == pytest.approx(14.8e6, rel=0.02)
