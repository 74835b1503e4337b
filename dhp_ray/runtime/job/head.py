"""The head of the Ray cluster: finds, joins and leaves it. Imports Ray, which takes seconds, only to join."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from pathlib import Path

from dhp_ray.credentials import masked
from dhp_ray.errors import first_line
from dhp_ray.runtime.job.local_cluster import answer_of, end_cluster, start_cluster
from dhp_ray.runtime.messages import RunError
from dhp_ray.schema import ConfigError

LOCAL_SETTINGS = {"RAY_worker_niceness": "0", "RAY_enable_metrics_collection": "0",
                  "RAY_task_events_report_interval_ms": "0", "RAY_idle_worker_killing_time_threshold_ms": "60000"}
"""Settings of a cluster that is started here. With Ray's niceness of 15 any process can hold up a rank, and so all;
dashboard, metrics, task events, and a new process where an idle one ends after a second, take time from ranks.
"""

HEAD_PATIENCE_S = 5.0  # until a head accepts a connection; Ray tries for ten minutes to reach one that is gone

_started: list[subprocess.Popen[str]] = []  # the program of the cluster that `begin` has started, if it has


def named_head() -> tuple[str, str]:
    """Return the address of the cluster that a bare `ray.init` would join, and what names it; "" if it would start one.
    The look-up is Ray's: RAY_ADDRESS, else the file that the last `ray start` on this machine wrote.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto"):
        return address, "RAY_ADDRESS"
    file = Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")), "ray", "ray_current_cluster")
    return (file.read_text().strip() if os.access(file, os.R_OK) else ""), str(file)


def check_address() -> None:
    address, named_by = named_head()
    if "://" in address:
        raise ConfigError(f"{named_by}: got {masked(address)}; allowed: HOST:PORT of the head of a cluster that this "
                          "machine is a node of, or local; to a cluster elsewhere jobs are submitted (`ray job submit "
                          "--address ...`)")


def begin() -> None:
    """Start the local cluster that `connect` would start, so that it starts while this process imports Ray."""
    # a driver without a device must not hide devices from workers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address, _ = named_head()
    if address in ("", "local") and not _started:
        for name, value in LOCAL_SETTINGS.items():
            os.environ.setdefault(name, value)
        _started.append(start_cluster())


def connect() -> None:
    """Join the cluster that RAY_ADDRESS or a running head names, else a local one, which `disconnect` ends. RunError,
    within seconds: no cluster answers at the address.
    """
    begin()
    import ray
    from ray.exceptions import RayError

    address, named_by = named_head()
    _knock(address, named_by)
    where = os.environ.get("RAY_ADDRESS", "this machine")
    logging.getLogger("ray").setLevel(logging.WARNING)
    local = _local_address(where) if _started else None
    try:
        ray.init(address=local, logging_level=logging.ERROR, include_dashboard=False)
    except (OSError, RayError, RuntimeError, ValueError) as error:
        raise RunError(masked(f"no Ray cluster at {where}: {_reason(error)}")) from None


def _reason(error: BaseException) -> str:
    """Return why Ray does not join, in a line: where versions differ, it names both over several."""
    text = str(error)
    return " ".join(text.split()) if text.startswith("Version mismatch") else first_line(error)


def disconnect() -> None:
    """Leave the cluster, and end it if `begin` has started it."""
    import ray

    try:
        ray.shutdown()
    finally:
        while _started:
            end_cluster(_started.pop())


def _local_address(where: str) -> str:
    """Return the address of the cluster that `begin` has started, once it is there."""
    import torch.distributed  # noqa: F401  # for the rendezvous store; takes seconds, in which the cluster starts

    said = answer_of(_started[-1])
    if "error" in said:
        raise RunError(f"no Ray cluster at {where}: {said['error']}")
    _authenticate()
    return said["address"]


def _authenticate() -> None:
    """Use the token of this user's clusters: ray.init does not for a cluster whose address it is given."""
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # a version of Ray whose clusters have none
        return
    logging.getLogger("ray").setLevel(logging.ERROR)  # as in ray.init: it would warn that there is a token
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _knock(address: str, named_by: str) -> None:
    """Refuse a head that accepts no connection. What is not HOST:PORT (`local`, `ray://...`) is left to Ray."""
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdecimal():
        return
    import ray

    host = host.strip("[]")
    if host in ("localhost", "127.0.0.1", "::1"):
        host = ray.util.get_node_ip_address()  # as Ray does; a tunnel's end on the loopback is no head
    try:
        socket.create_connection((host, int(port)), timeout=HEAD_PATIENCE_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        stale = ("" if named_by == "RAY_ADDRESS" else
                 "; such a file outlives its head: `ray stop`, or deleting it, clears it")
        raise RunError(f"no Ray cluster at {address}, which {named_by} names: {first_line(error)}{stale}; allowed: a "
                       "running head (`ray start --head`), its address in RAY_ADDRESS, or RAY_ADDRESS=local for a "
                       "cluster of this machine alone") from None
