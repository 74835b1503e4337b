"""What a rank keeps in its node's memory, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dhp_ray.planner.memory.host import CHANGE, export_bytes, host_terms, pinned_bytes
from dhp_ray.planner.memory.model import MemorySettings, Terms
from tests.published_configs import shape_of

SHAPE = shape_of("3B")
VERSION = 12 * 3_754_622_976 / 2
PINNED = 2**35
"""A version of 21 GiB in pinned memory."""


def terms(**changed: object) -> Terms:
    settings = MemorySettings(sync="step", world_size=2, precision="bf16", recomputes=True)
    return host_terms(SHAPE, replace(settings, **changed), 1000)  # type: ignore[arg-type]


def test_a_3b_on_two_ranks() -> None:
    """Patches are 3 x 2 x 14 x 14 numbers, four of them a token."""
    pixels = 2 * 1000 * 4 * 1176 * 4
    assert terms() == {"replicas": 0, "pinned, own shard": 0, "checkpoint being written": VERSION, CHANGE: 2 * VERSION,
                       "pixels": pixels}
    assert terms(mirror_every_steps="1") == {
        "replicas": 2 * VERSION, "pinned, own shard": PINNED, "checkpoint being written": VERSION,
        CHANGE: 4 * VERSION, "pixels": pixels}
    for every in ("4", "auto"):
        seldom = terms(mirror_every_steps=every)
        assert (seldom["pinned, own shard"], seldom[CHANGE]) == (2 * PINNED, 4 * VERSION + 2 * PINNED)
    assert terms(mirror_every_steps="1", device="cpu")["own shard"] == 0
    assert terms(mirror_every_steps="4", device="cpu")["own shard"] == 2 * VERSION
    alone = terms(mirror_every_steps="1", world_size=1)
    assert (alone["replicas"], alone[CHANGE], alone["checkpoint being written"]) == (0, 0, 2 * VERSION)

    def exported(world_size: int, count: int, **others: Any) -> int:
        settings = MemorySettings(sync="step", world_size=world_size, precision="bf16", recomputes=False, **others)
        return export_bytes(SHAPE, settings, count)

    assert exported(2, 1) == 3_754_622_976  # half a rank's share of 4 bytes a parameter
    assert exported(1, 1) == 5 * 10**9
    assert exported(64, 8) == 8 * 4 * SHAPE.vocabulary_size * SHAPE.width  # its largest tensor
    assert exported(64, 64) == 4 * 3_754_622_976
    assert exported(64, 8, adapters={"language": 1000}) == 4000


def test_pinned_memory_comes_in_powers_of_two() -> None:
    assert [pinned_bytes(size) for size in (1, 2, 3, 4096, 4097)] == [1, 2, 4, 4096, 8192]
