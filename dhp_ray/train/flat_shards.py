"""What the engines of `sync=step` share: the flat layout of trained parameters, and the shard that each rank has of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp_ray.comm.progress import Progress
from dhp_ray.compatibility import all_gather_single
from dhp_ray.model.weights import Interval, StoredWeights
from dhp_ray.train.engine import COMPUTE_TYPES, Engine
from dhp_ray.train.state.buckets import FlatLayout
from dhp_ray.train.state.optimizer import OptimizerSettings


class FlatShards(Engine):
    """An engine whose shards are slices of the buckets of one flat buffer (`FlatLayout`).

    Shards are fp32 for every precision. Frozen parameters are in the computing type; `originals` has, on the CPU, the
    original values of those that this has changed. It is empty for a model that has files: an export reads them there.
    A tied parameter counts once, under its first name.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: OptimizerSettings,
        world_group: dist.ProcessGroup | None,
        world_size: int,
        rank: int,
        precision: str,
        bucket_bytes: int,
        originals: Mapping[str, Tensor] | None,
        progress: Progress | None,
        weights: StoredWeights | None,
        device: torch.device | None,
    ) -> None:
        """Every rank calls this. `world_group` None is for a single rank; `bucket_bytes` counts fp32 gradients;
        `device` is where the state goes, by default where the parameters are.

        Raises:
            ValueError: unknown precision, no parameter to train, or several ranks without a group.
        """
        if precision not in COMPUTE_TYPES:
            raise ValueError(f"precision: got {precision!r}; allowed: {', '.join(COMPUTE_TYPES)}")
        if world_size > 1 and world_group is None:
            raise ValueError(f"world_group: got None for {world_size} ranks; allowed only for one")
        self.module, self.world_size, self.rank = module, world_size, rank
        self.compute_type = COMPUTE_TYPES[precision]
        self.parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
        if not self.parameters:
            raise ValueError("train.freeze: every parameter of the model is frozen; at least one must be left to train")
        self.layout = FlatLayout({name: parameter.shape for name, parameter in self.parameters.items()}, world_size,
                                 bucket_bytes // 4)
        super().__init__(settings, world_group if world_size > 1 else None, self.layout.shapes,
                         self.layout.pieces(rank), self.layout.buckets, self.layout.shard_size,
                         device or next(iter(self.parameters.values())).device, progress)
        self.originals, self._weights = dict(originals or {}), weights

    def gather(self, wanted: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Tensor | None]]:
        held, size = -1, max(bucket.stop - bucket.start for bucket in self.layout.buckets)
        buffer = torch.empty(size, dtype=torch.float32, device=self.device)
        for name, owner in wanted:
            mine = owner == self.rank
            if name in self.frozen:
                yield name, self._frozen_whole(name) if mine else None
                continue
            interval = self.layout.interval(name)
            value = torch.empty(interval.stop - interval.start) if mine else None
            for number in self.layout.buckets_of(name):
                bucket = self.layout.buckets[number]
                whole = buffer[: bucket.stop - bucket.start]
                if number != held:
                    self._wait(self._gather_into(whole, self.current.value[bucket.shard]))
                    self.progress.synchronize()
                    held = number
                start, stop = max(bucket.start, interval.start), min(bucket.stop, interval.stop)
                if value is not None:
                    value[start - interval.start : stop - interval.start].copy_(
                        whole[start - bucket.start : stop - bucket.start])
            yield name, None if value is None else value.view(self.layout.shapes[name])

    def _frozen_whole(self, name: str) -> Tensor:
        """Return a frozen parameter as it was given, fp32 on the CPU."""
        found = self._frozen_value(name).to("cpu", torch.float32, copy=True)
        if (self._weights is not None and self.compute_type != torch.float32
                and self._weights.type_of(name) != self.compute_type):
            self._weights.read([Interval(name, 0, found.view(-1))])
        return found

    @abstractmethod
    def _frozen_value(self, name: str) -> Tensor:
        """Return a frozen parameter as it was given, or, if a file has it, in the computing type."""

    def _fill_shard(self) -> None:
        """Fill this rank's shard of the trained parameters, from the module or from their files."""
        stored = []
        for piece in self._pieces:
            parameter, mine = self.parameters[piece.name], self.current.value[piece.shard]
            if parameter.is_meta:
                stored.append(Interval(piece.name, piece.start, mine))
            else:
                mine.copy_(parameter.detach().reshape(-1)[piece.start : piece.stop])
        if self._weights is not None:
            self._weights.read(stored)

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        return buffer[self.layout.interval(name)].view(self.layout.shapes[name])

    def _gather_into(self, whole: Tensor, mine: Tensor) -> dist.Work | None:
        if self.world_size == 1:
            whole.copy_(mine)
            return None
        return all_gather_single(whole, mine, group=self.group, async_op=True)
