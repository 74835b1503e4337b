"""What transformers alone answers: a folder's model and its family's own processor, called as their pages show it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.image_utils import load_image
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin

from dhp_ray.data.processor import ProcessorSpec
from tests.packs import plain_copy, rough_model

PROCESSORS: dict[str, Any] = {"qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor,
                              "internvl": InternVLProcessor, "glm4v": Glm4vProcessor}
MAX_PIXELS = 20000
BREAKS = {InternVLProcessor}
"""Processors whose template writes a line break after an image: that of LLaVA's form is not written as well."""


def model_folder(folder: Path, preset: str) -> Path:
    """A tiny model by transformers' own `save_pretrained`, as its family is published, with the files of its processor.
    Images keep to MAX_PIXELS.
    """
    plain_copy(rough_model(tie_word_embeddings=False, preset=preset)).save_pretrained(folder)
    if preset == "tiny_qwen3_vl_moe":
        transpose_experts(folder)
    ProcessorSpec(preset, "", 3136, MAX_PIXELS).load().save(folder)
    return folder


def transpose_experts(folder: Path) -> None:
    """Let a folder have its experts as those of Qwen3-VL-MoE are published, which transformers turns as it loads them.
    """
    file = folder / "model.safetensors"
    tensors = {key: tensor.transpose(1, 2).contiguous() if ".experts." in key and tensor.shape[1] != tensor.shape[2]
               else tensor for key, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def plain_answers(
    folder: Path, conversations: Sequence[Sequence[dict[str, str]]], images: Sequence[Sequence[Path]],
    max_new_tokens: int
) -> list[str]:
    """The greedy answers in place of the last turn of each conversation, in LLaVA's form, about its images."""
    module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    own = own_processor(folder)
    found = []
    for turns, files in zip(conversations, images, strict=True):
        messages = [_message(turn, type(own) in BREAKS) for turn in turns[:-1]]
        text = own.apply_chat_template(messages, add_generation_prompt=True)
        inputs = own(text=[text], images=[load_image(str(file)) for file in files] or None, return_tensors="pt")
        tokens = module.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        found.append(own.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
    return found


def own_processor(folder: Path) -> Any:
    """Made of the folder by transformers alone; without its video part, which needs torchvision."""
    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    more = {"image_seq_length": 4} if kind == "internvl" else {}
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", return_value=None):
        return PROCESSORS[kind](images, tokenizer, None, chat_template=template, **more)


def _message(turn: dict[str, str], breaks: bool) -> dict[str, Any]:
    role = {"human": "user", "gpt": "assistant"}[turn["from"]]
    first, *others = turn["value"].split("<image>")
    parts: list[dict[str, str]] = [{"type": "text", "text": first}] if first else []
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text.removeprefix("\n") if breaks else text}]
    return {"role": role, "content": parts}
