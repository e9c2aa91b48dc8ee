# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Softmax checkpoints read layer by layer: Llama, Mistral, Qwen2, Qwen3, and the softmax layers of AvgPath itself.

`softmax_layers` finds a model's attention layers and checks that they are what they seem; `watch` lets a function see
each of them while the model runs, one layer at a time, and put another output in its place. Nothing is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from .attention import SlidingSoftmaxAttention, SoftmaxAttention
from .rotary import rotate

# Model type -> the attribute of a decoder layer that holds its attention.
SOFTMAX_FAMILIES = {
    "llama": "self_attn",
    "mistral": "self_attn",
    "qwen2": "self_attn",
    "qwen3": "self_attn",
    "avgpath": "mixer",
}
PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SoftmaxLayer:
    """One softmax attention layer of a model, whatever its family.

    Attributes:
        index: of the decoder layer in the model.
        block: the decoder layer; attention: the module in it that has `q_proj`, `k_proj`, `v_proj` and `o_proj`.
        num_heads, num_key_value_heads, head_dim: H, H_kv and D; query head h reads key head h // (H / H_kv).
        scaling: factor on the scores.
        sliding_window: tokens that a query sees, itself included; `None` for all before it.
        num_sinks: first tokens of a text that it sees besides.
    """

    index: int
    block: nn.Module
    attention: nn.Module
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    num_sinks: int = 0

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_key_value_heads

    @property
    def q_norm(self) -> nn.Module | None:
        """Norm of the queries `[B, T, H, D]` before they are rotated, `None` for none; `k_norm` likewise."""
        return getattr(self.attention, "q_norm", None)

    @property
    def k_norm(self) -> nn.Module | None:
        return getattr(self.attention, "k_norm", None)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[B, T, H, D]` and k, v `[B, T, H_kv, D]` of the layer's input, normalised where it does, un-rotated."""
        q, k, v = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def rotate(self, x: torch.Tensor, position_embeddings: PositionEmbeddings | None) -> torch.Tensor:
        """`x` `[B, T, heads, D]` rotated as it is scored; unchanged in a model without rotary embedding."""
        return x if position_embeddings is None else rotate(x, *position_embeddings)

    def visible(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Which keys each query of a text sees, `[T, T]` boolean."""
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        if self.sliding_window is not None and self.sliding_window < length:
            left_behind = seen.tril(-self.sliding_window)
            left_behind[:, : self.num_sinks] = False
            seen &= ~left_behind
        return seen

    def project_output(self, averages: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the layer returns `[B, T, hidden_size]` for per-head outputs `[B, T, H, D]` on its input."""
        if isinstance(self.attention, SoftmaxAttention | SlidingSoftmaxAttention):
            return self.attention.project_output(averages, hidden_states)
        return self.attention.o_proj(averages.flatten(2))


@dataclass(frozen=True)
class LayerPass:
    """What one attention layer did in the forward pass that is running.

    Attributes:
        hidden_states: its input, `[B, T, hidden_size]`; output: what it returned, likewise.
        position_embeddings: cosines and sines `[B or 1, T, R]` of the rotation, or `None`.
    """

    layer: SoftmaxLayer
    hidden_states: torch.Tensor
    output: torch.Tensor
    position_embeddings: PositionEmbeddings | None

    @cached_property
    def projections(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[B, T, H, D]` and k, v `[B, T, H_kv, D]`, normalised where the layer does, un-rotated."""
        return self.layer.project(self.hidden_states)

    @property
    def q(self) -> torch.Tensor:
        return self.projections[0]

    @property
    def k(self) -> torch.Tensor:
        return self.projections[1]

    @property
    def v(self) -> torch.Tensor:
        return self.projections[2]

    def averages(self) -> torch.Tensor:
        """The attention's averages of the values, `[B, T, H, D]`, before gate and output projection."""
        return self.average(self.v)

    def average(self, vectors: torch.Tensor) -> torch.Tensor:
        """The attention's averages of any `vectors` `[B, T, H_kv, E]`: `[B, T, H, E]`, in their dtype."""
        layer = self.layer
        q, k = (layer.rotate(x, self.position_embeddings).to(vectors.dtype) for x in (self.q, self.k))
        q, k, vectors = (x.transpose(1, 2) for x in (q, k, vectors))
        k, vectors = (x.repeat_interleave(layer.groups, dim=1) for x in (k, vectors))
        visible = layer.visible(q.shape[2], q.device)
        return F.scaled_dot_product_attention(q, k, vectors, attn_mask=visible, scale=layer.scaling).transpose(1, 2)


def check_plain(model: nn.Module) -> None:
    """Raises unless `model` is a plain Transformers model of a known family.

    Raises:
        TypeError: it is no Transformers model.
        ValueError: another architecture, quantised weights, or adapters around them.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model, nn.Module) or model_type is None:
        raise TypeError(f"Expected a Transformers model, got {type(model).__name__}.")
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{type(model).__name__} carries PEFT adapters: merge them first, with merge_and_unload() of the PeftModel."
        )
    if model_type not in SOFTMAX_FAMILIES:
        raise ValueError(
            f"Architecture {model_type!r} ({type(model).__name__}) is not supported. Known: {', '.join(SOFTMAX_FAMILIES)}."
        )
    quantised = getattr(model, "hf_quantizer", None) or getattr(config, "quantization_config", None)
    if not quantised:
        quantised = any(
            not parameter.is_floating_point() or type(parameter.data) is not torch.Tensor
            for parameter in model.parameters()
        )
    if quantised:
        raise ValueError(
            f"{type(model).__name__} is quantised: load the checkpoint without quantization_config, in float32 or bfloat16."
        )


def decoder(model: nn.Module) -> nn.Module:
    """The part of a causal language model (or the model without head itself) that has `layers` and `norm`."""
    return model if hasattr(model, "layers") else model.model


def context_limit(model: nn.Module) -> int:
    """Tokens that the model's positions are made for."""
    return model.config.max_position_embeddings


def check_text(ids: torch.Tensor, model: nn.Module, name: str, shortest: int = 2) -> None:
    """Raises `ValueError`, which calls it `name`, if `model` cannot read text of token ids `[..., T]`, or T < `shortest`."""
    length, limit, vocab_size = ids.shape[-1], context_limit(model), model.config.vocab_size
    if length > limit:
        raise ValueError(
            f"{name} has {length} tokens, more than the model's max_position_embeddings={limit}: cut the text into shorter "
            "ones."
        )
    if length < shortest:
        raise ValueError(f"{name} has {length} tokens, and {shortest} are the least: leave it out, or join texts.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} holds the token id {low if low < 0 else high}, outside the vocabulary 0 ... {vocab_size - 1}: use the "
            "tokenizer that belongs to the model."
        )


def softmax_layers(model: nn.Module) -> list[SoftmaxLayer]:
    """The softmax layers of `model`, in order; all of its layers but in an AvgPath hybrid.

    Raises:
        TypeError, ValueError: as `check_plain`; also a ValueError if no layer is one of softmax.
    """
    check_plain(model)
    config = model.config
    layers = []
    for index, block in enumerate(decoder(model).layers):
        attention = getattr(block, SOFTMAX_FAMILIES[config.model_type])
        if config.model_type == "avgpath":
            if not isinstance(attention, SoftmaxAttention | SlidingSoftmaxAttention):
                continue
            slides = isinstance(attention, SlidingSoftmaxAttention)
            window, sinks = (config.sliding_window, config.num_sink_tokens) if slides else (None, 0)
        else:
            # Mistral's window is that of all layers, Qwen's stands in those that slide.
            owner = config if config.model_type == "mistral" else attention
            window, sinks = getattr(owner, "sliding_window", None), 0
        layers.append(
            SoftmaxLayer(
                index=index,
                block=block,
                attention=attention,
                num_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=attention.head_dim,
                scaling=getattr(attention, "scaling", attention.head_dim**-0.5),
                sliding_window=window,
                num_sinks=sinks,
            )
        )
    if not layers:
        raise ValueError(
            f"This model has no softmax layer, only {', '.join(sorted(set(config.mixer_types)))}: there is nothing to read. "
            "Take the softmax checkpoint that it came from, or a hybrid."
        )
    return layers


@contextmanager
def watch(layers: Sequence[SoftmaxLayer], visit: Callable[[LayerPass], torch.Tensor | None]) -> Iterator[None]:
    """Inside, `visit` is called for each of `layers` as soon as its attention has run in a forward pass of the model.

    What `visit` returns, `[B, T, hidden_size]`, takes the place of the attention's output; `None` leaves it. Run whole
    texts without padding, `use_cache=False`.
    """
    handles = []

    def hook(layer: SoftmaxLayer):
        def seen(module, args, kwargs, result):
            hidden_states = args[0] if args else kwargs["hidden_states"]
            position_embeddings = kwargs.get("position_embeddings")
            replaced = visit(LayerPass(layer, hidden_states, result[0], position_embeddings))
            return None if replaced is None else (replaced, *result[1:])

        return seen

    try:
        for layer in layers:
            handles.append(layer.attention.register_forward_hook(hook(layer), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
