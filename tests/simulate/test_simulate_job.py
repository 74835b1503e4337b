"""jobs/simulate.py from the command line: table, files, exit statuses; and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dhp_ray.simulate.run import prepared, simulated, text_of
from dhp_ray.simulate.settings import load_simulation
from tests.checkout import ROOT, job_of
from tests.simulate.simulations import SMALL

job = job_of("simulate")
WORDS = [*SMALL, "num_batches=4", "global_samples=12", "planners=[dhp,static]"]


def test_a_simulation_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = "faults.events=[{time_s: 0.6, kind: worker, rank: 2}]"
    assert job.main([*WORDS, f"out={tmp_path}", fault, "faults.worker.return_s=50"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert said.err == ""
    assert lines[0].startswith("qwen3_vl_2b on 8 h100, 4 a node: step, ")
    assert lines[0].endswith("All modelled, nothing measured.")
    assert [line.split()[0] for line in lines[1:4]] == ["planner", "dhp", "static"]
    tree = json.loads((tmp_path / "results.json").read_text())
    assert [row["planner"] for row in tree["planners"]] == ["dhp", "static"]
    assert len(tree["steps"]["dhp"]) == 4
    assert tree["settings"]["cluster"]["num_ranks"] == 8
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"] == {"simulated": True, "planner": "dhp", "step": 1}
    packs = [event for event in trace["traceEvents"] if event.get("cat") == "pack"]
    assert min(event["ts"] for event in packs) >= 0
    assert max(event["ts"] + event["dur"] for event in packs) < 1e6 * tree["steps"]["dhp"][0]["end_s"]
    assert any("worker lost; 7 ranks go on with step" in event["text"] for event in tree["events"]["dhp"])
    again = tmp_path / "again"
    assert job.main([*WORDS, f"out={again}", fault, "faults.worker.return_s=50"]) == 0
    other = json.loads((again / "results.json").read_text())
    for one in (tree, other):
        del one["settings"]["out"]
    assert other == tree


@pytest.mark.parametrize(("words", "line"), [
    (["model=gpt"], "error: model: got 'gpt'; allowed: glm_4_1v_9b, "),
    (["model=llama3_8b", "workload=docqa_rl", "train.freeze=[vision]"],
     "error: train.freeze: got vision, and llama3_8b is text-only; allowed: nothing"),
    (["workload.max_tokens=10"], "error: workload.max_tokens: got 10; allowed: more, or 0"),
    (["model=qwen2_5_vl_72b"], "error: model of 73.41 B parameters: sync=step keeps 649.6 GiB on each rank"),
    (["model=qwen2_5_vl_7b", "cluster.num_ranks=64", "cluster.memory_gib=68", "train.activation_checkpointing=packs"],
     "error: workload.max_pixels: an image may have 1,280 tokens, and a rank has room for "),
    (["workload=long_documents", "train.tokens_per_rank=100"], "error: workload: the longest sequence has "),
    (["sync=micro_batch", "train.expert_parallel=2"],
     "error: train.expert_parallel: got 2, and qwen3_vl_2b has no experts; allowed: auto"),
    (["sync=step", "train.expert_parallel=2"],
     "error: train.expert_parallel: got 2 with sync=step, where each rank has all experts; allowed: 1, or "),
    (["train.activation_offload=2"], "error: train.activation_offload: got '2'; allowed: off, auto, or a share of "),
    (["train.activation_offload=0.9", "cluster.node_memory_gib=800"],
     "error: train.activation_offload: got 0.9; the 4 ranks on node 0 keep up to "),
    (["cluster.node_memory_gib=1"], "error: cluster.num_ranks: got 8; the 4 ranks on node 0 keep up to "),
    (["cluster.cost=none.yaml"], "error: none.yaml: cannot be read: FileNotFoundError"),
    (["cluster.cost=FOLDER/cost.yaml"],
     "error: FOLDER/cost.yaml: linear_s: got -1; allowed: a number of at least 0 and at most 1e+30")])
def test_bad_input_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lengths").mkdir()
    (tmp_path / "lengths" / "wikipedia_sample.csv").write_text("num_tokens\n5000\n")
    monkeypatch.setenv("DHP_RAY_TEST_DATA", str(tmp_path))
    (tmp_path / "cost.yaml").write_text("quadratic_s: 0\nlinear_s: -1\ncomm_bytes_per_token: 0\nfixed_s: 0\n"
                                        "bandwidth_bytes_per_s: 1\n")
    assert job.main([*SMALL, *(word.replace("FOLDER", str(tmp_path)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(line.replace("FOLDER", str(tmp_path)))
    assert error.count("\n") == 1


def test_a_sequence_that_devices_hold_with_host_memory_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Its ranks hold 2,978 tokens each, so that two of them are too few for the longest sequence."""
    words = [*WORDS, "cluster.num_ranks=2", "cluster.memory_gib=60", "train.activation_checkpointing=false",
             "num_batches=2", "global_samples=6"]
    assert job.main(words) == 2
    assert capsys.readouterr().err.endswith("or train.activation_offload=auto\n")
    assert job.main([*words, "train.activation_offload=auto"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " with activations in host memory; longest sequence " in lines[0]
    assert [line.split()[0] for line in lines[1:4]] == ["planner", "dhp", "static"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "folder", tmp_path / "file"):  # before the work: none of it is left by then
        assert job.main([*SMALL, f"num_batches={10**7}", f"out={out}"]) == 1
        assert capsys.readouterr().err == f"error: out: {out} cannot be written: Not a directory\n"


def test_planners_may_be_given_without_brackets() -> None:
    assert load_simulation([*SMALL, "planners=dhp"]).planners == ["dhp"]
    assert load_simulation([*SMALL, "planners=dhp,static"]).planners == ["dhp", "static"]


def test_an_interrupt_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "simulate", interrupted)
    assert job.main([*SMALL]) == 1
    assert capsys.readouterr().err == "error: stopped: Ctrl-C; simulate again, or fewer planners or batches\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python jobs/simulate.py [--config FILE]")


def test_a_planner_that_cannot_go_on_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    simulation = prepared(load_simulation([*SMALL, "faults.every_s=0.1", "faults.all.share=1"]))
    assert [record.error for record in simulated(simulation)] == ["step 1 has failed 9 times"]
    assert text_of(simulation.summaries()).splitlines()[-1] == (
        "dhp_paper could not go on after step 0: step 1 has failed 9 times")
    assert job.main([*SMALL, "faults.every_s=0.1", "faults.all.share=1"]) == 1


def test_neither_torch_nor_ray_is_imported() -> None:
    words = ", ".join(repr(word) for word in [*SMALL, "num_batches=1"])
    code = ("import sys, runpy\n"
            f"sys.argv = ['jobs/simulate.py', {words}]\n"
            "try:\n    runpy.run_path('jobs/simulate.py', run_name='__main__')\nexcept SystemExit as end:\n"
            "    assert end.code == 0\n"
            "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
