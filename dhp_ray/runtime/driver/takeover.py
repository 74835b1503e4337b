"""A new driver takes over the workers of a lost one: some are in the middle of a step, some are dead or hung, some have
not joined yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import ray

from dhp_ray.runtime.driver.arrivals import Arrivals
from dhp_ray.runtime.driver.group import WorkerGroup
from dhp_ray.runtime.messages import GroupError, Notice, Replace, RunError, Tell

POLL_S = 0.2


def take_over(
    group: WorkerGroup, arrivals: Arrivals, look_s: float, describe: Callable[[], None], stopping: Callable[[], str],
    tell: Tell,
) -> None:
    """Keep the surviving workers of `group` and query their status, checking their health every `look_s` seconds
    meanwhile.

    Raises:
        RunError: no worker is left, and the run is to end (`stopping` says why).
    """
    group.look_s = look_s
    while True:
        _part(group, arrivals, tell)
        with group.waits.on("new workers"):
            _somebody(group, arrivals, stopping, tell)
        try:
            describe()
            return
        except GroupError as error:
            tell(Notice(f"one more is lost: {error}"))


def _part(group: WorkerGroup, arrivals: Arrivals, tell: Tell) -> None:
    """Drop dead or hung workers; if others are in a generation, offer those that are in none as newcomers."""
    seen = list(zip(group.members, group.survey()))
    begun = any(status.generation for _, (_, status) in seen)
    for member, (sight, status) in seen:
        if sight.dead or not sight.answered:
            ray.kill(member.actor)
            group.members.remove(member)
            tell(Replace(member.slot))
        elif begun and not status.generation:
            group.members.remove(member)
            arrivals.offer(member.slot, member.actor)


def _somebody(group: WorkerGroup, arrivals: Arrivals, stopping: Callable[[], str], tell: Tell) -> None:
    """Wait for the first newcomer if no worker is left: the run goes on from its newest checkpoint."""
    if not group.members:
        tell(Notice("no worker is left: waiting for new ones"))
    while not group.members:
        if reason := stopping():
            raise RunError(f"stopped ({reason}) while waiting for workers")
        time.sleep(POLL_S)
        group.members = arrivals.take(1)
        arrivals.report()
