"""The two phases in which a rank encodes images apart from its packs.

    encode     my images -> features -- exchange --> rows of my packs
    backward   gradients of my packs' rows -- exchange --> gradients of my features -> of the encoder

Activations are kept between the two phases, or the second one encodes again, pass by pass. If the encoder is frozen,
there is no second phase.

With sync=micro_batch all ranks run equally many passes, in both phases: the units of the encoder gather their
parameters from all ranks, and reduce their gradients over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dhp_ray.comm.pack_communicator import PackCommunicator, return_rows, send_rows
from dhp_ray.model.adapter import ModelAdapter, empty_features
from dhp_ray.train.vision_inputs import EncoderPass, VisionInputs


class EncoderPhases:
    """The phases of one rank and step: `encode` before the packs, `backward` after them. Every rank that encodes for
    another, or that another encodes for, calls both.

    `received_from`: for each pack of this rank, in order, the rows that come from each rank.
    """

    def __init__(
        self, adapter: ModelAdapter, inputs: VisionInputs, keeps: bool,
        received_from: Sequence[Mapping[int, int]], device: torch.device,
    ) -> None:
        self._adapter, self._device = adapter, device
        self._passes, self._keeps = inputs.passes, keeps
        self._trains = torch.is_grad_enabled() and adapter.trains("vision")
        self._send_index = {rank: rows.to(device, non_blocking=True) for rank, rows in inputs.send_index.items()}
        self._receive_counts, self._rows_of = received_rows(received_from, device)
        self._encoded: list[Tensor] = []
        self._features: list[Tensor] = []
        self._like = torch.empty(0)  # has the type and the device of features

    def encode(self, link: PackCommunicator) -> list[Tensor]:
        """Return the features (K, F) of each pack of this rank, in order; `backward` takes the gradients that packs
        leave in them.
        """
        for images in self._passes:
            with torch.set_grad_enabled(self._trains and self._keeps):
                self._encoded.append(self._encode(images))
        mine = torch.cat([features.detach() for features in self._encoded]) if self._encoded else empty_features(
            self._adapter)
        received = send_rows(mine, self._send_index, self._receive_counts, link)
        self._like = mine[:0].clone()
        del mine
        self._encoded = self._encoded if self._trains and self._keeps else []
        self._features = [received[rows] for rows in self._rows_of]
        return self._features

    def backward(self, link: PackCommunicator) -> None:
        """Add the encoder's gradients to its parameters', once the backward pass of every pack has run."""
        if not self._trains:
            return
        gradient = self._received_gradient()
        sizes = [images.num_rows for images in self._passes]
        of_mine = return_rows(gradient, self._send_index, self._receive_counts, sum(sizes), link)
        del gradient
        for number, (images, stop) in enumerate(zip(self._passes, accumulate(sizes))):
            features = self._encoded[number] if self._keeps else self._encode(images)
            features.backward(of_mine[stop - images.num_rows:stop])  # type: ignore[no-untyped-call]
        self._encoded = []

    def _received_gradient(self) -> Tensor:
        """Return the gradient of all received rows, in the order of receipt; frees the packs' features."""
        gradient = self._like.new_zeros(sum(self._receive_counts.values()), self._adapter.feature_width)
        for features, rows in zip(self._features, self._rows_of, strict=True):
            if features.grad is not None:
                gradient.index_copy_(0, rows, features.grad)
        self._features = []
        return gradient

    def _encode(self, images: EncoderPass) -> Tensor:
        there = images if self._device.type == "cpu" else images.to(self._device)
        return self._adapter.encode(there.pixels, there.encoder)


def received_rows(
    received_from: Sequence[Mapping[int, int]], device: torch.device
) -> tuple[dict[int, int], list[Tensor]]:
    """Return how many rows come from each rank, in the order of ranks, and for each pack the indices of its rows among
    them, made on the device.

    They come rank by rank, and from each rank pack by pack.
    """
    counts: dict[int, int] = {}
    for of_pack in received_from:
        for rank, count in of_pack.items():
            counts[rank] = counts.get(rank, 0) + count
    counts = dict(sorted(counts.items()))
    following = dict(zip(counts, accumulate(counts.values(), initial=0)))
    rows = []
    for of_pack in received_from:
        pieces = [torch.empty(0, dtype=torch.int64, device=device)]
        for rank, count in sorted(of_pack.items()):
            pieces.append(torch.arange(following[rank], following[rank] + count, device=device))
            following[rank] += count
        rows.append(torch.cat(pieces))
    return counts, rows
