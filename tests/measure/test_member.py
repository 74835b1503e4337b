"""Real ranks that measure: what they say of rounds and links, and that their weights stay as they were."""

from __future__ import annotations

from unittest import mock

import pytest

import dhp_ray.measure.member as member_module
from dhp_ray.comm.device import CPU
from dhp_ray.config import load
from dhp_ray.measure.member import MESSAGE_BYTES, Member
from dhp_ray.measure.rounds import PartResult, Sizes, Spec
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.rank import Rank
from tests.engine_values import full_parameters
from tests.measure.known_world import spec
from tests.ranks import run_processes

SMALL = Sizes(48, ((1, 4, 4), (1, 4, 8)), 4)


def measured(
    rank: int, port: int, of: Spec, overrides: list[str], parts: list[str]
) -> tuple[dict[str, PartResult], float]:
    """What a rank says of each part; how far its weights have moved. Rounds of packs are run as often as there is time
    for, others as often as they must.
    """
    config = load(["model.preset=tiny", "run.dir=unused", f"planner.sync={of.sync}", *overrides])
    nodes = tuple(f"node {node}" for node in of.nodes)
    member = Rank(config, Membership(rank, of.num_ranks, 1, "127.0.0.1", port, nodes=nodes), CPU)
    before = full_parameters(member.engine)
    found = {}
    for part in parts:
        with mock.patch.object(member_module, "REPEATED_S", member_module.REPEATED_S if part == "packs" else 0.0):
            found[part] = Member(rank, of, member.stepper, config.train.precision).measure(part)
    after = full_parameters(member.engine)
    moved = max((float((after[name] - value).abs().max()) for name, value in before.items()), default=0.0)
    member.close()
    return found, moved


def test_two_ranks_measure_every_part() -> None:
    of = spec(sizes=SMALL)
    parts = ["packs", "rings", "exchanges"]
    by_rank = run_processes(measured, 2, of, [], parts, timeout_s=240)
    for found, moved in by_rank:
        assert moved == 0.0
        for part in ("packs", "rings"):
            rounds = of.rounds(part)
            assert len(found[part].rounds) == len(rounds)
            for repeats in found[part].rounds:
                assert len(repeats) >= 3
                for step in repeats:
                    assert all(pack.end_s <= step.step_s for pack in step.packs)
        assert all(pack.blocked_s > 0 for step in found["rings"].rounds[0] for pack in step.packs)
        exchanged, = found["exchanges"].exchanged
        assert (exchanged.degree, exchanged.across) == (2, False)
        assert exchanged.seconds.keys() == set(MESSAGE_BYTES)
        assert exchanged.seconds[MESSAGE_BYTES[-1]] > exchanged.seconds[MESSAGE_BYTES[0]] > 0
    repeats = [[len(repeats) for repeats in found["packs"].rounds] for found, _ in by_rank]
    assert repeats[0] == repeats[1]


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "overrides"), [
    ("micro_batch", []), ("step", ["train.activation_checkpointing=true"]),
    ("step", ["train.freeze=[vision]"])])
def test_every_way_to_train_is_measured(sync: str, overrides: list[str]) -> None:
    of = spec(sync=sync, sizes=SMALL)
    for found, moved in run_processes(measured, 2, of, overrides, ["packs", "images", "rings"], timeout_s=300):
        assert moved == 0.0
        for step in found["images"].rounds[0]:
            assert [pack.index for pack in step.packs] == sorted(pack.index for pack in step.packs)


@pytest.mark.slow
def test_one_rank_measures_what_it_can() -> None:
    (found, moved), = run_processes(measured, 1, spec(1, sizes=SMALL), [], ["packs"])
    assert moved == 0.0
    assert len(found["packs"].rounds) > 1


@pytest.mark.slow
def test_pairs_on_two_nodes_are_links_across() -> None:
    of = spec(nodes=(0, 1), sizes=SMALL)
    for found, _ in run_processes(measured, 2, of, [], ["exchanges", "rings"]):
        assert [(ring.degree, ring.across) for ring in found["exchanges"].exchanged] == [(2, True)]
        assert found["rings"].rounds
