"""Runs that begin with a model folder: every rank reads its share, whoever comes later, and one line says what is wrong
with it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.model.build import build_model
from tests.integration.faults import Start, end, kill
from tests.integration.jobs import losses, refused, train
from tests.packs import save_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
NUM_COMPARED = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    processor = ProcessorSpec("tiny").load()
    adapter = build_model("tiny", "", processor.token_ids, 0)
    save_model(adapter, folder, {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
    processor.save(folder)
    return folder


@pytest.mark.timeout(600)  # two runs, and one resumed
def test_a_new_worker_gets_frozen_parameters_from_the_others(
    start: Start, common: list[str], model: Path, tmp_path: Path
) -> None:
    settings = ["model.preset=", f"model.path={model}", "train.freeze=[vision]"]
    train(tmp_path / "calm", *common, *settings, f"run.steps={NUM_COMPARED}", "cluster.num_workers=2",
          "checkpoint.every_steps=0")
    run = start(*settings)
    run.wait_for_step(2)
    moment = kill(run.pids[0])
    run.wait_for_event(moment, "generation")
    run.wait_for_ranks(3)
    run.wait_for_step(NUM_COMPARED)
    end(run)
    assert run.losses[:NUM_COMPARED] == pytest.approx(losses(tmp_path / "calm"), rel=1e-4)
    again = start(*settings, f"run.steps={run.step + 1}")
    assert again.wait() == 0, again.said()
    given, trained = (load_file(folder / "model.safetensors") for folder in (model, run.folder / "model"))
    assert given.keys() == trained.keys()
    same = {name for name, value in given.items() if torch.equal(trained[name], value)}
    assert same >= {name for name in given if name.startswith("visual.")}
    assert not same >= {name for name in given if name.startswith("model.")}


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_tied_weights_that_differ_are_refused_in_one_line(
    sync: str, common: list[str], model: Path, tmp_path: Path
) -> None:
    """Only the ranks that read what differs see it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    other = weights["model.embed_tokens.weight"].clone()
    other[-1, -1] += 1
    save_file(weights | {"lm_head.weight": other}, folder / "model.safetensors", {"format": "pt"})
    line = refused(1, f"run.dir={tmp_path / 'run'}", *common, "model.preset=", f"model.path={folder}",
                   f"planner.sync={sync}", "run.steps=2", "cluster.num_workers=3")
    assert re.search(r"model.path: \S+: (lm_head|model.embed_tokens).weight and \S+ differ; its config.json says that "
                     r"they are one \(tie_word_embeddings\)", line), line
