"""The largest image of a run, and the room that ranks keep for it: `planner.max_image_tokens`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp_ray.planner.mode import Mode
from dhp_ray.runtime.driver.modes import memory_of, mode_of
from dhp_ray.runtime.driver.room import limits_of_generation
from dhp_ray.runtime.driver.start import resolve_limits
from dhp_ray.runtime.messages import RunError
from tests.runtime.driver.groups import GIB, config_of, group_of

AUTO = ("planner.sync=step", "train.activation_checkpointing=auto", "planner.tokens_per_rank=auto",
        "train.precision=bf16")
ROOM = 3.0
"""GiB of a device."""


def test_an_image_that_the_run_allows_counts_whole_in_a_smaller_generation(tmp_path: Path) -> None:
    for tokens, limit in (("3000", 3000), ("auto", 4000)):
        config = config_of(str(tmp_path), "train.precision=bf16", f"data.max_pixels={4000 * 784}",
                           f"planner.tokens_per_rank={tokens}")
        resolve_limits(config, {}, group_of(4, 4.0, config))
        assert config.planner.max_image_tokens == limit
        memory = memory_of(config, group_of(2, 1.0, config), Mode("step", False))
        assert memory.worst_load(1000).patches == (1000 + limit) * memory.shape.merge_area


def test_packs_have_room_for_the_largest_image_though_a_rank_holds_few_of_its_tokens(tmp_path: Path) -> None:
    """A mode whose packs recompute as they must is not given up for it: a pack's ranks share the tokens of an image."""
    config = config_of(str(tmp_path), *AUTO, "batch.global_samples=64", "comm.transport=parent")
    group = group_of(4, ROOM, config)
    config.data.max_pixels = 30_000 * group.members[0].described["shape"].token_pixels
    resolve_limits(config, {}, group)
    assert config.planner.max_image_tokens == 30_000
    mode = mode_of(config, group, auto_tokens=True).mode
    limits, memory = limits_of_generation(config, group, 4), memory_of(config, group, mode)
    assert (mode, limits.recomputation.share) == (Mode("step", False), 1.0)
    assert 1 < limits.recomputation.free_tokens < 30_000
    load = memory.worst_load(limits.recomputation.free_tokens)
    assert load.patches > 30_000 * memory.shape.merge_area
    assert memory.memory(load).device_bytes <= 0.9 * ROOM * GIB


def test_a_run_whose_ranks_have_no_room_for_an_image_is_refused(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "train.precision=bf16", f"data.max_pixels={10**9}",
                       "planner.tokens_per_rank=auto")
    with pytest.raises(RunError, match=r"room for no token: it needs .* use more or larger devices, "
                       r"train\.activation_checkpointing=true, a lower data\.max_pixels \(an image may take 1,275,510 "
                       r"tokens\), or a smaller model$"):
        resolve_limits(config, {}, group_of(2, 4.0, config))


def test_the_limit_of_an_image_is_fixed_at_the_runs_first_start(tmp_path: Path) -> None:
    for words, stored, limit in (([], {}, 1280), (["planner.max_image_tokens=900"], {}, 900),
                                 ([], {"planner.max_image_tokens": 700}, 700),
                                 (["planner.max_sequence_tokens=1100"], {}, 1100),
                                 (["planner.tokens_per_rank=300"], {}, 300)):
        config = config_of(str(tmp_path), "train.precision=bf16", "planner.tokens_per_rank=auto", *words)
        resolve_limits(config, stored, group_of(2, 40.0, config))
        assert config.planner.max_image_tokens == limit
