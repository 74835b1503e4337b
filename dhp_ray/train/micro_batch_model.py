"""The model that a rank runs with `sync=micro_batch`: one module, of which every rank runs every unit."""

from __future__ import annotations

from torch import Tensor, nn

from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.train.collate import PackInputs
from dhp_ray.train.pack import pack_loss


class MicroBatchModel(nn.Module):
    """The whole of a pack's computation as one module, so that FSDP sees where a micro-batch begins and ends.

    If any rank encodes in its pack, all ranks do: `inputs` then have an image (`with_tiny_image`).
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        super().__init__()
        self.adapter = adapter
        self.module = adapter.module

    def forward(self, inputs: PackInputs, link: PackCommunicator, encodes: bool) -> Tensor:
        return pack_loss(self.adapter, inputs, link, encodes)
