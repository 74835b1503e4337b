"""The sizes of a model that planner, costs and memory need: plain numbers, filled by the model's adapter.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from msgspec import ValidationError, convert

from dhp_ray.planner.cost.model import constants_of_file
from dhp_ray.planner.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Equal layers: attention (`heads` queries, `key_value_heads` keys and values of `head_width`), then an MLP.

    Attention covers `window` positions (patches) around each position, or with 0 a whole sequence or frame of an image.
    num_parameters: of one layer. gated: the MLP multiplies two products (SwiGLU); otherwise it has one and GELU.
    layer_norms: norms with mean and bias; otherwise RMS norms. query_key_norms: queries and keys are normed.
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


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together in `sync=micro_batch`: `num_parameters` each, `count` times."""

    part: str
    name: str
    num_parameters: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A language model and the vision encoder before it.

    The head is as large as the token embedding; if it is `tied`, it is the embedding.
    `language_rest` and `vision_rest`: parameters outside of layers, without embedding and head.
    `merge_area` patches of `patch_dim` values make one vision token, which covers `token_pixels` of an image;
    `merger_width`: the width that the merger makes of them. A vision feature has `feature_levels` rows of the language
    model's width, each from a merger of its own. If the encoder has learned positions (`position_rows`), it adds the
    mean of four of them to each patch. `vision_projector`: the part of `vision_rest` in a separate module after the
    encoder, which is gathered separately.
    """

    family: str
    language: tuple[LayerShape, ...]
    vision: tuple[LayerShape, ...]
    vocabulary_size: int
    tied: bool
    language_rest: int
    vision_rest: int
    patch_dim: int
    merge_area: int
    merger_width: int
    token_pixels: int
    feature_levels: int = 1
    position_rows: int = 0
    vision_projector: int = 0

    @classmethod
    def load(cls, path: str | Path) -> ModelShape:
        """The shape in a YAML file with these names (`conf/model_shape`).

        Raises:
            PlanError: one line that names the file and the key.
        """
        try:
            return convert(constants_of_file(path), cls)
        except ValidationError as error:
            raise PlanError(f"{path}: {error}") from None

    @property
    def width(self) -> int:
        """Width of the language model's hidden states."""
        return self.language[0].width

    @property
    def num_layers(self) -> int:
        """Number of layers of encoder and language model together."""
        return sum(layer.count for layer in (*self.vision, *self.language))

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary_size * self.width

    def units(self) -> tuple[Unit, ...]:
        """Every parameter once, in the order in which units are used."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return (*(Unit("vision", "layer", layer.num_parameters, layer.count) for layer in self.vision),
                Unit("vision", "rest", self.vision_rest - self.vision_projector),
                *(Unit("vision", "projector", size) for size in (self.vision_projector,) if size),
                *(Unit("language", "layer", layer.num_parameters, layer.count) for layer in self.language),
                Unit("language", "rest", embeddings + self.language_rest))

    def num_parameters(self, without: Collection[str] = ()) -> int:
        """Number of all parameters, or of those in parts that are not in `without`."""
        return sum(unit.num_parameters * unit.count for unit in self.units() if unit.part not in without)
