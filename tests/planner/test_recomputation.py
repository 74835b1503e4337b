"""Which share of a pack's layers is recomputed: enough to make it fit, chosen where that beats more ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Plan, PlanError, Sample, SequenceTooLongError, plan_batch, replay
from dhp_ray.planner.memory.layer_share import largest_recomputation
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.plan.cluster import NO_RECOMPUTATION, Offload, Recomputation
from tests.planner.test_references import random_batch
from tests.published_configs import shape_of

HALF = Recomputation(0.5, 1000, 3000, 1000)
"""Up to 1,000 tokens a rank nothing; of 3,000 half."""
CLUSTER, ALONE = ClusterSpec(2, 2, 1000, recomputation=HALF), ClusterSpec(1, 1, 1000, recomputation=HALF)
SYNCS = ["step", "micro_batch"]


def cost_of(bytes_per_s: float) -> CostModel:
    """1 ms a token, a third of it forward; a token's keys and values are 1 MB."""
    return CostModel(0.0, 1e-3, 1e6, 0.0, {2: bytes_per_s, 8: bytes_per_s})


def planned(length: int, bytes_per_s: float, num_ranks: int = 2, **options: str) -> Plan:
    """One long sequence beside many short ones, on ranks that hold 1,000 tokens, or 3,000 of one pack."""
    samples = [Sample("long", length), *(Sample(str(row), 500) for row in range(8))]
    return plan_batch(samples, replace(CLUSTER, num_ranks=num_ranks, speeds=(), nodes=()), cost_of(bytes_per_s),
                      **options)


def recomputed_of(plan: Plan) -> list[float]:
    return [group.recomputed for group in plan.groups]


@pytest.mark.parametrize(("tokens", "share"), [(1000, 0.0), (1500, 0.25), (2000, 0.375), (3000, 0.5)])
def test_the_time_of_a_pack_by_hand(tokens: int, share: float) -> None:
    """A third of a pack's time is forward, and of that its share runs again, without attention and its exchange."""
    cost = cost_of(2e9)
    assert cost.pack_time_s([tokens], [0], CLUSTER) == pytest.approx(tokens * 1e-3 * (1 + share / 3))
    exchange_s = 2 * tokens * 1e6 / 2 / 2e9  # twice the tokens on two ranks
    assert cost.pack_time_s([2 * tokens], [0, 1], CLUSTER) == pytest.approx(
        tokens * 1e-3 * (1 + share / 3) + exchange_s)
    once = replace(cost, quadratic_s=1e-7, pack_s=0.3, latency_s=0.5, forward=0.2)
    assert once.pack_time_s([tokens], [0], CLUSTER) == pytest.approx(
        tokens**2 * 1e-7 + (tokens * 1e-3 + 0.3) * (1 + share * 0.2))
    assert once.pack_time_s([2 * tokens], [0, 1], CLUSTER) == pytest.approx(
        2 * tokens**2 * 1e-7 + (tokens * 1e-3 + 0.8) * (1 + share * 0.2) + exchange_s)


@pytest.mark.parametrize(("vision_forward", "again"), [(0.25, 0.25), (1.0, 0.0)])
def test_images_run_again_unless_the_encoder_is_frozen(vision_forward: float, again: float) -> None:
    """Of 2,000 tokens 0.375; the encoder is frozen if it has no backward pass."""
    cost = replace(cost_of(1e9), vision_linear_s=1e-3, encoder_pass_s=0.1, vision_forward=vision_forward)
    time_s = 2 * (1 + 0.375 / 3) + 0.9 * (1 + 0.375 * again)
    assert cost.pack_time_s([2000], [0], CLUSTER, encode_s=0.9) == pytest.approx(time_s)
    plan = plan_batch([Sample("a", 1800, 200, ((1, 20, 40),))], ALONE, cost)
    assert plan.predicted_time_s == pytest.approx(time_s)


def test_a_pack_still_takes_what_its_parameters_take_to_travel() -> None:
    cost = replace(cost_of(1e9), gather_s=2.2)
    assert cost.pack_time_s([2000], [0], CLUSTER) == pytest.approx(2.25)
    assert replace(cost, gather_s=2.3).pack_time_s([2000], [0], CLUSTER) == pytest.approx(2.3)


MODELS = [("7B", 80, "micro_batch", 64, ()), ("InternVL3-8B", 64, "micro_batch", 64, ()), ("3B", 80, "step", 64, ()),
          ("3B", 80, "step", 64, ("vision",)), ("Qwen3-VL-32B", 80, "micro_batch", 1024, ("language",))]


def memory_of(name: str, sync: str, num_ranks: int, frozen: tuple[str, ...]) -> MemoryModel:
    return MemoryModel(shape_of(name), MemorySettings(sync=sync, world_size=num_ranks, precision="bf16",
                                                      recomputes=False, frozen=frozen))


@pytest.mark.parametrize("limit", [1.0, 0.4])
@pytest.mark.parametrize(("name", "gibibytes", "sync", "num_ranks", "frozen"), MODELS, ids=str)
def test_the_share_makes_packs_of_any_size_fit(
    name: str, gibibytes: int, sync: str, num_ranks: int, frozen: tuple[str, ...], limit: float
) -> None:
    """Also if no pack is to have more than a part of the tokens that fit with all layers recomputed."""
    memory, limit_bytes = memory_of(name, sync, num_ranks, frozen), 0.9 * gibibytes * 2**30
    held, all_again = memory.tokens_that_fit(limit_bytes), memory.tokens_that_fit(limit_bytes, recomputed=1.0)
    most = max(int(all_again * limit), held + 100)
    found = largest_recomputation(memory, limit_bytes, held, most if limit < 1 else 10**9)
    assert found.tokens_per_rank == (most if limit < 1 else all_again) > held == found.free_tokens
    assert (found.share == 1.0) if limit == 1.0 else (0.0 < found.share < 1.0)
    assert 0.5 * held < found.from_tokens <= held
    needed = [memory.memory(memory.worst_load(tokens, recomputed=float(found.share_of(tokens)))).device_bytes
              for tokens in np.linspace(held, found.tokens_per_rank, 200).astype(int).tolist()]
    assert max(needed) <= limit_bytes
    assert needed[-1] > 0.98 * limit_bytes


def test_nothing_is_recomputed_where_that_gains_nothing() -> None:
    memory, limit_bytes = memory_of("3B", "step", 64, ()), 0.9 * 80 * 2**30
    held = memory.tokens_that_fit(limit_bytes)
    assert largest_recomputation(memory, limit_bytes, held, held) == NO_RECOMPUTATION
    assert largest_recomputation(memory, limit_bytes, held + 10, held) == NO_RECOMPUTATION
    whole = MemoryModel(memory.shape, replace(memory.settings, recomputes=True))
    assert largest_recomputation(whole, limit_bytes, whole.tokens_that_fit(limit_bytes), 10**9) == NO_RECOMPUTATION


@pytest.mark.parametrize("sync", SYNCS)
def test_a_pack_is_recomputed_where_that_beats_a_higher_degree(sync: str) -> None:
    """1,900 tokens on one rank take 1.9 x (1 + 0.355 / 3) = 2.125 s; on two, 0.95 s and 1.9 GB / 2 of messages."""
    slow, fast = planned(1900, 1e8, sync=sync), planned(1900, 1e11, sync=sync)
    for plan, degree in ((slow, 1), (fast, 2)):
        [group] = [group for group in plan.groups if 0 in group.sequences]
        assert group.degree == degree
        tokens = sum(plan.samples[row].num_tokens for row in group.sequences) / degree
        assert group.recomputed == pytest.approx(float(HALF.share_of(tokens)))
        assert plan.lower_bound_s <= plan.predicted_time_s
    assert max(recomputed_of(slow)) > 0.35
    assert max(recomputed_of(fast)) == 0.0
    assert fast.predicted_time_s < slow.predicted_time_s


def test_a_sequence_that_fits_in_no_other_way_is_planned() -> None:
    plan = planned(5500, 1e11)
    [group] = [group for group in plan.groups if 0 in group.sequences]
    assert (group.degree, group.recomputed) == (2, pytest.approx(float(HALF.share_of(2750))))
    assert all(other.recomputed == 0 for other in plan.groups if other is not group)
    with pytest.raises(SequenceTooLongError, match=r"^sample long: 6001 tokens; the cluster holds at most 6000 "):
        planned(6001, 1e11)
    with pytest.raises(SequenceTooLongError, match=r"at most 2000 in one sequence"):
        plan_batch(plan.samples, ClusterSpec(2, 2, 1000), cost_of(1e11))


@pytest.mark.parametrize("planner", ["dhp", "dhp_quick", "dhp_paper", "static", "static_best", "pow2", "megatron"])
@pytest.mark.parametrize("sync", SYNCS)
def test_every_planner_plans_it(planner: str, sync: str) -> None:
    plan = planned(10_000, 1e9, num_ranks=4, planner=planner, sync=sync)
    plan.validate()
    assert max(recomputed_of(plan)) > 0


def test_small_packs_join_where_each_pays_much_once() -> None:
    """Eight sequences of 500 tokens and 2 s a pack, on one rank. Four packs of two take 4 x 3 s; one of two and one of
    six take 3 s and 5 (1 + 0.5 / 3) s.
    """
    plan = plan_batch([Sample(str(row), 500) for row in range(8)], ALONE, replace(cost_of(1e9), pack_s=2.0))
    assert sorted(recomputed_of(plan)) == [0.0, 0.5]
    assert plan.predicted_time_s == pytest.approx(3 + 5 * (1 + 0.5 / 3))


def always(cost: CostModel) -> CostModel:
    """The cost of a run that always recomputes all layers."""
    language, images = 1 + cost.forward, 1 + cost.vision_forward * (cost.vision_forward < 1)
    return replace(cost, **{name: getattr(cost, name) * factor for names, factor in (
        (("quadratic_s", "linear_s", "comm_bytes_per_token", "latency_s", "pack_s"), language),
        (("vision_quadratic_s", "vision_linear_s", "encoder_pass_s"), images)) for name in names})


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("seeds", [[*range(7003, 7012), 7017, 7020, 7024],
                                   pytest.param([*range(7000, 7025)], marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_plan_is_longer_than_without_recomputation_or_with_all(seeds: list[int], sync: str) -> None:
    """Random batches on small clusters, of sequences that also fit without it."""
    recomputed = 0
    for seed in seeds:
        batch = random_batch(seed, unequal=seed % 3 == 0, images=seed % 2 == 0, recomputation=True)
        cluster, cost = batch.cluster, batch.cost
        held, most = cluster.tokens_per_rank, cluster.recomputation.tokens_per_rank
        samples = [replace(sample, text_tokens=min(sample.text_tokens, held * cluster.num_ranks))
                   for sample in batch.samples]
        plan, without, with_all = (plan_batch(samples, *each, sync=sync) for each in (
            (cluster, cost), (replace(cluster, recomputation=NO_RECOMPUTATION), cost),
            (replace(cluster, recomputation=NO_RECOMPUTATION, tokens_per_rank=most), always(cost))))
        recomputed += max(recomputed_of(plan)) > 0
        assert plan.lower_bound_s * (1 - 1e-9) <= plan.predicted_time_s <= without.predicted_time_s * (1 + 1e-9), seed
        assert plan.predicted_time_s <= with_all.predicted_time_s * (1 + 1e-9), seed
    assert recomputed > 2


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("encoder", ["world", "auto"])
@pytest.mark.parametrize("num_seeds", [6, pytest.param(25, marks=pytest.mark.slow)])
def test_no_plan_with_images_apart_is_below_its_bound(sync: str, encoder: str, num_seeds: int) -> None:
    for seed in range(7100, 7100 + num_seeds):
        batch = random_batch(seed, images=True, recomputation=True)
        cost = replace(batch.cost, vision_linear_s=batch.cost.vision_linear_s * 30)
        plan = plan_batch(batch.samples, batch.cluster, cost, sync=sync, encoder=encoder)
        assert plan.lower_bound_s <= plan.predicted_time_s * (1 + 1e-9), seed


@pytest.mark.parametrize("encoder", ["group", "world"])
def test_images_apart_do_not_run_again_with_their_pack(encoder: str) -> None:
    """1 + 1 s of images, 2 s of text, 0.375 of its layers again; a quarter of the images' time is forward."""
    cost = replace(cost_of(1e9), vision_linear_s=1e-3, vision_forward=0.25)
    plan = plan_batch([Sample("a", 1500, 500, ((1, 50, 40),))], ALONE, cost, encoder=encoder)
    recompute_s = 2 * 0.25 * 0.375 if encoder == "group" else 0.0
    assert plan.predicted_time_s == pytest.approx(2 + 2 * (1 + 0.375 / 3) + recompute_s)
    assert plan.lower_bound_s <= plan.predicted_time_s * (1 + 1e-9)


def test_plan_files_carry_it_and_older_ones_have_none() -> None:
    plan = planned(1900, 1e8)
    tree = json.loads(json.dumps(plan.to_json()))
    assert max(recomputed_of(plan)) > 0
    assert replace(replay(tree), planning_time_s=plan.planning_time_s) == plan
    read = Plan.from_json(tree)
    assert (read.cluster.recomputation, recomputed_of(read)) == (HALF, recomputed_of(plan))
    assert [pack.recomputed for pack in plan.rank_plan(1, 0).packs] == [
        group.recomputed for group in plan.groups if 0 in group.ranks]
    older = json.loads(json.dumps(plan_batch(plan.samples, ClusterSpec(2, 2, 1000), cost_of(1e10)).to_json()))
    del older["inputs"]["recomputation"]
    for group in older["groups"]:
        del group["recomputed"]
    read = Plan.from_json(older)
    assert read.cluster.recomputation == NO_RECOMPUTATION
    assert {*recomputed_of(read), *recomputed_of(replay(older))} == {0.0}


def test_a_plan_that_recomputes_too_little_must_not_run() -> None:
    tree = json.loads(json.dumps(planned(5500, 1e8).to_json()))
    for share in (0.1, 1.5):
        for group in tree["groups"]:
            group["recomputed"] = share if group["recomputed"] else 0.0
        with pytest.raises(PlanError, match=rf"^plan: group \d+ recomputes a share of {share} of its layers; "
                                            r"allowed: 0\.477 to 1$"):
            Plan.from_json(tree)


def test_a_cluster_with_both_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^cluster: offload and recomputation; packs that hold more tokens use one "):
        ClusterSpec(2, 2, 1000, offload=Offload(0.5, 1000, 3000, 1000), recomputation=HALF)
    with pytest.raises(PlanError, match=r"^recomputation: share=1\.5 .*; allowed: a share from 0 to 1, and"):
        Recomputation(1.5, 0, 5)
