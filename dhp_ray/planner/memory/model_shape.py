"""The sizes of a model that planner, costs and memory need: plain numbers, filled by the model's adapter."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from dhp_ray.planner.cost.model import constants_of_file
from dhp_ray.planner.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Equal layers: attention (`heads` queries, `key_value_heads` keys and values of `head_width`), then an MLP.

    In place of attention (`heads` 0) a layer may have a gated delta net, with `state_heads` states of `state_keys` x
    `state_values`, and queries and keys for `state_key_heads` of them.
    `gated_attention`: the output of attention is gated.

    Attention covers `window` positions: patches around each one, or tokens up to each one; with 0 a whole sequence or
    frame of an image.
    With `experts` the MLP is so many gated ones of `mlp_width` each, of which a router takes `experts_per_token`;
    all tokens may also take a shared expert of `shared_width`, whose output is gated.
    num_parameters: of one layer. gated: the MLP multiplies two products (SwiGLU); otherwise it has one and GELU.
    layer_norms: norms with mean and bias; otherwise RMS norms. query_key_norms: queries and keys are normed.
    centered_norms: RMS norms multiply with 1 + weight, in fp32. norms: how many have the layer's width; the third and
    fourth are behind attention and the MLP.
    """

    count: int
    width: int
    mlp_width: int
    heads: int
    key_value_heads: int
    head_width: int
    num_parameters: int
    window: int = 0
    gated: bool = True
    layer_norms: bool = False
    query_key_norms: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_width: int = 0
    centered_norms: bool = False
    norms: int = 2
    gated_attention: bool = False
    state_heads: int = 0
    state_key_heads: int = 0
    state_keys: int = 0
    state_values: int = 0

    def units(self, sharing: int) -> tuple[int, int]:
        """Numbers of parameters that a rank gathers together: of the layer; of its part of the experts, where several
        ranks are `sharing` them and gather them separately.
        """
        if sharing == 1:
            return self.num_parameters, 0
        experts = 3 * self.experts * self.width * self.mlp_width
        return self.num_parameters - experts, experts // sharing

    @property
    def parameters_used(self) -> int:
        """Number of parameters that a token is multiplied with."""
        return self.num_parameters - 3 * (self.experts - self.experts_per_token) * self.width * self.mlp_width


ENCODER_NUMBERS = ("vision_rest", "patch_dim", "merge_area", "merger_width", "token_pixels")
"""What a shape with an encoder must say of it, beside its layers."""


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together in `sync=micro_batch`: `num_parameters` each, `count` times."""

    part: str
    name: str
    num_parameters: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A language model and the vision encoder before it, if it has one.

    The head is as large as the token embedding; if it is `tied`, it is the embedding.
    `language_rest` and `vision_rest`: parameters outside of layers, without embedding and head.
    `merge_area` patches of `patch_dim` values make one vision token, which covers `token_pixels` of an image;
    `merger_width`: half of the numbers that the merger keeps of them for its backward pass (of one product and its
    activation: their width). A vision feature has `feature_levels` rows of the language model's width, each from a
    merger of its own. The encoder may have `position_rows` learned positions, of which it adds a mean to each patch,
    and has `vision_norms` norms of its width outside of layers. `vision_projector`: the part of `vision_rest` in a
    separate module after the encoder, which is gathered separately.
    """

    family: str
    language: tuple[LayerShape, ...]
    vocabulary_size: int
    tied: bool
    language_rest: int
    vision: tuple[LayerShape, ...] = ()
    vision_rest: int = 0
    patch_dim: int = 0
    merge_area: int = 1
    merger_width: int = 0
    token_pixels: int = 1
    feature_levels: int = 1
    position_rows: int = 0
    vision_norms: int = 1
    vision_projector: int = 0

    @classmethod
    def load(cls, path: str | Path) -> ModelShape:
        """The shape in a YAML file with these names (`conf/model_shape`). PlanError: the file, the key, its value."""
        found = _checked(cls, constants_of_file(path), f"{path}: ")
        for part in found.keys() & {"language", "vision"}:
            if not isinstance(found[part], list):
                raise PlanError(f"{path}: {part}: got {found[part]!r}; allowed: a list of layers")
            found[part] = tuple(LayerShape(**_checked(LayerShape, layer, f"{path}: {part}[{place}]."))
                                for place, layer in enumerate(found[part]))
        for name in ENCODER_NUMBERS:
            if found.get("vision") and name not in found:
                raise PlanError(f"{path}: {name}: missing")
        if not found["language"]:
            raise PlanError(f"{path}: language: got no layers; allowed: at least one")
        return cls(**found)

    def text(self) -> str:
        """The file that `load` reads: what differs from the defaults, a line a kind of layer."""
        lines = []
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, tuple) and value:
                lines += [f"{item.name}:", *(f"- {{{', '.join(_lines(layer))}}}" for layer in value)]
            elif value != item.default:
                lines += _lines(self, item.name)
        return "\n".join(lines) + "\n"

    @property
    def width(self) -> int:
        return self.language[0].width

    @property
    def num_layers(self) -> int:
        return sum(layer.count for layer in (*self.vision, *self.language))

    @property
    def experts(self) -> int:
        """Experts of a layer that has some; 0: none has."""
        return max(layer.experts for layer in self.language)

    @property
    def experts_per_token(self) -> int:
        return max(layer.experts_per_token for layer in self.language)

    def ranks_that_share(self, wanted: int, num_ranks: int) -> int:
        """The largest divisor of so many ranks and of a layer's experts that is at most `wanted`; 1 without experts."""
        common = math.gcd(num_ranks, self.experts or 1)
        return max(count for count in range(1, max(1, min(wanted, common)) + 1) if common % count == 0)

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary_size * self.width

    def units(self) -> tuple[Unit, ...]:
        """Every parameter once, in the order in which units are used."""
        return (*(Unit("vision", "layer", layer.num_parameters, layer.count) for layer in self.vision),
                *(Unit("vision", name, size) for name, size in (
                    ("rest", self.vision_rest - self.vision_projector), ("projector", self.vision_projector)) if size),
                *(Unit("language", "layer", layer.num_parameters, layer.count) for layer in self.language),
                *(() if self.tied else (Unit("language", "head", self.embedding_parameters),)),
                Unit("language", "rest", self.embedding_parameters + self.language_rest))

    def image_tokens(self, pixels: int) -> int:
        """Vision tokens of an image of so many pixels; 0 without an encoder."""
        return pixels // self.token_pixels if self.vision else 0

    def num_parameters(self, without: Collection[str] = ()) -> int:
        """Number of all parameters, or of those in parts that are not in `without`."""
        return sum(unit.num_parameters * unit.count for unit in self.units() if unit.part not in without)


def _lines(part: Any, *names: str) -> list[str]:
    """`name: value` of fields, by default of all that differ from their defaults."""
    values = {item.name: getattr(part, item.name) for item in fields(part)
              if item.name in names or (not names and getattr(part, item.name) != item.default)}
    return [f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()]


def _checked(kind: type, tree: Any, where: str) -> dict[str, Any]:
    """The values of a mapping in a file, which must have every required field of `kind`, each of its type."""
    known = {item.name: item for item in fields(kind)}
    if not isinstance(tree, dict):
        raise PlanError(f"{where}got {tree!r}; allowed: a mapping with {', '.join(known)}")
    for name, value in tree.items():
        if name not in known:
            raise PlanError(f"{where}{name}: no such key; allowed: {', '.join(known)}")
        number = type(value) is int and value >= 0
        fits = {"int": number, "bool": isinstance(value, bool), "str": isinstance(value, str)}
        if not fits.get(str(known[name].type), True):
            allowed = {"int": "a whole number of at least 0", "bool": "true or false", "str": "a name"}
            raise PlanError(f"{where}{name}: got {value!r}; allowed: {allowed[str(known[name].type)]}")
    for name, item in known.items():
        if name not in tree and item.default is MISSING:
            raise PlanError(f"{where}{name}: missing")
    return dict(tree)
