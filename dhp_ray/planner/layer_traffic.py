"""What a layer's operators other than products and attention read and write, for each token or patch.

The bytes of their inputs and outputs in bf16, forward and backward, for each value of their width:

    operator               transformers' own    fused
    RMS norm               36, 92               4, 6       own: in fp32, one kernel after another
    layer norm             4, 6                 4, 6       one kernel
    SwiGLU                 10, 18               6, 10
    GELU                   4, 6                 4, 6
    rotation               20, 28               4, 4       of queries and keys
      in an encoder        52, 68               20, 20     in fp32, with conversions
    sum                    6, 6                 6, 6       with the residual, twice in a layer
    sum of gradients       0, 6                 0, 6       where several products share an input, for each further one
    gradient of a bias     0, 2                 0, 2       of an encoder's products (a language model has few biases)

The width is that of the hidden states, of the MLP (SwiGLU, GELU), or of queries and keys together (rotations, and their
norms where a model has them). Example, a layer of a Qwen2.5 3B (2,048 wide, an MLP of 11,008, 2,304 of queries and
keys), forward with transformers' own operators: 2 x 36 x 2,048 + 10 x 11,008 + 20 x 2,304 + 2 x 6 x 2,048 = 328,192
bytes a token; a trace counts the same within 3 % (`tests/planner/test_layer_traffic.py`). Fused: 116,224.

The fused column counts each input and output once. Learned scales of an encoder's layers (InternVL) are left out: they
are the same in both columns.
"""

from __future__ import annotations

from typing import NamedTuple

from dhp_ray.planner.model_shape import LayerShape


class Traffic(NamedTuple):
    """Bytes of the forward and of the backward pass."""

    forward: float
    backward: float

    def times(self, width: int) -> Traffic:
        return Traffic(self.forward * width, self.backward * width)


RMS_NORM, FUSED_RMS_NORM, LAYER_NORM = Traffic(36, 92), Traffic(4, 6), Traffic(4, 6)
SWIGLU, FUSED_SWIGLU, GELU = Traffic(10, 18), Traffic(6, 10), Traffic(4, 6)
ROTATION, FUSED_ROTATION = Traffic(20, 28), Traffic(4, 4)
ENCODER_ROTATION, FUSED_ENCODER_ROTATION = Traffic(52, 68), Traffic(20, 20)
SUM, SUM_OF_GRADIENTS, BIAS_GRADIENT = Traffic(6, 6), Traffic(0, 6), Traffic(0, 2)


def layer_traffic(layer: LayerShape, in_encoder: bool, rotates: bool, fused: bool) -> Traffic:
    """Bytes that one token (or patch) moves in a layer. `rotates`: the layer applies rotary embeddings to queries and
    keys.
    """
    queries_and_keys = (layer.heads + layer.key_value_heads) * layer.head_width
    rms_norm = FUSED_RMS_NORM if fused else RMS_NORM
    parts = [(LAYER_NORM if layer.layer_norms else rms_norm).times(2 * layer.width), SUM.times(2 * layer.width),
             # of queries, keys and values; where they are one product, they are joined
             SUM_OF_GRADIENTS.times(2 * layer.width)]
    if layer.gated:
        parts += [(FUSED_SWIGLU if fused else SWIGLU).times(layer.mlp_width), SUM_OF_GRADIENTS.times(layer.width)]
    else:
        parts.append(GELU.times(layer.mlp_width))
    if in_encoder:
        parts.append(BIAS_GRADIENT.times(queries_and_keys + 3 * layer.width + (1 + layer.gated) * layer.mlp_width))
    if layer.query_key_norms:
        parts.append(rms_norm.times(queries_and_keys))
    if rotates:
        own, in_one = (ENCODER_ROTATION, FUSED_ENCODER_ROTATION) if in_encoder else (ROTATION, FUSED_ROTATION)
        parts.append((in_one if fused else own).times(queries_and_keys))
    return Traffic(sum(part.forward for part in parts), sum(part.backward for part in parts))
