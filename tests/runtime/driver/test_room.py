"""What has to fit before training (strategy.py), reckoned by hand and held against what a real rank keeps and saves."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dhp_ray.comm.device import CPU
from dhp_ray.config import Config
from dhp_ray.planner.memory.host import CHANGE, host_terms, pinned_bytes
from dhp_ray.planner.mode import Mode
from dhp_ray.runtime.driver.start import check_room, saves_ahead
from dhp_ray.runtime.messages import Membership, RunError
from dhp_ray.runtime.worker.export import export_folder
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.runtime.worker.run_model import state_size
from dhp_ray.storage import Folder
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.sharded_engine import ShardedEngine
from tests.ranks import run_processes
from tests.runtime.driver.groups import GIB, Workers, config_of, group_of, limits_of_generation, members, strategy_of


def bytes_held(rank: int, port: int, config: Config) -> tuple[int, int]:
    """Bytes of a real rank's storages, each counted once, and of its part of a checkpoint."""
    member = Rank(config, Membership(rank, 2, 1, "127.0.0.1", port), CPU)
    engine: Any = member.engine
    tensors = [*engine.current.tensors().values(), *engine.spare.tensors().values()]
    if isinstance(engine, ShardedEngine):
        tensors += [parameter.to_local() for parameter in (engine.parameters | engine.frozen).values()]
        # they are there from a backward pass on
        gradients = sum(parameter.to_local().nbytes for parameter in engine.parameters.values())
    else:
        assert isinstance(engine, FlatEngine)
        tensors += [*engine.module.parameters(), *engine.gradients().values(), engine._shard_gradient]
        gradients = 0
    member.checkpointer.begin(1)
    member.checkpointer.finish()
    assert member.checkpointer.poll() == ([1], "")
    saved = sum(path.stat().st_size
                for path in Path(config.run.dir).glob(f"checkpoints/step_000001/generation_1/__{rank}_*"))
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    member.close()
    return sum(held.values()) + gradients, saved


@pytest.mark.parametrize(("sync", "freeze"), [
    ("step", "[]"), ("micro_batch", "[vision]"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("step", "[vision]"), ("micro_batch", "[]")))])
def test_described_bytes_are_what_a_rank_keeps_and_saves(tmp_path: Path, sync: str, freeze: str) -> None:
    config = config_of(str(tmp_path), f"planner.sync={sync}", f"train.freeze={freeze}")
    size, found = state_size(config), run_processes(bytes_held, 2, config)
    # padding, and rows that do not divide evenly
    memory = strategy_of(config, group_of(2, 1.0, config, "cpu")).memory(Mode(sync))
    resident_bytes = sum(memory.resident().values())
    assert [held for held, _ in found] == pytest.approx([resident_bytes] * 2, rel=0.03)
    # what torch writes about each piece
    assert sum(saved for _, saved in found) == pytest.approx(size.checkpoint_bytes, rel=0.08)


def test_frozen_parts_take_neither_gradients_nor_state(tmp_path: Path) -> None:
    """A model whose state fits only because its encoder is frozen is admitted, in both modes."""
    for mode in (Mode("step"), Mode("micro_batch", "true")):
        whole, frozen = (config_of(str(tmp_path), "comm.transport=parent", f"train.freeze={freeze}")
                         for freeze in ("[]", "[vision]"))
        needed = [sum(strategy_of(config, group_of(2, 1.0, config)).memory(mode).resident().values())
                  for config in (whole, frozen)]
        memory_gib = sum(needed) / 2 / 0.9 / GIB
        strategy_of(frozen, group_of(2, memory_gib, frozen)).check_memory(mode)
        with pytest.raises(RunError, match=rf"^model of 0\.00 B parameters: planner\.sync={mode.sync}.* keeps "):
            strategy_of(whole, group_of(2, memory_gib, whole)).check_memory(mode)
    with pytest.raises(RunError, match=(r"planner\.sync=step keeps .* larger devices, planner\.sync=micro_batch, or a "
                                        r"smaller model$")):
        strategy_of(whole, group_of(2, 0.001, whole, "cpu")).check_memory(Mode("step"))


def test_tokens_of_a_rank_follow_the_memory_of_its_device(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "train.precision=bf16")
    found = {memory: strategy_of(config, group_of(4, memory, config)).tokens_that_fit() for memory in (1.0, 2.0)}
    assert 1000 < 1.9 * found[1.0] < found[2.0] < 2.6 * found[1.0]
    config.train.activation_checkpointing = "true"
    assert strategy_of(config, group_of(4, 1.0, config)).tokens_that_fit() > 1.3 * found[1.0]
    with pytest.raises(RunError, match=r"^planner\.tokens_per_rank: got auto, and a rank has room for no token: it "
                                       r"needs [\d.]+ GiB, [\d.]+ GiB of them for the state, and has [\d.]+ GiB \("):
        strategy_of(config, group_of(4, 0.01, config)).tokens_that_fit()


@pytest.mark.parametrize(("num_ranks", "host_gib"), [(1, 1.0), (3, 1.0), (2, 0.5)])
def test_tokens_of_a_rank_on_a_cpu_leave_room_for_what_its_node_keeps_beside(
    tmp_path: Path, num_ranks: int, host_gib: float
) -> None:
    """The documented commands were refused on 24 GB: packs alone would have taken all of that."""
    config = config_of(str(tmp_path), "planner.tokens_per_rank=auto")
    group = group_of(num_ranks, host_gib, config, "cpu")
    for member in group.members:
        member.described["host_memory_bytes"] = int(host_gib * GIB)
    mode, limit_bytes = Mode("step"), 0.9 * host_gib * GIB
    memory = strategy_of(config, group).memory(mode)
    config.planner.tokens_per_rank = str(strategy_of(config, group).tokens_that_fit())
    strategy_of(config, group).check_host_memory(mode)
    assert limits_of_generation(config, group, num_ranks).tokens == int(config.planner.tokens_per_rank)

    def needed(tokens: int) -> float:
        kept = num_ranks * sum(host_terms(memory.shape, memory.settings, tokens).values())
        return kept + num_ranks * memory.memory(memory.worst_load(tokens)).device_bytes

    tokens = int(config.planner.tokens_per_rank)
    assert 0.97 * limit_bytes <= needed(tokens) <= limit_bytes  # but for the export
    assert tokens < 0.8 * memory.tokens_that_fit(0.9 * group.memory_bytes)


def test_a_generation_plans_with_what_its_own_ranks_hold(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "train.precision=bf16", "planner.tokens_per_rank=auto")
    memory_gib, mode = 0.27, Mode("step")
    first = strategy_of(config, group_of(8, memory_gib, config)).tokens_that_fit()
    config.planner.tokens_per_rank = str(first)

    def group(num_ranks: int) -> Workers:
        found = group_of(num_ranks, memory_gib, config)
        found.image_limit = 1280
        return found

    assert strategy_of(config, group(8), True).plan_limits(mode)[0].tokens == first
    assert strategy_of(config, group(16), True).plan_limits(mode)[0].tokens == first
    few = group(2)
    fewer, charged = strategy_of(config, few, True).plan_limits(mode)
    assert 1 < fewer.tokens < first
    assert strategy_of(config, few, False).plan_limits(mode)[0].tokens == first
    full = charged.memory_bytes(fewer.tokens, 1, "step")
    assert 0.88 * memory_gib * GIB < full <= 0.9 * memory_gib * GIB
    for sync in ("step", "micro_batch"):
        assert charged.resident(sync) == sum(strategy_of(config, few).memory(Mode(sync)).resident().values())
    assert charged.linear_s == strategy_of(config, few).cost(mode).linear_s


def test_a_sequence_that_fits_the_run_waits_for_ranks_though_fewer_hold_less_each(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "train.precision=bf16", "planner.tokens_per_rank=auto")
    memory_gib = 0.27
    first = strategy_of(config, group_of(8, memory_gib, config)).tokens_that_fit()
    config.planner.tokens_per_rank = str(first)
    left = group_of(2, memory_gib, config)  # survivors
    left.image_limit = 1280
    held = limits_of_generation(config, left, 2).tokens
    assert held < first
    ranks_for = strategy_of(config, left).ranks_for(8)
    assert ranks_for(8 * first) == 8  # by what the two hold each it would be more than the run ever has
    assert -(-8 * first // held) > 8
    assert (ranks_for(1), ranks_for(2 * held), ranks_for(8 * first + 1)) == (1, 2, 9)
    for num_ranks in range(1, 9):
        assert ranks_for(num_ranks * limits_of_generation(config, left, num_ranks).tokens) == num_ranks


@pytest.mark.parametrize(("done", "total", "every", "expected"),
                         [(0, 10, 4, 3), (0, 8, 4, 2), (4, 8, 4, 1), (5, 8, 4, 1), (0, 3, 0, 1), (3, 3, 2, 0)])
def test_saves_that_are_still_to_come(done: int, total: int, every: int, expected: int) -> None:
    assert saves_ahead(done, total, every) == expected


def test_a_node_without_room_for_what_its_ranks_keep_is_refused(tmp_path: Path) -> None:
    """Two of three ranks are on node b. Replicas (2 versions), what they are sent from (1), a checkpoint (1) and a
    change of members (4 with replicas, else 2)."""
    config = config_of(str(tmp_path), "planner.tokens_per_rank=100", "elastic.mirror_every_steps=1")
    mode = Mode("step")
    shape = strategy_of(config, group_of(3, 1.0, config)).memory(mode).shape
    version, pixels = 12 * math.ceil(shape.num_parameters() / 3), 100 * shape.merge_area * shape.patch_dim * 4
    with_replicas, without = 2 * (7 * version + pinned_bytes(version) + 2 * pixels), 2 * (3 * version + 2 * pixels)

    def check(host_bytes: float, device: str = "cuda") -> None:
        group = group_of(3, 1.0, config, device)
        for rank, member in enumerate(group.members):
            node = "a" if rank == 0 else "b"
            member.described |= {"node_id": node}
            if node == "b":
                member.described["host_memory_bytes"] = host_bytes / 0.9
        strategy_of(config, group).check_host_memory(mode)

    check(with_replicas + 100)
    with pytest.raises(RunError, match=(
            r"^elastic\.mirror_every_steps: got 1; the 2 ranks on node b keep up to [\d.]+ GiB in its memory "
            r"\(replicas [\d.]+ GiB, pinned, own shard [\d.]+ GiB, checkpoint being written [\d.]+ GiB, "
            r"change of members [\d.]+ GiB, pixels [\d.]+ GiB\), and may keep [\d.]+ GiB \(90% of it\); allowed: "
            r"elastic\.mirror_every_steps=0, which takes [\d.]+ GiB, or fewer ranks a node \(more nodes\)$")):
        check(with_replicas - 100)
    with pytest.raises(RunError, match=r"^cluster\.num_workers: got 2; .*; allowed: fewer ranks a node"):
        check(without - 100)
    with pytest.raises(RunError, match="state"):  # lies there too
        check(with_replicas, "cpu")
    config.elastic.mirror_every_steps = "0"
    check(without + 100)


def test_a_rank_needs_room_for_what_it_writes_of_a_model(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "planner.tokens_per_rank=100", "elastic.mirror_every_steps=1")
    mode = Mode("step")
    group = group_of(64, 1.0, config)
    for rank, member in enumerate(group.members):
        member.described["node_id"] = str(rank)
    memory = strategy_of(config, group).memory(mode)
    rest = sum(value for name, value in host_terms(memory.shape, memory.settings, 100).items() if name != CHANGE)
    for more, exports in ((100, True), (-100, False)):
        group.members[0].described["host_memory_bytes"] = (rest + 4 * memory.shape.num_parameters() + more) / 0.9
        if exports:
            strategy_of(config, group).check_host_memory(mode)
        else:
            with pytest.raises(RunError, match="model, exported"):
                strategy_of(config, group).check_host_memory(mode)


def test_a_run_folder_without_room_is_refused(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "checkpoint.keep=2")
    found = members({"checkpoint_bytes": 12 * GIB, "save_free_bytes": 35 * GIB},
                    {"checkpoint_bytes": 12 * GIB, "save_free_bytes": 35 * GIB})
    for num_present, num_ahead in ((0, 2), (1, 9), (2, 9), (0, 0)):
        check_room(found, config, tmp_path, num_present, num_ahead)
    with pytest.raises(RunError) as caught:
        check_room(found, config, tmp_path, 0, 9)
    assert str(caught.value) == (
        f"run.dir: {tmp_path} has 35 GiB free, and the next 3 checkpoints of 12 GiB each need 36 GiB "
        "(checkpoint.keep=2 and the one being written); make room, "
        "lower checkpoint.keep, or choose another run.dir"
    )


def test_a_node_without_room_for_its_parts_is_refused() -> None:
    """Two of three ranks are on node b: they stage two thirds."""
    config = config_of("s3://bucket/run")
    found = members(*({"node_id": node, "checkpoint_bytes": 12 * GIB, "save_free_bytes": free * GIB}
                      for node, free in (("a", 5), ("b", 9), ("b", 9))))
    check_room(found, config, None, 0, 9)
    found[1].described["save_free_bytes"] = 7 * GIB
    with pytest.raises(RunError) as caught:
        check_room(found, config, None, 0, 9)
    assert str(caught.value) == (
        "run.dir: the folder for temporary files on node b has 7 GiB free, and the parts of its 2 ranks in a "
        "checkpoint need 8 GiB before they are uploaded; make room, or name another folder in TMPDIR when Ray starts "
        "there"
    )


def test_a_model_that_a_killed_export_has_left_goes_with_the_next(tmp_path: Path) -> None:
    """It would stay in run.dir for ever, as large as the model."""
    config = config_of(str(tmp_path))
    with export_folder(config) as folder:
        pass
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    with export_folder(config) as folder:
        assert folder.parent == tmp_path
        assert list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def stages_in(rank: int, port: int, config: Config, folder: Path) -> bool:
    """Whether a rank whose run is on an object store writes its checkpoints to this folder for temporary files first.
    """
    tempfile.tempdir = str(folder)
    member = Rank(config, Membership(rank, 2, 1, "127.0.0.1", port), CPU)
    scratch = member.checkpointer.scratch
    inside = scratch is not None and scratch.is_dir() and scratch.parent == folder
    member.checkpointer.begin(1)
    member.checkpointer.finish()
    assert member.checkpointer.poll() == ([1], "")
    member.close()
    return inside


def test_an_object_store_is_reached_by_way_of_the_scratch_folder(object_store: str, tmp_path: Path) -> None:
    config = config_of(f"s3://bucket/{tmp_path.name}/run{object_store}")
    (tmp_path / "fast").mkdir()
    assert run_processes(stages_in, 2, config, tmp_path / "fast") == [True, True]
    assert list((tmp_path / "fast").iterdir()) == []
    names = Folder(config.run.dir).names("checkpoints/step_000001/generation_1")
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "parameters.json"]
