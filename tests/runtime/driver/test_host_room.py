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
from dhp_ray.runtime.driver.group import WorkerGroup
from dhp_ray.runtime.driver.host_room import (
    OFFLOAD,
    Limits,
    node_limit,
    offload_of,
    plain_tokens,
    recomputation_of,
    share_of_every_pack,
)
from dhp_ray.runtime.driver.modes import cost_of, memory_of, mode_of
from dhp_ray.runtime.driver.room import (
    check_host_memory,
    limits_as_given,
    limits_of_generation,
    ranks_that_hold,
    within_memory,
)
from dhp_ray.runtime.driver.start import resolve_limits
from dhp_ray.runtime.messages import RunError
from tests.runtime.driver.groups import GIB, config_of, group_of

AUTO = ("planner.tokens_per_rank=auto", "train.precision=bf16", "train.activation_offload=auto")
MODE, RECOMPUTES = Mode("step", False), Mode("step", True)
ROOM = 0.3


def on_hosts(group: WorkerGroup, host_gib: float) -> WorkerGroup:
    """The same workers, on a node with so much memory."""
    for member in group.members:
        member.described["host_memory_bytes"] = int(host_gib * GIB)
    return group


def described(tmp_path: Path, words: Sequence[str] = AUTO, host_gib: float = 64.0, device: str = "cuda",
              num_ranks: int = 4) -> tuple[Config, WorkerGroup]:
    config = config_of(str(tmp_path), *words)
    return config, on_hosts(group_of(num_ranks, ROOM, config, device), host_gib)


@pytest.mark.parametrize("share", ["on", "0", "0.0", "1.5", "-0.5", "nan"])
def test_what_is_no_share_of_activations_is_refused(share: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load([f"{OFFLOAD}={share}"])
    assert str(raised.value) == f"{OFFLOAD}: got {share!r}; allowed: off, auto, or a share of more than 0 and at most 1"


def test_shares_of_every_pack_are_taken_as_written() -> None:
    assert [share_of_every_pack(load([f"{OFFLOAD}={good}"])) for good in ("off", "auto", "1", "1.0", "0.25")] == [
        0.0, 0.0, 1.0, 1.0, 0.25]


def test_a_rank_holds_more_tokens_with_activations_in_its_nodes_memory(tmp_path: Path) -> None:
    config, group = described(tmp_path)
    memory, limit_bytes = memory_of(config, group, MODE), 0.9 * ROOM * GIB
    tokens = plain_tokens(config, memory, group)
    offload = offload_of(config, memory, group, tokens)
    assert offload.from_tokens <= tokens < offload.tokens_per_rank
    assert offload.tokens_per_rank == memory.tokens_that_fit(limit_bytes, 1.0)
    for held in np.linspace(tokens, offload.tokens_per_rank, 20).astype(int).tolist():
        load = memory.worst_load(held, float(offload.share_of(held)))
        assert memory.memory(load).device_bytes <= limit_bytes


def test_no_more_than_the_node_has_room_for(tmp_path: Path) -> None:
    config, group = described(tmp_path)
    memory = memory_of(config, group, MODE)
    tokens = plain_tokens(config, memory, group)
    most = offload_of(config, memory, group, tokens)
    beside = sum(node_terms(memory, tokens, 4).values())
    needed = node_terms(memory, most.tokens_per_rank, 4, most.share)[ACTIVATIONS]
    on_hosts(group, (beside + needed / 2) / 0.9 / GIB)
    less = offload_of(config, memory, group, tokens)
    assert 0 < less.share < most.share
    assert tokens < less.tokens_per_rank < most.tokens_per_rank
    assert sum(node_terms(memory, less.tokens_per_rank, 4, less.share).values()) <= node_limit(
        group, group.members[0].described["node_id"])
    assert offload_of(config, memory, on_hosts(group, beside / 0.9 / GIB), tokens) == NO_OFFLOAD


def test_off_and_on_a_cpu_nothing_is_moved_by_itself(tmp_path: Path) -> None:
    for words, device in ((("train.activation_offload=off",), "cuda"), (AUTO, "cpu")):
        config, group = described(tmp_path, words, device=device)
        assert offload_of(config, memory_of(config, group, MODE), group, 100) == NO_OFFLOAD


def test_a_share_of_every_pack_makes_room_for_more_tokens(tmp_path: Path) -> None:
    plain, group = described(tmp_path, ("train.precision=bf16", "planner.tokens_per_rank=auto"))
    half, _ = described(tmp_path, (*AUTO[:2], "train.activation_offload=0.5"))
    found = [plain_tokens(config, memory_of(config, group, MODE), group) for config in (plain, half)]
    assert found[1] > 1.2 * found[0]
    half.planner.tokens_per_rank = str(found[1])
    limits, cost = within_memory(half, group, MODE, auto=True)
    assert limits == Limits(found[1], Offload(0.5, 0, found[1]))
    assert 0.88 * ROOM * GIB < cost.memory_bytes(found[1], 1, "step") <= 0.9 * ROOM * GIB
    memory = memory_of(half, group, MODE)
    beside, moved = (sum(node_terms(memory, found[1], 4, share).values()) for share in (0.0, 0.5))
    check_host_memory(half, on_hosts(group, 1.01 * moved / 0.9 / GIB), MODE)
    on_hosts(group, (beside + moved) / 2 / 0.9 / GIB)
    with pytest.raises(RunError, match=r"^train\.activation_offload: got 0\.5; the 4 ranks on node .* keep up to .*, "
                                       r"activations [\d.]+ GiB.*; allowed: a smaller share, off, which takes "):
        check_host_memory(half, group, MODE)


def test_the_longest_sequence_is_what_all_ranks_hold_so(tmp_path: Path) -> None:
    config, group = described(tmp_path)
    choice = resolve_limits(config, {}, group)
    limits = limits_of_generation(config, group, 4)
    assert choice.mode == MODE
    assert config.planner.tokens_per_rank == str(limits.tokens)
    assert config.planner.max_sequence_tokens == 4 * limits.most_tokens > 4 * limits.tokens
    assert ranks_that_hold(config, group, 4)(4 * limits.most_tokens) == 4
    assert ranks_that_hold(config, group, 4)(limits.most_tokens) <= 2
    _, cost = within_memory(config, group, MODE, auto=True)
    assert cost.host_bytes_per_s == cost_of(config, group, MODE).host_bytes_per_s > 0
    memory = memory_of(config, group, MODE)
    assert cost.offload_bytes_per_token == memory.moved_bytes(memory.worst_load(1, 1.0)._replace(patches=0))


def test_given_tokens_that_a_device_does_not_hold_are_held_with_the_nodes_memory(tmp_path: Path) -> None:
    config, group = described(tmp_path, (*AUTO[1:], "planner.tokens_per_rank=100"))
    assert limits_as_given(config, group, MODE) == Limits(100, NO_OFFLOAD)
    config.planner.tokens_per_rank = "4000"
    held = plain_tokens(config, memory_of(config, group, MODE), group)
    limits = limits_as_given(config, group, MODE)
    assert limits.tokens == held < limits.most_tokens <= 4000
    config.train.activation_offload = "off"
    assert limits_as_given(config, group, MODE) == Limits(4000, NO_OFFLOAD)
    config.train.activation_offload = "0.5"
    assert limits_as_given(config, group, MODE) == Limits(4000, Offload(0.5, 0, 4000))


def test_recomputation_is_not_needed_for_what_host_memory_holds(tmp_path: Path) -> None:
    """Unless the copies of the longest sequence take longer than to compute everything twice."""
    words = (*AUTO, "train.activation_checkpointing=auto", "planner.sync=step", "batch.global_samples=64")
    config = config_of(str(tmp_path), *words)
    group = on_hosts(group_of(4, 3.0, config), 512.0)
    held = memory_of(config, group, MODE).tokens_that_fit(0.9 * 3 * GIB)
    config.planner.max_sequence_tokens = int(1.05 * 4 * held)
    assert mode_of(config, group, auto_tokens=True).mode == MODE
    config.planner.max_sequence_tokens = 8 * held
    assert mode_of(config, group, auto_tokens=True).mode == RECOMPUTES
    config.train.activation_offload = "off"
    config.planner.max_sequence_tokens = int(1.05 * 4 * held)
    choice = mode_of(config, group, auto_tokens=True)
    assert choice.mode == MODE
    assert "train.activation_checkpointing=auto is packs" in choice.line


def test_packs_that_move_activations_recompute_none(tmp_path: Path) -> None:
    config, group = described(tmp_path, (*AUTO, "train.activation_checkpointing=packs"))
    memory = memory_of(config, group, MODE)
    tokens = plain_tokens(config, memory, group)
    offload = offload_of(config, memory, group, tokens)
    assert offload.share
    assert not recomputation_of(config, memory, group, offload, tokens).share
    recomputation = recomputation_of(config, memory, group, NO_OFFLOAD, tokens)
    assert recomputation.tokens_per_rank == memory.tokens_that_fit(0.9 * ROOM * GIB, recomputed=1.0) > tokens
    on_cpu, cpus = described(tmp_path, (*AUTO, "train.activation_checkpointing=packs"), device="cpu")
    assert not recomputation_of(on_cpu, memory_of(on_cpu, cpus, MODE), cpus, NO_OFFLOAD, tokens).share
    assert not recomputation_of(config, memory_of(config, group, RECOMPUTES), group, NO_OFFLOAD, tokens).share


def test_a_cost_file_without_the_link_takes_the_devices(tmp_path: Path) -> None:
    path = tmp_path / "cost.yaml"
    path.write_text("{quadratic_s: 0, linear_s: 1, comm_bytes_per_token: 1, fixed_s: 0, bandwidth_bytes_per_s: {2: 1}}")
    config, group = described(tmp_path, (*AUTO, f"planner.cost={path}"))
    assert cost_of(config, group, MODE).host_bytes_per_s > 1e10
    half = replace(config, train=replace(config.train, activation_offload="0.5"))
    assert cost_of(half, group, MODE).host_bytes_per_s > 1e10
    assert cost_of(replace(config, train=replace(config.train, activation_offload="off")), group,
                   MODE).host_bytes_per_s == 0
