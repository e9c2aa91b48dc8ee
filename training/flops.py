# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Arithmetic that a model needs: matrix products and triangular systems, a multiplication and an addition being two.

Counted is what the operators need in their chunk-parallel form, whatever an implementation executes beyond it: nothing is
computed again in a backward pass, causal attention takes the pairs below the diagonal, and a product's gradients cost twice
the product. Element-wise work, norms, embeddings and short convolutions are left out, as is the custom where utilisation
(MFU) is quoted (Chowdhery et al., 2022, appendix B).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

CHUNK, MINI_BATCH = 64, 16
# Conjugate-gradient steps that a mesa layer's solve is taken to need: 4 to 8 were measured in the 5M model, the most at
# its start.
MESA_STEPS = 8
BACKWARD = 2  # the gradient of a product is two products of its size


class Count(NamedTuple):
    """Floating-point operations of one token in one head."""

    products: float  # matrix products
    solves: float = 0.0  # triangular systems

    def __add__(self, other: "Count") -> "Count":
        return Count(self.products + other.products, self.solves + other.solves)

    def __mul__(self, factor: float) -> "Count":
        return Count(self.products * factor, self.solves * factor)

    @property
    def total(self) -> float:
        return self.products + self.solves


def linear_count(dim: int, value_dim: int | None = None, chunk: int = CHUNK) -> Count:
    """q k^T and its product with v inside the chunk; the read of the state and the write to it.

    Here and below, `dim` is the width of a key and `value_dim` that of a value, which defaults to it.
    """
    value_dim = value_dim or dim
    return Count(2 * chunk * (dim + value_dim) + 4 * dim * value_dim)


def delta_count(dim: int, value_dim: int | None = None, chunk: int = CHUNK) -> Count:
    """Beside those: k k^T, the triangular system with dim + value_dim right-hand sides, what the state predicts of v."""
    value_dim = value_dim or dim
    return linear_count(dim, value_dim, chunk) + Count(2 * chunk * dim + 2 * dim * value_dim, chunk * (dim + value_dim))


def conjugate_gradient_count(dim: int, steps: float, chunk: int = CHUNK) -> Count:
    """Each step is one read with values k: of the state H and inside the chunk."""
    return Count(steps * (2 * dim * dim + 4 * chunk * dim))


def mesa_count(dim: int, steps: float, value_dim: int | None = None, chunk: int = CHUNK) -> Count:
    """Linear attention, the state H beside G, and the solve."""
    return linear_count(dim, value_dim, chunk) + Count(2 * dim * dim) + conjugate_gradient_count(dim, steps, chunk)


def mesa_backward_count(dim: int, steps: float, value_dim: int | None = None, chunk: int = CHUNK) -> Count:
    """One more solve, and the gradients of two linear-attention reads: of the values, and of the keys."""
    reads = linear_count(dim, value_dim, chunk) + linear_count(dim, dim, chunk)
    return conjugate_gradient_count(dim, steps, chunk) + reads * BACKWARD


def ttt_count(dim: int, layers: int, mini_batch: int = MINI_BATCH, value_dim: int | None = None) -> Count:
    """Linear: k W, q W, the update of W; q k^T and its product with the gradients, which serves the bias as well.

    MLP (4 dim hidden units): these for both layers, and the gradient's way back through the second.
    """
    value_dim = value_dim or dim
    if layers == 1:
        return Count(6 * dim * value_dim + 2 * mini_batch * (dim + value_dim))
    hidden = 4 * dim
    return Count(hidden * (6 * dim + 8 * value_dim) + 2 * mini_batch * (dim + 2 * hidden + value_dim))


def ttt_expectation_count(dim: int, layers: int, pairs: float, mini_batch: int = MINI_BATCH) -> Count:
    """The memory's training, and for each of `pairs` visible positions the read of W_t there and its share in the average.

    W_b acts on a position once for all tokens of a mini-batch; their differences to it are products of their own. The
    first layer's inputs are the positions, also shared; those of a second layer are not.
    """
    hidden = 4 * dim
    if layers == 1:
        training = 4 * dim * dim
        read = 2 * dim * (dim + mini_batch) / mini_batch + 2 * mini_batch * dim
    else:
        training = 10 * dim * hidden
        read = 2 * dim * (hidden + mini_batch) / mini_batch + 2 * mini_batch * hidden
        read += 2 * hidden * dim + 2 * mini_batch * (hidden + dim)
    return Count(training + pairs * (read + 6 * dim))  # the score, the mean of the keys, the mean of the reads


def softmax_count(dim: int, length: int, window: int | None = None) -> Count:
    """q k^T and the product with v, below the diagonal; with a window, no further back than it reaches."""
    return Count(4 * dim * visible_pairs(length, window))


def visible_pairs(length: int, window: int | None = None) -> float:
    """Positions that a token sees, in the mean over a text of `length` tokens."""
    if window is None or window >= length:
        return length / 2
    return window - window**2 / (2 * length)


@dataclass(frozen=True)
class Flops:
    """Of one token at a given length of text.

    Attributes:
        forward: part -> floating-point operations of a forward pass.
        backward: part -> those of its backward pass.
    """

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, forward: float, backward: float | None = None) -> None:
        """Count `forward` for `part`, and `backward`, by default twice as much."""
        backward = BACKWARD * forward if backward is None else backward
        self.forward[part] = self.forward.get(part, 0.0) + forward
        self.backward[part] = self.backward.get(part, 0.0) + backward

    @property
    def training(self) -> float:
        """Both passes together."""
        return sum(self.forward.values()) + sum(self.backward.values())


def count_flops(model: PreTrainedModel, length: int, mesa_steps: float = MESA_STEPS) -> Flops:
    """The arithmetic of a causal language model, in parts: projections, MLP, head, attention and memories.

    The model may be on the meta device. Of other models than AvgPath's, linear layers are counted, and
    softmax attention where the config names its heads.

    Args:
        length: tokens of a row.
        mesa_steps: conjugate-gradient steps of each solve of `mesa_net` layers, at most the config's limit.
    """
    config, flops = model.config, Flops()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            part = "head" if module is head else "MLP" if ".mlp." in name else "projections"
            flops.add(part, 2 * module.in_features * module.out_features)
    if config.model_type != "avgpath":
        if not getattr(config, "num_attention_heads", None):
            return flops
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for kind in kinds:
            if kind in ("full_attention", "sliding_attention"):
                window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
                flops.add("attention", config.num_attention_heads * softmax_count(width, length, window).total)
        return flops
    for spec in config.mixer_specs:
        _add_mixer(flops, config, spec, length, min(mesa_steps, config.mesa_max_cg_steps))
    return flops


def _add_mixer(flops: Flops, config: PreTrainedConfig, spec, length: int, mesa_steps: float) -> None:
    """What a layer's mixer does beside its linear layers."""
    heads, dim = config.num_attention_heads, config.head_dim
    if spec.memory in ("softmax", "sliding_softmax", "identity"):
        window = None
        if spec.memory == "sliding_softmax":
            window = config.sliding_window + config.num_sink_tokens
        flops.add("attention", heads * softmax_count(dim, length, window).total)
        return
    states, key_dim, value_dim = config.num_key_value_heads, dim, dim
    is_ttt = spec.memory.startswith("ttt")
    layers = 2 if spec.memory == "ttt_mlp" else 1
    if spec.readout == "query":
        states = heads = config.linear_num_value_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        if config.query_map:
            flops.add("projections", 2 * config.linear_num_key_heads * key_dim * key_dim)
    if is_ttt:  # the inner learning rate
        flops.add("projections", 2 * states * config.hidden_size)
    mini_batch = min(config.ttt_mini_batch_size, length)
    if is_ttt and spec.readout == "expectation" and (layers == 2 or config.ttt_inner_norm):
        count = ttt_expectation_count(dim, layers, visible_pairs(length), mini_batch)
        flops.add(spec.memory, heads * count.total)
        return
    if spec.readout != "query":  # the mean key
        flops.add("attention", heads * softmax_count(dim, length).total)
    chunk = min(CHUNK, length)
    if spec.memory == "mesa_net":
        forward = mesa_count(key_dim, mesa_steps, value_dim, chunk)
        backward = mesa_backward_count(key_dim, mesa_steps, value_dim, chunk)
        flops.add(spec.memory, heads * forward.total, heads * backward.total)
        return
    counts: dict[str, Callable[[], Count]] = {
        "linear": lambda: linear_count(key_dim, value_dim, chunk),
        "delta_net": lambda: delta_count(key_dim, value_dim, chunk),
        "gated_delta_net": lambda: delta_count(key_dim, value_dim, chunk),
        "ttt_linear": lambda: ttt_count(key_dim, 1, mini_batch, value_dim),
        "ttt_mlp": lambda: ttt_count(key_dim, 2, mini_batch, value_dim),
    }
    flops.add(spec.memory, heads * counts[spec.memory]().total)
