"""The submitted job's process: hosts the rendezvous store, owns the workers, restarts the driver, shows the run."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dhp_ray.comm.device import Accelerator
from dhp_ray.config import Config, ConfigError, check_device, in_upload, make_absolute
from dhp_ray.errors import first_line
from dhp_ray.runtime.job.console import Console
from dhp_ray.runtime.job.head import connect, disconnect
from dhp_ray.runtime.job.preflight import device_of, index_ahead
from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.runtime.messages import Notice, Replace, RunError, RunFinished, RunStarted, death_of
from dhp_ray.runtime.records.lease import Lease
from dhp_ray.runtime.waits import Waits

if TYPE_CHECKING:
    from torch.distributed import TCPStore


MAX_DRIVERS = 20
"""The driver actors in a row that may be lost without a committed step: one that dies at each start is no accident."""


def train(config: Config, lease: Lease, signals: ShutdownSignals) -> int:
    """Train as configured, or until a signal; return the exit status. Failures are one line on standard error."""
    console = Console(sys.stdout)
    signals.say = lambda text: console.show(Notice(text))

    def work(waits: Waits) -> int:
        last = run(config, lease, console, waits, signals, leaves=True)
        if last.error:
            print(f"error: {last.error}", file=sys.stderr)
        return last.status

    return on_cluster(config, console.show, signals, work)


def on_cluster(config: Config, say: Callable[[Notice], None], signals: ShutdownSignals, work: Callable[[Waits], int]
               ) -> int:
    """Join the cluster, and return the exit status of `work`, or of a signal or error that ends it; errors are one line
    on standard error. `say` shows waits.
    """
    waits = Waits(say)
    try:
        if not in_upload(Path.cwd()):
            make_absolute(config)
        with waits.on("the Ray cluster"):
            connect()
        signals.take_signals()  # ray.init installs its own SIGTERM handler, which exits at once
        return work(waits)
    except (KeyboardInterrupt, SystemExit):  # the latter comes from Ray's handler
        signals.tell()
        return 1
    except (ConfigError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        signals.over()
        waits.close()
        disconnect()


def run(
    config: Config, lease: Lease, console: Console, waits: Waits, signals: ShutdownSignals,
    lent: PlacementGroup | None = None, *, leaves: bool
) -> RunFinished:
    """Train on the cluster that this process has joined; return how the run ended. `lent`: see `WorkerPool`. `leaves`:
    this process leaves the cluster, which ends the workers, without the traceback of one that still imports.
    """
    with waits.on("the index of the data", shows_itself=True):
        index_ahead(config.data)
    accelerator = device_of(config.cluster.device, ray.cluster_resources())
    config.cluster.device = accelerator.name
    check_device(config)
    pool = WorkerPool(config, accelerator, waits, lent)
    host = ray.util.get_node_ip_address()
    stores: list[TCPStore] = []
    try:
        for slot in range(config.cluster.num_workers):
            pool.replace(slot)
        lost = 0
        while lost < MAX_DRIVERS:
            # each driver has its own: it may use numbers of generations that a lost driver has tried
            stores.append(rendezvous_store(host))
            steps = console.steps
            last = _drive(config, lease, pool, (host, stores[-1].port), console, waits, signals,
                          takes_over=len(stores) > 1)
            if last:
                return last
            lost = lost + 1 if console.steps == steps else 1
        raise RunError(f"the driver actor died {MAX_DRIVERS} times without a step in between; start the same command "
                       "again to go on from the newest checkpoint")
    finally:
        console.close()
        if not leaves:
            pool.close()
        stores.clear()


def rendezvous_store(host: str) -> TCPStore:
    """Return a store on a free port of `host`, and only there: by default, TCPStore listens on every interface."""
    from torch.distributed import TCPStore  # seconds to import: after the configuration has been checked

    try:
        server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                      backlog=4096)
    except OSError as error:
        raise RunError(f"the rendezvous store cannot listen at {host}, the node's address in Ray: {first_line(error)}; "
                       "allowed: an address of this machine (`ray start --node-ip-address`)") from None
    port = server.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def _drive(config: Config, lease: Lease, pool: WorkerPool, store: tuple[str, int], console: Console, waits: Waits,
           signals: ShutdownSignals, takes_over: bool) -> RunFinished | None:
    """Run under one driver actor; returns None if it was lost."""
    starting_driver = ExitStack()  # until its first message
    starting_driver.enter_context(waits.on("the driver actor to start"))
    starting = pool.starting() if takes_over else set()
    workers = {slot: worker for slot, worker in pool.workers.items() if slot not in starting}
    newcomers = {slot: pool.workers[slot] for slot in starting} if takes_over else pool.grow()
    driver = start_driver(config, workers, store, takes_over, lease)
    try:
        if takes_over:
            signals.hand_over(driver.stop.remote)
        for slot, worker in newcomers.items():
            driver.offer.remote(slot, worker)
        for reference in driver.run.remote():
            message = ray.get(reference)
            starting_driver.close()
            if waited := waits.taken():
                driver.waited.remote(waited)
            if isinstance(message, RunFinished):
                console.show(message)
                return message
            if isinstance(message, RunStarted):
                signals.hand_over(driver.stop.remote)
            if isinstance(message, Replace):
                if signals.reason:
                    continue  # a run that is to end waits for no newcomer
                driver.offer.remote(message.slot, pool.replace(message.slot))
            else:
                console.show(message)
    except RayTaskError as error:
        raise RunError(f"the driver failed: {first_line(getattr(error, 'cause', None) or error)}") from None
    except RayError as error:
        if getattr(error, "actor_init_failed", False):
            raise RunError(f"the driver failed: {death_of(error)}") from None
        console.show(Notice(f"the driver actor died, another one takes over: {death_of(error)}"))
        return None
    finally:
        starting_driver.close()
        ray.kill(driver)
    raise RunError("the driver ended without a word")


def start_driver(config: Config, workers: dict[int, Any], store: tuple[str, int], takes_over: bool, lease: Lease
                 ) -> Any:
    from dhp_ray.runtime.driver.actor import CONCURRENCY_GROUPS, DriverActor

    actor: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(DriverActor)  # type: ignore[call-overload]
    # by name; otherwise the actor would go into the reservation of this process, which has no such resource
    return actor.options(num_cpus=0, scheduling_strategy="DEFAULT",
                         resources={"node:__internal_head__": 0.001}).remote(config, workers, store, takes_over, lease)


class WorkerPool:
    """The slots below cluster.num_workers share one reservation, granted as a whole; each up to cluster.max_workers has
    its own, granted when the cluster grows. `lent`: somebody else's, whose bundles from the second on are for the first
    slots.
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
        worker = self.workers[slot] = actor.options(**options).remote(self.config)
        self._starts[slot] = worker.__ray_ready__.remote()
        return worker

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
    """Reserve room for all workers, as a whole, or refuse to start after `cluster.start_timeout_s`."""
    cluster = config.cluster
    room = placement_group([bundle] * cluster.num_workers, strategy="PACK")
    with waits.on(f"room for {cluster.num_workers} workers"):
        there = room.wait(cluster.start_timeout_s)
    if not there:
        remove_placement_group(room)
        have = ray.cluster_resources()
        wanted = ", ".join(f"{amount * cluster.num_workers:g} {name}" for name, amount in bundle.items())
        found = ", ".join(f"{have.get(name, 0.0):g} {name}" for name in bundle)
        raise RunError(f"cluster.num_workers={cluster.num_workers}: needs {wanted}; the cluster has {found} in all "
                       f"(some may be in use), and no more came within {cluster.start_timeout_s:g} s; lower "
                       "cluster.num_workers or add nodes")
    return room
