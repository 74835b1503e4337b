"""Dataclasses of tensors, which are pinned and copied to devices as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Self

from torch import Tensor


class TensorFields:
    """A dataclass with tensors in its fields, or with lists, tuples and dictionaries of tensors or of TensorFields."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor changed."""
        here: Any = self
        return replace(here, **{field.name: _mapped(getattr(here, field.name), change) for field in fields(here)})


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, TensorFields):
        return value.map(change)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor | TensorFields):
        return type(value)(_mapped(each, change) for each in value)
    return value
