"""Runs one rank's part of a pack: the vision encoder, the exchange of its features, the language model, the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from dhp_ray.comm.pack_communicator import PackCommunicator, exchange_rows
from dhp_ray.model.attention import PackContext
from dhp_ray.model.experts import counted_by
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.train.collate import PackInputs


def pack_loss(
    adapter: LanguageModel, inputs: PackInputs, link: PackCommunicator, encodes: bool | None = None
) -> Tensor:
    """Return the token-sum loss, an fp32 scalar, of this rank's shard of a pack; or, if `inputs` say so and without
    gradients, the tokens (K,) that most likely follow its valid ones. `inputs` are on the model's device.

    Every member of the pack must call it and then `backward()` on the result: with gradients enabled that is always
    allowed, even if nothing of the pack is trained. Only the pack's own members exchange anything. `encodes` tells
    whether features are exchanged, and so differentiated; by default, if the pack has images.
    """
    encodes = inputs.num_images > 0 if encodes is None else encodes
    # Whether there is a backward pass upstream of each exchange. This depends only on what the pack holds, so it is the
    # same on all members.
    trains_features = torch.is_grad_enabled() and adapter.trains("vision") and encodes
    trains_hidden = trains_features or (torch.is_grad_enabled() and adapter.trains("language"))
    if inputs.features is not None:
        # only from here on: FSDP takes the gradient of an input for the end of a module's backward pass
        features = inputs.features.requires_grad_(trains_features)
    else:
        with torch.set_grad_enabled(trains_features):
            features = adapter.encode(inputs.pixels, inputs.encoder)
        if encodes:
            features = exchange_rows(features, inputs.send_index, inputs.receive_counts, link,
                                     differentiable=trains_features)
    context = PackContext(inputs.layout, link, trains_hidden, inputs.segments,
                          inputs.dropout_keys if torch.is_grad_enabled() else None, inputs.pieces, inputs.window)
    with counted_by(inputs.routing):
        hidden = adapter.decode(inputs.token_ids, inputs.positions, inputs.vision_token_index, features, context)
    if inputs.routing:
        inputs.routing.share(link)
    if inputs.predicts:
        return adapter.predictions(hidden, inputs.valid_index)
    loss = adapter.loss_sum(hidden, inputs.labels, inputs.valid_index)
    if torch.is_grad_enabled() and not loss.requires_grad:
        loss.requires_grad_()
    return loss
