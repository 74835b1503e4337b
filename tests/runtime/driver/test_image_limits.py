"""The largest image of a run, and the room that ranks keep for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dhp_ray.planner.mode import Mode
from dhp_ray.planner.plan.types import Sample
from dhp_ray.runtime.strategy import skipped_images
from tests.runtime.driver.groups import GIB, config_of, group_of, limits_of_generation, resolve_limits, strategy_of

AUTO = ("planner.sync=step", "train.activation_checkpointing=auto", "planner.tokens_per_rank=auto",
        "train.precision=bf16")
ROOM = 3.0
"""GiB of a device."""
IMAGE = 30_000


def test_an_image_that_the_run_allows_counts_whole_in_a_smaller_generation(tmp_path: Path) -> None:
    for tokens in ("3000", "auto"):
        config = config_of(str(tmp_path), "train.precision=bf16", f"data.max_pixels={4000 * 784}",
                           f"planner.tokens_per_rank={tokens}")
        first, left = group_of(4, 4.0, config), group_of(2, 1.0, config)
        resolve_limits(config, {}, first)
        assert first.image_limit == 4000
        left.image_limit = first.image_limit
        memory = strategy_of(config, left).memory(Mode("step"))
        assert memory.worst_load(1000).patches == 5000 * memory.shape.merge_area


def test_images_that_will_be_skipped_are_told() -> None:
    assert [bool(skipped_images(limit, 4000)) for limit in (0, 3000, 4000)] == [False, True, False]


def test_packs_have_room_for_the_largest_image_though_a_rank_holds_few_of_its_tokens(tmp_path: Path) -> None:
    """A mode whose packs recompute as they must is not given up for it: a pack's ranks share the tokens of an image."""
    config = config_of(str(tmp_path), *AUTO, "batch.global_samples=64", "comm.transport=parent",
                       "train.activation_checkpointing=packs")
    group = group_of(4, ROOM, config)
    group.first_batch = [Sample(str(number), 20_000) for number in range(64)]
    config.data.max_pixels = IMAGE * group.members[0].described["shape"].token_pixels
    resolve_limits(config, {}, group)
    assert group.image_limit == IMAGE
    mode = strategy_of(config, group).choose().mode
    recomputation = limits_of_generation(config, group, 4).recomputation
    memory = strategy_of(config, group).memory(mode)
    assert (mode, recomputation.share) == (Mode("step"), 1.0)
    assert 1 < recomputation.free_tokens < IMAGE
    for tokens in np.geomspace(recomputation.free_tokens, recomputation.tokens_per_rank, 20).astype(int).tolist():
        load = memory.worst_load(tokens, recomputed=float(recomputation.share_of(tokens)))
        assert load.patches == (tokens + IMAGE) * memory.shape.merge_area
        assert memory.memory(load).device_bytes <= 0.9 * ROOM * GIB


def test_where_there_is_no_room_images_are_limited_to_the_tokens_of_a_rank(tmp_path: Path) -> None:
    """Unless another mode has room."""
    config = config_of(str(tmp_path), *AUTO, "train.activation_checkpointing=false")
    group = group_of(4, ROOM, config)
    config.data.max_pixels = 60_000 * group.members[0].described["shape"].token_pixels
    again = replace(config, train=replace(config.train, activation_checkpointing="auto"),
                    planner=replace(config.planner))
    resolve_limits(config, {}, group)
    assert group.image_limit == int(config.planner.tokens_per_rank) == strategy_of(config, group).largest_admitted
    choice = resolve_limits(again, {}, group)
    assert (choice.mode, group.image_limit) == (Mode("step", "selective"), 60_000)
    assert "step has no room for the largest image; step with selective recomputation takes " in choice.why
    assert strategy_of(again, group).largest_admitted == 0


def test_tokens_that_are_given_have_room_beside_the_largest_image_or_limit_it(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "train.precision=bf16", "planner.tokens_per_rank=300")
    for memory_gib, limit in ((0.27, 1280), (0.19, 300)):
        group = group_of(8, memory_gib, config)
        resolve_limits(config, {}, group)
        assert group.image_limit == limit


def test_the_limit_of_an_image_is_fixed_at_the_runs_first_start(tmp_path: Path) -> None:
    for words, stored, limit in (([], {}, 1280), ([], {"resolved.image_limit": 700}, 700),
                                 (["planner.max_sequence_tokens=1100"], {}, 1100),
                                 (["planner.tokens_per_rank=300"], {"resolved.image_limit": 200}, 200),
                                 (["planner.tokens_per_rank=300"], {}, 600)):
        config = config_of(str(tmp_path), "train.precision=bf16", "planner.tokens_per_rank=auto", *words)
        group = group_of(2, 40.0, config)
        resolve_limits(config, stored, group)
        assert group.image_limit == limit
