"""Nodes that Ray is about to take away: after a spot or preemption notice, or because somebody drains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from ray._private.state import state

LOOK_S = 1.0
"""Seconds between two queries to the head of the cluster."""


@dataclass
class Draining:
    """The ids of the nodes that are about to leave, at most LOOK_S old. Ray starts nothing new on them."""

    _nodes: frozenset[str] = frozenset()
    _asked_s: float = field(default_factory=lambda: monotonic() - LOOK_S)

    def nodes(self) -> frozenset[str]:
        if monotonic() - self._asked_s >= LOOK_S:
            self._nodes = frozenset(state.get_draining_nodes())  # Ray has no public call for it
            self._asked_s = monotonic()
        return self._nodes
