"""A batch to plan: its sequences as arrays, the cluster and the cost model.

What a planner returns is a list of `Placement`s in order of execution; `planner.plan_batch` prices them and makes the `Plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost import CostModel, Tables
from dhp_ray.planner.plan import ClusterSpec, PlanError, Sample, SequenceTooLongError

Ranks = tuple[int, ...]


class Placement(NamedTuple):
    """Sequences (rows of the batch) that run together on `ranks`, ascending."""

    ranks: Ranks
    sequences: tuple[int, ...]
    micro_batch: int = 0


@dataclass(frozen=True)
class Problem:
    """A batch as the planners see it. Arrays have one entry a sequence; seconds are one rank's at nominal speed.

    tokens: int64. attention_s: its attention, part of language_s. vision_s: all its images; image_s: the largest of them.
    minimum_degree: the fewest ranks that hold it. lower_bound_s: `bound`'s, once known.
    """

    samples: tuple[Sample, ...]
    cluster: ClusterSpec
    cost: CostModel
    sync: str
    pool: tuple[Ranks, ...]
    tables: Tables
    tokens: np.ndarray
    language_s: np.ndarray
    attention_s: np.ndarray
    vision_s: np.ndarray
    image_s: np.ndarray
    minimum_degree: np.ndarray
    num_images: int
    lower_bound_s: float = 0.0

    @property
    def work_s(self) -> np.ndarray:
        """Compute of each sequence on one nominal rank."""
        return self.language_s + self.vision_s


def problem_of(samples: Sequence[Sample], cluster: ClusterSpec, cost: CostModel, sync: str, pool: Sequence[Ranks] = ()) -> Problem:
    """Check a batch and lay it out in arrays.

    Raises:
        PlanError: there is no sequence, or one without tokens.
        SequenceTooLongError: a sequence is beyond the whole cluster.
    """
    if not samples:
        raise PlanError("batch: no sequences; a batch has at least one")
    tokens = np.array([sample.text_tokens + sample.vision_tokens for sample in samples], dtype=np.int64)
    shortest, longest = int(tokens.argmin()), int(tokens.argmax())
    if tokens[shortest] < 1:
        raise PlanError(f"sample {samples[shortest].id}: {tokens[shortest]} tokens; a sequence has at least 1")
    if tokens[longest] > cluster.max_tokens:
        raise SequenceTooLongError(samples[longest].id, int(tokens[longest]), cluster.max_tokens)
    attention = cost.quadratic_s * tokens.astype(np.float64) ** 2
    vision, image = np.zeros(len(samples)), np.zeros(len(samples))
    num_images = sum([len(sample.vision_grids) for sample in samples])
    if num_images and (cost.vision_linear_s or cost.vision_quadratic_s):
        for row, sample in enumerate(samples):
            if sample.vision_grids:
                seconds = cost.image_s(sample)
                vision[row], image[row] = sum(seconds), max(seconds)
    return Problem(tuple(samples), cluster, cost, sync, tuple(pool), cost.tables(cluster.num_ranks), tokens, attention + cost.linear_s * tokens, attention,
                   vision, image, -(-tokens // cluster.tokens_per_rank), num_images)
