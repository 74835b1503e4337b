from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from dhp_ray.data import blocks
from dhp_ray.data.blocks import BlockRows, columns_of, fetch_rows, start_server
from dhp_ray.data.stream import Batch, Stream
from dhp_ray.schema import Data, Model
from tests.data.samples import talk, write_rows


def batch_of(path: Path, num_images: int = 1) -> Batch:
    """64 samples in two blocks, with as many pictures of 20 kB each."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 255, (80, 80, 3), np.uint8)
    Image.fromarray(noise).save(path / "noise.png", compress_level=0)
    conversation = talk("<image>" * num_images, "noise")
    rows = write_rows(path / "rows.json", [{"id": str(row), "image": ["noise.png"] * num_images,
                                            "conversations": conversation} for row in range(64)])
    stream = Stream(Data(format="llava", path=str(rows)), Model(preset="tiny"), 0)
    batch = stream.next_batch(64)
    stream.close()
    assert batch is not None
    return batch


def wanted_of(batch: Batch, node: str) -> list[BlockRows]:
    """Some rows of each block, as if it lay on `node`."""
    wanted: dict[ray.ObjectRef, list[int]] = {}
    for sample in batch.samples[:5]:
        reference, row = batch.payload[sample.id]
        wanted.setdefault(reference, []).append(row)
    return [BlockRows([reference], sorted(rows), node) for reference, rows in wanted.items()]


def assert_same_rows(found: Iterable[dict[str, Any]], others: Iterable[dict[str, Any]]) -> None:
    ours, theirs = ({row["id"]: row for row in rows} for rows in (found, others))
    assert ours.keys() == theirs.keys()
    assert len(ours) == 5
    for name, row in ours.items():
        assert all(np.array_equal(row[key], theirs[name][key]) for key in row)


def test_rows_are_taken_out_where_their_block_lies(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(tmp_path)
    here = ray.get_runtime_context().get_node_id()
    assert set(batch.nodes) == {reference for reference, _ in batch.payload.values()}
    assert set(batch.nodes.values()) == {here}
    wanted = wanted_of(batch, here)
    near = list(fetch_rows(wanted))
    monkeypatch.setattr(blocks, "_here", lambda: "another node")
    server = start_server(here)
    assert_same_rows(near, fetch_rows(wanted))
    own = sum(len(row["images"][0]) + row["input_ids"].nbytes + row["labels"].nbytes for row in near)
    assert own < ray.get(server.rows.remote(wanted)).nbytes < 1.2 * own
    assert sum(ray.get(block.reference[0]).nbytes for block in wanted) > 5 * own
    monkeypatch.setattr(blocks, "_servers", {})
    assert_same_rows(near, fetch_rows(wanted))  # as a worker does, which has not started the server
    lengths = columns_of(wanted[0].reference[0], here, ["id", "text_tokens"])
    assert lengths.column_names == ["id", "text_tokens"]
    assert blocks._servers[here] == server, "a node has one server"


def test_images_that_another_rank_encodes_do_not_travel(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 kB each; grids, labels and the like come as they are, also where no image is encoded here."""
    batch = batch_of(tmp_path, num_images=4)
    here = ray.get_runtime_context().get_node_id()
    wanted = wanted_of(batch, here)
    whole = {row["id"]: row for row in fetch_rows(wanted)}
    encoded = {name: tuple(image < number for image in range(4)) for number, name in enumerate(whole)}  # 0 to 4 of 4
    near = list(fetch_rows(wanted, encoded))
    monkeypatch.setattr(blocks, "_here", lambda: "another node")
    server = start_server(here)
    for rows in (near, list(fetch_rows(wanted, encoded)), list(fetch_rows(wanted_of(batch, "ab" * 28), encoded))):
        assert len(rows) == 5
        for row in rows:
            expected = whole[row["id"]]
            assert row["images"] == [image if needed else None
                                     for image, needed in zip(expected["images"], encoded[row["id"]], strict=True)]
            assert all(np.array_equal(row[key], expected[key]) for key in row if key != "images")
    one_image = len(next(iter(whole.values()))["images"][0])
    received = ray.get(server.rows.remote(wanted, encoded)).nbytes
    assert 10 * one_image < received < 10.5 * one_image, "0 + 1 + 2 + 3 + 4 images of 5 samples, and their tokens"
    assert ray.get(server.rows.remote(wanted)).nbytes >= 20 * one_image


def test_a_block_comes_whole_where_its_node_has_no_server(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(tmp_path)
    here = ray.get_runtime_context().get_node_id()
    near = list(fetch_rows(wanted_of(batch, here)))
    gone = wanted_of(batch, "ab" * 28)
    assert_same_rows(near, fetch_rows(gone))
    assert columns_of(gone[0].reference[0], gone[0].node, ["id"]).num_rows == 32
    monkeypatch.setattr(blocks, "_here", lambda: "another node")
    server = start_server(here)
    ray.get(server.rows.remote(wanted_of(batch, here)))
    ray.kill(server)
    assert_same_rows(near, fetch_rows(wanted_of(batch, here)))
    monkeypatch.undo()
    assert columns_of(gone[0].reference[0], here, ["id"]).num_rows == 32
