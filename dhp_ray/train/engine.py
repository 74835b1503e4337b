"""What all engines have in common: two versions of a rank's shard, and the update from one to the next."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.progress import Progress
from dhp_ray.comm.totals import numbers_of_ranks
from dhp_ray.train.state.buckets import Bucket, Piece
from dhp_ray.train.state.optimizer import UNFINISHED, OptimizerSettings, ShardedAdamW, ShardState
from dhp_ray.train.state.reshard import LocalShard

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Update:
    """The result of an update; equal on all ranks.

    `gradient_norm`: of the mean gradient over valid tokens, before clipping. `learning_rate`: the highest of all
    parameters at this step. If the norm is not finite, `applied` is False and the state keeps its version.
    """

    gradient_norm: float
    learning_rate: float
    applied: bool


class Engine(ABC):
    """Owns a module's parameters. Each rank keeps a shard of the trained ones: fp32 values and both moments of AdamW.

    An engine belongs to one membership. For the next one: `local_shards`, `release`, then a new engine and `load_state`
    of the result of `reshard`.
    """

    parameters: dict[str, Any]
    """The trained parameters, by name."""

    frozen: dict[str, Any]
    """The other parameters, by name."""

    def __init__(
        self,
        settings: OptimizerSettings,
        group: dist.ProcessGroup | None,
        shapes: dict[str, tuple[int, ...]],
        pieces: tuple[Piece, ...],
        buckets: tuple[Bucket, ...],
        shard_size: int,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        """`pieces` are this rank's, in the order of its shard; `group` None is for a single rank."""
        self.settings, self.group, self.shapes, self.device = settings, group, shapes, device
        self.progress = progress or Progress(device)
        self._pieces = pieces
        self.optimizer = ShardedAdamW(settings, pieces, buckets, shapes)
        self.current = ShardState.zeros(shard_size, device)
        self.spare = ShardState.zeros(shard_size, device)
        self.spare.version = UNFINISHED

    @property
    def state_version(self) -> int:
        """Updates applied since training began: Adam's step counter. UNFINISHED before a state is loaded."""
        return self.current.version

    @property
    def shard_size(self) -> int:
        """Number of elements of this rank's shard, including padding."""
        return self.current.value.numel()

    def pieces(self) -> tuple[Piece, ...]:
        """The content of this rank's shard, as intervals of flattened parameters."""
        return self._pieces

    @abstractmethod
    def zero_gradients(self) -> None:
        """Reset the gradients before the first pack of a step."""

    def end_pack(self) -> None:  # noqa: B027  # most engines have nothing to do
        """Finish a pack after its backward pass, or without gradients after its forward pass."""

    @abstractmethod
    def gather(self, wanted: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Tensor | None]]:
        """Yield parameters one by one. On the rank that wants a parameter, its value is whole, in fp32, on the CPU; on
        the other ranks it is None. Every rank must make the same call and take everything.

        Trained parameters are the fp32 masters, frozen ones are as they were given. The order of the module's
        parameters is the fastest.
        """

    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters as fp32 CPU tensors by name, on rank 0; empty on the others. Every rank must call this. Tied
        parameters appear under one name.
        """
        return {name: value for name, value in self.gather((name, 0) for name in [*self.parameters, *self.frozen])
                if value is not None}

    def update(self, num_valid_tokens: int, learning_rate_factor: float = 1.0) -> Update:
        """Take one AdamW step on the gradients, summed over all ranks and divided by the global batch's valid tokens.

        Every rank must call this with the same arguments: `num_valid_tokens` of the whole global batch (0 counts as 1,
        since its gradients are zeros), `learning_rate_factor` of the schedule. Version v+1 is written next to version v
        and replaces it at the end, once the device has written it and there was no abort. If this raises, version v and
        the gradients are intact, and `all_gather_parameters` on a working group restores the parameters of version v.
        """
        assert self.current.version != UNFINISHED, "a state must be loaded first"
        norm = self._reduce() / max(1, num_valid_tokens)
        learning_rate = self.optimizer.peak_learning_rate * learning_rate_factor
        if not math.isfinite(norm):
            return Update(norm, learning_rate, applied=False)
        clip_norm = self.settings.clip_norm
        coefficient = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0  # as torch.nn.utils.clip_grad_norm_
        scale = coefficient / max(1, num_valid_tokens)
        self.spare.version = UNFINISHED
        for bucket in self._all_gather(self.spare):
            self.progress.mark("update")
            self.optimizer.write(bucket, self.current, self.spare, self._reduced_gradient(bucket) * scale,
                                 learning_rate_factor)
        self.progress.synchronize()
        self.spare.version = self.current.version + 1
        self.current, self.spare = self.spare, self.current
        return Update(norm, learning_rate, applied=True)

    def all_gather_parameters(self) -> None:
        """Gather the module's parameters from the current shards of all ranks. Every rank must call this."""
        for _ in self._all_gather(self.current):
            pass

    def load_state(self, state: ShardState) -> None:
        """Replace the state of this rank's shard with another one (on any device). Every rank must call this with the
        same version.

        `local_shards` no longer returns the earlier version, which may belong to another history than this state.
        """
        self.spare.copy_(state)
        self.current, self.spare = self.spare, self.current
        self.spare.version = UNFINISHED
        self.all_gather_parameters()

    def local_shards(self, rank: int) -> list[LocalShard]:
        """The complete versions of this rank's shard, newest first: the current one and, after an update, the previous
        one.

        `rank` is this rank's. The states belong to the engine and are valid until the next `update` or `load_state`.
        """
        return [LocalShard(rank, state.version, self._pieces, state) for state in (self.current, self.spare)
                if state.version != UNFINISHED]

    def release(self) -> None:
        """Release all memory and the group, even in the middle of a failed step. Call nothing else afterwards.

        Local shards that were returned before stay valid. Not a collective.
        """
        self._detach()
        self.current, self.spare = ShardState.zeros(0, self.device), ShardState.zeros(0, self.device)
        self.current.version = self.spare.version = UNFINISHED
        # the settings know the model, and FSDP's modules the group
        self.group = self.settings = self.optimizer = cast(Any, None)

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            with self.progress.waiting("shards of other ranks"):
                work.wait()

    @abstractmethod
    def _detach(self) -> None:
        """Release gradients and parameters."""

    @abstractmethod
    def _reduce(self) -> float:
        """Sum the gradients over all ranks, unless that is done already; return the norm of the sum."""

    @abstractmethod
    def _reduced_gradient(self, bucket: Bucket) -> Tensor:
        """This rank's slice of a bucket's summed gradient, fp32; valid after `_reduce`."""

    @abstractmethod
    def _all_gather(self, state: ShardState) -> Iterator[Bucket]:
        """Update the module's parameters to `state`. Yields each bucket first, for the caller to write it."""

    def _norm(self, slices: Iterable[Tensor]) -> float:
        """The norm over all ranks, given this rank's `slices`."""
        # float32 sums of many squares lose digits on the CPU; NPUs have no float64
        wide = torch.float32 if self.device.type == "npu" else torch.float64
        norms = [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in slices]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self.device)
        return math.hypot(*numbers_of_ranks(norm, self.group, self.progress))
