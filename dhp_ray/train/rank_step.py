"""One rank's share of one optimizer step: walk the packs of the plan, then reduce and update once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

from dhp_ray.comm.link import Link
from dhp_ray.comm.totals import numbers_of_ranks, sum_of_counts
from dhp_ray.comm.transport import Transport
from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.planner.plan import RankPack, RankPlan
from dhp_ray.train.collate import PackInputs, Payload, collate
from dhp_ray.train.engine import Engine
from dhp_ray.train.pack import pack_loss
from dhp_ray.train.results import PackTime, StepResult


@dataclass
class RankStep:
    """Runs the steps of one rank. `world` is the group of all ranks (None: there is one rank).

    `before_update` is called after the packs: once a rank's `totals` returns, it has returned on every rank, and
    nothing of the state has changed on any. `progress` tells where the step is.
    """

    adapter: ModelAdapter
    engine: Engine
    transport: Transport
    world: dist.ProcessGroup | None
    device: torch.device
    before_update: Callable[[], None] = lambda: None
    progress: str = ""

    def run(
        self, plan: RankPlan, payloads: Mapping[str, Payload], learning_rate_factor: float, data_wait_s: float = 0.0
    ) -> StepResult:
        """Compute losses and gradients of this rank's packs, and update once.

        Between `prepare` and `totals` the only collectives are each pack's own exchanges, so ranks run free of one
        another; `totals` and `update` are entered by every rank, also by one without a pack.
        """
        start = perf_counter()
        self.transport.prepare(plan.process_groups)
        self.engine.zero_gradients()
        sums = torch.zeros(2, dtype=torch.float64)  # loss sum, valid tokens
        times = [self._run_pack(plan, pack, payloads, sums, start) for pack in self._packs(plan)]
        self.progress = f"step {plan.step}, update"
        self.before_update()
        loss_sum, num_valid_tokens = self._totals(sums)
        update = self.engine.update(num_valid_tokens, learning_rate_factor)
        return StepResult(
            step=plan.step, rank=plan.rank, loss_sum=loss_sum, num_valid_tokens=num_valid_tokens,
            gradient_norm=update.gradient_norm, learning_rate=update.learning_rate, applied=update.applied,
            state_version=self.engine.state_version, step_time_s=perf_counter() - start, data_wait_s=data_wait_s,
            pack_times=tuple(time for time in times if time.index >= 0), pool=self.transport.counters(),
            plan_id=plan.plan_id)

    @torch.no_grad()
    def evaluate(self, plan: RankPlan, payloads: Mapping[str, Payload]) -> tuple[float, int]:
        """Loss sum and valid tokens of the packs of all ranks, without gradients. Every rank calls it."""
        self.transport.prepare(plan.process_groups)
        sums = torch.zeros(2, dtype=torch.float64)
        for pack in self._packs(plan):
            self._run_pack(plan, pack, payloads, sums, 0.0)
        return self._totals(sums)

    def _packs(self, plan: RankPlan) -> Sequence[RankPack]:
        """What this rank runs, in order; a pack that is not of the plan has index -1."""
        return plan.packs

    def _loss(self, plan: RankPlan, pack: RankPack, inputs: PackInputs, link: Link) -> torch.Tensor:
        return pack_loss(self.adapter, inputs, link)

    def _run_pack(
        self, plan: RankPlan, pack: RankPack, payloads: Mapping[str, Payload], sums: torch.Tensor, start: float
    ) -> PackTime:
        self.progress = f"step {plan.step}, pack {pack.index}"
        inputs = collate(pack, payloads, plan.rank, self.adapter).to(self.device)
        link = self.transport.link(pack.ranks, pack.index)
        begin = perf_counter()
        loss = self._loss(plan, pack, inputs, link)
        if torch.is_grad_enabled():
            loss.backward()  # type: ignore[no-untyped-call]
        sums += torch.tensor([loss.item(), inputs.num_valid_tokens], dtype=torch.float64)  # item() waits for the device
        return PackTime(pack.index, begin - start, perf_counter() - start, link.blocked_s)

    def _totals(self, sums: torch.Tensor) -> tuple[float, int]:
        loss_sum = sum(numbers_of_ranks(sums[0], self.world, self.device))
        return loss_sum, sum_of_counts(int(sums[1]), self.world, self.device)
