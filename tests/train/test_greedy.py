"""Answers by the ranks' own passes are those of transformers' `generate`, on any ranks and in all modes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.worlds import plans_of
from dhp_ray.comm.device import CPU
from dhp_ray.config import Config, load
from dhp_ray.data.families.base import Medium
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.planner.plan.types import Plan, Sample
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.train.collate import Payload
from dhp_ray.train.greedy import greedy_answers
from dhp_ray.train.step_inputs import collated
from tests.packs import (
    PRESETS,
    TOKEN_IDS,
    Film,
    make_sample,
    own_payloads,
    plain_copy,
    position_inputs,
    rough_model,
    save_model,
    with_splits,
)
from tests.ranks import run_processes

NUM_TOKENS = 7
PARTS = {"word": [3], "image": [20, (1, 4, 8), 30], "long": [150], "film": [5, Film(0.5, ((2, 4, 4), (1, 4, 4))), 9],
         "images": [9, (1, 4, 6), 40, (1, 4, 4), 2]}
"""Prompts; each ends with text."""


def asked(preset: str) -> list[tuple[Sample, Payload]]:
    """Samples with room for an answer."""
    found = []
    for name, parts in PARTS.items():
        sample, payload = make_sample(name, parts, preset=preset)  # type: ignore[arg-type]
        filler = np.full(NUM_TOKENS, TOKEN_IDS["pad"], np.int32)
        found.append((replace(sample, text_tokens=sample.text_tokens + NUM_TOKENS), replace(
            payload, input_ids=np.concatenate([payload.input_ids, filler]),
            labels=np.concatenate([np.full_like(payload.labels, -100), filler]))))
    return found


def plain(preset: str, folder: Path) -> dict[str, list[int]]:
    """Of the same prompts by transformers; writes the model."""
    adapter = rough_model(tie_word_embeddings=False, preset=preset)
    save_model(adapter, folder, {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
    module, family, found = plain_copy(adapter).eval(), ProcessorSpec(preset).load().family, {}
    for sample, payload in asked(preset):
        ids = payload.input_ids[:-NUM_TOKENS].astype(np.int64)
        grids, seconds = payload.whole()
        assert payload.media is not None
        media = [Medium(np.concatenate([part for part, of in zip(payload.pixels, payload.media) if of == number]),
                        tuple(grid), float(second))  # type: ignore[arg-type]
                 for number, grid, second in zip(dict.fromkeys(payload.media), grids, seconds)]
        inputs = family.model_inputs(media)
        places = {} if preset == "tiny_internvl" or not media else position_inputs(
            module, torch.from_numpy(ids)[None], torch.from_numpy(grids), torch.from_numpy(seconds))
        tokens = module.generate(input_ids=torch.from_numpy(ids)[None], **places,  # type: ignore
                                 max_new_tokens=NUM_TOKENS,
                                 attention_mask=torch.ones(1, len(ids)), do_sample=False,
                                 **{name: torch.from_numpy(array) for name, array in inputs.items()})
        answer = tokens[0, len(ids):].tolist()
        found[sample.id] = answer[:answer.index(TOKEN_IDS["eos"])] if TOKEN_IDS["eos"] in answer else answer
    return found


def answered(process: int, port: int, num_ranks: int, config: Config, plan: Plan, preset: str,
             masked: list[str]) -> dict[str, list[int]]:
    torch.manual_seed(process)
    nodes = ("a",) * (num_ranks // 2) + ("b",) * (num_ranks - num_ranks // 2)
    member = Rank(config, Membership(process, num_ranks, 1, "127.0.0.1", port, nodes=nodes), CPU)
    rank_plan = plan.rank_plan(1, process)
    payloads = {sample.id: payload for sample, payload in asked(preset)}
    own = {name: payload for pack in (*rank_plan.packs, *rank_plan.encoded)
           for name, payload in own_payloads(pack, payloads, process).items()}
    inputs = collated(rank_plan, own, member.adapter)
    inputs.mask(masked, member.adapter)
    names = sorted(payloads)
    found = greedy_answers(member.stepper, inputs, names, NUM_TOKENS, [TOKEN_IDS["eos"]], TOKEN_IDS["pad"])
    member.close()
    return dict(zip(names, found, strict=True))


APART = "planner.encoder=world"
WAYS = [(1, []), (3, []), (3, ["planner.sync=micro_batch"]), (5, ["comm.transport=parent"]), (3, [APART]),
        (3, [APART, "planner.sync=micro_batch"])]


@pytest.mark.parametrize(("num_ranks", "settings", "preset"), [
    (3, [], "tiny_qwen3_vl"),  # tiny: the last test
    (3, ["planner.sync=micro_batch"], "tiny_internvl"),
    *(pytest.param(num_ranks, settings, preset, marks=pytest.mark.slow) for preset in PRESETS
      for num_ranks, settings in WAYS)])
def test_answers_are_those_of_generate(num_ranks: int, settings: list[str], preset: str, tmp_path: Path) -> None:
    wanted = plain(preset, tmp_path)
    assert len({tuple(answer) for answer in wanted.values()}) > 3
    config = load(["data.path=x", f"model.path={tmp_path}", f"run.dir={tmp_path}", "cluster.device=cpu",
                   f"cluster.num_workers={num_ranks}", "planner.sync=step", *settings])
    encoder = "world" if APART in settings else "group"
    [plan] = plans_of([[sample for sample, _ in asked(preset)]], num_ranks, "dhp", config.planner.sync, encoder=encoder)
    assert plan.vision.layout == encoder
    assert num_ranks == 1 or max(group.degree for group in plan.groups) > 1
    if encoder == "world":  # a video's piece of two steps in time
        plan = with_splits(plan, splits_of(plan))
        plan.validate()
    for found in run_processes(answered, num_ranks, num_ranks, config, plan, preset, [], timeout_s=120):
        assert found == wanted


def splits_of(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Images that ranks 2 and 0 encode together, cut in time."""
    grids = [grid for group in plan.groups for row in group.sequences for grid in plan.samples[row].vision_grids]
    found = {image: (2, 0) for image, grid in enumerate(grids) if grid[0] > 1}
    assert found
    return found


def test_a_placeholder_leaves_the_others_alone(tmp_path: Path) -> None:
    wanted = plain("tiny", tmp_path)
    config = load(["data.path=x", f"model.path={tmp_path}", f"run.dir={tmp_path}", "cluster.device=cpu"])
    [plan] = plans_of([[sample for sample, _ in asked("tiny")]], 2, "dhp", "step")
    for found in run_processes(answered, 2, 2, config, plan, "tiny", ["images"], timeout_s=120):
        assert found.keys() == wanted.keys()
        assert {name for name in wanted if found[name] != wanted[name]} <= {"images"}
