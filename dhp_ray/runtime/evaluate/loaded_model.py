"""The evaluated model, loaded by transformers alone: whole on one worker, or with its layers sharded over several.

    whole     from_pretrained
    parts     each layer of the language model is gathered (FSDP2) when it is used and freed afterwards; encoder,
              embedding and head stay whole once they have been used
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText

from dhp_ray.errors import first_line
from dhp_ray.model.build import quieten, without_weights
from dhp_ray.model.files import weight_files
from dhp_ray.runtime.messages import RunError
from dhp_ray.train.loading import read_shards
from dhp_ray.train.sharded_engine import narrow_frozen


def load_model(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the model of a folder by transformers alone. Nothing is downloaded, and no code in the folder is run.

    Raises:
        ModelError: the folder has no weights, or it is open which are meant; one line.
        RunError: the folder does not load, or its weights do not match its configuration.
    """
    weight_files(path)
    quieten()
    try:
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True)
    except Exception as error:  # transformers' checks of files and values raise errors of many kinds
        raise RunError(f"model.path: {path} does not load: {first_line(error)}") from None
    module, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise RunError(f"model.path: {path} lacks {len(missing)} weights of its model, such as {missing[0]}")
    return module.eval().to(device)


def load_part(path: str, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Any:
    """Load the model of a folder; this rank of `group` reads only its own rows. All ranks of the group must call this,
    and then the model, in the same way.

    Raises:
        ModelError: one line on what is missing or not supported.
    """
    quieten()
    model, weights = without_weights(path)
    module: Any = model.eval().requires_grad_(False)
    narrow_frozen(module, dtype)
    mesh = DeviceMesh.from_group(group, device.type)
    for layer in module.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    read_shards(module, dict(module.named_parameters()), weights, group.rank(), group.size(), device)
    return module
