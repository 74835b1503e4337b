"""A Ray cluster of several nodes on this machine: each is a raylet with its processes, comes when told to, and may
vanish with all of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from types import TracebackType
from typing import Any

from tests.integration.faults import descendants, kill

SYSTEM = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5, "worker_niceness": 0}
"""As in cluster.yaml."""


class Nodes:
    """Use it in a process of its own, from the main thread: Ray has one temporary folder and one current cluster a
    process.

    The head has `head_cpus`, too few for a worker; `address` is for RAY_ADDRESS.
    """

    def __init__(self, head_cpus: int) -> None:
        # short: sockets are made below it
        self._folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray_", dir="/tmp")
        from ray.cluster_utils import Cluster  # reads RAY_TMPDIR

        try:
            self._cluster = Cluster(initialize_head=True,
                                    head_node_args={"num_cpus": head_cpus, "include_dashboard": False,
                                                    "_system_config": SYSTEM})
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.address: str = self._cluster.address
        self.nodes: list[Any] = []

    def add(self, cpus: int) -> Any:
        self.nodes.append(self._cluster.add_node(num_cpus=cpus))
        return self.nodes[-1]

    def pids(self, node: Any) -> list[int]:
        """The raylet first, then all processes that it has started."""
        raylet = node.all_processes["raylet"][0].process.pid
        return [raylet, *sorted(descendants(raylet) - {raylet})]

    def vanish(self, node: Any) -> float:
        """End a node's processes all at once, as when a machine is lost; when (seconds since the epoch)."""
        moment = kill(*self.pids(node))
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        return moment

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
