"""Makes a cost file from measurements: the constants, their origin, and how certain they are.

    session (sync=step)          packs, images, rings, ... -> constants of compute, ring, fixed_s
    session (sync=micro_batch)   images (else packs), rings       -> fixed_s, update_s and latency_s of micro_batch

If only one mode is measured, all constants are those of this mode. `group_s` and `window_s` are derived from the
model's shape and what is known of the device, and so are, on one rank, the constants that need several; they are listed
under `measured.derived`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import yaml

from dhp_ray.errors import counted
from dhp_ray.measure.fitting import Fit, Links, fit_compute, fit_links, fit_ring, fixed_of_micro_batch, observed
from dhp_ray.measure.rounds import PartResult, Spec
from dhp_ray.planner.cost.derived import (
    forward_pass_share,
    ring_bytes_per_token,
    vision_forward_share,
    with_encoder_apart,
)
from dhp_ray.planner.cost.model import CostModel, links_of
from dhp_ray.planner.cost.origin import Origin, device_words
from dhp_ray.planner.memory.model import MemoryModel
from dhp_ray.storage import replacing

WORDS = {"packs": "packs on one rank", "rings": "packs on several ranks"}  # what the fits are called


class MeasuredSession(NamedTuple):
    """What was measured in one mode: for every part, the results of each rank."""

    spec: Spec
    results: dict[str, Sequence[PartResult]]


@dataclass(frozen=True)
class Measured:
    """A cost, the other sections of its file, and the fits behind it."""

    cost: CostModel
    sections: dict[str, Any]
    fits: dict[str, Fit]

    def summary(self) -> list[str]:
        """Lines for people: where it was measured, how far the fits are off, how far repeats lie apart."""
        device, seen, errors = (self.sections[name] for name in ("device", "measured", "errors"))
        off = [f"{WORDS[kind]}: off by {100 * errors[kind]['median']:.1f} % in the median, "
               f"{100 * errors[kind]['worst']:.1f} % at worst" for kind in self.fits]
        return [f"Measured by jobs/measure.py on {counted(device['count'], 'rank')} of {device_words(device)}", *off,
                f"{seen['packs']} packs; {seen['repeats']} repeats, of which the middle half of a pack's lies "
                f"{100 * seen['spread']:.1f} % apart in the median"]

    def text(self) -> str:
        head = "".join(f"# {line}\n" for line in self.summary())
        constants = {name: value for name, value in self.cost.to_json().items()
                     if value not in ({}, "", 0.0) or name in ("quadratic_s", "linear_s", "fixed_s", "overlap")}
        dumped = yaml.safe_dump(_rounded(constants | self.sections), sort_keys=False, width=120,
                                default_flow_style=None)
        return head + dumped

    def write(self, path: Path) -> None:
        """Write the file, and a picture beside it."""
        with replacing(path) as unfinished:
            unfinished.write_text(self.text(), encoding="utf-8")
        self.draw(path.with_suffix(".png"))

    def draw(self, target: Path | BinaryIO) -> None:
        """Write a PNG: predicted against measured seconds of all packs, and the relative error of each."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4.5), layout="constrained")
        both, errors = figure.subplots(1, 2)
        seconds = np.concatenate([fit.measured for fit in self.fits.values()])
        both.plot([seconds.min(), seconds.max()], [seconds.min(), seconds.max()], color="0.7", linewidth=1)
        for kind, fit in self.fits.items():
            both.scatter(fit.measured, fit.predicted, s=14, label=WORDS[kind])
            errors.scatter(fit.measured, 100 * (fit.predicted / fit.measured - 1.0), s=14, label=kind)
        both.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s", title=self.cost.name)
        errors.axhline(0.0, color="0.7", linewidth=1)
        median = 100 * np.median(np.concatenate([fit.relative_errors for fit in self.fits.values()]))
        errors.set(xscale="log", xlabel="measured, s", ylabel="predicted - measured, %", title=f"median {median:.1f} %")
        both.legend()
        figure.savefig(target, format="png", dpi=110)


def measured_cost(
    sessions: Sequence[MeasuredSession], origin: Origin, memory: MemoryModel, derived: CostModel, name: str
) -> Measured:
    """Fit a cost to all sessions. `derived`: gives what one rank cannot measure. MeasureError: too few packs."""
    (spec, results), main_sync = sessions[0], sessions[0].spec.sync
    seen = {session.spec.sync: observed(session.spec, session.results) for session in sessions}
    main, tokens = seen[main_sync], spec.sizes.max_tokens
    compute = fit_compute([pack for pack in main.packs if pack.degree == 1])
    fixed = {sync: fixed_of_micro_batch(of_mode.packs, compute) if sync == "micro_batch" else of_mode.fixed_s
             for sync, of_mode in seen.items()}
    links = fit_links([result.exchanged for result in results.get("exchanges", ())])
    rings: dict[str, Fit] = {}
    for sync, of_mode in seen.items():
        packs = [pack for pack in of_mode.packs if pack.degree > 1]
        of_images = [pack for pack in packs if pack.has_images and sync == "micro_batch"]  # `fixed_of_micro_batch`
        if packs := of_images or packs:
            rings[sync] = fit_ring(packs, compute, ring_bytes_per_token(memory), links,
                                   fixed[sync] if sync == "micro_batch" else None, rings.get(main_sync),
                                   derived.window_s)
    ring = rings.get(main_sync)
    bandwidth = _bandwidth(links, ring.constants["slowness"] if ring else 1.0, derived)
    latency = {sync: fit.constants["latency_s"] for sync, fit in rings.items()}
    not_measured = [f"bandwidth_bytes_per_s.{kind}" for kind, table in links._asdict().items() if not table]
    not_measured += ["forward", *["vision_forward"] * bool(memory.shape.vision)]
    not_measured += ["group_s", *["window_s"] * bool(derived.window_s), *["latency_s", "overlap"] * (ring is None)]
    of_compute: dict[str, Any] = dict(compute.constants)
    cost = CostModel(
        **of_compute, name=name, source=f"jobs/measure.py on {device_words(origin.device)}",
        communication="ring", comm_bytes_per_token=ring_bytes_per_token(memory), bandwidth_bytes_per_s=bandwidth,
        fixed_s=fixed[main_sync], fixed_s_by_sync=fixed if len(fixed) > 1 else {},
        update_s=seen["micro_batch"].fixed_s if "micro_batch" in seen else 0.0,
        latency_s=latency.get(main_sync, derived.latency_s), latency_s_by_sync=latency if len(latency) > 1 else {},
        overlap=ring.constants["overlap"] if ring else derived.overlap, group_s=derived.group_s,
        window_s=derived.window_s, forward=forward_pass_share(memory), vision_forward=vision_forward_share(memory),
        resident_bytes=float(sum(memory.resident().values())),
        memory_bytes_per_token=sum(memory.memory(memory.worst_load(tokens)).pack.values()) / tokens)
    cost = replace(cost, feature_bytes=with_encoder_apart(cost, memory, tokens).feature_bytes)
    fits = {"packs": compute} | ({"rings": ring} if ring else {})
    return Measured(cost, origin.to_json() | {
        "versions": {package: version(package) for package in ("torch", "transformers", "dhp_ray")},
        "measured": {"max_tokens": tokens, "packs": len(main.packs), "repeats": main.num_repeats,
                     "spread": float(np.median(main.spreads)), "derived": not_measured},
        "errors": compute.errors | {kind: {"median": float(np.median(fit.relative_errors)),
                                           "mean": float(fit.relative_errors.mean()),
                                           "worst": float(fit.relative_errors.max())} for kind, fit in fits.items()}},
        fits)


def _bandwidth(links: Links, slowness: float, derived: CostModel) -> dict[str, dict[int, float]]:
    """The bandwidths over rings' slowness; unmeasured links as described, across nodes not faster than inside."""
    inside, across = (measured or known for measured, known in zip(links, links_of(derived.bandwidth_bytes_per_s)))
    if links.intra and not links.inter:
        across = {degree: min(rate, max(inside.values())) for degree, rate in across.items()}
    return {kind: {degree: rate / slowness for degree, rate in table.items()}
            for kind, table in (("intra", inside), ("inter", across))}


def _rounded(value: Any) -> Any:
    """Round every number that is not whole to four significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else float(f"{value:.4g}")
