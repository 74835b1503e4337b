"""Bytes that an attention kernel takes for itself in its backward pass."""

from __future__ import annotations

import math

from dhp_ray.planner.memory.model_shape import LayerShape


def workspace_bytes(
    layer: LayerShape, queries: int, keys: int, pieces: int, compute_bytes: int, device: str
) -> float:
    """Of rows of queries and of keys, in so many pieces that a call separates, in a computing type of `compute_bytes`.

    cuda: mha_varlen_bwd of torch's flash_api.cpp: fp32 sums of the queries' gradients and one number a row, each piece
    padded by 128 rows, and keys and values as often as there are query heads. npu: maximum and sum of the softmax,
    eight times each. cpu: fp32 copies of what is not fp32.
    """
    if device == "cuda":
        rounded = math.ceil(layer.head_width / 32) * 32
        repeated = 2 * compute_bytes * layer.heads * layer.head_width if layer.heads != layer.key_value_heads else 0
        return (queries + 128 * pieces) * layer.heads * (rounded + 1) * 4 + keys * repeated
    if device == "npu":
        return queries * layer.heads * 2 * 8 * 4
    widened = (3 * layer.heads * queries + 2 * layer.key_value_heads * keys) * layer.head_width * 4
    return widened if compute_bytes < 4 else 0
