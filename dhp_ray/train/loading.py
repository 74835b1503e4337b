"""Loads a module's values from the files of a model folder: each rank reads its share, and no host's memory holds the
whole.

    flat engine      trained    each rank reads its shard of the flat buffer, then all are gathered (flat_engine.py)
                     frozen     the same; in a generation with ranks of the one before, one of these sends them
    sharded engine   all        each rank reads the rows that it owns
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import copy_from_rank, numbers_of_ranks
from dhp_ray.compatibility import all_gather_single
from dhp_ray.model.weights import Interval, StoredWeights
from dhp_ray.train.state.buckets import Bucket, FlatLayout, Piece


def place(parameter: nn.Parameter, value: Tensor) -> None:
    """Let a parameter hold `value`, in every module that has it; the parameter may be on the meta device."""
    if parameter.is_meta:  # `.data` takes no tensor of another kind of memory
        torch.utils.swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))
    else:
        parameter.data = value


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Bring a module's buffers to `device`, and no parameter."""
    for holder in module.modules():
        for name, buffer in holder.named_buffers(recurse=False):
            setattr(holder, name, buffer.to(device))


def load_frozen(
    frozen: Mapping[str, nn.Parameter],
    weights: StoredWeights,
    compute_type: torch.dtype,
    bucket_elements: int,
    rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    progress: Progress,
) -> None:
    """Give whole parameters their values in `compute_type`, on the ranks where they have none: on the meta device, or
    one element in the place of all, as an engine leaves them that had them elsewhere.

    Every rank calls this, with equal names and `bucket_elements`, the number of elements moved at a time. If it raises,
    parameters are as before.

    Raises:
        ModelError: a file is gone or damaged.
    """
    has = all(map(_has_values, frozen.values()))
    having = numbers_of_ranks(torch.tensor(float(has)), group, progress)
    if all(having):
        return
    layout = FlatLayout({name: parameter.shape for name, parameter in frozen.items()}, len(having), bucket_elements)
    whole = torch.empty(0 if has else layout.size, dtype=compute_type, device=device)
    if any(having):
        assert group is not None  # a single rank has all or nothing
        source = having.index(1.0)
        for name, parameter in frozen.items():
            values = (parameter.data if has else whole[layout.interval(name)]).view(-1)
            for part in values.split(bucket_elements):
                # not over valid values: an abort leaves garbage
                into = torch.empty_like(part) if has and rank != source else part
                with progress.waiting("frozen parameters of another rank"):
                    copy_from_rank(into, source, group)
    else:
        pieces = deque(layout.pieces(rank))
        for bucket in layout.buckets:
            mine = _read_part(weights, pieces, bucket, whole)
            if group is None:
                whole[bucket.flat].copy_(mine)
                continue
            with progress.waiting("frozen parameters of other ranks"):
                all_gather_single(whole[bucket.flat], mine, group=group)
    progress.synchronize()
    if not has:
        for name, parameter in frozen.items():
            place(parameter, whole[layout.interval(name)].view(layout.shapes[name]))


def _has_values(parameter: nn.Parameter) -> bool:
    return not parameter.is_meta and parameter.untyped_storage().nbytes() >= parameter.nbytes


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


def first_row(num_rows: int, rank: int, world_size: int) -> int:
    """Return the first of a parameter's rows that FSDP2 gives to `rank`; all ranks but the last ones have equally many.
    """
    return min(-(-num_rows // world_size) * rank, num_rows)


def read_shards(
    root: nn.Module,
    parameters: Mapping[str, DTensor],
    weights: StoredWeights,
    rank: int,
    world_size: int,
    device: torch.device,
) -> None:
    """Allocate this rank's rows of the sharded module `root`, which is on the meta device, and fill those of
    `parameters`. Not a collective.

    Raises:
        ModelError: a file is gone or damaged.
    """
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}  # tables that no file holds
    root.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in root.named_buffers():
            buffer.copy_(buffers[name])
    weights.read(
        Interval(name, first_row(parameter.shape[0], rank, world_size) * math.prod(parameter.shape[1:]),
                 cast(DTensor, parameter.detach()).to_local().view(-1))
        for name, parameter in parameters.items()
    )
