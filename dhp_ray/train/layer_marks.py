"""Marks at every layer of a model, forward and backward, so that a rank that computes is seen to make progress.

    forward    gathering of 3 *    | 3            | gathering of 4 *  | 4 ...
    backward   ... 4, backward     | reducing 4 * | before 4          | gathering of 3 * | 3, backward ...

Marks with * say that the rank waits for peers. They and "before" exist only if a layer's parameters are gathered from
other ranks, and its gradients reduced, between two layers: by FSDP, whose hooks run between ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from dhp_ray.comm.progress import Progress
from dhp_ray.model.language_model import LanguageModel

Mark = Callable[[], None]


class LayerMarks:
    """Hooks on the layers of a model, until `remove`."""

    def __init__(self, layers: Mapping[str, Module], progress: Progress, gathered: bool) -> None:
        """`layers`: by the names that marks use for them. `gathered`: FSDP has wrapped the layers, before this."""
        self._handles: list[RemovableHandle] = []
        for name, layer in layers.items():
            forward = partial(progress.mark, name)
            backward = partial(progress.mark, f"{name}, backward")
            if gathered:
                gathers = partial(progress.mark, f"gathering of {name}", waits_for_peers=True)
                reduces = partial(progress.mark, f"reducing of {name}", waits_for_peers=True)
                before = partial(progress.mark, f"before {name}, backward")
                self._handles += [layer.register_forward_pre_hook(partial(_before, gathers, before), prepend=True),
                                  layer.register_forward_hook(partial(_at_gradient_of_output, gathers), prepend=True),
                                  layer.register_forward_pre_hook(partial(_at_gradient_of_input, reduces))]
            self._handles += [layer.register_forward_pre_hook(partial(_before, forward, None)),
                              layer.register_forward_hook(partial(_at_gradient_of_output, backward))]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def layers_by_name(adapter: LanguageModel, *others: Module) -> dict[str, Module]:
    names = {module: name for name, module in adapter.module.named_modules()}
    return {names[layer]: layer for layer in (*adapter.units(), *others)}


def _before(mark: Mark, then: Mark | None, layer: Module, inputs: Any) -> None:
    """`then` is called when the backward pass has the gradient of the layer's input, with all that FSDP does for it."""
    mark()
    if then:
        _when_differentiated(inputs, then)


def _at_gradient_of_input(mark: Mark, layer: Module, inputs: Any) -> Any:
    # views: the output of the layer before has hooks of its own, which must run later
    own = tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), inputs)
    _when_differentiated(own, mark)
    return own


def _at_gradient_of_output(mark: Mark, layer: Module, inputs: Any, output: Any) -> None:
    _when_differentiated(output, mark)


def _when_differentiated(values: Any, mark: Mark) -> None:
    """Call `mark` when the backward pass has the gradient of a tensor among `values`."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda gradient: mark())
