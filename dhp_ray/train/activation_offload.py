"""Moves what layers keep for their backward pass to host memory, and back before it is needed (activation offload:
ByteScale, arXiv 2502.21231, section 5).

The first n = ceil(share x L) of the L layers of the encoder, and of the language model, are moved. L = 6, share 0.5:

    forward     compute   0  | 1  | 2  | 3  | 4  | 5  | loss        a layer is copied when it has run
                copy         | 0    | 1    | 2    |
    backward    compute   5  | 4  | 3  | 2  | 1  | 0                a layer is fetched as soon as there is room for it
                copy         | 2    | 1    | 0    |

Copies run in a stream of their own. The device holds what at most max(2, L - n) layers keep: the one that computes,
those that are not moved, and those on their way. Compute waits if that would be exceeded, and if what it needs has not
arrived. So a pass takes as long as its compute or its copies, whichever takes longer.

What autograd saves is moved as whole storages, each once per layer, however many of its tensors are saved. Parameters
stay (a layer's weights are freed and gathered again by the engine that shards them), and so do inputs that all layers
share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from dhp_ray.model.language_model import LanguageModel, LayerStack
from dhp_ray.planner.memory.host import CHUNK_BYTES
from dhp_ray.planner.plan.cluster import LEAST_LAYERS, num_relieved
from dhp_ray.train.collate import PackInputs

ALIGNED_BYTES = 64
"""A tensor begins at a multiple of this: values of any type are aligned there."""


class HostBuffer:
    """Grows to the most that was in use at a time. `pinned`: a device copies to it and from it asynchronously."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._chunks: list[Tensor] = []
        self.used_bytes = 0

    @property
    def num_bytes(self) -> int:
        return len(self._chunks) * CHUNK_BYTES

    def clear(self) -> None:
        """Use it from the start again. Users of earlier pieces must be done with them, or copy in the same stream."""
        self.used_bytes = 0

    def take(self, num_bytes: int) -> list[Tensor]:
        """Return pieces (bytes,) uint8 that together have `num_bytes`, each of them aligned."""
        begin = -(-self.used_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self.used_bytes = end = begin + num_bytes
        while self.num_bytes < end:
            self._chunks.append(self._chunk())
        return [self._chunks[place][max(0, begin - place * CHUNK_BYTES):end - place * CHUNK_BYTES]
                for place in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))]

    def _chunk(self) -> Tensor:
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._pinned)


class Moved:
    """A storage of a layer: on the device (`there`, flat), in host memory, or in both."""

    def __init__(self, there: Tensor) -> None:
        self.there: Tensor | None = there
        self.type, self.num_elements = there.dtype, len(there)
        self.pieces: list[Tensor] = []
        self.arrival: Any = None  # an event of the copy back, that compute has not waited for

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.type.itemsize

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces in host memory, each with its part on the device."""
        assert self.there is not None
        pieces = [piece.view(self.type) for piece in self.pieces]
        return zip(pieces, self.there.split([len(piece) for piece in pieces]))


class Saved(NamedTuple):
    """A tensor that autograd has saved: a view of a storage."""

    storage: Moved
    type: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Copies:
    """Copies between a device and host memory, in a stream of their own. The host waits for nothing.

    On the CPU, which has no streams, they are made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self.buffer = HostBuffer(pinned=device.type != "cpu")

    def begin_out(self, layer: Sequence[Moved]) -> Any:
        """Copy storages to host memory, once compute has got this far; return the event of their arrival."""
        for moved in layer:
            moved.pieces = self.buffer.take(moved.num_bytes)
        return self._copy([(piece, part) for moved in layer for piece, part in moved.parts()])

    def end_out(self, layer: Sequence[Moved], event: Any) -> None:
        """Let compute wait for the copies, and free what was copied, so that compute can use that memory again."""
        self._computing.wait_event(event)
        for moved in layer:
            moved.there = None

    def begin_back(self, layer: Sequence[Moved]) -> None:
        """Copy storages to the device, into memory that is free once compute has got this far."""
        for moved in layer:
            moved.there = torch.empty(moved.num_elements, dtype=moved.type, device=self._device)
        event = self._copy([(part, piece) for moved in layer for piece, part in moved.parts()])
        for moved in layer:
            moved.pieces, moved.arrival = [], event

    def arrived(self, moved: Moved) -> Tensor:
        """Return a storage that was fetched, for compute; compute waits until it has arrived."""
        assert moved.there is not None
        if moved.arrival is not None:
            self._computing.wait_event(moved.arrival)
            moved.arrival = None
        return moved.there

    def end(self) -> None:
        """Let compute wait for all copies."""
        self._computing.wait_stream(self._stream)

    @property
    def _computing(self) -> Any:
        return self._module.current_stream(self._device)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Copy to the first of each pair; return the event of the end."""
        event = self._module.Event()
        self._stream.wait_stream(self._computing)
        with self._module.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event.record()
        return event


class PartOffload:
    """The offload of the encoder or the language model in one pack's forward and backward pass."""

    def __init__(self, stack: LayerStack, share: float, shared: set[torch.UntypedStorage], copies: Copies) -> None:
        self._count, self._copies, self._shared = len(stack.layers), copies, shared
        self._moved = num_relieved(share, self._count)
        self._room = max(LEAST_LAYERS, self._count - self._moved)
        self._storages: dict[torch.UntypedStorage, Moved] = {}  # of the layer that runs, or that runs next
        self._out: deque[tuple[list[Moved], Any]] = deque()
        self._layers: list[list[Moved]] = []
        self._hooks: saved_tensors_hooks | None = None
        self._next = self._moved - 1  # the layer that is fetched next
        self.num_bytes = 0
        self.handles: list[RemovableHandle] = [stack.owner.register_forward_pre_hook(self._begin),
                                               stack.owner.register_forward_hook(self._end)]
        for number, layer in enumerate(stack.layers):
            self.handles += [layer.register_forward_pre_hook(self._before, with_kwargs=True),
                             layer.register_forward_hook(partial(self._after, number))]

    def close(self) -> None:
        """Remove the hooks after the forward pass, complete or not: they would run again if layers are recomputed."""
        for handle in self.handles:
            handle.remove()
        self._end()

    def _begin(self, owner: Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and self._moved:
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def _end(self, *_: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _before(self, layer: Module, inputs: Any, named: dict[str, Any]) -> None:
        """Of what was saved since the previous layer, only this layer's inputs are moved with it: if a layer is
        recomputed, its input is saved before this hook runs (transformers 5.17) or after it (5.23).

        Keyword arguments are the same for every layer: cosines and sines.
        """
        self._shared |= storages_of(named.values())
        given = storages_of(inputs)
        self._storages = {storage: moved for storage, moved in self._storages.items() if storage in given}

    def _after(self, number: int, layer: Module, inputs: Any, outputs: Any) -> None:
        if self._hooks is None:
            return
        if number < self._moved:
            moved, self._storages = list(self._storages.values()), {}
            self._layers.append(moved)
            self._out.append((moved, self._copies.begin_out(moved)))
            self.num_bytes += sum(storage.num_bytes for storage in moved)
        kept = max(0, number + 1 - self._moved)
        room = self._room - 1 - kept if number + 1 < self._count else 0
        while len(self._out) > room:
            self._copies.end_out(*self._out.popleft())
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, number))
                break

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        """Fetch what there is room for, now that the layers after this one are done."""
        last = min(number, self._moved - 1)  # of those that are moved and still needed
        kept = number - last
        while self._next >= 0 and (self._next == number or kept + last - self._next < self._room):
            self._copies.begin_back(self._layers[self._next])
            self._layers[self._next] = []  # held by what autograd has saved, as long as that is needed
            self._next -= 1

    def _pack(self, tensor: Tensor) -> Tensor | Saved:
        storage = tensor.untyped_storage()
        origin = tensor if tensor._base is None else tensor._base
        stays = isinstance(origin, Parameter) or storage in self._shared or not storage.nbytes()
        if stays or len(self._layers) == self._moved:
            return tensor.detach()
        if storage not in self._storages:
            elements = storage.nbytes() // tensor.element_size()
            self._storages[storage] = Moved(torch.as_strided(tensor.detach(), (elements,), (1,), 0))
        return Saved(self._storages[storage], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        flat = self._copies.arrived(saved.storage)
        return torch.as_strided(flat.view(saved.type), saved.shape, saved.stride, saved.offset)


class PackOffload:
    """The offload of a rank's packs, one after the other. `moved_bytes`: those of the last one."""

    def __init__(self, adapter: LanguageModel, device: torch.device) -> None:
        self._adapter, self._copies = adapter, Copies(device)
        self.moved_bytes = 0

    @property
    def buffer(self) -> HostBuffer:
        return self._copies.buffer

    @contextmanager
    def of_pack(self, inputs: PackInputs) -> Iterator[None]:
        """Put this around the forward pass of a pack. Its backward pass ends before the next pack begins."""
        self.moved_bytes = 0
        if not inputs.offload or not torch.is_grad_enabled():
            yield
            return
        self.buffer.clear()
        shared = list[Tensor]()

        def note(tensor: Tensor) -> Tensor:
            shared.append(tensor)
            return tensor

        inputs.map(note)
        parts = [PartOffload(stack, inputs.offload, storages_of(shared), self._copies)
                 for stack in self._adapter.stacks()]
        try:
            yield
        finally:
            for part in parts:
                part.close()
        self.moved_bytes = sum(part.num_bytes for part in parts)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of that pack. If it fails, memory that copies are still on their way to is freed: later
        compute waits for them before it uses that memory again.
        """
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._copies.end()
            raise


def storages_of(values: Iterable[Any]) -> set[torch.UntypedStorage]:
    return {value.untyped_storage() for value in tree_leaves(list(values)) if isinstance(value, Tensor)}
