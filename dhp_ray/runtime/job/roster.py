"""The workers that the job's process owns, one per slot. Each slot has reserved room; a lost worker is replaced in its
slot.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dhp_ray.comm.device import Accelerator
from dhp_ray.config import Config
from dhp_ray.runtime.messages import RunError
from dhp_ray.runtime.waits import Waits


class Roster:
    """The slots below cluster.num_workers share one reservation, granted as a whole or not at all; each slot up to
    cluster.max_workers has its own, granted when the cluster grows. `lent`: a reservation made by someone else, whose
    bundles from the second on are for the first slots; it is not removed here.

    Raises:
        RunError: the cluster has no room for the first slots within `cluster.start_timeout_s`, although an autoscaler
            has been asked for it.
    """

    def __init__(
        self, config: Config, accelerator: Accelerator, waits: Waits, lent: PlacementGroup | None = None
    ) -> None:
        self.config, self.accelerator, self.waits = config, accelerator, waits
        self.workers: dict[int, ActorHandle] = {}
        self._starts: dict[int, ray.ObjectRef] = {}
        self._bundle = bundle_of(config, accelerator)
        self._lent = lent is not None
        self._room = lent or reserve(config, self._bundle, waits)
        self._more_room: dict[int, PlacementGroup] = {}

    def start(self) -> dict[int, ActorHandle]:
        """Start the workers of the first slots."""
        for slot in range(self.config.cluster.num_workers):
            self.replace(slot)
        return dict(self.workers)

    def grow(self) -> dict[int, ActorHandle]:
        """Create workers for the slots from cluster.num_workers on; each begins when the cluster has room for it."""
        slots = range(self.config.cluster.num_workers, self.config.cluster.max_workers)
        for slot in slots:
            self._more_room[slot] = placement_group([self._bundle])
            self.replace(slot)
        return {slot: self.workers[slot] for slot in slots}

    def replace(self, slot: int) -> ActorHandle:
        """Start a new worker in a slot, and end the one before it, if any."""
        from dhp_ray.runtime.worker.worker import CONCURRENCY_GROUPS, Worker

        if slot in self.workers:
            ray.kill(self.workers[slot])
        actor: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(Worker)  # type: ignore[call-overload]
        own = self._more_room.get(slot)
        place = 0 if own else slot + self._lent
        options = actor_options(self.config, self.accelerator, own or self._room, place)
        self.workers[slot] = actor.options(**options).remote(self.config)
        self._starts[slot] = self.workers[slot].__ray_ready__.remote()
        return self.workers[slot]

    def starting(self) -> set[int]:
        """Return the slots whose worker has no process yet, or one that is still starting."""
        starts = list(self._starts.values())
        up, _ = ray.wait(starts, num_returns=len(starts), timeout=0, fetch_local=False)
        return {slot for slot, start in self._starts.items() if start not in up}

    def close(self) -> None:
        for worker in self.workers.values():
            ray.kill(worker)
        for room in [*([] if self._lent else [self._room]), *self._more_room.values()]:
            remove_placement_group(room)


def bundle_of(config: Config, accelerator: Accelerator) -> dict[str, float]:
    """Return what a worker reserves, by Ray's resource names."""
    bundle = {"CPU": config.cluster.cpus_per_worker}
    return bundle | {accelerator.resource: 1.0} if accelerator.resource else bundle


def actor_options(config: Config, accelerator: Accelerator, room: PlacementGroup, place: int) -> dict[str, Any]:
    """Return the options of an actor that takes a bundle of `room`."""
    resource = accelerator.resource
    devices: dict[str, Any] = {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}} if resource else {}
    strategy = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=place)
    return {"scheduling_strategy": strategy, "num_cpus": config.cluster.cpus_per_worker, **devices}


def reserve(config: Config, bundle: dict[str, float], waits: Waits) -> PlacementGroup:
    """Reserve room for `cluster.num_workers` workers, granted as a whole or not at all.

    Raises:
        RunError: there is no room within `cluster.start_timeout_s`.
    """
    cluster = config.cluster
    room = placement_group([bundle] * cluster.num_workers, strategy="PACK")
    with waits.on(f"room for {cluster.num_workers} workers"):
        there = room.wait(cluster.start_timeout_s)
    if not there:
        remove_placement_group(room)
        have = ray.cluster_resources()
        wanted = ", ".join(f"{amount * cluster.num_workers:g} {name}" for name, amount in bundle.items())
        found = ", ".join(f"{have.get(name, 0.0):g} {name}" for name in bundle)
        raise RunError(
            f"cluster.num_workers={cluster.num_workers}: needs {wanted}; "
            f"the cluster has {found} in all (some may be in use), "
            f"and no more came within {cluster.start_timeout_s:g} s; lower cluster.num_workers or add nodes"
        )
    return room
