"""The keys of a simulation: files, overrides, and one line for each that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp_ray.config import CONF, help_text, walk
from dhp_ray.schema import ConfigError
from dhp_ray.simulate.settings import SIMULATE, Event, Simulation, load_simulation


def test_the_default_file_and_overrides() -> None:
    settings = load_simulation([])
    assert settings.model == "qwen2_5_vl_7b"
    assert (settings.cluster.device, settings.cluster.num_ranks) == ("h100", 64)
    assert [part.workload for part in settings.workload.mixture][:2] == ["llava_video", "openvid"]
    settings = load_simulation(["cluster=ascend_910b", "cluster.num_ranks=128", "workload=docqa_rl", "faults=elastic",
                                "planners=[dhp]", "faults.node.share=3",
                                "faults.events=[{time_s: 5, kind: node, rank: 9}]"])
    assert (settings.cluster.kind, settings.cluster.num_ranks, settings.planners) == ("npu", 128, ["dhp"])
    assert settings.workload.sources[0].name == "docqa-rl"
    assert settings.faults.node.share == 3.0
    assert settings.faults.events == [Event(time_s=5.0, kind="node", rank=9)]


@pytest.mark.parametrize("path", sorted((CONF / "faults").glob("*.yaml"))
                         + sorted((CONF / "cluster" / "simulated").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_loads(path: Path) -> None:
    group = "cluster" if path.parent.name == "simulated" else "faults"
    load_simulation([f"{group}={path.stem}"])


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("choices: {workload: chartqa, cluster: a100}\nmodel: qwen3_vl_8b\ncluster: {num_ranks: 3}\n"
                    "num_batches: 2\n")
    settings = load_simulation(["--config", str(file), "num_batches=4"])
    assert settings.cluster.device == "a100"
    assert (settings.model, settings.cluster.num_ranks, settings.num_batches) == ("qwen3_vl_8b", 3, 4)
    assert settings.workload.sources[0].name == "chartqa"


def test_help_names_every_key() -> None:
    page = help_text("Simulate.", [], SIMULATE)
    for dotted, _, spec in walk(Simulation()):
        assert f"  {dotted}=" in page
        assert spec["text"]
    assert "workload=NAME" in page
    assert set(SIMULATE.choices) == {"cluster", "workload", "faults"}


@pytest.mark.parametrize(("word", "line"), [
    ("model=gpt", "model: got 'gpt'; allowed: glm_4_1v_9b, "),
    ("cluster.device=b300", "cluster.device: got 'b300'; allowed: a100, "),
    ("cluster=mine", "cluster: got 'mine'; allowed: a100, ascend_910b, h100, l40s"),
    ("workload=mine", "workload: got 'mine'; allowed: caption_heavy, "),
    ("faults=mine", "faults: got 'mine'; allowed: elastic, none, restart"),
    ("planners=[dhp,best]", "planners: got 'best'; allowed: dhp, "),
    ("planners=[]", "planners: got []; allowed: some of"),
    ("num_batches=0", "num_batches: got 0; allowed: at least 1"), ("num_batches=many", "num_batches: got 'many' ("),
    ("global_samples=-3", "global_samples: got -3; allowed: at least 1"),
    ("cluster.num_ranks=0", "cluster.num_ranks: got 0; allowed: at least 1"),
    ("cluster.memory_gib=0", "cluster.memory_gib: got 0.0; allowed: more than 0"),
    ("cluster.memory_gib=nan", "cluster.memory_gib: got nan; allowed: more than 0"),
    ("cluster.memory=80", "cluster.memory: no such key (the command line); allowed: cluster.num_ranks, "),
    ("train.freeze=[vision,language]", "train.freeze: got vision and language; allowed: at most one of the two"),
    ("train.freeze=[head]", "train.freeze: got 'head'; allowed: vision, language"),
    ("train.tokens_per_rank=0", "train.tokens_per_rank: got '0'; allowed: auto, or a whole number of at least 1"),
    ("faults.mirror_every_steps=often", "faults.mirror_every_steps: got 'often'; allowed: auto, or a whole number"),
    ("faults.every_s=60", "faults.every_s: got a time while no kind has a share; allowed: 0, or "),
    ("faults.min_workers=65", "faults.min_workers: got 65; allowed: at most cluster.num_ranks (64)"),
    ("faults.events=[{rank: 64}]", "faults.events[0].rank: got 64; allowed: less than cluster.num_ranks (64)"),
    ("faults.events=[{kind: fire}]", "faults.events[0].kind: got 'fire'; allowed: worker, stopped, node, driver, all"),
    ("faults.events=[{when: 3}]", "faults.events: got [{'when': 3}] (the command line); allowed: a list of {time_s: "),
    ("faults.slow=[{ranks: '3,x'}]", "faults.slow[0].ranks: got 'x'; allowed: numbers below cluster.num_ranks (64)"),
    ("faults.slow=[{ranks: '²'}]", "faults.slow[0].ranks: got '²'; allowed: numbers below cluster.num_ranks (64)"),
    ("faults.slow=[{speed: 0}]", "faults.slow[0].speed: got 0.0; allowed: more than 0"),
    ("faults.slow=[{speed: 0.5}]", "faults.slow[0].share: got 0, which is none of 64 ranks; allowed: a share that is"),
    ("faults.slow=[{share: 0.005}]", "faults.slow[0].share: got 0.005, which is none of 64 ranks; allowed: a share"),
    ("train.precision=fp32", "train.precision: got 'fp32' with cluster.kind=cuda; allowed: bf16"),
    ("sync=async", "sync: got 'async'; allowed: step, micro_batch, auto"),
    ("steps", "steps: not understood; allowed:")])
def test_a_wrong_key_is_one_line(word: str, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_simulation([word])
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)
