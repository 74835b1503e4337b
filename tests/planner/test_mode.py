"""Which mode is the fastest that fits: by hand on a plain cost, and on published models and devices."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dhp_ray.planner import CostModel
from dhp_ray.planner.cost.derived import Device, derived_cost, gather_s
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.mode import (
    COMPARED_RANKS,
    Mode,
    Offer,
    allowed_modes,
    choose,
    equal_samples,
    reason,
    timed,
)
from dhp_ray.planner.plan.types import Sample
from tests.published_configs import shape_of

DEVICES = Path(__file__).parents[2] / "conf" / "device"
MODES = [Mode(sync, recomputes) for sync in ("step", "micro_batch") for recomputes in ("false", "true")]
SELECTIVE = Mode("micro_batch", "selective")
COST = CostModel(0.0, linear_s=1e-3, comm_bytes_per_token=0.0, fixed_s=2.0, bandwidth_bytes_per_s={2: 1.0}, pack_s=0.1,
                 vision_linear_s=1e-4)


def candidates(*pairs: tuple[int, float]) -> list[Offer]:
    return [Offer(mode, tokens, COST, step_s=seconds) for mode, (tokens, seconds) in zip(MODES, pairs)]


def test_the_fastest_of_those_that_hold_the_tokens() -> None:
    found = candidates((1000, 1.0), (9000, 1.3), (3000, 1.2), (20000, 1.4))
    assert choose(candidates((9, 1.009), (9, 1.3), (9, 1.0), (9, 1.4)), 9).mode == MODES[0]  # as fast
    assert [choose(found, needed).mode for needed in (0, 1000, 1001, 3001, 9001)] == [
        MODES[0], MODES[0], MODES[2], MODES[1], MODES[3]]
    assert choose(found, 20001).mode == MODES[3]  # none holds them: the one with most room
    assert choose(candidates((5, 1.0), (5, 1.0), (5, 1.0), (5, 1.0)), 5).mode == MODES[0]
    assert choose(candidates(*[(0, math.inf)] * 4), 5).mode == MODES[3]  # which needs least


def test_what_is_auto_leaves_open() -> None:
    assert [str(mode) for mode in allowed_modes("auto", "auto")] == [
        "step", "step with selective recomputation", "step with recomputation",
        "micro_batch", "micro_batch with selective recomputation", "micro_batch with recomputation"]
    for recomputes, mode in (("true", Mode("step", "true")), ("packs", Mode("step")),
                             ("false", Mode("step")), ("selective", Mode("step", "selective"))):
        assert allowed_modes("step", recomputes) == [mode]


def test_the_reason_is_one_line_with_what_each_holds_or_takes() -> None:
    samples = [*equal_samples(2, 4096, 4), Sample("text", 35)]
    assert reason(candidates((1000, 1.0), (9000, 1.3)), 4500, samples) == (
        "a rank is to hold 4,500 tokens, and a batch of 3 sequences of 35 to 4,096 tokens is modelled: "
        "step holds 1,000; step with recomputation takes 1.3 s")


def step_s(sync: str, tokens: int, num_ranks: int, gathering_s: float = 0.0) -> float:
    """5 sequences of 1,000 vision tokens, of 4 patches, a rank."""
    offer = Offer(Mode(sync), tokens, COST, gathering_s)
    return timed([offer], 1, equal_samples(5 * num_ranks, 1000, 4), [0] * num_ranks)[0].step_s


def test_a_step_by_hand() -> None:
    """A sequence takes 1 s and 0.4 s to encode; 0.1 s a pack."""
    assert step_s("step", 5999, 4) == pytest.approx(2 + 5 * 1.4 + 0.1)  # a pack of 5 on each rank
    assert step_s("step", 5999, 4, 9.0) == pytest.approx(2 + 9.0)  # a pack waits for what it reads
    assert step_s("step", 1999, 4) == pytest.approx(2 + 5 * (1.4 + 0.1))
    assert step_s("step", 1999, 4, 2.5) == pytest.approx(2 + 5 * 2.5)
    assert step_s("micro_batch", 5999, 4) == pytest.approx(2 + 5 * 1.4 + 0.1)
    assert step_s("micro_batch", 5999, 4, 9.0) == pytest.approx(2 + 9.0)
    three = 2 * 3 + 20 * 1.4 / 4 + 3 * 0.1  # micro-batches, of a pack on all ranks each
    assert step_s("micro_batch", 1999, 4) == pytest.approx(three, rel=0.05)
    assert step_s("micro_batch", 1999, 4, 9.0) == pytest.approx(3 * (2 + 9.0))
    assert step_s("step", 200, 4) == step_s("step", 0, 4) == math.inf


def test_many_ranks_are_compared_by_a_part_of_the_batch() -> None:
    """All modes by the same part, in which the longest sequence is, on as many ranks as it takes."""
    few, many = ([0] * num_ranks for num_ranks in (COMPARED_RANKS, 4 * COMPARED_RANKS))
    roomy, narrow = (Offer(Mode("step", again), tokens, COST) for again, tokens in (("true", 9000), ("false", 1999)))
    batch = equal_samples(2 * len(many), 1000, 4)
    whole, part = (timed([roomy, narrow], 1, samples, nodes)
                   for samples, nodes in ((batch, many), (batch[:2 * len(few)], few)))
    assert whole == part
    longest = Sample("longest", 1999 * 2 * len(few))
    found = timed([roomy, narrow], 1, [*batch, longest], many)
    assert all(COST.linear_s * longest.num_tokens / len(many) < one.step_s < math.inf for one in found)
    assert [one.step_s for one in timed([narrow], 1, [longest], few)] == [math.inf]
    assert timed([roomy, narrow], 2000, batch, many)[1].step_s == math.inf  # does not hold what is needed


@pytest.mark.parametrize(("gather_s", "longer_s"), [(6.0, 0.0), (7.5, 0.5)])
def test_parameters_travel_while_a_micro_batch_encodes_and_while_it_runs_the_rest(
    gather_s: float, longer_s: float
) -> None:
    """3 + 4 s, though no pack takes more than 5 s."""
    cost = CostModel(0.0, 1.0, 0.0, 0.5, {2: 1e9}, vision_linear_s=1.0, latency_s=9.0)
    samples = [Sample("images", 0, 2, ((1, 1, 2), (1, 1, 1))), Sample("text", 4)]
    plain, gathering = (Offer(Mode("micro_batch"), 4, cost, seconds) for seconds in (0.0, gather_s))
    assert gathering.seconds_of(samples, [0, 0]) - plain.seconds_of(samples, [0, 0]) == pytest.approx(longer_s)


@pytest.mark.parametrize(("name", "device", "gigabytes", "num_ranks", "expected"), [
    ("3B", "h100", 80, 8, SELECTIVE),  # without recomputation packs are short
    ("3B", "h200", 141, 8, Mode("step")),
    ("7B", "h100", 80, 8, SELECTIVE),  # whole parameters and gradients leave no room
    ("32B", "h100", 80, 64, SELECTIVE),
])
def test_published_models_on_described_devices(
    name: str, device: str, gigabytes: int, num_ranks: int, expected: Mode
) -> None:
    """Modelled, as everything here; no such run has been measured."""
    described, num_nodes = Device.load(DEVICES / f"{device}.yaml"), max(1, num_ranks // 8)
    nodes, shape = [rank // 8 for rank in range(num_ranks)], shape_of(name)
    plain = MemorySettings(sync="step", world_size=num_ranks, precision="bf16", recomputes=False)
    offers = []
    for mode in allowed_modes("auto", "auto"):
        memory = MemoryModel(shape, replace(plain, sync=mode.sync, recomputes=mode.recomputes != "false",
                                            keeps_attention=mode.recomputes == "selective"))
        tokens, cost = memory.tokens_that_fit(0.9 * gigabytes * 2**30), derived_cost(memory, described, num_nodes)
        offers.append(Offer(mode, tokens, cost, gather_s(memory, described, num_nodes)))
    samples = equal_samples(8 * num_ranks, 4096, shape.merge_area)
    found = timed(offers, 1280, samples, nodes)
    assert choose(found, 1280).mode == expected, reason(found, 1280, samples)
