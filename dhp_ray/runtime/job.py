"""The process of the submitted job: it hosts the rendezvous store, starts the workers and the driver, and shows the run.

Workers belong to this process, so they outlive a driver actor.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dhp_ray.comm.device import ACCELERATORS, Accelerator
from dhp_ray.config import Config
from dhp_ray.runtime.console import Console
from dhp_ray.runtime.indexing import index_ahead
from dhp_ray.runtime.messages import Finished, Message, RunError


def train(config: Config) -> int:
    """Train as the configuration says; the exit status. Every failure is one line on standard error."""
    console = Console(sys.stdout)
    try:
        connect()
        return _run(config, console)
    except KeyboardInterrupt:
        console.close()
        print("error: interrupted; start the same command again to go on from the newest checkpoint", file=sys.stderr)
        return 1
    except RunError as error:
        console.close()
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()


def connect() -> None:
    """Join the cluster that RAY_ADDRESS or a running head names, else start a local one.

    Raises:
        RunError: no cluster answers at the address.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a driver without a device must not hide it from workers
    logging.getLogger("ray").setLevel(logging.WARNING)
    try:
        ray.init(logging_level=logging.ERROR)
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        where = os.environ.get("RAY_ADDRESS", "this machine")
        raise RunError(f"no Ray cluster at {where}: {_first_line(error)}") from None


def _run(config: Config, console: Console) -> int:
    from torch.distributed import TCPStore  # seconds to import: after the configuration has been checked

    index_ahead(config.data)
    accelerator = resolve_device(config)
    room = reserve(config, accelerator)
    host = ray.util.get_node_ip_address()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    workers = start_workers(config, accelerator, room)
    driver: Any = start_driver(config, workers, (host, store.port))
    last: Message | None = None
    try:
        for reference in driver.run.remote():
            last = ray.get(reference)
            console.show(last)
    except RayActorError:
        raise RunError("the driver actor died; start the same command again to go on from the newest checkpoint") from None
    finally:
        console.close()
        for actor in [*workers, driver]:
            ray.kill(actor)
        remove_placement_group(room)
        del store
    assert isinstance(last, Finished)
    if last.error:
        print(f"error: {last.error}", file=sys.stderr)
    return last.status


def resolve_device(config: Config) -> Accelerator:
    """The device of the workers: as configured, or the best kind that the cluster has."""
    resources = ray.cluster_resources()
    name = config.cluster.device
    if name == "auto":
        name = "npu" if resources.get("NPU") else "cuda" if resources.get("GPU") else "cpu"
    config.cluster.device = name
    return ACCELERATORS[name]


def reserve(config: Config, accelerator: Accelerator) -> PlacementGroup:
    """Room for all workers, or an error once `cluster.start_timeout_s` has passed; an autoscaler is asked for it."""
    cluster = config.cluster
    bundle = {"CPU": cluster.cpus_per_worker} | ({accelerator.resource: 1.0} if accelerator.resource else {})
    room = placement_group([bundle] * cluster.num_workers, strategy="PACK")
    if not room.wait(cluster.start_timeout_s):
        remove_placement_group(room)
        have = ray.cluster_resources()
        wanted = ", ".join(f"{amount * cluster.num_workers:g} {name}" for name, amount in bundle.items())
        found = ", ".join(f"{have.get(name, 0.0):g} {name}" for name in bundle)
        raise RunError(f"cluster.num_workers={cluster.num_workers}: needs {wanted}; the cluster has {found} in all (some may be in use), "
                       f"and no more came within {cluster.start_timeout_s:g} s; lower cluster.num_workers or add nodes")
    return room


def start_workers(config: Config, accelerator: Accelerator, room: PlacementGroup) -> list[ActorHandle]:
    from dhp_ray.runtime.worker import CONCURRENCY_GROUPS, Worker

    actor: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(Worker)  # type: ignore[call-overload]
    options: dict[str, Any] = {"num_cpus": config.cluster.cpus_per_worker}
    if accelerator.resource == "GPU":
        options["num_gpus"] = 1
    elif accelerator.resource:
        options["resources"] = {accelerator.resource: 1}
    return [
        actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=place), **options).remote(config)
        for place in range(config.cluster.num_workers)
    ]


def start_driver(config: Config, workers: list[ActorHandle], store: tuple[str, int]) -> Any:
    from dhp_ray.runtime.driver import Driver

    actor: Any = ray.remote(Driver)
    return actor.options(num_cpus=0, resources={"node:__internal_head__": 0.001}).remote(config, workers, store)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
