"""The keys of a run's configuration: for each its default, its meaning and the values that it admits.

Section and field names are those of the command line: `Train.learning_rate` is `train.learning_rate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dhp_ray.credentials import masked
from dhp_ray.errors import printable


class ConfigError(ValueError):
    """One line for the user: the key, what is wrong with its value, and what is allowed."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(masked(message)))  # one line, whatever the value was


NUMBERS = {"whole number": r"-?\d{1,17}", "share": r"\d(\.\d{1,17})?"}
"""How numbers are written that a key takes beside words."""


def key(
    default: Any, text: str, *, choices: tuple[str, ...] = (), minimum: float | None = None,
    above: float | None = None, maximum: float | None = None, below: float | None = None, number: str = "",
    path: str = "",
) -> Any:
    """A field of the schema: its default, its line in `--help`, and its allowed values. `number`: a choice or such a
    number, of NUMBERS. `path`: what it names, such as "folder or URI"; `~` in it is the user's home.
    """
    metadata = {"text": text, "choices": choices, "minimum": minimum, "above": above, "maximum": maximum,
                "below": below, "number": number, "path": path}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


MONTH_S = 30 * 86400  # longest time to wait for anything: the clocks below count nanoseconds

MAX_MIRROR_STEPS = 1000
"""The most steps between mirrored states: workers remember those of all versions between the last two."""

LARGEST = 1e30  # the largest of numbers that are computed with in 32 bits
MEASURE = "measure"  # the `planner.cost` that is no file: costs are measured before the run's first step

FORMATS = ("llava", "parquet", "webdataset", "huggingface", "synthetic")

PLANNERS = ("dhp", "dhp_paper", "static", "static_best", "pow2", "megatron")
"""The planners of dhp_ray/planner, which takes half a second to import."""


@dataclass(kw_only=True)
class Run:
    dir: str = key("runs/default", "folder or URI for the run's files; every node must reach it",
                   path="folder or URI")
    steps: int = key(0, "optimizer steps in all; 0: as many as `run.epochs` take", minimum=0)
    epochs: int = key(1, "passes over the data when run.steps is 0", minimum=1)
    resume: str = key("auto", "auto: continue the run in run.dir; never: refuse a folder that holds a run",
                      choices=("auto", "never"))


@dataclass(kw_only=True)
class Source:
    path: str = key("", "file or folder of this source", path="file or folder")
    weight: float = key(1.0, "share of this source in the mixture", above=0)
    format: str = key("", "format of this source's samples; empty: data.format", choices=("", *FORMATS))


@dataclass(kw_only=True)
class Data:
    format: str = key("synthetic", "format of the samples", choices=FORMATS)
    path: str = key("", "file or folder of the samples", path="file or folder")
    image_root: str = key("", "folder that image names are relative to; empty: the folder of data.path", path="folder")
    sources: list[Source] = key([], "several sources mixed by weight, instead of data.path: "
                                "[{path: a, weight: 1}, ...]")
    min_pixels: int = key(0, "an image or video with fewer pixels is scaled up to this many; 0: as the model's own "
                          "processor does", minimum=0, maximum=10**9)
    max_pixels: int = key(1003520, "an image with more pixels is scaled down to this many", minimum=1, maximum=10**9)
    max_file_mb: float = key(512.0, "largest image, video or row in megabytes; a larger one is refused", above=0)
    video_fps: float = key(2.0, "frames a second taken from a video", above=0)
    max_frames: int = key(768, "most frames taken from a video; those of a longer video are further apart", minimum=4)
    shuffle_window: int = key(4096, "rows from which the next one is drawn at random, fewer where they have more than "
                              "2 GB; 0: rows are shuffled within fragments only", minimum=0)
    on_error: str = key("skip", "skip: leave bad samples out and list them in skipped.jsonl; fail: end the run",
                        choices=("skip", "fail"))


@dataclass(kw_only=True)
class Batch:
    global_samples: int = key(16, "samples of one optimizer step (elsewhere: per device x accumulation x devices, "
                              "and with packing as many times the samples of a pack)", minimum=1, maximum=10**7)
    drop_last: bool = key(False, "leave out the last batch of an epoch if it is not full")


@dataclass(kw_only=True)
class Model:
    preset: str = key("", "name of a built-in model with random weights (see conf/model)")
    path: str = key("", "local Hugging Face folder with safetensors, tokenizer and image processor", path="folder")


@dataclass(kw_only=True)
class Cluster:
    num_workers: int = key(2, "workers (ranks) at start", minimum=1, maximum=100_000)
    min_workers: int = key(1, "a running job waits for capacity while it has fewer workers than this", minimum=1)
    max_workers: int = key(0, "a running job grows to at most this many workers; 0: cluster.num_workers", minimum=0,
                           maximum=100_000)
    device: str = key("auto", "where workers compute", choices=("auto", "cpu", "cuda", "npu"))
    cpus_per_worker: float = key(1.0, "CPUs that each worker reserves; it decodes images and videos in as many "
                                 "threads", minimum=0.0001, maximum=10_000)
    start_timeout_s: float = key(10.0, "seconds to wait at the start for num_workers (with an autoscaler: 600)",
                                 above=0, maximum=MONTH_S)


@dataclass(kw_only=True)
class Planner:
    name: str = key("dhp", "which planner makes the plans", choices=PLANNERS)
    sync: str = key("auto", "step: ranks meet at the end of each step; micro_batch: at every layer; auto: "
                    "the one that fits and is fastest, chosen at the run's first start",
                    choices=("step", "micro_batch", "auto"))
    encoder: str = key("auto", "where images are encoded; group: in their pack, by its ranks; world: apart from the "
                       "packs, by any rank, if memory allows; auto: whichever plan is shorter",
                       choices=("group", "world", "auto"))
    cost: str = key("", "cost file of this model, device and settings (jobs/measure.py); measure: measure before the "
                    "run's first step and keep the file in run.dir; empty: derive costs from model and device, on "
                    "the CPU take conf/cost/cpu.yaml", path="file")
    tokens_per_rank: str = key("auto", "most tokens of a pack on one rank: a number, or auto (what the device's memory "
                               "holds)", choices=("auto",), number="whole number", minimum=1)
    max_sequence_tokens: int = key(0, "longest sequence allowed, fixed for the run; 0: tokens_per_rank x "
                                   "cluster.num_workers at its first start", minimum=0)


@dataclass(kw_only=True)
class Comm:
    transport: str = key("parent", "parent: packs exchange over one group of all ranks, so none is made in training; "
                         "pool: process groups of each plan, as many as 5 % of the device's memory hold, at most 64, "
                         "and the parent group for further ones", choices=("pool", "parent"))
    timeout_s: float = key(600.0, "seconds after which a collective counts as stuck", above=0, maximum=MONTH_S)


@dataclass(kw_only=True)
class Checkpoint:
    every_steps: int = key(20, "save a checkpoint every so many steps; 0: only at the end", minimum=0)
    keep: int = key(2, "how many of the newest checkpoints to keep", minimum=1)


@dataclass(kw_only=True)
class Eval:
    path: str = key("", "file or folder of held-out samples, in data.format", path="file or folder")
    every_steps: int = key(0, "evaluate every so many steps, and after the last one; 0: never", minimum=0)
    generate: bool = key(False, "also generate answers to the held-out samples and score them")
    max_new_tokens: int = key(128, "most tokens of an answer", minimum=1, maximum=1_000_000)


@dataclass(kw_only=True)
class Elastic:
    mirror_every_steps: str = key(
        "auto",
        "copy each rank's state to another rank every so many steps, the most that a lost worker can cost: a number, "
        "or auto (as often as 2 % of the time allows); 0: never, and a lost worker returns the run to a checkpoint",
        choices=("auto",), number="whole number", minimum=0, maximum=MAX_MIRROR_STEPS,
    )
    hang_s: float = key(
        10.0, "replace a rank that computes without progress after so many seconds, or after 60 times the predicted "
        "seconds of a layer, if longer", above=0, maximum=MONTH_S)
    evict_below: float = key(0.2, "replace a worker, once in its place, if it is slower than this share of the others' "
                             "speed for 20 steps; 0: never", minimum=0, below=1)


@dataclass(kw_only=True)
class Watch:
    every_steps: int = key(20, "draw the plan and what really happened for TensorBoard and trace/ at step 1 and every "
                           "so many steps; 0: never", minimum=0)


@dataclass(kw_only=True)
class Lora:
    rank: int = key(0, "train low-rank adapters (LoRA) of this rank instead of the weights; 0: train the weights",
                    minimum=0, maximum=100_000)
    alpha: float = key(16.0, "an adapter's output is scaled by alpha / rank", above=0, maximum=LARGEST)
    targets: list[str] = key(["all-linear"], "linear layers that get an adapter, by the ends of their names (q_proj); "
                             "all-linear: all except the head, experts, their routers and the parts in train.freeze; "
                             "experts by their parameters (experts.gate_up_proj, experts.down_proj)")
    dropout: float = key(0.0, "share of an adapter's inputs to drop, chosen by sample, position and step, so the same "
                              "under any plan; only in the language model", minimum=0, below=1)


@dataclass(kw_only=True)
class Train:
    learning_rate: float = key(1e-5, "peak learning rate", above=0, maximum=LARGEST)
    vision_learning_rate: float = key(0.0, "peak learning rate of the vision encoder and its projector; 0: "
                                      "train.learning_rate",
                                      minimum=0, maximum=LARGEST)
    warmup_steps: int = key(0, "steps of linear warm-up", minimum=0)
    min_learning_rate_ratio: float = key(0.1, "share of the peak at which the cosine after the warm-up ends; 1: the "
                                         "learning rate stays at its peak", minimum=0, maximum=1)
    weight_decay: float = key(0.01, "AdamW's weight decay of matrices; biases and norms have none", minimum=0,
                              maximum=LARGEST)
    adam_beta1: float = key(0.9, "AdamW's first beta", minimum=0, below=1)
    adam_beta2: float = key(0.95, "AdamW's second beta", minimum=0, below=1)
    adam_eps: float = key(1e-8, "AdamW's epsilon", above=0, maximum=LARGEST)
    clip_norm: float = key(1.0, "largest global gradient norm; 0: no clipping", minimum=0, maximum=LARGEST)
    precision: str = key("fp32", "computing type; master weights and moments are fp32", choices=("fp32", "bf16"))
    freeze: list[str] = key([], "parts that are not trained; vision: the encoder and its projector (merger)",
                              choices=("vision", "language"))
    lora: Lora = field(default_factory=Lora)
    activation_checkpointing: str = key(
        "false", "recompute activations in the backward pass; true: in all layers; selective: all but attention, whose "
        "results are kept; packs: the same in as few layers of a pack as make it fit, if the planner finds that faster "
        "than more ranks (CUDA, NPU; not in packs that move activations to host memory); auto: packs, selective or "
        "true, whichever fits and is faster, chosen for each generation",
        choices=("true", "false", "selective", "packs", "auto"))
    activation_offload: str = key(
        "off", "keep activations in host memory until the backward pass needs them; off: never; auto: those of as few "
        "layers of a pack as make it fit, if the planner finds that faster than more ranks (CUDA, NPU); a number: this "
        "share of every pack", choices=("off", "auto"), number="share", above=0, maximum=1)
    expert_parallel: str = key(
        "auto", "ranks that share each layer's experts, with planner.sync=micro_batch: a rank gathers only its part of "
        "them, and tokens go there. In force is the largest divisor of ranks and experts up to this number; auto: 1, "
        "or the ranks of a node, whichever is faster (CUDA, NPU)", choices=("auto",), number="whole number", minimum=1)
    balance_loss: float = key(
        0.0, "coefficient of the loss that keeps experts evenly used, 1 in each layer at best, summed over layers "
        "(transformers' coefficient times experts of a token / layers); not part of the loss that is shown",
        minimum=0, maximum=LARGEST)
    router_z_loss: float = key(0.0, "coefficient of the loss that keeps the logits of experts' routers small",
                               minimum=0, maximum=LARGEST)
    deterministic: bool = key(False, "give the same bits for the same plans on the same number of ranks; slower on "
                              "CUDA and NPU")


@dataclass(kw_only=True)
class Config:
    """Everything that a run is made from. Section and key names are those of the command line."""

    run: Run = field(default_factory=Run)
    seed: int = key(0, "seed of weights and data order", minimum=0, maximum=2**32 - 1)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    model: Model = field(default_factory=Model)
    cluster: Cluster = field(default_factory=Cluster)
    planner: Planner = field(default_factory=Planner)
    comm: Comm = field(default_factory=Comm)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    eval: Eval = field(default_factory=Eval)
    elastic: Elastic = field(default_factory=Elastic)
    watch: Watch = field(default_factory=Watch)
    train: Train = field(default_factory=Train)


@dataclass(kw_only=True)
class Synthetic:
    num_samples: int = key(512, "samples that jobs/prepare_data.py writes", minimum=1, maximum=10**7)
    short_median_tokens: float = key(110.0, "median length of the short samples", above=0)
    short_sigma: float = key(0.5, "spread (sigma of the logarithm) of the short samples", minimum=0)
    long_fraction: float = key(0.06, "share of long samples", minimum=0, maximum=1)
    long_median_tokens: float = key(900.0, "median length of the long samples", above=0)
    long_sigma: float = key(0.5, "spread (sigma of the logarithm) of the long samples", minimum=0)
    max_tokens: int = key(1800, "longest sample", minimum=64, maximum=10**7)
    rows_per_group: int = key(32, "rows of a parquet row group, which the stream reads at a time", minimum=1,
                              maximum=10**7)


@dataclass(kw_only=True)
class PreparedData(Data):
    synthetic: Synthetic = field(default_factory=Synthetic)


@dataclass(kw_only=True)
class Preparation(Config):
    """The configuration of jobs/prepare_data.py."""

    data: PreparedData = field(default_factory=PreparedData)


@dataclass(kw_only=True)
class HeldOutEval(Eval):
    ranks_per_model: int = key(1, "workers that share a model, each with a part of every layer; 1: each worker holds "
                               "the whole model", minimum=1, maximum=100_000)
    output: str = key("predictions.jsonl", "file with a line for each sample: prompt, references, prediction, scores, "
                      "loss", path="output file")


@dataclass(kw_only=True)
class Evaluation(Config):
    """The configuration of jobs/evaluate.py."""

    eval: HeldOutEval = field(default_factory=HeldOutEval)
