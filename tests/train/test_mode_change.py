"""Checkpoints across the two engines: what one saves the other resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.device import choose
from dhp_ray.comm.transport import Transport
from dhp_ray.planner.plan.types import Plan
from dhp_ray.storage import Folder
from dhp_ray.train.collate import Payload
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.rank_step import RankStep
from dhp_ray.train.state.checkpoint import Checkpointer
from dhp_ray.train.step_inputs import collated
from tests.engine_values import full_parameters
from tests.model.test_lora import OF_EXPERTS
from tests.packs import rough_model
from tests.train.networks import run_tensors, whole
from tests.train.test_sharded_engine import CPU, make_plan, make_step, payloads_of, settings


def save_and_load(
    rank: int, num_ranks: int, sync: str, run_dir: str, first: bool, plan: Plan, payloads: dict[str, Payload],
    preset: str = "tiny", adapted: bool = False, sharing: int = 1,
) -> dict[str, Any]:
    """State and next loss after two steps that are saved, or after loading what was saved. `adapted`: of adapters,
    whose base is in no checkpoint.
    """
    adapter = rough_model(seed=0 if first or adapted else 5, preset=preset)
    if preset == "tiny":
        adapter.freeze(["vision"])
    if adapted:
        adapter.add_lora(replace(OF_EXPERTS, seed=0 if first else 5))
    if sync == "micro_batch":
        stepper: RankStep = make_step(adapter, rank, num_ranks, sharing=sharing)
    else:
        world = dist.group.WORLD if num_ranks > 1 else None
        engine = FlatEngine(adapter.module, settings(adapter), world, num_ranks, rank, "fp32", 2**16)
        stepper = RankStep(adapter, engine, Transport("parent", rank, num_ranks, choose("cpu"), 16,
                                                           timedelta(seconds=30)), world, CPU)
    save_group = dist.new_group(list(range(num_ranks)), backend="gloo")
    checkpointer = Checkpointer(stepper.engine, rank, save_group, Path(run_dir) / f"scratch_{rank}",
                                Folder(f"{run_dir}/run"))
    rank_plan = plan.rank_plan(1, rank)
    inputs = collated(rank_plan, payloads_of(rank_plan.packs, payloads, rank), adapter)
    if first:
        for _ in range(2):
            stepper.run(inputs, 1.0)
        checkpointer.begin(2)
        checkpointer.finish()
        assert checkpointer.poll() == ([2], "")
    else:
        checkpointer.load("checkpoints/step_000002")
    found = {"version": stepper.engine.state_version,
             **{kind: whole(stepper.engine, kind) for kind in ("value", "exp_avg", "exp_avg_sq")}}
    parameters = full_parameters(stepper.engine)
    names = [name for name in parameters if name in found["value"] or not (adapted or adapter.is_vision(name))]
    return found | {"parameters": {name: parameters[name].flatten()
                                   for name in names}} | {"loss": stepper.run(inputs, 1.0).loss_sum}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("micro_batch", 2), [("step", 1)]),  # to another number of the same mode: in the test below
        pytest.param(("micro_batch", 3), [("step", 2), ("micro_batch", 5)], marks=pytest.mark.slow),
        pytest.param(("step", 2), [("micro_batch", 1), ("micro_batch", 3)], marks=pytest.mark.slow),
        pytest.param(("micro_batch", 5), [("micro_batch", 2), ("step", 3)], marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_either_mode_resumes_in_either_on_any_number_of_ranks(
    tmp_path: Path, saved: tuple[str, int], loaded: list[tuple[str, int]]
) -> None:
    check_resumes(tmp_path, saved, loaded)


@pytest.mark.parametrize("adapted", [False, True], ids=["", "adapted"])
@pytest.mark.parametrize(("saved", "loaded"), [
    (("micro_batch", 3, 3), [("step", 1, 1), ("micro_batch", 2, 2)]),
    pytest.param(("micro_batch", 4, 2), [("micro_batch", 3, 3), ("micro_batch", 4, 1), ("micro_batch", 1, 1)],
                 marks=pytest.mark.slow),
    pytest.param(("step", 2, 1), [("micro_batch", 6, 3), ("micro_batch", 6, 2)], marks=pytest.mark.slow)])
def test_a_checkpoint_resumes_however_many_ranks_share_experts(
    tmp_path: Path, saved: tuple[str, int, int], loaded: list[tuple[str, int, int]], adapted: bool
) -> None:
    check_resumes(tmp_path, saved, loaded, "tiny_qwen3_moe", adapted)


def check_resumes(
    folder: Path, saved: tuple[str, int, *tuple[int, ...]], loaded: Sequence[tuple[str, int, *tuple[int, ...]]],
    preset: str = "tiny", adapted: bool = False,
) -> None:
    """What is saved in a mode, on so many ranks, of which so many share experts, is loaded in others."""
    def run(first: bool, sync: str, num_ranks: int, *sharing: int) -> dict[str, Any]:
        plan, payloads = make_plan(num_ranks, [[(list(range(num_ranks)), [[70], [25]], None)], [([0], [[20]], None)]],
                                   sync=sync)
        found: dict[str, Any] = run_tensors(save_and_load, num_ranks, num_ranks, sync, str(folder), first, plan,
                                            payloads, preset, adapted, *sharing)[0]
        return found

    wanted = run(True, *saved)
    assert wanted["version"] == 2
    assert all(torch.equal(wanted["value"][name], tensor) for name, tensor in wanted["parameters"].items())
    for where in loaded:
        found = run(False, *where)
        assert found["version"] == 2
        for kind in ("value", "exp_avg", "exp_avg_sq", "parameters"):
            assert found[kind].keys() == wanted[kind].keys()
            assert all(torch.equal(found[kind][name], wanted[kind][name])
                       for name in wanted[kind]), (where, kind)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
