"""The batch by which a run compares modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp_ray.data.errors import DataError
from dhp_ray.data.stream import Stream
from dhp_ray.runtime.driver.start import first_samples
from dhp_ray.schema import Data, Model
from tests.data.samples import talk, write_rows


def test_it_is_the_first_one_and_is_read_again_for_the_first_step(ray_cluster: None, tmp_path: Path) -> None:
    """However long its sequences are: how long they may be is not known yet."""
    rows = [{"id": f"r{number}", "conversations": talk("Count.", "one " * 50 * (1 + number))} for number in range(9)]
    stream = Stream(Data(format="llava", path=str(write_rows(tmp_path / "rows.json", rows))), Model(preset="tiny"), 0)
    samples = first_samples(stream, 9)
    assert {sample.id for sample in samples} == {f"r{number}" for number in range(9)}
    cut = sorted(sample.num_tokens for sample in samples)[4]
    stream.max_tokens = cut
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
