"""The types of a plan: plain frozen data, without torch and without Ray.

Sample ... what the planner knows of one sequence
Plan -> Pack ... which sequences run together, on which ranks, in which order
Plan -> VisionPlan ... whether packs encode their own images, or all ranks encode those of the batch before the packs
Plan -> RankPlan -> Pack ... the slice of one rank

`Plan.validate` checks the conditions that a plan must meet to be run, `to_json` and `from_json` are its file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, TypeVar

import numpy as np
from msgspec import ValidationError, convert, to_builtins

from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.schedule import first_of_its_kind, flat

Kind = TypeVar("Kind")
Grid = tuple[int, int, int]


def cut_in_time(grid: Grid, num_parts: int) -> list[Grid]:
    """The parts of an image that several ranks encode, as equal as possible, larger ones first. It is cut between its
    steps in time, or tiles, which attend only to themselves: (5, 4, 8) in two parts is (3, 4, 8) and (2, 4, 8).
    """
    time, height, width = grid
    return [(time // num_parts + (part < time % num_parts), height, width) for part in range(num_parts)]


def shares(grid: Grid, num_parts: int) -> list[float]:
    """The share of an image's patches that each part has."""
    return [steps / grid[0] for steps, *_ in cut_in_time(grid, num_parts)]


@dataclass(frozen=True, slots=True)
class Sample:
    """Lengths of one sequence. `vision_tokens` are counted after the merger. `vision_grids` has one entry for each
    image (or video), in order: its patches as (time, height, width), before the merger.
    """

    id: str
    text_tokens: int
    vision_tokens: int = 0
    vision_grids: tuple[Grid, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.text_tokens + self.vision_tokens


@dataclass(frozen=True, slots=True)
class VisionPlan:
    """Where the images of a batch are encoded.

    `layout` group: each image by a rank of the group that runs its sequence, inside the pack. world: by any rank, in a
    phase before the packs; a phase after them runs the encoder's backward pass. `keeps`: activations are kept from the
    first phase to the second; otherwise the second computes them again, in passes of at most `pass_patches` patches or
    of one larger image (0: all images of a rank in one pass).

    With sync=micro_batch every rank runs `num_passes` passes, and `Pack.passes` tells which image is in which.
    With sync=step each rank runs as many as its images fill.
    """

    layout: str = "group"
    keeps: bool = True
    pass_patches: int = 0
    num_passes: int = 0

    @property
    def apart(self) -> bool:
        """Whether images are encoded outside the packs."""
        return self.layout != "group"


IN_PACKS = VisionPlan()


@dataclass(frozen=True, slots=True)
class SplitImage:
    """An image whose parts several ranks encode, apart from the packs (`cut_in_time`). `image`: its number within its
    pack. `ranks`: the rank of each part, in order. `passes`: the pass of each part, with sync=micro_batch.
    """

    image: int
    ranks: tuple[int, ...]
    passes: tuple[int, ...] = ()


def encoding_ranks(encoders: Sequence[int], splits: Sequence[SplitImage]) -> list[tuple[int, ...]]:
    """For each image of a pack the ranks that encode it: several if it is split."""
    found: list[tuple[int, ...]] = [(rank,) for rank in encoders]
    for split in splits:
        found[split.image] = split.ranks
    return found


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences that run together, each a row of the batch, and the ranks that run them, in ring order.

    encoders: for every image of the pack (sequences in order, then their images in order) the rank that encodes it, one
    of `ranks` unless `VisionPlan.apart`. passes: if ranks run passes in lockstep (`VisionPlan.num_passes`), the pass of
    every image on its rank. splits: images that several ranks encode; `encoders` and `passes` name the first of them.
    offload: the share of its layers whose activations are in host memory until the backward pass needs them.
    recomputed: the share of its layers that keep their input alone and run again in the backward pass. encode_s,
    rest_s: the seconds in which its busiest member encodes images, and all others (`timeline.PackTimes`; 0 and 0 in
    older files, where a micro-batch then takes as long as its slowest pack).

    In the slice of a rank, `index` is the pack's place in the plan, `samples` are its sequences, and `micro_batch`
    counts from 0 without gaps.
    """

    ranks: tuple[int, ...]
    sequences: tuple[int, ...]
    predicted_time_s: float
    predicted_memory_bytes: float = 0.0
    micro_batch: int = 0
    encoders: tuple[int, ...] = ()
    passes: tuple[int, ...] = ()
    splits: tuple[SplitImage, ...] = ()
    offload: float = 0.0
    recomputed: float = 0.0
    encode_s: float = 0.0
    rest_s: float = 0.0
    index: int = 0
    samples: tuple[Sample, ...] = ()

    @property
    def degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What every rank knows of a micro-batch: whether any rank's pack has an image, the most tokens of any rank, and
    the largest shares of layers of any pack that are moved to host memory or recomputed.
    """

    encodes: bool = False
    most_tokens: int = 1
    offload: float = 0.0
    recomputed: float = 0.0

    def with_pack(self, pack: Pack) -> MicroBatch:
        tokens = -(-sum(sample.num_tokens for sample in pack.samples) // pack.degree)
        return MicroBatch(self.encodes or len(pack.encoders) > 0, max(self.most_tokens, tokens),
                          max(self.offload, pack.offload), max(self.recomputed, pack.recomputed))


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's ordered slice of a plan, and every process group of the plan (the same on all ranks, in plan order;
    empty where packs exchange over one group of all ranks).

    micro_batches: those of a plan with sync=micro_batch; empty with sync=step. encoded: the packs, its own and others',
    with an image that this rank encodes apart from the packs (`vision`), in plan order. plan_id: names the plan among
    all that were sent in a run.
    """

    step: int
    rank: int
    process_groups: tuple[tuple[int, ...], ...]
    packs: tuple[Pack, ...]
    micro_batches: tuple[MicroBatch, ...] = ()
    plan_id: str = ""
    vision: VisionPlan = IN_PACKS
    encoded: tuple[Pack, ...] = ()


def encoded_images(pack: Pack, rank: int) -> list[tuple[bool, ...]]:
    """For every sample of the pack, whether `rank` encodes each of its images, or a part of it."""
    here = [encoder == rank for encoder in pack.encoders]
    for split in pack.splits:
        here[split.image] = rank in split.ranks
    ends = list(accumulate(len(sample.vision_grids) for sample in pack.samples))
    return [tuple(here[begin:end]) for begin, end in zip([0, *ends], ends)]


def planned_samples(plan: RankPlan) -> Iterator[Sample]:
    """The samples of which a rank needs rows: those of its packs, and those with an image that it encodes apart from
    them. A sample may be in both.
    """
    for pack in plan.packs:
        yield from pack.samples
    for pack in plan.encoded:
        yield from (sample for sample, here in zip(pack.samples, encoded_images(pack, plan.rank)) if True in here)


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule of one global batch. `groups` are in the order of execution; a group starts when its ranks are free.
    Times are in seconds.
    """

    planner: str
    sync: str
    cluster: ClusterSpec
    samples: tuple[Sample, ...]
    groups: tuple[Pack, ...]
    predicted_time_s: float
    lower_bound_s: float  # no plan of this batch on this cluster takes less
    planning_time_s: float = 0.0
    inputs: dict[str, Any] = field(default_factory=dict, compare=False)
    vision: VisionPlan = IN_PACKS

    @property
    def fixed_s(self) -> float:
        """Fixed seconds of every rank, once a step or once a micro-batch."""
        return float(self.inputs.get("cost", {}).get("fixed_s", 0.0))

    @property
    def update_s(self) -> float:
        """Seconds of every rank, once at the end of a step with sync=micro_batch, in addition to `fixed_s`."""
        return float(self.inputs.get("cost", {}).get("update_s", 0.0)) if self.sync == "micro_batch" else 0.0

    @property
    def makespan_s(self) -> float:
        """Predicted seconds until the last rank has run its packs: without the reduction and the update at the end."""
        return self.predicted_time_s - self.fixed_s - self.update_s

    def process_groups(self) -> tuple[tuple[int, ...], ...]:
        """Distinct groups of two or more ranks, in plan order."""
        return tuple(dict.fromkeys(group.ranks for group in self.groups if group.degree > 1))

    def degrees(self) -> dict[int, int]:
        return dict(sorted(Counter(group.degree for group in self.groups).items()))

    def rank_plan(self, step: int, rank: int, plan_id: str = "") -> RankPlan:
        return self.rank_plans(step, plan_id)[rank]

    def rank_plans(self, step: int, plan_id: str = "", with_process_groups: bool = True) -> list[RankPlan]:
        """The slice of each rank, without the plan's process groups where no pool needs them: each slice has them all.
        O(ranks + sum of degrees + images).
        """
        numbers = sorted({group.micro_batch for group in self.groups}) if self.sync == "micro_batch" else []
        place = {number: index for index, number in enumerate(numbers)}
        micro_batches = [MicroBatch()] * len(numbers)
        own: list[list[Pack]] = [[] for _ in range(self.cluster.num_ranks)]
        encoded: list[list[Pack]] = [[] for _ in range(self.cluster.num_ranks)]
        for index, group in enumerate(self.groups):
            pack = replace(group, index=index, samples=tuple([self.samples[row] for row in group.sequences]),
                           micro_batch=place.get(group.micro_batch, 0))
            for rank in pack.ranks:
                own[rank].append(pack)
            if numbers:
                micro_batches[pack.micro_batch] = micro_batches[pack.micro_batch].with_pack(pack)
            if self.vision.apart:
                for rank in set(chain(*encoding_ranks(pack.encoders, pack.splits))):
                    encoded[rank].append(pack)
        groups, known = self.process_groups() if with_process_groups else (), tuple(micro_batches)
        return [RankPlan(step, rank, groups, tuple(own[rank]), known, plan_id, self.vision, tuple(encoded[rank]))
                for rank in range(self.cluster.num_ranks)]

    def validate(self) -> None:
        """Raise PlanError unless every sequence runs exactly once, on valid ranks, within their memory."""
        _check_groups(self)
        _check_passes(self)
        _check_splits(self)

    def to_json(self) -> dict[str, Any]:
        """The form of a plan file. From `inputs` (if given, here with the samples) the plan can be made again."""
        tree: dict[str, Any] = to_builtins(replace(self, inputs={}))
        cluster, samples, inputs = tree.pop("cluster"), tree.pop("samples"), self.inputs
        for group in tree["groups"]:
            for name in ("predicted_memory_bytes", "index", "samples", *(
                    name for name in ("passes", "splits") if not group[name])):
                del group[name]
        tree |= {name: cluster[name] for name in ("num_ranks", "ranks_per_node", "tokens_per_rank")}
        return tree | ({"inputs": {"samples": samples} | inputs} if inputs else {})

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Plan:
        """The plan of a file as it was made (`replay` makes it again). The file does not contain what a pack's ranks
        hold. In files without `vision`, encoders are places in the group's ranks. PlanError: it has no inputs, or is
        damaged.
        """
        try:
            inputs, groups = dict(tree["inputs"]), tree["groups"]
            if "vision" not in tree:
                groups = [group | {"encoders": [group["ranks"][member] for member in group.get("encoders", ())]}
                          for group in groups]
            samples = inputs.pop("samples")
        except (KeyError, TypeError, IndexError) as error:
            raise PlanError(f"plan file: damaged ({error.__class__.__name__}: {error})") from None
        plan = of_json(tree | {"cluster": inputs | tree, "samples": samples, "groups": groups, "inputs": inputs}, cls)
        plan.validate()
        return plan


def of_json(tree: Any, kind: type[Kind]) -> Kind:
    """An object of a plan file; unknown fields are ignored, and missing ones have their defaults. PlanError: the tree
    does not have this form.
    """
    try:
        return convert(tree, kind)
    except ValidationError as error:
        raise PlanError(f"plan file: damaged ({error})") from None


def _check_groups(plan: Plan) -> None:
    rows, pieces = flat([group.sequences for group in plan.groups])
    if len(rows) != len(plan.samples) or (np.sort(rows) != np.arange(len(rows))).any():
        raise PlanError(f"plan: {len(rows)} placements for {len(plan.samples)} sequences; each must run exactly once")
    ranks, degrees = flat([group.ranks for group in plan.groups])
    group_of = np.repeat(np.arange(len(degrees)), degrees)
    wrong = degrees == 0
    wrong[group_of[(ranks < 0) | (ranks >= plan.cluster.num_ranks) | ~first_of_its_kind(group_of, ranks)]] = True
    if wrong.any():
        index = int(wrong.argmax())
        raise PlanError(
            f"plan: group {index} has ranks {plan.groups[index].ranks}; "
            f"each must be one of {plan.cluster.num_ranks}, once"
        )
    group_of_row = np.repeat(np.arange(len(pieces)), pieces)
    tokens = np.zeros(len(pieces), dtype=np.int64)
    np.add.at(
        tokens, group_of_row, np.array([sample.text_tokens + sample.vision_tokens for sample in plan.samples])[rows]
    )
    if (tokens > degrees * plan.cluster.most_tokens_per_rank).any():
        index = int((tokens > degrees * plan.cluster.most_tokens_per_rank).argmax())
        raise PlanError(
            f"plan: group {index} holds {tokens[index]} tokens on {degrees[index]} ranks "
            f"of {plan.cluster.most_tokens_per_rank} tokens"
        )
    for limit, found, does in (
        (plan.cluster.offload, [group.offload for group in plan.groups], "moves {} of its activations to host memory"),
        (plan.cluster.recomputation, [group.recomputed for group in plan.groups], "recomputes {} of its layers"),
    ):
        needed, shares = limit.share_of(tokens / degrees), np.array(found)
        wrong = (shares < needed - 1e-9) | (shares > 1.0)
        if wrong.any():
            index = int(wrong.argmax())
            raise PlanError(f"plan: group {index} {does.format(f'a share of {shares[index]:.3g}')}; "
                            f"allowed: {needed[index]:.3g} to 1")
    grids = [sample.vision_grids for sample in plan.samples]
    images = np.zeros(len(pieces), dtype=np.int64)
    if any(grids):
        np.add.at(images, group_of_row, np.array([len(grid) for grid in grids])[rows])
    if plan.vision.layout not in ("group", "world"):
        raise PlanError(f"plan: images are encoded by {plan.vision.layout!r}; allowed: group, world")
    everyone = frozenset(range(plan.cluster.num_ranks))
    for index, (group, count) in enumerate(zip(plan.groups, images.tolist())):
        allowed = everyone if plan.vision.apart else frozenset(group.ranks)
        if len(group.encoders) != count or not allowed.issuperset(group.encoders):
            raise PlanError(f"plan: group {index} has {count} images and encoders {group.encoders}")
    if plan.sync == "micro_batch":
        micro_batch = np.array([group.micro_batch for group in plan.groups])
        if (np.diff(micro_batch) < 0).any():
            raise PlanError("plan: micro-batches out of order")
        twice = ~first_of_its_kind(micro_batch[group_of], ranks)
        if twice.any():
            raise PlanError(f"plan: rank {ranks[twice][0]} runs twice in micro-batch {micro_batch[group_of[twice][0]]}")


def _check_passes(plan: Plan) -> None:
    """Ranks that run micro-batches in lockstep also encode in lockstep: every image is in one of the passes that all
    ranks run.
    """
    lockstep, count = plan.vision.apart and plan.sync == "micro_batch", plan.vision.num_passes
    if lockstep != (count > 0):
        raise PlanError(f"plan: {count} encoder passes on every rank with sync={plan.sync} and images encoded by "
                        f"{plan.vision.layout}; allowed: at least 1 with sync=micro_batch and world, else 0")
    for index, group in enumerate(plan.groups):
        images = len(group.encoders) if lockstep else 0
        if len(group.passes) != images or (images and not 0 <= min(group.passes) <= max(group.passes) < count):
            raise PlanError(f"plan: group {index} has {images} images to encode in {count} passes, and passes "
                            f"{group.passes}")


def _check_splits(plan: Plan) -> None:
    """Images that several ranks encode are encoded apart from the packs, by different ranks, at most one for each step
    in time; in lockstep in passes that all ranks run.
    """
    for index, group in enumerate(plan.groups):
        grids = [grid for row in group.sequences if group.splits for grid in plan.samples[row].vision_grids]
        for split in group.splits:
            passes = split.passes or (-1,) * len(split.ranks)
            known = 0 <= split.image < len(group.encoders) and len(split.ranks) > 1 and len(passes) == len(split.ranks)
            if known and len(split.ranks) > grids[split.image][0]:
                raise PlanError(f"plan: group {index} has image {split.image} of {grids[split.image][0]} steps in time "
                                f"in {len(split.ranks)} parts; allowed: at most as many as it has steps")
            sound = (known and plan.vision.apart and len(set(split.ranks)) == len(split.ranks)
                     and 0 <= min(split.ranks) <= max(split.ranks) < plan.cluster.num_ranks
                     and group.encoders[split.image] == split.ranks[0]
                     and bool(split.passes) == bool(group.passes)
                     and (not split.passes or (split.passes[0] == group.passes[split.image]
                                               and 0 <= min(passes) <= max(passes) < plan.vision.num_passes)))
            if not sound:
                raise PlanError(f"plan: group {index} has encoders {group.encoders} and image {split.image} in parts "
                                f"on ranks {split.ranks}, passes {split.passes}; allowed: images encoded apart from "
                                "packs, on two ranks and more, once each, as `encoders` and `passes` begin")
