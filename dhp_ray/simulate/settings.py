"""The keys of a simulation, each with its default, its meaning and the values that it admits.

Section and field names are those of files and of the command line: `Faults.every_s` is `faults.every_s`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from dhp_ray.config import CONF, Command, check_limits, check_train, load
from dhp_ray.schema import MONTH_S, PLANNERS, ConfigError, key

YEARS_S = 100 * MONTH_S  # the longest simulated time that a key admits
KINDS = ("worker", "stopped", "node", "driver", "all")  # what a fault takes: each a section of `FaultSettings`
MOST_PICTURES = 100_000  # the most images, or videos, that the samples of a source may have in the mean: each is drawn
DATA_FOLDER = "DHP_RAY_TEST_DATA"  # the variable that names the folder of relative names if `workload.folder` is empty


@dataclass(kw_only=True)
class Numbers:
    """A distribution of numbers, clipped to `minimum` and `maximum`."""

    kind: str = key("constant", "constant: `mean`; normal and lognormal: by `mean` and `deviation` of the numbers; "
                    "bins: of `bins`", choices=("constant", "normal", "lognormal", "bins"))
    mean: float = key(0.0, "their mean", minimum=0, maximum=1e12)
    deviation: float = key(0.0, "their standard deviation", minimum=0, maximum=1e12)
    minimum: float = key(0.0, "the least one", minimum=0, maximum=1e12)
    maximum: float = key(1e12, "the largest one", minimum=0, maximum=1e12)
    bins: list[list[float]] = key([], "[[from, to, weight], ...]; numbers of a bin are equally likely")


@dataclass(kw_only=True)
class SourceSettings:
    """Samples of one kind. With `path` they are texts of as many tokens as the rows of a CSV file say (num_tokens)."""

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


@dataclass(kw_only=True)
class ClusterSettings:
    num_ranks: int = key(64, "ranks, a device each", minimum=1, maximum=100_000)
    ranks_per_node: int = key(8, "ranks of a node", minimum=1, maximum=100_000)
    kind: str = key("cuda", "what the devices are to torch", choices=("cpu", "cuda", "npu"))
    device: str = key("h100", "description of the device: a file of conf/device")
    memory_gib: float = key(80.0, "memory of a device", above=0, maximum=1e6)
    node_memory_gib: float = key(2048.0, "memory of a node, to which activations may go", above=0, maximum=1e6)
    cost: str = key("", "cost file; empty: derived from the model and the device, with fused operators", path="file")


@dataclass(kw_only=True)
class TrainSettings:
    precision: str = key("bf16", "computing type", choices=("fp32", "bf16"))
    activation_checkpointing: str = key("auto", "recompute activations in the backward pass; true: in all layers; "
                                        "selective: all but attention; packs: the same in packs that fit only with "
                                        "it or are faster with it; auto: packs, selective or true, whichever fits and "
                                        "is faster",
                                        choices=("true", "false", "selective", "packs", "auto"))
    activation_offload: str = key("off", "move activations to host memory; off: never; auto: those of packs that "
                                  "fit only with it or are faster with it; a number: this share of every pack",
                                  choices=("off", "auto"), number="share", above=0, maximum=1)
    expert_parallel: str = key("auto", "most ranks that share each layer's experts, with sync=micro_batch; auto: 1, or "
                               "those of a node, whichever is faster", choices=("auto",), number="whole number",
                               minimum=1)
    freeze: list[str] = key([], "parts that are not trained", choices=("vision", "language"))
    tokens_per_rank: str = key("auto", "most tokens of one pack on one rank: a number, or auto (from the device's "
                               "memory)", choices=("auto",), number="whole number", minimum=1)


@dataclass(kw_only=True)
class PlanningSettings:
    encoder: str = key("auto", "where images are encoded, as in planner.encoder", choices=("group", "world", "auto"))
    item_s: float = key(1e-5, "seconds that planning takes for each sequence and each image of a batch",
                        minimum=0, maximum=1)
    between_s: float = key(0.0, "seconds from the end of a step to the start of the next, if nothing is late",
                           minimum=0, maximum=3600)


@dataclass(kw_only=True)
class FaultKind:
    """A kind of fault: how often it occurs among the others, and how long recovery takes."""

    share: float = key(0.0, "how often this kind is drawn, relative to the others", minimum=0)
    seen_s: float = key(0.0, "seconds until it is noticed", minimum=0, maximum=MONTH_S)
    form_s: float = key(0.0, "seconds from then until the remaining ranks form a group and hold the state",
                        minimum=0, maximum=MONTH_S)
    return_s: float = key(0.0, "seconds from then until the replacement of what was lost can join", minimum=0,
                          maximum=YEARS_S)


@dataclass(kw_only=True)
class Event:
    time_s: float = key(0.0, "seconds after the first step began", minimum=0, maximum=YEARS_S)
    kind: str = key("worker", "what is lost", choices=KINDS)
    rank: int = key(0, "a rank's number at the start of the run, or that of any rank of the node; nothing happens "
                       "if that rank, or the whole node, is gone by then", minimum=0, maximum=100_000)


@dataclass(kw_only=True)
class Slow:
    ranks: str = key("", "their numbers, comma-separated; empty: drawn at random")
    share: float = key(0.0, "share of the ranks to draw, if no numbers are given", minimum=0, maximum=1)
    speed: float = key(1.0, "their speed; 1: nominal", above=0, maximum=100)


@dataclass(kw_only=True)
class FaultSettings:
    every_s: float = key(0.0, "mean seconds from one drawn fault to the next; 0: only `events` happen", minimum=0,
                         maximum=YEARS_S)
    worker: FaultKind = field(default_factory=FaultKind)
    stopped: FaultKind = field(default_factory=FaultKind)
    node: FaultKind = field(default_factory=FaultKind)
    driver: FaultKind = field(default_factory=FaultKind)
    all: FaultKind = field(default_factory=FaultKind)
    events: list[Event] = key([], "faults at given times: [{time_s: 60, kind: node, rank: 3}, ...]")
    policy: str = key("elastic", "what happens after a fault; elastic: the remaining ranks go on from memory; "
                      "restart: all ranks start again from the last checkpoint, once all are there, and "
                      "slow ranks stay",
                      choices=("elastic", "restart"))
    min_workers: int = key(1, "the run waits while it has fewer ranks than this, or fewer than the "
                           "next batches need", minimum=1)
    join_s: float = key(0.0, "seconds of a change in which nothing is lost: ranks join, or leave because they "
                        "are slow", minimum=0, maximum=MONTH_S)
    load_s: float = key(0.0, "seconds to load a checkpoint, after forming the group", minimum=0,
                          maximum=MONTH_S)
    mirror_every_steps: str = key("auto", "copy each rank's state to another rank every so many steps: a number, or "
                                  "auto; 0: never", choices=("auto",), number="whole number", minimum=0)
    copy_s: float = key(0.0, "seconds of a copy of the state; 0: its bytes over the speed of a link between nodes",
                        minimum=0, maximum=MONTH_S)
    checkpoint_every_s: float = key(0.0, "seconds between checkpoints, each after the next step; 0: never", minimum=0,
                                    maximum=YEARS_S)
    stage_s: float = key(0.0, "seconds for which a checkpoint holds up the steps", minimum=0, maximum=MONTH_S)
    write_s: float = key(0.0, "seconds until a checkpoint is written, while steps run", minimum=0, maximum=MONTH_S)
    slow: list[Slow] = key([], "ranks that are slow: [{share: 0.1, speed: 0.5}, ...]")


@dataclass(kw_only=True)
class Simulation:
    model: str = key("qwen2_5_vl_7b", "shape of the model: a file of conf/model_shape")
    planners: list[str] = key(["dhp", "static", "static_best", "pow2", "dhp_paper"], "planners to compare",
                              choices=PLANNERS)
    sync: str = key("auto", "step: ranks meet at the end of each step; micro_batch: at every layer; auto: the "
                    "one that fits and is fastest", choices=("step", "micro_batch", "auto"))
    num_batches: int = key(20, "number of global batches", minimum=1, maximum=10**7)
    duration_s: float = key(0.0, "seconds to simulate, with as many batches as fit; 0: num_batches", minimum=0,
                            maximum=YEARS_S)
    global_samples: int = key(512, "samples of a batch", minimum=1, maximum=10**7)
    seed: int = key(0, "seed of samples, faults and speeds", minimum=0, maximum=2**32 - 1)
    out: str = key("", "folder for results.json, a picture and a trace; empty: only the table is printed",
                   path="folder")
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    planning: PlanningSettings = field(default_factory=PlanningSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)


def load_simulation(argv: list[str]) -> Simulation:
    """The simulation that `argv` asks for. ConfigError: one line: the key, its value, what is allowed."""
    return load(argv, SIMULATE)


def check_simulation(settings: Simulation) -> None:
    """Refuse values that the types admit but a simulation cannot use."""
    check_limits(settings)
    _named("model", settings.model, "model_shape")
    _named("cluster.device", settings.cluster.device, "device")
    if not settings.planners:
        raise ConfigError(f"planners: got []; allowed: some of {', '.join(PLANNERS)}")
    check_train(settings.train, settings.sync, "sync")
    if settings.train.precision == "fp32" and settings.cluster.kind == "cuda":  # a run refuses this too
        raise ConfigError("train.precision: got 'fp32' with cluster.kind=cuda; allowed: bf16 (attention there has no "
                          "fp32 kernel)")
    _check_faults(settings)


def _check_faults(settings: Simulation) -> None:
    faults, num_ranks = settings.faults, settings.cluster.num_ranks
    if faults.every_s and not any(getattr(faults, kind).share for kind in KINDS):
        raise ConfigError("faults.every_s: got a time while no kind has a share; allowed: 0, or faults.worker.share "
                          "and the like above 0")
    if faults.min_workers > num_ranks:
        raise ConfigError(f"faults.min_workers: got {faults.min_workers}; allowed: at most cluster.num_ranks "
                          f"({num_ranks})")
    for index, event in enumerate(faults.events):
        if event.rank >= num_ranks:
            raise ConfigError(f"faults.events[{index}].rank: got {event.rank}; allowed: less than cluster.num_ranks "
                              f"({num_ranks})")
    for index, slow in enumerate(faults.slow):
        if not slow.ranks.strip() and not round(slow.share * num_ranks):
            raise ConfigError(f"faults.slow[{index}].share: got {slow.share:g}, which is none of {num_ranks} ranks; "
                              "allowed: a share that is at least one rank, or numbers in ranks")
        for word in filter(None, slow.ranks.split(",")):
            if not (word.isascii() and word.strip().isdigit() and int(word) < num_ranks):
                raise ConfigError(f"faults.slow[{index}].ranks: got {word!r}; allowed: numbers below "
                                  f"cluster.num_ranks ({num_ranks}), comma-separated")


def load_workload(name: str) -> WorkloadSettings:
    """A workload of conf/workload; a mixture stays one. ConfigError: one line, as above."""
    _named("workload", name, "workload")
    file = CONF / "workload" / f"{name}.yaml"
    found: WorkloadFile = load([], Command("jobs/simulate.py", WorkloadFile, file, check_limits, {}))
    return found.workload


def sources_of(settings: WorkloadSettings) -> list[tuple[float, SourceSettings]]:
    """(share of the samples, source) of each source, of a mixture's parts too. ConfigError: one cannot be used."""
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
    for name, numbers in vars(source).items():
        if not isinstance(numbers, Numbers):
            continue
        if numbers.minimum > numbers.maximum:
            raise ConfigError(f"{where}: {name}: got minimum {numbers.minimum:g}; allowed: at most maximum "
                              f"({numbers.maximum:g})")
        if name in ("images", "videos") and numbers.mean > MOST_PICTURES:
            raise ConfigError(f"{where}: {name}: got mean {numbers.mean:g}; allowed: at most {MOST_PICTURES}")
        if numbers.kind == "lognormal" and not numbers.mean > 0:
            raise ConfigError(f"{where}: {name}: got mean {numbers.mean:g}; allowed: above 0 with kind lognormal")
        if numbers.kind == "bins":
            _check_bins(numbers.bins, f"{where}: {name}")
    if not source.path and source.text_tokens == Numbers():
        raise ConfigError(f"{where}: text_tokens: got nothing; allowed: a distribution, or a path with rows")
    for count, sizes in (("images", ("image_width", "image_height")),
                         ("videos", ("video_seconds", "video_width", "video_height"))):
        if getattr(source, count) != Numbers():
            for size in sizes:
                if getattr(source, size) == Numbers():
                    raise ConfigError(f"{where}: {size}: got nothing with {count}; allowed: a distribution")


def _check_bins(bins: object, where: str) -> None:
    """Refuse anything but a list of [from, to, weight]."""
    fits = isinstance(bins, list) and bins and all(
        isinstance(row, list) and len(row) == 3 and all(isinstance(number, int | float) for number in row)
        and 0 <= row[0] <= row[1] and row[2] >= 0 for row in bins)
    if not fits or not sum(row[2] for row in bins) > 0:  # type: ignore[attr-defined]
        raise ConfigError(f"{where}: bins: got {bins!r}; allowed: [[from, to, weight], ...], some weight above 0")


def file_of(settings: WorkloadSettings, name: str) -> str:
    """The path of a file that a workload names. ConfigError: the name is relative, and no folder is given."""
    folder = settings.folder or os.environ.get(DATA_FOLDER, "")
    if os.path.isabs(name):
        return name
    if not folder:
        raise ConfigError(f"workload.folder: got nothing for {name}; allowed: the folder that has it (or set "
                          f"{DATA_FOLDER})")
    return os.path.join(folder, name)


def _named(dotted: str, name: str, folder: str) -> None:
    """Refuse a name for which a folder of conf/ has no file."""
    names = sorted(path.stem for path in (CONF / folder).glob("*.yaml"))
    if name not in names:
        raise ConfigError(f"{dotted}: got {name!r}; allowed: {', '.join(names)}")


SIMULATE = Command("jobs/simulate.py", Simulation, CONF / "simulate.yaml", check_simulation,
                   {"cluster": "cluster/simulated", "workload": "workload", "faults": "faults"})
