"""The keys of a workload: what samples consist of, as distributions with their sources, and mixtures of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from dhp_ray.config import CONF, Command, check_limits, load
from dhp_ray.schema import ConfigError, key

MOST_PICTURES = 100_000
"""The most images, or videos, that the samples of a source may have in the mean: each is drawn."""

DATA_FOLDER = "DHP_RAY_TEST_DATA"
"""The environment variable that names the folder of files with relative names, if `workload.folder` is empty."""


@dataclass(kw_only=True)
class Numbers:
    """A distribution of numbers, clipped to `minimum` and `maximum`."""

    kind: str = key("constant", "constant: `mean`; uniform: from `minimum` to `maximum`; normal and lognormal: by "
                    "`mean` and `deviation` of the numbers; bins: of `bins`",
                    choices=("constant", "uniform", "normal", "lognormal", "bins"))
    mean: float = key(0.0, "their mean", minimum=0, maximum=1e12)
    deviation: float = key(0.0, "their standard deviation", minimum=0, maximum=1e12)
    minimum: float = key(0.0, "the least one", minimum=0, maximum=1e12)
    maximum: float = key(1e12, "the largest one", minimum=0, maximum=1e12)
    bins: list[list[float]] = key([], "[[from, to, weight], ...]; numbers of a bin are equally likely")
    path: str = key("", "JSON file with `bins_s`, in place of bins", path="file")


@dataclass(kw_only=True)
class SourceSettings:
    """Samples of one kind. With `path` they are rows of a CSV file: num_tokens and, if it has this column,
    num_image_tiles, the number of image tiles (448 x 448 pixels, 256 tokens) among these tokens.
    """

    name: str = key("", "what its samples' ids begin with")
    weight: float = key(1.0, "how many samples are its, beside the other sources", above=0, maximum=1e9)
    source: str = key("", "where the figures are published")
    path: str = key("", "CSV file whose rows are drawn, in place of distributions", path="file")
    text_tokens: Numbers = field(default_factory=Numbers)
    images: Numbers = field(default_factory=Numbers)
    image_width: Numbers = field(default_factory=Numbers)
    image_height: Numbers = field(default_factory=Numbers)
    videos: Numbers = field(default_factory=Numbers)
    video_seconds: Numbers = field(default_factory=Numbers)
    video_width: Numbers = field(default_factory=Numbers)
    video_height: Numbers = field(default_factory=Numbers)


@dataclass(kw_only=True)
class Part:
    """Another workload in a mixture."""

    workload: str = key("", "its name in conf/workload")
    weight: float = key(1.0, "its share of the samples, beside the other parts", above=0, maximum=1e9)


@dataclass(kw_only=True)
class WorkloadSettings:
    """`sources`, or a mixture of other workloads; and how their images and videos are cut into patches."""

    mixture: list[Part] = key([], "workloads whose sources are mixed: [{workload: llava_video, weight: 1}, ...]; "
                                  "`folder` to `max_tokens` are this workload's own, those of the parts do not count")
    sources: list[SourceSettings] = key([], "samples of one kind each, mixed by weight")
    folder: str = key("", f"folder of files with relative names; empty: that of the variable {DATA_FOLDER}",
                      path="folder")
    max_pixels: int = key(1003520, "an image with more pixels is scaled down to this many", minimum=1, maximum=10**9)
    frame_pixels: int = key(200704, "a frame of a video likewise", minimum=1, maximum=10**9)
    video_fps: float = key(1.0, "frames a second taken from a video", above=0, maximum=1000)
    max_frames: int = key(768, "frames taken from a video at most", minimum=4, maximum=10**6)
    max_tokens: int = key(0, "longer samples are left out; 0: none is", minimum=0)


@dataclass(kw_only=True)
class WorkloadFile:
    """A file of conf/workload."""

    workload: WorkloadSettings = field(default_factory=WorkloadSettings)


def load_workload(name: str) -> WorkloadSettings:
    """A workload of conf/workload; a mixture stays one (`sources_of` resolves it).

    Raises:
        ConfigError: one line with the key, its value and what is allowed.
    """
    names = sorted(path.stem for path in (CONF / "workload").glob("*.yaml"))
    if name not in names:
        raise ConfigError(f"workload: got {name!r}; allowed: {', '.join(names)}")
    file = CONF / "workload" / f"{name}.yaml"
    found: WorkloadFile = load([], Command("jobs/simulate.py", WorkloadFile, file, check_limits, {}))
    return found.workload


def sources_of(settings: WorkloadSettings) -> list[tuple[float, SourceSettings]]:
    """(share of the samples, source) of each source, including those of a mixture's parts; the shares sum to 1.

    Raises:
        ConfigError: neither or both of sources and mixture are given, or a source says too little.
    """
    if bool(settings.sources) == bool(settings.mixture):
        given = "both" if settings.sources else "neither"
        raise ConfigError(f"workload.sources: got {given} of sources and mixture; allowed: exactly one of the two "
                          "(workload=NAME takes a file of conf/workload)")
    found: list[tuple[float, SourceSettings]] = []
    for part in settings.mixture:
        inner = load_workload(part.workload)
        if inner.mixture:
            raise ConfigError(f"workload.mixture: got {part.workload!r}, a mixture itself; allowed: workloads with "
                              "sources")
        found += [(part.weight * share, source) for share, source in sources_of(inner)]
    found += [(source.weight, source) for source in settings.sources]
    for _, source in found:
        _check_source(source)
    total = sum(weight for weight, _ in found)
    return [(weight / total, source) for weight, source in found]


def _check_source(source: SourceSettings) -> None:
    where = f"workload source {source.name or '(unnamed)'}"
    if not source.name:
        raise ConfigError(f"{where}: name: got nothing; allowed: a name")
    for name in ("text_tokens", "images", "image_width", "image_height", "videos", "video_seconds", "video_width",
                 "video_height"):
        numbers: Numbers = getattr(source, name)
        if numbers.minimum > numbers.maximum:
            raise ConfigError(f"{where}: {name}: got minimum {numbers.minimum:g}; allowed: at most maximum "
                              f"({numbers.maximum:g})")
        if numbers.kind == "uniform" and numbers.maximum == Numbers().maximum:
            raise ConfigError(f"{where}: {name}: kind uniform without a maximum; allowed: one with minimum and maximum")
        if name in ("images", "videos") and numbers.mean > MOST_PICTURES:
            raise ConfigError(f"{where}: {name}: got mean {numbers.mean:g}; allowed: at most {MOST_PICTURES}")
        if numbers.kind == "lognormal" and not numbers.mean > 0:
            raise ConfigError(f"{where}: {name}: got mean {numbers.mean:g}; allowed: above 0 with kind lognormal")
        if numbers.kind == "bins" and not numbers.path:
            check_bins(numbers.bins, f"{where}: {name}")
    if not source.path and source.text_tokens == Numbers():
        raise ConfigError(f"{where}: text_tokens: got nothing; allowed: a distribution, or a path with rows")
    for count, sizes in (("images", ("image_width", "image_height")),
                         ("videos", ("video_seconds", "video_width", "video_height"))):
        if getattr(source, count) != Numbers():
            for size in sizes:
                if getattr(source, size) == Numbers():
                    raise ConfigError(f"{where}: {size}: got nothing with {count}; allowed: a distribution")


def check_bins(bins: object, where: str) -> None:
    """Refuse anything but a list of [from, to, weight]."""
    fits = isinstance(bins, list) and bins and all(
        isinstance(row, list) and len(row) == 3 and all(isinstance(number, int | float) for number in row)
        and 0 <= row[0] <= row[1] and row[2] >= 0 for row in bins)
    if not fits or not sum(row[2] for row in bins) > 0:  # type: ignore[attr-defined]
        raise ConfigError(f"{where}: bins: got {bins!r}; allowed: [[from, to, weight], ...], some weight above 0")


def file_of(settings: WorkloadSettings, name: str) -> str:
    """The path of a file that a workload names.

    Raises:
        ConfigError: the name is relative, and no folder is given.
    """
    folder = settings.folder or os.environ.get(DATA_FOLDER, "")
    if os.path.isabs(name):
        return name
    if not folder:
        raise ConfigError(f"workload.folder: got nothing for {name}; allowed: the folder that has it (or set "
                          f"{DATA_FOLDER})")
    return os.path.join(folder, name)
