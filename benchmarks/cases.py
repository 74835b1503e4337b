"""The matrix of numerics: what is trained, in which situation, and against which run of one rank it is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from benchmarks.worlds import Corpus, Outcome, plans_of, train_world
from dhp_ray.config import load
from dhp_ray.planner import ClusterSpec, Plan, Sample

SYNCS = ("step", "micro_batch")
TRANSPORTS = ("pool", "parent")
BASE = ("train.learning_rate=1e-3", "train.adam_eps=1e-6", "train.clip_norm=0", "comm.timeout_s=60", "run.dir=unused")
LOSS_TOLERANCE, PARAMETER_TOLERANCE, BF16_TOLERANCE = 1e-4, 1e-4, 2e-2
CLIP_NORM = 0.1

SITUATIONS: dict[str, tuple[str, ...]] = {
    "as they come": (), "recomputation": ("train.activation_checkpointing=true",),
    "vision frozen": ("train.freeze=[vision]",),
    "language frozen": ("train.freeze=[language]",), "clipping": (f"train.clip_norm={CLIP_NORM}",), "text only": (),
    "with and without images": (),
    "a rank without a pack": (), "a rank all masked": (), "bf16": ("train.precision=bf16",),
    "images apart": ("planner.encoder=world",),
}
"""Name of a situation and the settings that it takes. The rest of it is made of the batches and plans
(`Matrix._prepare`).
"""
OF_THE_RANKS_ALONE = ("recomputation", "bf16", "images apart")
"""Situations that the reference run is not in: recomputation and who encodes images change nothing, and bf16 is held
against fp32.
"""


@dataclass(frozen=True)
class Case:
    """One row of the matrix."""

    num_ranks: int
    planner: str
    sync: str
    transport: str
    situation: str = "as they come"

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks, {self.planner}, {self.sync}, {self.transport}, {self.situation}"


@dataclass(frozen=True)
class Row:
    """What a case came to; errors are the largest of all steps (loss) and of all tensors (parameters, relative to a
    tensor's largest element).
    """

    case: Case
    loss_error: float
    parameter_error: float
    degrees: tuple[int, ...]
    seconds: float
    faults: tuple[str, ...]


def full_matrix() -> list[Case]:
    """Every combination as they come, every situation on three ranks, and images apart on other numbers too."""
    plain = [Case(*values) for values in product((1, 2, 3, 5), ("static", "dhp"), SYNCS, TRANSPORTS)]
    special = [Case(3, "dhp", sync, transport, situation) for situation in list(SITUATIONS)[1:] for sync in SYNCS
               for transport in TRANSPORTS]
    apart = [Case(num_ranks, "dhp", sync, "pool", situation) for sync in SYNCS for num_ranks, situation in (
        (1, "images apart"), (2, "images apart"), (5, "images apart"))]
    return plain + special + apart


@dataclass
class Matrix:
    """Runs cases on one corpus; runs of one rank that several cases are held against are made once."""

    overrides: Sequence[str]
    corpus: Corpus
    num_steps: int
    batch_size: int
    _references: dict[str, Outcome] = field(default_factory=dict)

    def run(self, case: Case) -> Row:
        """One case and its reference. What is not as it must be is in the row's faults."""
        corpus, plans = self._prepare(case)
        reference = self._reference(case, corpus)
        settings = [*SITUATIONS[case.situation], f"comm.transport={case.transport}", f"planner.sync={case.sync}"]
        outcome = train_world(load([*self.overrides, *BASE, *settings]), plans, corpus, case.num_ranks)
        loss_error = max(abs(found - wanted) / (abs(wanted) or 1.0)
                         for found, wanted in zip(outcome.losses, reference.losses, strict=True))
        parameter_error = max(_error(outcome.parameters[name], wanted) for name, wanted in reference.parameters.items())
        degrees = tuple(sorted({degree for plan in plans for degree in plan.degrees()}))
        faults = _faults(case, plans, corpus, outcome, reference)
        if loss_error > (BF16_TOLERANCE if case.situation == "bf16" else LOSS_TOLERANCE):
            faults.append(f"loss differs by {loss_error:.1e}")
        if parameter_error > PARAMETER_TOLERANCE and case.situation != "bf16":
            faults.append(f"parameters differ by {parameter_error:.1e}")
        return Row(case, loss_error, parameter_error, degrees, outcome.seconds, tuple(faults))

    def _prepare(self, case: Case) -> tuple[Corpus, list[Plan]]:
        """The samples and plans of a case."""
        corpus, num_ranks = self.corpus, case.num_ranks
        names = [sample.id for sample in corpus.samples]
        if case.situation == "text only":
            corpus = corpus.without_images(set(names))
        elif case.situation == "with and without images":
            corpus = corpus.without_images(set(names[::2]))
        batches = corpus.batches(self.num_steps, self.batch_size)
        if case.situation == "a rank without a pack":
            return corpus, [_on_other_ranks(plan) for plan in plans_of(batches, num_ranks - 1, case.planner, case.sync)]
        # Room enough for packs of one rank, where ranks are to differ in what they hold.
        apart = case.situation in ("a rank all masked", "with and without images")
        tokens = max(sample.num_tokens for batch in batches for sample in batch) if apart else 0
        encoder = "world" if case.situation == "images apart" else "group"
        plans = plans_of(batches, num_ranks, case.planner, case.sync, tokens, encoder)
        if case.situation == "a rank all masked":
            corpus = corpus.masked({sample.id for plan in plans for sample in _samples_of_a_rank(plan)})
        return corpus, plans

    def _reference(self, case: Case, corpus: Corpus) -> Outcome:
        """The same samples on one rank, in fp32."""
        alone = case.situation in OF_THE_RANKS_ALONE
        # What is masked depends on the plan, so that case's reference is its own.
        key = (
            str(case)
            if case.situation == "a rank all masked"
            else "as they come"
            if alone or case.situation == "a rank without a pack"
            else case.situation
        )
        if key not in self._references:
            settings = () if alone else SITUATIONS[case.situation]
            plans = plans_of(corpus.batches(self.num_steps, self.batch_size), 1, "static", "step")
            self._references[key] = train_world(load([*self.overrides, *BASE, *settings]), plans, corpus, 1)
        return self._references[key]


def _on_other_ranks(plan: Plan) -> Plan:
    """A plan of n ranks on n + 1, rank 1 left out."""
    cluster = ClusterSpec(plan.cluster.num_ranks + 1, plan.cluster.num_ranks + 1, plan.cluster.tokens_per_rank)
    groups = tuple(replace(group, ranks=tuple(rank + (rank > 0) for rank in group.ranks),
                           encoders=tuple(rank + (rank > 0) for rank in group.encoders)) for group in plan.groups)
    moved = replace(plan, cluster=cluster, groups=groups)
    moved.validate()
    return moved


def _samples_of_a_rank(plan: Plan) -> list[Sample]:
    """What the first rank runs that has a pack and leaves others something; nothing when there is no such rank."""
    for rank in range(plan.cluster.num_ranks):
        found = [sample for pack in plan.rank_plan(0, rank).packs for sample in pack.samples]
        if 0 < len(found) < len(plan.samples):
            return found
    return []


def _faults(case: Case, plans: Sequence[Plan], corpus: Corpus, outcome: Outcome, reference: Outcome) -> list[str]:
    """What the case was to show and did not."""
    faults = []
    if [step.num_valid_tokens for step in outcome.steps] != [step.num_valid_tokens for step in reference.steps]:
        faults.append("other tokens were counted")
    if not all(step.applied for step in outcome.steps):
        faults.append("an update was left out")
    if case.situation == "images apart" and not any(plan.vision.apart for plan in plans):
        faults.append("no plan with images apart")
    if any(pool != outcome.pools[0] for pool in outcome.pools):
        faults.append("the ranks' pools differ")
    if case.situation == "as they come" and not any(case.num_ranks in plan.degrees() for plan in plans):
        faults.append(f"no pack of degree {case.num_ranks}")
    if case.situation == "clipping" and min(step.gradient_norm for step in outcome.steps) <= CLIP_NORM:
        faults.append("a step was not clipped")
    if case.situation == "a rank without a pack" and any(1 in group.ranks for plan in plans for group in plan.groups):
        faults.append("rank 1 has a pack")
    if case.situation == "with and without images" and not any(_side_by_side(plan) for plan in plans):
        faults.append("no pack without images beside one with")
    if case.situation == "a rank all masked":
        masked = [bool(found) and all((corpus.payloads[sample.id].labels == -100).all() for sample in found)
                  for found in map(_samples_of_a_rank, plans)]
        if sum(masked) < len(plans) / 2 or not all(step.num_valid_tokens for step in outcome.steps):
            faults.append("no rank is masked in most steps, or all are in one")
    return faults


def _side_by_side(plan: Plan) -> bool:
    """Whether two packs on different ranks are the first of their ranks, one with images and one without."""
    first = {rank: next((group for group in plan.groups if rank in group.ranks), None)
             for rank in range(plan.cluster.num_ranks)}
    return len({bool(group.encoders) for group in first.values() if group is not None}) == 2


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / (np.abs(wanted).max() or 1.0))
