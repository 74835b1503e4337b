from __future__ import annotations

from pathlib import Path

import numpy as np
import ray

from dhp_ray.data.stream import Batch, Stream
from dhp_ray.runtime.blocks import cut_rows, fetch_rows
from dhp_ray.runtime.messages import BlockRows
from dhp_ray.schema import Data, Model
from tests.data.samples import talk, write_rows


def batch_of(path: Path) -> Batch:
    """64 samples in two blocks, with 20 kB of picture each."""
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 80, 3), np.uint8)).save(path / "noise.png", compress_level=0)
    rows = write_rows(path / "rows.json", [{"id": str(row), "image": "noise.png", "conversations": talk("<image>", "noise")} for row in range(64)])
    stream = Stream(Data(format="llava", path=str(rows)), Model(preset="tiny"), 0)
    batch = stream.next_batch(64)
    stream.close()
    assert batch is not None
    return batch


def test_rows_are_cut_out_where_their_block_lies(ray_cluster: None, tmp_path: Path) -> None:
    batch = batch_of(tmp_path)
    here = ray.get_runtime_context().get_node_id()
    assert set(batch.nodes) == {reference for reference, _ in batch.payload.values()}
    assert set(batch.nodes.values()) == {here}
    wanted: dict[ray.ObjectRef, list[int]] = {}
    for sample in batch.samples[:5]:
        reference, row = batch.payload[sample.id]
        wanted.setdefault(reference, []).append(row)
    # A node that is gone stands for another one: the task then runs anywhere.
    near, far = ([BlockRows([reference], sorted(rows), node) for reference, rows in wanted.items()] for node in (here, "ab" * 28))
    found = {row["id"]: row for row in fetch_rows(near)}
    cut = {row["id"]: row for row in fetch_rows(far)}
    assert set(found) == set(cut) == {sample.id for sample in batch.samples[:5]}
    for name, row in found.items():
        assert all(np.array_equal(row[key], cut[name][key]) for key in row)
    own = sum(len(row["images"][0]) + row["input_ids"].nbytes + row["labels"].nbytes for row in found.values())
    assert own < ray.get(cut_rows.remote(far)).nbytes < 1.2 * own
    assert sum(ray.get(reference).nbytes for reference in wanted) > 5 * own
