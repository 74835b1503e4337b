"""AdamW over one rank's shard: fp32 values and both moments, in versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dhp_ray.train.state.buckets import Bucket, Piece

UNFINISHED = -1
"""Version of a state that is being written."""

FUSED = ("cpu", "cuda")
"""Kinds of devices for which torch has a fused AdamW."""

PART_ELEMENTS = 2**26
"""Numbers that are copied at once: 256 MB."""


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


@dataclass
class ShardState:
    """One version of a rank's shard, fp32 (shard_size,) each. `version` counts the updates since the start of training,
    `vision_updates` those of them that the vision encoder took part in: the step counters of Adam.
    """

    value: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    version: int = 0
    vision_updates: int = 0

    @classmethod
    def zeros(cls, size: int, device: torch.device, pinned: bool = False) -> ShardState:
        """`pinned`: in host memory that a device copies to and from while it computes."""
        values = torch.zeros(3, size, dtype=torch.float32, device=device, pin_memory=pinned)
        value, exp_avg, exp_avg_sq = values.unbind()
        return cls(value, exp_avg, exp_avg_sq)

    @classmethod
    def empty(cls, size: int) -> ShardState:
        """Host memory for a state, whose pages are not touched yet."""
        value, exp_avg, exp_avg_sq = torch.empty(3, size, dtype=torch.float32).unbind()
        return cls(value, exp_avg, exp_avg_sq, UNFINISHED)

    def copy_(self, other: ShardState, before_part: Callable[[], None] = lambda: None) -> None:
        """Take over another state; this one is unfinished until that is done. `before_part` is called before every
        PART_ELEMENTS numbers.
        """
        self.version = UNFINISHED
        for mine, theirs in zip(self.tensors().values(), other.tensors().values(), strict=True):
            for part, source in zip(mine.split(PART_ELEMENTS), theirs.split(PART_ELEMENTS)):
                before_part()
                part.copy_(source)
        self.version, self.vision_updates = other.version, other.vision_updates

    def tensors(self) -> dict[str, Tensor]:
        return {"value": self.value, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


@dataclass(frozen=True)
class _Group:
    """Intervals of the shard that one learning rate and one decay apply to, in one part of the model."""

    learning_rate: float
    weight_decay: float
    is_vision: bool
    intervals: tuple[slice, ...]


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
        fused = gradient.device.type in FUSED
        steps_on = gradient.device if fused else torch.device("cpu")  # otherwise the host reads them one by one
        for mine, theirs in zip(following.tensors().values(), current.tensors().values(), strict=True):
            mine[bucket.shard].copy_(theirs[bucket.shard])
        for group in self._groups[bucket.shard.start]:
            if group.is_vision and not uses_vision:
                continue
            count = current.vision_updates if group.is_vision else current.version
            steps = torch.full((len(group.intervals),), float(count), device=steps_on)
            adamw(
                [following.value[interval] for interval in group.intervals],
                [gradient[interval.start - bucket.shard.start : interval.stop - bucket.shard.start]
                 for interval in group.intervals],
                [following.exp_avg[interval] for interval in group.intervals],
                [following.exp_avg_sq[interval] for interval in group.intervals],
                [], list(steps.unbind()), fused=fused, amsgrad=False, maximize=False,
                beta1=self.settings.betas[0], beta2=self.settings.betas[1], eps=self.settings.eps,
                lr=group.learning_rate * learning_rate_factor, weight_decay=group.weight_decay)

    def _grouped(self, pieces: list[Piece]) -> list[_Group]:
        """Group pieces by their settings; neighbours are joined over the padding between them, which stays zero."""
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
        return [_Group(*key, tuple(intervals)) for key, intervals in found.items()]
