"""Makes a cost file from measurements: the constants, their origin, and how certain they are.

    session (sync=step)          packs, images, apart, rings, ... -> constants of compute, ring, fixed_s
    session (sync=micro_batch)   images (else packs), rings       -> fixed_s, update_s and latency_s of micro_batch

If only one mode is measured, all constants are those of this mode. If there is only one rank, the constants that need
several ranks are derived from the model's shape and what is known of the device, and listed under `measured.derived`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from dhp_ray.measure.communication import Links, Ring, RingSeconds, fit_latency, fit_links, fit_ring, ring_seconds
from dhp_ray.measure.fitting import Fit, fit_compute, fixed_of_micro_batch, fixed_of_step, forward_share
from dhp_ray.measure.observations import Observations, observed
from dhp_ray.measure.rounds import Spec
from dhp_ray.measure.timings import PartResult
from dhp_ray.planner.bandwidth import links_of
from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.cost_origin import Origin, device_words
from dhp_ray.planner.derived_cost import forward_pass_share, ring_bytes_per_token, vision_forward_share
from dhp_ray.planner.encoder_memory import with_encoder_apart
from dhp_ray.planner.memory import MemoryModel


class Session(NamedTuple):
    """What was measured in one mode: for every part, the results of each rank."""

    spec: Spec
    results: dict[str, Sequence[PartResult]]


class Points(NamedTuple):
    """Predicted and measured seconds of one kind of pack, for the picture."""

    kind: str
    predicted: np.ndarray
    measured: np.ndarray


@dataclass(frozen=True)
class Measured:
    """A cost, the other sections of its file, the points that it was fitted to, and the constants that were measured,
    by mode and degree where they differ.
    """

    cost: CostModel
    sections: dict[str, Any]
    points: list[Points]
    constants: dict[str, float]

    def text(self) -> str:
        """The content of the file."""
        device, errors = self.sections["device"], self.sections["errors"]["packs"]
        head = (f"# Measured by jobs/measure.py on {device['count']} ranks of {device_words(device)}. Packs are off by "
                f"{100 * errors['median']:.1f} % in the median.\n")
        constants = {name: value for name, value in self.cost.to_json().items()
                     if value not in ({}, "", 0.0) or name in ("quadratic_s", "linear_s", "fixed_s", "overlap")}
        dumped = yaml.safe_dump(rounded(constants | self.sections), sort_keys=False, width=120, default_flow_style=None)
        return head + dumped

    def table(self) -> str:
        """A table for people: every constant that was measured, with its mean relative error, and the errors of the fit
        on the packs that it was fitted to.
        """
        sections, errors = self.sections, self.sections["errors"]
        seen, settings = sections["measured"], sections["settings"]
        lines = [f"{self.cost.name}: {sections['device']['count']} ranks of {device_words(sections['device'])}, sync="
                 f"{', '.join(settings['sync'])}, {settings['precision']}, packs of up to {seen['max_tokens']} tokens",
                 f"{'':32}{'value':>10}{'mean error':>13}"]
        for name, value in self.constants.items():
            error = f"{100 * errors[name]:.1f} %" if name in errors else ""
            lines.append(f"{name:32}{value:>10.4g}{error:>13}".rstrip())
        for kind, what in (("packs", "packs on one rank"), ("rings", "packs on several ranks")):
            if kind in errors:
                off = errors[kind]
                lines.append(f"{what}: the fit is off by {100 * off['median']:.1f} % in the median, "
                             f"{100 * off['mean']:.1f} % in the mean, {100 * off['worst']:.1f} % at worst")
        lines.append(f"{seen['packs']} packs, {seen['packs_left_out']} left out of the fit; {seen['repeats']} repeats, "
                     f"of which the middle half of a pack's lies {100 * seen['spread']:.1f} % apart in the median")
        if seen["derived"]:
            lines.append(f"not measured here, but derived: {', '.join(seen['derived'])}")
        return "\n".join(lines)


def measured_cost(
    sessions: Sequence[Session], origin: Origin, memory: MemoryModel, derived: CostModel, name: str
) -> Measured:
    """Fit a cost to the measurements of all sessions. `memory` is that of the run which will use the cost; `derived`
    has the communication constants that one rank cannot measure.

    Raises:
        MeasureError: too few packs.
    """
    main, seen = sessions[0], observed(sessions[0].spec, sessions[0].results)
    compute = fit_compute([pack for pack in seen.packs if pack.degree == 1])
    shown: dict[str, float] = dict(compute.constants)
    constants: dict[str, Any] = dict(compute.constants) | {"attention_block": compute.block}
    points = [Points("packs on one rank", compute.predicted, compute.measured)]
    errors: dict[str, Any] = dict(compute.errors) | {"packs": _of_packs(compute.relative_errors)}
    constants |= {"forward": forward_pass_share(memory), "vision_forward": vision_forward_share(memory)}
    of_shape = ["forward"]
    if share := forward_share(seen):
        constants["vision_forward"] = shown["vision_forward"] = share
    elif memory.shape.vision:
        of_shape.append("vision_forward")
    fixed, seen_in = dict[str, float](), dict[str, Observations]()
    for session in sessions:
        sync = session.spec.sync
        seen_in[sync] = seen if session is main else observed(session.spec, session.results)
        fixed[sync] = shown[f"fixed_s.{sync}"] = _fixed(session.spec, seen_in[sync], compute)
        if sync == "micro_batch":
            constants["update_s"] = shown["update_s"] = fixed_of_step(seen_in[sync])
    constants |= {"fixed_s": fixed[main.spec.sync], "fixed_s_by_sync": fixed if len(fixed) > 1 else {}}
    links = fit_links([result.exchanged for result in main.results.get("exchanges", ())])
    rings = {sync: _rings(of_mode, compute, memory, links, None if sync == "step" else fixed[sync])
             for sync, of_mode in seen_in.items() if any(pack.degree > 1 for pack in of_mode.packs)}
    ring = fit_ring(rings[main.spec.sync]) if main.spec.sync in rings else None
    bandwidth, not_measured = _bandwidth(links, ring, derived)
    not_measured += of_shape
    constants["bandwidth_bytes_per_s"] = bandwidth
    if ring is None:
        constants |= {"latency_s": derived.latency_s, "overlap": derived.overlap}
        not_measured += ["latency_s", "overlap"]
    else:
        latency = {main.spec.sync: ring.latency_s}
        if main.spec.sync == "step" and "micro_batch" in rings:
            latency["micro_batch"] = fit_latency(rings["micro_batch"], ring)
        shown |= {f"bandwidth_bytes_per_s.{name}.{degree}": rate for name in ("intra", "inter")
                  if getattr(links, name) for degree, rate in bandwidth[name].items()}
        shown |= {"overlap": ring.overlap, **{f"latency_s.{sync}": value for sync, value in latency.items()}}
        constants |= {"latency_s": ring.latency_s, "overlap": ring.overlap,
                      "latency_s_by_sync": latency if len(latency) > 1 else {}}
        errors["rings"] = _of_packs(np.abs(ring.predicted / ring.measured - 1.0))
        points.append(Points("packs on several ranks", ring.predicted, ring.measured))
    group_s = _group_s(main.results.get("groups", ()))
    constants["group_s"] = statistics.median(group_s) if group_s else derived.group_s
    if group_s:
        shown["group_s"] = constants["group_s"]
    else:
        not_measured.append("group_s")
    constants |= _memory(main.results.get("memory", ()), memory)
    cost = CostModel(**constants, name=name, communication="ring", comm_bytes_per_token=ring_bytes_per_token(memory),
                     source=f"jobs/measure.py on {device_words(origin.device)}")
    apart = with_encoder_apart(cost, memory, main.spec.sizes.max_tokens)
    cost = replace(cost, feature_bytes=apart.feature_bytes, vision_forward=apart.vision_forward)
    return Measured(cost, origin.to_json() | {
        "versions": {package: _version(package) for package in ("torch", "transformers", "dhp_ray")},
        "measured": _summary(sessions, seen, compute, not_measured),
        "errors": errors}, points, shown)


def _fixed(spec: Spec, seen: Observations, compute: Fit) -> float:
    return fixed_of_micro_batch(seen, compute) if spec.sync == "micro_batch" else fixed_of_step(seen)


def _rings(
    seen: Observations, compute: Fit, memory: MemoryModel, links: Links, gathers_s: float | None
) -> RingSeconds:
    packs = [pack for pack in seen.packs if pack.degree > 1]
    if gathers_s is not None:  # it includes gathering the encoder, if there is one
        packs = [pack for pack in packs if pack.has_images] or packs
    return ring_seconds(packs, compute, ring_bytes_per_token(memory), links, gathers_s)


def _bandwidth(links: Links, ring: Ring | None, derived: CostModel) -> tuple[dict[str, Any], list[str]]:
    """The bandwidths of the file, and the names of those that were not measured. If only links
    inside a node were, those across nodes are as fast as described, or as much slower as described, whichever is
    faster, but never faster than those inside; if only those across were, links inside count as them.
    """
    inside, across = (min(table.values()) for table in links_of(derived.bandwidth_bytes_per_s))
    slowness = ring.slowness if ring else 1.0
    found: dict[str, Any] = {}
    missing = []
    for name, table in (("intra", links.intra), ("inter", links.inter)):
        if table:
            found[name] = {degree: rate / slowness for degree, rate in table.items()}
        else:
            missing.append(f"bandwidth_bytes_per_s.{name}")
    if not found:
        known = derived.bandwidth_bytes_per_s
        return {name: known.get(name, known) for name in ("intra", "inter")}, missing
    if "inter" not in found:
        found["inter"] = {degree: min(rate, max(rate * across / inside, across / slowness))
                          for degree, rate in found["intra"].items()}
    return {"intra": found.get("intra", found["inter"]), "inter": found["inter"]}, missing


def _group_s(results: Sequence[PartResult]) -> list[float]:
    """For the smallest groups, the seconds of the slowest member in each repeat."""
    tables = [result.group_s for result in results if result.group_s]
    if not tables:
        return []
    degree = min(min(table) for table in tables)
    return np.array([table[degree] for table in tables if degree in table]).max(axis=0).tolist()  # type: ignore[no-any-return]


def _memory(results: Sequence[PartResult], memory: MemoryModel) -> dict[str, Any]:
    """Bytes of a token from the highest peak of the largest pack on any rank; the resident state is the memory model's.
    """
    found: dict[str, Any] = {"resident_bytes": float(sum(memory.resident().values()))}
    peaks = [result.peaks for result in results if result.peaks]
    if peaks:
        tokens, highest = peaks[0][-1][0], max(of_rank[-1][1] for of_rank in peaks)
        found["memory_bytes_per_token"] = highest / tokens
    return found


def _summary(sessions: Sequence[Session], seen: Observations, compute: Fit, derived: Sequence[str]) -> dict[str, Any]:
    return {"max_tokens": sessions[0].spec.sizes.max_tokens, "quick": sessions[0].spec.quick,
            "packs": len(seen.packs), "packs_left_out": compute.left_out, "repeats": seen.num_repeats,
            "spread": float(np.median(seen.spreads)), "derived": list(derived)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that is not installed
        return "not installed"


def _of_packs(errors: np.ndarray) -> dict[str, float]:
    return {"median": float(np.median(errors)), "mean": float(errors.mean()), "worst": float(errors.max())}


def rounded(value: Any) -> Any:
    """Round every number that is not whole to four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else float(f"{value:.4g}")


def write(measured: Measured, path: Path) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(measured.text(), encoding="utf-8")
    unfinished.replace(path)
