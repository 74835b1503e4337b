"""One step of a plan at the true speeds of the ranks: packs take what the plan says, and what ranks compute longer.

sync=step         | (encode, features) | packs, each as soon as its ranks are free | (backward) | update |
sync=micro_batch  | (encode, features) | root | packs | root | packs | (backward) | update |    ranks meet
                    in each pass of the encoder, and at each layer of a micro-batch (`pricing.micro_batches_s`)

If images are encoded apart from the packs, the phases before and after them are those of `planner/timeline.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dhp_ray.planner.cost.work import PAID_ONCE, Work, work_of
from dhp_ray.planner.plan.types import Plan
from dhp_ray.planner.primitives.list_schedule import list_schedule
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import firsts_of, flat
from dhp_ray.planner.timeline import EncoderTimeline, PackTimes, micro_batches_s, timeline_apart
from dhp_ray.train.results import PackTime, StepResult


@dataclass(frozen=True)
class SimulatedStep:
    """The times of a step, in seconds from its begin. `work`: what ranks compute of each pack; `own_s`: how long, by
    row. `starts_s`, `left_s`: of each pack, when it begins and its ranks go on; `exchange_s`: what exchanges add;
    `encoder`: the phases apart from the packs; `packs_end_s`: when the last pack or image is done; `fixed_s`: what all
    ranks pay beside.
    """

    plan: Plan
    work: Work
    own_s: np.ndarray
    starts_s: np.ndarray
    left_s: np.ndarray
    exchange_s: np.ndarray
    encoder: EncoderTimeline | None
    packs_end_s: float
    fixed_s: float
    time_s: float

    @property
    def makespan_s(self) -> float:
        """From the first start of a pack or encoder phase to the last end, as the driver measures it."""
        return self.packs_end_s - (0.0 if self.encoder else float(self.starts_s.min()))

    def shares(self) -> dict[str, float]:
        """The shares of the ranks' time: compute, including waits for copies to host memory; exchanges that nothing
        hides; the reduction, update and gather; and the rest, idle, including waits for slower members.
        """
        num_ranks = self.plan.cluster.num_ranks
        whole_s = num_ranks * self.time_s
        found = {"compute": float(self.busy_s().sum()) / whole_s,
                 "exchange": float(self.exchange_s[self.work.group].sum()) / whole_s,
                 "update": num_ranks * self.fixed_s / whole_s}
        return found | {"idle": max(0.0, 1.0 - sum(found.values()))}

    def memory_bytes(self) -> np.ndarray:
        """The most bytes that each rank holds, as the plan predicts."""
        found = np.zeros(self.plan.cluster.num_ranks)
        of_group = np.array([group.predicted_memory_bytes for group in self.plan.groups])
        np.maximum.at(found, self.work.rank, of_group[self.work.group])
        return found

    def busy_s(self) -> np.ndarray:
        """Seconds that each rank computes, without its waits for others."""
        own: np.ndarray = np.bincount(self.work.rank, self.own_s, self.plan.cluster.num_ranks)
        if apart := self.encoder:
            own = own + apart.forward_busy_s + apart.backward_busy_s
        return own

    def results(self, step: int) -> list[StepResult]:
        """What the ranks would report of the step: its times, no losses."""
        times: list[list[PackTime]] = [[] for _ in range(self.plan.cluster.num_ranks)]
        starts_s, left_s = self.starts_s[self.work.group], self.left_s[self.work.group]
        blocked_s = np.maximum(0.0, left_s - starts_s - self.own_s)
        columns = (self.work.rank, self.work.group, starts_s, left_s, blocked_s)
        for rank, *time in zip(*(column.tolist() for column in columns)):
            times[rank].append(PackTime(*time))
        apart = self._encoder_times()
        return [StepResult(step, rank, 0.0, 0, 0.0, 0.0, True, step, self.time_s, 0.0, tuple(packs), {},
                           encoder_times=apart[rank] if apart else ()) for rank, packs in enumerate(times)]

    def _encoder_times(self) -> list[tuple[PackTime, PackTime]]:
        if (apart := self.encoder) is None:
            return []
        columns = (apart.ready_s, apart.forward_busy_s, apart.backward_s, apart.backward_busy_s, apart.end_s)
        return [(PackTime(-1, 0.0, ready, ready - forward), PackTime(-1, back, end, end - back - backward))
                for ready, forward, back, backward, end in zip(*(column.tolist() for column in columns))]


def simulate_step(plan: Plan, problem: Problem, *, stretch: np.ndarray | None = None) -> SimulatedStep:
    """Run a plan at the costs and speeds of `problem`. `stretch`: by group, how many times as long it computes."""
    factor = np.ones(len(plan.groups)) if stretch is None else stretch
    cost, work = problem.cost, work_of(plan)
    work = Work(*(column[work.group >= 0] for column in work))  # without the phases of images apart
    once_s = work.seconds(cost, PAID_ONCE)
    scaled_s = work.seconds(cost) - once_s
    planned_s = scaled_s / np.array(plan.cluster.speeds)[work.rank] + once_s
    own_s = scaled_s * factor[work.group] / problem.speeds[work.rank] + once_s
    times, exchange_s = _times(plan, work.group, planned_s, own_s)
    ranks, degrees = flat([group.ranks for group in plan.groups])
    micro_batch = np.array([group.micro_batch for group in plan.groups], dtype=np.int64)
    apart = timeline_apart(plan, problem, times.pack_s) if plan.vision.apart else None
    fixed_s, end_s = cost.fixed_s, apart.makespan_s if apart else 0.0
    if plan.sync == "micro_batch":
        number = np.unique(micro_batch, return_inverse=True)[1]
        seconds = micro_batches_s(micro_batch, times)
        if apart:
            end_s += fixed_s
            starts_s = fixed_s + apart.starts_s
            apart = apart._replace(starts_s=apart.starts_s + fixed_s, ended_s=apart.ended_s + fixed_s,
                                   backward_s=apart.backward_s + fixed_s, end_s=apart.end_s + fixed_s)
        else:
            ends_s = np.cumsum(seconds + fixed_s)
            starts_s, end_s = (ends_s - seconds)[number], float(ends_s[-1])
        left_s = starts_s + seconds[number]
        fixed_s = fixed_s * len(seconds) + cost.update_s
        time_s = end_s + cost.update_s
    else:
        starts_s = apart.starts_s if apart else list_schedule(
            ranks, firsts_of(degrees), times.pack_s, plan.cluster.num_ranks)[0]
        left_s = starts_s + times.pack_s
        end_s = end_s or float(left_s.max())
        time_s = end_s + fixed_s
    return SimulatedStep(plan, work, own_s, starts_s, left_s, exchange_s, apart, end_s, fixed_s, time_s)


def _times(plan: Plan, group: np.ndarray, planned_s: np.ndarray, own_s: np.ndarray) -> tuple[PackTimes, np.ndarray]:
    """The times of each group: as planned, and what its busiest member computes longer; what exchanges add."""
    planned = PackTimes.of(plan.groups)
    expected_s, busiest_s = np.zeros((2, len(plan.groups)))
    np.maximum.at(expected_s, group, planned_s)
    np.maximum.at(busiest_s, group, own_s)
    together_s = planned.encode_s + planned.rest_s
    least_s = np.where(planned.pack_s > (1 + 1e-9) * together_s, planned.pack_s, 0.0)  # for its layers' parameters
    seconds, encode_s = together_s + busiest_s - expected_s, planned.encode_s * busiest_s / expected_s
    return PackTimes(np.maximum(least_s, seconds), encode_s, seconds - encode_s), together_s - expected_s
