"""The workers of one generation: calls to all of them, and one clear error when one fails."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from dhp_ray.runtime.messages import Membership, RunError

GRACE_S = 5.0
"""A killed rank makes its peers raise first; its own death is known to Ray a little later."""


class WorkerGroup:
    """Worker actors, in rank order once they have been described."""

    def __init__(self, workers: Sequence[ActorHandle]) -> None:
        self.workers = list(workers)
        self.members: list[dict[str, Any]] = [{"pid": 0, "node_id": "?"} for _ in workers]

    def describe(self, device: str, probe: str) -> None:
        """Learn where the workers are, and number them so that the ranks of a node are neighbours."""
        found = self.call("describe", device, probe)
        nodes = list(dict.fromkeys(member["node_id"] for member in found))
        order = sorted(range(len(found)), key=lambda place: (nodes.index(found[place]["node_id"]), place))
        self.workers = [self.workers[place] for place in order]
        self.members = [found[place] for place in order]

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the fullest node: planners take neighbours of that many to share one."""
        nodes = [member["node_id"] for member in self.members]
        return max(nodes.count(node) for node in nodes)

    @property
    def memory_bytes(self) -> int:
        """Device memory that every rank has at least. The ranks of a node share its memory on the CPU."""
        return min(member["memory_bytes"] // (self.ranks_per_node if member["device"] == "cpu" else 1) for member in self.members)

    def membership(self) -> list[dict[str, Any]]:
        """The ranks of this generation, as cluster.json lists them."""
        return [{"rank": rank, **{name: member[name] for name in ("pid", "node_id", "device")}} for rank, member in enumerate(self.members)]

    def join(self, generation: int, store: tuple[str, int], checkpoint: str) -> list[int]:
        """All workers enter a generation; the state version of each."""
        calls = [worker.join.remote(Membership(rank, len(self.workers), generation, *store), checkpoint) for rank, worker in enumerate(self.workers)]
        return self.collect(calls)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.collect(self.start(method, *arguments))

    def start(self, method: str, *arguments: Any) -> list[ray.ObjectRef]:
        return [getattr(worker, method).remote(*arguments) for worker in self.workers]

    def collect(self, calls: Sequence[ray.ObjectRef]) -> list[Any]:
        """Results by rank.

        Raises:
            RunError: a rank died or raised; the message names it and gives its own words.
        """
        pending = {call: rank for rank, call in enumerate(calls)}
        results: dict[int, Any] = {}
        while pending:
            for call in ray.wait(list(pending), num_returns=1)[0]:
                rank = pending.pop(call)
                try:
                    results[rank] = ray.get(call)
                except RayActorError:
                    raise RunError(self._death(rank)) from None
                except RayTaskError as error:
                    raise RunError(self._root_cause(rank, error, pending)) from None
        return [results[rank] for rank in range(len(calls))]

    def _root_cause(self, rank: int, error: RayTaskError, pending: dict[ray.ObjectRef, int]) -> str:
        """A peer's death when there is one, else what the first rank to raise said."""
        deadline = monotonic() + GRACE_S
        while pending and monotonic() < deadline:
            for call in ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - monotonic()))[0]:
                other = pending.pop(call)
                try:
                    ray.get(call)
                except RayActorError:
                    return self._death(other)
                except RayTaskError:
                    continue  # a consequence of the first
        return f"rank {rank} ({self._place(rank)}): {self._words(error)}"

    def _death(self, rank: int) -> str:
        return f"rank {rank} ({self._place(rank)}) died"

    def _place(self, rank: int) -> str:
        return f"pid {self.members[rank]['pid']} on node {str(self.members[rank]['node_id'])[:8]}"

    @staticmethod
    def _words(error: RayTaskError) -> str:
        cause = getattr(error, "cause", None) or error
        text = (str(cause).strip().splitlines() or [""])[0]
        return text if isinstance(cause, (ValueError, OSError, RunError)) and text else f"{type(cause).__name__}: {text}"
