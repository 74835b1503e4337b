"""What a user of plain transformers and FSDP2 would run on the same batch: one sequence after the other."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import noop_context_fn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.device_parts.workload import Batch, building_on
from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.compatibility import checkpoint_activations
from dhp_ray.train.collate import Payload
from tests.packs import TOKEN_IDS


class PlainStep:
    """fp32 parameters that FSDP2 casts to the computing type, AdamW, recomputation where ours has it. A world of one
    rank, over the device's backend.
    """

    def __init__(self, config: Qwen2_5_VLConfig, device: torch.device, precision: str, recomputes: bool) -> None:
        accelerator = ACCELERATORS[device.type]
        accelerator.activate()
        self.device = accelerator.torch_device()
        dist.init_process_group(accelerator.backend, store=dist.HashStore(), rank=0, world_size=1)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        with building_on(device, dtype):
            self.module = Qwen2_5_VLForConditionalGeneration(config)
        self.attention = "sdpa"
        self.module.set_attn_implementation(self.attention)
        if device.type == "cuda" and importlib.util.find_spec("flash_attn"):
            with suppress(ImportError, ValueError):  # of a version that transformers does not take
                self.module.set_attn_implementation("flash_attention_2")
                self.attention = "flash_attention_2"
        self.module.float().train()
        if recomputes:
            checkpoint_activations(self.module, noop_context_fn)
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        model: Any = self.module.model
        for unit in (*model.visual.blocks, model.visual, *model.language_model.layers, self.module):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        if device.type == "cpu":
            self.module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has no mean
        parameters = list(self.module.parameters())
        groups = [{"params": [parameter for parameter in parameters if (parameter.ndim > 1) == decays],
                   "weight_decay": 0.1 * decays} for decays in (True, False)]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), eps=1e-6, fused=device.type == "cuda")

    def run(self, batch: Batch) -> float:
        """One optimizer step; the mean loss."""
        valid = sum(int((payload.labels[1:] != -100).sum()) for _, payload in batch)
        total = torch.zeros((), device=self.device)
        for _, payload in batch:
            count = int((payload.labels[1:] != -100).sum())
            loss = self.module(**inputs_of(payload, self.device)).loss * (count / valid)
            loss.backward()
            total += loss.detach().float()
        for parameter in self.module.parameters():
            if parameter.grad is None:  # of an encoder without images: no update in torch, one of zero in ours
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()

    def release(self) -> None:
        self.optimizer = self.module = None  # type: ignore[assignment]
        dist.destroy_process_group()


def inputs_of(payload: Payload, device: torch.device) -> dict[str, torch.Tensor]:
    """Of transformers' own forward, for one sequence with or without images."""
    ids = torch.from_numpy(payload.input_ids).long()[None].to(device)
    inputs = {"input_ids": ids, "labels": torch.from_numpy(payload.labels).long()[None].to(device)}
    if len(payload.grids):
        pixels = [torch.from_numpy(patches) for patches in payload.pixels if patches is not None]
        inputs |= {"mm_token_type_ids": (ids == TOKEN_IDS["image"]).int(), "pixel_values": torch.cat(pixels).to(device),
                   "image_grid_thw": torch.from_numpy(payload.grids).to(device)}
    return inputs
