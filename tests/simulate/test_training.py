"""How simulated ranks train: as a run on workers of the same devices decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dhp_ray.config import CONF
from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.cost.derived import Device
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.mode import Mode
from dhp_ray.simulate.training import Ranks, Wanted, memory_of, training_of
from tests.runtime.driver.groups import GIB, config_of, group_of, resolve_limits, strategy_of

H100 = Device.load(CONF / "device" / "h100.yaml")


@pytest.mark.parametrize(("sync", "longest", "gib", "offload"), [
    ("auto", 0, 3.0, "off"), ("step", 40_000, 3.0, "off"), ("micro_batch", 0, 2.0, "off"), ("step", 0, 5.0, "off"),
    ("step", 40_000, 3.0, "auto"), ("micro_batch", 30_000, 2.0, "0.5")])
def test_as_a_run_on_such_workers(tmp_path: Path, sync: str, longest: int, gib: float, offload: str) -> None:
    words = [f"planner.sync={sync}", "train.activation_checkpointing=auto", "planner.tokens_per_rank=auto",
             "train.precision=bf16", "batch.global_samples=64", f"planner.max_sequence_tokens={longest}",
             f"train.activation_offload={offload}"]
    config = config_of(str(tmp_path), *words)
    group = group_of(4, gib, config)
    choice = resolve_limits(config, {}, group)
    mode = strategy_of(config, group).choose().mode if sync != "auto" else choice.mode
    again = "true" if mode.recomputes else "packs"
    config = replace(config, train=replace(config.train, activation_checkpointing=again))
    (tokens, moved, recomputed), cost = strategy_of(config, group, True).plan_limits(mode)
    ranks = Ranks(device=H100, kind="cuda", memory_bytes=gib * GIB, nodes=(0,) * 4,
                  node_memory_bytes=group.members[0].described["host_memory_bytes"])
    wanted = Wanted(sync=sync, longest_tokens=longest or 4096 * 4, samples_per_rank=16, activation_offload=offload)
    training = training_of(group.members[0].described["shape"], ranks, wanted)
    assert training.mode == mode
    assert training.tokens_per_rank >= tokens  # of a run, at most what its longest sequence asks of so few ranks
    limited = training if offload == "auto" or recomputed.share else training_of(
        group.members[0].described["shape"], ranks,
        replace(wanted, tokens_per_rank=str(tokens), sync=mode.sync, recomputes=again))
    assert (limited.tokens_per_rank, limited.offload) == (tokens, moved)
    assert limited.recomputation == recomputed
    assert (moved.share > 0) == (offload != "off")
    assert limited.cost.in_mode(mode.sync).to_json() == cost.in_mode(mode.sync).to_json()
    there = strategy_of(config, group).memory(mode).settings
    assert replace(there, mirror_every_steps="0") == memory_of(
        training.memory.shape, ranks, wanted, mode).settings


def shape() -> ModelShape:
    return ModelShape.load(CONF / "model_shape" / "qwen2_5_vl_32b.yaml")


def test_a_large_model_needs_micro_batches() -> None:
    ranks = Ranks(device=H100, kind="cuda", memory_bytes=80 * GIB, nodes=tuple(rank // 8 for rank in range(64)))
    assert training_of(shape(), ranks, Wanted(sync="step")).tokens_per_rank < 1
    found = training_of(shape(), ranks, Wanted(sync="auto", longest_tokens=100_000))
    assert found.mode.sync == "micro_batch"
    assert found.most_tokens * 64 >= 100_000
    assert found.gather_s > 0


def test_recomputation_of_packs_has_room_for_as_much_as_that_of_all() -> None:
    ranks = Ranks(device=H100, kind="cuda", memory_bytes=64 * GIB, nodes=tuple(rank // 8 for rank in range(64)))
    eight = ModelShape.load(CONF / "model_shape" / "internvl3_8b.yaml")
    found = {again: training_of(eight, ranks, Wanted(recomputes=again, longest_tokens=64_000, image_limit=256))
             for again in ("false", "true", "packs", "auto")}
    assert found["packs"].tokens_per_rank == found["false"].tokens_per_rank == found["false"].most_tokens < 1000
    assert found["packs"].most_tokens == found["true"].tokens_per_rank > 1000
    assert (found["auto"].mode, found["auto"].recomputation) == (Mode("step", False), found["packs"].recomputation)
    assert not found["true"].recomputation.share


def test_a_cost_file_takes_the_place_of_the_derived_cost() -> None:
    ranks = Ranks(device=H100, kind="cuda", memory_bytes=80 * GIB, nodes=(0,) * 8)
    measured = CostModel(1e-9, 1e-5, 1e5, 0.3, {2: 1e10}, fixed_s_by_sync={"step": 0.3, "micro_batch": 0.1})
    found = training_of(ModelShape.load(CONF / "model_shape" / "qwen2_5_vl_3b.yaml"), ranks,
                        Wanted(sync="micro_batch", longest_tokens=2000), measured)
    assert (found.cost.quadratic_s, found.cost.fixed_s) == (1e-9, 0.1)
    assert found.cost.memory_bytes_per_token > 0
    assert found.cost.memory_bytes(found.tokens_per_rank, 1, "micro_batch") <= 0.9 * 80 * GIB * (1 + 1e-9)


@pytest.mark.parametrize("median", [1100, 1800, 5000])
def test_the_last_resort_is_close_where_packs_recompute(median: float) -> None:
    """Modes are compared by its plans. A 7B on 64 H100, which holds 405 tokens a rank, or 20,605."""
    nodes = tuple(rank // 8 for rank in range(64))
    training = training_of(ModelShape.load(CONF / "model_shape" / "qwen2_5_vl_7b.yaml"),
                           Ranks(device=H100, kind="cuda", memory_bytes=80 * GIB, nodes=nodes),
                           Wanted(sync="step", recomputes="packs", longest_tokens=20_000))
    cluster = ClusterSpec.of_nodes(nodes, training.tokens_per_rank, recomputation=training.recomputation)
    lengths = np.minimum(np.exp(np.random.default_rng(1).normal(np.log(median), 1.0, 256)), 18_000)
    samples = [Sample(str(number), 16 + int(length)) for number, length in enumerate(lengths)]
    quick, best = (plan_batch(samples, cluster, replace(training.cost, group_s=0.0), planner=planner)
                   for planner in ("dhp_quick", "dhp"))
    assert quick.predicted_time_s <= 1.12 * best.predicted_time_s


@pytest.mark.parametrize("offload", ["auto", "0.5"])
def test_a_measured_cost_takes_the_devices_link_to_host_memory(offload: str) -> None:
    """No cost file has it; without it copies would cost nothing."""
    shape = ModelShape.load(CONF / "model_shape" / "qwen2_5_vl_3b.yaml")
    cost = CostModel(4e-8, 5e-5, 4608, 0.01, {2: 1e9}, communication="ring", pack_s=5e-3)
    ranks = Ranks(device=H100, kind="cuda", memory_bytes=80.0 * GIB, nodes=(0,) * 8, node_memory_bytes=2000.0 * GIB)
    training = training_of(shape, ranks, Wanted(activation_offload=offload), cost)
    assert training.cost.host_bytes_per_s == H100.host_bytes_per_s
    assert training.cost.host_s(1000.0) > 0
