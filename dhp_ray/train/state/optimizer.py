"""AdamW over one rank's shard, and the learning rate over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dhp_ray.train.state.shards import Bucket, Piece, ShardState


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101) and the clipping before it; what differs between parameters is a function of the name.

    `learning_rate_of(name)` is the peak; `decays(name)` tells whether `weight_decay` applies; `is_vision(name)` whether
    it is one of the vision encoder's, which not every batch uses. `clip_norm` bounds the global gradient norm; 0 leaves
    it alone.
    """

    learning_rate_of: Callable[[str], float]
    decays: Callable[[str], bool]
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_norm: float
    is_vision: Callable[[str], bool] = lambda name: False


class ShardedAdamW:
    """Writes the next version of a shard, bucket by bucket."""

    def __init__(
        self, settings: OptimizerSettings, pieces: Iterable[Piece], buckets: Iterable[Bucket], names: Iterable[str]
    ) -> None:
        """`names` are those of all parameters, even those of which this rank owns nothing."""
        self.settings = settings
        self.peak_learning_rate = max(settings.learning_rate_of(name) for name in names)
        by_bucket: dict[int, list[Piece]] = {bucket.shard.start: [] for bucket in buckets}
        starts = sorted(by_bucket)
        place = 0
        for piece in pieces:
            while place + 1 < len(starts) and piece.offset >= starts[place + 1]:
                place += 1
            by_bucket[starts[place]].append(piece)
        self._groups = {start: self._grouped(found) for start, found in by_bucket.items()}

    def write(
        self, bucket: Bucket, current: ShardState, following: ShardState, gradient: Tensor, learning_rate_factor: float,
        uses_vision: bool = True,
    ) -> None:
        """Write the bucket's part of version v+1 into `following`, from version v in `current`, which is left as it is.

        `gradient` is this rank's slice of the bucket, fp32. Parameters without a gradient have zeros there: their
        moments fade and their decay applies, as with any other gradient. Those of the vision encoder stay as they are
        unless the batch `uses_vision`, as in torch where a gradient is None.
        """
        for mine, theirs in zip(following.tensors().values(), current.tensors().values(), strict=True):
            mine[bucket.shard].copy_(theirs[bucket.shard])
        for (learning_rate, weight_decay, is_vision), intervals in self._groups[bucket.shard.start].items():
            if is_vision and not uses_vision:
                continue
            count = current.vision_updates if is_vision else current.version
            steps = torch.full((len(intervals),), float(count), device=gradient.device)
            adamw(
                [following.value[interval] for interval in intervals],
                [gradient[interval.start - bucket.shard.start : interval.stop - bucket.shard.start]
                 for interval in intervals],
                [following.exp_avg[interval] for interval in intervals],
                [following.exp_avg_sq[interval] for interval in intervals],
                [], list(steps.unbind()), fused=True, amsgrad=False, maximize=False,
                beta1=self.settings.betas[0], beta2=self.settings.betas[1], eps=self.settings.eps,
                lr=learning_rate * learning_rate_factor, weight_decay=weight_decay)

    def _grouped(self, pieces: list[Piece]) -> dict[tuple[float, float, bool], list[slice]]:
        """Return intervals of the shard by learning rate, decay and whether they are the vision encoder's; neighbours
        are joined over the padding between them, which stays zero.
        """
        found: dict[tuple[float, float, bool], list[slice]] = {}
        previous = None
        for piece in pieces:
            decay = self.settings.weight_decay if self.settings.decays(piece.name) else 0.0
            key = (self.settings.learning_rate_of(piece.name), decay, self.settings.is_vision(piece.name))
            intervals = found.setdefault(key, [])
            if key == previous:
                intervals[-1] = slice(intervals[-1].start, piece.shard.stop)
            else:
                intervals.append(piece.shard)
            previous = key
        return found


def learning_rate_factor(step: float, total_steps: int, warmup_steps: int, minimum: float = 0.0) -> float:
    """Factor (0 to 1) of the peak learning rate at `step`, counted from 1; it may lie between two steps.

        step     1 ... warmup_steps     warmup_steps + 1 ............ total_steps, and after
        factor   rises evenly above 0   1 ... half a cosine down ... `minimum`

    SGDR, arXiv 1608.03983, equation 5, without restarts.
    """
    if step < warmup_steps + 1:
        return step / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps - 1) / max(1, total_steps - warmup_steps - 1))
    return minimum + (1.0 - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))
