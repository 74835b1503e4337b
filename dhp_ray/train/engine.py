"""What all engines share: two versions of a rank's shard, and the update that turns one into the next."""

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
from dhp_ray.comm.ranks import numbers_of_ranks
from dhp_ray.train.state.optimizer import OptimizerSettings, ShardedAdamW
from dhp_ray.train.state.shards import UNFINISHED, Bucket, LocalShard, Piece, ShardState

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did; equal on all ranks.

    `gradient_norm` is that of the mean gradient over valid tokens, before clipping. `learning_rate` is the highest of
    all parameters' at this step. If the norm is not finite, or there was no valid token, `applied` is False and the
    state keeps its version.
    """

    gradient_norm: float
    learning_rate: float
    applied: bool


class Engine(ABC):
    """Owns a module's parameters; each rank keeps a shard of the trained ones: fp32 values and both moments of AdamW.

    An engine belongs to one membership. For the next one: `local_shards`, `release`, then a new engine and `load_state`
    of the result of `reshard`.
    """

    parameters: dict[str, Any]
    """The parameters that are trained, by name."""

    frozen: dict[str, Any]
    """The parameters that are not."""

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
        self.pieces = pieces
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
        """Elements of this rank's shard, padding included."""
        return self.current.value.numel()

    @abstractmethod
    def zero_gradients(self) -> None:
        """Reset the gradients before the first pack of a step."""

    @abstractmethod
    def gather(self, wanted: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Tensor | None]]:
        """Yield parameters one by one, each with its value on the rank that gets it, and None on the others: whole,
        fp32, on the CPU. Every rank calls this alike and consumes all of it.

        Trained ones are the fp32 masters, frozen ones as the engine keeps them. It is fastest in the order of
        the module's parameters.
        """

    def update(self, num_valid_tokens: int, learning_rate_factor: float = 1.0, uses_vision: bool = True) -> Update:
        """Take one AdamW step on the gradients, summed over all ranks and divided by the global batch's valid tokens.

        Every rank calls this, with the same arguments: `num_valid_tokens` of the whole global batch (with 0 there is
        nothing to learn from, and nothing is updated), `learning_rate_factor` of the schedule, `uses_vision`: whether
        any sample used the vision encoder; if none did, it is left as it is, its moments and its count of updates too.

        Version v+1 is written next to version v and takes its place at the end, once the device has written it and
        there was no abort: if this raises, version v and the gradients are whole, and `all_gather_parameters` on a
        working group brings the parameters back to it.
        """
        assert self.current.version != UNFINISHED, "a state must be loaded first"
        norm = self._reduce() / max(1, num_valid_tokens)
        learning_rate = self.optimizer.peak_learning_rate * learning_rate_factor
        if not num_valid_tokens or not math.isfinite(norm):
            return Update(norm, learning_rate, applied=False)
        clip_norm = self.settings.clip_norm
        coefficient = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0  # as torch.nn.utils.clip_grad_norm_
        scale = coefficient / num_valid_tokens
        self.spare.version = UNFINISHED
        for bucket in self._all_gather(self.spare):
            self.progress.mark("update")
            self.optimizer.write(bucket, self.current, self.spare, self._reduced_gradient(bucket) * scale,
                                 learning_rate_factor, uses_vision)
        self.progress.synchronize()
        self.spare.version = self.current.version + 1
        self.spare.vision_updates = self.current.vision_updates + uses_vision
        self.current, self.spare = self.spare, self.current
        return Update(norm, learning_rate, applied=True)

    def all_gather_parameters(self) -> None:
        """Gather the module's parameters from the current shards of all ranks. Every rank calls this."""
        for _ in self._all_gather(self.current):
            pass

    def load_state(self, state: ShardState) -> None:
        """Replace the state of this rank's shard by another one (on any device). Every rank calls this, with the same
        version.

        `local_shards` no longer returns the state before: it may belong to a history that this state is not part of.
        """
        self.spare.copy_(state)
        self.current, self.spare = self.spare, self.current
        self.spare.version = UNFINISHED
        self.all_gather_parameters()

    def local_shards(self, rank: int) -> list[LocalShard]:
        """The complete versions of this rank's shard, newest first: the current one and, after an update, the one
        before it.

        `rank` is this rank's. The states are the engine's own: they are valid until the next `update` or `load_state`.
        """
        return [LocalShard(rank, state.version, self.pieces, state) for state in (self.current, self.spare)
                if state.version != UNFINISHED]

    def release(self) -> None:
        """Release all memory and the group, even in the middle of a step that failed; call nothing else afterwards.

        Local shards that were given out stay valid. Not a collective.
        """
        self._detach()
        self.current, self.spare = ShardState.zeros(0, self.device), ShardState.zeros(0, self.device)
        self.current.version = self.spare.version = UNFINISHED
        # the settings refer to the model, and FSDP's modules to the group
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
        """Sum the gradients over all ranks if that has not been done yet; return the norm of the sum."""

    @abstractmethod
    def _reduced_gradient(self, bucket: Bucket) -> Tensor:
        """This rank's slice of a bucket's summed gradient, fp32; after `_reduce`."""

    @abstractmethod
    def _all_gather(self, state: ShardState) -> Iterator[Bucket]:
        """Bring the module's parameters up to `state`; yields each bucket first, for the caller to write it."""

    def _norm(self, slices: Iterable[Tensor]) -> float:
        """Return the norm over all ranks of the tensor that this rank's `slices` are a part of."""
        # float32 sums of many squares lose digits on the CPU; NPUs have no float64
        wide = torch.float32 if self.device.type == "npu" else torch.float64
        norms = [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in slices]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self.device)
        return math.hypot(*numbers_of_ranks(norm, self.group, self.progress))
