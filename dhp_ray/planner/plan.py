"""The types of a plan: plain frozen data, without torch and without Ray.

Sample ... what the planner knows of one sequence
ClusterSpec ... the ranks that there are
Plan -> GroupPlan -> Pack ... which sequences run together, on which ranks, in which order
Plan -> VisionPlan ... whether packs encode their own images, or all ranks encode those of the batch before the packs
Plan -> RankPlan ... the slice of a plan that one rank runs
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dhp_ray.planner.checks import PlanError as PlanError
from dhp_ray.planner.checks import check
from dhp_ray.planner.cluster import ClusterSpec as ClusterSpec
from dhp_ray.planner.encoder_checks import check_passes, check_splits
from dhp_ray.planner.image_parts import Grid as Grid
from dhp_ray.planner.rank_plan import PlanSlices
from dhp_ray.planner.rank_plan import RankPack as RankPack
from dhp_ray.planner.rank_plan import RankPlan as RankPlan
from dhp_ray.planner.sample import Sample as Sample
from dhp_ray.planner.sample import samples_from_json, samples_to_json
from dhp_ray.planner.vision_plan import IN_PACKS
from dhp_ray.planner.vision_plan import SplitImage as SplitImage
from dhp_ray.planner.vision_plan import VisionPlan as VisionPlan


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences that one group runs together; each is a row of the batch."""

    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A pack and the ranks that run it, in ring order.

    encoders: for every image of the pack (sequences in order, then their images in order) the rank that encodes it, one
    of `ranks` unless `VisionPlan.apart`. passes: if ranks run passes in lockstep (`VisionPlan.num_passes`), the pass of
    every image on its rank. splits: images that several ranks encode; `encoders` and `passes` name the first of them.
    offload: the share of its layers whose activations are in host memory until the backward pass needs them.
    recomputed: the share of its layers that keep their input alone and run again in the backward pass. encode_s,
    rest_s: the seconds in which its busiest member encodes images, and all others (`pricing.PackTimes`; 0 and 0 in
    older files, where a micro-batch then takes as long as its slowest pack).
    """

    ranks: tuple[int, ...]
    pack: Pack
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

    @property
    def degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule of one global batch. `groups` are in the order of execution; a group starts when its ranks are free.
    Times are in seconds.
    """

    planner: str
    sync: str
    cluster: ClusterSpec
    samples: tuple[Sample, ...]
    groups: tuple[GroupPlan, ...]
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
        """Number of packs of each degree."""
        counts: dict[int, int] = {}
        for group in self.groups:
            counts[group.degree] = counts.get(group.degree, 0) + 1
        return dict(sorted(counts.items()))

    def rank_plan(self, step: int, rank: int, plan_id: str = "") -> RankPlan:
        return self.slices(step, plan_id).of(range(rank, rank + 1)).rank_plans()[0]

    def slices(self, step: int, plan_id: str = "") -> PlanSlices:
        """The ranks' slices of the plan. O(ranks + sum of degrees + images)."""
        numbers = sorted({group.micro_batch for group in self.groups}) if self.sync == "micro_batch" else []
        encoding = {group.micro_batch for group in self.groups if group.encoders}
        place = {number: index for index, number in enumerate(numbers)}
        packs: list[RankPack] = []
        own: list[list[int]] = [[] for _ in range(self.cluster.num_ranks)]
        encoded: list[list[int]] = [[] for _ in range(self.cluster.num_ranks)]
        for index, group in enumerate(self.groups):
            packs.append(RankPack(
                index, group.ranks, tuple([self.samples[row] for row in group.pack.sequences]), group.encoders,
                group.predicted_time_s, place.get(group.micro_batch, 0), group.passes, group.splits, group.offload,
                group.recomputed,
            ))
            for rank in group.ranks:
                own[rank].append(index)
            if self.vision.apart:
                several = [rank for split in group.splits for rank in split.ranks]
                for rank in {*group.encoders, *several}:
                    encoded[rank].append(index)
        return PlanSlices(step, 0, self.process_groups(), tuple(packs), tuple(own), tuple(encoded),
                          tuple([number in encoding for number in numbers]), plan_id, self.vision)

    def validate(self) -> None:
        """Raise PlanError unless every sequence runs exactly once, on valid ranks, within their memory."""
        check(self)
        check_passes(self)
        check_splits(self)

    def to_json(self) -> dict[str, Any]:
        """The form of a plan file. From `inputs` (if given, here with the samples) the plan can be made again."""
        tree: dict[str, Any] = {
            "planner": self.planner,
            "sync": self.sync,
            "num_ranks": self.cluster.num_ranks,
            "ranks_per_node": self.cluster.ranks_per_node,
            "tokens_per_rank": self.cluster.tokens_per_rank,
            "predicted_time_s": self.predicted_time_s,
            "lower_bound_s": self.lower_bound_s,
            "planning_time_s": self.planning_time_s,
            "vision": asdict(self.vision),
            "groups": [
                {
                    "micro_batch": group.micro_batch,
                    "ranks": list(group.ranks),
                    "sequences": list(group.pack.sequences),
                    "predicted_time_s": group.predicted_time_s,
                    "encoders": list(group.encoders),
                    **({"passes": list(group.passes)} if group.passes else {}),
                    **({"splits": [asdict(split) for split in group.splits]} if group.splits else {}),
                    "offload": group.offload,
                    "recomputed": group.recomputed,
                    "encode_s": group.encode_s,
                    "rest_s": group.rest_s,
                }
                for group in self.groups
            ],
        }
        return tree | ({"inputs": {"samples": samples_to_json(self.samples)} | self.inputs} if self.inputs else {})

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Plan:
        """The plan of a file as it was made (`replay` makes it again). The file does not contain what a pack's ranks
        hold. In files without `vision`, encoders are places in the group's ranks.

        Raises:
            PlanError: the file has no inputs, or is damaged.
        """
        try:
            inputs, cluster = tree["inputs"], ClusterSpec.from_json(tree)
            groups = tuple(
                GroupPlan(
                    tuple(group["ranks"]),
                    Pack(tuple(group["sequences"])),
                    group["predicted_time_s"],
                    0.0,
                    group["micro_batch"],
                    tuple(group.get("encoders", ()) if "vision" in tree
                          else [group["ranks"][member] for member in group.get("encoders", ())]),
                    tuple(group.get("passes", ())),
                    tuple([SplitImage(split["image"], tuple(split["ranks"]), tuple(split["passes"]))
                           for split in group.get("splits", ())]),
                    group.get("offload", 0.0),
                    group.get("recomputed", 0.0),
                    group.get("encode_s", 0.0),
                    group.get("rest_s", 0.0),
                )
                for group in tree["groups"]
            )
            plan = cls(
                tree["planner"],
                tree["sync"],
                cluster,
                samples_from_json(inputs["samples"]),
                groups,
                tree["predicted_time_s"],
                tree["lower_bound_s"],
                tree["planning_time_s"],
                {name: inputs[name] for name in inputs if name != "samples"},
                VisionPlan(**tree.get("vision", {})),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise PlanError(f"plan file: damaged ({error.__class__.__name__}: {error})") from None
        plan.validate()
        return plan
