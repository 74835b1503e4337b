"""The flat engine over the files of a model folder, against the same engine over the whole model in memory: every bit
is the same, and no rank reads, holds or keeps more than it should.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dhp_ray.comm.device import choose
from dhp_ray.comm.transport import Transport
from dhp_ray.model.build import build_model
from dhp_ray.model.files import ModelError
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.types import Plan
from dhp_ray.train.collate import Payload
from dhp_ray.train.engine import COMPUTE_TYPES
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.rank_step import RankStep
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.state.reshard import reshard
from dhp_ray.train.state.shards import LocalShard
from dhp_ray.train.step_inputs import collated
from tests.engine_values import full_parameters
from tests.packs import load_whole
from tests.train.networks import run_tensors
from tests.train.test_loading import published
from tests.train.test_sharded_engine import make_plan, make_step, payloads_of, settings

CPU = torch.device("cpu")
BUCKET_BYTES = 100_000


def saved(folder: Path, stored: torch.dtype, tie: bool) -> str:
    """A folder as `published` makes it, in another type."""
    published(folder, tie, older=True, num_files=2)
    for file in folder.glob("*.safetensors"):
        values = {name: value.to(stored) for name, value in load_file(file).items()}
        save_file({name: value + torch.rand(value.shape, generator=torch.Generator().manual_seed(1)).to(stored) / 64
                   for name, value in values.items()}, file, {"format": "pt"})
    return str(folder)


def adapter_of(path: str, from_files: bool, freeze: list[str]) -> LanguageModel:
    adapter = build_model("", path, None, 0) if from_files else load_whole(path)
    adapter.freeze(freeze)
    return adapter


def flat_engine(
    adapter: LanguageModel, rank: int, size: int, precision: str, initialize: bool = True,
    group: dist.ProcessGroup | None = None,
) -> FlatEngine:
    return FlatEngine(adapter.module, settings(adapter), (group or dist.group.WORLD) if size > 1 else None, size, rank,
                      precision, BUCKET_BYTES, initialize, weights=adapter.weights, device=CPU)


def step_of(adapter: LanguageModel, engine: FlatEngine, rank: int, size: int) -> RankStep:
    transport = Transport("parent", rank, size, choose("cpu"), 16, timedelta(seconds=30))
    return RankStep(adapter, engine, transport, dist.group.WORLD if size > 1 else None, CPU)


def train(
    rank: int, size: int, sync: str, path: str, from_files: bool, precision: str, freeze: list[str], plan: Plan,
    payloads: dict[str, Payload],
) -> dict[str, Any]:
    """Values after loading, as a step computes with them and as they are exported; losses and norms of two steps."""
    adapter = adapter_of(path, from_files, freeze)
    if sync == "step":
        stepper: RankStep = step_of(adapter, flat_engine(adapter, rank, size, precision), rank, size)
    else:
        stepper = make_step(adapter, rank, size, precision=precision)
    bytes_read = adapter.weights.bytes_read if adapter.weights else 0
    resident = {name: parameter.detach().clone() for name, parameter in adapter.module.named_parameters()
                } if sync == "step" else {}
    exported = full_parameters(stepper.engine)
    rank_plan = plan.rank_plan(1, rank)
    inputs = collated(rank_plan, payloads_of(rank_plan.packs, payloads, rank), stepper.adapter)
    steps = [stepper.run(inputs, 1.0) for _ in range(2)]
    return {"numbers": [(step.loss_sum, step.gradient_norm) for step in steps], "bytes_read": bytes_read,
            "resident": resident, "exported": exported, "after": full_parameters(stepper.engine),
            "frozen": [name for name, parameter in adapter.module.named_parameters() if not parameter.requires_grad]}


CASES = [
    # ranks, mode, precision, frozen, stored as, tied embeddings
    (1, "step", "bf16", ["vision"], torch.float32, True),
    (2, "step", "fp32", [], torch.bfloat16, True),
    (4, "step", "bf16", ["language"], torch.float16, False),
    (4, "step", "fp32", ["vision"], torch.float32, True),
    (1, "micro_batch", "fp32", ["vision"], torch.float16, False),
    (2, "micro_batch", "bf16", [], torch.float32, True),
    (4, "micro_batch", "bf16", ["language"], torch.bfloat16, True),
    (2, "micro_batch", "bf16", ["language"], torch.bfloat16, True),
]


@pytest.mark.parametrize(("num_ranks", "sync", "precision", "freeze", "stored", "tie"), [
    case if place in (1, 7) else pytest.param(*case, marks=pytest.mark.slow) for place, case in enumerate(CASES)])
def test_what_is_read_from_files_is_the_whole_model_bit_for_bit(
    num_ranks: int, sync: str, precision: str, freeze: list[str], stored: torch.dtype, tie: bool, tmp_path: Path
) -> None:
    path = saved(tmp_path / "model", stored, tie)
    plan, payloads = make_plan(num_ranks, [[(list(range(num_ranks)), [[50, (1, 4, 8), 30], [21]], None)],
                                           [([0], [[20, (1, 4, 4)]], None)]], sync=sync)
    found, wanted = (run_tensors(train, num_ranks, num_ranks, sync, path, from_files, precision, freeze, plan, payloads)
                     for from_files in (True, False))
    for mine, theirs in zip(found, wanted):
        assert mine["numbers"] == theirs["numbers"]
        assert mine["numbers"][0] != mine["numbers"][1]
        for kind in ("resident", "exported", "after"):
            assert mine[kind].keys() == theirs[kind].keys()
            for name, value in theirs[kind].items():
                assert mine[kind][name].dtype == value.dtype
                assert torch.equal(mine[kind][name], value), (kind, name)
    original = load_whole(path).module.state_dict()
    assert all(torch.equal(found[0]["after"][name], original[name].to(COMPUTE_TYPES[precision]).float())
               for name in found[0]["frozen"])
    assert any(not torch.equal(found[0]["after"][name], original[name]) for name in original)
    # no byte twice, by one rank or by two
    num_bytes = sum(value.numel() * stored.itemsize for value in found[0]["exported"].values())
    assert sum(mine["bytes_read"] for mine in found) == num_bytes


def re_form(
    rank: int, path: str, from_files: bool, precision: str, plan: Plan, payloads: dict[str, Payload]
) -> dict[str, Any]:
    """Two ranks train, then three of which one is new, and then the first of these alone begins anew in another."""
    first = dist.new_group([0, 1], backend="gloo")
    adapter: LanguageModel | None = None
    shards: list[LocalShard] = []
    read = 0
    if rank < 2:
        adapter = adapter_of(path, from_files, ["vision"])
        engine = flat_engine(adapter, rank, 2, precision, group=first)
        for parameter in engine.parameters.values():
            (parameter.float() ** 2).sum().backward()
        engine.update(7)
        shards = engine.local_shards(rank)[:1]
        engine.release()
    else:
        adapter = adapter_of(path, from_files, ["vision"])
    if adapter.weights:
        read = adapter.weights.bytes_read
    engine = FlatEngine(adapter.module, settings(adapter), dist.group.WORLD, 3, rank, precision, BUCKET_BYTES, False,
                        weights=adapter.weights, device=CPU)
    engine.load_state(reshard(shards, engine.pieces, engine.shard_size, rank, dist.group.WORLD))
    again = adapter.weights.bytes_read - read if adapter.weights else 0
    rank_plan = plan.rank_plan(1, rank)
    resident = {name: parameter.detach().clone() for name, parameter in adapter.module.named_parameters()}
    inputs = collated(rank_plan, payloads_of(rank_plan.packs, payloads, rank), adapter, precision)
    step = step_of(adapter, engine, rank, 3).run(inputs, 1.0)
    return {"numbers": (step.loss_sum, step.gradient_norm), "resident": resident, "read_again": again,
            "exported": full_parameters(engine)}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_newcomer_gets_what_is_frozen_from_a_rank_that_has_it(precision: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "model", torch.float32, tie=True)
    plan, payloads = make_plan(3, [[([0, 1, 2], [[50, (1, 4, 8), 30], [21]], None)], [([2], [[20, (1, 4, 4)]], None)]],
                               sync="step")
    found, wanted = (run_tensors(re_form, 3, path, from_files, precision, plan, payloads)
                     for from_files in (True, False))
    for mine, theirs in zip(found, wanted):
        assert mine["numbers"] == theirs["numbers"]
        assert mine["read_again"] == 0
        for kind in ("resident", "exported"):
            assert mine[kind].keys() == theirs[kind].keys()
            assert all(torch.equal(mine[kind][name], value) for name, value in theirs[kind].items())


def re_form_sharded(rank: int, path: str) -> dict[str, Any]:
    """A generation that takes over a state reads the frozen rows alone."""
    assert dist.group.WORLD is not None
    adapter = adapter_of(path, True, ["vision"])
    engine = ShardedEngine(adapter, settings(adapter), dist.group.WORLD, rank, CPU)
    shards, exported = engine.local_shards(rank), full_parameters(engine)
    following = adapter_of(path, True, ["vision"])
    again = ShardedEngine(following, settings(following), dist.group.WORLD, rank, CPU, initialize=False)
    assert again.local_shards(rank) == []
    again.load_state(reshard(shards, again.pieces, again.shard_size, rank, dist.group.WORLD))
    assert following.weights is not None
    rows = sum(parameter.to_local().numel() for parameter in again.frozen.values())
    return {"first": exported, "again": full_parameters(again), "bytes": following.weights.bytes_read, "rows": rows}


def test_a_sharded_engine_that_takes_over_a_state_reads_only_what_is_frozen(tmp_path: Path) -> None:
    found = run_tensors(re_form_sharded, 2, saved(tmp_path / "model", torch.float32, tie=True))
    assert all(result["bytes"] == 4 * result["rows"] for result in found)
    assert all(torch.equal(found[0]["again"][name], value) for name, value in found[0]["first"].items())


def test_a_file_that_is_cut_short_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", torch.float32, tie=True)
    adapter = adapter_of(path, True, ["vision"])
    file = sorted(Path(path).glob("*.safetensors"))[-1]
    content = file.read_bytes()
    file.write_bytes(content[:-5000])
    with pytest.raises(
        ModelError, match=rf"^model.path: [^\n]*: {file.name} cannot be read: it ends \d+ bytes too early$"
    ):
        flat_engine(adapter, 0, 1, "bf16")
    assert all(parameter.is_meta for parameter in adapter.module.parameters())
    file.write_bytes(content)
    exported = full_parameters(flat_engine(adapter, 0, 1, "bf16"))
    whole = dict(load_whole(path).module.named_parameters())
    assert all(torch.equal(value, whole[name].bfloat16().float() if adapter.is_vision(name) else whole[name])
               for name, value in exported.items())
