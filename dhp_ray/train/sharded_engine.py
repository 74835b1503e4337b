"""The engine of `sync=micro_batch`: every parameter sharded over all ranks, by torch's FSDP2 (ZeRO-3, arXiv 1910.02054,
section 5).

    unit (a block, a layer; the rest is the root's)
    forward     my rows of its parameters -- all-gather --> whole, computed with, dropped again
    backward    gathered again; whole gradients -- reduce-scatter --> my rows of them, summed over micro-batches
    update      my rows -- AdamW --> my rows' version v+1

A unit's forward and backward are collectives of all ranks: every rank runs every unit equally often and in the same
order (`rank_step.py`). A parameter's rows on a rank are an interval of the flattened parameter, so that checkpoints are
those of the flat engine.

Experts are units of their own if ranks share them (`comm/expert_group.py`): a rank gathers the rows of its part alone,
from the ranks that hold the same part, and its gradients are sums over the tokens of its whole group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dhp_ray.comm.expert_group import ExpertGroup
from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import gather_over_ranks
from dhp_ray.compatibility import all_gather_single, fsdp_param_groups, reduce_scatter_single
from dhp_ray.model.expert_parallel import ExpertParallel
from dhp_ray.model.experts import has_experts
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.weights import Interval, StoredWeights
from dhp_ray.train.collate import PackInputs
from dhp_ray.train.engine import COMPUTE_TYPES, Engine
from dhp_ray.train.pack import pack_loss
from dhp_ray.train.state.optimizer import OptimizerSettings
from dhp_ray.train.state.shards import UNFINISHED, Bucket, Piece, ShardState


class MicroBatchModel(nn.Module):
    """The whole of a pack's computation as one module, so that FSDP sees where a micro-batch begins and ends.

    If any rank encodes in its pack, all ranks do: `inputs` then have an image (`with_tiny_image`).
    """

    def __init__(self, adapter: LanguageModel) -> None:
        super().__init__()
        self.adapter = adapter
        self.module = adapter.module

    def forward(self, inputs: PackInputs, link: PackCommunicator, encodes: bool) -> Tensor:
        return pack_loss(self.adapter, inputs, link, encodes)


class TimedCollective:
    """One kind of collective as FSDP calls it (its `AllGather` and `ReduceScatter`). On the CPU a call returns when it
    is done; on a device FSDP overlaps it with compute, and LayerMarks show what a rank waits for.
    """

    def __init__(self, call: Callable[..., dist.Work | None], progress: Progress) -> None:
        self._call, self._progress = call, progress

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> dist.Work | None:
        if output_tensor.device.type != "cpu":
            self._progress.check()
            return self._call(output_tensor, input_tensor, **options)
        with self._progress.waiting("rows of other ranks"):
            work = self._call(output_tensor, input_tensor, **options)
            if work:
                work.wait()
        return work


class ShardedEngine(Engine):
    """Shards an adapter's module permanently: fp32 rows on each rank, gathered in the computing type, reduced in fp32.

    Frozen parameters are sharded too, in the computing type if they come from files. The root, which holds what is in
    no unit (embedding, last norm, a tied head), stays gathered from its forward to the end of its backward. A head of
    its own is gathered while the last layer runs, and stays so until its backward pass, which comes next; its gradients
    are reduced during that of the last layer.
    """

    def __init__(
        self,
        adapter: LanguageModel,
        settings: OptimizerSettings,
        world_group: dist.ProcessGroup,
        rank: int,
        device: torch.device,
        precision: str = "fp32",
        progress: Progress | None = None,
        initialize: bool = True,
        expert_group: ExpertGroup | None = None,
    ) -> None:
        """Every rank calls this, with equal parameters, which move to `device` unit by unit; or with a model built
        without weights, from whose files it reads its rows. `world_group` holds all ranks, even if there is only one.
        `expert_group`: the ranks that share each layer's experts; None: they are sharded over all ranks, like the rest.

        With `initialize` False the values of trained parameters are not used: `load_state` must follow. ModelError: a
        file of weights cannot be read. ValueError: a parameter is a scalar, which cannot be sharded.
        """
        progress = progress or Progress(device)
        self.adapter, self.rank, self.world_size = adapter, rank, world_group.size()
        module: Any = adapter.module
        self.root = MicroBatchModel(adapter)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in module.named_parameters():
            if parameter.ndim == 0:
                raise ValueError(f"parameter {name}: a scalar, which cannot be sharded; allowed with planner.sync=step")
            self._shapes[name] = tuple(parameter.shape)
        self._world_group, self._meshes = world_group, [DeviceMesh.from_group(world_group, device.type)]
        for parameter, shape in adapter.sharded_shapes().items():
            parameter.data = parameter.data.view(shape)
        shared: list[nn.Module] = []
        self.expert_parallel: ExpertParallel | None = None
        if expert_group:
            shared = adapter.experts()
            self.expert_parallel = ExpertParallel(expert_group, adapter.shape)
            self.expert_parallel.share(shared)
            self._meshes.append(DeviceMesh.from_group(expert_group.holders, device.type))
        experts = {parameter for unit in shared for parameter in unit.parameters()}
        self._shared = {name for name, parameter in module.named_parameters() if parameter in experts}
        self._units = units = [*shared, *adapter.units(), self.root]
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE_TYPES[precision], reduce_dtype=torch.float32,
                                      cast_forward_inputs=False)
        gather = TimedCollective(all_gather_single, progress)
        scatter = TimedCollective(reduce_scatter_single, progress)
        if adapter.weights is not None:
            narrow_frozen(module, COMPUTE_TYPES[precision])
        self._kept: list[Any] = [unit for unit in units if unit in (adapter.head, self.root)]
        for unit in units:
            wrapped = fully_shard(unit, mesh=self._meshes[unit in shared], mp_policy=policy,
                                  reshard_after_forward=unit not in self._kept)
            sharded = cast(FSDPModule, wrapped)
            sharded.set_gradient_divide_factor(1.0)  # gradients are sums over ranks
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
            sharded.set_custom_all_gather(cast(Any, gather))
            sharded.set_custom_reduce_scatter(cast(Any, scatter))
        if adapter.head in units:
            # by the layer, not by its experts, which gather anew in a backward pass that runs them again
            cast(FSDPModule, adapter.language.layers[-1]).set_modules_to_forward_prefetch([adapter.head])
            adapter.head._set_unshard_async_op(True)  # otherwise FSDP frees the gathered buffer after the loss
        everything: dict[str, DTensor] = dict(module.named_parameters())
        self.frozen = {name: parameter for name, parameter in everything.items() if not parameter.requires_grad}
        self.parameters = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
        if adapter.weights is not None:
            read_shards(self.root, everything if initialize else self.frozen, adapter.weights, device, self._start)
        self._unit_pieces = self._lay_out(units)
        pieces = tuple(piece for found in self._unit_pieces.values() for piece in found)
        shapes = {name: self._shapes[name] for name in self.parameters}
        ends = {start: found[-1].shard.stop for start, found in self._unit_pieces.items()}
        self._buckets = tuple(Bucket(start, stop, slice(start, stop)) for start, stop in ends.items())
        super().__init__(settings, world_group if self.world_size > 1 else None, shapes, pieces, self._buckets,
                         pieces[-1].shard.stop if pieces else 0, device, progress)
        if not initialize:
            self.current.version = UNFINISHED
            return
        for piece in pieces:
            self.current.value[piece.shard].copy_(self._rows(piece))

    def loss(self, inputs: PackInputs, link: PackCommunicator, encodes: bool) -> Tensor:
        """`pack_loss` of this rank's pack of a micro-batch. Every rank calls it, then `backward()` on the result.

        `encodes`: whether any rank's pack in this micro-batch has an image; then all ranks encode, or images are
        encoded apart from the packs.
        """
        trains_encoder = encodes and self.adapter.trains("vision")
        trains = trains_encoder or self.adapter.trains("language")
        self._prefetch_before_first_layer(trains_encoder and inputs.features is None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
            loss: Tensor = self.root(inputs, link, encodes)
        if not loss.requires_grad:
            for unit in self._kept:
                unit.reshard()  # otherwise the backward pass does it
        return loss.requires_grad_() if torch.is_grad_enabled() and not loss.requires_grad else loss

    def _prefetch_before_first_layer(self, encoder_follows: bool) -> None:
        """Set whether the backward pass gathers a unit of the encoder while it is in the language model's first layer
        (or in its experts, which are gathered after the rest of it).

        FSDP by itself gathers the unit that ran before, also of an encoder without a backward pass in this pack, and
        holds it to the end. (An empty list stands for that; the root is gathered anyway.)
        """
        layer = self.adapter.language.layers[0]
        first = cast(FSDPModule, layer.mlp.experts if self.expert_parallel and has_experts(layer) else layer)
        first.set_modules_to_backward_prefetch([] if encoder_follows else [cast(FSDPModule, self.root)])

    def before_encoding(self) -> None:
        """Call this before units of the encoder are called outside `loss`: the model must become FSDP's root."""
        cast(FSDPModule, self.root)._get_fsdp_state()._lazy_init()

    def zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def gather(self, wanted: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Tensor | None]]:
        everything = {**self.parameters, **self.frozen}
        for name, owner in wanted:
            with self.progress.waiting("a parameter's rows of other ranks"):
                whole = self._whole(name, everything[name])
            value = (whole.to("cpu", torch.float32, copy=True).view(self._shapes[name]) if owner == self.rank
                     else None)
            self.progress.synchronize()
            del whole  # before the next one comes
            yield name, value

    def _lay_out(self, units: list[Any]) -> dict[int, list[Piece]]:
        """Return this rank's pieces of each unit of which it owns any, by where they begin in its shard."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        laid_out, offset = {}, 0
        for unit in units:
            found: list[Piece] = []
            for parameter in unit.parameters():
                name = names.pop(parameter, None)  # parameters of inner units belong to these
                rows = parameter.to_local()
                if name is None or not rows.numel():
                    continue
                start = self._start(name, parameter)
                found.append(Piece(name, start, start + rows.numel(), offset))
                offset += rows.numel()
            if found:
                laid_out[found[0].offset] = found
        return laid_out

    def _start(self, name: str, parameter: DTensor) -> int:
        """Return the element of a flattened parameter with which this rank's rows begin."""
        if self.expert_parallel and name in self._shared:
            group = self.expert_parallel.group
            return group.index * parameter.numel() + first_element(parameter, self.rank // group.size,
                                                                   self.world_size // group.size)
        return first_element(parameter, self.rank, self.world_size)

    def _whole(self, name: str, parameter: DTensor) -> Tensor:
        """Return all values of a parameter on every rank, which all call this."""
        rows, parallel = parameter.to_local().detach(), self.expert_parallel
        group = parallel.group.holders if parallel and name in self._shared else self._world_group
        most = -(-len(parameter) // group.size())  # rows of the first ranks; the last ones may have fewer
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        whole = gather_over_ranks(padded, group).flatten(0, 1)[: len(parameter)]
        return gather_over_ranks(whole, parallel.group.group) if parallel and name in self._shared else whole

    def _rows(self, piece: Piece) -> Tensor:
        """Return this rank's rows of a parameter, flattened; writing to them changes the parameter."""
        with torch.no_grad():
            return self.parameters[piece.name].to_local().view(-1)

    def _gradient(self, piece: Piece) -> Tensor:
        gradient = self.parameters[piece.name].grad
        if gradient is None:
            return torch.zeros(piece.stop - piece.start, device=self.device)
        return cast(DTensor, gradient).to_local().reshape(-1)

    def _detach(self) -> None:
        """Make the module unusable, so that references to it hold neither memory nor the group.

        FSDP has no call for this: its modules keep the group for life, and so does the mesh, which torch's DTensor
        caches keep too.
        """
        for mesh in self._meshes:
            mesh._pg_registry.clear()  # read by torch.compile alone
        if self.expert_parallel:
            self.expert_parallel.release(self.adapter.experts())
        for unit in self._units:
            for group in fsdp_param_groups(unit):
                group.mesh_info.shard_process_group = None
                for parameter in group.fsdp_params:
                    parameter.free_unsharded_param()
        for parameter in (self.parameters | self.frozen).values():
            parameter.grad = None
            with torch.no_grad():
                parameter.to_local().untyped_storage().resize_(0)
        self.adapter = self.root = self.expert_parallel = self._world_group = cast(Any, None)
        self._meshes = []
        self._units, self._kept, self.parameters, self.frozen = [], [], {}, {}

    def _reduce(self) -> float:
        """FSDP has reduced the gradients in every backward pass."""
        return self._norm(self._gradient(piece) for piece in self.pieces)

    def _reduced_gradient(self, bucket: Bucket) -> Tensor:
        return torch.cat([self._gradient(piece) for piece in self._unit_pieces[bucket.start]])

    def _all_gather(self, state: ShardState) -> Iterator[Bucket]:
        for bucket in self._buckets:
            yield bucket
            for piece in self._unit_pieces[bucket.start]:
                self._rows(piece).copy_(state.value[piece.shard])


def narrow_frozen(module: nn.Module, compute_type: torch.dtype) -> None:
    """Convert frozen parameters to the computing type, in which they are gathered anyway."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(compute_type)


def first_element(parameter: Tensor, rank: int, num_ranks: int) -> int:
    """Return the element of a flattened parameter with which the rows begin that FSDP2 gives to `rank`; all ranks but
    the last ones have equally many.
    """
    num_rows, *columns = parameter.shape
    return min(-(-num_rows // num_ranks) * rank, num_rows) * math.prod(columns)


def read_shards(
    root: nn.Module,
    parameters: Mapping[str, DTensor],
    weights: StoredWeights,
    device: torch.device,
    start_of: Callable[[str, DTensor], int],
) -> None:
    """Allocate this rank's rows of the sharded module `root`, which is on the meta device, and fill those of
    `parameters`, of which the first is element `start_of(name, parameter)` of the flattened one. Not a collective.
    """
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}  # tables that no file holds
    root.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in root.named_buffers():
            buffer.copy_(buffers[name])
    weights.read(Interval(name, start_of(name, parameter), cast(DTensor, parameter.detach()).to_local().view(-1))
                 for name, parameter in parameters.items())
