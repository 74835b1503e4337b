"""Which share of a pack goes to host memory: enough to make it fit, chosen where that is worth its time."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Plan, PlanError, Sample, SequenceTooLongError, plan_batch, replay
from dhp_ray.planner.memory.layer_share import largest_offload
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, Offload, num_relieved
from tests.published_configs import shape_of

HALF = Offload(0.5, 1000, 3000, 1000)
"""Up to 1,000 tokens a rank nothing; of 3,000 half."""


def test_a_share_by_hand() -> None:
    assert HALF.slope == pytest.approx(0.75)
    assert HALF.share_of(np.array([1, 1000, 1500, 2000, 3000])).tolist() == pytest.approx([0, 0, 0.25, 0.375, 0.5])
    shorter = HALF.up_to(2000)
    assert (shorter.share, shorter.slope) == (pytest.approx(0.375), pytest.approx(0.75))
    assert (shorter.from_tokens, shorter.tokens_per_rank, shorter.free_tokens) == (1000, 2000, 1000)
    assert HALF.up_to(1000) == NO_OFFLOAD
    assert NO_OFFLOAD.share_of(10**9) == NO_OFFLOAD.slope == 0.0
    later = Offload(0.5, 1000, 3000, 1500)
    assert later.share_of(np.array([1200, 1500, 2000, 3000])).tolist() == pytest.approx([0, 0, 0.375, 0.5])
    assert Offload(0.5, 0, 3000).share_of(np.array([1, 3000])).tolist() == [0.5, 0.5], "a share of every pack"


@pytest.mark.parametrize(("share", "num_layers", "moved"), [
    (0.0, 28, 0), (0.01, 28, 1), (0.3, 10, 3), (3 / 28, 28, 3), (0.5, 7, 4), (1.0, 28, 28), (1.0, 1, 1)])
def test_a_share_is_of_layers_rounded_up(share: float, num_layers: int, moved: int) -> None:
    assert num_relieved(share, num_layers) == moved


@pytest.mark.parametrize("values", [(1.1, 0, 5, 0), (-0.1, 0, 5, 0), (0.5, 5, 5, 5), (0.5, -1, 5, 0), (0.5, 3, 5, 2)])
def test_what_is_no_share_is_refused(values: tuple[float, int, int, int]) -> None:
    with pytest.raises(PlanError, match=r"^offload: share=.* tokens_per_rank=5; allowed: a share from 0 to 1, and"):
        Offload(*values)


@pytest.mark.parametrize(("name", "gibibytes", "sync", "num_ranks", "recomputes", "largest"), [
    ("7B", 80, "micro_batch", 64, False, 1.0), ("7B", 80, "micro_batch", 64, True, 0.5),
    ("InternVL3-8B", 64, "micro_batch", 64, False, 0.6), ("3B", 80, "step", 64, True, 1.0),
    ("Qwen3-VL-32B", 80, "micro_batch", 1024, False, 0.9)], ids=str)
def test_the_share_makes_packs_of_any_size_fit(
    name: str, gibibytes: int, sync: str, num_ranks: int, recomputes: bool, largest: float
) -> None:
    """Layers are rounded up, terms that do not grow with tokens count, and moments differ: still none is too large."""
    memory = MemoryModel(shape_of(name), MemorySettings(sync=sync, world_size=num_ranks, precision="bf16",
                                                        recomputes=recomputes))
    limit_bytes = 0.9 * gibibytes * 2**30
    held = memory.tokens_that_fit(limit_bytes)
    offload = largest_offload(memory, limit_bytes, held, 10**9, lambda tokens, share: share <= largest)
    most = memory.tokens_that_fit(limit_bytes, offload.share)
    assert offload.tokens_per_rank == most > 1.3 * held
    assert largest - 3 / memory.shape.language[0].count < offload.share <= largest
    assert 0.8 * held < offload.from_tokens <= held == offload.free_tokens
    needed = [memory.memory(memory.worst_load(tokens, float(offload.share_of(tokens)))).device_bytes
              for tokens in np.linspace(held, most, 200).astype(int).tolist()]
    assert max(needed) <= limit_bytes
    assert needed[-1] > 0.99 * limit_bytes


def test_a_node_needs_no_room_for_packs_that_are_not_run() -> None:
    """The last layers make room for far more than the largest pack; the node has room for that pack alone."""
    memory = MemoryModel(shape_of("3B"), MemorySettings(sync="step", world_size=64, precision="bf16",
                                                        recomputes=False))
    limit_bytes = 0.9 * 80 * 2**30
    held, count = memory.tokens_that_fit(limit_bytes), memory.shape.language[0].count
    ample, close = (memory.tokens_that_fit(limit_bytes, number / count) for number in (count - 1, count - 2))
    assert ample > 1.1 * close
    wanted = (ample + close) // 2
    offload = largest_offload(memory, limit_bytes, held, wanted, lambda tokens, share: tokens <= wanted)
    assert offload.tokens_per_rank == wanted


def cost_of(host_bytes_per_s: float) -> CostModel:
    """1 ms a token, a third of it forward; on two ranks 0.2 ms more; a token's activations are 1 MB."""
    return CostModel(0.0, 1e-3, 1e6, 0.0, {2: 2.5e9, 8: 1e9}, offload_bytes_per_token=1e6,
                     host_bytes_per_s=host_bytes_per_s)


def planned(length: int, host_bytes_per_s: float, num_ranks: int = 2, **options: str) -> Plan:
    """One long sequence beside many short ones, on ranks that hold 1,000 tokens, or 3,000 of one pack."""
    samples = [Sample("long", length), *(Sample(str(row), 500) for row in range(8))]
    return plan_batch(samples, ClusterSpec(num_ranks, 2, 1000, offload=HALF), cost_of(host_bytes_per_s), **options)


def test_waits_for_copies_by_hand() -> None:
    """2,000 tokens move 0.375: 750 MB each way. Compute takes 2 s, 0.667 of them forward."""
    cluster = ClusterSpec(2, 2, 1000, offload=HALF)
    for bytes_per_s, waits_s in ((2e9, 0.0), (1e9, 0.75 - 2 / 3), (0.5e9, 1.5 - 2 / 3 + 1.5 - 4 / 3)):
        assert cost_of(bytes_per_s).pack_time_s([2000], [0], cluster) == pytest.approx(2 + waits_s)
        assert cost_of(bytes_per_s).pack_time_s([1000], [0], cluster) == pytest.approx(1)
    # on two ranks each has 1,000 of them, and keeps all
    assert cost_of(1e6).pack_time_s([2000], [0, 1], cluster) == pytest.approx(1 + 2000 * 1e6 / 2 / 2.5e9)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_a_pack_is_moved_where_that_beats_a_higher_degree(sync: str) -> None:
    """Copies that compute hides cost nothing, a second rank costs communication; over a slow link it is the other way
    round."""
    fast, slow = planned(1900, 1e10, sync=sync), planned(1900, 1e8, sync=sync)
    for plan, degree in ((fast, 1), (slow, 2)):
        [group] = [group for group in plan.groups if 0 in group.sequences]
        assert group.degree == degree
        tokens = sum(plan.samples[row].num_tokens for row in group.sequences) / degree
        assert group.offload == pytest.approx(float(HALF.share_of(tokens)))
        plan.validate()
    assert fast.predicted_time_s < slow.predicted_time_s
    assert fast.lower_bound_s <= fast.predicted_time_s


def test_a_sequence_that_fits_in_no_other_way_is_planned() -> None:
    plan = planned(5500, 1e8)
    [group] = [group for group in plan.groups if 0 in group.sequences]
    assert (group.degree, group.offload) == (2, pytest.approx(float(HALF.share_of(2750))))
    assert all(other.offload == 0 for other in plan.groups if other is not group)
    with pytest.raises(SequenceTooLongError, match=r"^sample long: 6001 tokens; the cluster holds at most 6000 "):
        planned(6001, 1e8)
    with pytest.raises(SequenceTooLongError, match=r"at most 2000 in one sequence"):
        plan_batch(plan.samples, ClusterSpec(2, 2, 1000), cost_of(1e8))


@pytest.mark.parametrize("planner", ["dhp", "dhp_quick", "dhp_paper", "static", "static_best", "pow2", "megatron"])
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_every_planner_plans_it(planner: str, sync: str) -> None:
    plan = planned(10_000, 1e9, num_ranks=4, planner=planner, sync=sync)
    plan.validate()
    assert max(group.offload for group in plan.groups) > 0


def test_plan_files_carry_it_and_older_ones_have_none() -> None:
    plan = planned(1900, 1e10)
    tree = json.loads(json.dumps(plan.to_json()))
    assert replace(replay(tree), planning_time_s=plan.planning_time_s) == plan
    assert [group.offload for group in Plan.from_json(tree).groups] == [group.offload for group in plan.groups]
    assert [pack.offload for pack in plan.rank_plan(1, 0).packs] == [
        group.offload for group in plan.groups if 0 in group.ranks]
    older = json.loads(json.dumps(plan_batch(plan.samples, ClusterSpec(2, 2, 1000), cost_of(1e10)).to_json()))
    del older["inputs"]["offload"]
    for name in ("offload_bytes_per_token", "offload_bytes_per_patch", "host_bytes_per_s", "forward"):
        del older["inputs"]["cost"][name]
    for group in older["groups"]:
        del group["offload"]
    read = Plan.from_json(older)
    assert read.cluster.offload == NO_OFFLOAD
    assert {group.offload for group in (*read.groups, *replay(older).groups)} == {0.0}


def test_a_plan_that_moves_too_little_must_not_run() -> None:
    tree = json.loads(json.dumps(planned(5500, 1e8).to_json()))
    for group in tree["groups"]:
        group["offload"] = min(group["offload"], 0.1)
    with pytest.raises(PlanError, match=r"^plan: group \d+ moves a share of 0\.1 of its activations to host memory; "
                                        r"allowed: 0\.477 to 1$"):
        Plan.from_json(tree)


def test_with_a_share_of_every_pack_all_pay_for_it() -> None:
    every = ClusterSpec(2, 2, 1000, offload=Offload(0.5, 0, 1000))
    plan = plan_batch([Sample(str(row), 500) for row in range(8)], every, cost_of(1e9))
    assert {group.offload for group in plan.groups} == {0.5}
    assert plan.predicted_time_s == pytest.approx(2 + 4 * (0.25 - 0.5 / 3))  # 250 MB of each, forward 0.167 s


def test_the_bound_counts_no_copies_of_images_apart() -> None:
    """2 s of images and 2 s of text, which moves nothing; the copies of the patches would take 7.5 s each way."""
    cost = replace(cost_of(1e9), vision_linear_s=1e-3, offload_bytes_per_token=0, offload_bytes_per_patch=1e7)
    cluster, samples = ClusterSpec(1, 1, 1000, offload=HALF), [Sample("a", 1500, 500, ((1, 50, 40),))]
    apart, together = (plan_batch(samples, cluster, cost, encoder=encoder) for encoder in ("world", "group"))
    assert apart.predicted_time_s == pytest.approx(4)
    assert apart.lower_bound_s <= apart.predicted_time_s * (1 + 1e-9)
    assert together.lower_bound_s == pytest.approx(together.predicted_time_s) == pytest.approx(4 + 2 * 7.5 - 4)
