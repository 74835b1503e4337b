"""Parameters and gradient sums of a model, once per node, in memory that all its ranks map.

    read(u)        every member's slice of unit u --copy--> a rank's buffer
    add(u, ...)    a rank's gradients --add, beside others' adds--> the members' sums

No other rank takes part in either, so ranks run independently. Nothing here tells when values or sums may be read:
barriers at the end of a step do (`node_engine.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dhp_ray.comm.node_memory import NodeMemory
from dhp_ray.train.state.slices import Slices, Unit


class NodeState:
    """Views of a node's memory. `values` and `sums` say how units are cut."""

    def __init__(self, units: Sequence[Unit], memory: NodeMemory, values: Slices, sums: Slices,
                 compute_type: torch.dtype) -> None:
        """The parts of `memory` have `num_bytes(...)` each."""
        self.units, self.memory, self.values, self.sums = units, memory, values, sums
        split = values.region * compute_type.itemsize
        self._values = [part[:split].view(compute_type) for part in memory.parts]
        self._sums = [part[split:].view(torch.float32) for part in memory.parts]
        self.own_values, self.own_sums = self._values[memory.own], self._sums[memory.own]

    @staticmethod
    def num_bytes(values: Slices, sums: Slices, compute_type: torch.dtype) -> int:
        """Return the bytes of each member's part."""
        return values.region * compute_type.itemsize + sums.region * 4

    def read(self, unit: int, into: Tensor) -> None:
        """Copy a unit's values to `into`, of its size and of the computing type."""
        start = self.values.starts[unit]
        for member, part in enumerate(self._values):
            first, last = self.values.of_member(unit, member)
            into[first:last].copy_(part[start : start + last - first], non_blocking=True)

    def own_slice(self, name: str, num_elements: int) -> tuple[Tensor, int]:
        """Return this rank's slice of a parameter's values, to be written, and its start in the flattened parameter."""
        unit = self._unit_of(name)
        begin = self.units[unit].starts[name]
        first, last = self.values.of_member(unit, self.memory.own)
        start, stop = max(begin, first), min(begin + num_elements, last)
        offset = self.values.starts[unit] + start - first
        return self.own_values[offset : offset + max(0, stop - start)], start - begin

    def value(self, name: str, num_elements: int) -> Tensor:
        """Return a parameter's values, flat, as they are now."""
        unit = self._unit_of(name)
        whole = self._values[0].new_empty(self.units[unit].size)
        self.read(unit, whole)
        begin = self.units[unit].starts[name]
        return whole[begin : begin + num_elements]

    def add(self, unit: int, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients of a unit's parameters, by name and of any type, to its sums; they are widened to fp32."""
        start, starts = self.sums.starts[unit], self.units[unit].starts
        flat = [(starts[name], gradient.reshape(-1)) for name, gradient in gradients.items()]
        for place in range(len(self._sums)):
            # each member begins with its own slice, so that they do not wait for one another
            member = (self.memory.own + place) % len(self._sums)
            first, last = self.sums.of_member(unit, member)
            parts = [(max(begin, first), gradient[max(first - begin, 0) : max(last - begin, 0)])
                     for begin, gradient in flat if begin < last and begin + len(gradient) > first]
            if parts:
                with self.memory.locked(member, unit):
                    for begin, part in parts:
                        offset = start + begin - first
                        self.memory.add(self._sums[member][offset : offset + len(part)], part)

    def read_rows(self, unit: int, rows: Tensor) -> Tensor:
        """Return rows (K,) of a unit that is one matrix, as (K, row)."""
        width, length = self.units[unit].row, self.values.lengths[unit]
        start, per_member = self.values.starts[unit], length // width
        found = self._values[0].new_zeros(len(rows), width)
        for member, part in enumerate(self._values):
            local = rows - member * per_member
            here = ((local >= 0) & (local < per_member))[:, None]
            table = part[start : start + length].view(per_member, width)
            torch.where(here, table.index_select(0, local.clamp(0, per_member - 1)), found, out=found)
        return found

    def add_rows(self, unit: int, rows: Tensor, gradient: Tensor) -> None:
        """Add `gradient` (K, row) to rows (K,) of the sums of a unit that is one matrix; rows may repeat."""
        width, length = self.units[unit].row, self.sums.lengths[unit]
        start, per_member = self.sums.starts[unit], length // width
        for place in range(len(self._sums)):
            member = (self.memory.own + place) % len(self._sums)
            table = self._sums[member][start : start + length].view(per_member, width)
            with self.memory.locked(member, unit):
                self.memory.add_rows(table, rows - member * per_member, gradient)

    def _unit_of(self, name: str) -> int:
        return next(number for number, unit in enumerate(self.units) if name in unit.starts)

    def close(self) -> None:
        self._values, self._sums = [], []
        self.own_values = self.own_sums = torch.zeros(0)
        self.memory.close()
