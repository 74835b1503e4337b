"""One membership after another over the same processes: what is loaded, what a kill in a step leaves, and what is left
open.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dhp_ray.train import images_apart
from dhp_ray.train.state.shards import LocalShard
from tests.engine_values import full_parameters
from tests.ranks import run_processes
from tests.train.member import Member, die, supplied
from tests.train.networks import whole

APART = {"encoder forward": True, "encoder backward": True, "encoder backward, computed again": False,
         "encoder exchange send_rows": False, "encoder exchange return_rows": True, "apart, pack backward": True}
"""Where a rank is killed whose images are encoded apart from its packs, and whether activations are kept."""
STEPS = 4
"""Of a run in which a rank is killed in the third."""
KINDS = ("value", "exp_avg", "exp_avg_sq")
CHANGES = [(4, 3), (3, 5), (2, 1), (1, 2), (5, 2)]
MODES = [("step", "step"), ("micro_batch", "micro_batch"), ("step", "micro_batch"), ("micro_batch", "step")]


def changed(process: int, port: int, run_dir: str, cases: list[tuple[int, int, str, str]]) -> list[str]:
    """Whether each case's parameters and moments are, bit for bit, the version loaded by the ranks that are left, of
    which one at least is lost.
    """
    torch.manual_seed(process)
    member = Member(port, run_dir)
    wrong = []
    for number, (old_size, new_size, old_sync, new_sync) in enumerate(cases):
        survivors = list(range(min(new_size, max(1, old_size - 1))))
        found: list[LocalShard] = []
        expected: dict[str, Any] = {}
        member.adapter = None
        if process < old_size:
            member.join(process, old_size, old_sync)
            member.step(0)
            member.mirror.finish()
            expected = {kind: whole(member.stepper.engine, kind) for kind in KINDS}  # type: ignore[arg-type]
            parameters = full_parameters(member.stepper.engine)
            found = supplied(member.leave(), survivors, old_size, process, 1)
        else:
            member.generation += 1
        joiners = [other for other in range(5) if other not in survivors]
        order = [*survivors, *joiners][:new_size]
        if process not in survivors:
            member.adapter, found = None, []
        if new_sync == "micro_batch":
            member.adapter = None
        elif old_sync == "step" and process in survivors:
            assert all(parameter.untyped_storage().nbytes() <= 4
                       for parameter in member.adapter.module.parameters()), "released"
        if process in order:
            member.join(order.index(process), new_size, new_sync, found)
            engine = member.stepper.engine
            after = {kind: whole(engine, kind) for kind in KINDS}  # type: ignore[arg-type]
            resident = full_parameters(engine)
            if process in survivors:
                same = engine.state_version == 1 and all(torch.equal(after[kind][name], expected[kind][name])
                                                         for kind in KINDS for name in engine.shapes)
                if process == 0:
                    same = (
                        same
                        and resident.keys() == parameters.keys()
                        and all(torch.equal(resident[name], parameters[name]) for name in resident)
                    )
                if not same:
                    wrong.append(f"case {number}: {cases[number]} on process {process}")
            member.leave()
        else:
            member.generation += 1
    return wrong


@pytest.mark.parametrize(
    ("modes", "changes"),
    [
        (MODES[1], [(3, 4)]),
        (MODES[3], [(2, 1)]),
        *[pytest.param(modes, CHANGES, marks=pytest.mark.slow) for modes in MODES],
    ],
)
def test_parameters_and_moments_are_bit_for_bit_those_of_the_version_loaded(
    tmp_path: Path, modes: tuple[str, str], changes: list[tuple[int, int]]
) -> None:
    most = max(max(sizes) for sizes in changes)
    cases = [(*sizes, *modes) for sizes in changes]
    assert run_processes(changed, most, str(tmp_path), cases, timeout_s=240) == [[]] * most


def undisturbed(process: int, port: int, run_dir: str, num_steps: int) -> list[float]:
    member = Member(port, run_dir)
    member.join(0, 1, "step")
    return [member.step(step) for step in range(num_steps)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    (losses,) = run_processes(undisturbed, 1, str(tmp_path_factory.mktemp("undisturbed")), STEPS)
    return losses  # type: ignore[no-any-return]


def killed_in_a_step(process: int, port: int, run_dir: str, sync: str, where: str, num_steps: int) -> Any:
    """Process 2 of 4 is killed in step 2; the losses of all steps, those after it on three ranks. One of the two
    generations recomputes activations, the other keeps them.
    """
    member, recomputes = Member(port, run_dir), where == "forward"
    member.apart = APART.get(where)
    member.join(process, 4, sync, recomputes=recomputes)
    losses = [member.step(step) for step in range(2)]
    if process == 2:
        model = member.adapter.module.model  # type: ignore[union-attr]
        layer = (model.visual.blocks if where.startswith("encoder") else model.language_model.layers)[1]  # type: ignore[union-attr, index]
        if "exchange" in where:
            setattr(images_apart, where.split()[-1], lambda *_: die(member))
        elif "forward" in where:
            layer.register_forward_pre_hook(lambda *_: die(member))
        else:
            layer.register_full_backward_hook(lambda *_: die(member))
    try:
        member.step(2)
        said = ""
    except RuntimeError as error:
        said = type(error).__name__
        error.__traceback__ = None
    found = supplied(member.leave(), [0, 1, 3], 4, process, 2)
    member.join({0: 0, 1: 1, 3: 2}[process], 3, sync, found, not recomputes)
    losses += [member.step(step) for step in range(2, num_steps)]
    member.mirror.finish()
    held = {shard.owner: shard.version for shard in member.mirror.local_shards()}
    member.leave()
    return said, losses, held, len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize(("sync", "where"), [
    ("micro_batch", "backward"), ("step", "encoder exchange send_rows"),
    *[pytest.param(sync, where, marks=pytest.mark.slow) for sync in ("step", "micro_batch")
      for where in ("forward", "backward", *APART)
      if (sync, where) not in (("micro_batch", "backward"), ("step", "encoder exchange send_rows"))]])
def test_a_rank_killed_in_a_step_is_survived_and_the_loss_goes_on(
    tmp_path: Path, expected: list[float], sync: str, where: str
) -> None:
    results = run_processes(killed_in_a_step, 4, str(tmp_path), sync, where, STEPS, mortal=[2])
    assert results[2] is None
    for new_rank, (said, losses, held, _, _) in enumerate(result for result in results if result is not None):
        assert said, "the step broke off on every rank"
        assert losses == pytest.approx(expected, rel=1e-5)
        assert held == [{1: STEPS, 2: STEPS}, {0: STEPS}, {}][new_rank]


def reformed(process: int, port: int, run_dir: str, sync: str, num_changes: int) -> list[tuple[int, int]]:
    """Process 2 leaves in the midst of a step, its sockets closed, and comes back; what is open after each change."""
    member = Member(port, run_dir)
    found: list[LocalShard] | None = None
    opened = []
    for step in range(num_changes):
        size = 3 - step % 2
        if process < size:
            member.join(process, size, sync, found)
            member.step(step)
            member.checkpointer.begin(step)
            (ended := Path(run_dir) / f"ended-{step}-{process}").touch()
            if process == 2:
                member.mirror.finish()
                while not all(ended.with_name(f"ended-{step}-{other}").exists() for other in range(2)):
                    time.sleep(0.01)  # else a peer that is still in the step, or copies its state, is aborted there
                member.lost.touch()
            else:
                if size == 3:
                    with pytest.raises(RuntimeError) as raised:
                        member.step(step + 1)
                    raised.value.__traceback__ = None
                    del raised
                else:
                    member.mirror.finish()
            found = supplied(member.leave(), [0, 1], size, process, step + 1)
        else:
            member.generation += 1
        if process == 2:
            member.adapter, found = None, []
        for thread in threading.enumerate():
            if thread.name.startswith("save-"):
                thread.join(20.0)  # a save that was left ends when both have destroyed its group
        opened.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return opened


@pytest.mark.parametrize(("sync", "num_changes"), [("micro_batch", 6), pytest.param("step", 6, marks=pytest.mark.slow),
                                                   *[pytest.param(sync, 50, marks=pytest.mark.slow)
                                                     for sync in ("step", "micro_batch")]])
def test_nothing_stays_open_over_many_changes_of_membership(tmp_path: Path, sync: str, num_changes: int) -> None:
    for opened in run_processes(reformed, 3, str(tmp_path), sync, num_changes, timeout_s=280)[:2]:
        files, threads = zip(*opened)
        assert min(files[-3:]) == min(files[:3]), opened
        # a group has three; one that has just ended may still be counted
        assert min(threads[-3:]) <= min(threads[:3]) + 1, opened
