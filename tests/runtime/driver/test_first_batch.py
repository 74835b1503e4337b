"""The first batch, by which a run compares modes."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from dhp_ray.data.errors import DataError
from dhp_ray.data.stream import Stream
from dhp_ray.planner.mode import Mode
from dhp_ray.planner.plan.types import Sample
from dhp_ray.runtime.driver.start import _first_batch, first_samples
from dhp_ray.runtime.messages import Status
from dhp_ray.schema import Data, Model
from tests.data.samples import talk, write_rows
from tests.runtime.driver.groups import config_of, group_of, limits_of_generation, resolve_limits, strategy_of

AUTO = ("planner.sync=auto", "train.activation_checkpointing=auto", "planner.tokens_per_rank=auto",
        "train.precision=bf16")


def test_it_is_the_first_one_and_is_read_again_for_the_first_step(ray_cluster: None, tmp_path: Path) -> None:
    """However long its sequences are: how long they may be is not known yet."""
    rows = [{"id": f"r{number}", "conversations": talk("Count.", "one " * 50 * (1 + number))} for number in range(9)]
    stream = Stream(Data(format="llava", path=str(write_rows(tmp_path / "rows.json", rows))), Model(preset="tiny"), 0)
    samples = first_samples(stream, 9)
    assert {sample.id for sample in samples} == {f"r{number}" for number in range(9)}
    cut = sorted(sample.num_tokens for sample in samples)[4]
    stream.limit(cut)
    batch = stream.next_batch(9)
    assert batch is not None
    assert [sample.id for sample in batch.samples] == [sample.id for sample in samples if sample.num_tokens <= cut]
    assert len(batch.skipped) == 4
    stream.close()


def test_data_that_cannot_be_read_is_told_in_its_own_words(ray_cluster: None, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.json", [{"id": "r", "conversations": []}])
    stream = Stream(Data(format="llava", path=str(path)), Model(preset="tiny"), 0)
    with pytest.raises(DataError, match=r"data\.path"):
        first_samples(stream, 4)
    stream.close()


def test_a_worker_that_is_lost_meanwhile_does_not_end_a_run_that_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next generation forms without it, as at any other time."""
    config = config_of(str(tmp_path), *AUTO)
    group, compiled = group_of(2, 1.0, config), Future[float]()
    group.look_s = 0.01
    monkeypatch.setattr("dhp_ray.runtime.driver.group.IDLE_LOOK_S", 0.01)
    monkeypatch.setattr(group, "poll_health", lambda: [Status(), Status(dead=True)])
    records: Any = SimpleNamespace(planned_inputs=lambda step: {})
    stream: Any = SimpleNamespace(next_batch=lambda size: SimpleNamespace(samples=[Sample("a", 8)]),
                                  start_epoch=lambda epoch: None)
    Timer(0.2, compiled.set_result, [1.0]).start()
    assert _first_batch(config, group, records, stream, compiled) == [Sample("a", 8)]


@pytest.mark.parametrize(("lengths", "words"), [
    # packs so short that launching kernels takes longer than computing twice: some are joined and recomputed
    ([1000] * 64, "250 tokens, and a batch of 64 sequences of 1,000 tokens"),
    ([50] * 64, "13 tokens, and a batch of 64 sequences of 50 tokens"),
    # attention is most of the long ones, and does not run again in packs that recompute
    ([50, 60_000] * 4, "15,000 tokens, and a batch of 8 sequences of 50 to 60,000 tokens"),
    # no mode holds the longest, which is left out
    ([50, 10**9] * 4, "13 tokens, and a batch of 4 sequences of 50 tokens")])
def test_modes_are_compared_by_the_first_batch(tmp_path: Path, lengths: list[int], words: str) -> None:
    config = config_of(str(tmp_path), *AUTO, "planner.sync=step", "batch.global_samples=64")
    group = group_of(4, 1.0, config)
    group.first_batch = [Sample(str(number), length) for number, length in enumerate(lengths)]
    choice = strategy_of(config, group).choose()
    assert choice.mode == Mode("step")
    assert f": a rank is to hold {words} is modelled: step " in choice.line
    config.planner.max_sequence_tokens = 60  # what the run leaves out counts for nothing
    assert strategy_of(config, group).choose().mode == Mode("step")


def test_what_some_mode_does_not_hold_is_left_out_of_the_comparison(tmp_path: Path) -> None:
    """After ranks were lost, or with tokens as given, a sequence below the limit may fit in no mode."""
    config = config_of(str(tmp_path), *AUTO, "planner.sync=step", "batch.global_samples=64",
                       "planner.max_sequence_tokens=60000")
    config.planner.tokens_per_rank = "4096"
    group = group_of(4, 3.0, config)
    group.first_batch = [Sample("fits", 4 * 4096), Sample("does not", 4 * 4096 + 1), Sample("short", 50)]
    for auto_tokens in (False, True):
        choice = strategy_of(config, group, auto_tokens).choose()
        assert "takes" in choice.why
        assert "inf" not in choice.why
    assert "a batch of 2 sequences of 50 to 16,384 tokens" in strategy_of(config, group, False).choose().why


def test_the_ranks_that_hold_a_sequence_are_those_of_the_modes_that_would_be_taken(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), *AUTO, "batch.global_samples=512", "train.activation_offload=auto")
    group = group_of(8, 1.0, config)
    group.first_batch = [Sample(str(row), length) for row, length in enumerate([50, 700, 9000] * 170)]
    resolve_limits(config, {}, group)
    longest = config.planner.max_sequence_tokens
    held = [num_ranks * limits_of_generation(config, group, num_ranks).most_tokens for num_ranks in range(1, 9)]
    needed = strategy_of(config, group).ranks_for(8)
    for tokens in (1, longest // 3, longest // 2, longest):
        assert needed(tokens) == next(place for place, most in enumerate(held, 1) if most >= tokens)


def test_modes_are_compared_where_they_are_open_and_devices_are_described(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), *AUTO)
    assert strategy_of(config, group_of(2, 1.0, config)).compares_modes()
    assert not strategy_of(config, group_of(2, 1.0, config, "cpu")).compares_modes()
    given = config_of(str(tmp_path), "planner.sync=step", "train.activation_checkpointing=true")
    assert not strategy_of(given, group_of(2, 1.0, given)).compares_modes()
    given.planner.sync = "auto"
    assert strategy_of(given, group_of(2, 1.0, given)).compares_modes()
    assert not strategy_of(given, group_of(2, 1.0, given)).compares_modes("micro_batch")  # as at its first start
