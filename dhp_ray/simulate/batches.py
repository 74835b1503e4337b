"""The batches of a simulation, by step; all of its planners get the same ones."""

from __future__ import annotations

from functools import lru_cache

from dhp_ray.planner.plan.types import Sample
from dhp_ray.simulate.workload import Workload

LOOKED_AT = 32
"""The first batches, whose longest sequence determines what the ranks must hold; a longer sequence of a later batch is
left out, as with `data.on_error=skip`.
"""


class Batches:
    """The samples of each step; steps count from 1."""

    def __init__(self, workload: Workload, num_samples: int, num_batches: int, seed: int) -> None:
        """`num_batches`: the number of batches; 0: unlimited."""
        self._workload, self._num_samples, self._seed = workload, num_samples, seed
        self._drawn = lru_cache(LOOKED_AT)(self._batch)
        looked_at = range(1, min(num_batches or LOOKED_AT, LOOKED_AT) + 1)
        longest = {step: max(sample.num_tokens for sample in self._drawn(step)) for step in looked_at}
        self.longest_step = max(longest, key=lambda step: longest[step])
        self.longest_tokens = longest[self.longest_step]
        self.left_out: set[str] = set()

    def __call__(self, step: int) -> list[Sample]:
        samples = self._drawn(step)
        too_long = {sample.id for sample in samples if sample.num_tokens > self.longest_tokens}
        self.left_out |= too_long
        fitting = [sample for sample in samples if sample.id not in too_long]
        return fitting or self._drawn(self.longest_step)  # no batch is empty

    def _batch(self, step: int) -> list[Sample]:
        return self._workload.batch(step, self._num_samples, self._seed)
