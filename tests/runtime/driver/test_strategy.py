"""The mode of a generation, its memory model and its costs, for groups of described workers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.config import CONF, ConfigError
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.origin import CostFile
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.mode import Mode
from dhp_ray.runtime.driver.session import Session
from dhp_ray.runtime.messages import Membership, RunError
from dhp_ray.runtime.strategy import RECOMPUTATION, Choice, Ranks, Strategy, resolve
from dhp_ray.runtime.worker.run_model import state_size
from tests.runtime.driver.groups import (
    GIB,
    Workers,
    config_of,
    group_of,
    limits_as_given,
    limits_of_generation,
    members,
    resolve_limits,
    strategy_of,
)

CUDA = ACCELERATORS["cuda"]
AUTO = ("planner.sync=auto", "train.activation_checkpointing=auto", "planner.tokens_per_rank=auto",
        "train.precision=bf16")
ROOM = 3.0
"""GiB of a device on which the tiny model has packs so long that launching kernels does not decide."""


def test_given_tokens_are_as_many_as_a_device_holds_of_text(tmp_path: Path) -> None:
    """Where it does not hold so many of images that is told. On the CPU nothing is known."""
    shape = ModelShape.load(CONF / "model_shape" / "qwen2_5_vl_3b.yaml")
    ranks = Ranks(kind="cuda", shape=shape, memory_bytes=80 * GIB, nodes=("a",) * 8,
                  node_memory_bytes={"a": 2000 * GIB}, device_names=("NVIDIA H100 80GB HBM3",))

    def notices(tokens: int, ranks: Ranks = ranks, *words: str) -> tuple[str, ...]:
        config = config_of(str(tmp_path), "planner.sync=micro_batch", "train.activation_checkpointing=false",
                           "train.precision=bf16", f"planner.tokens_per_rank={tokens}", *words)
        return resolve(config, ranks, {}).notices

    assert notices(3_000) == ()
    [told] = notices(10_000)
    assert re.fullmatch(r"planner\.tokens_per_rank: got 10000; in micro_batch a device holds 10,000 tokens of text, "
                        r"3,\d{3} of images: a pack with more of these may run out of its memory", told)
    with pytest.raises(RunError, match=r"^planner\.tokens_per_rank: got 20000; in micro_batch a device holds 1\d,\d{3} "
                                       r"tokens of text, 3,\d{3} of images; allowed: auto, at most 1\d{4}, more or "):
        notices(20_000)
    assert notices(20_000, ranks, "train.activation_checkpointing=packs") == ()
    with pytest.raises(RunError, match="got 10, and a rank has room for no token"):
        notices(10, replace(ranks, memory_bytes=18 * GIB))
    text = replace(ranks, shape=replace(shape, vision=()))
    with pytest.raises(RunError, match=r"a device holds 1[0-9,]* tokens of text; allowed: auto"):
        notices(20_000, text)
    assert notices(20_000, replace(ranks, kind="cpu", device_names=("",))) == ()


def test_what_the_configuration_names_is_taken_and_not_told(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "planner.sync=micro_batch", "train.activation_checkpointing=true")
    assert strategy_of(config, group_of(2, 1.0, config)).choose() == Choice(Mode("micro_batch", "true"))


def test_where_memory_is_not_described_auto_is_step_without_recomputation(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), *AUTO)
    choice = strategy_of(config, group_of(2, 1.0, config, "cpu")).choose()
    assert choice.mode == Mode("step")
    assert choice.line == ("planner.sync=auto is step, train.activation_checkpointing=auto is false: "
                           "what cpu ranks have of memory and speed is not described")


def test_as_many_ranks_share_experts_as_each_generation_can(tmp_path: Path) -> None:
    """The preset has 6 experts. What is asked for leaves micro_batch alone."""
    config = config_of(str(tmp_path), *AUTO, "model.preset=tiny_qwen3_moe", "train.expert_parallel=4")
    for num_ranks, sharing in ((6, 3), (4, 2), (5, 1), (1, 1)):
        strategy = strategy_of(config, group_of(num_ranks, ROOM, config))
        mode = strategy.choose().mode
        assert (mode.sync, mode.expert_parallel) == ("micro_batch", 4)
        assert strategy.memory(mode).settings.expert_parallel == sharing


def test_ranks_of_a_node_share_experts_or_none_do(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), *AUTO, "model.preset=tiny_qwen3_moe", "planner.sync=micro_batch")
    choice = strategy_of(config, group_of(6, ROOM, config)).choose()
    assert f"train.expert_parallel=auto is {choice.mode.expert_parallel}" in choice.line
    assert "experts shared by up to 6 ranks" in choice.line
    assert strategy_of(config, group_of(5, ROOM, config)).choose().mode.expert_parallel == 1
    dense = config_of(str(tmp_path), *AUTO, "planner.sync=micro_batch")
    assert "expert" not in strategy_of(dense, group_of(6, ROOM, dense)).choose().line


def test_the_state_in_a_plan_is_that_of_its_mode(tmp_path: Path) -> None:
    """With the groups of ranks that share experts."""
    config = config_of(str(tmp_path), "model.preset=tiny_qwen3_moe", "planner.sync=micro_batch",
                       "train.expert_parallel=3", "planner.tokens_per_rank=100")
    strategy = strategy_of(config, group_of(6, ROOM, config))
    mode = strategy.choose().mode
    assert mode.expert_parallel == 3
    _, cost = strategy.plan_limits(mode)
    for sync, each in (("micro_batch", mode), ("step", Mode("step"))):
        assert cost.resident(sync) == sum(strategy.memory(each).resident().values())


def test_packs_recompute_as_much_as_the_longest_sequence_needs(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), *AUTO, "planner.sync=step", "batch.global_samples=64")
    group = group_of(4, ROOM, config)
    limit_bytes = 0.9 * ROOM * GIB
    tokens = strategy_of(config, group).memory(Mode("step")).tokens_that_fit(limit_bytes)
    config.planner.tokens_per_rank = str(tokens)
    memory = strategy_of(config, group).memory(Mode("step"))
    most = memory.tokens_that_fit(limit_bytes, recomputed=1.0)
    config.planner.max_sequence_tokens = 4 * tokens + 1
    assert strategy_of(config, group).choose().mode == Mode("step")
    config.train.activation_checkpointing = "packs"
    limits = limits_of_generation(config, group, 4)
    assert (limits.tokens, limits.most_tokens) == (tokens, most)
    assert limits.beyond == limits.recomputation
    for held in np.linspace(tokens, most, 20).astype(int).tolist():
        assert memory.fits(limit_bytes, held, recomputed=float(limits.recomputation.share_of(held)))
    config.planner.tokens_per_rank = str(3 * tokens // 2)  # given: as far as a rank holds them with all activations
    given = limits_as_given(config, group, Mode("step"))
    assert (given.tokens, given.most_tokens) == (tokens, 3 * tokens // 2)
    assert 0 < given.recomputation.share < 1
    for again, mode in (("false", Mode("step")), ("true", Mode("step", "true"))):
        config.train.activation_checkpointing = again
        assert not limits_of_generation(config, group, 4)[2].share
        assert strategy_of(config, group).choose().mode == mode


def test_a_smaller_generation_recomputes_to_hold_the_longest_sequence(tmp_path: Path) -> None:
    """Tokens a rank follow: each of the fewer ranks then holds more than at the run's first start."""
    config = config_of(str(tmp_path), *AUTO, "planner.sync=step", "batch.global_samples=64")
    choice = resolve_limits(config, {}, group_of(8, ROOM, config))
    assert choice.mode == Mode("step")
    first, longest = int(config.planner.tokens_per_rank), config.planner.max_sequence_tokens
    assert longest == 8 * limits_of_generation(config, group_of(8, ROOM, config), 8).most_tokens > 8 * first
    config.planner.max_sequence_tokens = longest = 8 * first
    assert config.train.activation_checkpointing == "auto"
    assert strategy_of(config, group_of(8, ROOM, config)).choose().mode == choice.mode
    fewer = group_of(6, ROOM, config)
    assert strategy_of(config, fewer).choose().mode == Mode("step")
    assert limits_of_generation(config, fewer, 6).most_tokens >= -(-longest // 6) > first
    few = [limits_of_generation(config, fewer, num_ranks).most_tokens for num_ranks in range(1, 9)]
    holding = next(num_ranks for num_ranks in range(1, 9) if num_ranks * few[num_ranks - 1] >= longest)
    assert 1 < holding <= 6
    assert strategy_of(config, fewer).ranks_for(8)(longest) == holding


@pytest.mark.parametrize(("tokens", "keys"), [
    ("8192", ["planner.sync=micro_batch"]), ("auto", AUTO), ("8192", ["planner.sync=step"])])
def test_a_run_goes_on_with_as_many_ranks_as_hold_its_state(
    tmp_path: Path, tokens: str, keys: tuple[str, ...]
) -> None:
    """On fewer all would run out of memory, step after step. On those that it started with it has been admitted."""
    config = config_of(str(tmp_path), *keys, "train.precision=bf16", "cluster.num_workers=32",
                       f"planner.tokens_per_rank={tokens}")
    shape = ModelShape.load(CONF / "model_shape" / "qwen3_30b_a3b.yaml")
    for survivors in (32, 8, 1):
        group = group_of(survivors, 80.0, config)
        for member in group.members:
            member.described["shape"] = shape
        strategy = strategy_of(config, group, tokens == "auto")
        held = [max(strategy.device_tokens(strategy.memory(mode, num_ranks)) for mode in strategy._modes())
                for num_ranks in range(1, 33)]
        least = strategy.least_ranks()
        assert least == next((place for place, tokens_held in enumerate(held, 1) if tokens_held), 32)
        assert least > 8
        assert (least == 32) == ("planner.sync=step" in keys)


def test_a_rank_trains_as_configured_and_where_that_is_open_as_the_driver_says(tmp_path: Path) -> None:
    told, untold = Membership(0, 2, 1, "", 0, mode=Mode("step", "true")), Membership(0, 2, 1, "", 0)
    undecided = config_of(str(tmp_path), *AUTO)
    assert told.mode_in(undecided) == told.mode
    assert told.mode_in(config_of(str(tmp_path), "planner.sync=micro_batch")) == Mode("micro_batch")
    assert untold.mode_in(undecided) == Mode("step")


def test_a_run_keeps_the_mode_of_its_first_start(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), *AUTO)
    stored = {"planner.sync": "micro_batch", "planner.tokens_per_rank": "5000", "planner.max_sequence_tokens": 9000}
    choice = resolve_limits(config, stored, group_of(2, 8.0, config))
    assert (config.planner.sync, choice.mode.sync) == ("micro_batch", "micro_batch")
    assert (config.planner.tokens_per_rank, config.planner.max_sequence_tokens) == ("5000", 9000)
    assert choice.line.startswith("planner.sync=auto is micro_batch, train.activation_checkpointing=auto is packs: "
                                  "planner.sync as at the run's first start; a rank is to hold 4,500 tokens, and ")
    first = config_of(str(tmp_path), *AUTO)
    assert resolve_limits(first, {}, group_of(2, 8.0, first)).mode.sync == first.planner.sync != "auto"


def test_who_is_left_when_a_driver_was_lost_may_wait_for_others(tmp_path: Path) -> None:
    """The state need not fit on so few ranks."""
    config = config_of(str(tmp_path), *AUTO)
    stored = {"planner.sync": "micro_batch", "planner.tokens_per_rank": "5000", "planner.max_sequence_tokens": 9000}
    left = group_of(1, 0.002, config)
    assert resolve_limits(config, stored, left, takes_over=True).mode == Mode("micro_batch", "true")
    with pytest.raises(RunError, match=r"GiB on each rank, which has 0\.0 GiB"):
        resolve_limits(config, stored, left)


def test_a_state_that_fits_in_one_mode_alone_gets_that_one(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), *AUTO, "comm.transport=parent")
    needed = {mode.sync: sum(strategy_of(config, group_of(8, 1.0, config)).memory(mode).resident().values()) / 0.9 / GIB
              for mode in (Mode("step"), Mode("micro_batch"))}
    assert needed["micro_batch"] < needed["step"]
    group = group_of(8, (needed["micro_batch"] + needed["step"]) / 2, config)
    assert strategy_of(config, group).choose().mode.sync == "micro_batch"


def test_no_more_groups_are_paid_for_than_ranks_can_form(tmp_path: Path) -> None:
    """Beside that of all ranks for packs, and the engine's."""
    for words, pooled in (([], [0] * 4), (["comm.transport=pool"], [0, 1, 4, CUDA.pool_groups(80 * GIB)])):
        config = config_of(str(tmp_path), *words)
        models = [strategy_of(config, group_of(size, 80.0, config)).memory(Mode("step"))
                  for size in (1, 2, 3, 16)]
        found = [model.settings.communicators_bytes / CUDA.group_bytes for model in models]
        assert found == [0, *(2 + count for count in pooled[1:])]


def test_costs_are_those_of_the_runs_own_model_on_its_slowest_device(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "train.precision=bf16", "comm.transport=pool")
    described = {"memory_bytes": 80 * GIB, "fused": True, **state_size(config)._asdict()}

    def cost(*names: str, **changed: Any) -> CostModel:
        group = Workers(members(*[{**described, "device_name": name, **changed} for name in names]))
        return strategy_of(config, group).cost(Mode("step"))

    slower = cost("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    assert slower.name == "qwen2_5_vl_a100"
    assert slower == cost("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB")
    fast = cost("NVIDIA H100 80GB HBM3")
    assert fast.linear_s < slower.linear_s
    own = cost("NVIDIA H100 80GB HBM3", fused=False)
    assert fast.linear_s < own.linear_s
    one_lacks_them = Workers(members(*[
        {**described, "device_name": "NVIDIA H100 80GB HBM3", "fused": fused} for fused in (True, False)]))
    assert strategy_of(config, one_lacks_them).cost(Mode("step")).linear_s == own.linear_s
    assert cost("Tesla V100").source.endswith("; Tesla V100 is not in conf/device")
    assert cost("Ascend910B3", device="npu").name == "qwen2_5_vl_ascend_910b"
    assert replace(cost("", device="cpu"), estimated=False) == CostModel.load(CONF / "cost" / "cpu.yaml")
    config.planner.cost = str(CONF / "cost" / "cuda.yaml")
    assert cost("NVIDIA H100 80GB HBM3") == CostModel.load(CONF / "cost" / "cuda.yaml")


def test_a_cost_file_of_another_run_is_refused_with_both_names(tmp_path: Path) -> None:
    """And counts as estimated where nobody has named it."""
    config = config_of(str(tmp_path))
    described = {"memory_bytes": 80 * GIB, "device": "cpu", "device_name": "AMD EPYC", "fused": False,
                 **state_size(config)._asdict()}
    group, mode = Workers(members(described, described)), Mode("step")
    origin = strategy_of(config, group).origin(mode)
    tree = yaml.safe_load((CONF / "cost" / "cuda.yaml").read_text()) | {"estimated": False}
    path = tmp_path / "cost.yaml"
    path.write_text(yaml.safe_dump(tree | origin.to_json()))
    config.planner.cost = str(path)
    strategy_of(config, group).check_cost(mode)
    assert not strategy_of(config, group).cost(mode).estimated
    others = Workers(members(described, described | {"device_name": "Xeon"}))
    with pytest.raises(ConfigError) as caught:
        strategy_of(config, others).check_cost(mode)
    assert str(caught.value) == (
        f"planner.cost: {path} was measured on cpu AMD EPYC, and this run is on cpu Xeon; allowed: a file that "
        "jobs/measure.py wrote for such a run, measure, or nothing")
    assert strategy_of(config, others).cost(mode).estimated
    again = Mode("step", "true")
    with pytest.raises(ConfigError, match=r"train\.activation_checkpointing=false, and this run has .*=true; allowed"):
        strategy_of(config, group).check_cost(again)
    config.planner.cost = ""
    strategy_of(config, others).check_cost(mode)
    path.write_text(yaml.safe_dump(tree))  # of the older form: nothing is known of it
    config.planner.cost = str(path)
    strategy_of(config, others).check_cost(again)
    assert not strategy_of(config, others).cost(again).estimated


def test_modes_are_compared_by_the_costs_in_the_file_and_are_those_in_it(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), *AUTO[:2], "train.precision=bf16", "planner.tokens_per_rank=100")
    group = group_of(4, ROOM, config)
    assert strategy_of(config, group).choose().mode.sync == "step"
    strategy = strategy_of(config, group)
    tree = strategy.cost(Mode("step")).to_json() | {"name": "measured"}
    origin = strategy.origin(Mode("micro_batch", "true")).to_json()
    config.planner.cost = str(tmp_path / "cost.yaml")

    def written(sync: list[str], **changed: object) -> Strategy:
        settings = origin["settings"] | {"sync": sync}
        Path(config.planner.cost).write_text(yaml.safe_dump(tree | origin | {"settings": settings} | changed))
        return strategy_of(config, group)

    alone = written(["micro_batch"])
    assert alone.choose().mode == Mode("micro_batch", "true")
    alone.check_cost(alone.choose().mode)
    slow = {"fixed_s_by_sync": {"step": 100.0, "micro_batch": 0.0}}
    assert written(["step", "micro_batch"], **slow).choose().mode == Mode("micro_batch", "true")
    assert written(["step", "micro_batch"]).choose().mode == Mode("step", "true")
    other = written(["micro_batch"], device={"kind": "cuda", "name": "Tesla V100", "count": 4})
    assert other.choose().mode.sync == "step", "as without a file, which is then refused"
    with pytest.raises(ConfigError, match="was measured on cuda Tesla V100, and this run is on cuda NVIDIA H100"):
        other.check_cost(other.choose().mode)


def test_a_mode_that_a_cost_file_lacks_is_taken_where_the_others_hold_too_little(tmp_path: Path) -> None:
    """As after the loss of workers: the run goes on, as without the file."""
    config = config_of(str(tmp_path), *AUTO, "comm.transport=parent", "train.precision=bf16")
    strategy = strategy_of(config, group_of(8, 1.0, config))
    needed = [sum(strategy.memory(Mode(sync)).resident().values()) / 0.9 / GIB for sync in ("step", "micro_batch")]
    file = strategy.cost(Mode("step")).to_json() | strategy.origin(Mode("step", "true")).to_json()
    config.planner.cost = str(tmp_path / "cost.yaml")
    Path(config.planner.cost).write_text(yaml.safe_dump(file))
    roomy, small = (strategy_of(config, group_of(8, gigabytes, config)) for gigabytes in (80.0, sum(needed) / 2))
    assert roomy.choose().mode == Mode("step", "true")
    assert small.choose().mode.sync == "micro_batch"


def test_measured_costs_take_the_place_of_derived_ones(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "planner.cost=measure", "train.precision=bf16")
    group, mode = group_of(2, 80.0, config), Mode("step")
    derived = strategy_of(config, group).cost(mode)
    assert derived.estimated  # before anything is measured
    strategy_of(config, group).check_cost(mode)
    file = CostFile(replace(derived, linear_s=1e-3, estimated=False),
                    strategy_of(config, group).origin(mode))
    group.measured_cost = file
    assert strategy_of(config, group).cost(mode) == file.cost
    assert strategy_of(config, group).cost(Mode("step", "true")).estimated  # of a later generation


def test_the_mode_that_is_told_is_the_one_that_the_ranks_train_in() -> None:
    """The first choice was made for who was left of a run whose driver was lost; others have joined since."""
    events: list[dict[str, Any]] = []
    told: list[Any] = []
    session: Any = SimpleNamespace(
        tell=told.append, config=config_of("unused", "train.activation_checkpointing=auto"),
        history=SimpleNamespace(mode_told=None),
        records=SimpleNamespace(event=lambda kind, **fields: events.append(fields)),
        resolved=SimpleNamespace(
            choice=Choice(Mode("step", "true"), ("planner.sync", RECOMPUTATION), "three ranks need it")),
        current=SimpleNamespace(number=2, choice=Choice(Mode("step"), (RECOMPUTATION,), "four ranks do not")))
    Session.report_mode(session)
    assert [notice.text for notice in told] == [
        "train.activation_checkpointing=auto is packs: four ranks do not"]
    assert [event["activation_checkpointing"] for event in events] == ["packs"]
    Session.report_mode(session)
    assert len(told) == 1
    session.history.mode_told, session.current.choice = None, Choice(Mode("step", "true"), (RECOMPUTATION,), "again")
    Session.report_mode(session)
    assert "planner.sync=auto is step" in told[1].text
