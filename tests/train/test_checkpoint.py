import json
import os
import re
import resource
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dhp_ray.storage import Folder
from dhp_ray.train.checkpoint import Checkpointer, compare_shapes, needed_files
from dhp_ray.train.optimizer import ShardState
from tests.ranks import run_processes
from tests.train.networks import Network, make_engine, run_tensors, train_step, whole

KINDS = ("value", "exp_avg", "exp_avg_sq")
NAME = "checkpoints/step_000003"


class LateCheckpointer(Checkpointer):
    """Begins to write only when it may: by then training has gone on."""

    def _write(self, *arguments):
        self.may_write.wait()
        super()._write(*arguments)


class FarFolder(Folder):
    """A folder that cannot be read in place, as on an object store."""

    def local_path(self):
        return None


def make_checkpointer(engine, rank, world_size, run_dir, kind=Checkpointer, folder_kind=Folder):
    group = dist.new_group(list(range(world_size)), backend="gloo")
    scratch = Path(run_dir) / f"scratch_{world_size}_{rank}"
    return kind(engine, rank, world_size, group, scratch, folder_kind(f"{run_dir}/run"))


def state_of(engine):
    return {kind: whole(engine, kind) for kind in KINDS}


def save_while_training(rank, world_size, run_dir):
    network = Network()
    engine = make_engine(network, rank, world_size, 400)
    checkpointer = make_checkpointer(engine, rank, world_size, run_dir, LateCheckpointer)
    checkpointer.may_write = Event()
    for step in range(3):
        train_step(engine, network, step, rank, world_size)
    saved = state_of(engine)
    checkpointer.begin(3)
    for step in range(3, 5):
        train_step(engine, network, step, rank, world_size)
    early = checkpointer.poll()
    checkpointer.may_write.set()
    train_step(engine, network, 5, rank, world_size)  # its collectives run beside the save's
    checkpointer.finish()
    return saved, early, checkpointer.poll(), checkpointer.poll(), state_of(engine), engine.state_version, list(checkpointer.scratch.glob("*"))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A run folder with a checkpoint of step 3 by four ranks, and what they told."""
    run_dir = tmp_path_factory.mktemp("saved")
    return run_dir, run_tensors(save_while_training, 4, 4, str(run_dir))


def test_a_save_holds_the_values_of_its_beginning_while_training_goes_on(saved_run):
    run_dir, results = saved_run
    for _, early, polled, again, _, version, left_over in results:
        assert early == ([], "")
        assert polled == ([3], "")
        assert again == ([], "")
        assert version == 6
        assert left_over == []
    saved, final = results[0][0], results[0][4]
    assert not torch.equal(saved["value"]["out.weight"], final["value"]["out.weight"])
    names = sorted(path.name for path in (run_dir / "run" / NAME).iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp", "parameters.json"]
    description = json.loads((run_dir / "run" / NAME / "parameters.json").read_text())
    assert description["state_version"] == 3
    assert description["shapes"]["scale"] == []


def load_checkpoint(rank, world_size, run_dir, bucket_bytes, folder_kind=Folder, precision="fp32"):
    network = Network()
    engine = make_engine(network, rank, world_size, bucket_bytes, precision)
    checkpointer = make_checkpointer(engine, rank, world_size, run_dir, folder_kind=folder_kind)
    checkpointer.load(NAME)
    state, version, full = state_of(engine), engine.state_version, engine.full_parameters()
    resident = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    for step in range(3, 6):
        train_step(engine, network, step, rank, world_size)
    return state, version, full, resident, state_of(engine)


@pytest.mark.parametrize(("world_size", "bucket_bytes"), [(4, 400), (3, 4), (2, 10**6), (1, 100), (5, 1000)])
def test_a_save_of_four_ranks_loads_bit_exact_on_others_with_other_buckets(saved_run, world_size, bucket_bytes):
    run_dir, saved = saved_run
    results = run_tensors(load_checkpoint, world_size, world_size, str(run_dir), bucket_bytes)
    for state, version, _, resident, _ in results:
        assert version == 3
        for kind in KINDS:
            assert state[kind].keys() == saved[0][0][kind].keys()
            assert all(torch.equal(state[kind][name], saved[0][0][kind][name]) for name in state[kind]), kind
        assert all(torch.equal(resident[name].flatten(), state["value"][name]) for name in resident)
    assert all(torch.equal(tensor.flatten(), results[0][0]["value"][name]) for name, tensor in results[0][2].items())
    if (world_size, bucket_bytes) == (4, 400):  # the same sums in the same order
        for kind in KINDS:
            assert all(torch.equal(results[0][4][kind][name], saved[0][4][kind][name]) for name in saved[0][4][kind]), "goes on as if never stopped"


def test_bf16_goes_on_from_the_fp32_state(saved_run):
    run_dir, saved = saved_run
    for state, version, _, resident, _ in run_tensors(load_checkpoint, 2, 2, str(run_dir), 400, Folder, "bf16"):
        assert version == 3
        assert all(torch.equal(state["value"][name], saved[0][0]["value"][name]) for name in resident)
        assert all(torch.equal(resident[name].flatten(), state["value"][name].bfloat16()) for name in resident)


def test_from_an_object_store_each_rank_fetches_the_files_that_it_needs(saved_run):
    run_dir, saved = saved_run
    for state, version, *_ in run_tensors(load_checkpoint, 3, 3, str(run_dir), 1000, FarFolder):
        assert version == 3
        assert all(torch.equal(state[kind][name], saved[0][0][kind][name]) for kind in KINDS for name in state[kind])
    assert not list(run_dir.glob("scratch_3_*/load"))


def own_files(rank, world_size, run_dir):
    checkpointer = make_checkpointer(make_engine(Network(), rank, world_size, 400), rank, world_size, run_dir)
    metadata = dcp.FileSystemReader(f"{run_dir}/run/{NAME}").read_metadata()
    return needed_files(metadata, checkpointer._entries(ShardState.zeros(checkpointer.engine.layout.shard_size, torch.device("cpu"))))


def test_equal_ranks_need_their_own_file_alone(saved_run):
    assert run_tensors(own_files, 4, 4, str(saved_run[0])) == [{f"__{rank}_0.distcp"} for rank in range(4)]


def fail_then_save(rank, world_size, run_dir, blocked):
    network = Network()
    engine = make_engine(network, rank, world_size)
    checkpointer = make_checkpointer(engine, rank, world_size, run_dir)
    checkpoints = Path(run_dir) / "run" / "checkpoints"
    folder = checkpoints / "step_000001" / "__1_0.distcp"  # where a file should be
    obstacle = {"scratch": checkpointer.scratch, "run": checkpoints, "part": folder / "x", "size": Path(run_dir) / "none"}[blocked]
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
    first = (*checkpointer.poll(), [path.name for path in checkpoints.glob("step_000001/*")] if checkpoints.is_dir() else [])
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
    results = run_tensors(fail_then_save, 3, 3, str(tmp_path), "scratch")
    (saved, error, _), *_ = results[1]
    assert saved == []
    assert error.startswith("step 1: ")
    assert "scratch_3_1" in error
    assert "\n" not in error
    assert [results[rank][0] for rank in (0, 2)] == [([], "", [])] * 2, "the others have not failed, and have saved nothing"
    assert [result[1:] for result in results] == [(([3], ""), True, 3)] * 3


def test_a_node_without_room_says_so(tmp_path):
    results = run_tensors(fail_then_save, 2, 2, str(tmp_path), "size")
    assert re.fullmatch(rf"step 1: OSError: {tmp_path}/scratch_2_1/step_000001_\w+: cannot be written: File too large", results[1][0][1])
    assert [result[1:] for result in results] == [(([3], ""), True, 3)] * 2


def test_a_run_folder_that_cannot_be_written_is_told_and_the_next_save_works(tmp_path):
    results = run_tensors(fail_then_save, 2, 2, str(tmp_path), "run")
    for (saved, error, _), *_ in results:
        assert saved == []
        assert error.startswith("step 1: StorageError: ")
        assert f"{tmp_path}/run/checkpoints/step_000001/" in error
        assert "\n" not in error
    assert [result[1:] for result in results] == [(([3], ""), True, 3)] * 2


def test_parts_of_a_save_that_failed_elsewhere_are_taken_back(tmp_path):
    """On a full disk the parts that were written would take the room of the next save, and of the logs."""
    results = run_tensors(fail_then_save, 3, 3, str(tmp_path), "part")
    assert [result[0] for result in results[::2]] == [([], "", [])] * 2
    assert results[1][0][1].startswith(f"step 1: StorageError: {tmp_path}/run/checkpoints/step_000001/__1_0.distcp: cannot be copied from ")
    assert [result[1:] for result in results] == [(([3], ""), True, 3)] * 3


def die_in_a_save(rank, port, run_dir, moment):
    """Rank 2 dies in a save: how long closing and destroying took, whether the save's thread ended, and a save of the survivors."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=dist.PrefixStore("first", store), rank=rank, world_size=3, timeout=timedelta(seconds=30))
    network = Network()
    engine = make_engine(network, rank, 3)
    checkpointer = make_checkpointer(engine, rank, 3, run_dir, LateCheckpointer)
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
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=2, timeout=timedelta(seconds=30))
    again = make_checkpointer(make_engine(Network(), rank, 2), rank, 2, run_dir)
    again.begin(1)
    again.finish()
    return closed_s, thread.is_alive(), again.poll(), list(again.scratch.glob("*"))


@pytest.mark.parametrize("moment", ["collective", "start"])
def test_a_save_whose_peer_died_is_left_at_once(tmp_path, moment):
    for closed_s, alive, polled, left_over in run_processes(die_in_a_save, 3, str(tmp_path), moment, mortal=[2])[:2]:
        assert closed_s < 2.0
        assert not alive
        assert polled == ([1], "")
        assert left_over == []
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints" / "step_000001").iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp",
                                                                                                          "parameters.json"]


def load_another(rank, world_size, run_dir, change):
    network = Network(tied=change != "untied", width=8 if change == "width" else 6)
    if change == "frozen":
        network.visual.requires_grad_(False)
    engine = make_engine(network, rank, world_size)
    checkpointer = make_checkpointer(engine, rank, world_size, run_dir)
    before = state_of(engine)
    try:
        checkpointer.load(NAME)
    except ValueError as error:
        after = state_of(engine)
        return str(error), all(torch.equal(before[kind][name], after[kind][name]) for kind in KINDS for name in before[kind])
    return "no error", False


@pytest.mark.parametrize(("change", "message"), [
    ("width", "trained parameter embed.weight has shape (31, 8) in the model and (31, 6) in the checkpoint"),
    ("untied", "trained parameter head.weight has shape (31, 6) in the model and none in the checkpoint"),
    ("frozen", "trained parameter visual.weight has shape none in the model and (6, 3) in the checkpoint"),
])
def test_a_checkpoint_of_another_model_is_refused_in_one_line(saved_run, change, message):
    for text, unchanged in run_tensors(load_another, 2, 2, str(saved_run[0]), change):
        assert text == f"{NAME}: of another model: {message}"
        assert unchanged


def test_a_damaged_file_is_told_on_every_rank_and_changes_nothing(saved_run, tmp_path):
    shutil.copytree(saved_run[0] / "run", tmp_path / "run")
    (tmp_path / "run" / NAME / "__2_0.distcp").write_bytes(b"cut short")
    for text, unchanged in run_tensors(load_another, 2, 2, str(tmp_path), "none"):
        assert text.startswith(f"{NAME}: cannot be read: rank 0: ")
        assert "\n" not in text
        assert unchanged


def test_a_missing_checkpoint_names_its_file(tmp_path):
    engine = make_engine(Network(), 0, 1)
    with pytest.raises(OSError, match=f"{NAME}/parameters.json"):
        Checkpointer(engine, 0, 1, None, tmp_path / "scratch", Folder(str(tmp_path))).load(NAME)


def test_one_rank_needs_no_process_group(tmp_path):
    network = Network()
    engine = make_engine(network, 0, 1)
    train_step(engine, network, 0, 0, 1)
    checkpointer = Checkpointer(engine, 0, 1, None, tmp_path / "scratch", Folder(str(tmp_path / "run")))
    checkpointer.begin(1)
    checkpointer.begin(2)  # waits for the first
    checkpointer.close()
    assert checkpointer.poll() == ([1, 2], "")
    fresh = make_engine(Network(), 0, 1, 10**6)
    Checkpointer(fresh, 0, 1, None, tmp_path / "scratch", Folder(str(tmp_path / "run"))).load("checkpoints/step_000002")
    assert fresh.state_version == 1
    assert all(torch.equal(whole(fresh, kind)[name], whole(engine, kind)[name]) for kind in KINDS for name in engine.shapes)


def test_shapes_are_compared_in_the_order_of_the_model():
    compare_shapes("c", {"a": (1,), "b": (2,)}, {"b": (2,), "a": (1,)})
    with pytest.raises(ValueError, match=r"parameter b has shape \(3,\) in the model and \(2,\) in the checkpoint"):
        compare_shapes("c", {"a": (1,), "b": (2,), "extra": ()}, {"b": (3,), "a": (9,)})
