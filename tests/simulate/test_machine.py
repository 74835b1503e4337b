"""How simulated ranks train: as a run on workers of the same devices decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from dhp_ray.config import CONF
from dhp_ray.planner import CostModel, Sample, plan_batch
from dhp_ray.planner.cost.derived import Device
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.mode import Mode
from dhp_ray.runtime.strategy import Ranks, Strategy, resolve
from dhp_ray.simulate.machine import SimulatedCluster
from dhp_ray.simulate.settings import load_simulation
from tests.runtime.driver.groups import GIB, config_of

H100 = Device.load(CONF / "device" / "h100.yaml")


def machine_of(*words: str, longest: int = 20_000) -> SimulatedCluster:
    return SimulatedCluster(load_simulation(["cluster=h100", "faults.mirror_every_steps='0'", *words]), longest, [])


@pytest.mark.parametrize(("sync", "offload"), [("auto", "off"), ("step", "auto"), ("micro_batch", "0.5")])
def test_as_a_run_on_such_workers(tmp_path: Path, sync: str, offload: str) -> None:
    words = ["train.activation_checkpointing=packs", "train.precision=bf16", f"train.activation_offload={offload}"]
    config = config_of(str(tmp_path), *words, f"planner.sync={sync}", "planner.tokens_per_rank=auto",
                       "batch.global_samples=64", "planner.max_sequence_tokens=16384",
                       "elastic.mirror_every_steps='0'")
    shape = ModelShape.load(CONF / "model_shape" / "qwen2_5_vl_3b.yaml")
    ranks = Ranks(kind="cuda", shape=shape, memory_bytes=80 * GIB, nodes=("a",) * 4,
                  node_memory_bytes={"a": 2000 * GIB}, device_names=("NVIDIA H100 80GB HBM3",))
    run = resolve(config, ranks, {})
    limits, cost = Strategy(run.config, ranks, True, run.image_limit).plan_limits(run.choice.mode)
    found = machine_of(*words, "model=qwen2_5_vl_3b", f"sync={sync}", "cluster.num_ranks=4",
                       "cluster.ranks_per_node=4", "cluster.memory_gib=80", "cluster.node_memory_gib=2000",
                       "global_samples=64", longest=16384).first
    assert (found.mode, found.limits) == (run.choice.mode, limits)
    assert found.cost.to_json() == cost.to_json()


def test_a_large_model_needs_micro_batches() -> None:
    with pytest.raises(PlanError, match=r"^model of 33.* sync=step keeps .*; use more or larger devices, sync=micro_"):
        machine_of("model=qwen2_5_vl_32b", "sync=step")
    with pytest.raises(PlanError, match=r"^model of 33.* keeps .*; use more or larger devices, or a smaller"):
        machine_of("model=qwen2_5_vl_32b", "sync=micro_batch", "cluster.num_ranks=2")
    found = machine_of("model=qwen2_5_vl_32b", longest=100_000)
    assert found.first.mode.sync == "micro_batch"
    assert found.holds(64, 100_000)
    assert found.first.cost.gather_s > 0


@pytest.mark.parametrize("offload", ["off", "0.5"])
def test_a_cost_file_takes_the_place_of_the_derived_cost(tmp_path: Path, offload: str) -> None:
    measured = CostModel(1e-9, 1e-5, 1e5, 0.3, {2: 1e10}, fixed_s_by_sync={"step": 0.3, "micro_batch": 0.1})
    (tmp_path / "cost.yaml").write_text(yaml.safe_dump(measured.to_json()))
    found = machine_of("model=qwen2_5_vl_3b", "cluster.num_ranks=8", f"cluster.cost={tmp_path / 'cost.yaml'}",
                       "sync=micro_batch", f"train.activation_offload={offload}").first
    cost = found.cost.in_mode("micro_batch")
    assert (cost.quadratic_s, cost.fixed_s) == (1e-9, 0.1)
    assert cost.memory_bytes_per_token > 0
    assert cost.memory_bytes(found.limits.tokens, 1, "micro_batch") <= 0.9 * 80 * GIB * (1 + 1e-9)
    assert cost.host_bytes_per_s == (H100.host_bytes_per_s if offload != "off" else 0.0), "no cost file has it"


@pytest.mark.parametrize(("words", "line"), [
    (["model=qwen2_5_vl_7b"], "was measured for model qwen2_5_vl_3b, and this run trains qwen2_5_vl_7b; allowed: "
                              "a file that jobs/measure.py wrote for such a run, or nothing"),
    (["cluster=a100"], "was measured on cuda NVIDIA H100 80GB HBM3, and this run is on cuda A100; allowed: "),
    (["sync=step"], "was measured for sync=micro_batch, and this run has sync=step; allowed: "),
    ([], "")])
def test_a_cost_that_was_measured_for_something_else_is_refused(tmp_path: Path, words: list[str], line: str) -> None:
    plain = ["model=qwen2_5_vl_3b", "cluster.num_ranks=8", "sync=micro_batch", "train.activation_checkpointing=false"]
    first = machine_of(*plain)
    origin = first._strategy.origin(Mode("micro_batch"), "NVIDIA H100 80GB HBM3").to_json()
    file = tmp_path / "cost.yaml"
    file.write_text(yaml.safe_dump(first.first.cost.to_json() | origin))
    words = [*plain, f"cluster.cost={file}", *words]
    if not line:
        assert machine_of(*words).first.cost.to_json()["linear_s"] == first.first.cost.linear_s
        return
    with pytest.raises(PlanError) as caught:
        machine_of(*words)
    assert str(caught.value).startswith(f"cluster.cost: {file} {line}")


def test_given_tokens_that_no_device_holds_are_refused() -> None:
    words = ["model=qwen2_5_vl_3b", "cluster.num_ranks=8", "sync=micro_batch", "train.activation_checkpointing=false"]
    assert machine_of(*words, "train.tokens_per_rank=3000").notice == ""
    assert machine_of(*words, "train.tokens_per_rank=9000").notice.startswith("train.tokens_per_rank: got 9000; in ")
    with pytest.raises(PlanError, match=r"^train\.tokens_per_rank: got 20000; in micro_batch a device holds 1"):
        machine_of(*words, "train.tokens_per_rank=20000")


@pytest.mark.parametrize("median", [1100, 1800, 5000])
def test_the_last_resort_is_close_where_packs_recompute(median: float) -> None:
    """Modes are compared by its plans. A 7B on 64 H100, which holds 405 tokens a rank, or 20,605."""
    place = machine_of("model=qwen2_5_vl_7b", "sync=step", "train.activation_checkpointing=packs").first
    lengths = np.minimum(np.exp(np.random.default_rng(1).normal(np.log(median), 1.0, 256)), 18_000)
    samples = [Sample(str(number), 16 + int(length)) for number, length in enumerate(lengths)]
    quick, best = (plan_batch(samples, place.cluster, place.cost, planner=planner)
                   for planner in ("dhp_quick", "dhp"))
    assert quick.predicted_time_s <= 1.12 * best.predicted_time_s
