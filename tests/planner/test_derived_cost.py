"""Costs derived from shapes and published figures, reckoned by hand where that is short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.cost.derived import Device, collective_bytes_per_s, derived_cost, described, gather_s
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from tests.published_configs import TEXT, shape_of

DEVICES = Path(__file__).parents[2] / "conf" / "device"
H100 = Device.load(DEVICES / "h100.yaml")


def cost_of(name: str, device: Device = H100, num_nodes: int = 8, **changed: object) -> CostModel:
    settings = MemorySettings(sync="step", world_size=64, precision="bf16", recomputes=False)
    memory = MemoryModel(shape_of(name), replace(settings, **changed))  # type: ignore[arg-type]
    return derived_cost(memory, device, num_nodes)


def test_a_7b_by_hand() -> None:
    """28 layers of 233.1 M parameters and a head of 545 M, 3584 wide, 512 wide keys and values."""
    cost = cost_of("7B")
    layer = 3584 * 3584 * 2 + 2 * 3584 * 512 + 3 * 3584 * 18944 + 3584 + 2 * 512 + 2 * 3584
    products = 6 * (28 * layer + 152064 * 3584) / 794.5e12
    kept = 28 * (2 * 3584 * 8 + 4 * (3584 + 512) + 4 * 28 + 2 * 18944 * 4)
    assert cost.linear_s == pytest.approx(products + 4 * kept / 3.35e12, rel=1e-6)
    assert cost.quadratic_s == pytest.approx(28 * 7 * 3584 / 346e12, rel=1e-6)
    assert cost.vision_quadratic_s == pytest.approx(4 * 14 * 1280 / 346e12, rel=1e-6)
    assert cost.comm_bytes_per_token == 28 * 2 * 512 * (2 + 2 + 4)
    # over the eight links of a node together
    assert cost.fixed_s == pytest.approx(63 / 64 * 6 * 8_292_166_656 / 400e9 + 8_292_166_656 / 64 * 28 / 3.35e12)


def test_costs_follow_the_settings() -> None:
    plain, again = cost_of("7B"), cost_of("7B", recomputes=True)
    assert 1.25 * plain.linear_s < again.linear_s < 1.45 * plain.linear_s
    assert again.quadratic_s / plain.quadratic_s == pytest.approx(4.5 / 3.5)
    frozen = cost_of("7B", frozen=("vision",))
    assert frozen.vision_linear_s < plain.vision_linear_s / 2.5
    assert frozen.linear_s == plain.linear_s
    assert [cost.vision_forward for cost in (plain, again, frozen)] == [1 / 3, 1 / 4, 1.0]
    assert cost_of("7B", frozen=("language",)).linear_s < 0.75 * plain.linear_s
    assert cost_of("7B", sync="micro_batch").fixed_s < plain.fixed_s / 4
    for sync in ("step", "micro_batch"):
        assert plain.in_mode(sync) == cost_of("7B", sync=sync)
    assert plain.fixed_s > cost_of("7B", num_nodes=1).fixed_s > plain.fixed_s * 400 / 450
    assert cost_of("7B", num_nodes=64).fixed_s > 7 * plain.fixed_s  # nodes of one rank have a link each


def test_sliding_windows_cost_as_much_for_each_token_and_travel_once_a_pack() -> None:
    """Three of four layers of the 7B: 28 heads of 128 over 1,024 tokens, 4 of keys and values."""
    settings, shape = MemorySettings(sync="step", world_size=64, precision="bf16", recomputes=False), shape_of("7B")
    (layer,) = shape.language
    windows = replace(shape, language=(replace(layer, count=21, window=1024), replace(layer, count=7)))
    plain, cost = (derived_cost(MemoryModel(each, settings), H100, 8) for each in (shape, windows))
    assert cost.quadratic_s == pytest.approx(plain.quadratic_s / 4)
    assert cost.comm_bytes_per_token == plain.comm_bytes_per_token / 4
    assert cost.linear_s - plain.linear_s == pytest.approx(21 * 1024 * 4 * 28 * 128 * 3.5 / 346e12)
    assert cost.window_s == pytest.approx(21 * 2 * 1024 * 2 * 512 * 2 * 2 / 50e9)
    rates, without = (each.rates(4) for each in (cost, replace(cost, window_s=0.0)))
    assert (rates.overhead_s - without.overhead_s).tolist() == pytest.approx([0, 0, *[cost.window_s] * 3])


def test_a_token_meets_the_adapters_of_its_own_experts() -> None:
    """8 of 128."""
    of_all, of_experts = (cost_of("Qwen3-30B-A3B", adapters=sizes) for sizes in (
        {"language": 1_000_000 + 128_000}, {"language": 1_000_000, "experts": 16 * 128_000}))
    assert of_experts.linear_s == pytest.approx(of_all.linear_s, rel=1e-9)


def test_parameters_and_gradients_of_layers_travel_in_every_micro_batch() -> None:
    """All but the token embedding and the last norm: twice in bf16, their gradients in fp32; the head and a frozen
    encoder once."""
    settings = MemorySettings(sync="micro_batch", world_size=8, precision="bf16", recomputes=False)
    shape = shape_of("7B")
    head, vision = 152064 * 3584, shape.num_parameters(["language"])
    layers = shape.num_parameters() - 2 * head - 3584
    for nodes, link in ((1, 450e9), (2, 4 * 50e9), (8, 50e9)):
        found = gather_s(MemoryModel(shape, settings), H100, nodes)
        assert found == pytest.approx(7 / 8 * (8 * layers + 6 * head) / link)
    frozen = MemoryModel(shape, replace(settings, frozen=("vision",)))
    assert gather_s(frozen, H100, 1) == pytest.approx(7 / 8 * (8 * layers + 6 * head - 6 * vision) / 450e9)
    frozen = MemoryModel(shape, replace(settings, frozen=("language",)))
    assert gather_s(frozen, H100, 1) == pytest.approx(7 / 8 * (4 * layers + 2 * head + 4 * vision) / 450e9)
    assert gather_s(MemoryModel(shape, replace(settings, sync="step")), H100, 1) == 0


@pytest.mark.parametrize("path", sorted(DEVICES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_device_plans_every_model(path: Path) -> None:
    device = Device.load(path)
    assert described(DEVICES, f"NVIDIA {device.matches[0]} 80GB") == device
    sources = [line for line in path.read_text().splitlines() if "e+" in line or "e-" in line]
    assert all("#" in line for line in sources)
    assert len(sources) == 9
    costs = [cost_of(name, device) for name in TEXT]
    assert [cost.linear_s for cost in costs] == sorted(cost.linear_s for cost in costs)
    for cost in costs:
        assert CostModel.from_json(cost.to_json()) == cost
        plan_batch([Sample(str(row), 3000 * row + 100) for row in range(8)], ClusterSpec(8, 8, 8192), cost).validate()


def test_a_device_is_found_by_its_drivers_name(tmp_path: Path) -> None:
    found = [described(DEVICES, name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A800-SXM4-80GB", "Ascend910B3",
                                                   "Tesla V100")]
    assert [device and device.name for device in found] == ["h100", "a800", "ascend_910b", None]
    (tmp_path / "mine.yaml").write_text((DEVICES / "h200.yaml").read_text().replace("[H200, GH200]", "[4090]"))
    assert described(tmp_path, "NVIDIA GeForce RTX 4090") is not None
    (tmp_path / "mine.yaml").unlink()
    (tmp_path / "bad.yaml").write_text("name: bad\n")
    with pytest.raises(PlanError, match=r"bad\.yaml: got \['name'\]; allowed: "):
        Device.load(tmp_path / "bad.yaml")


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000", "NVIDIA A10", "NVIDIA H2000"])
def test_a_device_of_a_longer_name_is_another_one(name: str) -> None:
    assert described(DEVICES, name) is None


@pytest.mark.parametrize(("key", "value", "message"), [
    ("matrix_flops", "fast", "matrix_flops: got 'fast'; allowed: a number of at least 0"),
    ("matrix_flops", None, "matrix_flops: got None; allowed: a number of at least 0"),
    ("matrix_flops", 0, "got {'matrix_flops': 0.0"),
    ("matches", "A100", "matches: got 'A100'; allowed: a list of parts of names"),
    ("matches", [], "matches: got []; allowed: a list of parts of names"),
    ("matches", [None], "matches: got [None]; allowed: a list of parts of names"),
    ("matches", [""], "matches: got ['']; allowed: a list of parts of names"),
    ("extra", 1, "got ['attention_flops', ")])
def test_a_damaged_description_is_one_line(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load((DEVICES / "h100.yaml").read_text()) | {key: value}))
    with pytest.raises(PlanError) as raised:
        Device.load(path)
    assert str(raised.value).startswith(f"{path}: {message}")
    path.write_text("name: [\n")
    with pytest.raises(PlanError, match=r"bad\.yaml: not YAML: "):
        Device.load(path)


def test_published_collectives_are_near() -> None:
    """MPT-13B, 2 sequences of 2,048 tokens a micro-batch, takes as long on 64 H100 as on 8 (llm-foundry's benchmarks,
    4,800 and 4,792 tokens/s a GPU): its layers travel beside 0.85 s of computing, over eight links of each node.
    """
    settings = MemorySettings(sync="micro_batch", world_size=64, precision="bf16", recomputes=False)
    memory = MemoryModel(shape_of("7B"), settings)  # of 8.3 in place of 12.9 billion
    assert gather_s(memory, H100, 8) * 12.9 / 8.3 < 0.85
    assert collective_bytes_per_s(H100, 64, 8) == 400e9
    assert collective_bytes_per_s(H100, 64, 1) == collective_bytes_per_s(H100, 640, 2) == 450e9


def test_published_rates_are_near() -> None:
    """Llama-3.1-8B on 8 H100: 6,667 tokens/s a GPU without full recomputation (torchtitan); a 7B has as many products.
    """
    cost = cost_of("7B", world_size=8, num_nodes=1)
    seconds = 8192 * cost.linear_s + 8192**2 * cost.quadratic_s
    assert 6667 < 8192 / seconds < 2.2 * 6667
