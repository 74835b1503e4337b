"""The engine of `sync=step` with `train.sharding=node`: parameters and gradient sums once per node, optimizer state
sharded over all ranks.

    packs      unit k: slices of the node's ranks --read--> parameters -> gradients --add--> sums in the slices
    update     sums of every node -- all-to-all --> my buckets' slices -- AdamW --> version v+1
               version v+1 -- all-to-all --> slices of every node | barrier of the node

Reads and adds are one-sided: inside a pack, a rank waits only for the ranks of that pack. Shards are those of the flat
engine, so that a state can move between the two. The idea is ODC (arXiv 2601.19362), within a node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.node_memory import share_memory
from dhp_ray.comm.progress import Progress
from dhp_ray.model.adapter import ModelAdapter, NodeUnits
from dhp_ray.model.weights import Interval
from dhp_ray.train.engine import Update
from dhp_ray.train.flat_shards import FlatShards
from dhp_ray.train.loading import move_buffers, place
from dhp_ray.train.state.buckets import Bucket
from dhp_ray.train.state.node_exchange import Arriving, NodeExchange
from dhp_ray.train.state.node_state import NodeState
from dhp_ray.train.state.optimizer import UNFINISHED, OptimizerSettings, ShardState
from dhp_ray.train.state.slices import Slices, Unit
from dhp_ray.train.unit_buffers import ModelUnit, Rows, UnitBuffers, units_of

IN_FLIGHT = 2
"""Exchanges under way at a time."""


class Node(NamedTuple):
    """The nodes, as one rank sees them: the ranks of each node, and the group of its own node's ranks (None: there is
    one).
    """

    nodes: Sequence[Sequence[int]]
    group: dist.ProcessGroup | None


class NodeEngine(FlatShards):
    """Owns an adapter's parameters: between uses they have no memory of their own. For a model that has no files,
    `originals` has all frozen parameters.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        settings: OptimizerSettings,
        world_group: dist.ProcessGroup | None,
        world_size: int,
        rank: int,
        node: Node,
        device: torch.device,
        precision: str = "fp32",
        bucket_bytes: int = 64 * 2**20,
        initialize: bool = True,
        originals: Mapping[str, Tensor] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Every rank calls this. See FlatEngine."""
        super().__init__(adapter.module, settings, world_group, world_size, rank, precision, bucket_bytes, originals,
                         progress, adapter.weights, device)
        self._node: Node = node
        self._detachments: list[Callable[[], None]] = []
        if initialize:
            self._fill_shard()
        else:
            self.current.version = UNFINISHED
        if self._weights is None:  # nothing else has them once they have left the module
            self.originals |= {name: parameter.detach().cpu() for name, parameter in self.frozen.items()
                               if name not in self.originals}
        try:
            units = units_of(adapter)
            self._set_up(units, [unit.layout for unit in units])
            self._attach(adapter.node_units(), units)
            if initialize:
                self.all_gather_parameters()
        except BaseException:
            self.release()  # hooks on the module would keep memory and groups
            raise

    def _set_up(self, units: Sequence[ModelUnit], layouts: Sequence[Unit]) -> None:
        """Lay out the units over the node, and write the frozen parameters."""
        members = next(ranks for ranks in self._node.nodes if self.rank in ranks)
        values = Slices(layouts, len(members), self.compute_type.itemsize, trained_only=False)
        sums = Slices(layouts, len(members), 4, trained_only=True)
        memory = share_memory(self.device, NodeState.num_bytes(values, sums, self.compute_type), members, self.rank,
                              self._node.group)
        self._detachments.append(memory.close)
        self.state = NodeState(layouts, memory, values, sums, self.compute_type)
        self._detachments.append(self.state.close)
        self._write_frozen()
        self.buffers = UnitBuffers(self.state, units, self.compute_type, self.device)
        self._detachments.append(self.buffers.remove)
        self._exchange = NodeExchange(self.layout, layouts, self._node.nodes, self.rank, self.compute_type, self.group)
        self._shard_gradient = torch.zeros_like(self.current.value)
        move_buffers(self.module, self.device)

    def _attach(self, modules: NodeUnits, units: Sequence[ModelUnit]) -> None:
        """Let the embedding read and add rows, and the head add its gradient in fp32."""
        table, weight = modules.embedding.weight, modules.head.linear.weight
        of_table, of_head = (next(number for number, unit in enumerate(units) if parameter in unit.own())
                             for parameter in (table, weight))
        name = next(name for name, parameter in units[of_head].parameters.items() if parameter is weight)
        head, embedding, skipped = modules.head, modules.embedding, modules.embedding.padding_idx

        def rows_of(input: Tensor) -> Tensor:
            rows: Tensor = Rows.apply(table, input, self.state, of_table, skipped, self.buffers.count)
            return rows

        def detach() -> None:
            head.take_gradient = None
            del embedding.forward  # the class's is in force again

        head.take_gradient = lambda gradient: self.buffers.add(of_head, {name: gradient})
        embedding.forward = rows_of  # type: ignore[method-assign]
        self._detachments.append(detach)

    def _write_frozen(self) -> None:
        """Write this rank's slices of frozen parameters, from their files or as they came."""
        stored = []
        for name, parameter in self.frozen.items():
            mine, start = self.state.own_slice(name, parameter.numel())
            if self._weights is not None:
                stored.append(Interval(name, start, mine))
            else:
                mine.copy_(self.originals[name].view(-1)[start : start + len(mine)])
        if self._weights is not None:
            self._weights.read(interval for interval in stored if len(interval.into))

    def _frozen_value(self, name: str) -> Tensor:
        if name in self.originals:
            return self.originals[name]
        return self.state.value(name, self.frozen[name].numel()).view(self.frozen[name].shape)

    def zero_gradients(self) -> None:
        """There is nothing to do: sums are zeroed as soon as they have been reduced, before any rank begins a step."""

    def end_pack(self) -> None:
        self.buffers.end_pack()

    def update(self, num_valid_tokens: int, learning_rate_factor: float = 1.0, uses_vision: bool = True) -> Update:
        """See Engine. All ranks have ended their packs before any rank calls this, because a collective comes in
        between. If it raises, gradients may be lost: the step must run again.
        """
        update = super().update(num_valid_tokens, learning_rate_factor, uses_vision)
        if not update.applied:  # sums are zeroed; no rank may add to them before that
            self._meet()
        return update

    def _detach(self) -> None:
        for detach in reversed(self._detachments):
            detach()
        self._detachments = []
        for name, parameter in (self.parameters | self.frozen).items():
            # the next engine over this module takes frozen values from files, or from here
            kept = self.originals.get(name) if self._weights is None else None
            empty = torch.zeros((), dtype=self.compute_type, device=self.device).expand(parameter.shape)
            place(parameter, empty if kept is None else kept)
        self._shard_gradient = torch.zeros(0, device=self.device)
        self._node = self._exchange = cast(Any, None)  # they refer to the groups

    def _reduce(self) -> float:
        """Sum the gradients bucket by bucket over all nodes; then zero the node's sums, for the next step."""
        self._shard_gradient.zero_()
        arriving: deque[Arriving] = deque()
        for number, bucket in enumerate(self.layout.buckets):
            total = self._shard_gradient[bucket.shard]
            arriving.append(self._exchange.begin_sums(number, self.state.own_sums, total))
            self._take(arriving, IN_FLIGHT)
        self._take(arriving, 0)
        self.state.own_sums.zero_()
        return self._norm(self._shard_gradient[bucket.shard] for bucket in self.layout.buckets)

    def _reduced_gradient(self, bucket: Bucket) -> Tensor:
        return self._shard_gradient[bucket.shard]

    def _all_gather(self, state: ShardState) -> Iterator[Bucket]:
        """Bring the slices up to `state`. Bucket k moves while k + 1 is written."""
        arriving: deque[Arriving] = deque()
        for number, bucket in enumerate(self.layout.buckets):
            yield bucket
            values = state.value[bucket.shard].to(self.compute_type)
            arriving.append(self._exchange.begin_values(number, values, self.state.own_values))
            self._take(arriving, IN_FLIGHT)
        self._take(arriving, 0)
        self._meet()

    def _take(self, arriving: deque[Arriving], most: int) -> None:
        """Wait until at most `most` exchanges are under way, and take the results of the others."""
        while len(arriving) > most:
            arrived = arriving.popleft()
            self._wait(arrived.work)
            arrived.take()

    def _meet(self) -> None:
        """Wait until all ranks of the node have arrived: their slices are written and their sums zero."""
        self.progress.synchronize()
        with self.progress.waiting("the other ranks of the node"):
            if self._node.group is not None:
                dist.barrier(group=self._node.group)
