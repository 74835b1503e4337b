"""The cost model: its formulas by hand, and files that it refuses."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dhp_ray.planner import ClusterSpec, CostModel, PlanError, Sample

CONSTANTS = {"quadratic_s": 2e-6, "linear_s": 1e-3, "comm_bytes_per_token": 100, "fixed_s": 0.5,
             "bandwidth_bytes_per_s": {2: 1000, 4: 500}}
CLUSTER = ClusterSpec(8, 4, 1000)


def test_all_to_all_by_degree():
    cost = CostModel(**CONSTANTS)
    compute = 2e-6 * (300**2 + 100**2) + 1e-3 * 400
    assert cost.pack_time_s([300, 100], (0,), CLUSTER) == pytest.approx(compute)
    assert cost.pack_time_s([300, 100], (0, 1), CLUSTER) == pytest.approx(compute / 2 + 100 * 400 / 2 / 1000)
    # the row above
    assert cost.pack_time_s([300, 100], (0, 1, 2), CLUSTER) == pytest.approx(compute / 3 + 100 * 400 / 3 / 500)
    # past the last
    assert cost.pack_time_s([300, 100], tuple(range(8)), CLUSTER) == pytest.approx(compute / 8 + 100 * 400 / 8 / 500)


def test_ring_hides_behind_attention_and_knows_nodes():
    cost = CostModel(**CONSTANTS | {"communication": "ring", "bandwidth_bytes_per_s": {"intra": 1e6, "inter": 1e5},
                                    "latency_s": 0.01, "pack_s": 0.002,
                                    "overlap": 0.5})
    attention, linear = 2e-6 * 400**2, 1e-3 * 400

    def by_hand(degree, bandwidth, speed=1.0):
        transfer = (degree - 1) * 100 * 400 / degree / bandwidth
        hidden = 0.5 * (degree - 1) / degree * attention / (degree * speed)
        return (attention + linear) / (degree * speed) + max(0, transfer - hidden) + (degree - 1) * 0.01 + 0.002

    assert cost.pack_time_s([400], (0, 1, 2), CLUSTER) == pytest.approx(by_hand(3, 1e6))
    assert cost.pack_time_s([400], (2, 3, 4), CLUSTER) == pytest.approx(by_hand(3, 1e5))
    slow = ClusterSpec(8, 4, 1000, (1.0, 0.5) + (1.0,) * 6)
    assert cost.pack_time_s([400], (0, 1, 2), slow) == pytest.approx(by_hand(3, 1e6, 0.5))


def test_kernels_take_keys_by_the_block():
    """On two ranks as on one: each has half of all blocks."""
    cost = CostModel(**CONSTANTS | {"attention_block": 128})
    pairs = 300 * (300 + 128) + 100 * (100 + 100)
    assert cost.pack_time_s([300, 100], (0,), CLUSTER) == pytest.approx(2e-6 * pairs + 1e-3 * 400)
    assert cost.pack_time_s([300, 100], (0, 1), CLUSTER) == pytest.approx(
        (2e-6 * pairs + 1e-3 * 400) / 2 + 100 * 400 / 2 / 1000)


def test_images_and_memory():
    cost = CostModel(**CONSTANTS | {"vision_quadratic_s": 1e-5, "vision_linear_s": 1e-3, "memory_bytes_per_token": 10,
                                    "resident_bytes": {"step": 1000, "micro_batch": 100}})
    assert cost.image_s(Sample("a", 1, 2, ((2, 4, 8), (1, 2, 2)))) == pytest.approx([2 * (1e-5 * 32**2 + 1e-3 * 32),
                                                                                     1e-5 * 16 + 1e-3 * 4])
    assert cost.memory_bytes(400, 2, "step") == 1000 + 10 * 200
    assert cost.memory_bytes(400, 2, "micro_batch") == 100 + 10 * 200


@pytest.mark.parametrize(("change", "message"), [
    ({"quadratic_s": None}, "quadratic_s: got None"), ({"linear_s": -1e-4}, "linear_s: got -0.0001"),
    ({"fixed_s": "much"}, "fixed_s: got 'much'"),
    ({"bandwidth_bytes_per_s": {2: 0}}, r"bandwidth_bytes_per_s.2: got 0"),
    ({"bandwidth_bytes_per_s": {"intra": 1}}, r"bandwidth_bytes_per_s.inter: missing"),
    ({"bandwidth_bytes_per_s": {1: 5}}, "degree 1"), ({"bandwidth_bytes_per_s": {"²": 5}}, "degree '²'"),
    ({"bandwidth_bytes_per_s": 1e-300}, r"bandwidth_bytes_per_s.2: got 1e-300; allowed: at least 1"),
    ({"linear_s": 1e306}, r"linear_s: got 1e\+306; allowed: a number of at least 0 and at most 1e\+30"),
    ({"communication": "tree"}, "communication: got 'tree'; allowed: ring, all_to_all"),
    ({"latency": 1}, "latency: no such constant"), ({"overlap": 2}, "overlap: got 2"),
    ({"fixed_s": float("nan")}, "fixed_s: got nan"), ({"encoder_pass_s": -1}, "encoder_pass_s: got -1"),
    ({"attention_block": "many"}, "attention_block: got 'many'"), ({"update_s": float("inf")}, "update_s: got inf"),
    ({"resident_bytes": {"step": 1}}, "resident_bytes.micro_batch: missing"),
    ({"fixed_s_by_sync": {"step": 1}}, "fixed_s_by_sync: got {'step': 1}; allowed: none, or step and micro_batch"),
    ({"fixed_s_by_sync": {"step": 1, "micro_batch": -1}}, "fixed_s_by_sync.micro_batch: got -1; allowed: a number of "
                                                          "at least 0")])
def test_a_bad_constant_is_named_with_its_file(tmp_path, change, message):
    path = tmp_path / "cost.yaml"
    path.write_text(yaml.safe_dump(CONSTANTS | change))
    with pytest.raises(PlanError, match=f"^{path}: .*{message}"):
        CostModel.load(path)


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_a_missing_constant_is_named(tmp_path, name):
    path = tmp_path / "cost.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in CONSTANTS.items() if key != name}))
    with pytest.raises(PlanError, match=f"^{path}: {name}: missing"):
        CostModel.load(path)


def test_a_changed_copy_has_rates_of_its_own():
    cost = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1.0}, pack_s=1.0)
    cluster = ClusterSpec(1, 1, 10)
    assert cost.pack_time_s([5], (0,), cluster) == 6.0
    assert replace(cost, pack_s=3.0).pack_time_s([5], (0,), cluster) == 8.0


def test_a_file_that_is_no_cost_file(tmp_path):
    with pytest.raises(PlanError, match=r"absent.yaml: cannot be read"):
        CostModel.load(tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(PlanError, match=r"broken.yaml: not YAML: line 1: "):
        CostModel.load(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(PlanError, match=r"list.yaml: not a mapping from names to values"):
        CostModel.load(tmp_path / "list.yaml")


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_the_files_of_the_package_load_and_survive_json(device):
    cost = CostModel.load(Path(__file__).parents[2] / "conf" / "cost" / f"{device}.yaml")
    assert CostModel.from_json(cost.to_json()) == cost


@pytest.mark.skipif("DHP_RAY_TEST_DATA" not in os.environ, reason="DHP_RAY_TEST_DATA names no folder with cost/")
def test_the_published_file_is_read_as_it_is():
    cost = CostModel.load(Path(os.environ["DHP_RAY_TEST_DATA"]) / "cost" / "flexsp_gpt7b_a800.yaml")
    cluster = ClusterSpec(16, 8, 8192)
    compute = 5.128e-9 * 50000**2 + 1.839576e-4 * 50000
    assert cost.pack_time_s([50000], tuple(range(10)),
                            cluster) == pytest.approx(compute / 10 + 2097152 * 50000 / 10 / 10831790080)
