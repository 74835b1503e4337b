"""Fills each unit's parameters when the unit is used and frees them afterwards; sends its gradients once they are
complete.

    forward     unit k: wait till it is filled | compute, meanwhile k + 1 is read | empty
    backward    unit k: likewise | (recompute) compute, meanwhile k - 1 is read | add gradients to the sums | empty

A unit is the same as in FSDP: parameters that are gathered together. It has one buffer, whose storage is resized to 0
and back, as in FSDP2: views of it that autograd has saved are valid again once it is refilled. A filled buffer is not
filled again: with and without recomputation, a pack reads a unit twice, forward and backward. At most two units are
filled at a time, the one that computes and the next.

The head computes its gradients in its forward pass, so it is read once; the embedding is read and added row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.train.loading import place
from dhp_ray.train.state.node_state import NodeState
from dhp_ray.train.state.slices import Unit
from dhp_ray.train.unit_reads import UnitRead, reader_on


class ModelUnit(NamedTuple):
    """A module whose parameters are read together, the parameters that belong to it, by name, and their layout.

    `once`: the module does not compute with them in the backward pass. A unit without a module is never filled.
    """

    module: Module | None
    parameters: dict[str, Parameter]
    layout: Unit
    once: bool = False

    def own(self) -> set[Parameter]:
        return set(self.parameters.values())


def units_of(adapter: ModelAdapter) -> list[ModelUnit]:
    """Return the units of a model in the order of the forward pass. A tied embedding is in the head's unit; any other
    comes last, and its rows are read in place.

    Raises:
        ValueError: a parameter is in no unit.
    """
    described = adapter.node_units()
    names = {parameter: name for name, parameter in adapter.module.named_parameters()}
    frozen = {name for parameter, name in names.items() if not parameter.requires_grad}
    table, found = described.embedding.weight, []
    for module in (*described.modules, described.head, described.embedding):
        own = {names.pop(parameter): parameter for parameter in module.parameters() if parameter in names}
        shapes = {name: parameter.shape for name, parameter in own.items()}
        looked_up = table in set(own.values())
        if own:
            found.append(ModelUnit(None if module is described.embedding else module, own,
                                   Unit.of(shapes, frozen, table.shape[1] if looked_up else 1),
                                   module is described.head))
    if names:
        raise ValueError(f"train.sharding=node: parameter {next(iter(names.values()))} is in no unit of the model")
    return found


class UnitBuffers:
    """Buffers and hooks of a model's units.

    `of_last_pack` counts the last pack's reads and adds of units; `filled_most` is the most units filled at a time
    since the start.
    """

    def __init__(
        self, state: NodeState, units: Sequence[ModelUnit], compute_type: torch.dtype, device: torch.device
    ) -> None:
        self.state, self.units, self.filled_most = state, units, 0
        self.counts, self.of_last_pack = Counter[str](), Counter[str]()
        self._buffers: list[Tensor] = []
        self._backward: set[int] = set()  # units whose backward pass has begun
        self._expected: set[int] = set()  # units that will be needed again for it
        self._arrived: Counter[int] = Counter()
        self._filling: dict[int, UnitRead] = {}
        self.reader = reader_on(device)
        self._handles: list[RemovableHandle] = []
        for number, unit in enumerate(units):
            self._buffers.append(torch.empty(unit.layout.size, dtype=compute_type, device=device))
            self._place(number)
            if unit.module is not None:
                self._handles += [unit.module.register_forward_pre_hook(partial(self._before_forward, number)),
                                  unit.module.register_forward_hook(partial(self._after_forward, number))]
            self._handles += [parameter.register_post_accumulate_grad_hook(partial(self._accumulated, number))
                              for parameter in unit.own() if parameter.requires_grad]

    def end_pack(self) -> None:
        """End a pack after its backward pass, or after its forward pass if there is none: add what has not been added,
        because only some of a unit's parameters had gradients, and empty all units.
        """
        for number in range(len(self._buffers)):
            self._add_grads(number)
            self._empty(number)
        self._backward.clear()
        self._expected.clear()
        self._arrived.clear()
        self.of_last_pack, self.counts = self.counts, Counter()

    def count(self, kind: str) -> None:
        self.counts[kind] += 1

    def add(self, number: int, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients of a unit to the node's sums."""
        self.state.add(number, gradients)
        self.counts["adds"] += 1

    def remove(self) -> None:
        """Remove the hooks, and free the buffers."""
        self.reader.shutdown()
        for handle in self._handles:
            handle.remove()
        for unit in self.units:
            for parameter in unit.own():
                parameter.grad = None
        self._buffers, self.units = [], []

    def _place(self, number: int) -> None:
        """Make a unit's parameters views of its buffer, which is then emptied."""
        unit, buffer = self.units[number], self._buffers[number]
        for name, parameter in unit.parameters.items():
            start = unit.layout.starts[name]
            place(parameter, buffer[start : start + parameter.numel()].view(parameter.shape))
        self._empty(number)

    def _begin_fill(self, number: int) -> None:
        storage, wanted = self._buffers[number].untyped_storage(), self._buffers[number].nbytes
        if storage.size() == wanted:
            return
        storage.resize_(wanted)
        try:
            self._filling[number] = self.reader.submit(self._read, number)
        except BaseException:
            storage.resize_(0)
            raise
        self.counts["reads"] += 1
        self.filled_most = max(self.filled_most, sum(buffer.untyped_storage().size() > 0 for buffer in self._buffers))

    def _read(self, number: int) -> None:
        # the same values as before, so what autograd has saved of them stays valid
        with torch.autograd._unsafe_preserve_version_counter(self._buffers[number]):
            self.state.read(number, self._buffers[number])

    def _fill(self, number: int) -> None:
        """Fill a unit, or wait until it is."""
        self._begin_fill(number)
        self._await(number)

    def _empty(self, number: int) -> None:
        self._await(number)  # if it was not used after all
        self._buffers[number].untyped_storage().resize_(0)

    def _await(self, number: int) -> None:
        """Wait for the read of a unit that is under way. If the read failed, the unit is empty."""
        if number in self._filling:
            try:
                self._filling.pop(number).result()
            except BaseException:
                self._buffers[number].untyped_storage().resize_(0)
                raise

    def _before_forward(self, number: int, module: Module, inputs: Any) -> None:
        self._fill(number)
        if number not in self._backward and any(unit.module for unit in self.units[number + 1 : number + 2]):
            self._begin_fill(number + 1)

    def _after_forward(self, number: int, module: Module, inputs: Any, outputs: Any) -> None:
        if number in self._backward:  # recomputed, for a backward pass that begins now
            return
        self._empty(number)
        if self.units[number].once:
            return
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self._expected.add(number)
                tensor.register_hook(partial(self._before_backward, number))

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        if number in self._backward:
            return
        self._backward.add(number)
        for other in list(self._backward - {number}):  # nothing of theirs is left to compute
            self._empty(other)
        self._fill(number)
        self._expected.discard(number)
        if number - 1 in self._expected:
            self._begin_fill(number - 1)

    def _accumulated(self, number: int, parameter: Parameter) -> None:
        self._arrived[number] += 1
        trained = [own.requires_grad for own in self.units[number].own()]
        if self._arrived[number] == sum(trained):
            self._add_grads(number)
            if all(trained):  # otherwise frozen ones may still be needed, for the gradient of the unit's input
                self._empty(number)

    def _add_grads(self, number: int) -> None:
        """Add what autograd has left in a unit's parameters, and clear it."""
        unit = self.units[number]
        found = {name: parameter.grad for name, parameter in unit.parameters.items() if parameter.grad is not None}
        if found:
            self.add(number, found)
        for parameter in unit.own():
            parameter.grad = None


class Rows(torch.autograd.Function):
    """Rows of an embedding, read from a node's memory; their gradients are added there, except those of the row
    `skipped` (torch's padding_idx).
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, rows: Tensor, state: NodeState, unit: int, skipped: int | None,
        count: Callable[[str], None],
    ) -> Tensor:
        ctx.state, ctx.unit, ctx.skipped, ctx.count = state, unit, skipped, count
        ctx.save_for_backward(rows)
        count("reads")
        return state.read_rows(unit, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        rows, = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            gradient = gradients[0]
            if ctx.skipped is not None:
                gradient = gradient.masked_fill((rows == ctx.skipped)[:, None], 0.0)
            ctx.state.add_rows(ctx.unit, rows, gradient)
            ctx.count("adds")
        return (None,) * 6
