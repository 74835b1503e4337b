"""What a checkpoint holds (checkpoint.py, intervals.py), and what loads it: the same ranks, other ranks, an object
store, another model.
"""

import json
import math
import shutil
import time
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner

from dhp_ray.comm.progress import AbortedError
from dhp_ray.run_folder import tensors_folder
from dhp_ray.storage import Folder, StorageError
from dhp_ray.train.state.checkpoint import Checkpointer, Intervals, compare_shapes, needed_files
from dhp_ray.train.state.shards import ShardState
from tests.engine_values import full_parameters
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


def make_checkpointer(engine, rank, world_size, run_dir, kind=Checkpointer, folder_kind=Folder, generation=0):
    group = dist.new_group(list(range(world_size)), backend="gloo")
    scratch = Path(run_dir) / f"scratch_{world_size}_{rank}"
    return kind(engine, rank, group, scratch, folder_kind(f"{run_dir}/run"), generation)


def state_of(engine):
    return {kind: whole(engine, kind) for kind in KINDS}


def save_while_training(rank, world_size, run_dir):
    network = Network()
    engine = make_engine(network, rank, world_size, 400)
    checkpointer = make_checkpointer(engine, rank, world_size, run_dir, LateCheckpointer)
    checkpointer.may_write = Event()
    for step in range(3):
        train_step(engine, network, step, rank, world_size)
    engine.current.vision_updates = 2
    saved = state_of(engine)
    checkpointer.begin(3)
    for step in range(3, 5):
        train_step(engine, network, step, rank, world_size)
    early = checkpointer.poll()
    checkpointer.may_write.set()
    train_step(engine, network, 5, rank, world_size)  # its collectives run beside the save's
    checkpointer.finish()
    return (
        saved,
        early,
        checkpointer.poll(),
        checkpointer.poll(),
        state_of(engine),
        engine.state_version,
        list(checkpointer.scratch.glob("*")),
    )


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
    assert (description["state_version"], description["vision_updates"]) == (3, 2)
    assert description["shapes"]["scale"] == []


def load_checkpoint(rank, world_size, run_dir, bucket_bytes, folder_kind=Folder, precision="fp32"):
    network = Network()
    engine = make_engine(network, rank, world_size, bucket_bytes, precision)
    checkpointer = make_checkpointer(engine, rank, world_size, run_dir, folder_kind=folder_kind)
    checkpointer.load(NAME)
    assert engine.current.vision_updates == 2
    state, version, full = state_of(engine), engine.state_version, full_parameters(engine)
    resident = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    for step in range(3, 6):
        train_step(engine, network, step, rank, world_size)
    return state, version, full, resident, state_of(engine)


@pytest.mark.parametrize(("world_size", "bucket_bytes"), [
    (3, 4), (2, 10**6), (1, 100), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 400), (5, 1000)))])
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
            assert all(torch.equal(results[0][4][kind][name], saved[0][4][kind][name])
                       for name in saved[0][4][kind]), "goes on as if never stopped"


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
    return needed_files(metadata, checkpointer._entries(ShardState.zeros(checkpointer.engine.layout.shard_size,
                                                                         torch.device("cpu"))))


def test_equal_ranks_need_their_own_file_alone(saved_run):
    assert run_tensors(own_files, 4, 4, str(saved_run[0])) == [{f"__{rank}_0.distcp"} for rank in range(4)]


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
        return str(error), all(torch.equal(before[kind][name], after[kind][name]) for kind in KINDS
                               for name in before[kind])
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
        assert text.endswith(f"; if it is damaged, delete {NAME}, and a new start begins from the first step")
        assert "\n" not in text
        assert unchanged


def test_a_damaged_checkpoint_names_the_one_before_it(tmp_path):
    """Not one whose save was cut off: it has no manifest."""
    folder = Folder(str(tmp_path / "run"))
    for step in (99, 100, 101):
        folder.write(f"checkpoints/step_{step:06d}/manifest.json", b"")
    (tmp_path / "run/checkpoints/step_000102").mkdir()
    checkpointer, name = Checkpointer(make_engine(Network(), 0, 1), 0, None, None, folder), "checkpoints/step_000103"
    wanted = f"; if it is damaged, delete {name}, and a new start goes on after step 101"
    with pytest.raises(StorageError) as missing:
        checkpointer.load(f"{name}/generation_2")
    folder.write(f"{name}/generation_2/parameters.json", b"{")
    with pytest.raises(ValueError, match=r"parameters\.json: cannot be read: ") as cut:
        checkpointer.load(f"{name}/generation_2")
    assert all(str(caught.value).endswith(wanted) for caught in (missing, cut))


def test_a_missing_checkpoint_names_its_file(tmp_path):
    engine = make_engine(Network(), 0, 1)
    with pytest.raises(OSError, match=f"{NAME}/parameters.json"):
        Checkpointer(engine, 0, None, tmp_path / "scratch", Folder(str(tmp_path))).load(NAME)


def test_one_rank_needs_no_process_group(tmp_path):
    network = Network()
    engine = make_engine(network, 0, 1)
    train_step(engine, network, 0, 0, 1)
    checkpointer = Checkpointer(engine, 0, None, tmp_path / "scratch", Folder(str(tmp_path / "run")))
    checkpointer.begin(1)
    checkpointer.begin(2)  # waits for the first
    checkpointer.close()
    assert checkpointer.poll() == ([1, 2], "")
    fresh = make_engine(Network(), 0, 1, 10**6)
    Checkpointer(fresh, 0, None, tmp_path / "scratch", Folder(str(tmp_path / "run"))).load("checkpoints/step_000002")
    assert fresh.state_version == 1
    assert all(torch.equal(whole(fresh, kind)[name], whole(engine, kind)[name]) for kind in KINDS
               for name in engine.shapes)


def test_shapes_are_compared_in_the_order_of_the_model():
    compare_shapes("c", {"a": (1,), "b": (2,)}, {"b": (2,), "a": (1,)})
    with pytest.raises(ValueError, match=r"parameter b has shape \(3,\) in the model and \(2,\) in the checkpoint"):
        compare_shapes("c", {"a": (1,), "b": (2,), "extra": ()}, {"b": (3,), "a": (9,)})


def test_an_abort_ends_the_wait_for_a_save(tmp_path):
    """The storage may take minutes; a worker that has not left a broken generation after seconds is ended."""
    engine = make_engine(Network(), 0, 1)
    checkpointer = LateCheckpointer(engine, 0, None, tmp_path / "scratch", Folder(f"{tmp_path}/run"), 1)
    checkpointer.may_write = Event()
    checkpointer.begin(1)
    Timer(0.2, engine.progress.abort).start()
    begun = time.monotonic()
    with pytest.raises(AbortedError):
        checkpointer.finish()
    assert time.monotonic() - begun < 5.0
    checkpointer.close(0.0)
    checkpointer.may_write.set()


def test_a_copy_of_the_state_shows_progress(tmp_path, monkeypatch):
    """A shard of tens of gigabytes takes long to copy."""
    engine = make_engine(Network(), 0, 1)
    train_step(engine, Network(), 0, 0, 1)
    monkeypatch.setattr("dhp_ray.train.state.shards.PART_ELEMENTS", 7)
    checkpointer = Checkpointer(engine, 0, None, tmp_path / "scratch", Folder(f"{tmp_path}/run"), 1)
    before = engine.progress.passed().number
    checkpointer.begin(1)
    assert engine.progress.passed().number - before == 3 * math.ceil(engine.shard_size / 7)
    checkpointer.finish()
    monkeypatch.undo()
    [(saved, error)] = [checkpointer.poll()]
    assert (saved, error) == ([1], "")
    other = make_engine(Network(), 0, 1)
    Checkpointer(other, 0, None, None, Folder(f"{tmp_path}/run"), 1).load(tensors_folder(1, 1))
    assert all(torch.equal(one, two) for one, two in zip(
        engine.current.tensors().values(), other.current.tensors().values()))


def load_old(rank, world_size, run_dir):
    engine = make_engine(Network(), rank, world_size, 400)
    make_checkpointer(engine, rank, world_size, run_dir).load(NAME)
    return engine.state_version, engine.current.vision_updates


def test_an_earlier_version_s_checkpoint_has_updated_the_encoder_each_time(saved_run, tmp_path):
    run_dir, _ = saved_run
    shutil.copytree(run_dir / "run", tmp_path / "run")
    file = tmp_path / "run" / NAME / "parameters.json"
    description = json.loads(file.read_text())
    del description["vision_updates"]
    file.write_text(json.dumps(description))
    assert run_tensors(load_old, 2, 2, str(tmp_path)) == [(3, 3)] * 2


def save_three_times(rank, world_size, run_dir, folder_kind):
    """For how many ranks torch planned, in three saves and in one after a failure; the saves; and whether the state of
    the last one that was not planned loads.
    """
    plans, plan_all = [], default_planner.create_default_global_save_plan

    def counted(all_plans):
        plans.append(len(all_plans))
        return plan_all(all_plans)

    default_planner.create_default_global_save_plan = counted
    network = Network()
    engine = make_engine(network, rank, world_size, 400)
    checkpointer = make_checkpointer(engine, rank, world_size, run_dir, folder_kind=folder_kind)
    saved = []
    for step in range(1, 4):
        train_step(engine, network, step, rank, world_size)
        checkpointer.begin(step)
        checkpointer.finish()
        saved += checkpointer.poll()[0]
    expected, planned = state_of(engine), list(plans)
    checkpointer.renew(dist.new_group(list(range(world_size)), backend="gloo"))  # as after a save that failed
    train_step(engine, network, 4, rank, world_size)
    checkpointer.begin(4)
    checkpointer.finish()
    saved += checkpointer.poll()[0]
    checkpointer.load(NAME)
    loaded = state_of(engine)
    same = all(torch.equal(expected[kind][name], loaded[kind][name]) for kind in KINDS for name in expected[kind])
    return planned, plans, saved, same


@pytest.mark.parametrize("folder_kind", [Folder, FarFolder])
def test_the_ranks_plan_their_first_save_together_and_no_later_one(tmp_path, folder_kind):
    """A plan of many ranks takes rank 0 seconds, beside training."""
    for rank, (planned, plans, saved, same) in enumerate(run_tensors(save_three_times, 3, 3, str(tmp_path),
                                                                     folder_kind)):
        assert planned == ([3] if rank == 0 else [])
        assert plans == ([3, 3] if rank == 0 else []), "a plan that a rank may not have is made anew"
        assert saved == [1, 2, 3, 4]
        assert same
    for step in range(1, 5):
        folder = tmp_path / "run" / f"checkpoints/step_{step:06d}"
        assert {path.name for path in folder.iterdir()} == {".metadata", "parameters.json", "__0_0.distcp",
                                                            "__1_0.distcp", "__2_0.distcp"}


class Moved(Intervals):
    """Of which a part has another size than at first."""

    def __get_tensor_shard__(self, index):
        return torch.cat([super().__get_tensor_shard__(index)] * 2)


def test_a_file_that_is_not_as_the_index_says_is_no_save(tmp_path):
    """The index is that of the first save."""
    engine = make_engine(Network(), 0, 1)
    checkpointer = Checkpointer(engine, 0, None, tmp_path / "scratch", Folder(f"{tmp_path}/run"))
    entries = checkpointer._entries
    for step, kind in ((1, Intervals), (2, Moved), (3, Intervals)):
        checkpointer._entries = lambda state, kind=kind: {
            name: kind(entry.size_elements, entry.parts) for name, entry in entries(state).items()}
        checkpointer.begin(step)
        checkpointer.finish()
    saved, error = checkpointer.poll()
    assert saved == [1, 3]
    assert error.endswith("step_000002: its parts do not lie where those of the save before did")
