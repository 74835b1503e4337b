"""Reading beside workers that have reserved every CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from dhp_ray.data.stream import Batch, Stream
from dhp_ray.schema import Data, Model
from tests.data.samples import talk, write_rows

LIMIT_S = 60.0


@pytest.fixture
def no_free_cpu(ray_cluster: None) -> Iterator[None]:
    reserved = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    assert reserved.wait(30)
    yield
    remove_placement_group(reserved)


def test_rows_are_read_where_every_cpu_is_reserved(no_free_cpu: None, tmp_path: Path) -> None:
    rows = [{"id": f"r{number}", "conversations": talk("Count.", "one")} for number in range(40)]
    path = write_rows(tmp_path / "rows.json", rows)
    stream = Stream(Data(format="llava", path=str(path)), Model(preset="tiny"), seed=0)
    batches: list[Batch | None] = []
    reading = Thread(target=lambda: batches.append(stream.next_batch(40)), daemon=True)
    reading.start()  # in a thread: what waits for a CPU waits for ever
    reading.join(LIMIT_S)
    assert batches, f"no batch within {LIMIT_S:g} s"
    assert batches[0] is not None
    assert len(batches[0].samples) == 40
    stream.close()
