from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dhp_ray.config import Config, ConfigError, load
from dhp_ray.runtime.records.checkpoints import Checkpoints, Manifest
from dhp_ray.runtime.records.run_records import RunRecords, check_run, last_committed, stored_config
from dhp_ray.schema import Source
from dhp_ray.storage import Folder, StorageError


def metrics(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / step, "learning_rate": 1e-3, "gradient_norm": 1.5, "num_tokens": 100,
            "num_samples": 2, "step_time_s": 0.5, "planning_time_s": 0.001, "predicted_makespan_s": 0.4,
            "measured_makespan_s": 0.45, "idle_fraction": 0.1, "num_ranks": 4, "generation": 1,
            "degrees": {"1": 2, "3": 1}, "planner": "dhp", "late": False} | changes


def open_records(path: Path) -> RunRecords:
    return RunRecords(Folder(str(path)))


def start(path: Path, wanted: Config) -> None:
    """Do with a configuration what a start does that commits a step."""
    folder = Folder(str(path))
    check_run(folder, wanted, last_committed(folder))
    records = open_records(path)
    records.write_config(wanted)
    commit(records, records.last_step + 1, records.last_step + 1)


def refused(path: Path, wanted: Config) -> str:
    folder = Folder(str(path))
    with pytest.raises(ConfigError) as caught:
        check_run(folder, wanted, last_committed(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_committed_steps_without_a_config_are_a_run_too(tmp_path: Path) -> None:
    never = load([f"run.dir={tmp_path}", "run.resume=never"])
    check_run(Folder(str(tmp_path)), never, 0)
    commit(open_records(tmp_path), 1, 1)
    assert refused(tmp_path, never).startswith("run.resume: got 'never' with a run in ")


def test_the_last_committed_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    folder, file = Folder(str(tmp_path)), tmp_path / "ledger.jsonl"
    assert last_committed(folder) == 0
    for text, step in (("", 0), ('{"step": 1, "sam', 0), ('{"step": 1}\n', 1), ('{"step": 1}\n{"step": 2}\n{"st', 2)):
        file.write_text(text)
        assert last_committed(folder) == step
    for text in ("[]\n", "{}\n", "none\n", "3\n"):
        file.write_text(text)
        with pytest.raises(StorageError, match=r"/ledger.jsonl: its last line is of no committed step; allowed: "):
            last_committed(folder)


def test_a_start_that_made_no_step_fixes_nothing(tmp_path: Path) -> None:
    """It has written config.yaml, and the plan of a step that never ended."""
    wrong = config(data__image_root="/wrong")
    records = open_records(tmp_path)
    records.write_config(wrong)
    records.plan(1, {"groups": []})
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)  # without a manifest
    check_run(records.folder, config(data__image_root="/right", run__resume="never"), 0)
    Checkpoints(records.folder, 2).seal(Manifest(1, {}, 2, "step"))
    assert refused(tmp_path, config(data__image_root="/right")).startswith("data.image_root: got '/right'; the run in ")


@pytest.mark.parametrize("name", ["model/config.json", "checkpoints/best.pt", "plans/step_000001.json", "trace/a",
                                  "metrics.jsonl", "skipped.jsonl", "config.yaml"])
def test_what_is_of_no_run_is_not_replaced(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    check_run(Folder(str(run)), config(), 0)
    (run / name).parent.mkdir(parents=True)
    (run / name).write_text("seed: 7\n")
    shown = name if "/" not in name else f"{name.partition('/')[0]}/"
    line = (f"run.dir: {run} has {shown} and no committed step: it is of no run, and a run would replace it; allowed: "
            "a new or empty folder, or one that a run has begun")
    assert refused(run, config()) == line


def test_what_a_failed_start_leaves_is_in_nobodys_way(tmp_path: Path) -> None:
    open_records(tmp_path).event("wait")
    for name in ("tensorboard/events", "lease/000001_a.json", "cost.yaml", "model/", "plans/"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    check_run(Folder(str(tmp_path)), config(), 0)
    open_records(tmp_path).write_config(config())
    (tmp_path / "plans" / "step_000001.json").touch()
    check_run(Folder(str(tmp_path)), config(), 0)
    (tmp_path / "model" / "config.json").touch()  # put there since
    assert refused(tmp_path, config()).startswith(f"run.dir: {tmp_path} has model/ and no committed step: ")


def test_a_finished_runs_model_is_not_replaced_by_one_from_the_beginning(tmp_path: Path) -> None:
    start(tmp_path, config())
    check_run(Folder(str(tmp_path)), config(), 1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert refused(tmp_path, config()) == (
        f"run.dir: {tmp_path} has model/ of a run of 1 steps and no checkpoint: the run would begin again and replace "
        "it; allowed: this folder once model/ is moved away, or another run.dir")
    Checkpoints(Folder(str(tmp_path)), 2).seal(Manifest(1, {}, 2, "step"))
    check_run(Folder(str(tmp_path)), config(), 1)


def test_fewer_steps_than_are_done(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    for _ in range(3):
        start(tmp_path, config())
    check_run(folder, config(run__steps=1), 3)  # without a checkpoint they are done again
    Checkpoints(folder, 2).seal(Manifest(2, {}, 2, "step"))
    for steps in (0, 2, 3):
        check_run(folder, config(run__steps=steps), 3)
    assert refused(tmp_path, config(run__steps=1)) == (
        f"run.steps: got 1; the run in {tmp_path} has done 2; allowed: at least 2, or another run.dir")


@pytest.mark.parametrize("name", ["model", "checkpoints/step_000001", "exports/step_000001", "plans", "metrics.jsonl"])
@pytest.mark.parametrize(("key", "change"), [
    ("model.path", "model__path"), ("data.path", "data__path"), ("data.image_root", "data__image_root"),
    ("eval.path", "eval__path"), ("data.sources[1].path", "")])
def test_what_a_run_writes_it_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str, change: str
) -> None:
    """However it is named: run.dir and the path may each be a link, or relative."""
    real, link = tmp_path / "real", tmp_path / "link"
    (real / name).parent.mkdir(parents=True)
    (real / name).touch()
    link.symlink_to(real)
    (tmp_path / "alias").symlink_to(real / name)
    monkeypatch.chdir(tmp_path)

    def reading(path: str) -> Config:
        return config(**{change: path}) if change else config(data__sources=[Source(path="a"), Source(path=path)])

    for run_dir in (str(real), str(link), "link"):
        for path in (str(real / name), str(link / name), f"real/./{name}", "alias"):
            wanted = reading(path)
            wanted.run.dir = run_dir
            assert refused(Path(run_dir), wanted) == (
                f"{key}: got {path!r}, which lies in run.dir, where the run writes {name.partition('/')[0]}; allowed: "
                "another place, or another run.dir")
    shutil.rmtree(real)
    for path in (str(tmp_path), str(real), str(real / f"my_{name}")):
        check_run(Folder(str(link)), reading(path), 0)


@pytest.mark.parametrize("change", ["data__path", "eval__path", ""])
def test_rows_in_json_are_not_read_from_among_the_logs(tmp_path: Path, change: str) -> None:
    own = config(**{change: str(tmp_path)}) if change else config(data__sources=[Source(path=str(tmp_path))])
    own.data.format = "parquet"
    check_run(Folder(str(tmp_path)), own, 0)
    own.data.format = "llava"
    assert refused(tmp_path, own) == (
        f"{'data.sources[0].path' if not change else change.replace('__', '.')}: got {str(tmp_path)!r}, which is "
        "run.dir: the run's logs would be among the rows; allowed: another place, or another run.dir")


def lines(path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def commit(records: RunRecords, first: int, last: int) -> None:
    for step in range(first, last + 1):
        records.commit(step, [f"a{step}", f"b{step}"], metrics(step))


def config(**changes: Any) -> Config:
    result = Config()
    result.model.preset = "tiny"
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        setattr(getattr(result, section) if section else result, key, value)
    return result


def test_a_committed_step_is_one_line_in_both_logs(tmp_path: Path) -> None:
    records = open_records(tmp_path)
    assert records.last_step == 0
    commit(records, 1, 3)
    committed = [{"step": step, "sample_ids": [f"a{step}", f"b{step}"]} for step in (1, 2, 3)]
    assert lines(tmp_path, "ledger.jsonl") == committed
    assert lines(tmp_path, "metrics.jsonl") == [metrics(step) for step in (1, 2, 3)]
    assert list(records.step_times_s()) == [metrics(step)["step_time_s"] for step in (3, 2, 1)]
    assert records.last_step == 3


def test_steps_without_a_sample_have_trained_nothing(tmp_path: Path) -> None:
    records = open_records(tmp_path)
    for step, sample_ids in ((1, []), (2, []), (3, ["a"]), (4, [])):
        records.commit(step, sample_ids, metrics(step))
        assert records.has_trained == (step > 2)
    records.truncate(2)
    assert not records.has_trained


def test_a_loss_that_is_no_number_becomes_null(tmp_path: Path) -> None:
    records = open_records(tmp_path)
    records.commit(1, [], metrics(1, loss=math.nan, measured_makespan_s=math.inf))
    line = json.loads((tmp_path / "metrics.jsonl").read_text(),
                      parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert line["loss"] is None
    assert line["measured_makespan_s"] is None


@pytest.mark.parametrize("step", [0, 2, 4])
def test_steps_are_committed_in_order_and_once(tmp_path: Path, step: int) -> None:
    records = open_records(tmp_path)
    commit(records, 1, 2)
    with pytest.raises(ValueError, match=f"step {step} cannot be committed after step 2"):
        records.commit(step, [], metrics(step or 1))


def test_a_crash_between_the_two_logs_is_repaired(tmp_path: Path) -> None:
    commit(open_records(tmp_path), 1, 3)
    with open(tmp_path / "metrics.jsonl", "a") as file:  # what a crash after the first of the two writes leaves
        file.write(json.dumps(metrics(4)) + "\n")
    records = open_records(tmp_path)
    assert records.last_step == 3
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == [1, 2, 3]
    commit(records, 4, 4)
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_crash_at_any_byte_of_a_commit_is_repaired(tmp_path: Path) -> None:
    """The two logs of a commit cut anywhere agree when opened again; the next commits leave no gap and no repeat."""
    reference = tmp_path / "reference"
    commit(open_records(reference), 1, 2)
    before = {name: (reference / name).stat().st_size for name in ("metrics.jsonl", "ledger.jsonl")}
    commit(open_records(reference), 3, 3)
    whole = {name: (reference / name).read_bytes() for name in before}
    written = [("metrics.jsonl", size) for size in range(before["metrics.jsonl"], len(whole["metrics.jsonl"]), 37)]
    written += [("ledger.jsonl", size) for size in range(before["ledger.jsonl"], len(whole["ledger.jsonl"]) + 1)]
    for number, (name, size) in enumerate(written):
        run = tmp_path / f"cut{number}"
        run.mkdir()
        sizes = {"metrics.jsonl": len(whole["metrics.jsonl"]) if name == "ledger.jsonl" else size,
                 "ledger.jsonl": size if name == "ledger.jsonl" else before["ledger.jsonl"]}
        for log, end in sizes.items():
            (run / log).write_bytes(whole[log][:end])
        records = open_records(run)
        assert records.last_step == (3 if sizes["ledger.jsonl"] == len(whole["ledger.jsonl"]) else 2)
        commit(records, records.last_step + 1, 4)
        for log in before:
            assert [line["step"] for line in lines(run, log)] == [1, 2, 3, 4]


def test_logs_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    commit(open_records(tmp_path), 1, 3)
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(kept[:2]))
    with pytest.raises(StorageError, match=r"metrics\.jsonl: lines are missing; ledger\.jsonl has committed 3 steps"):
        open_records(tmp_path)
    (tmp_path / "ledger.jsonl").write_text('{"step": 1, "sample_ids": []}\n{"step": 3, "sample_ids": []}\n')
    with pytest.raises(StorageError, match=r"ledger\.jsonl: line 2 is of step 3; it must be of step 2"):
        open_records(tmp_path)


def test_truncating_cuts_every_log_back_to_the_step(tmp_path: Path) -> None:
    records = open_records(tmp_path)
    for step in range(1, 7):
        records.plan(step, {"groups": []})
        records.skip(f"bad{step}", "unreadable", step)
        commit(records, step, step)
    records.truncate(4)
    for name in ("ledger.jsonl", "metrics.jsonl", "skipped.jsonl"):
        assert [line["step"] for line in lines(tmp_path, name)] == [1, 2, 3, 4]
    plans = sorted(path.name for path in (tmp_path / "plans").iterdir())
    assert plans == [f"step_{step:06d}.json" for step in (1, 2, 3, 4)]
    assert records.last_step == 4
    assert records.skip("bad5", "unreadable", 5)  # forgotten, so listed again
    commit(records, 5, 5)
    again = open_records(tmp_path)
    assert again.last_step == 5
    again.truncate(0)
    assert again.last_step == 0
    assert lines(tmp_path, "ledger.jsonl") == []
    assert list((tmp_path / "plans").iterdir()) == []


def test_a_checkpoint_past_the_ledger_is_refused(tmp_path: Path) -> None:
    records = open_records(tmp_path)
    commit(records, 1, 2)
    with pytest.raises(StorageError, match=r"ends at step 2; the checkpoint is of step 3"):
        records.truncate(3)


def test_a_skipped_sample_is_listed_once_an_epoch(tmp_path: Path) -> None:
    records = open_records(tmp_path)
    assert records.skip("x", "image a.png: truncated", 3, epoch=0)
    assert not records.skip("x", "image a.png: truncated", 4, epoch=0)
    assert records.skip("y", "too long", 4, epoch=0)
    again = open_records(tmp_path)
    assert not again.skip("x", "image a.png: truncated", 5, epoch=0)
    assert again.skip("x", "image a.png: truncated", 9, epoch=1)
    assert lines(tmp_path, "skipped.jsonl") == [
        {"id": "x", "reason": "image a.png: truncated", "step": 3, "epoch": 0},
        {"id": "y", "reason": "too long", "step": 4, "epoch": 0},
        {"id": "x", "reason": "image a.png: truncated", "step": 9, "epoch": 1},
    ]


def test_events_plans_and_membership(tmp_path: Path) -> None:
    records = open_records(tmp_path)
    records.event("started", generation=1)
    records.event("checkpoint", step=20)
    first, second = lines(tmp_path, "events.jsonl")
    assert (first["kind"], first["generation"], second["kind"], second["step"]) == ("started", 1, "checkpoint", 20)
    assert first["time"] <= second["time"]
    records.plan(1, {"planner": "dhp", "groups": [{"ranks": [0, 1]}]})
    assert json.loads((tmp_path / "plans/step_000001.json").read_text())["groups"][0]["ranks"] == [0, 1]
    member = {"rank": 0, "pid": 4711, "node_id": "n", "device": "cpu"}
    records.cluster(1, [member])
    records.cluster(2, [member])
    assert json.loads((tmp_path / "cluster.json").read_text()) == {"generation": 2, "ranks": [member]}


def test_the_configuration_is_saved_and_loads_again(tmp_path: Path) -> None:
    records = open_records(tmp_path)
    assert stored_config(records.folder) == {}
    records.write_config(config(seed=7, train__freeze=["vision"], train__adam_eps=1e-6))
    loaded = load(["--config", str(tmp_path / "config.yaml")])
    assert (loaded.seed, loaded.train.freeze, loaded.train.adam_eps) == (7, ["vision"], 1e-6)
    stored = stored_config(records.folder)
    assert (stored["train.adam_eps"], stored["train.freeze"]) == (1e-6, ["vision"])


def test_other_keys_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    """Also which rows are used, after a run has ended with `data.on_error=fail`."""
    start(tmp_path, config(data__on_error="fail"))
    changed = config(run__steps=100, cluster__num_workers=5, train__learning_rate=2e-4, planner__tokens_per_rank="960",
                     comm__transport="parent", data__on_error="skip", data__max_file_mb=1024.0)
    start(tmp_path, changed)
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert stored["run"]["steps"] == 100
    assert stored["planner"]["tokens_per_rank"] == "960"


@pytest.mark.parametrize(("name", "key", "value"), [
    ("seed", "seed", 1), ("data__image_root", "data.image_root", "/images"),
    ("model__path", "model.path", "/elsewhere"), ("data__max_pixels", "data.max_pixels", 50_000),
    ("data__sources", "data.sources", []), ("batch__global_samples", "batch.global_samples", 17),
    ("train__precision", "train.precision", "bf16"), ("train__freeze", "train.freeze", ["vision"])])
def test_what_decides_the_steps_must_stay(tmp_path: Path, name: str, key: str, value: Any) -> None:
    first = config(data__sources=[Source(path="a", weight=0.3), Source(path="b")])
    start(tmp_path, first)
    start(tmp_path, first)  # nothing differs after a round through the file
    before = (tmp_path / "config.yaml").read_text()
    changed = config(data__sources=[Source(path="a", weight=0.3), Source(path="b")])
    section, _, field = name.rpartition("__")
    old = getattr(getattr(first, section) if section else first, field)
    setattr(getattr(changed, section) if section else changed, field, value)
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, changed)
    message = str(caught.value)
    assert message.startswith(f"{key}: got {value!r}; the run in {tmp_path}")
    assert "\n" not in message
    assert isinstance(old, list) or repr(old) in message
    assert (tmp_path / "config.yaml").read_text() == before


def test_a_key_that_the_old_file_lacks_is_taken_as_it_is(tmp_path: Path) -> None:
    start(tmp_path, config())
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del stored["data"]["min_pixels"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
    start(tmp_path, config())


def test_resume_never_refuses_a_folder_with_a_run(tmp_path: Path) -> None:
    fresh = config(run__resume="never")
    records = open_records(tmp_path)
    records.write_config(fresh)
    commit(records, 1, 2)
    with pytest.raises(ConfigError, match=r"run\.resume: got 'never' with a run in "):
        start(tmp_path, fresh)


def test_a_damaged_configuration_is_one_line(tmp_path: Path) -> None:
    for text in ("[1, 2]", "a: [", "\x00"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(StorageError, match=r"config\.yaml: does not hold a configuration"):
            stored_config(Folder(str(tmp_path)))


def test_a_configuration_with_sources_survives_the_file(tmp_path: Path) -> None:
    wanted = config(data__sources=[Source(path="a", weight=3), Source(path="b")])
    start(tmp_path, wanted)
    assert load(["--config", str(tmp_path / "config.yaml")]) == wanted


def test_a_run_on_an_object_store(object_store: str, tmp_path: Path) -> None:
    """The same files; what was not uploaded before a crash is gone, from both logs alike."""
    folder = Folder(f"s3://bucket/{tmp_path.name}/run{object_store}")
    records = RunRecords(folder)
    records.write_config(config())
    records.skip("x", "unreadable", 1)
    commit(records, 1, 5)
    records.flush()
    commit(records, 6, 7)  # never uploaded
    again = RunRecords(folder)
    assert again.last_step == 5
    again.truncate(4)
    third = RunRecords(folder)
    assert third.last_step == 4
    assert not third.skip("x", "unreadable", 5)
    commit(third, 5, 6)
    third.close()
    for name in ("ledger.jsonl", "metrics.jsonl"):
        assert [json.loads(line)["step"] for line in folder.read(name).decode().splitlines()] == [1, 2, 3, 4, 5, 6]
    assert folder.names() == ["config.yaml", "ledger.jsonl", "metrics.jsonl", "skipped.jsonl"]
