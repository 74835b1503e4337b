"""The models and batches of the parts, and a step of ours over them on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import Qwen2_5_VLConfig
from transformers.utils import logging

from benchmarks.device_parts.settings import SettingsError
from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.transport import Transport
from dhp_ray.model.families.qwen2_5_vl import Qwen25VL
from dhp_ray.model.fused import Operators
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.presets import preset_config
from dhp_ray.planner.plan.types import Grid, Pack, Plan, RankPlan, Sample
from dhp_ray.train.collate import Payload
from dhp_ray.train.engine import Engine
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.layer_marks import LayerMarks, layers_by_name
from dhp_ray.train.rank_step import MicroBatchStep, RankStep
from dhp_ray.train.results import StepResult
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.state.optimizer import OptimizerSettings
from dhp_ray.train.step_inputs import StepInputs, collated
from tests.engine_values import resident_bytes
from tests.packs import TOKEN_IDS, make_pack, make_sample, own_payloads

SHARE_OF_DEVICE = 0.8
"""Of a device's memory that a model's state may take; the rest is for 32k tokens of activations."""
LARGE = {"7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                "num_key_value_heads": 4, "vocab_size": 152064},
         "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
         "2b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}}
"""Language models of Qwen2.5-VL-7B, -3B and of Qwen2-VL-2B, largest first; the encoder is Qwen2.5-VL's in all."""
BATCHES = {
    "cuda": {"8k": [4096, 2048, 1024, 1024], "32k": [16384, 8192, 4096, 2048, 1024, 1024]},
    "cpu": {"256": [128, 64, 32, 32], "1k": [512, 256, 128, 64, 32, 32]},
}
"""Lengths of the sequences of every batch, by its tokens."""
IMAGES: dict[str, tuple[Grid, int]] = {"cuda": ((1, 32, 32), 1024), "cpu": ((1, 4, 8), 32)}
"""Patches of an image, and tokens of a sequence that there is one for: a quarter of them are the image's."""
Batch = list[tuple[Sample, Payload]]


def config_of(preset: str) -> Qwen2_5_VLConfig:
    """Special tokens have the numbers of the preset tiny's tokenizer, also in the large vocabulary."""
    if preset == "tiny":
        return preset_config("tiny", TOKEN_IDS)  # type: ignore[return-value]
    width = LARGE[preset]["hidden_size"]
    return Qwen2_5_VLConfig(
        text_config={"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 131072,
                     "rms_norm_eps": 1e-6, "bos_token_id": TOKEN_IDS["bos"], "eos_token_id": TOKEN_IDS["eos"],
                     "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
                     **LARGE[preset]},
        vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                       "out_hidden_size": width, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
                       "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        image_token_id=TOKEN_IDS["image"], video_token_id=TOKEN_IDS["video"],
        vision_start_token_id=TOKEN_IDS["vision_start"], vision_end_token_id=TOKEN_IDS["vision_end"],
        tie_word_embeddings=preset != "7b")


def num_parameters(preset: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Qwen25VL.model_class(config_of(preset)).parameters())


def choose_preset(preset: str, device: torch.device, num_ranks: int = 1) -> str:
    """`auto`: the largest whose state fits with `sync=step`. Raises SettingsError where `preset` does not."""
    if device.type == "cpu" and preset not in ("auto", "tiny"):
        raise SettingsError(f"preset: got {preset!r} for the CPU; allowed: auto, tiny")
    if device.type == "cpu" or preset == "tiny":
        return "tiny"
    memory = ACCELERATORS[device.type].memory_bytes()
    needed = {name: resident_bytes(num_parameters(name), num_ranks, "bf16") for name in LARGE
              if preset in ("auto", name)}
    for name, needed_bytes in needed.items():
        if needed_bytes <= SHARE_OF_DEVICE * memory:
            return name
    name = min(needed, key=needed.__getitem__)
    raise SettingsError(f"preset: {name} holds {needed[name] / 1e9:.0f} GB of state; allowed on this device: "
                        f"{SHARE_OF_DEVICE * memory / 1e9:.0f} GB; preset=tiny runs anywhere")


@contextmanager
def building_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Modules that are built here get fresh weights, the same every time, of this type on this device."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def batch_of(lengths: Sequence[int], device: torch.device, with_images: bool) -> Batch:
    """Sequences of random text, and of random pixels in between: of exactly these lengths."""
    (time, height, width), every = IMAGES[device.type]
    made = []
    for number, length in enumerate(lengths):
        images = length // every if with_images else 0
        left = length - images * (time * height * width // 4 + 2)  # a token before and one after
        parts: list[int | Grid] = []
        for image in range(images):
            parts += [left // images + (image < left % images), (time, height, width)]
        made.append(make_sample(f"{number}", parts or [length]))
    return made


class OwnStep:
    """The step of a run, by default of one with a single rank; `world`: the group of all ranks."""

    def __init__(self, config: Qwen2_5_VLConfig, device: torch.device, precision: str, recomputes: bool,
                 fused: Operators | None = None, world: dist.ProcessGroup | None = None, sync: str = "step") -> None:
        accelerator = ACCELERATORS[device.type]
        accelerator.activate()
        accelerator.compute_in(precision)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        with building_on(device, dtype):
            self.adapter: LanguageModel = Qwen25VL(Qwen25VL.model_class(config))
        if fused is not None:
            self.adapter.fuse(fused)
        if recomputes:
            self.adapter.set_activation_checkpointing()
        progress = Progress(accelerator.torch_device())
        settings = OptimizerSettings(lambda name: 1e-5, self.adapter.decays, weight_decay=0.1, betas=(0.9, 0.95),
                                     eps=1e-6, clip_norm=1.0)
        self.rank, num_ranks = (world.rank(), world.size()) if world else (0, 1)
        transport = Transport("parent", self.rank, num_ranks, accelerator, 1, timedelta(seconds=60), progress)
        self.engine: Engine
        if sync == "micro_batch":
            assert world is not None
            self.adapter.module.float()  # whose gradients are of the parameters' type
            self.engine = ShardedEngine(self.adapter, settings, world, self.rank, accelerator.torch_device(), precision,
                                        progress)
            self.step: RankStep = MicroBatchStep(self.adapter, self.engine, transport, world, self.engine.device)
        else:
            self.engine = FlatEngine(self.adapter.module, settings, world, num_ranks, self.rank, precision,
                                     progress=progress)
            self.step = RankStep(self.adapter, self.engine, transport, world, accelerator.torch_device())
        whole = {"model": self.engine.root} if isinstance(self.engine, ShardedEngine) else {}
        self.marks = LayerMarks(layers_by_name(self.adapter) | whole, progress, gathered=bool(whole))
        self.precision, self._number = precision, 0

    def run(self, batch: Batch) -> float:
        """One step over the batch as one pack; the mean loss."""
        return self.run_inputs(self.inputs_of(batch))

    def run_plan(self, plan: Plan, batch: Batch, learning_rate_factor: float = 1.0) -> StepResult:
        """One step over the batch as planned; every rank calls this."""
        of_rank = plan.rank_plan(self._number, self.rank)
        self._number += 1
        payloads = {sample.id: payload for sample, payload in batch}
        own = {name: payload for pack in of_rank.packs
               for name, payload in own_payloads(pack, payloads, self.rank).items()}
        pinned = self.step.device.type != "cpu"
        inputs = collated(of_rank, own, self.adapter, self.precision, pinned=pinned)
        return self.step.run(inputs, learning_rate_factor)

    def inputs_of(self, batch: Batch) -> StepInputs:
        """The inputs of such a step; a run makes them beside the step before."""
        pack: Pack = make_pack(0, [0], [sample for sample, _ in batch])
        payloads = {sample.id: replace(payload) for sample, payload in batch}
        plan = RankPlan(self._number, 0, (), (pack,))
        self._number += 1
        return collated(plan, payloads, self.adapter, self.precision, pinned=self.step.device.type != "cpu")

    def run_inputs(self, inputs: StepInputs) -> float:
        result = self.step.run(inputs, 1.0)
        return result.loss_sum / result.num_valid_tokens

    def release(self) -> None:
        self.marks.remove()
        self.step.transport.close()
        self.engine.release()
