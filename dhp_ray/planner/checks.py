"""Conditions that a plan must meet to be run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dhp_ray.errors import printable
from dhp_ray.planner.schedule import first_of_its_kind, flat

if TYPE_CHECKING:
    from dhp_ray.planner.plan import Plan


class PlanError(ValueError):
    """A batch that cannot be planned, or a plan that must not run; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class SequenceTooLongError(PlanError):
    """A sequence that the whole cluster cannot hold."""

    def __init__(self, sample_id: str, num_tokens: int, limit: int) -> None:
        super().__init__(f"sample {sample_id}: {num_tokens} tokens; the cluster holds at most {limit} in one sequence")
        self.sample_id, self.num_tokens, self.limit = sample_id, num_tokens, limit


def check(plan: Plan) -> None:
    """Raise PlanError unless every sequence runs exactly once, on valid ranks, within their memory."""
    rows, pieces = flat([group.pack.sequences for group in plan.groups])
    if len(rows) != len(plan.samples) or (np.sort(rows) != np.arange(len(rows))).any():
        raise PlanError(f"plan: {len(rows)} placements for {len(plan.samples)} sequences; each must run exactly once")
    ranks, degrees = flat([group.ranks for group in plan.groups])
    group_of = np.repeat(np.arange(len(degrees)), degrees)
    wrong = degrees == 0
    wrong[group_of[(ranks < 0) | (ranks >= plan.cluster.num_ranks) | ~first_of_its_kind(group_of, ranks)]] = True
    if wrong.any():
        index = int(wrong.argmax())
        raise PlanError(
            f"plan: group {index} has ranks {plan.groups[index].ranks}; "
            f"each must be one of {plan.cluster.num_ranks}, once"
        )
    group_of_row = np.repeat(np.arange(len(pieces)), pieces)
    tokens = np.zeros(len(pieces), dtype=np.int64)
    np.add.at(
        tokens, group_of_row, np.array([sample.text_tokens + sample.vision_tokens for sample in plan.samples])[rows]
    )
    if (tokens > degrees * plan.cluster.most_tokens_per_rank).any():
        index = int((tokens > degrees * plan.cluster.most_tokens_per_rank).argmax())
        raise PlanError(
            f"plan: group {index} holds {tokens[index]} tokens on {degrees[index]} ranks "
            f"of {plan.cluster.most_tokens_per_rank} tokens"
        )
    for limit, found, does in (
        (plan.cluster.offload, [group.offload for group in plan.groups], "moves {} of its activations to host memory"),
        (plan.cluster.recomputation, [group.recomputed for group in plan.groups], "recomputes {} of its layers"),
    ):
        needed, shares = limit.share_of(tokens / degrees), np.array(found)
        wrong = (shares < needed - 1e-9) | (shares > 1.0)
        if wrong.any():
            index = int(wrong.argmax())
            raise PlanError(f"plan: group {index} {does.format(f'a share of {shares[index]:.3g}')}; "
                            f"allowed: {needed[index]:.3g} to 1")
    grids = [sample.vision_grids for sample in plan.samples]
    images = np.zeros(len(pieces), dtype=np.int64)
    if any(grids):
        np.add.at(images, group_of_row, np.array([len(grid) for grid in grids])[rows])
    if plan.vision.layout not in ("group", "world"):
        raise PlanError(f"plan: images are encoded by {plan.vision.layout!r}; allowed: group, world")
    everyone = frozenset(range(plan.cluster.num_ranks))
    for index, (group, count) in enumerate(zip(plan.groups, images.tolist())):
        allowed = everyone if plan.vision.apart else frozenset(group.ranks)
        if len(group.encoders) != count or not allowed.issuperset(group.encoders):
            raise PlanError(f"plan: group {index} has {count} images and encoders {group.encoders}")
    if plan.sync == "micro_batch":
        micro_batch = np.array([group.micro_batch for group in plan.groups])
        if (np.diff(micro_batch) < 0).any():
            raise PlanError("plan: micro-batches out of order")
        twice = ~first_of_its_kind(micro_batch[group_of], ranks)
        if twice.any():
            raise PlanError(f"plan: rank {ranks[twice][0]} runs twice in micro-batch {micro_batch[group_of[twice][0]]}")
