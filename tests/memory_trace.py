"""Peak memory without memory: a pass over fake tensors, of which every storage is counted while it lives.

Tensors that say what is computed (token ids, grids, offsets) are real, since the model reads them; what is computed
with is fake. Attention takes the operators of CUDA, whose shapes torch knows on every build; what they take for
themselves is added where they run.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig

from dhp_ray.comm.expert_group import ExpertGroup
from dhp_ray.comm.pack_communicator import PackCommunicator, Pending
from dhp_ray.comm.progress import Progress
from dhp_ray.model import attention, experts, segment_attention
from dhp_ray.model.build import meta_model
from dhp_ray.model.kernels import cuda
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.lora import LoraSettings
from dhp_ray.planner.memory.host import CHUNK_BYTES
from dhp_ray.planner.memory.model import MemorySettings, PackLoad
from dhp_ray.planner.plan.types import Grid, Pack, Sample
from dhp_ray.train.activation_offload import PackOffload
from dhp_ray.train.collate import PackInputs, Payload, collate
from dhp_ray.train.engine import COMPUTE_TYPES
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.pack import pack_loss
from dhp_ray.train.sharded_engine import ShardedEngine, narrow_frozen
from dhp_ray.train.state.optimizer import OptimizerSettings

aten = torch.ops.aten


class MemoryTrace(TorchDispatchMode):
    """Bytes that live, and the most that have lived since `begin`, of the storages made under it."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode()
        self.live_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._on_host: set[int] = set()

    def begin(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default:  # asked at every operator
            return function(*arguments)
        if function is aten.equal.default:
            return True  # published weights are bf16: computing in it changes none
        options = dict(options or {})
        tensors = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            if not all(isinstance(tensor, FakeTensor) or tensor.ndim == 0 for tensor in tensors):
                arguments, options = tree_map_only(Tensor, self._faked, (arguments, options))
            fake = True
        else:
            made = options.get("dtype", torch.float32)
            fake = not tensors and made.is_floating_point and "arange" not in str(function)
        if fake:
            with self._fake:
                result = function(*arguments, **options)
        else:
            result = function(*arguments, **options)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes(function, arguments))
        return result

    def faked(self, tensor: Tensor) -> Tensor:
        """A tensor of this shape that is computed with."""
        with _disable_current_modes():
            return self._fake.from_tensor(tensor)

    def on_host(self, num_bytes: int) -> Tensor:
        """Bytes that are not the device's."""
        with _disable_current_modes(), self._fake:
            made = torch.empty(num_bytes, dtype=torch.uint8)
        self._on_host.add(made.untyped_storage()._cdata)
        return made

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._on_host:
            return
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key)
        self.live_bytes += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)

    def _faked(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) or tensor.ndim == 0 else self._fake.from_tensor(tensor)


def workspace_bytes(function: Any, arguments: tuple[Any, ...]) -> int:
    """What flash attention's backward allocates beside its outputs (mha_varlen_bwd of torch's flash_api.cpp): dq_accum
    and softmax_d, both with 128 rows more for each sequence, and dk and dv expanded to the queries' heads.
    """
    if function is not aten._flash_attention_backward.default:
        return 0
    q, k, num_sequences = arguments[1], arguments[2], len(arguments[6]) - 1
    num_rows, num_heads, width = q.shape
    rounded = -(-width // 32) * 32
    expanded = 2 * k.shape[0] * num_heads * width * k.element_size() if k.shape[1] != num_heads else 0
    return (num_rows + 128 * num_sequences) * num_heads * (rounded + 1) * 4 + expanded


@contextmanager
def memory_trace() -> Iterator[MemoryTrace]:
    trace = MemoryTrace()
    before = torch.UntypedStorage.resize_, attention.kernel_for

    def resize(storage: Any, size: int) -> Any:
        result = before[0](storage, size)
        trace.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]  # FSDP's way to free
    attention.kernel_for = segment_attention.kernel_for = experts.kernel_for = lambda device: cuda
    try:
        with trace:
            yield trace
    finally:
        torch.UntypedStorage.resize_ = before[0]  # type: ignore[method-assign]
        attention.kernel_for = segment_attention.kernel_for = experts.kernel_for = before[1]


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """A default group of so many ranks in one process, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def expert_group(settings: MemorySettings, num_tokens: int) -> ExpertGroup | None:
    """Of ranks that share experts in a `fake_world`, each with so many tokens."""
    size = settings.expert_parallel
    if size == 1:
        return None
    group, holders = (dist.new_group(list(ranks)) for ranks in (range(size), range(0, settings.world_size, size)))
    found = ExpertGroup(size, 0, group, holders, Progress())
    found.num_tokens = num_tokens
    return found


class SilentLink(PackCommunicator):
    """Members that exchange nothing, as fake tensors hold nothing; what is received has its memory."""

    def __init__(self, degree: int, member: int = 0) -> None:
        super().__init__(range(degree), member, cast(Any, object()) if degree > 1 else None)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Pending:
        return Pending(self, [], [tensor for tensor, _ in (*sends, *receives)])


class Traced(NamedTuple):
    """Bytes that an engine holds between packs, the most that a pack adds, what of it is in host memory, and its load.
    """

    resident_bytes: int
    pack_bytes: int
    host_bytes: int
    load: PackLoad


def make_inputs(
    samples: Sequence[tuple[int, Sequence[Grid]]], adapter: LanguageModel, degree: int = 1
) -> tuple[PackInputs, PackLoad]:
    """The first of `degree` members' part of a pack of samples given as (text tokens, grids of images), and what it
    asks of a rank. Members encode the images in turns.
    """
    plans, payloads = [], {}
    for place, (text, grids) in enumerate(samples):
        counts = [time * height * width // adapter.merge_area for time, height, width in grids]
        # a text token after each image keeps their runs apart
        images = [token for count in counts for token in (*[adapter.vision_token_ids[0]] * count, 6)]
        ids = np.array([5] * text + images, np.int32)
        plans.append(Sample(str(place), len(ids) - sum(counts), sum(counts), tuple(grids)))
        pixels = [np.zeros((count * adapter.merge_area, adapter.patch_dim), np.float32) for count in counts]
        is_vision = np.isin(ids, adapter.vision_token_ids)
        payloads[str(place)] = Payload(input_ids=ids, labels=np.where(is_vision, -100, ids),
                                       grids=np.array(grids, np.int64).reshape(-1, 3), pixels=list(pixels))
    num_images = sum(len(plan.vision_grids) for plan in plans)
    encoders = tuple(image % degree for image in range(num_images))
    pack = Pack(tuple(range(degree)), (), 1.0, encoders=encoders, samples=tuple(plans))
    inputs = collate(pack, payloads, traced_member(adapter, degree), adapter)
    return inputs, PackLoad(len(inputs.token_ids), len(inputs.vision_token_index), inputs.num_valid_tokens,
                            len(inputs.pixels), len(samples), degree)


def traced_member(adapter: LanguageModel, degree: int) -> int:
    """The member that needs most: of a model with states one whose piece neither begins nor ends a sequence."""
    return 0 if adapter.looks_back is None else degree - 1


def traced(
    config: PreTrainedConfig, samples: Sequence[tuple[int, Sequence[Grid]]], settings: MemorySettings, degree: int = 1,
    lora: LoraSettings | None = None, share: float = 0.0, recomputed: float = 0.0,
) -> Traced:
    """A pack of which the share `share` of layers is moved to host memory, and the share `recomputed` runs again.

    In `sync=step` on one rank; in `micro_batch` as rank 0 of `settings.world_size`, in a `fake_world`.
    """
    adapter = meta_model(config)
    adapter.freeze(settings.frozen)
    if lora is not None:
        adapter.add_lora(lora)
    inputs, load = make_inputs(samples, adapter, degree)
    if settings.recomputes:
        adapter.set_activation_checkpointing(keeps_attention=settings.keeps_attention)
    optimizer = OptimizerSettings(lambda name: 1e-3, adapter.decays, 0.01, (0.9, 0.95), 1e-8, 1.0)
    link, encodes = SilentLink(degree, traced_member(adapter, degree)), inputs.num_images > 0
    inputs = replace(inputs, offload=share, recomputed=recomputed)
    load = load._replace(offload=share, recomputed=recomputed)
    offload = PackOffload(adapter, torch.device("cpu"))
    with memory_trace() as trace:
        offload.buffer._chunk = partial(trace.on_host, CHUNK_BYTES)  # type: ignore[method-assign]
        adapter.module.to_empty(device="cpu")
        adapter.module.tie_weights()
        if settings.sync == "step":
            engine: Any = FlatEngine(adapter.module, optimizer, None, 1, 0, settings.precision)
        else:
            assert dist.group.WORLD is not None
            narrow_frozen(adapter.module, COMPUTE_TYPES[settings.precision])  # as where values are in files
            engine = ShardedEngine(adapter, optimizer, dist.group.WORLD, 0, torch.device("cpu"), settings.precision,
                                   expert_group=expert_group(settings, load.tokens))
        engine.zero_gradients()
        on_device = replace(inputs, pixels=torch.empty(inputs.pixels.shape, dtype=COMPUTE_TYPES[settings.precision]))
        if inputs.dropout_keys is not None:  # masks as large as activations are made of them
            on_device = replace(on_device, dropout_keys=trace.faked(inputs.dropout_keys))
        following = torch.empty_like(on_device.pixels)  # of the next pack, copied ahead
        before_bytes = 0
        for _ in range(1 if settings.sync == "step" else 2):  # FSDP has gradients from the first backward pass on
            gc.collect()
            before_bytes = trace.live_bytes - on_device.pixels.nbytes - following.nbytes
            trace.begin()
            with offload.of_pack(on_device), adapter.recomputing(on_device.recomputed):
                loss = (pack_loss(adapter, on_device, link) if settings.sync == "step"
                        else engine.loss(on_device, link, encodes))
            loss.backward()
            del loss
        pack_bytes, resident_bytes = trace.peak_bytes - before_bytes, held_bytes(engine)
        engine.release()
    return Traced(resident_bytes, pack_bytes, offload.buffer.used_bytes, load)


def held_bytes(engine: Any) -> int:
    """Bytes of an engine's own storages, each counted once; with gradients that no pack has used yet."""
    tensors = [*engine.current.tensors().values(), *engine.spare.tensors().values()]
    if isinstance(engine, ShardedEngine):
        tensors += [parameter.to_local() for parameter in (engine.parameters | engine.frozen).values()]
        tensors += [torch.empty_like(parameter.to_local()) if parameter.grad is None else parameter.grad.to_local()
                    for parameter in engine.parameters.values()]
    else:
        tensors += [*engine.module.parameters(), *engine.gradients().values(), engine._shard_gradient]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())
