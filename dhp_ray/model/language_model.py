"""The model that a training step computes with: what the language models of transformers share, with a vision encoder
(`vision_language_model.py`) or without.

The step calls the three parts in turn, so that each can have its own layout over the ranks of a pack:

    encode (pixels of my images) -> features -> [exchange] -> decode (my tokens, the features that land on them) ->
    hidden -> loss_sum

A language model alone has no images, so its encoder makes no features. A family brings the rest: its classes, what it
refuses and its positions. Nothing else knows a family but `dhp_ray.data.families`, which brings its text and pixels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedConfig, PreTrainedModel

from dhp_ray.compatibility import checkpoint_activations
from dhp_ray.model import attention
from dhp_ray.model.attention import PackContext
from dhp_ray.model.experts import BalanceLosses, Routing, has_experts, use_experts
from dhp_ray.model.files import ModelError
from dhp_ray.model.fused import FusedAttention, Operators, fuse
from dhp_ray.model.layout import PackLayout, zigzag_of_all
from dhp_ray.model.lora import LoraSettings, add_adapters, drop_by_pack, first_values, target_layers
from dhp_ray.model.loss import Head, cross_entropy_sum, most_likely
from dhp_ray.model.recomputation import Keeps, checkpoint_contexts
from dhp_ray.model.segment_attention import Segments
from dhp_ray.model.weights import StoredWeights
from dhp_ray.planner.memory.model_shape import LayerShape, ModelShape
from dhp_ray.planner.plan.cluster import num_relieved
from dhp_ray.planner.plan.types import Grid

# "longrope" chooses frequencies by the longest position that a call sees, so shards of one sequence would differ. So
# does "dynamic" beyond the positions that a model is made for; up to there its frequencies are the plain ones.
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "dynamic")


EncoderArguments = Mapping[str, "Tensor | Segments"]
"""Arguments of a family's encoder, by name."""


class LayerStack(NamedTuple):
    """Consecutive layers, and the module whose forward pass runs them."""

    owner: Module
    layers: Sequence[Module]


class LanguageModel:
    """One model family. Shapes: L local tokens, N images, P patches, V vision tokens, F feature width, D hidden width.

    `module` is the transformers model; all trainable state is in its `named_parameters()`. If it was built on the meta
    device, `weights` reads its values.
    """

    model_class: ClassVar[type[PreTrainedModel]]
    config_class: ClassVar[type[PreTrainedConfig]]
    stored_names: ClassVar[Sequence[tuple[str, str]]] = ()
    """Patterns of names in published files that are older than the module's, and what takes their place, in order."""

    vision_prefixes: ClassVar[tuple[str, ...]] = ()
    """How the names of the encoder's parameters begin, its projector's included."""

    layer_types: ClassVar[tuple[str, ...]] = ("full_attention",)
    """What layers of the language model may be, as configurations name them."""

    vision_token_ids: Sequence[int] = ()
    """Ids of the tokens that stand for an image and for a video, in this order; none without an encoder."""

    def __init__(self, module: PreTrainedModel) -> None:
        config: Any = module.config
        self.check(config)
        attention.register()
        self.module, self._checkpoints, self._keeps = module.train(), False, Keeps()
        self.language.set_attn_implementation(attention.NAME)
        self.replace_modules()
        self.head.__class__ = Head
        text = config.get_text_config()
        use_experts(module, self.language.layers)
        self.longest_sequence: int | None = None  # no limit
        if text.rope_parameters.get("rope_type") == "dynamic":
            self.longest_sequence = text.max_position_embeddings
            self.language.rotary_emb.rope_type = "default"  # else it looks at the positions of each call
        self.weights: StoredWeights | None = None
        self.lora: LoraSettings | None = None  # of the adapters that are trained instead of the weights
        self.balance_losses = BalanceLosses()
        self.shape = shape = self.shape_of(config)
        self.num_experts = shape.experts
        self.merge_area, self.patch_dim = shape.merge_area, shape.patch_dim
        self.vocabulary_size = shape.vocabulary_size
        self.feature_width = shape.width * shape.feature_levels  # F: of all levels
        self._feature_levels = shape.feature_levels
        self.looks_back = max((layer.linear_attn.conv1d.kernel_size[0] - 1 for layer in self.language.layers
                               if hasattr(layer, "linear_attn")), default=None)
        self.window = next((layer.window for layer in shape.language if layer.window), None)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}  # before sharding

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse what context parallelism here does not compute.

        Raises:
            ModelError: kinds of layers, dropout, or rotary frequencies that depend on the call.
        """
        text = config.get_text_config()
        slides = getattr(text, "use_sliding_window", False)
        kinds = {*(getattr(text, "layer_types", None) or ()), *(["sliding_attention"] if slides else [])}
        if unknown := sorted(kinds - {*cls.layer_types}):
            raise ModelError(f"model: layers of {', '.join(unknown)}; allowed: {', '.join(cls.layer_types)}")
        if "sliding_attention" in kinds and (text.sliding_window or 0) < 1:
            raise ModelError(f"model: sliding_window is {text.sliding_window}; allowed: at least 1")
        if getattr(text, "num_experts", 0):
            if text.hidden_act != "silu":
                raise ModelError(f"model: hidden_act is {text.hidden_act!r} with experts; allowed: silu")
            if not 1 <= text.num_experts_per_tok <= text.num_experts:
                raise ModelError(f"model: num_experts_per_tok is {text.num_experts_per_tok}; allowed: 1 to "
                                 f"{text.num_experts}, its experts")
            if text.moe_intermediate_size % 8:
                raise ModelError(f"model: moe_intermediate_size is {text.moe_intermediate_size}; allowed: multiples "
                                 "of 8")
        if text.attention_dropout:
            raise ModelError(f"model: attention_dropout is {text.attention_dropout}; allowed: 0")
        rope_type = text.rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ModelError(f"model: rope_type is {rope_type!r}; allowed: {', '.join(ROPE_TYPES)}")

    @property
    def language(self) -> Any:
        """The embedding, the layers and the last norm."""
        return self.module.get_decoder()

    @property
    def head(self) -> Any:
        return self.module.get_output_embeddings()

    def shape_of(self, config: Any) -> ModelShape:
        """What the planner needs to know of this model, before any adapter is added; also on the meta device."""
        text, layers = config.get_text_config(), self.language.layers
        counts = Counter(self.layer_shape(text, layer) for layer in layers)
        kinds = tuple(replace(layer, count=count) for layer, count in counts.items())
        return ModelShape(family=config.model_type, language=kinds, vocabulary_size=text.vocab_size,
                          tied=bool(config.tie_word_embeddings), language_rest=text.hidden_size,
                          **self.vision_shape(config))

    def layer_shape(self, text: Any, layer: Any) -> LayerShape:
        """One layer of the language model with the configuration `text`."""
        if has_experts(layer):
            mlp = {"mlp_width": text.moe_intermediate_size, "experts": text.num_experts,
                   "experts_per_token": text.num_experts_per_tok,
                   "shared_width": getattr(text, "shared_expert_intermediate_size", 0)}
        else:
            mlp = {"mlp_width": text.intermediate_size}
        return LayerShape(count=1, width=text.hidden_size, num_parameters=num_parameters(layer), **mlp,
                          **self.mixer_shape(text, layer))

    def mixer_shape(self, text: Any, layer: Any) -> dict[str, Any]:
        """The fields of `LayerShape` that tell how a layer's tokens see each other."""
        if hasattr(layer, "linear_attn"):
            return {"heads": 0, "key_value_heads": 0, "head_width": 0, "state_heads": text.linear_num_value_heads,
                    "state_key_heads": text.linear_num_key_heads, "state_keys": text.linear_key_head_dim,
                    "state_values": text.linear_value_head_dim}
        return {"heads": text.num_attention_heads, "key_value_heads": text.num_key_value_heads,
                "head_width": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
                "query_key_norms": hasattr(layer.self_attn, "q_norm"),
                "window": getattr(layer.self_attn, "sliding_window", None) or 0}

    def vision_shape(self, config: Any) -> dict[str, Any]:
        """The encoder's fields of `ModelShape`."""
        return {}

    def replace_modules(self) -> None:
        """Put our own modules in the places of those of `self.module` whose way of computing no registry reaches."""

    @property
    def smallest_grid(self) -> Grid:
        """Grid of the smallest image that the encoder accepts."""
        side = isqrt(self.merge_area)
        return (1, side, side)

    def vision_runs(self, grid: Sequence[int], is_video: bool) -> Sequence[int]:
        """Lengths of the runs of vision tokens for a grid: an image is one run, of a video each step in time."""
        time, height, width = grid
        area = height * width // self.merge_area
        return (area,) * time if is_video else (time * area,)

    def layout(self, lengths: Sequence[int], degree: int) -> PackLayout:
        """Which member of a pack of `degree` ranks holds which tokens of its sequences: few pieces where a piece needs
        what is before it.
        """
        few = self.looks_back is not None or self.window is not None
        return PackLayout(tuple(lengths), degree, zigzag_of_all(lengths, degree) if few else ())

    def positions(self, input_ids: Tensor, grids: Tensor, seconds: Tensor | None = None) -> Tensor:
        """Rotary positions (3, L) of one whole sequence `input_ids` (L,) with images and videos of `grids` (N, 3);
        int64 on the CPU.

        `seconds` (N,): the duration of one time step of a video, 0 for an image; None if all are images.
        """
        return self.positions_of(self.module.config, input_ids, grids, seconds)

    @classmethod
    def positions_of(
        cls, config: Any, input_ids: Tensor, grids: Tensor, seconds: Tensor | None = None
    ) -> Tensor:
        """`positions` of a model with this configuration: tokens are counted, whatever they are."""
        return torch.arange(len(input_ids)).expand(3, -1)

    @staticmethod
    def position_ids(positions: Tensor) -> Tensor:
        """`positions` (3, L) as the transformers model takes them, for a batch of one."""
        return positions[:1]

    def encoder_arguments(self, grids: Sequence[Sequence[int]]) -> EncoderArguments:
        """Encoder arguments that depend only on the sizes of the images, `grids` of patches in time, height and width.
        They are made on the CPU before a step; empty without images.
        """
        return {}

    def encode(self, pixels: Tensor, arguments: EncoderArguments) -> Tensor:
        """Features (V, F) of the images with the patches `pixels` (P, patch_dim). `arguments`: `encoder_arguments` of
        their grids in the same order, on the device of `pixels`.
        """
        return self.empty_features()

    def empty_features(self) -> Tensor:
        """Features (0, F) without any image, with the dtype and device of those from `encode`."""
        parameter = next(self.module.parameters())
        return torch.empty(0, self.feature_width, dtype=parameter.dtype, device=parameter.device)

    def decode(
        self, token_ids: Tensor, positions: Tensor, vision_token_index: Tensor, features: Tensor, context: PackContext
    ) -> Tensor:
        """Hidden states (L, D) of a rank's shard of a pack.

        `token_ids` (L,), `positions` (3, L); row i of `features` (K, F) replaces the embedding of local token
        `vision_token_index[i]`. Every member of the pack must call this, since attention exchanges over `context`.
        """
        language, num_tokens = self.language, len(token_ids)
        # transformers' layers cannot reshape (0, D), and every member takes part in every layer: an idle token does,
        # seen by no other
        if not num_tokens:
            token_ids, positions = token_ids.new_zeros(1), positions.new_zeros((3, 1))
        embeddings = language.embed_tokens(token_ids)
        first, *deeper = features.to(embeddings.dtype).chunk(self._feature_levels, 1)
        # Also without a row to write: it ties this rank's backward pass to the exchange that `features` came from.
        embeddings = embeddings.index_copy(0, vision_token_index, first)
        # Ranks that share experts meet in the backward pass of all layers, also before the first layer with an adapter,
        # whatever their packs are.
        embeddings.requires_grad_(embeddings.requires_grad or (context.differentiable and self.num_experts > 0))
        output = language(inputs_embeds=embeddings[None], use_cache=False, context=context,
                          **self.language_arguments(positions, vision_token_index, deeper))
        hidden: Tensor = output.last_hidden_state.squeeze(0)  # not [0], whose backward pass copies
        return hidden if num_tokens else hidden[:0]

    def routing(self, sequence_of: Tensor | None, sequences: Tensor | None) -> Routing | None:
        """Where the routers of a pack's forward pass count; None without experts. The arguments: as of `Routing`."""
        if sequence_of is None or sequences is None:
            return None
        return Routing(sequence_of, sequences, self.num_experts, self.shape.experts_per_token, self.balance_losses)

    def language_arguments(
        self, positions: Tensor, vision_token_index: Tensor, deeper: Sequence[Tensor]
    ) -> Mapping[str, Any]:
        """What a family's language model takes besides embeddings: its positions, of `positions` (3, L); `deeper`
        (K, D) are the further levels of the features, row i of token `vision_token_index[i]`.
        """
        return {"position_ids": self.position_ids(positions)}

    def loss_sum(self, hidden: Tensor, labels: Tensor, valid_index: Tensor) -> Tensor:
        """The cross entropy (fp32) of `hidden` (L, D) and shifted `labels` (L,), summed over `valid_index` (K,)."""
        return self.head(hidden, cross_entropy_sum, labels, valid_index)

    def predictions(self, hidden: Tensor, valid_index: Tensor) -> Tensor:
        """The most likely next tokens (K,) int64 after those at `valid_index` (K,) of `hidden` (L, D)."""
        return self.head(hidden, most_likely, valid_index)

    def is_vision(self, parameter_name: str) -> bool:
        """Whether a parameter belongs to the vision encoder, including its projector."""
        return parameter_name.startswith(self.vision_prefixes)

    def decays(self, parameter_name: str) -> bool:
        """Whether weight decay applies: to matrices, not to biases and norms."""
        return len(self.shapes[parameter_name]) > 1

    def trains(self, part: str) -> bool:
        """Whether any parameter of "vision" or of "language" is trained; the same on all ranks."""
        return any(parameter.requires_grad for name, parameter in self.module.named_parameters()
                   if self.is_vision(name) == (part == "vision"))

    def freeze(self, parts: Sequence[str]) -> None:
        """Exclude "vision" or "language" from training."""
        for part in parts:
            for name, parameter in self.module.named_parameters():
                if self.is_vision(name) == (part == "vision"):
                    parameter.requires_grad_(False)

    def add_lora(self, settings: LoraSettings) -> None:
        """Train adapters instead of the weights, except in frozen parts. Call this once, before `fuse`."""
        trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        layers, experts = target_layers(self.module, settings.targets, trained - {"lm_head.weight"})
        if experts and settings.rank % 8:  # what grouped products take
            raise ModelError(f"train.lora.rank: got {settings.rank} with adapters of experts; allowed: multiples of 8")
        if experts and settings.dropout:  # nor can PEFT
            raise ModelError(f"train.lora.dropout: got {settings.dropout} with adapters of experts; allowed: 0")
        if settings.dropout:
            for name in layers:
                if self.is_vision(name):  # whose patches have no place in a sample that all plans agree on
                    raise ModelError(
                        f"train.lora.dropout: got {settings.dropout} with an adapter in the vision encoder ({name}); "
                        "allowed: 0, or train.freeze=vision"
                    )
        add_adapters(self.module, layers, experts, settings)
        self.lora = settings
        if settings.dropout:
            for layer in self.language.layers:
                drop_by_pack(layer)
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                self.shapes[name] = tuple(parameter.shape)
                if self.weights is not None:
                    self.weights.drawn[name] = partial(first_values, name, parameter.shape, settings.seed)

    def units(self) -> list[Module]:
        """The submodules that are gathered separately when sharded, inner ones first; used only by calling them."""
        return [*self.language.layers, *([] if self.shape.tied else [self.head])]

    def experts(self) -> list[Module]:
        """The experts of each layer that has some."""
        return [layer.mlp.experts for layer in self.language.layers if has_experts(layer)]

    def sharded_shapes(self) -> dict[Parameter, tuple[int, ...]]:
        """Other shapes in which parameters are sharded by rows, and which the forward pass also accepts: experts by the
        rows of their matrices, since there may be fewer experts than ranks.
        """
        return {parameter: (parameter.shape[0] * parameter.shape[1], parameter.shape[2])
                for each in self.experts() for parameter in each.parameters()}

    def stacks(self) -> list[LayerStack]:
        """The layers of each part of the model, in the order in which they run."""
        return [LayerStack(self.language, self.language.layers)]

    def fuse(self, operators: Operators) -> None:
        """Compute norms, rotary embeddings and gated MLPs with these operators. Parameters and their names stay."""
        self.fuse_language(operators)

    def fuse_language(self, operators: Operators) -> None:
        """The language model's part of `fuse`."""
        language = self.language
        for layer in language.layers:
            fuse(layer, operators, ("input_layernorm", "post_attention_layernorm"), language.config.hidden_act)
            if language.rotary_emb.attention_scaling == 1:  # npu_rotary_mul takes cosines and sines in [-1, 1]
                layer.self_attn = FusedAttention(layer.self_attn, operators)
        fuse(language, operators, ("norm",))

    def set_activation_checkpointing(self, share: float = 1.0, keeps_attention: bool = False) -> None:
        """Recompute this share of the layers in the backward pass (activation checkpointing, arXiv 1604.06174), and
        keep the activations of the others. May change between two packs. With `keeps_attention`, layers that are
        recomputed keep the results of attention (`recomputation.py`).

            share 0.5 of 6 layers   forward     0 1 2 3 4 5      layers 0 to 2 keep their input alone
                                    backward    5 4 3 | 2 2 1 1 0 0

        The first layers of the encoder and of the language model are recomputed: in the backward pass the others are
        over by then, so what one layer keeps while it runs again comes in addition to inputs alone.
        """
        self._keeps.attention = keeps_attention
        if share and not self._checkpoints:  # the module must not keep this object alive, which keeps the module
            checkpoint_activations(self.module, partial(checkpoint_contexts, self._keeps))
            self._checkpoints = True
        for _, layers in self.stacks():
            count = num_relieved(share, len(layers))
            for number, layer in enumerate(layers):
                layer.gradient_checkpointing = number < count  # type: ignore[assignment]

    @contextmanager
    def recomputing(self, share: float) -> Iterator[None]:
        """Put this around the forward pass of a pack of which this share of the layers is recomputed, but for attention
        (0: as always).
        """
        if not share or not torch.is_grad_enabled():
            yield
            return
        self.set_activation_checkpointing(share, keeps_attention=True)
        try:
            yield
        finally:
            self.set_activation_checkpointing(0.0)


def num_parameters(module: Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
