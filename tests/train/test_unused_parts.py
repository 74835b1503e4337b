"""A part of the model that no sample of a global batch used stays as it is, on every rank: values, moments and its
count of updates, as with torch's AdamW where a gradient is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from dhp_ray.comm.device import CPU
from dhp_ray.config import Config, load
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Plan
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker import rank as rank_module
from dhp_ray.train.collate import placeholder
from dhp_ray.train.step_inputs import collated
from tests.engine_values import full_parameters
from tests.packs import make_sample, own_payloads, plain_gradients, relative_errors, with_images_apart
from tests.ranks import run_processes

SAMPLES = dict((sample.id, (sample, payload)) for sample, payload in (
    make_sample("text", [40]), make_sample("words", [23]), make_sample("image", [20, (1, 4, 8), 30]),
    make_sample("other", [9, (1, 4, 6), 12])))
# of two ranks each: the samples of the pack that both run, and of the second rank's own
BATCHES = ((("image", "text"), ("words",)), (("text",), ("words",)), ((), ("words",)), (("words",), ("image",)),
           (("other", "words"), ("text",)), (("text",), ("other", "image")))
BROKEN = {4: ("other",)}  # in this step they are placeholders: nothing else has images
USES_VISION = [True, False, False, True, False, True]


def plan_of(packs: Sequence[Sequence[str]], sync: str, num_ranks: int, apart: bool) -> Plan:
    samples, groups = [], []
    for number, (names, ranks) in enumerate(zip(packs, (tuple(range(num_ranks)), (num_ranks - 1,)))):
        if names:
            found = [SAMPLES[name][0] for name in names]
            rows = tuple(range(len(samples), len(samples) + len(found)))
            images = sum(len(sample.vision_grids) for sample in found)
            encoders = tuple(ranks[image % len(ranks)] for image in range(images))
            groups.append(Pack(ranks, rows, 1.0, 0.0, number if sync == "micro_batch" else 0, encoders))
            samples += found
    if sync == "micro_batch" and not packs[0]:
        groups = [replace(group, micro_batch=0) for group in groups]
    plan = Plan("listed", sync, ClusterSpec(num_ranks, num_ranks, 1000), tuple(samples), tuple(groups), 1.0, 1.0)
    plan.validate()
    return with_images_apart(plan) if apart else plan


def train_both(rank: int, port: int, num_ranks: int, config: Config, apart: bool) -> list[tuple[float, bool, int]]:
    """For each step the largest error of the parameters against plain torch on one rank, whether the encoder has the
    same bits as before, and its count of updates.
    """
    rank_module.FlatEngine = partial(rank_module.FlatEngine, bucket_bytes=10_000)  # all ranks have some encoder
    member = rank_module.Rank(config, Membership(rank, num_ranks, 1, "127.0.0.1", port), CPU)
    adapter, engine = member.adapter, member.engine
    start = full_parameters(engine)
    if rank == 0:
        plain = type(adapter.module)(type(adapter.module.config).from_dict(adapter.module.config.to_dict()))
        plain.load_state_dict(start, strict=False)
        plain.set_attn_implementation("sdpa")
        optimizer = torch.optim.AdamW(
            [{"params": [parameter], "weight_decay": 0.5 if adapter.decays(name) else 0.0}
             for name, parameter in plain.named_parameters()], lr=1e-3, betas=(0.9, 0.95), eps=1e-3)
    payloads = {name: payload for name, (_, payload) in SAMPLES.items()}
    vision = [piece.shard for piece in engine.pieces if adapter.is_vision(piece.name)]
    found = []
    for step, packs in enumerate(BATCHES, start=1):
        broken = BROKEN.get(step - 1, ())
        rank_plan = plan_of(packs, config.planner.sync, num_ranks, apart).rank_plan(step, rank)
        own = {name: payload for pack in (*rank_plan.packs, *rank_plan.encoded)
               for name, payload in own_payloads(pack, payloads, rank).items()}
        own |= {name: placeholder(SAMPLES[name][0]) for name in own.keys() & set(broken) if rank == 0}
        inputs = collated(rank_plan, own, adapter)
        inputs.mask(broken, adapter)
        before = [tensor[part].clone() for tensor in engine.current.tensors().values() for part in vision]
        result = member.stepper.run(inputs, 1.0)
        after = [tensor[part] for tensor in engine.current.tensors().values() for part in vision]
        parameters, worst = full_parameters(engine), 0.0
        if rank == 0:
            used = [payloads[name] for names in packs for name in names if name not in broken]
            _, gradients = plain_gradients(plain, used)
            for name, parameter in plain.named_parameters():
                unused = adapter.is_vision(name) and not any(len(payload.grids) for payload in used)
                parameter.grad = None if unused else gradients[name] / result.num_valid_tokens
            optimizer.step()
            wanted = {name: parameter.detach() for name, parameter in plain.named_parameters()}
            worst = max(relative_errors(parameters, wanted).values())
        found.append((worst, all(map(torch.equal, before, after)), engine.current.vision_updates))
    member.close()
    return found


@pytest.mark.parametrize(("num_ranks", "settings"), [
    (1, ["planner.sync=step"]), (2, ["planner.sync=micro_batch"]),
    pytest.param(2, ["planner.sync=step"], marks=pytest.mark.slow),
    pytest.param(3, ["planner.sync=step"], marks=pytest.mark.slow),
    pytest.param(1, ["planner.sync=micro_batch"], marks=pytest.mark.slow),
    pytest.param(3, ["planner.sync=micro_batch"], marks=pytest.mark.slow)])
@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_encoder_that_no_sample_used_is_not_updated(num_ranks: int, settings: list[str], apart: bool) -> None:
    config = load([*settings, "comm.timeout_s=60", "run.dir=unused", "train.clip_norm=0", "train.weight_decay=0.5",
                   "train.learning_rate=1e-3", "train.adam_beta1=0.9", "train.adam_beta2=0.95", "train.adam_eps=1e-3"])
    for rank, steps in enumerate(run_processes(train_both, num_ranks, num_ranks, config, apart, timeout_s=200)):
        assert [updates for *_, updates in steps] == [1, 1, 1, 2, 2, 3]
        for (worst, same, _), uses in zip(steps, USES_VISION, strict=True):
            assert worst < 5e-5, (rank, steps)
            assert same != uses, (rank, steps)
