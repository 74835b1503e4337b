"""Published figures beside what the cost model predicts: every row of benchmarks/published.yaml.

    python benchmarks/published.py [rows]        `rows`: every row, else the worst three of each source

At most three numbers of a device are fitted, on sources of five rows and more, and each row of such a source is
predicted by numbers that were fitted without it (leave one out). Other sources are predicted by the numbers of their
device as fitted elsewhere. All figures are others' measurements; the predictions are modelled.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published_offload import OFFLOAD_URL, offload_curve
from benchmarks.published_points import Point, Published, Rates, Source
from benchmarks.published_ratios import DYNAMIC_CP_URL, ENCODER_URL, Ratio, dynamic_cp, encoder_apart, scatter

WORST = 3

NOT_YET = """
Not expressible: Mixtral 8x22B (experts), Qwen2.5-VL-72B by TP and PP alone, encoder layouts without a published row,
and CORD-v2 and MedPix of Megatron-Bridge, whose sizes of images are not given.
"""


class Predicted(NamedTuple):
    """A row: the figure that is published and the one that is predicted, of rates that have not seen it."""

    point: Point
    figure: float

    @property
    def error(self) -> float:
        """Of the figure, as a share of what is published."""
        return self.figure / self.point.figure - 1


def fitted_on(published: Published, device: str) -> list[Point]:
    """The points that a device's numbers are fitted on."""
    return [point for source in published.sources if source.fits and source.device == device
            for point in source.points]


def predictions(published: Published, source: Source) -> list[Predicted]:
    """Every row of a source."""
    device = published.like[source.device]
    points = fitted_on(published, device)
    whole = published.fit(device, points) if points else {}
    found = []
    for point in source.points:
        rates = published.fit(device, [other for other in points if other is not point]) if source.fits else whole
        found.append(Predicted(point, published.figure(point, published.devices[source.device],
                                                       for_device(published, source.device, rates))))
    return found


def for_device(published: Published, device: str, rates: Rates) -> Rates:
    """What of another device's fitted rates holds for this one: all but its memory's, in the ratio of both."""
    other = published.like[device]
    if other == device or "memory_bytes_per_s" not in rates:
        return rates
    ratio = published.devices[device].memory_bytes_per_s / published.devices[other].memory_bytes_per_s
    return rates | {"memory_bytes_per_s": rates["memory_bytes_per_s"] * ratio}


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    if set(words) - {"rows"}:
        print(f"published.py: {words[0]}: allowed: rows", file=sys.stderr)
        return 2
    published = Published.load()
    print("| device | " + "fitted numbers |\n|---|---|")
    for device, names in published.fitted.items():
        if names:
            rates = published.fit(device, fitted_on(published, device))
            print(f"| {device} | {', '.join(f'{name} {rates[name]:.4g}' for name in names)} |")
    medians, every = [], {source.name: predictions(published, source) for source in published.sources}
    print("\n| source | rows | fitted on | median error | mean | largest |\n|---|---|---|---|---|---|")
    for source in published.sources:
        errors = [abs(row.error) for row in every[source.name]]
        medians.append(statistics.median(errors))
        cells = [f"{100 * value:.1f} %" for value in (medians[-1], statistics.fmean(errors), max(errors))]
        fits = "its other rows" if source.fits else "other sources"
        print(f"| {source.name} | {len(errors)} | {fits} | {' | '.join(cells)} |")
    ratios = [("Megatron-LM's dynamic CP", DYNAMIC_CP_URL, dynamic_cp()),
              ("Megatron-Bridge's encoder on a rank of its own, RDR", ENCODER_URL,
               encoder_apart(**published.fit("h100", fitted_on(published, "h100")))),
              ("ByteScale's activation offload at 64K", OFFLOAD_URL, offload_curve())]
    for name, url, found in ratios:
        errors = [abs(ratio.error) for ratio in found]
        medians.append(statistics.median(errors))
        cells = [f"{100 * value:.1f} %" for value in (medians[-1], statistics.fmean(errors), max(errors))]
        fits = {DYNAMIC_CP_URL: "its other rows", ENCODER_URL: "other sources"}.get(url, "nothing: over its first row")
        print(f"| {name} | {len(errors)} | {fits} | {' | '.join(cells)} |")
    print(f"\nMedian over sources of their medians: {100 * statistics.median(medians):.1f} %")
    for name, url, found in ratios:
        print_ratios(name, url, found)
        if url == OFFLOAD_URL:
            continue
        print(f"\nThe straight line through all these rows misses one by {100 * scatter(found):.0f} points.")
    for source in published.sources:
        rows = every[source.name] if words else sorted(every[source.name], key=lambda row: -abs(row.error))[:WORST]
        print(f"\n{source.name} ({source.url}): {source.note}\n\n| row | published | predicted | error |\n"
              "|---|---|---|---|")
        for row in rows:
            print(f"| {row.point.name} | {row.point.figure:,.0f} | {row.figure:,.0f} | {100 * row.error:+.1f} % |")
    print(NOT_YET)
    return 0


def print_ratios(name: str, url: str, ratios: Sequence[Ratio]) -> None:
    print(f"\n{name} ({url}): one way over the other\n\n| row | published | predicted | points apart |\n"
          "|---|---|---|---|")
    for ratio in ratios:
        print(f"| {ratio.name} | {ratio.published:.3f} | {ratio.predicted:.3f} | "
              f"{100 * (ratio.predicted - ratio.published):+.1f} |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
