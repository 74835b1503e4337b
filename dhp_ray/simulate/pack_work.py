"""The work of a plan's groups at the true speeds of the ranks: seconds of compute and, separately, of exchanges.

For a pack of sequences on d ranks, with the terms of `planner/cost/model.py`:

    compute   language / (d v) + the fullest member's images + what is paid once          v: speed of the slowest member
             + its waits for copies to host memory, over links that no other rank's copies use
             + what is computed again of the layers that it recomputes
    transfer  seconds of its exchanges at the full bandwidth of the link, without other traffic
    hidden    seconds of the transfer that attention hides

    time at a share s of the link = compute + max(0, transfer / s - hidden)

At s = 1 this is the plan's own prediction, if speeds and costs are those that the plan was made with. A pack exchanges
the same in every layer, so its share may change while it runs: the pack then continues at the new pace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost.rates import again_s, encoding_s, held_s, share_of, waits_s
from dhp_ray.planner.plan.types import Plan
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule, crosses_nodes, firsts_of, flat, gathered


class PackWork(NamedTuple):
    """Arrays by group, except `ranks` and `own_s`, which are by member: the ranks of group g are
    `ranks[first_rank[g]:first_rank[g + 1]]`, and each computes for `own_s` seconds of the pack. This includes waits for
    copies to host memory, which a run cannot distinguish from compute. Of `compute_s`, the busiest member encodes
    images for `encode_s`, and no member computes for `latency_s`. Images that are encoded apart from the packs are in
    none of these.
    """

    ranks: np.ndarray
    first_rank: np.ndarray
    micro_batch: np.ndarray
    compute_s: np.ndarray
    encode_s: np.ndarray
    transfer_s: np.ndarray
    hidden_s: np.ndarray
    latency_s: np.ndarray
    crosses: np.ndarray
    own_s: np.ndarray

    @property
    def degrees(self) -> np.ndarray:
        return np.diff(self.first_rank)

    def times_s(self) -> np.ndarray:
        """Seconds of each group if it has its links to itself."""
        times: np.ndarray = self.compute_s + np.maximum(0.0, self.transfer_s - self.hidden_s)
        return times

    def part(self, groups: slice) -> PackWork:
        """The work of consecutive groups."""
        first = self.first_rank[groups.start : groups.stop + 1]
        members = slice(first[0], first[-1])
        return PackWork(self.ranks[members], first - first[0], self.micro_batch[groups], self.compute_s[groups],
                        self.encode_s[groups], self.transfer_s[groups], self.hidden_s[groups], self.latency_s[groups],
                        self.crosses[groups], self.own_s[members])


def work_of(plan: Plan, problem: Problem, stretch: np.ndarray | None = None) -> PackWork:
    """The work of a plan's groups on the ranks of `problem`, which is the plan's batch with the true costs and speeds.

    `stretch`: by group, the factor by which its compute is longer than the cost says.
    """
    schedule = schedule_of(plan)
    items, degree = problem.items[schedule.rows], np.diff(schedule.first_rank)
    host_s = problem.cost.host_s(items.tokens) if plan.vision.apart else items.host_s
    tokens, language, attention, host = (
        np.add.reduceat(array, schedule.first_row[:-1])
        for array in (items.tokens, items.language_s, items.attention_s, host_s)
    )
    rates, group = problem.machine.rates[degree], np.repeat(np.arange(len(degree)), degree)
    factor = np.ones(len(degree)) if stretch is None else stretch
    language, attention = factor * language, factor * attention
    member_speed = problem.speeds[schedule.ranks]
    speed = np.minimum.reduceat(member_speed, schedule.first_rank[:-1])
    images_s = _images_s(plan, problem, schedule) * factor[group]
    encode_s = np.maximum.reduceat(images_s, schedule.first_rank[:-1])
    encode_s += rates.encoder_pass_s * (encode_s > 0) / speed
    images_s += problem.cost.encoder_pass_s * (images_s > 0) / member_speed
    crosses = crosses_nodes(schedule, np.array(problem.cluster.nodes))
    transfer_s = np.where(crosses, rates.across_s, rates.inside_s) * tokens
    hidden_s, share = rates.overlap * attention / speed, share_of(tokens, rates)
    waited_s = waits_s(language / (degree * speed) + encode_s, host * rates.moved * share, rates.forward)
    compute_s = held_s(language, attention, encode_s, np.zeros(len(degree)), degree, speed, transfer_s, rates)
    again = share * rates.again  # exchanges run again too, as do those that attention hides
    compute_s += waited_s + share * again_s(compute_s, encode_s, rates)
    own_s = (((language / degree)[group] / member_speed + problem.cost.pack_s) * (1 + again)[group]
             + images_s * (1 + share * rates.encoded_again)[group] + waited_s[group])
    return PackWork(schedule.ranks, schedule.first_rank, schedule.micro_batch, compute_s,
                    encoding_s(encode_s, tokens, rates), transfer_s * (1 + again), hidden_s * (1 + again),
                    (rates.overhead_s - problem.cost.pack_s) * (1 + again), crosses, own_s)


def schedule_of(plan: Plan) -> Schedule:
    """The groups of a plan as flat arrays."""
    rows, num_rows = flat([group.pack.sequences for group in plan.groups])
    ranks, degrees = flat([group.ranks for group in plan.groups])
    micro_batch = np.array([group.micro_batch for group in plan.groups], dtype=np.int64)
    return Schedule(rows, firsts_of(num_rows), ranks, firsts_of(degrees), micro_batch)


def _images_s(plan: Plan, problem: Problem, schedule: Schedule) -> np.ndarray:
    """Seconds for which each member encodes images inside its pack."""
    found = np.zeros(len(schedule.ranks))
    if plan.vision.apart or not len(problem.all_image_s):
        return found
    num_ranks, degree = problem.cluster.num_ranks, np.diff(schedule.first_rank)
    seconds, _ = gathered(problem.all_image_s, problem.first_image, schedule.rows)
    encoder, num_images = flat([group.encoders for group in plan.groups])
    if not len(encoder):
        return found
    member = np.repeat(np.arange(len(degree)), degree) * num_ranks + schedule.ranks
    wanted = np.repeat(np.arange(len(degree)), num_images) * num_ranks + encoder
    order = np.argsort(member)
    np.add.at(found, order[np.searchsorted(member, wanted, sorter=order)], seconds / problem.speeds[encoder])
    return found
