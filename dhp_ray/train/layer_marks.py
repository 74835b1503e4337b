"""Marks at every layer of a model, forward and backward, so that a rank that computes is seen to get on.

    forward    gather 3 *  | layer 3           | gather 4 *       | layer 4 ...
    backward   ... layer 4 | after layer 4 *   | layer 3, backward | after layer 3 *

Those with * say that the rank waits for peers. They are there only where a layer's parameters are gathered from other
ranks, and its gradients reduced, between two layers: by FSDP, whose hooks run between ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from dhp_ray.comm.progress import Progress


class LayerMarks:
    """Hooks on the layers of a model, until `remove`."""

    def __init__(self, layers: Sequence[Module], progress: Progress, gathered: bool) -> None:
        """`gathered`: FSDP has wrapped the layers, before this."""
        self._handles: list[RemovableHandle] = []
        for number, layer in enumerate(layers):
            forward = partial(progress.mark, f"layer {number}")
            backward = partial(progress.mark, f"layer {number}, backward")
            if gathered:
                gathers = partial(progress.mark, f"gathering of layer {number}", waits=True)
                after = partial(progress.mark, f"after layer {number}, backward", waits=True)
                self._handles += [layer.register_forward_pre_hook(_before(gathers), prepend=True),
                                  layer.register_forward_hook(_at_gradient_of_output(gathers), prepend=True),
                                  layer.register_forward_pre_hook(_at_gradient_of_input(after))]
            self._handles += [layer.register_forward_pre_hook(_before(forward)),
                              layer.register_forward_hook(_at_gradient_of_output(backward))]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _before(mark: Callable[[], None]) -> Callable[[Module, Any], None]:
    def hook(layer: Module, inputs: Any) -> None:
        mark()

    return hook


def _at_gradient_of_input(mark: Callable[[], None]) -> Callable[[Module, Any], Any]:
    def hook(layer: Module, inputs: Any) -> Any:
        # views: the output of the layer before has hooks of its own, which are to run later
        own = tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), inputs)
        _when_differentiated(own, mark)
        return own

    return hook


def _at_gradient_of_output(mark: Callable[[], None]) -> Callable[[Module, Any, Any], None]:
    def hook(layer: Module, inputs: Any, output: Any) -> None:
        _when_differentiated(output, mark)

    return hook


def _when_differentiated(values: Any, mark: Callable[[], None]) -> None:
    """Call `mark` when the backward pass has the gradient of a tensor among `values`."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda gradient: mark())
