"""The flat engine of `sync=step`: whole parameters and gradients on every rank, optimizer state sharded (ZeRO-1).

    packs (no collective of ours)      parameters -> forward, backward -> gradients, summed over this rank's packs
    update                             gradients -- reduce-scatter --> my slices -- AdamW --> my slices' version v+1
                                       my slices -- all-gather --> parameters

Every rank reduces and gathers every bucket in every step, whatever its packs used: nothing depends on the plan.
ZeRO: arXiv 1910.02054, section 5 (stage 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import copy_from_rank, numbers_of_ranks
from dhp_ray.compatibility import all_gather_single, reduce_scatter_single
from dhp_ray.model.weights import READ_BYTES, Interval, StoredWeights
from dhp_ray.planner.memory.model import SLICE_BYTES
from dhp_ray.train.engine import COMPUTE_TYPES, Engine
from dhp_ray.train.state.optimizer import OptimizerSettings
from dhp_ray.train.state.shards import UNFINISHED, Bucket, FlatLayout, Piece, ShardState

IN_FLIGHT = 2
"""Collectives under way at a time: one moves while the bucket before it is worked on."""


class FlatEngine(Engine):
    """Owns a module's parameters: they become views of one buffer, and their gradients are summed in an fp32 one. Its
    shards are slices of the buckets of this buffer (`FlatLayout`).

    With "bf16" the resident parameters are bf16 and each backward's gradients are added to the fp32 buffer; a
    parameter's own `.grad` is then None. Shards are fp32 for every precision. Frozen parameters are in the computing
    type. A tied parameter counts once, under its first name.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: OptimizerSettings,
        world_group: dist.ProcessGroup | None,
        world_size: int,
        rank: int,
        precision: str = "fp32",
        bucket_bytes: int | None = None,
        initialize: bool = True,
        progress: Progress | None = None,
        weights: StoredWeights | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Every rank calls this. `world_group` None is for a single rank; `bucket_bytes` counts fp32 gradients, by
        default SLICE_BYTES for each rank; `device` is where the state goes, by default where the parameters are.

        Parameters on the meta device get their values from `weights`: each rank reads its share and gathers the rest,
        and frozen parameters come from a rank that has them, if there is one.

        With `initialize` False the values of trained parameters are not used: `load_state` must follow. ModelError: a
        file of weights cannot be read.
        """
        self.module, self.world_size, self.rank = module, world_size, rank
        self.compute_type = COMPUTE_TYPES[precision]
        bucket_bytes = bucket_bytes or world_size * SLICE_BYTES
        self.parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
        self.layout = FlatLayout({name: parameter.shape for name, parameter in self.parameters.items()}, world_size,
                                 bucket_bytes // 4)
        super().__init__(settings, world_group if world_size > 1 else None, self.layout.shapes,
                         self.layout.pieces(rank), self.layout.buckets, self.layout.shard_size,
                         device or next(iter(self.parameters.values())).device, progress)
        if weights is not None and self.frozen:
            moved_bytes = min(bucket_bytes, world_size * READ_BYTES)  # a rank reads its slice of a bucket at once
            self._load_frozen(weights, moved_bytes // 4)
        for parameter in self.frozen.values():
            parameter.data = parameter.data.to(self.device, self.compute_type)
        if initialize:
            self._fill_shard(weights)
        else:
            self.current.version = UNFINISHED
        self._take_over()
        if initialize:
            self.all_gather_parameters()

    def gradients(self) -> dict[str, Tensor]:
        """This rank's summed fp32 gradients by name, as views; zero for what its packs did not use."""
        self._zero_old()
        return {name: self._view(self._gradient, name) for name in self.parameters}

    def zero_gradients(self) -> None:
        if self.compute_type != torch.float32:
            self._old.update(self.parameters)  # the first pack that uses one writes over it
            return
        self._gradient.zero_()
        for name, parameter in self.parameters.items():  # something else may have set .grad to None
            parameter.grad = self._view(self._gradient, name)

    def gather(self, wanted: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Tensor | None]]:
        """The room of the gradients takes what arrives: those of the last step are gone."""
        gathered: set[int] = set()
        for name, owner in wanted:
            mine = owner == self.rank
            if name in self.frozen:
                yield name, self.frozen[name].detach().to("cpu", torch.float32, copy=True) if mine else None
                continue
            for number in self.layout.buckets_of(name):
                bucket = self.layout.buckets[number]
                if number not in gathered:
                    self._wait(self._gather_into(self._gradient[bucket.flat], self.current.value[bucket.shard]))
                    self.progress.synchronize()
                    gathered.add(number)
            yield name, self._view(self._gradient, name).to("cpu", copy=True) if mine else None

    def _fill_shard(self, weights: StoredWeights | None) -> None:
        """Fill this rank's shard of the trained parameters, from the module or from their files."""
        stored = []
        for piece in self.pieces:
            parameter, mine = self.parameters[piece.name], self.current.value[piece.shard]
            if parameter.is_meta:
                stored.append(Interval(piece.name, piece.start, mine))
            else:
                mine.copy_(parameter.detach().reshape(-1)[piece.start : piece.stop])
        if weights is not None:
            weights.read(stored)

    def _load_frozen(self, weights: StoredWeights, bucket_elements: int) -> None:
        """Give frozen parameters their values in the computing type, on the ranks where they have none: on the meta
        device, or one element in the place of all, as an engine leaves them that had them elsewhere. So many elements
        are moved at a time. If this raises, parameters are as before.
        """
        has = all(not parameter.is_meta and parameter.untyped_storage().nbytes() >= parameter.nbytes
                  for parameter in self.frozen.values())
        having = numbers_of_ranks(torch.tensor(float(has)), self.group, self.progress)
        if all(having):
            return
        shapes = {name: parameter.shape for name, parameter in self.frozen.items()}
        layout = FlatLayout(shapes, self.world_size, bucket_elements)
        whole = torch.empty(0 if has else layout.size, dtype=self.compute_type, device=self.device)
        if any(having):
            assert self.group is not None  # a single rank has all or nothing
            source = having.index(1.0)
            for name, parameter in self.frozen.items():
                values = (parameter.data if has else whole[layout.interval(name)]).view(-1)
                for part in values.split(bucket_elements):
                    # not over valid values: an abort leaves garbage
                    into = torch.empty_like(part) if has and self.rank != source else part
                    with self.progress.waiting("frozen parameters of another rank"):
                        copy_from_rank(into, source, self.group)
        else:
            pieces = deque(layout.pieces(self.rank))
            for bucket in layout.buckets:
                mine = _read_part(weights, pieces, bucket, whole)
                self._wait(self._gather_into(whole[bucket.flat], mine))
        self.progress.synchronize()
        if not has:
            for name, parameter in self.frozen.items():
                place(parameter, whole[layout.interval(name)].view(layout.shapes[name]))

    def _take_over(self) -> None:
        """Give the parameters their places in the flat buffers; `all_gather_parameters` fills in their values."""
        self._drop_values()
        self._resident = torch.zeros(self.layout.size, dtype=self.compute_type, device=self.device)
        self._gradient = torch.zeros(self.layout.size, dtype=torch.float32, device=self.device)
        self._shard_gradient = self._gradient if self.world_size == 1 else torch.zeros_like(self.current.value)
        self._hooks, self._old = [], set[str]()  # names of gradients that are of the step before
        for name, parameter in self.parameters.items():
            place(parameter, self._view(self._resident, name))
            if self.compute_type == torch.float32:
                parameter.grad = self._view(self._gradient, name)  # autograd adds to it in place
            else:
                add = partial(_move_gradient, self._view(self._gradient, name), name, self._old)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(add))
        for holder in self.module.modules():
            for name, buffer in holder.named_buffers(recurse=False):
                setattr(holder, name, buffer.to(self.device))

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._drop_values()
        self._resident = self._gradient = self._shard_gradient = torch.zeros(0, device=self.device)

    def _drop_values(self) -> None:
        """Leave the trained parameters their shapes, and one element of memory each."""
        for parameter in self.parameters.values():
            parameter.grad = None
            place(parameter, torch.zeros((), dtype=self.compute_type, device=self.device).expand(parameter.shape))

    def _reduce(self) -> float:
        """Sum the gradients over all ranks into `_shard_gradient`; return the norm of the sum."""
        self._zero_old()
        return self._norm(self._shard_gradient[bucket.shard] for bucket in self._reduced())

    def _reduced_gradient(self, bucket: Bucket) -> Tensor:
        return self._shard_gradient[bucket.shard]

    def _reduce_scatter(self, bucket: Bucket) -> dist.Work | None:
        if self.world_size == 1:
            return None
        return reduce_scatter_single(self._shard_gradient[bucket.shard], self._gradient[bucket.flat],
                                     group=self.group, async_op=True)

    def _all_gather(self, state: ShardState) -> Iterator[Bucket]:
        """Bring the resident parameters up to `state`.

        Yields each bucket for the caller to write it, then starts to gather it: bucket k moves while k+1 is written.
        """
        started: deque[tuple[dist.Work | None, Tensor]] = deque()
        for bucket in self.layout.buckets:
            yield bucket
            mine = state.value[bucket.shard].to(self.compute_type)
            # `mine` lives until it is sent
            started.append((self._gather_into(self._resident[bucket.flat], mine), mine))
            if len(started) > IN_FLIGHT:
                self._wait(started.popleft()[0])
        for work, _ in started:
            self._wait(work)

    def _zero_old(self) -> None:
        for name in self._old:
            self._view(self._gradient, name).zero_()
        self._old.clear()

    def _view(self, buffer: Tensor, name: str) -> Tensor:
        return buffer[self.layout.interval(name)].view(self.layout.shapes[name])

    def _gather_into(self, whole: Tensor, mine: Tensor) -> dist.Work | None:
        if self.world_size == 1:
            whole.copy_(mine)
            return None
        return all_gather_single(whole, mine, group=self.group, async_op=True)

    def _reduced(self) -> Iterator[Bucket]:
        """Yields each bucket when the sum of its gradients is there, while the next one's is under way."""
        following = iter(self.layout.buckets)
        started = deque((bucket, self._reduce_scatter(bucket)) for bucket in islice(following, IN_FLIGHT))
        while started:
            bucket, work = started.popleft()
            self._wait(work)
            started.extend((later, self._reduce_scatter(later)) for later in islice(following, 1))
            yield bucket


def _move_gradient(total: Tensor, name: str, old: set[str], parameter: Tensor) -> None:
    """Add a gradient to the `total` of its step, widened to fp32 on the way; `total` is `old` if it is the first."""
    assert parameter.grad is not None
    if name in old:
        total.copy_(parameter.grad)
        old.remove(name)
    else:
        total.add_(parameter.grad)
    parameter.grad = None


def place(parameter: nn.Parameter, value: Tensor) -> None:
    """Let a parameter hold `value`, in every module that has it; the parameter may be on the meta device."""
    if parameter.is_meta:  # `.data` takes no tensor of another kind of memory
        torch.utils.swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))
    else:
        parameter.data = value


def _read_part(weights: StoredWeights, pieces: deque[Piece], bucket: Bucket, like: Tensor) -> Tensor:
    """Read a rank's slice of a bucket from the files, in the type and on the device of `like`. `pieces`: its pieces of
    this bucket and of those after it; those that are read are removed.
    """
    begin, end = bucket.shard.start, bucket.shard.stop
    mine, intervals = like.new_zeros(end - begin), []
    while pieces and pieces[0].offset < end:
        piece = pieces.popleft()
        intervals.append(
            Interval(piece.name, piece.start, mine[piece.shard.start - begin : piece.shard.stop - begin]))
    weights.read(intervals)
    return mine
