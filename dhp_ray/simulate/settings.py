"""The keys of a simulation, each with its default, its meaning and the values that it admits.

Section and field names are those of files and of the command line: `Faults.every_s` is `faults.every_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dhp_ray.config import CONF, Command, check_limits, load
from dhp_ray.schema import MONTH_S, PLANNERS, ConfigError, key
from dhp_ray.simulate.workload_settings import WorkloadSettings

YEARS_S = 100 * MONTH_S
"""The longest simulated time that a key admits."""


@dataclass(kw_only=True)
class ClusterSettings:
    num_ranks: int = key(64, "ranks, a device each", minimum=1, maximum=100_000)
    ranks_per_node: int = key(8, "ranks of a node", minimum=1, maximum=100_000)
    kind: str = key("cuda", "what the devices are to torch", choices=("cpu", "cuda", "npu"))
    device: str = key("h100", "description of the device: a file of conf/device")
    memory_gib: float = key(80.0, "memory of a device", above=0, maximum=1e6)
    node_memory_gib: float = key(1024.0, "memory of a node, to which activations may go", above=0, maximum=1e6)
    links_per_node: int = key(0, "links of a node to the others, each as fast as the device's inter_bytes_per_s; 0: "
                              "one for each of its ranks", minimum=0, maximum=100_000)
    oversubscription: float = key(1.0, "bandwidth of all nodes together over that of the network between them",
                                  minimum=1, maximum=1000)
    cost: str = key("", "cost file; empty: derived from the model and the device, with fused operators", path="file")


@dataclass(kw_only=True)
class TrainSettings:
    precision: str = key("bf16", "computing type", choices=("fp32", "bf16"))
    activation_checkpointing: str = key("auto", "recompute activations in the backward pass; true: in all layers; "
                                        "packs: in packs that fit only with it or are faster with it; auto: packs "
                                        "or true, whichever fits and is faster",
                                        choices=("true", "false", "packs", "auto"))
    activation_offload: str = key("off", "move activations to host memory; off: never; auto: those of packs that "
                                  "fit only with it or are faster with it; a number: this share of every pack",
                                  choices=("off", "auto"), number="share", above=0, maximum=1)
    freeze: list[str] = key([], "parts that are not trained", choices=("vision", "language"))
    tokens_per_rank: str = key("auto", "most tokens of one pack on one rank: a number, or auto (from the device's "
                               "memory)", choices=("auto",), number="whole number", minimum=1)


@dataclass(kw_only=True)
class PlanningSettings:
    encoder: str = key("auto", "where images are encoded, as in planner.encoder", choices=("group", "world", "auto"))
    item_s: float = key(1e-5, "seconds that planning takes for each sequence and each image of a batch, as "
                        "benchmarks/planner.py time measures them", minimum=0, maximum=1)
    last_resort_item_s: float = key(5e-6, "the same for the planner that runs if a plan is late", minimum=0,
                                    maximum=1)
    between_s: float = key(0.0, "seconds from the end of a step to the start of the next, if nothing is late",
                           minimum=0, maximum=3600)
    measured: bool = key(False, "use the seconds that planning takes on this machine instead; two runs then differ")


@dataclass(kw_only=True)
class DataSettings:
    samples_per_s: float = key(0.0, "samples read and tokenized a second; 0: as fast as needed",
                               minimum=0)
    patches_per_s: float = key(0.0, "patches of its own images that a rank decodes a second; 0: as fast as needed",
                               minimum=0)


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
    """A fault at a given time."""

    time_s: float = key(0.0, "seconds after the first step began", minimum=0, maximum=YEARS_S)
    kind: str = key("worker", "what is lost", choices=("worker", "stopped", "node", "driver", "all"))
    rank: int = key(0, "a rank's number at the start of the run, or that of any rank of the node; nothing happens "
                       "if that rank, or the whole node, is gone by then", minimum=0, maximum=100_000)


@dataclass(kw_only=True)
class Slow:
    """Ranks that are slow for a while."""

    ranks: str = key("", "their numbers, comma-separated; empty: drawn at random")
    share: float = key(0.0, "share of the ranks to draw, if no numbers are given", minimum=0, maximum=1)
    speed: float = key(1.0, "their speed; 1: nominal", above=0, maximum=100)
    first_step: int = key(1, "first step in which they are slow", minimum=1)
    last_step: int = key(0, "last step in which they are slow; 0: to the end", minimum=0)


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
    spread: float = key(0.0, "spread of the ranks' speeds (sigma of their logarithm), drawn once", minimum=0, maximum=2)
    noise: float = key(0.0, "spread of the time of each pack's computing (sigma of its logarithm)", minimum=0,
                       maximum=2)


@dataclass(kw_only=True)
class Simulation:
    """All settings of a simulation."""

    model: str = key("qwen2_5_vl_7b", "shape of the model: a file of conf/model_shape")
    planners: list[str] = key(["dhp", "static", "static_best", "pow2", "dhp_paper"], "planners to compare")
    sync: str = key("auto", "step: ranks meet at the end of each step; micro_batch: at every layer; auto: the "
                    "one that fits and is fastest", choices=("step", "micro_batch", "auto"))
    num_batches: int = key(20, "number of global batches", minimum=1, maximum=10**7)
    duration_s: float = key(0.0, "seconds to simulate, with as many batches as fit; 0: num_batches", minimum=0,
                            maximum=YEARS_S)
    global_samples: int = key(512, "samples of a batch", minimum=1, maximum=10**7)
    seed: int = key(0, "seed of samples, faults and speeds", minimum=0, maximum=2**32 - 1)
    out: str = key("", "folder for results.json, a picture, a trace and a page; empty: only the table is printed",
                   path="folder")
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    planning: PlanningSettings = field(default_factory=PlanningSettings)
    data: DataSettings = field(default_factory=DataSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)


def load_simulation(argv: list[str]) -> Simulation:
    """The simulation that `argv` (`--config FILE` and `key=value`) asks for.

    Raises:
        ConfigError: one line with the key, its value and what is allowed.
    """
    settings: Simulation = load(argv, SIMULATE)
    return settings


def check_simulation(settings: Simulation) -> None:
    """Refuse values that the types admit but a simulation cannot use."""
    check_limits(settings)
    _named("model", settings.model, "model_shape")
    _named("cluster.device", settings.cluster.device, "device")
    if not settings.planners:
        raise ConfigError(f"planners: got []; allowed: some of {', '.join(PLANNERS)}")
    for name in settings.planners:
        if name not in PLANNERS:
            raise ConfigError(f"planners: got {name!r}; allowed: {', '.join(PLANNERS)}")
    _check_device(settings)
    if len(set(settings.train.freeze)) == 2:
        raise ConfigError("train.freeze: got vision and language; allowed: at most one of the two")
    _check_faults(settings)


def _check_device(settings: Simulation) -> None:
    """Refuse what a run refuses too (`dhp_ray/config.py`)."""
    if settings.train.precision == "fp32" and settings.cluster.kind == "cuda":
        raise ConfigError("train.precision: got 'fp32' with cluster.kind=cuda; allowed: bf16 (attention there has no "
                          "fp32 kernel)")


def _check_faults(settings: Simulation) -> None:
    faults, num_ranks = settings.faults, settings.cluster.num_ranks
    shares = [faults.worker.share, faults.stopped.share, faults.node.share, faults.driver.share, faults.all.share]
    if faults.every_s and not sum(shares):
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


def _named(dotted: str, name: str, folder: str) -> None:
    """Refuse a name for which a folder of conf/ has no file."""
    names = sorted(path.stem for path in (CONF / folder).glob("*.yaml"))
    if name not in names:
        raise ConfigError(f"{dotted}: got {name!r}; allowed: {', '.join(names)}")


SIMULATE = Command("jobs/simulate.py", Simulation, CONF / "simulate.yaml", check_simulation,
                   {"cluster": "cluster/simulated", "workload": "workload", "faults": "faults"})
