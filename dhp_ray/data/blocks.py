"""Reads parts of blocks in the object store: rows and columns are taken out on the node where the block lies.

A block has the rows of many ranks and steps, so a whole block would be many times what is needed here. Every node with
blocks has a server, an actor that stays: a task would wait seconds for Ray to start a process.

A block that was lost with its node is read again from its fragment, by whoever needs it, at once. Ray would make it
again too, but only seconds later, when its head has noticed that the node is gone.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnschedulableError, ObjectLostError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp_ray.data.errors import DataError
from dhp_ray.data.reader import UNREADABLE, EncodedGrids, cut_out, read_payloads

LOOK_S = 0.2  # seconds after which a wait looks whether a node is gone
CONNECT_S = 1.5  # that a raylet has to accept a connection: a lost packet is sent again after one second

lost: set[str] = set()  # nodes that this process was told are gone: Ray waits for several health checks

LOST = "lost"  # in place of the name of a node that is gone: its server is not asked


class BlockOrigin(NamedTuple):
    """Where a block was made (empty: unknown), and how it is read again: `source` refers to (ReadFragments, {number:
    item}), `item` is the block's number there, `rows` its first row of the item's and the one after its last.
    """

    node: str = ""
    source: ray.ObjectRef = None  # type: ignore[assignment]  # of an unknown block
    item: int = 0
    rows: tuple[int, int] = (0, 0)


UNKNOWN = BlockOrigin()


@dataclass
class BlockRows:
    """Rows of one block in the object store. The reference is nested in a list, so that Ray passes it on unresolved."""

    reference: list[ray.ObjectRef] = field(repr=False)
    rows: list[int]
    origin: BlockOrigin = UNKNOWN


class BlockServer:
    def rows(self, blocks: list[BlockRows], encoded: EncodedGrids | None = None) -> pa.Table:
        return pa.concat_tables([cut_out(ray.get(block.reference[0]), block.rows, encoded)
                                 for block in blocks]).combine_chunks()

    def columns(self, reference: list[ray.ObjectRef], names: list[str]) -> pa.Table:
        return ray.get(reference[0]).select(names)


GONE = (RayActorError, ActorUnschedulableError, ObjectLostError)
"""A server died or cannot be started, or its answer was lost, most likely with its node."""

_servers: dict[str, ActorHandle] = {}
"""By node, the servers that this process has started or asked. They live as long as the process that started them."""


def located(origins: Mapping[ray.ObjectRef, BlockOrigin]) -> dict[ray.ObjectRef, BlockOrigin]:
    """The origins of blocks, with LOST for nodes that are gone, as `fetch_rows` of another process takes them."""
    return {reference: origin._replace(node=LOST) if origin.node in lost else origin
            for reference, origin in origins.items()}


def start_servers(nodes: Iterable[str] = ()) -> None:
    """Start the servers of this node and of these, before a block waits for them: a start takes seconds."""
    for node in {_here(), *nodes}:
        start_server(node)


def start_server(node: str) -> ActorHandle:
    """The server of a node; it is started if there is none yet."""
    if node not in _servers:
        server: Any = ray.remote(BlockServer)
        _servers[node] = server.options(
            name=_name(node), get_if_exists=True, num_cpus=0, max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
    return _servers[node]


def fetch_columns(
    reference: ray.ObjectRef | None, origin: BlockOrigin, names: list[str]
) -> tuple[pa.Table, ray.ObjectRef, BlockOrigin]:
    """These columns of a block, from the server of its node, and the block. If the node is gone, or there is no block
    yet (None), it is read in this process, sooner than a server would start. DataError: its file is gone or damaged.
    """
    node = origin.node or _here()
    if reference is not None and node not in lost:
        answer: ray.ObjectRef = start_server(node).columns.remote([reference], names)
        while node not in lost and not ray.wait([answer], timeout=LOOK_S)[0]:
            pass  # another thread may be told that the node is gone, long before Ray is
        try:
            if node not in lost:
                return ray.get(answer), reference, origin
        except GONE:
            _servers.pop(node, None)
    table = read_again(origin)
    return table.select(names), ray.put(table), origin._replace(node=_here())


def read_again(origin: BlockOrigin, rows: Sequence[int] | None = None) -> pa.Table:
    """These rows of a lost block (None: all), from its fragment. DataError: the file is gone or damaged."""
    reader, items = ray.get(origin.source)
    own = range(*origin.rows)
    table: pa.Table = reader.block(items[origin.item], own if rows is None else [own[row] for row in rows])
    if table["row"][0].as_py() == UNREADABLE:
        raise DataError(f"{table['id'][0]} cannot be read again: {table['error'][0]}")
    return table


def fetch_rows(blocks: Sequence[BlockRows], encoded: EncodedGrids | None = None) -> Iterator[dict[str, Any]]:
    """The rows as of `read_payloads`; of images elsewhere only those encoded here travel. Lost rows are read again."""
    here = _here()
    elsewhere: dict[str, list[BlockRows]] = {}
    for block in blocks:
        if block.origin.node not in ("", here):
            elsewhere.setdefault(block.origin.node, []).append(block)
    asked = {node: _ask(node, found, encoded) for node, found in elsewhere.items()}
    for block in blocks:
        if block.origin.node not in elsewhere:
            yield from read_payloads(ray.get(block.reference[0]), block.rows, encoded)
    for node, answer in asked.items():
        table = _answered(node, answer)
        if table is not None:
            yield from read_payloads(table, list(range(table.num_rows)))
            continue
        for block in elsewhere[node]:
            yield from read_payloads(read_again(block.origin, block.rows), list(range(len(block.rows))), encoded)


def lose_nodes(gone: Collection[str], members: Collection[str]) -> None:
    """Take the nodes in `gone` for lost, until they are in `members`."""
    lost.update(gone)
    lost.difference_update(members)


def unnoticed_loss() -> bool:
    """Whether a node is gone and Ray does not know it yet: its tasks wait there, and it may send more."""
    return bool(lost) and bool(unnoticed(lost))


def unnoticed(nodes: Collection[str]) -> set[str]:
    """Those of the nodes that Ray takes for alive and whose raylet accepts no connection."""
    alive = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes()
             if node["Alive"] and node["NodeID"] in nodes}
    with ThreadPoolExecutor(32, "raylets") as threads:
        return {node for node, accepts in zip(alive, threads.map(_accepts, alive.values())) if not accepts}


def _accepts(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError:
        return False
    return True


def _ask(node: str, blocks: list[BlockRows], encoded: EncodedGrids | None) -> ray.ObjectRef | None:
    """Ask a node's server for the rows; None if there is no server."""
    if node == LOST:
        return None
    try:
        if node not in _servers:
            _servers[node] = ray.get_actor(_name(node))
        return _servers[node].rows.remote(blocks, encoded)
    except (ValueError, RayActorError):
        return None


def _answered(node: str, answer: ray.ObjectRef | None) -> pa.Table | None:
    """A server's answer; None if there was no server or it is gone."""
    try:
        return None if answer is None else ray.get(answer)
    except GONE:
        _servers.pop(node, None)
        return None


def _here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _name(node: str) -> str:
    return f"dhp_ray blocks of {node}"
