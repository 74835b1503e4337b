"""The process of the submitted job: it hosts the rendezvous store, owns the workers, restarts the driver, and shows the
run.

Workers belong to this process, so they outlive a driver actor.
"""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from dhp_ray.comm.device import Accelerator
from dhp_ray.config import Config, ConfigError
from dhp_ray.constraints import check_device, in_upload, make_absolute
from dhp_ray.errors import first_line
from dhp_ray.runtime.job.console import Console
from dhp_ray.runtime.job.ending import Ending
from dhp_ray.runtime.job.head import connect, disconnect
from dhp_ray.runtime.job.indexing import index_ahead
from dhp_ray.runtime.job.preflight import device_of
from dhp_ray.runtime.job.roster import Roster
from dhp_ray.runtime.messages import Notice, Replace, RunError, RunFinished, RunStarted
from dhp_ray.runtime.records.lease import Lease
from dhp_ray.runtime.waits import Waits

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from torch.distributed import TCPStore

MAX_DRIVERS = 20
"""The number of driver actors in a row that may be lost without a committed step; one that dies at each start is no
accident.
"""


def train(config: Config, lease: Lease, ending: Ending) -> int:
    """Train as configured, or until `ending` receives a signal; return the exit status. Every failure is one line on
    standard error. `lease`: of the run folder.
    """
    console = Console(sys.stdout)
    waits = Waits(console.show)
    ending.say = lambda text: console.show(Notice(text))
    try:
        if not in_upload(Path.cwd()):
            make_absolute(config)
        with waits.on("the Ray cluster"):
            connect()
        ending.take_signals()  # ray.init installs its own SIGTERM handler, which exits at once
        last = run(config, lease, console, waits, ending, leaves=True)
        if last.error:
            print(f"error: {last.error}", file=sys.stderr)
        return last.status
    except (KeyboardInterrupt, SystemExit):  # the latter comes from Ray's handler
        console.close()
        ending.tell()
        return 1
    except (ConfigError, RunError) as error:
        console.close()
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        ending.over()
        waits.close()
        disconnect()


def run(
    config: Config, lease: Lease, console: Console, waits: Waits, ending: Ending, lent: PlacementGroup | None = None,
    *, leaves: bool
) -> RunFinished:
    """Train on the cluster that this process has joined; return how the run ended. `lent`: see `Roster`. `leaves`:
    whether this process leaves the cluster and ends. That ends the workers, when their output is no longer shown: one
    that still imports prints a traceback.

    Raises:
        ConfigError, RunError: the run cannot begin, or its drivers die; one line.
    """
    with waits.on("the index of the data", shows_itself=True):
        index_ahead(config.data)
    roster = Roster(config, resolve_device(config), waits, lent)
    host = ray.util.get_node_ip_address()
    stores: list[TCPStore] = []
    try:
        roster.start()
        lost = 0
        while lost < MAX_DRIVERS:
            # Each driver has its own store: it may use numbers of generations that a lost driver has tried. Existing
            # groups keep using their own store.
            stores.append(rendezvous_store(host))
            steps = console.steps
            last = _drive(config, lease, roster, (host, stores[-1].port), console, waits, ending,
                          takes_over=len(stores) > 1)
            if last:
                return last
            lost = lost + 1 if console.steps == steps else 1
        raise RunError(
            f"the driver actor died {MAX_DRIVERS} times without a step in between; "
            "start the same command again to go on from the newest checkpoint"
        )
    finally:
        console.close()
        if not leaves:
            roster.close()
        stores.clear()


def rendezvous_store(host: str) -> TCPStore:
    """Return a new store on a free port of `host`, an address of this machine. It listens only there; by default,
    TCPStore listens on every interface.

    Raises:
        RunError: `host` is not an address of this machine.
    """
    from torch.distributed import TCPStore  # seconds to import: after the configuration has been checked

    try:
        server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                      backlog=4096)
    except OSError as error:
        raise RunError(f"the rendezvous store cannot listen at {host}, the node's address in Ray: {first_line(error)}; "
                       "allowed: an address of this machine (`ray start --node-ip-address`)") from None
    port = server.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def _drive(config: Config, lease: Lease, roster: Roster, store: tuple[str, int], console: Console, waits: Waits,
           ending: Ending, takes_over: bool) -> RunFinished | None:
    """Run under one driver actor; returns None if it was lost."""
    starting_driver = ExitStack()  # until its first message
    starting_driver.enter_context(waits.on("the driver actor to start"))
    starting = roster.starting() if takes_over else set()
    workers = {slot: worker for slot, worker in roster.workers.items() if slot not in starting}
    newcomers = {slot: roster.workers[slot] for slot in starting} if takes_over else roster.grow()
    driver = start_driver(config, workers, store, takes_over, lease)
    try:
        if takes_over:
            ending.hand_over(driver.stop.remote)
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
                ending.hand_over(driver.stop.remote)
            if isinstance(message, Replace):
                if ending.reason:
                    continue  # a run that is to end waits for no newcomer
                driver.offer.remote(message.slot, roster.replace(message.slot))
            else:
                console.show(message)
    except RayTaskError as error:
        raise RunError(f"the driver failed: {first_line(getattr(error, 'cause', None) or error)}") from None
    except RayError:
        console.show(Notice("the driver actor died; another one takes over"))
        return None
    finally:
        starting_driver.close()
        ray.kill(driver)
    raise RunError("the driver ended without a word")


def resolve_device(config: Config) -> Accelerator:
    """Return the device of the workers: as configured, or the best kind that the cluster has.

    Raises:
        ConfigError: it cannot do what the configuration asks for.
    """
    accelerator = device_of(config.cluster.device, ray.cluster_resources())
    config.cluster.device = accelerator.name
    check_device(config)
    return accelerator


def start_driver(config: Config, workers: dict[int, Any], store: tuple[str, int], takes_over: bool, lease: Lease
                 ) -> Any:
    from dhp_ray.runtime.driver.actor import CONCURRENCY_GROUPS, DriverActor

    actor: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(DriverActor)  # type: ignore[call-overload]
    # by name; otherwise the actor would go into the reservation of this process, which has no such resource
    return actor.options(num_cpus=0, scheduling_strategy="DEFAULT",
                         resources={"node:__internal_head__": 0.001}).remote(config, workers, store, takes_over, lease)
