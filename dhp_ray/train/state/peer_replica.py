"""Replicas: copies of other ranks' shards in host memory, so that the state survives the loss of a rank.

    rank 0      own shard v, v+1     replica of rank 1's v, v+1         replica_ranks = [2, 0, 1]:
    rank 1      own shard v, v+1     replica of rank 2's v, v+1         rank 0's replica is on rank 2, ...
    rank 2      own shard v, v+1     replica of rank 0's v, v+1

    update v+1 | begin: v+1 starts to travel | packs of the next step ... | finish: v+1 counts | update v+2 overwrites v

This holds if every version is mirrored; otherwise `finish` comes before the update of the next mirrored step.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic, perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.ranks import torch_peer
from dhp_ray.compatibility import all_gather_single
from dhp_ray.errors import first_line
from dhp_ray.train.engine import Engine
from dhp_ray.train.state.shards import UNFINISHED, LocalShard, Piece, ShardState

POLL_S = 0.1
"""Seconds after which a wait for an exchange looks for an abort."""

LATE_S = 2.0
"""Seconds that an exchange may still take after an abort."""


@dataclass
class DoubleBuffer:
    """Two versions of one rank's shard: the front buffer stays as it is while the back buffer is filled."""

    pieces: tuple[Piece, ...]
    front: ShardState
    back: ShardState
    counts: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))
    """The version that the back buffer will hold, and its `vision_updates`; they are sent along."""

    @classmethod
    def empty(cls, pieces: tuple[Piece, ...], size: int, pinned: bool = False, versions: int = 2) -> DoubleBuffer:
        """`versions`: 1 for a place to send from, which keeps nothing."""
        states = [ShardState.zeros(size, torch.device("cpu"), pinned) for _ in range(versions)]
        for state in states:
            state.version = UNFINISHED
        return cls(pieces, states[0], states[-1])

    def swap(self) -> None:
        """The back buffer is complete: it becomes the front buffer."""
        self.back.version, self.back.vision_updates = self.counts.tolist()
        self.front, self.back = self.back, self.front

    def complete(self) -> list[ShardState]:
        """Return the complete versions, oldest first."""
        found = {state.version: state for state in (self.back, self.front) if state.version != UNFINISHED}
        return [found[version] for version in sorted(found)]


class _Exchange(Thread):
    """A version under way: this rank's shard is sent, and replicas are received. The thread waits for both, so that it
    knows how long they took, whenever that is asked. It has no reference to an engine, because it may outlive one,
    until a peer that hangs is gone.
    """

    def __init__(
        self, begun_s: float, receives: Mapping[int, list[dist.Work]], send: Callable[[], list[dist.Work]],
        failure: str = "",
    ) -> None:
        """`failure`: why there is nothing to receive from an owner that is not among `receives`."""
        super().__init__(name="mirror", daemon=True)
        self._work = receives, send
        self._begun_s = begun_s
        self.sent = Event()  # this rank's shard is staged, and its sends are posted or have failed
        self.arrived: list[int] = []  # owners whose replicas are whole
        self.failure = failure
        self.seconds = 0.0

    def run(self) -> None:
        (receives, send), self._work = self._work, ({}, list)
        sends: list[dist.Work] = []
        try:
            sends = send()
        except Exception as error:  # of the device or of a group that is gone; `finish` raises it
            self.failure = self.failure or first_line(error)
        finally:
            del send  # it holds the group, whose sockets peers may wait on
            self.sent.set()
        self.arrived = [owner for owner, works in receives.items() if self._waited(works, f"from rank {owner}")]
        self._waited(sends, "to its replica rank")
        self.seconds = perf_counter() - self._begun_s

    def _waited(self, works: list[dist.Work], way: str) -> bool:
        """Return whether all of `works` have completed; the first failure is kept as text, which holds no group."""
        try:
            for work in works:
                work.wait()
        except Exception as error:  # `finish` raises it
            self.failure = self.failure or f"{way}: {first_line(error)}"
            return False
        return True


class PeerReplica:
    """Sends this rank's shard to its replica rank and holds the replicas of others; the picture above shows the calls.

    With `snapshot`, this rank's own shard is kept too, in the versions that were mirrored. This is needed if not every
    version is mirrored, because the engine has only the last two. Updates then need not wait for `finish`.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        replica_ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        snapshot: bool = False,
    ) -> None:
        """Every rank calls this. Rank `replica_ranks[r]` holds the replica of rank r's shard; `group` is a gloo group
        that nothing else uses.

        With one rank, or without a group, there are no replicas and every call does nothing.
        """
        self._engine, self._rank, self._group = engine, rank, group if len(replica_ranks) > 1 else None
        self._replicas: dict[int, DoubleBuffer] = {}
        self._own: DoubleBuffer | None = None
        self._exchange: _Exchange | None = None
        self._failure = ""
        self.seconds: list[float] = []
        """The seconds of each finished exchange, from `begin` until all of it had completed on this rank."""
        if self._group is None:
            return
        self._replica_peer = torch_peer(replica_ranks[rank])
        self._counts = torch.zeros(2, dtype=torch.int64)
        owners = [owner for owner, replica_rank in enumerate(replica_ranks) if replica_rank == rank]
        self._replicas = self._described(owners)
        on_device = engine.device.type != "cpu"
        self._stream: Any = torch.get_device_module(engine.device).Stream(engine.device) if on_device else None
        if on_device or snapshot:
            self._own = DoubleBuffer.empty(engine.pieces, engine.shard_size, on_device, versions=1 + snapshot)
        self._snapshot = snapshot

    def begin(self) -> None:
        """Start to send this rank's current version and to receive the replicas that it holds; returns at once.

        Every rank calls this after the same updates, each applied, and at the start of a generation. Until `finish` the
        engine may run packs and, without a snapshot, not update twice. If a peer is gone, `finish` raises; the exchange
        with the others goes on.
        """
        if self._group is None:
            return
        assert self._exchange is None, "the last exchange was not finished"
        begun_s, receives, failure = perf_counter(), dict[int, list[dist.Work]](), ""
        for owner, buffers in self._replicas.items():
            buffers.back.version = UNFINISHED
            tensors = [buffers.counts, *buffers.back.tensors().values()]
            peer = torch_peer(owner)
            try:
                receives[owner] = [_posted(dist.irecv(tensor, group=self._group, group_src=peer, tag=tag))
                                   for tag, tensor in enumerate(tensors) if tensor.numel()]
            except RuntimeError as error:  # gloo refuses to receive from a peer whose connection is closed
                failure = failure or f"from rank {owner}: {first_line(error)}"
        self._exchange = _Exchange(begun_s, receives, self._sending(self._engine.current), failure)
        self._exchange.start()

    def finish(self) -> None:
        """Wait until everything is received and sent; the received versions count from here on.

        Raises RuntimeError when a peer is gone: replicas that have arrived whole count nevertheless. Raises
        AbortedError if the exchange has not ended LATE_S after an abort: the peer's host may be gone, and its sockets
        stay open.
        """
        exchange = self._exchange
        if exchange is not None:
            self._await(exchange)
            if self._exchange is not exchange:
                raise RuntimeError(f"mirror: rank {self._rank} has left the group meanwhile")
            for owner in exchange.arrived:
                self._replicas[owner].swap()
            if exchange.failure:
                self._failure = self._failure or exchange.failure
            else:
                self.seconds.append(exchange.seconds)
            self._exchange = None
        if self._failure:  # for good: no later caller may take the replicas for whole
            raise RuntimeError(f"mirror: rank {self._rank}'s exchange broke off: {self._failure}")

    def _await(self, exchange: _Exchange) -> None:
        progress, limit_s = self._engine.progress, math.inf
        while exchange.is_alive():
            exchange.join(POLL_S)
            if progress.aborted:
                limit_s = min(limit_s, monotonic() + LATE_S)
                if monotonic() > limit_s:
                    progress.check()

    def local_shards(self) -> list[LocalShard]:
        """The replicas with the pieces of each owner, as `reshard` takes them."""
        return [LocalShard(owner, state.version, buffers.pieces, state) for owner, buffers in self._kept().items()
                for state in buffers.complete()]

    def close(self) -> None:
        """Abandon an exchange under way and drop the group; replicas that were given out stay valid."""
        self._staged()
        self._exchange, self._replicas, self._own, self._group = None, {}, None, None

    def _kept(self) -> dict[int, DoubleBuffer]:
        self._staged()
        return {**self._replicas, self._rank: self._own} if self._own is not None and self._snapshot else self._replicas

    def _described(self, owners: list[int]) -> dict[int, DoubleBuffer]:
        """Return empty replicas: each of `owners` tells its replica rank its shard's size and pieces."""
        assert self._group is not None
        own = torch.frombuffer(bytearray(pickle.dumps(self._engine.pieces)), dtype=torch.uint8)
        sizes = torch.empty(2 * self._group.size(), dtype=torch.int64)
        all_gather_single(sizes, torch.tensor([self._engine.shard_size, own.numel()]), group=self._group)
        received = {owner: torch.empty(int(sizes[2 * owner + 1]), dtype=torch.uint8) for owner in owners}
        works = [_posted(dist.irecv(buffer, group=self._group, group_src=torch_peer(owner)))
                 for owner, buffer in received.items()]
        works.append(_posted(dist.isend(own, group=self._group, group_dst=self._replica_peer)))
        for work in works:
            work.wait()
        return {owner: DoubleBuffer.empty(pickle.loads(buffer.numpy().tobytes()), int(sizes[2 * owner]))
                for owner, buffer in received.items()}

    def _sending(self, current: ShardState) -> Callable[[], list[dist.Work]]:
        """Return a function that sends `current`, on a device once it has been copied to host memory."""
        self._counts.copy_(torch.tensor([current.version, current.vision_updates]))
        own, group, peer = self._own, self._group, self._replica_peer
        tensors = [self._counts, *current.tensors().values()]
        if own is not None:
            own.back.version = UNFINISHED
            own.counts.copy_(self._counts)
            tensors = [self._counts, *own.back.tensors().values()]

        def send() -> list[dist.Work]:
            return [_posted(dist.isend(tensor, group=group, group_dst=peer, tag=tag))
                    for tag, tensor in enumerate(tensors) if tensor.numel()]

        if own is not None and self._stream is not None:
            copied, progress, staged = self._staging(own.back, current), self._engine.progress, own

            def send_staged() -> list[dist.Work]:
                copied.synchronize()
                progress.check()  # a device that was stopped has not copied it
                staged.swap()
                return send()

            return send_staged
        if own is not None:
            own.back.copy_(current)
            own.swap()
        return send

    def _staging(self, staged: ShardState, current: ShardState) -> Any:
        """Start to copy the device's state to pinned memory, while the device computes; return the event of its end."""
        device = torch.get_device_module(self._engine.device)
        self._stream.wait_stream(device.current_stream(self._engine.device))
        with device.stream(self._stream):
            for mine, theirs in zip(staged.tensors().values(), current.tensors().values(), strict=True):
                mine.copy_(theirs, non_blocking=True)
            copied = self._stream.record_event()
        if self._snapshot:
            # updates go on, and the second would overwrite what is copied
            device.current_stream(self._engine.device).wait_event(copied)
        return copied

    def _staged(self) -> None:
        """Wait until this rank's own shard is whole in the memory that it is sent from."""
        if self._exchange is not None:
            self._exchange.sent.wait()


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "every rank is in the mirror's group"
    return work
