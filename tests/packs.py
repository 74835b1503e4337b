"""Small samples with images, packs of them, and what plain transformers computes for them: the reference of the model's
tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    Glm4vForConditionalGeneration,
    InternVLForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
)

from dhp_ray.data.families import preset_token_ids
from dhp_ray.model import export
from dhp_ray.model.families import FAMILIES
from dhp_ray.model.families.qwen2_5_vl import Qwen25VL
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.presets import preset_config
from dhp_ray.model.weights import Interval
from dhp_ray.planner.plan.types import Grid, Pack, Plan, Sample, SplitImage, VisionPlan, encoded_images
from dhp_ray.train.collate import Payload
from tests.model.paper_positions import paper_positions

PATCH_DIMS = {"tiny": 3 * 2 * 14 * 14, "tiny_qwen3_vl": 3 * 2 * 16 * 16, "tiny_internvl": 3 * 14 * 14,
              "tiny_glm4v": 3 * 2 * 14 * 14}
"""A preset of each family with an encoder of its own, and the values of its patches."""
TEXT_PRESETS = ("tiny_qwen3", "tiny_llama", "tiny_qwen3_moe")
"""A preset of each family of text alone."""
EXPERT_PRESETS = ("tiny_qwen3_moe", "tiny_qwen3_vl_moe", "tiny_qwen3_5_moe")
"""A preset of each family with experts."""
PRESETS = (*PATCH_DIMS, *TEXT_PRESETS, "tiny_qwen3_vl_moe", "tiny_qwen3_5", "tiny_qwen3_5_moe")
NUM_LAYERS = {preset: 3 for preset in PRESETS} | {"tiny_internvl": 2}
"""Of the language model; all presets but the first have more, which show nothing new."""
ROUNDING = 1e-6
"""Of fp32 sums, as a share of the largest gradient."""
TOKEN_IDS = {"bos": 256, "pad": 256, "eos": 258, "vision_start": 259, "vision_end": 260, "image": 261, "video": 262}
"""Of the presets with an encoder; where videos have the token of images, no text has the one of videos."""


@dataclass(frozen=True)
class Film:
    """A video as it is planned: pieces in time, each a grid; a step in time lasts `seconds`."""

    seconds: float
    pieces: tuple[Grid, ...]


def make_sample(
    name: str, parts: Sequence[int | Grid | Film], first_label: int | None = None, preset: str = "tiny"
) -> tuple[Sample, Payload]:
    """A sample of text runs (their length), images (their grid) and videos, as the model of `preset` takes them; labels
    count from `first_label`, by default every third token is masked. A model of text alone gets the text alone.
    """
    random = np.random.default_rng(sum(map(ord, name)))
    ids: list[int] = []
    grids: list[Grid] = []
    pixels: list[np.ndarray | None] = []
    media: list[int] = []
    seconds: list[float] = []
    for place, part in enumerate(parts):
        if isinstance(part, int):
            ids += random.integers(0, 256, part).tolist()
            continue
        if preset in TEXT_PRESETS:
            continue
        if preset == "tiny_glm4v" and not isinstance(part, Film) and part[0] > 1:
            part = Film(1.0, (part,))  # its images have one step in time
        pieces, lasts, token = (part.pieces, part.seconds,
                                "video") if isinstance(part, Film) else ((part,), 0.0, "image")
        runs: list[list[int]] = []
        if preset == "tiny_internvl":  # whose tiles are of one size
            pieces = tuple((time, 4, 4) for time, _, _ in pieces)
        if preset in ("tiny_internvl", "tiny_glm4v"):  # whose videos have the token of images
            token = "image"
        for time, height, width in pieces:
            patch_dim = PATCH_DIMS[preset if preset in PATCH_DIMS else "tiny_qwen3_vl"]
            pixels.append(random.standard_normal((time * height * width, patch_dim), dtype=np.float32))
            runs += [[TOKEN_IDS[token]] * (height * width // 4)] * time
        if preset != "tiny" and lasts:
            for run in runs:  # each step in time behind its time stamp, or its number
                ids += [*random.integers(0, 256, 5).tolist(), TOKEN_IDS["vision_start"], *run, TOKEN_IDS["vision_end"]]
        else:
            ids += [TOKEN_IDS["vision_start"], *chain(*runs), TOKEN_IDS["vision_end"]]
        grids += pieces
        media += [place] * len(pieces)
        seconds += [lasts] * len(pieces)
    input_ids = np.array(ids, np.int32)
    labels = np.where(input_ids < 256, input_ids, -100).astype(np.int32)
    if first_label is None:
        labels[::3] = -100
    else:
        labels[:first_label] = -100
    vision_tokens = int(np.isin(input_ids, [TOKEN_IDS["image"], TOKEN_IDS["video"]]).sum())
    return (Sample(name, len(ids) - vision_tokens, vision_tokens, tuple(grids)),
            Payload(input_ids=input_ids, labels=labels, grids=np.array(grids, np.int64).reshape(-1, 3), pixels=pixels,
                    media=np.array(media, np.int64), seconds=np.array(seconds)))


def make_pack(
    index: int, ranks: Sequence[int], samples: Sequence[Sample], encoders: Sequence[int] | None = None
) -> Pack:
    """A pack on `ranks`; its images are encoded by the members at these places, by default in
    turn."""
    images = sum(len(sample.vision_grids) for sample in samples)
    members = [image % len(ranks) for image in range(images)] if encoders is None else encoders
    return Pack(tuple(ranks), (), 1.0, encoders=tuple(ranks[member] for member in members), index=index,
                samples=tuple(samples))


def with_images_apart(plan: Plan, keeps: bool = True, pass_patches: int = 0, num_passes: int = 2) -> Plan:
    """The same groups, with their images encoded apart from them, by all ranks in turn, the last one first; with
    sync=micro_batch in `num_passes` passes, in turn."""
    lockstep = plan.sync == "micro_batch" and any(group.encoders for group in plan.groups)
    ranks, passes = cycle(reversed(range(plan.cluster.num_ranks))), cycle(range(num_passes))
    groups = tuple(replace(group, encoders=tuple(next(ranks) for _ in group.encoders),
                           passes=tuple(next(passes) for _ in group.encoders) if lockstep else ())
                   for group in plan.groups)
    return replace(plan, groups=groups,
                   vision=VisionPlan("world", keeps, pass_patches, num_passes if lockstep else 0))


def with_splits(plan: Plan, splits: Mapping[int, Sequence[int]]) -> Plan:
    """A plan with images apart of which several ranks encode some, by the images' numbers in plan order."""
    first, groups = 0, []
    for group in plan.groups:
        found, encoders = [], list(group.encoders)
        for image in range(len(encoders)):
            if ranks := splits.get(first + image):
                found.append(SplitImage(image, tuple(ranks), group.passes[image:image + 1] * len(ranks)))
                encoders[image] = ranks[0]
        first += len(encoders)
        groups.append(replace(group, encoders=tuple(encoders), splits=tuple(found)))
    return replace(plan, groups=tuple(groups))


def _grids(plan: Plan) -> list[Grid]:
    """Of all images, in plan order."""
    return [grid for group in plan.groups for row in group.sequences for grid in plan.samples[row].vision_grids]


def config_of_preset(preset: str) -> PreTrainedConfig:
    """With TOKEN_IDS, whatever the tokenizer."""
    return preset_config(preset, preset_token_ids(preset) | TOKEN_IDS)


def shallow_config(
    preset: str, num_layers: int, tie_word_embeddings: bool | None = None, **text_settings: Any
) -> PreTrainedConfig:
    """Of a tiny preset with so many layers in its language model, of which `text_settings` are other values."""
    config = config_of_preset(preset)
    tree = config.to_dict()
    text = tree.get("text_config", tree)
    text |= {"num_hidden_layers": num_layers, **text_settings}
    if text.get("layer_types"):  # alike but for the last one
        text["layer_types"] = text["layer_types"][-num_layers:]
    if tie_word_embeddings is not None:
        tree["tie_word_embeddings"] = tie_word_embeddings
    return type(config).from_dict(tree)


def rough_model(
    seed: int = 0, tie_word_embeddings: bool = True, preset: str = "tiny", **text_settings: Any
) -> LanguageModel:
    """A tiny preset of NUM_LAYERS, with weights far from their start, so that attention is not uniform and no bias is
    zero. `text_settings`: other values in the configuration of its language model.
    """
    config = shallow_config(preset, NUM_LAYERS[preset], tie_word_embeddings, **text_settings)
    family = FAMILIES[config.model_type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapter = family(family.model_class(config))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in adapter.module.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.06)
            if name.endswith(".dt_bias"):  # states outlive pieces; transformers' fp32 sums of strong decays are inexact
                parameter.sub_(5.0)
    return adapter


def load_whole(path: str) -> LanguageModel:
    """The model of a folder as transformers loads it, whole and in fp32."""
    module = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    adapter: LanguageModel = Qwen25VL(module)
    return adapter


def stored_values(adapter: LanguageModel) -> dict[str, Tensor]:
    """The parameters of a model on the meta device, whole, from its files."""
    assert adapter.weights is not None
    values = {name: torch.empty(parameter.shape) for name, parameter in adapter.module.named_parameters()}
    adapter.weights.read(Interval(name, 0, value.view(-1)) for name, value in values.items())
    return values


def plain_copy(adapter: LanguageModel) -> PreTrainedModel:
    """The same weights in a model of plain transformers, with its own attention."""
    config = type(adapter.module.config).from_dict(adapter.module.config.to_dict())
    module = type(adapter.module)(config)
    module.load_state_dict(adapter.module.state_dict())
    module.set_attn_implementation("sdpa")
    return module


def plain_loss(module: PreTrainedModel, payload: Payload) -> tuple[Tensor, int]:
    """Mean loss of one sample by transformers' own forward, and its number of valid tokens."""
    ids = torch.from_numpy(payload.input_ids.astype(np.int64))[None]
    labels = torch.from_numpy(payload.labels.astype(np.int64))[None]
    inputs: dict[str, Tensor] = {}
    if len(payload.grids) and isinstance(module, InternVLForConditionalGeneration):
        inputs["pixel_values"] = tiles_of(torch.from_numpy(np.concatenate(payload.pixels)), module)  # type: ignore
    elif len(payload.grids):
        grids, seconds = (torch.from_numpy(values) for values in payload.whole())
        if isinstance(module, Glm4vForConditionalGeneration):  # to which a step in time is an image
            grids, seconds = frames_of(grids), torch.zeros(int(grids[:, 0].sum()))
        inputs |= position_inputs(module, ids, grids, seconds)
        has_videos = payload.seconds is not None and bool((seconds > 0).any())
        of_video = payload.seconds > 0 if has_videos else np.zeros(len(payload.grids), bool)  # type: ignore
        patches: dict[bool, list[np.ndarray]] = {False: [], True: []}
        for is_video, values in zip(of_video, payload.pixels):
            if values is not None:
                patches[bool(is_video)].append(values)
        if patches[False]:
            inputs |= {"pixel_values": torch.from_numpy(np.concatenate(patches[False])),
                       "image_grid_thw": grids[seconds == 0]}
        if patches[True]:
            inputs |= {"pixel_values_videos": torch.from_numpy(np.concatenate(patches[True])),
                       "video_grid_thw": grids[seconds > 0]}
    return module(input_ids=ids, labels=labels, **inputs).loss, int((labels[:, 1:] != -100).sum())


def frames_of(grids: Tensor) -> Tensor:
    """The grid of each step in time of these (N, 3)."""
    found = grids.repeat_interleave(grids[:, 0], 0)
    found[:, 0] = 1
    return found


def position_inputs(module: PreTrainedModel, ids: Tensor, grids: Tensor, seconds: Tensor) -> dict[str, Tensor]:
    """What tells a model of transformers the positions of one sequence, `ids` (1, L): the kinds of its tokens. Behind a
    video of Qwen2.5-VL transformers goes on at the larger side of the picture, so there it is told the paper's.
    """
    if not (isinstance(module, Qwen2_5_VLForConditionalGeneration) and bool((seconds > 0).any())):
        return {"mm_token_type_ids": (ids == TOKEN_IDS["image"]).int() + 2 * (ids == TOKEN_IDS["video"]).int()}
    speed: Any = module.config.vision_config.tokens_per_second
    media = [((time, height // 2, width // 2), speed * second if second else 1.0)
             for (time, height, width), second in zip(grids.tolist(), seconds.float().tolist())]
    is_vision = ((ids == TOKEN_IDS["image"]) | (ids == TOKEN_IDS["video"]))[0].tolist()
    return {"position_ids": torch.tensor(paper_positions(is_vision, media)).T[:, None]}


def tiles_of(patches: Tensor, module: PreTrainedModel) -> Tensor:
    """The tiles (T, 3, height, width) that patches (P, patch_dim) were cut of, row by row."""
    vision: Any = module.config.vision_config
    (rows, columns), (high, wide) = ((size // side for size, side in zip(vision.image_size, vision.patch_size)),
                                     vision.patch_size)
    cut = patches.view(-1, rows, columns, vision.num_channels, high, wide).permute(0, 3, 1, 4, 2, 5)
    return cut.reshape(-1, vision.num_channels, rows * high, columns * wide)


def plain_gradients(
    module: PreTrainedModel, payloads: Sequence[Payload]
) -> tuple[float, dict[str, Tensor]]:
    """Token-sum loss and its gradients, sample by sample; zeros where nothing flows."""
    module.zero_grad()
    total = 0.0
    for payload in payloads:
        mean, count = plain_loss(module, payload)
        if count:
            if mean.requires_grad:
                (mean * count).backward()
            total += mean.item() * count
    return total, {name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                   for name, parameter in module.named_parameters()}


def relative_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference over the largest element, of each tensor of `wanted`; where that is rounding alone, over the
    largest of all tensors. (A key's bias where nothing is rotated, and a query that sees one key, have gradients of 0.)
    """
    sizes = {name: tensor.abs().max().item() for name, tensor in wanted.items()}
    largest = max(sizes.values(), default=0.0) or 1.0
    return {name: (found[name] - tensor).abs().max().item() / (sizes[name] if sizes[name] > ROUNDING * largest
                                                               else largest)
            for name, tensor in wanted.items()}


def own_payloads(pack: Pack, payloads: Mapping[str, Payload], rank: int) -> dict[str, Payload]:
    """The payloads of a pack as `rank` holds them: with the pixels of the images that it encodes, and no others."""
    own = dict[str, Payload]()
    for sample, here in zip(pack.samples, encoded_images(pack, rank)):
        payload = payloads[sample.id]
        pixels = [patches if needed else None for patches, needed in zip(payload.pixels, here)]
        own[sample.id] = replace(payload, pixels=pixels)
    return own


def save_model(adapter: LanguageModel, folder: Path, values: Mapping[str, Tensor]) -> None:
    """Write a model in the Hugging Face form, of `values`: its parameters by name, whole."""
    files = export.files_of(adapter, 1)
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        own = {name: values[name].detach().float() for name in file.parameters}
        export.write_file(folder, file, export.tensors(file, own, adapter.weights))
    export.write_description(adapter, files, folder)
