"""Reads parts of blocks in the object store: rows and columns are taken out on the node where the block lies.

A block has the rows of many ranks and steps, so a whole block would be many times what is needed here. Every node with
blocks has a server, an actor that stays: a task would wait seconds for Ray to start a process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnschedulableError, ObjectLostError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp_ray.data.reader import EncodedGrids, cut_out, read_payloads


@dataclass
class BlockRows:
    """Rows of one block in the object store. The reference is nested in a list, so that Ray passes it on unresolved.

    `node` is where the block was made (empty: unknown).
    """

    reference: list[ray.ObjectRef] = field(repr=False)
    rows: list[int]
    node: str = ""


class BlockServer:
    """Takes rows and columns out of blocks, on the node where they lie."""

    def rows(self, blocks: list[BlockRows], encoded: EncodedGrids | None = None) -> pa.Table:
        return pa.concat_tables([cut_out(ray.get(block.reference[0]), block.rows, encoded)
                                 for block in blocks]).combine_chunks()

    def columns(self, reference: list[ray.ObjectRef], names: list[str]) -> pa.Table:
        return ray.get(reference[0]).select(names)


GONE = (RayActorError, ActorUnschedulableError, ObjectLostError)
"""A server died or cannot be started, or its answer was lost, most likely with its node. Ray makes the block again."""

_servers: dict[str, ActorHandle] = {}
"""By node, the servers that this process has started or asked. A server lives as long as the process that started it.
"""


def start_server(node: str) -> ActorHandle:
    """The server of a node; it is started if there is none yet."""
    if node not in _servers:
        server: Any = ray.remote(BlockServer)
        _servers[node] = server.options(
            name=_name(node), get_if_exists=True, num_cpus=0, max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
    return _servers[node]


def columns_of(reference: ray.ObjectRef, node: str, names: list[str]) -> pa.Table:
    """These columns of a block, without the rest of it, from the server of its node or, if that is gone, from the
    server of this node.

    Starts a server that does not exist. If none answers, the whole block comes here.
    """
    for place in (node or _here(), _here()):
        try:
            return ray.get(start_server(place).columns.remote([reference], names))
        except GONE:
            _servers.pop(place, None)
    return ray.get(reference).select(names)


def fetch_rows(blocks: Sequence[BlockRows], encoded: EncodedGrids | None = None) -> Iterator[dict[str, Any]]:
    """The rows in the form of `read_payloads`. Of images and videos on other nodes, only those that are encoded here
    travel. A block on another node comes whole if its node has no server any more.
    """
    here = _here()
    elsewhere: dict[str, list[BlockRows]] = {}
    for block in blocks:
        if block.node not in ("", here):
            elsewhere.setdefault(block.node, []).append(block)
    asked = {node: _ask(node, found, encoded) for node, found in elsewhere.items()}
    for block in blocks:
        if block.node not in elsewhere:
            yield from read_payloads(ray.get(block.reference[0]), block.rows, encoded)
    for node, answer in asked.items():
        table = _answered(node, answer)
        if table is not None:
            yield from read_payloads(table, list(range(table.num_rows)))
            continue
        for block in elsewhere[node]:
            yield from read_payloads(ray.get(block.reference[0]), block.rows, encoded)


def _ask(node: str, blocks: list[BlockRows], encoded: EncodedGrids | None) -> ray.ObjectRef | None:
    """Ask a node's server for the rows; None if there is no server."""
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
