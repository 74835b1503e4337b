"""Saves that fail: no room, a folder that cannot be written, a rank that dies. The failure is told in one line, and the
next save works.
"""

import os
import re
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dhp_ray.comm.device import CPU
from dhp_ray.config import load
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.run_folder import tensors_folder
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker import rank as rank_module
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.storage import STORAGE_TIMEOUT_S, Folder
from tests.ranks import run_processes
from tests.train.networks import Network, make_engine, run_tensors, train_step
from tests.train.state.test_checkpoint import KINDS, NAME, FarFolder, LateCheckpointer, make_checkpointer, state_of


def fail_then_save(rank, world_size, run_dir, blocked, folder_kind=Folder, num_before=0):
    network = Network()
    engine = make_engine(network, rank, world_size)
    checkpointer = make_checkpointer(engine, rank, world_size, run_dir, folder_kind=folder_kind)
    for _ in range(num_before):  # those after it are written as it was
        checkpointer.begin(0)
        checkpointer.finish()
        assert checkpointer.poll() == ([0], "")
    dist.barrier()
    checkpoints = Path(run_dir) / "run" / "checkpoints"
    folder = checkpoints / "step_000001" / "__1_0.distcp"  # where a file should be
    obstacle = {"scratch": checkpointer.scratch, "run": checkpoints, "part": folder / "x",
                "size": Path(run_dir) / "none"}[blocked]
    if rank == 1 and blocked == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    elif rank == 1:
        obstacle.parent.mkdir(parents=True, exist_ok=True)
        obstacle.write_text("a file where a folder should be")
    dist.barrier()
    train_step(engine, network, 0, rank, world_size)
    checkpointer.begin(1)
    train_step(engine, network, 1, rank, world_size)
    checkpointer.finish()
    dist.barrier()  # all have taken back what they wrote
    first = (*checkpointer.poll(), [path.name for path in checkpoints.glob("step_000001/*")] if checkpoints.is_dir()
             else [])
    dist.barrier()
    if rank == 1:
        obstacle.unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    train_step(engine, network, 2, rank, world_size)
    saved = state_of(engine)
    checkpointer.begin(3)
    checkpointer.finish()
    second = checkpointer.poll()
    train_step(engine, network, 3, rank, world_size)
    dist.barrier()
    checkpointer.load(NAME)
    loaded = state_of(engine)
    same = all(torch.equal(saved[kind][name], loaded[kind][name]) for kind in KINDS for name in saved[kind])
    return first, second, same, engine.state_version


def test_a_node_that_cannot_write_is_told_and_the_next_save_works(tmp_path):
    results = run_tensors(fail_then_save, 3, 3, str(tmp_path), "scratch", FarFolder)
    (saved, error, _), *_ = results[1]
    assert saved == []
    assert error.startswith("step 1: ")
    assert "scratch_3_1" in error
    assert "\n" not in error
    assert [results[rank][0] for rank in (0, 2)] == [([], "",
                                                      [])] * 2, "the others have not failed, and have saved nothing"
    assert [result[1:] for result in results] == [(([3], ""), True, 3)] * 3


@pytest.mark.parametrize(("folder_kind", "place", "num_before"), [
    (Folder, "run/checkpoints/step_000001", 0), (FarFolder, r"scratch_2_1/step_000001_\w+", 0),
    (Folder, "run/checkpoints/step_000001", 1)])
def test_a_node_without_room_says_so(tmp_path, folder_kind, place, num_before):
    results = run_tensors(fail_then_save, 2, 2, str(tmp_path), "size", folder_kind, num_before)
    assert re.fullmatch(rf"step 1: OSError: {tmp_path}/{place}: cannot be written: File too large", results[1][0][1])
    assert [result[0][2] for result in results] == [[], []]
    assert [result[1:] for result in results] == [(([3], ""), True, 3)] * 2


@pytest.mark.parametrize(("folder_kind", "said"), [(Folder, "NotADirectoryError: "), (FarFolder, "StorageError: ")])
def test_a_run_folder_that_cannot_be_written_is_told_and_the_next_save_works(tmp_path, folder_kind, said):
    results = run_tensors(fail_then_save, 2, 2, str(tmp_path), "run", folder_kind)
    for (saved, error, _), *_ in results:
        assert saved == []
        assert error.startswith(f"step 1: {said}")
        assert f"{tmp_path}/run/checkpoints/step_000001" in error
        assert "\n" not in error
    assert [result[1:] for result in results] == [(([3], ""), True, 3)] * 2


@pytest.mark.parametrize(("folder_kind", "said", "num_before"), [
    (Folder, "OSError: {}: cannot be written: Is a directory", 0),
    (FarFolder, "StorageError: {}/__1_0.distcp: cannot be copied from ", 0),
    (Folder, "OSError: {}: cannot be written: Is a directory", 1)])
def test_parts_of_a_save_that_failed_elsewhere_are_taken_back(tmp_path, folder_kind, said, num_before):
    """On a full disk the parts that were written would take the room of the next save, and of the logs."""
    results = run_tensors(fail_then_save, 3, 3, str(tmp_path), "part", folder_kind, num_before)
    assert [result[0] for result in results[::2]] == [([], "", [])] * 2
    assert results[1][0][1].startswith(f"step 1: {said.format(f'{tmp_path}/run/checkpoints/step_000001')}")
    assert [result[1:] for result in results] == [(([3], ""), True, 3)] * 3


def die_in_a_save(rank, port, run_dir, moment):
    """Rank 2 dies in a save: how long closing and destroying took, whether the save's thread ended, and a save of the
    survivors.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=dist.PrefixStore("first", store), rank=rank, world_size=3,
                            timeout=timedelta(seconds=30))
    network = Network()
    engine = make_engine(network, rank, 3)
    checkpointer = make_checkpointer(engine, rank, 3, run_dir, LateCheckpointer, generation=1)
    checkpointer.may_write = Event()
    train_step(engine, network, 0, rank, 3)
    checkpointer.begin(1)
    thread = checkpointer._thread
    if moment == "collective" and rank != 2:
        checkpointer.may_write.set()
        time.sleep(0.3)  # now it waits for rank 2
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.perf_counter()
    checkpointer.close(0.0)
    engine.release()
    dist.destroy_process_group()
    closed_s = time.perf_counter() - start
    checkpointer.may_write.set()  # "start": it comes to a group that is no more
    thread.join(10.0)
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=2,
                            timeout=timedelta(seconds=30))
    again = make_checkpointer(make_engine(Network(), rank, 2), rank, 2, run_dir, generation=2)
    again.begin(1)
    again.finish()
    return closed_s, thread.is_alive(), again.poll()


@pytest.mark.gloo("the world's collectives are gloo's, and raise")
@pytest.mark.parametrize("moment", ["collective", "start"])
def test_a_save_whose_peer_died_is_left_at_once(tmp_path, moment):
    for closed_s, alive, polled in run_processes(die_in_a_save, 3, str(tmp_path), moment, mortal=[2])[:2]:
        assert closed_s < 2.0
        assert not alive
        assert polled == ([1], "")
    step = tmp_path / "run" / "checkpoints" / "step_000001"
    assert sorted(path.name for path in (step / "generation_2").iterdir()) == [".metadata", "__0_0.distcp",
                                                                               "__1_0.distcp", "parameters.json"]
    abandoned = {path.name for path in (step / "generation_1").iterdir()} if (step / "generation_1").exists() else set()
    assert abandoned <= ({"__2_0.distcp"} if moment == "collective" else set()), "survivors have left nothing"


def test_a_save_that_was_left_before_it_began_writes_nothing(tmp_path):
    """Its group may be gone by then: torch would save each rank's part as if there were no others."""
    engine = make_engine(Network(), 0, 1)
    left = LateCheckpointer(engine, 0, None, tmp_path / "scratch", Folder(f"{tmp_path}/run"), 1)
    left.may_write = Event()
    left.begin(1)
    thread = left._thread
    left.close(0.0)
    left.may_write.set()
    thread.join(10.0)
    assert not thread.is_alive()
    assert left.poll() == ([], "")
    assert not list(tmp_path.rglob("step_*"))


def save_beside_an_abandoned_one(rank, world_size, run_dir, folder_kind):
    """A save that was left writes late, after the next generation has saved the same step; the bytes of that, before
    and after.
    """
    network = Network()
    engine = make_engine(network, rank, world_size)
    train_step(engine, network, 0, rank, world_size)
    left = make_checkpointer(engine, rank, world_size, run_dir, LateCheckpointer, folder_kind, generation=1)
    left.may_write = Event()
    left.begin(1)
    thread = left._thread
    left.close(0.0)
    train_step(engine, network, 1, rank, world_size)
    expected = state_of(engine)
    again = make_checkpointer(engine, rank, world_size, run_dir, folder_kind=folder_kind, generation=2)
    again.begin(1)
    again.finish()
    polled = again.poll()
    left.may_write.set()
    thread.join()
    dist.barrier()
    again.load(tensors_folder(1, 2))
    loaded = state_of(engine)
    return polled, all(torch.equal(expected[kind][name], loaded[kind][name]) for kind in KINDS
                       for name in expected[kind])


@pytest.mark.parametrize("folder_kind", [Folder, FarFolder])
def test_a_save_that_was_left_does_not_touch_the_next_one_of_its_step(tmp_path, folder_kind):
    assert run_tensors(save_beside_an_abandoned_one, 2, 2, str(tmp_path), folder_kind) == [(([1], ""), True)] * 2
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints" / "step_000001").iterdir())
    assert names == ["generation_2"]


def stall_then_save(rank, port, run_dir):
    """Rank 1 comes to a save after rank 0 has given it up: the limits of a save's group, what is said of this save, of
    the next one, and whether its state loads.
    """
    config = load(["cluster.device=cpu", "comm.timeout_s=70", f"run.dir={run_dir}"])
    member = Rank(config, Membership(rank, 2, 1, "127.0.0.1", port), CPU)
    limit = member.state_group._get_backend(torch.device("cpu")).options._timeout
    rank_module.STORAGE_TIMEOUT_S = 0.5
    member.renew_state_group()
    checkpointer, given_up = member.checkpointer, Path(run_dir) / "given up"
    if rank == 1:
        checkpointer.__class__ = LateCheckpointer
        checkpointer.may_write = Event()
    checkpointer.begin(1)
    if rank == 0:
        checkpointer.finish()
        given_up.touch()
    else:
        while not given_up.exists():
            time.sleep(0.02)
        checkpointer.may_write.set()
        checkpointer.finish()
    first = checkpointer.poll()
    rank_module.STORAGE_TIMEOUT_S = 60.0
    member.renew_state_group()
    checkpointer.begin(2)
    checkpointer.finish()
    second = checkpointer.poll()
    processor = ProcessorSpec(config.model.preset, config.model.path).load()
    member.export("model", processor.save)
    checkpointer.load(tensors_folder(2, 1))
    member.close()
    return limit, first, second


@pytest.mark.gloo("its collectives raise after their timeout")
def test_after_a_rank_stalled_in_a_save_the_next_save_and_the_export_work(tmp_path):
    results = run_processes(stall_then_save, 2, str(tmp_path), timeout_s=120)
    for limit, (saved, error), second in results:
        assert limit == timedelta(seconds=STORAGE_TIMEOUT_S), "a slow disk is not a slow network"
        assert saved == []
        assert error.startswith("step 1: after ")
        assert "not all ranks had written their parts" in error
        assert "\n" not in error
        assert second == ([2], "")
    assert load_file(tmp_path / "model/model.safetensors")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if any(path.rglob("*.distcp"))] == [
        "step_000002"]
