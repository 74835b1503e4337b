"""When layers go to host memory and come back, beside compute: in which order, for how long, and how many are there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dhp_ray.model.language_model import LayerStack
from dhp_ray.planner.plan.cluster import num_relieved
from dhp_ray.train.activation_offload import Copies, Moved, PartOffload

HOST = torch.device("cpu")


class Layer(nn.Module):
    """Keeps its input, a sigmoid, a view of that and two products, all of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        y = (x @ self.weight).sigmoid()
        return y * (x * factor) + y[:, :4].repeat(1, 2) * y


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.full_like(x, 1.5, requires_grad=False)
        for layer in self.layers:
            x = layer(x, factor=factor)
        return x


class LoggedCopies(Copies):
    """Writes down what is copied when."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(HOST)
        self.log, self.number = log, dict[int, int]()

    def begin_out(self, layer: Sequence[Moved]) -> Any:
        self.number |= {id(layer): len(self.number)}
        self.log.append(f"out {self.number[id(layer)]}")
        return super().begin_out(layer)

    def end_out(self, layer: Sequence[Moved], event: Any) -> None:
        self.log.append(f"gone {self.number[id(layer)]}")
        super().end_out(layer, event)

    def begin_back(self, layer: Sequence[Moved]) -> None:
        self.log.append(f"back {self.number[id(layer)]}")
        super().begin_back(layer)


@pytest.mark.parametrize(("share", "schedule"), [
    # three of six stay: a layer is let go where the three that may be there would be exceeded
    (0.5, "run 0, out 0, run 1, out 1, run 2, out 2, gone 0, run 3, gone 1, run 4, gone 2, run 5, "
          "grad 5, grad 4, back 2, grad 3, back 1, grad 2, back 0, grad 1, grad 0"),
    # none stays: two are there, one that computes and one on its way
    (1.0, "run 0, out 0, run 1, out 1, gone 0, run 2, out 2, gone 1, run 3, out 3, gone 2, run 4, out 4, gone 3, "
          "run 5, out 5, gone 4, gone 5, grad 5, back 5, back 4, grad 4, back 3, grad 3, back 2, grad 2, back 1, "
          "grad 1, back 0, grad 0"),
    (0.1, "run 0, out 0, run 1, run 2, run 3, run 4, gone 0, run 5, grad 5, grad 4, back 0, grad 3, grad 2, grad 1, "
          "grad 0")])
def test_layers_go_and_come_back_in_this_order(share: float, schedule: str) -> None:
    torch.manual_seed(0)
    stack, x, log = Stack(6), torch.randn(5, 8, requires_grad=True), list[str]()

    def logged(what: str, number: int, *_: Any) -> None:
        log.append(f"{what} {number}")

    def log_gradient(number: int, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(partial(logged, "grad", number))

    for number, layer in enumerate(stack.layers):
        layer.register_forward_pre_hook(partial(logged, "run", number))
        layer.register_forward_hook(partial(log_gradient, number))
    copies = LoggedCopies(log)
    part = PartOffload(LayerStack(stack, list(stack.layers)), share, set(), copies)
    out = stack(x)
    part.close()
    out.sum().backward()
    assert ", ".join(log) == schedule
    # of a layer x, y and two products, each once; not its weight, nor the factor that all share
    assert part.num_bytes == num_relieved(share, 6) * 4 * x.nbytes


@pytest.mark.gpu
def test_a_device_moves_them_beside_compute_and_holds_fewer() -> None:
    """The same bits, no synchronisation, and of 12 large layers what four keep in place of twelve."""
    device, num_layers, share = torch.device("cuda", 0), 12, 8 / 12
    torch.manual_seed(0)
    stack = Stack(num_layers).to(device)
    x = torch.randn(2_000_000, 8, device=device, requires_grad=True)
    found, peaks = [], []
    copies = Copies(device)
    for each in (0.0, share, share):
        stack.zero_grad()
        x.grad = None
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.set_sync_debug_mode("error" if len(peaks) == 2 else "default")  # once pinned memory is there
        try:
            copies.buffer.clear()
            part = PartOffload(LayerStack(stack, list(stack.layers)), each, set(), copies)
            out = stack(x)
            part.close()
            out.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        del out
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        found.append([x.grad, *(layer.weight.grad.clone() for layer in stack.layers)])  # type: ignore[union-attr, operator]
    torch.cuda.synchronize(device)
    for gradients in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients, found[0]))
    assert peaks[1] == peaks[2] < 0.6 * peaks[0]


class Clock:
    """Seconds of compute and of copies in PartOffload's own order; a copy of a layer takes `copy_s`."""

    def __init__(self, copy_s: float) -> None:
        self.copy_s, self.computed_s, self.copied_s = copy_s, 0.0, 0.0

    def computes(self, seconds: float, *_: Any) -> None:
        self.computed_s += seconds


class ClockedCopies(Copies):
    """Copies that take time beside compute."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(HOST)
        self.clock = clock

    def begin_out(self, layer: Sequence[Moved]) -> Any:
        super().begin_out(layer)
        return self._copied()

    def end_out(self, layer: Sequence[Moved], event: Any) -> None:
        self.clock.computed_s = max(self.clock.computed_s, event)
        for moved in layer:
            moved.there = None

    def begin_back(self, layer: Sequence[Moved]) -> None:
        super().begin_back(layer)
        event = self._copied()
        for moved in layer:
            moved.arrival = event

    def arrived(self, moved: Moved) -> Tensor:
        if moved.arrival is not None:
            self.clock.computed_s = max(self.clock.computed_s, moved.arrival)
            moved.arrival = None
        assert moved.there is not None
        return moved.there

    def _copied(self) -> float:
        self.clock.copied_s = max(self.clock.copied_s, self.clock.computed_s) + self.clock.copy_s
        return self.clock.copied_s


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("copy_s", [0.5, 1.2, 2.0, 3.5])
def test_a_pass_takes_as_long_as_its_compute_or_its_copies(share: float, copy_s: float) -> None:
    """24 layers of 1 s forward and 2 s backward: what the cost model says, but for one copy that has nothing beside it
    at each end."""
    clock, stack = Clock(copy_s), Stack(24)
    for layer in stack.layers:
        layer.register_forward_pre_hook(partial(clock.computes, 1.0))
        layer.register_full_backward_pre_hook(lambda layer, gradient: clock.computes(2.0))
    part = PartOffload(LayerStack(stack, list(stack.layers)), share, set(), ClockedCopies(clock))
    out = stack(torch.randn(5, 8, requires_grad=True))
    part.close()
    forward_s = clock.computed_s
    out.sum().backward()
    moved_s = 24 * share * copy_s
    for found_s, compute_s in ((forward_s, 24.0), (clock.computed_s - forward_s, 48.0)):
        assert max(compute_s, moved_s) <= found_s <= max(compute_s, moved_s) + copy_s + 2.0
