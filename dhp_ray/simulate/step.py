"""One step of a plan at the true speeds of ranks, nodes and links.

sync=step         | make groups | (encode, features) | packs, each as soon as its ranks are free | (backward) | update |
sync=micro_batch  | make groups | (encode, features) | root | packs | root | packs | (backward) | update |    ranks meet
                    in each pass of the encoder, and at each layer of a micro-batch (`micro_batches_s`)

If images are encoded apart from the packs, the phases before and after them are those of `planner/timeline.py`.
A pack (in `micro_batch`: a micro-batch) takes at least as long as the parameters and gradients of its layers travel
(`least_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.plan.types import Plan
from dhp_ray.planner.primitives.list_schedule import list_schedule, list_schedule_from
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import firsts_of, flat
from dhp_ray.planner.timeline import EncoderTimeline, PackTimes, micro_batches_s, timeline_apart
from dhp_ray.simulate.links import Links, contended, run_groups, uses_of
from dhp_ray.simulate.pack_work import PackWork, work_of
from dhp_ray.train.results import PackTime, StepResult


@dataclass(frozen=True)
class SimulatedStep:
    """The times of a step, in seconds from its begin. `made_s`: by rank, when its groups are made; `starts_s`,
    `ends_s`: of each group; `left_s`: when its ranks go on (in `micro_batch` all at once); `encoder`: the
    phases apart from the packs, counted from when all groups are made; `packs_end_s`: when the last pack or image is
    done; `fixed_s`: what all ranks pay once, or in each micro-batch and at the step's end.
    """

    plan: Plan
    work: PackWork
    made_s: np.ndarray
    starts_s: np.ndarray
    ends_s: np.ndarray
    left_s: np.ndarray
    encoder: EncoderTimeline | None
    packs_end_s: float
    fixed_s: float
    time_s: float

    def shares(self) -> dict[str, float]:
        """The shares of the ranks' time: compute, including waits for copies to host memory; exchanges that nothing
        hides; the reduction, update and gather; making groups; and the rest, idle, including waits for slower members.
        """
        num_ranks = len(self.made_s)
        whole_s = num_ranks * self.time_s
        exposed_s = self.ends_s - self.starts_s - self.work.compute_s
        exchange_s = float((self.work.degrees * (np.maximum(0.0, exposed_s) + self.work.latency_s)).sum())
        found = {"compute": float(self.busy_s().sum()) / whole_s, "exchange": exchange_s / whole_s,
                 "update": num_ranks * self.fixed_s / whole_s, "groups": float(self.made_s.sum()) / whole_s}
        return found | {"idle": max(0.0, 1.0 - sum(found.values()))}

    def memory_bytes(self) -> np.ndarray:
        """The most bytes that each rank holds, as the plan predicts."""
        found = np.zeros(len(self.made_s))
        of_group = np.array([group.predicted_memory_bytes for group in self.plan.groups])
        np.maximum.at(found, self.work.ranks, np.repeat(of_group, self.work.degrees))
        return found

    def busy_s(self) -> np.ndarray:
        """Seconds that each rank computes, without its waits for others."""
        own: np.ndarray = np.bincount(self.work.ranks, self.work.own_s, len(self.made_s))
        if apart := self.encoder:
            own = own + apart.forward_busy_s + apart.backward_busy_s
        return own

    def results(self, step: int) -> list[StepResult]:
        """What the ranks would report of the step: its times, no losses."""
        times: list[list[PackTime]] = [[] for _ in self.made_s]
        blocked_s = np.maximum(0.0, np.repeat(self.left_s - self.starts_s, self.work.degrees) - self.work.own_s)
        starts, ends, blocked = self.starts_s.tolist(), self.left_s.tolist(), blocked_s.tolist()
        ranks, first = self.work.ranks.tolist(), self.work.first_rank.tolist()
        for group in range(len(starts)):
            for member in range(first[group], first[group + 1]):
                times[ranks[member]].append(PackTime(group, starts[group], ends[group], blocked[member]))
        apart = self._encoder_times()
        return [StepResult(step, rank, 0.0, 0, 0.0, 0.0, True, step, self.time_s, 0.0, tuple(packs), {},
                           encoder_times=apart[rank] if apart else ()) for rank, packs in enumerate(times)]

    def _encoder_times(self) -> list[tuple[PackTime, PackTime]]:
        if self.encoder is None:
            return []
        apart, begin = self.encoder, float(self.made_s.max())
        columns = (apart.ready_s, apart.forward_busy_s, apart.backward_s, apart.backward_busy_s, apart.end_s)
        return [(PackTime(-1, begin, begin + ready, ready - forward),
                 PackTime(-1, begin + back, begin + end, end - back - backward))
                for ready, forward, back, backward, end in zip(*(column.tolist() for column in columns))]


class Network(NamedTuple):
    """The links that packs share, and other traffic on them: `beside` links of each node, for the first `beside_s`
    seconds of a step.
    """

    links: Links
    beside: np.ndarray
    beside_s: float = 0.0


def simulate_step(
    plan: Plan, problem: Problem, network: Network, *, made: Sequence[tuple[int, ...]] = (),
    stretch: np.ndarray | None = None, least_s: float = 0.0,
) -> SimulatedStep:
    """Run a plan on the ranks of `problem`, which is the plan's batch with the true costs and speeds.

    `made`: the plan's process groups that do not exist yet, in plan order. `stretch`: as for `work_of`.
    """
    work, made_s = work_of(plan, problem, stretch), _made_s(made, problem)
    if plan.sync == "micro_batch":
        return _in_micro_batches(plan, problem, work, network, made_s, least_s)
    work = work._replace(compute_s=work.compute_s + np.maximum(0.0, least_s - work.times_s()))
    begin_s, fixed_s = float(made_s.max()), problem.cost.fixed_s
    if not plan.vision.apart:
        starts_s, ends_s = _run(made_s, problem, work, network)
        end_s = float(ends_s.max())
        return SimulatedStep(plan, work, made_s, starts_s, ends_s, ends_s, None, end_s, fixed_s, end_s + fixed_s)
    apart = timeline_apart(plan, problem, work.times_s())
    rest = network._replace(beside_s=max(0.0, network.beside_s - begin_s))
    starts_s, ends_s = _run(apart.ready_s, problem, work, rest)  # packs do not affect when features arrive
    apart = timeline_apart(plan, problem, ends_s - starts_s)
    end_s = begin_s + apart.makespan_s
    return SimulatedStep(plan, work, made_s, begin_s + starts_s, begin_s + ends_s, begin_s + ends_s, apart, end_s,
                         fixed_s, end_s + fixed_s)


def _run(ready_s: np.ndarray, problem: Problem, work: PackWork, network: Network) -> tuple[np.ndarray, np.ndarray]:
    """Return (start, end) of each group, on ranks that are ready at `ready_s`."""
    uses = uses_of(work, np.array(problem.cluster.nodes), problem.cost.communication == "ring")
    if contended(uses, network.links, network.beside if network.beside_s else None):
        return run_groups(ready_s, work, uses, network.links, network.beside, network.beside_s)
    times_s = work.times_s()
    starts_s, _ = list_schedule_from(ready_s, work.ranks, work.first_rank, times_s)
    return starts_s, starts_s + times_s


def _in_micro_batches(
    plan: Plan, problem: Problem, work: PackWork, network: Network, made_s: np.ndarray, least_s: float
) -> SimulatedStep:
    """All groups of a micro-batch begin together, once all ranks have finished the one before; those of the first one
    begin once the features of images encoded apart have arrived.
    """
    cuts = [0, *(np.flatnonzero(np.diff(work.micro_batch)) + 1).tolist(), len(work.micro_batch)]
    (starts_s, ends_s, left_s), made = np.zeros((3, len(work.micro_batch))), float(made_s.max())
    now, encoder = made, timeline_apart(plan, problem, work.times_s()) if plan.vision.apart else None
    if encoder:
        now += float(encoder.ready_s.max())
    for begin, end in pairwise(cuts):
        now += problem.cost.fixed_s
        groups = slice(begin, end)
        rest = network._replace(beside_s=max(0.0, network.beside_s - now))
        starts, ends = _run(np.zeros(len(made_s)), problem, work.part(groups), rest)
        starts_s[groups], ends_s[groups] = now + starts, now + ends
        times = PackTimes(ends, work.encode_s[groups], ends - work.encode_s[groups])
        now += max(least_s, float(micro_batches_s(np.zeros(end - begin, dtype=np.int64), times)[0]))
        left_s[groups] = now
    packs_end_s = now
    if encoder:
        later_s = now - made - encoder.ended_s
        encoder = encoder._replace(starts_s=starts_s - made, ended_s=encoder.ended_s + later_s,
                                   backward_s=encoder.backward_s + later_s, end_s=encoder.end_s + later_s)
        now = packs_end_s = made + encoder.makespan_s
    update_s = problem.cost.update_s
    return SimulatedStep(plan, work, made_s, starts_s, ends_s, left_s, encoder, packs_end_s,
                         problem.cost.fixed_s * (len(cuts) - 1) + update_s, now + update_s)


def _made_s(made: Sequence[tuple[int, ...]], problem: Problem) -> np.ndarray:
    """When each rank has made its groups: one after the other, each together with the group's other ranks."""
    if not made or problem.cost.group_s == 0.0:
        return np.zeros(problem.cluster.num_ranks)
    members, degrees = flat(made)
    times = np.full(len(made), problem.cost.group_s)
    return list_schedule(members, firsts_of(degrees), times, problem.cluster.num_ranks)[1]
