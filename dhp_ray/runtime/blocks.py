"""A rank's rows out of blocks: those on its own node are read where they lie, the others cut out on the nodes that hold them.

A block has the rows of many ranks and steps: brought here whole, it would be many times what the rank needs of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dhp_ray.data.reader import read_payloads
from dhp_ray.runtime.messages import BlockRows


def fetch_rows(blocks: Sequence[BlockRows]) -> Iterator[dict[str, Any]]:
    """The rows, as `read_payloads` gives them. The process that calls owns what is cut out, so that nothing of it passes through the driver."""
    here = ray.get_runtime_context().get_node_id()
    elsewhere: dict[str, list[BlockRows]] = {}
    for block in blocks:
        if block.node not in ("", here):
            elsewhere.setdefault(block.node, []).append(block)
    # Soft: where the node is gone, Ray reads the blocks again somewhere, and they are cut there.
    cuts = [cut_rows.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)).remote(found) for node, found in elsewhere.items()]
    for block in blocks:
        if block.node in ("", here):
            yield from read_payloads(ray.get(block.reference[0]), block.rows)
    for cut in cuts:
        table = ray.get(cut)
        yield from read_payloads(table, list(range(table.num_rows)))


@ray.remote(num_cpus=0)
def cut_rows(blocks: list[BlockRows]) -> pa.Table:
    """The rows of these blocks alone, as a table of its own."""
    return pa.concat_tables([ray.get(block.reference[0]).take(block.rows) for block in blocks]).combine_chunks()
