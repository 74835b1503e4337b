"""What ranks compute in a plan, beside the cost formulas reckoned sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, plan_batch
from dhp_ray.planner.cost.work import BACKWARD, ENCODE, PAID_ONCE, TERMS, work_of
from dhp_ray.planner.plan.cluster import Offload, Recomputation
from dhp_ray.planner.plan.types import Pack, SplitImage, VisionPlan
from dhp_ray.train.results import PackTime, StepResult, busy_s_of

COST = CostModel(2e-6, 1e-3, 100.0, 0.5, {2: 1e6}, communication="ring", latency_s=0.1, pack_s=0.02,
                 vision_quadratic_s=1e-5, vision_linear_s=1e-3, encoder_pass_s=0.05, attention_block=64)
SAMPLES = [Sample("long", 900), Sample("short", 100), Sample("image", 60, 16, ((1, 8, 8),)),
           Sample("clip", 80, 48, ((2, 4, 8), (1, 8, 16)))]


def planned(num_ranks: int = 3, **options: str) -> Plan:
    return plan_batch(SAMPLES, ClusterSpec(num_ranks, num_ranks, 512 if num_ranks > 1 else 4096), COST, **options)


def rows_s(plan: Plan) -> dict[tuple[int, int], float]:
    """Seconds of each rank's part of each pack, images in packs."""
    found = {}
    for number, group in enumerate(plan.groups):
        samples = [plan.samples[row] for row in group.sequences]
        text_s = sum(COST.attention_s(sample.num_tokens) + COST.linear_s * sample.num_tokens for sample in samples)
        images_s = [image_s for sample in samples for image_s in COST.image_s(sample)]
        for rank in group.ranks:
            own = [image_s for image_s, encoder in zip(images_s, group.encoders, strict=True) if encoder == rank]
            found[rank, number] = (text_s / group.degree + COST.pack_s + sum(own)
                                   + COST.encoder_pass_s * bool(own))
    return found


def test_every_part_of_every_pack_is_reckoned_as_the_cost_model_does() -> None:
    plan = planned(encoder="group")
    work, expected = work_of(plan), rows_s(plan)
    assert max(group.degree for group in plan.groups) >= 2
    rows = zip(work.rank.tolist(), work.group.tolist())
    assert dict(zip(rows, work.seconds(COST).tolist())) == pytest.approx(expected)
    assert sorted(work.rank.tolist()) == work.rank.tolist()
    assert work.amounts.shape[1] == len(TERMS)
    totals = [sum(seconds for (rank, _), seconds in expected.items() if rank == own) for own in range(3)]
    assert work.seconds_of_ranks(COST, 3) == pytest.approx(totals)
    assert work.seconds_of_ranks(COST, 3, PAID_ONCE) == pytest.approx(
        [COST.pack_s * sum(rank in group.ranks for group in plan.groups) for rank in range(3)])


def test_one_rank_alone_takes_what_its_plan_says() -> None:
    plan = planned(1, encoder="group")
    assert work_of(plan).seconds(COST).sum() == pytest.approx(plan.predicted_time_s - plan.fixed_s)


def test_waits_for_copies_are_part_of_it_and_as_long_on_a_slow_rank() -> None:
    """Of a pack with images on one rank: what its plan says. On two, the slowest member's."""
    moves = replace(COST, offload_bytes_per_token=1e6, offload_bytes_per_patch=1e5, host_bytes_per_s=1e9)
    offload = Offload(1.0, 0, 4096)
    plan = plan_batch(SAMPLES, ClusterSpec(1, 1, 512, offload=offload), moves, encoder="group")
    work = work_of(plan)
    assert all(group.offload > 0 for group in plan.groups)
    assert work.waits_s.min() > 0
    assert work.seconds(moves).sum() == pytest.approx(plan.predicted_time_s - plan.fixed_s)
    assert work.seconds_of_ranks(moves, 1, PAID_ONCE) == pytest.approx(
        [len(plan.groups) * COST.pack_s + work.waits_s.sum()])
    assert not work_of(planned(1, encoder="group")).waits_s.any()
    shared = replace(plan, cluster=ClusterSpec(2, 2, 512, offload=offload), samples=(Sample("long", 1000),),
                     groups=(Pack((0, 1), (0,), 1.0, offload=0.5),))
    # 2e-6 (10^6 + 64,000) + 1 = 3.128 s on one rank, 1.564 s on each; 0.25 s of copies are hidden;
    assert work_of(shared).waits_s.tolist() == [0.0, 0.0]
    # over a tenth of that link 2.5 s are not: out beside 0.5213 s, back beside 1.0427 s
    slow = replace(shared, inputs={"cost": replace(moves, host_bytes_per_s=1e8).to_json()})
    assert work_of(slow).waits_s.tolist() == pytest.approx([3.436, 3.436])


@pytest.mark.parametrize("vision_forward", [0.25, 1.0])
@pytest.mark.parametrize("encoder", ["group", "world"])
def test_what_a_pack_computes_again_is_part_of_it(encoder: str, vision_forward: float) -> None:
    """On one rank: what its plan says; images apart run once. Of a pack that two ranks share, half of its layers."""
    cost = replace(COST, forward=0.3, vision_forward=vision_forward)
    cluster = ClusterSpec(1, 1, 512, recomputation=Recomputation(1.0, 400, 4096, 512))
    plan = plan_batch(SAMPLES, cluster, cost, encoder=encoder)
    assert plan.vision.apart == (encoder == "world")
    assert max(group.recomputed for group in plan.groups) > 0
    assert work_of(plan).seconds(cost).sum() == pytest.approx(plan.predicted_time_s - plan.fixed_s)
    images = Sample("image", 984, 16, ((1, 8, 8),))
    shared = replace(plan, cluster=replace(cluster, num_ranks=2, speeds=(), nodes=()), samples=(images,),
                     groups=(Pack((0, 1), (0,), 1.0, encoders=(1,), recomputed=0.5),),
                     vision=VisionPlan("group"))
    # 2e-6 (10^6 + 64,000) = 2.128 s of attention, once, and 1 s of all else on one rank; an image of 64 patches
    language_s, image_s = 2.128 / 2 + (1 / 2 + 0.02) * 1.15, 1e-5 * 64**2 + 1e-3 * 64 + 0.05
    again = 0.125 if vision_forward == 0.25 else 0.0
    assert work_of(shared).seconds(cost) == pytest.approx([language_s, language_s + image_s * (1 + again)])


@pytest.mark.parametrize("encoder", ["group", "world"])
def test_a_plan_of_recomputed_packs_takes_what_its_ranks_compute_and_exchange(encoder: str) -> None:
    """Exchanges, of which a ring is not hidden, are no work: without them the longest member of each group is left."""
    cost = replace(COST, overlap=0.0, forward=0.3, latency_s=0.0, vision_forward=0.25)
    cluster = ClusterSpec(2, 2, 256, recomputation=Recomputation(1.0, 200, 2048, 256))
    plan = plan_batch([Sample("a", 3000), *SAMPLES[2:]], cluster, cost, encoder=encoder)
    work = work_of(plan)
    seconds = work.seconds(cost)
    assert any(group.recomputed > 0 and group.degree == 2 for group in plan.groups)
    for number, group in enumerate(plan.groups):
        tokens = sum(plan.samples[row].num_tokens for row in group.sequences)
        exchanged_s = 100.0 * tokens / 2 / 1e6 * (group.degree - 1)
        assert group.predicted_time_s == pytest.approx(seconds[work.group == number].max() + exchanged_s)


@pytest.mark.parametrize(("keeps", "forward", "shares"), [
    (True, 0.25, {ENCODE: 0.25, BACKWARD: 0.75}), (False, 0.25, {ENCODE: 0.25, BACKWARD: 1.0}),
    (True, 1.0, {ENCODE: 1.0})])
def test_phases_share_what_images_take(keeps: bool, forward: float, shares: dict[int, float]) -> None:
    plan = planned(encoder="world")
    plan = replace(plan, vision=replace(plan.vision, keeps=keeps),
                   inputs=plan.inputs | {"cost": replace(COST, vision_forward=forward).to_json()})
    work = work_of(plan)
    seconds = work.seconds(COST)
    images_s = {rank: 0.0 for group in plan.groups for rank in group.encoders}
    for group in plan.groups:
        of_pack = [image_s for row in group.sequences for image_s in COST.image_s(plan.samples[row])]
        for image_s, encoder in zip(of_pack, group.encoders, strict=True):
            images_s[encoder] += image_s
    found = {(rank, phase): second for rank, phase, second in zip(work.rank.tolist(), work.group.tolist(),
                                                                  seconds.tolist()) if phase < 0}
    assert found == pytest.approx({(rank, phase): share * (whole_s + COST.encoder_pass_s)
                                   for rank, whole_s in images_s.items() for phase, share in shares.items()})


def test_each_rank_of_an_image_in_parts_has_its_share() -> None:
    """Three steps in time over two ranks, and three over three; a text of 7 tokens on rank 0."""
    cost = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1e9}, vision_linear_s=1.0, encoder_pass_s=0.5)
    sample = Sample("a", 7, 0, ((3, 2, 2), (3, 2, 2)))
    groups = (Pack((0,), (0,), 7.0, encoders=(0, 2), splits=(
        SplitImage(0, (0, 1)), SplitImage(1, (2, 0, 1)))),)
    plan = Plan("listed", "step", ClusterSpec(3, 3, 10), (sample,), groups, 7.0, 1.0, vision=VisionPlan("world"))
    plan.validate()
    assert work_of(plan).seconds_of_ranks(cost, 3) == pytest.approx([7.0 + 8.0 + 4.0 + 0.5, 4.0 + 4.0 + 0.5, 4.5])
    again = work_of(replace(plan, vision=VisionPlan("world", keeps=False)))
    assert again.seconds_of_ranks(cost, 3) == pytest.approx([7.0 + 12.5 * 4 / 3, 8.5 * 4 / 3, 4.5 * 4 / 3])


def test_a_rank_pays_for_each_pass_of_a_plan_in_lockstep() -> None:
    groups = (Pack((0,), (0,), 7.0, encoders=(0, 0, 1), passes=(0, 1, 1)),
              Pack((1,), (1,), 7.0, encoders=(1,), passes=(1,)))
    samples = (Sample("a", 7, 0, ((1, 2, 2),) * 3), Sample("b", 7, 0, ((1, 2, 2),)))
    plan = Plan("listed", "micro_batch", ClusterSpec(2, 2, 10), samples, groups, 7.0, 1.0,
                vision=VisionPlan("world", num_passes=2))
    assert work_of(plan).seconds_of_ranks(COST, 2, ("encoder_pass_s",)) == pytest.approx([0.1, 0.05])


def test_measured_seconds_find_their_rows() -> None:
    def result(rank: int, packs: Sequence[PackTime], phases: Sequence[PackTime] = ()) -> StepResult:
        return StepResult(step=1, rank=rank, loss_sum=1.0, num_valid_tokens=1, gradient_norm=1.0, learning_rate=1.0,
                          applied=True, state_version=1, step_time_s=9.0, data_wait_s=0.0, pack_times=tuple(packs),
                          pool={}, encoder_times=tuple(phases))

    plan = planned(2, encoder="world")
    work = work_of(plan)
    own = {rank: [number for number, group in enumerate(plan.groups) if rank in group.ranks] for rank in (0, 1)}
    first = result(0, [PackTime(number, 1.0, 4.0, 0.5) for number in own[0]],
                   [PackTime(-1, 0.0, 0.25, 0.0), PackTime(-1, 5.0, 6.0, 0.25)])
    seconds = dict(zip(zip(work.rank.tolist(), work.group.tolist()), busy_s_of(work, [first]).tolist()))
    for (rank, number), busy_s in seconds.items():
        if rank == 1:
            assert busy_s != busy_s  # rank 1 has not reported
        else:
            assert busy_s == {ENCODE: 0.25, BACKWARD: 0.75}.get(number, 2.5)


def test_how_much_rows_grow_from_one_cost_to_another() -> None:
    work = work_of(planned(encoder="world"))
    twice = replace(COST, **{name: 2 * getattr(COST, name) for name in TERMS})
    assert work.growth(COST, twice) == pytest.approx(2.0)
    of_text = {name: 0.0 for name in TERMS if name.startswith(("vision", "encoder"))}  # phases of images cost nothing
    assert work.growth(replace(COST, **of_text), replace(twice, **of_text)) == pytest.approx(2.0)
