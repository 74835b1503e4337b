from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from dhp_ray.config import load
from dhp_ray.runtime.driver.commit import step_metrics
from dhp_ray.runtime.records.tensorboard import ScalarLog, cluster_text, scalars_of
from dhp_ray.storage import Folder
from tests.disks import fill
from tests.report.runs import plan_of, results_of

EXTRA = {"applied": True, "epoch": 0, "num_valid_tokens": 80, "data_wait_s": 0.01, "lower_bound_s": 0.3,
         "prefetch_wait_s": 0.0, "pool_hits": 5, "pool_creations": 2, "pool_evictions": 0, "pool_overflows": 0}


def metrics(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "loss": 10.0 / step, "learning_rate": 1e-3, "gradient_norm": 1.5, "num_tokens": 100,
            "num_samples": 2, "step_time_s": 0.5, "planning_time_s": 0.001,
            "predicted_makespan_s": 0.4, "measured_makespan_s": 0.45, "idle_fraction": 0.1, "num_ranks": 4,
            "generation": 1,
            "degrees": {"1": 9, "3": 1}, "planner": "dhp", "late": step == 2} | changes


def read_back(path: Path) -> EventAccumulator:
    return EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(path: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, pytest.approx(event.value)) for event in read_back(path).Scalars(tag)]


def test_a_step_makes_a_point_on_every_curve(tmp_path: Path) -> None:
    log = ScalarLog(Folder(str(tmp_path)), first_step=1)
    log.step(metrics(1), EXTRA)
    log.step(metrics(2, eval_loss=3.0, degrees={"2": 4}, encoder={
        "layout": "world", "keeps": True, "encode_s": 0.25, "backward_s": 0.5, "imbalance": 1.1,
        "exchanged_bytes": 640}), EXTRA | {"pool_hits": 9})
    log.close()
    assert points(tmp_path, "encoder/encode_s") == [(2, 0.25)]
    assert points(tmp_path, "encoder/exchanged_bytes") == [(2, 640.0)]
    assert points(tmp_path, "loss/train") == [(1, 10.0), (2, 5.0)]
    assert points(tmp_path, "loss/eval") == [(2, 3.0)]
    assert points(tmp_path, "loss/learning_rate") == [(1, 1e-3), (2, 1e-3)]
    assert points(tmp_path, "plan/late") == [(1, 0.0), (2, 1.0)]
    assert points(tmp_path, "throughput/tokens_per_s") == [(1, 200.0), (2, 200.0)]
    assert points(tmp_path, "balance/idle_fraction") == [(1, 0.1), (2, 0.1)]
    assert points(tmp_path, "plan/degree_1") == [(1, 9.0), (2, 0.0)]
    assert points(tmp_path, "plan/degree_2") == [(1, 0.0), (2, 4.0)]
    assert points(tmp_path, "plan/degree_3") == [(1, 1.0), (2, 0.0)]
    assert points(tmp_path, "comm/pool_hits") == [(1, 5.0), (2, 9.0)]
    groups = {tag.split("/")[0] for tag in read_back(tmp_path).Tags()["scalars"]}
    assert groups == {"loss", "throughput", "balance", "plan", "data", "elastic", "comm", "encoder"}


def test_every_metric_has_a_curve() -> None:
    whole = metrics(3, eval_loss=2.0, eval_exact_match=0.125, eval_anls=0.375, eval_f1=0.625,
                    step_time_s=0.25, num_tokens=123, planning_time_s=0.017)
    drawn = set(scalars_of(whole, EXTRA).values())
    for name, value in (whole | EXTRA).items():
        if name not in ("step", "degrees", "planner"):
            assert float(value) in drawn, name


def test_every_figure_of_images_encoded_apart_has_a_curve() -> None:
    plan = plan_of(3, encoder="world")
    whole = step_metrics(plan, results_of(plan, 3), 0.5, 1.0, 1)
    drawn = {tag: value for tag, value in scalars_of(whole, EXTRA).items() if tag.startswith("encoder/")}
    assert drawn == {f"encoder/{name}": value for name, value in whole["encoder"].items()
                     if name not in ("layout", "keeps")}
    assert not [tag for tag in scalars_of(metrics(1), EXTRA) if tag.startswith("encoder/")]


def test_every_figure_of_activations_in_host_memory_has_a_curve() -> None:
    found = scalars_of(metrics(1) | {"offload": {"packs": 2, "largest_share": 0.5, "moved_bytes": 640}}, EXTRA)
    assert {tag: value for tag, value in found.items() if tag.startswith("offload/")} == {
        "offload/packs": 2.0, "offload/largest_share": 0.5, "offload/moved_bytes": 640.0}
    assert not [tag for tag in scalars_of(metrics(1), EXTRA) if tag.startswith(("offload/", "recomputation/"))]
    found = scalars_of(metrics(1) | {"recomputation": {"packs": 3, "mean_share": 0.25}}, EXTRA)
    assert (found["recomputation/packs"], found["recomputation/mean_share"]) == (3, 0.25)


def test_speeds_of_ranks_are_curves_of_their_own_while_they_are_few() -> None:
    tags = scalars_of(metrics(1), EXTRA | {"speed_0": 1.0, "speed_1": 0.5})
    assert (tags["elastic/speed_1"], tags["elastic/slowest_speed"]) == (0.5, 0.5)
    many = scalars_of(metrics(1), EXTRA | {f"speed_{rank}": 1.0 + rank for rank in range(17)})
    assert [tag for tag in many if "speed" in tag] == ["elastic/slowest_speed"]


def test_many_ranks_draw_only_the_degrees_that_occur() -> None:
    tags = scalars_of(metrics(1, num_ranks=512, degrees={"1": 9, "300": 1}), EXTRA)
    assert sorted(tag for tag in tags if tag.startswith("plan/degree")) == ["plan/degree_1", "plan/degree_300"]


def test_a_resumed_run_shows_every_step_once(tmp_path: Path) -> None:
    """A first process reaches step 7, is killed, and a second goes on from the checkpoint of step 4; then again from
    step 6.
    """
    for first, last, scale in ((1, 7, 1.0), (5, 8, 2.0), (7, 9, 3.0)):
        log = ScalarLog(Folder(str(tmp_path)), first_step=first)
        log.text("configuration", f"from {first}")
        for step in range(first, last + 1):
            log.step(metrics(step, loss=scale * step), EXTRA)
    assert points(tmp_path, "loss/train") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 10.0), (6, 12.0), (7, 21.0),
                                              (8, 24.0), (9, 27.0)]
    assert [step for step, _ in points(tmp_path, "plan/degree_3")] == list(range(1, 10))


def test_a_run_started_over_shows_nothing_of_the_old_one(tmp_path: Path) -> None:
    for scale in (1.0, 2.0):
        log = ScalarLog(Folder(str(tmp_path)), first_step=1)
        log.step(metrics(1, loss=scale), EXTRA)
        log.close()
    assert points(tmp_path, "loss/train") == [(1, 2.0)]


def test_what_a_killed_process_wrote_is_there(tmp_path: Path) -> None:
    program = (
        "import os, sys; from dhp_ray.runtime.records.tensorboard import ScalarLog; from dhp_ray.storage import "
        "Folder\n"
        "log = ScalarLog(Folder(sys.argv[1]), 1)\n"
        "for step in (1, 2, 3): log.scalars(step, {'loss/train': 1.0})\n"
        "os.kill(os.getpid(), 9)"
    )
    finished = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[3],
                              check=False)
    assert finished.returncode == -9
    assert points(tmp_path, "loss/train") == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_hyperparameters_and_cluster_are_there(tmp_path: Path) -> None:
    config = load(["train.learning_rate=2e-4", "train.freeze=[vision]", "batch.drop_last=true"])
    ranks = [{"rank": rank, "pid": 11 + rank, "node_id": f"node{rank}", "device": "cpu"} for rank in range(2)]
    for first in (1, 5):
        log = ScalarLog(Folder(str(tmp_path)), first_step=first)
        log.hyperparameters(config)
        log.text("cluster", cluster_text(ranks))
        log.close()
    events = read_back(tmp_path)
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["train.learning_rate"].number_value == 2e-4
    assert found["train.freeze"].string_value == "vision"
    assert found["batch.drop_last"].bool_value is True
    assert found["model.preset"].string_value == "tiny"
    assert "seed" in found
    text = events.Tensors("cluster")[-1].tensor_proto.string_val[0].decode()
    assert "| 1 | node1 | 12 | cpu |" in text
    assert "torch 2." in text


def test_text_and_numbers_that_are_none(tmp_path: Path) -> None:
    log = ScalarLog(Folder(str(tmp_path)), first_step=1)
    log.text("configuration", "```\nseed: 3\n```")
    log.step(metrics(1, loss=math.nan, gradient_norm=math.inf), EXTRA | {"applied": False})
    log.close()
    events = read_back(tmp_path)
    text = events.Tensors("configuration")[0].tensor_proto.string_val[0].decode()
    assert "seed: 3" in text
    assert math.isnan(events.Scalars("loss/train")[0].value)
    assert events.Scalars("loss/gradient_norm")[0].value == math.inf
    assert events.Scalars("loss/update_applied")[0].value == 0.0


def test_an_object_store_gets_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(str(tmp_path / "store"))
    monkeypatch.setattr(folder, "local_path", lambda: None)  # takes the way of a folder that cannot append
    log = ScalarLog(folder, first_step=1)
    log.step(metrics(1), EXTRA)
    assert folder.names() == []
    log._flush()
    assert points(tmp_path / "store", "loss/train") == [(1, 10.0)]
    log.step(metrics(2), EXTRA)
    log.close()
    assert points(tmp_path / "store", "loss/train") == [(1, 10.0), (2, 5.0)]
    assert len(os.listdir(tmp_path / "store")) == 1


def test_tensorboard_reads_a_bucket(object_store: str, tmp_path: Path) -> None:
    """As docs/monitoring.md has it: `tensorboard --logdir s3://bucket/runs` while the run is going. Its reader finds
    the server by S3_ENDPOINT, through boto3.
    """
    pytest.importorskip("boto3")
    log = ScalarLog(Folder(f"s3://bucket/{tmp_path.name}/first/tensorboard{object_store}"), first_step=1)
    log.step(metrics(1), EXTRA)
    log._flush()
    program = (
        "from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer\n"
        f"multiplexer = EventMultiplexer().AddRunsFromDirectory('s3://bucket/{tmp_path.name}').Reload()\n"
        "print([(run, event.step) for run in multiplexer.Runs() for event in multiplexer.Scalars(run, 'loss/train')])"
    )
    environment = os.environ | {
        "S3_ENDPOINT": f"http://{object_store.partition('endpoint_override=')[2].partition('&')[0]}"
    }
    finished = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True,
                              check=True)
    assert finished.stdout.strip() == "[('first/tensorboard', 1)]"
    log.close()


def test_a_full_disk_is_waited_for(small_disk: Path) -> None:
    """A save that fills it gives the room back; no event is written in part."""
    log = ScalarLog(Folder(str(small_disk)).child("tensorboard"), 1)
    log.scalars(1, {"loss/train": 3.0})
    fill(small_disk / "part")
    threading.Timer(0.5, (small_disk / "part").unlink).start()
    for step in range(2, 60):
        log.scalars(step, {f"loss/train_{'x' * 100}": 2.0, "loss/train": 2.0})
    assert [step for step, _ in points(small_disk / "tensorboard", "loss/train")] == list(range(1, 60))


def test_torch_is_not_needed() -> None:
    program = (
        "import sys, dhp_ray.runtime.records.tensorboard, dhp_ray.runtime.records.run_records, "
        "dhp_ray.runtime.job.console\n"
        "print([name for name in ('torch', 'ray') if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], capture_output=True,
                              text=True, check=True)
    assert finished.stdout.strip() == "[]"
