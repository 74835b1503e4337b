from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from dhp_ray.data import blocks
from dhp_ray.data.blocks import (
    LOST,
    BlockOrigin,
    BlockRows,
    fetch_columns,
    fetch_rows,
    located,
    lose_nodes,
    start_server,
    unnoticed,
    unnoticed_loss,
)
from dhp_ray.data.errors import DataError
from dhp_ray.data.reader import LENGTH_COLUMNS
from dhp_ray.data.stream import GlobalBatch, Stream
from dhp_ray.schema import Data, Model
from tests.data.samples import talk, write_rows


def batch_of(path: Path, num_images: int = 1) -> GlobalBatch:
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


def wanted_of(batch: GlobalBatch, node: str) -> list[BlockRows]:
    """Some rows of each block, as if it lay on `node`."""
    wanted: dict[ray.ObjectRef, list[int]] = {}
    for sample in batch.samples[:5]:
        reference, row = batch.payload[sample.id]
        wanted.setdefault(reference, []).append(row)
    return [BlockRows([reference], sorted(rows), batch.origins[reference]._replace(node=node))
            for reference, rows in wanted.items()]


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
    assert set(batch.origins) == {reference for reference, _ in batch.payload.values()}
    assert {origin.node for origin in batch.origins.values()} == {here}
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
    lengths, block, _ = fetch_columns(wanted[0].reference[0], wanted[0].origin, ["id", "text_tokens"])
    assert block == wanted[0].reference[0]
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


def test_a_block_that_is_lost_with_its_node_is_read_again_at_once(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it never comes back: the block of the lost node is a reference that nobody will ever set."""
    batch = batch_of(tmp_path, num_images=4)
    here = ray.get_runtime_context().get_node_id()
    encoded = {sample.id: (True, False, True, False) for sample in batch.samples}
    for images in (None, encoded):
        near = list(fetch_rows(wanted_of(batch, here), images))
        for node in ("ab" * 28, LOST):
            gone = [replace(block, reference=[never.remote()]) for block in wanted_of(batch, node)]
            assert_same_rows(near, fetch_rows(gone, images))
    origin = gone[0].origin._replace(node="ab" * 28)
    lengths, block, origin = fetch_columns(gone[0].reference[0], origin, LENGTH_COLUMNS)
    assert origin.node == here
    assert lengths == ray.get(wanted_of(batch, here)[0].reference[0]).select(LENGTH_COLUMNS)
    again = [BlockRows([block], gone[0].rows, origin), *wanted_of(batch, here)[1:]]
    assert_same_rows(near, fetch_rows(again, encoded))
    monkeypatch.setattr(blocks, "_here", lambda: "another node")
    server = start_server(here)
    ray.get(server.rows.remote(wanted_of(batch, here)))
    ray.kill(server)
    assert_same_rows(near, fetch_rows(wanted_of(batch, here), encoded))


def test_blocks_of_lost_nodes_are_read_again_until_these_have_members() -> None:
    origins = {"first": BlockOrigin("a", None, 1), "second": BlockOrigin("b", None, 2)}
    assert located(origins) == origins  # type: ignore[arg-type]
    lose_nodes({"a", "c"}, ["b", "c"])
    assert located(origins) == origins | {"first": BlockOrigin(LOST, None, 1)}  # type: ignore[arg-type]
    lose_nodes((), ["a", "b"])
    assert located(origins) == origins  # type: ignore[arg-type]


def test_a_wait_for_a_server_ends_once_its_node_is_known_to_be_gone(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would let it wait until its own head has noticed."""
    batch = batch_of(tmp_path)
    here = ray.get_runtime_context().get_node_id()
    [block, *_] = wanted_of(batch, "far")
    asked = []

    def columns(*arguments: Any) -> ray.ObjectRef:
        asked.append(arguments)
        lost.add("far")  # as the thread of the recovery does
        return never.remote()

    monkeypatch.setattr(blocks, "lost", lost := set())
    monkeypatch.setattr(blocks, "_servers", {"far": SimpleNamespace(columns=SimpleNamespace(remote=columns))})
    lengths, again, origin = fetch_columns(block.reference[0], block.origin, LENGTH_COLUMNS)
    assert asked == [(block.reference, LENGTH_COLUMNS)]
    assert lengths == ray.get(block.reference[0]).select(LENGTH_COLUMNS)
    assert ray.get(again) == ray.get(block.reference[0])
    assert origin == block.origin._replace(node=here)


def test_a_lost_block_whose_file_is_gone_is_one_line(ray_cluster: None, tmp_path: Path) -> None:
    batch = batch_of(tmp_path)
    (tmp_path / "rows.json").unlink()
    with pytest.raises(DataError, match=r"rows\.json cannot be read again: .*No such file"):
        list(fetch_rows(wanted_of(batch, LOST)))
    [lost, *_] = wanted_of(batch, "ab" * 28)
    with pytest.raises(DataError, match=r"^[^ ]*rows\.json cannot be read again: .*No such file"):
        fetch_columns(never.remote(), lost.origin, LENGTH_COLUMNS)


@ray.remote(num_cpus=1000)
def never() -> None:
    """There is no such node."""


def test_ray_notices_a_loss_later_than_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has lost its workers may be there all the same."""
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        port = raylet.getsockname()[1]
        there = {"NodeID": "far", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
        monkeypatch.setattr(ray, "nodes", lambda: [there | {"Alive": alive}])
        monkeypatch.setattr(blocks, "lost", set())
        alive = True
        assert not unnoticed_loss()
        lose_nodes({"far"}, ())
        assert not unnoticed_loss()
    assert unnoticed_loss()
    assert unnoticed({"far", "near"}) == {"far"}
    alive = False
    assert not unnoticed_loss()
