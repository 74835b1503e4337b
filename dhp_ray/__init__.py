"""Training of language and vision-language models with process groups planned for every batch, from Python: `fit` and
`resources`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dhp_ray.runtime.job.fit import fit, resources

__all__ = ["fit", "resources"]


def __getattr__(name: str) -> Any:
    """Return `fit` or `resources`; imported on first use, because they import Ray."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dhp_ray.runtime.job import fit as module

    return getattr(module, name)
