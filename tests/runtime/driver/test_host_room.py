"""What goes to host memory, by what devices and nodes have room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dhp_ray.config import Config, ConfigError, load
from dhp_ray.planner.memory.host import ACTIVATIONS, node_terms
from dhp_ray.planner.mode import Mode
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, Offload
from dhp_ray.runtime.messages import RunError
from dhp_ray.runtime.strategy import OFFLOAD, PackLimits
from tests.runtime.driver.groups import (
    GIB,
    Workers,
    config_of,
    group_of,
    limits_as_given,
    limits_of_generation,
    resolve_limits,
    strategy_of,
)

AUTO = ("planner.tokens_per_rank=auto", "train.precision=bf16", "train.activation_offload=auto")
MODE, RECOMPUTES = Mode("step"), Mode("step", "true")
ROOM = 0.36


def on_hosts(group: Workers, host_gib: float) -> Workers:
    """The same workers, on a node with so much memory."""
    for member in group.members:
        member.described["host_memory_bytes"] = int(host_gib * GIB)
    return group


def described(tmp_path: Path, words: Sequence[str] = AUTO, host_gib: float = 64.0, device: str = "cuda",
              num_ranks: int = 4) -> tuple[Config, Workers]:
    config = config_of(str(tmp_path), *words)
    return config, on_hosts(group_of(num_ranks, ROOM, config, device), host_gib)


@pytest.mark.parametrize("share", ["on", "0", "0.0", "1.5", "-0.5", "nan"])
def test_what_is_no_share_of_activations_is_refused(share: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load([f"{OFFLOAD}={share}"])
    assert str(raised.value) == f"{OFFLOAD}: got {share!r}; allowed: off, auto, or a share of more than 0 and at most 1"


def test_shares_of_every_pack_are_taken_as_written() -> None:
    found = [load([f"{OFFLOAD}={good}"]) for good in ("off", "auto", "1", "1.0", "0.25")]
    assert [strategy_of(config, group_of(1, 1.0, config)).moved_share for config in found] == [0.0, 0.0, 1.0, 1.0, 0.25]


def test_a_rank_holds_more_tokens_with_activations_in_its_nodes_memory(tmp_path: Path) -> None:
    config, group = described(tmp_path)
    memory, limit_bytes = strategy_of(config, group).memory(MODE), 0.9 * ROOM * GIB
    tokens = strategy_of(config, group).device_tokens(memory)
    offload = strategy_of(config, group).offload(memory, tokens)
    assert offload.from_tokens <= tokens < offload.tokens_per_rank
    assert offload.tokens_per_rank == memory.tokens_that_fit(limit_bytes, 1.0)
    for held in np.linspace(tokens, offload.tokens_per_rank, 20).astype(int).tolist():
        load = memory.worst_load(held, float(offload.share_of(held)))
        assert memory.memory(load).device_bytes <= limit_bytes


def test_no_more_than_the_node_has_room_for(tmp_path: Path) -> None:
    config, group = described(tmp_path)
    memory = strategy_of(config, group).memory(MODE)
    tokens = strategy_of(config, group).device_tokens(memory)
    most = strategy_of(config, group).offload(memory, tokens)
    beside = sum(node_terms(memory, tokens, 4).values())
    needed = node_terms(memory, most.tokens_per_rank, 4, most.share)[ACTIVATIONS]
    on_hosts(group, (beside + needed / 2) / 0.9 / GIB)
    less = strategy_of(config, group).offload(memory, tokens)
    assert 0 < less.share < most.share
    assert tokens < less.tokens_per_rank < most.tokens_per_rank
    assert sum(node_terms(memory, less.tokens_per_rank, 4, less.share).values()) <= strategy_of(
        config, group).node_limit(group.members[0].described["node_id"])
    assert strategy_of(config, on_hosts(group, beside / 0.9 / GIB)).offload(memory, tokens) == NO_OFFLOAD


def test_off_and_on_a_cpu_nothing_is_moved_by_itself(tmp_path: Path) -> None:
    for words, device in ((("train.activation_offload=off",), "cuda"), (AUTO, "cpu")):
        config, group = described(tmp_path, words, device=device)
        assert strategy_of(config, group).offload(strategy_of(config, group).memory(MODE), 100) == NO_OFFLOAD


def test_a_share_of_every_pack_makes_room_for_more_tokens(tmp_path: Path) -> None:
    plain, group = described(tmp_path, ("train.precision=bf16", "planner.tokens_per_rank=auto"))
    half, _ = described(tmp_path, (*AUTO[:2], "train.activation_offload=0.5"))
    found = [strategy.device_tokens(strategy.memory(MODE))
             for strategy in (strategy_of(plain, group), strategy_of(half, group))]
    assert found[1] > 1.2 * found[0]
    half.planner.tokens_per_rank = str(found[1])
    limits, cost = strategy_of(half, group, True).plan_limits(MODE)
    assert limits == PackLimits(found[1], Offload(0.5, 0, found[1]))
    assert 0.88 * ROOM * GIB < cost.memory_bytes(found[1], 1, "step") <= 0.9 * ROOM * GIB
    memory = strategy_of(half, group).memory(MODE)
    beside, moved = (sum(node_terms(memory, found[1], 4, share).values()) for share in (0.0, 0.5))
    strategy_of(half, on_hosts(group, 1.01 * moved / 0.9 / GIB)).check_host_memory(MODE)
    on_hosts(group, (beside + moved) / 2 / 0.9 / GIB)
    with pytest.raises(RunError, match=r"^train\.activation_offload: got 0\.5; the 4 ranks on node .* keep up to .*, "
                                       r"activations [\d.]+ GiB.*; allowed: a smaller share, off, which takes "):
        strategy_of(half, group).check_host_memory(MODE)


def test_the_longest_sequence_is_what_all_ranks_hold_so(tmp_path: Path) -> None:
    config, group = described(tmp_path)
    choice = resolve_limits(config, {}, group)
    limits = limits_of_generation(config, group, 4)
    assert choice.mode == MODE
    assert config.planner.tokens_per_rank == str(limits.tokens)
    assert config.planner.max_sequence_tokens == 4 * limits.most_tokens > 4 * limits.tokens
    assert strategy_of(config, group).ranks_for(4)(4 * limits.most_tokens) == 4
    assert strategy_of(config, group).ranks_for(4)(limits.most_tokens) <= 2
    _, cost = strategy_of(config, group, True).plan_limits(MODE)
    assert cost.host_bytes_per_s == strategy_of(config, group).cost(MODE).host_bytes_per_s > 0
    memory = strategy_of(config, group).memory(MODE)
    assert cost.offload_bytes_per_token == memory.moved_bytes(memory.worst_load(1, 1.0)._replace(patches=0))


def test_given_tokens_that_a_device_does_not_hold_are_held_with_the_nodes_memory(tmp_path: Path) -> None:
    config, group = described(tmp_path, (*AUTO[1:], "planner.tokens_per_rank=100"))
    assert limits_as_given(config, group, MODE) == PackLimits(100, NO_OFFLOAD)
    config.planner.tokens_per_rank = "4000"
    held = strategy_of(config, group).device_tokens(strategy_of(config, group).memory(MODE))
    limits = limits_as_given(config, group, MODE)
    assert limits.tokens == held < limits.most_tokens <= 4000
    config.train.activation_offload = "off"
    assert limits_as_given(config, group, MODE) == PackLimits(4000, NO_OFFLOAD)
    config.train.activation_offload = "0.5"
    assert limits_as_given(config, group, MODE) == PackLimits(4000, Offload(0.5, 0, 4000))


def test_recomputation_is_not_needed_for_what_host_memory_holds(tmp_path: Path) -> None:
    """Unless the copies of the longest sequence take longer than to compute everything twice."""
    words = (*AUTO, "train.activation_checkpointing=auto", "planner.sync=step", "batch.global_samples=64")
    config = config_of(str(tmp_path), *words)
    group = on_hosts(group_of(4, 3.0, config), 512.0)
    held = strategy_of(config, group).memory(MODE).tokens_that_fit(0.9 * 3 * GIB)
    config.planner.max_sequence_tokens = int(1.05 * 4 * held)
    assert strategy_of(config, group).choose().mode == MODE
    config.planner.max_sequence_tokens = 8 * held
    assert strategy_of(config, group).choose().mode == RECOMPUTES
    config.train.activation_offload = "off"
    config.planner.max_sequence_tokens = int(1.05 * 4 * held)
    choice = strategy_of(config, group).choose()
    assert choice.mode == MODE
    assert "train.activation_checkpointing=auto is packs" in choice.line


def test_packs_that_move_activations_recompute_none(tmp_path: Path) -> None:
    config, group = described(tmp_path, (*AUTO, "train.activation_checkpointing=packs"))
    memory = strategy_of(config, group).memory(MODE)
    tokens = strategy_of(config, group).device_tokens(memory)
    offload = strategy_of(config, group).offload(memory, tokens)
    assert offload.share
    assert not strategy_of(config, group).recomputation(memory, offload, tokens).share
    recomputation = strategy_of(config, group).recomputation(memory, NO_OFFLOAD, tokens)
    assert recomputation.tokens_per_rank == memory.tokens_that_fit(0.9 * ROOM * GIB, recomputed=1.0) > tokens
    on_cpu, cpus = described(tmp_path, (*AUTO, "train.activation_checkpointing=packs"), device="cpu")
    assert not strategy_of(on_cpu, cpus).recomputation(strategy_of(on_cpu, cpus).memory(MODE), NO_OFFLOAD, tokens).share
    again = strategy_of(config, group).memory(RECOMPUTES)
    assert not strategy_of(config, group).recomputation(again, NO_OFFLOAD, tokens).share


def test_a_nodes_memory_has_room_for_the_pixels_of_packs_that_recompute(tmp_path: Path) -> None:
    config, group = described(tmp_path, ("planner.tokens_per_rank=auto", "train.precision=bf16",
                                         "train.activation_checkpointing=packs"))
    resolve_limits(config, {}, group)
    strategy = strategy_of(config, group)
    limits, memory = strategy.limits(MODE), strategy.memory(MODE)
    few, most = (sum(node_terms(memory, tokens, 4).values()) for tokens in (limits.tokens, limits.most_tokens))
    assert most > few
    strategy_of(config, on_hosts(group, 1.01 * most / 0.9 / GIB)).check_host_memory(MODE)
    on_hosts(group, (few + most) / 2 / 0.9 / GIB)
    with pytest.raises(RunError, match=r"^cluster\.num_workers: got 2; the 4 ranks on node a keep up to .*pixels"):
        strategy_of(config, group).check_host_memory(MODE)


def test_a_cost_file_without_the_link_takes_the_devices(tmp_path: Path) -> None:
    path = tmp_path / "cost.yaml"
    path.write_text("{quadratic_s: 0, linear_s: 1, comm_bytes_per_token: 1, fixed_s: 0, bandwidth_bytes_per_s: {2: 1}}")
    config, group = described(tmp_path, (*AUTO, f"planner.cost={path}"))
    assert strategy_of(config, group).cost(MODE).host_bytes_per_s > 1e10
    half = replace(config, train=replace(config.train, activation_offload="0.5"))
    assert strategy_of(half, group).cost(MODE).host_bytes_per_s > 1e10
    off = replace(config, train=replace(config.train, activation_offload="off"))
    assert strategy_of(off, group).cost(MODE).host_bytes_per_s == 0
