"""A sample that keeps its place as a placeholder changes nothing but its own absence: the same batch without it has the
same loss and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dhp_ray.comm.device import CPU
from dhp_ray.config import Config, load
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Plan, encoded_images
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.train.collate import Payload, placeholder
from dhp_ray.train.step_inputs import collated
from tests.packs import Film, make_sample, own_payloads, relative_errors, with_images_apart, with_splits
from tests.ranks import run_processes
from tests.train.networks import whole

NUM_RANKS = 3
TOLERANCE = 1e-5
SAMPLES = dict((sample.id, (sample, payload)) for sample, payload in (
    make_sample("text", [40]), make_sample("words", [23]), make_sample("image", [20, (1, 4, 8), 30]),
    make_sample("images", [9, (1, 4, 6), 40, (1, 8, 6), 5]),
    make_sample("film", [5, Film(0.5, ((2, 4, 4), (1, 4, 4))), 30]), make_sample("short", [3]),
    make_sample("poster", [9, (2, 6, 10), 8])))


@dataclass(frozen=True)
class Situation:
    """Groups (ranks, samples) by micro-batch, and the samples of them that are placeholders."""

    batches: tuple[tuple[tuple[tuple[int, ...], tuple[str, ...]], ...], ...]
    bad: tuple[str, ...]


SITUATIONS = {
    "text beside others in its pack": Situation(((((0, 1), ("text", "image")), ((2,), ("words",))),), ("text",)),
    "images beside a rank without a pack": Situation(((((0, 1), ("images", "image")),),), ("images",)),
    "images beside an image": Situation(((((2, 0, 1), ("images", "image", "words")),),), ("images",)),
    "the only images of its pack": Situation(((((0, 1), ("images", "text")), ((2,), ("image",))),), ("images",)),
    "the only images of all": Situation(((((0, 1), ("images", "text")), ((2,), ("words",))), (((1, 2), ("short",)),)),
                                        ("images",)),
    "a video, the only one to show something": Situation(((((1, 2, 0), ("film", "text")),),), ("film",)),
    "the only sample of its pack": Situation(((((0, 1), ("text",)), ((2,), ("image",))),), ("text",)),
    "the only sample of its pack, with images, on one rank": Situation(((((0, 1), ("text",)), ((2,), ("image",))),),
                                                                       ("image",)),
    "the only pack of a micro-batch": Situation(((((0, 1), ("text",)), ((2,), ("image",))),
                                                 (((1, 0, 2), ("images",)),)), ("images",)),
    "several": Situation(((((0, 1, 2), ("film", "text", "image")),), (((1,), ("words",)), ((0, 2), ("images",)))),
                         ("text", "image", "images")),
    "an image in parts beside another": Situation(((((0, 1), ("poster", "image")), ((2,), ("words",))),), ("poster",)),
    "an image beside one in parts": Situation(((((0, 1), ("poster", "image")), ((2,), ("words",))),), ("image",)),
    "all of a batch": Situation(((((0, 1), ("image",)), ((2,), ("text",))),), ("image", "text")),
}


def plan_of(situation: Situation, sync: str, leave_out: Sequence[str] = ()) -> Plan:
    """A pack that has lost all of its samples is not there."""
    samples, groups = [], []
    for micro_batch, packs in enumerate(situation.batches):
        for ranks, names in packs:
            left = [SAMPLES[name][0] for name in names if name not in leave_out]
            if left:
                rows = tuple(range(len(samples), len(samples) + len(left)))
                num_images = sum(len(sample.vision_grids) for sample in left)
                encoders = tuple(ranks[image % len(ranks)] for image in range(num_images))
                groups.append(Pack(ranks, rows, 1.0, 0.0, micro_batch if sync == "micro_batch" else 0,
                                        encoders))
                samples += left
    plan = Plan("listed", sync, ClusterSpec(NUM_RANKS, NUM_RANKS, 1000), tuple(samples), tuple(groups), 1.0, 1.0)
    plan.validate()
    return plan


BESIDE_OTHERS = ("text beside others in its pack", "images beside an image", "the only images of its pack",
                 "a video, the only one to show something", "the only sample of its pack",
                 "the only sample of its pack, with images, on one rank")
"""In one micro-batch of which all packs have other samples, or no rank to spare."""
ACROSS = tuple(name for name in SITUATIONS if name not in BESIDE_OTHERS)


def run_both(rank: int, port: int, config: Config, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """On rank 0, what differs between each situation and the batch without its placeholders, at equal weights."""
    member = Rank(config, Membership(rank, NUM_RANKS, 1, "127.0.0.1", port), CPU)
    payloads = {name: payload for name, (_, payload) in SAMPLES.items()}

    def step(plan: Plan, bad: Sequence[str]) -> tuple[float, int, dict[str, torch.Tensor]]:
        """At a learning rate of 0 the weights stay, and with beta1 = 0 the first moment is the mean gradient."""
        if config.planner.encoder == "world":
            plan = with_images_apart(plan)
            grids = [grid for group in plan.groups for row in group.sequences
                     for grid in plan.samples[row].vision_grids]
            plan = with_splits(plan, {image: (2, 0) for image, grid in enumerate(grids) if grid[0] > 1})
        rank_plan = plan.rank_plan(1, rank)
        own: dict[str, Payload] = {}
        for pack in (*rank_plan.packs, *rank_plan.encoded):
            own |= own_payloads(pack, payloads, rank)
        # as the rank knows it that could not decode, as one that only heard, and as one that hears it later
        for place, name in enumerate(sorted(own.keys() & set(bad))):
            if (place + rank) % 3 < 2:
                own[name] = placeholder(SAMPLES[name][0]) if (place + rank) % 3 else replace(own[name], masked=True)
        inputs = collated(rank_plan, own, member.adapter)
        inputs.mask(bad, member.adapter)
        result = member.stepper.run(inputs, 0.0)
        assert result.applied == (result.num_valid_tokens > 0)
        assert result.applied or result.gradient_norm == 0.0
        return result.loss_sum, result.num_valid_tokens, whole(member.engine, "exp_avg")

    found = {}
    for name in names:
        situation = SITUATIONS[name]
        loss, count, gradients = step(plan_of(situation, config.planner.sync), situation.bad)
        wanted_loss, wanted_count, wanted = step(plan_of(situation, config.planner.sync, situation.bad), ())
        errors = relative_errors(gradients, wanted)
        worst = max(errors, key=errors.__getitem__)
        found[name] = {"loss": abs(loss - wanted_loss) / (wanted_loss or 1.0), "tokens": count - wanted_count,
                       "gradient": errors[worst], "worst": worst,
                       "size": max(float(gradient.abs().max()) for gradient in wanted.values()), "count": count}
    member.close()
    return found


def test_a_rank_without_a_pack_encodes_images_of_a_placeholder() -> None:
    plan = with_images_apart(plan_of(SITUATIONS["images beside a rank without a pack"], "step")).rank_plan(1, 2)
    assert plan.packs == ()
    assert [[sample.id for sample, here in zip(pack.samples, encoded_images(pack, 2)) if any(here)]
            for pack in plan.encoded] == [["images"]]


@pytest.mark.parametrize(("sync", "encoder", "freeze", "names"), [
    ("micro_batch", "world", "", ACROSS), ("step", "group", "", BESIDE_OTHERS),
    *(pytest.param(sync, encoder, freeze, tuple(SITUATIONS), marks=pytest.mark.slow)
      for sync in ("step", "micro_batch") for encoder in ("group", "world") for freeze in ("", "language"))],
    ids=lambda value: value if isinstance(value, str) else str(len(value)))
def test_a_batch_with_placeholders_is_the_batch_without(
    sync: str, encoder: str, freeze: str, names: tuple[str, ...]
) -> None:
    config = load([f"planner.sync={sync}", f"planner.encoder={encoder}", f"train.freeze=[{freeze}]",
                   "comm.timeout_s=60", "run.dir=unused",
                   "train.adam_beta1=0", "train.clip_norm=0"])
    found = run_processes(run_both, NUM_RANKS, config, names, timeout_s=200)[0]
    assert found.keys() == set(names)
    for name, errors in found.items():
        assert errors["tokens"] == 0, (name, errors)
        assert errors["loss"] < TOLERANCE, (name, errors)
        assert errors["gradient"] < TOLERANCE, (name, errors)
        assert (errors["count"] > 0) == (name != "all of a batch"), (name, errors)
        assert errors["size"] > 1e-3 or freeze, (name, errors)
