# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Memories `ttt_linear` and `ttt_mlp`: a small model trained by mini-batch gradient descent while the text is read."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .mixer import RecurrentMixer
from .norms import GATE_ACTIVATIONS, upcast
from .ops import ttt_linear, ttt_linear_expectation, ttt_mlp, ttt_mlp_expectation
from .rotary import rotate_interleaved


class JointLayerNorm(nn.LayerNorm):
    """LayerNorm (eps 1e-6) over all heads joined, of reads `[B, T, H, D]`, times an activation of their gate if any."""

    def __init__(self, size: int, activation: str):
        super().__init__(size, eps=1e-6)
        self.activation = activation

    def forward(self, reads: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        weight, bias = upcast(self.weight), upcast(self.bias)
        joined = F.layer_norm(upcast(reads.flatten(2)), self.normalized_shape, weight, bias, self.eps)
        normed = joined.to(reads.dtype).view_as(reads)
        return normed if gate is None else normed * GATE_ACTIVATIONS[self.activation](gate)


class TTTMixer(RecurrentMixer):
    """What `ttt_linear` and `ttt_mlp` share (Sun et al., 2024); parameters are those of the TTT reference layer.

    The inner learning rate of token s in head h is `ttt_base_lr * sigmoid(theta_h x_s + bias_h) / head_dim`. Keys and
    queries are rotated by their place in the mini-batch when the memory is read at the query; read through attention, the
    mean of keys has no place, and the memory sees them un-rotated.
    """

    reads_linearly = False
    default_base_lr: float
    operator = staticmethod(ttt_linear)
    expectation_operator = staticmethod(ttt_linear_expectation)

    def conv_kernel_dim(self, config) -> int | None:
        return config.ttt_conv_kernel_dim

    @property
    def gate_activation(self) -> str:
        return "gelu_tanh"

    def make_output_norm(self) -> nn.Module:
        return JointLayerNorm(self.num_reads * self.value_dim, self.gate_activation)

    def inner_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape per head of each inner weight."""
        raise NotImplementedError

    def build_memory(self) -> None:
        heads, config = self.num_states, self.config
        self.base_lr = self.default_base_lr if config.ttt_base_lr is None else config.ttt_base_lr
        for name, shape in self.inner_shapes().items():
            self.register_parameter(name, nn.Parameter(torch.zeros(heads, *shape, dtype=torch.float32)))
        self.learnable_ttt_lr_weight = nn.Parameter(torch.zeros(heads, 1, config.hidden_size, dtype=torch.float32))
        self.learnable_ttt_lr_bias = nn.Parameter(torch.zeros(heads, 1, dtype=torch.float32))
        self.learnable_token_idx = nn.Parameter(torch.zeros(config.ttt_mini_batch_size, dtype=torch.float32))
        if config.ttt_inner_norm:
            self.ttt_norm_weight = nn.Parameter(torch.ones(heads, self.value_dim, dtype=torch.float32))
            self.ttt_norm_bias = nn.Parameter(torch.zeros(heads, self.value_dim, dtype=torch.float32))

    def init_memory(self) -> None:
        std = self.config.initializer_range
        for name in self.inner_shapes():
            parameter = getattr(self, name)
            init.normal_(parameter, std=std) if name.startswith("W") else init.zeros_(parameter)
        init.normal_(self.learnable_ttt_lr_weight, std=std)
        init.zeros_(self.learnable_ttt_lr_bias)
        init.zeros_(self.learnable_token_idx)
        if self.config.ttt_inner_norm:
            init.ones_(self.ttt_norm_weight)
            init.zeros_(self.ttt_norm_bias)

    def gates(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden_states = upcast(hidden_states)
        weight, bias = self.learnable_ttt_lr_weight.squeeze(1), self.learnable_ttt_lr_bias.squeeze(1)
        rate = torch.sigmoid(F.linear(hidden_states, weight.to(hidden_states.dtype)) + bias.to(hidden_states.dtype))
        return {"eta": rate * (self.base_lr / self.key_dim)}

    def inner_arguments(self, num_reads: int, gates, states, lengths, output_states: bool) -> dict:
        """The op's arguments beside q, k and v; weights repeated where several reads share a state."""
        groups = num_reads // self.num_states
        weights = {name: getattr(self, name) for name in self.inner_shapes()}
        weights = {name: weight.squeeze(1) if name.startswith("b") else weight for name, weight in weights.items()}
        if self.config.ttt_inner_norm:
            weights |= {"ln_weight": self.ttt_norm_weight, "ln_bias": self.ttt_norm_bias}
        size = self.config.ttt_mini_batch_size
        steps = torch.arange(1, size + 1, device=self.learnable_token_idx.device)
        return {
            "eta": gates["eta"],
            "weights": {
                name: upcast(weight.repeat_interleave(groups, dim=0) if groups > 1 else weight)
                for name, weight in weights.items()
            },
            "mini_batch_size": size,
            "inner_norm": self.config.ttt_inner_norm,
            "token_scale": (1 / steps + upcast(self.learnable_token_idx)).clamp(min=0),
            "lengths": lengths,
            "initial_state": states or None,
            "output_final_state": output_states,
        }

    def advance(self, query, key, value, gates, states, lengths, output_states):
        if self.readout is None:
            steps = torch.arange(query.shape[1], device=query.device)
            place = (states["place"][:, None] if states else 0) + steps.expand(len(query), -1)
            place = place % self.config.ttt_mini_batch_size
            query, key = (rotate_interleaved(x, place, self.config.ttt_rope_theta) for x in (query, key))
        arguments = self.inner_arguments(query.shape[2], gates, states, lengths, output_states)
        reads, states = self.operator(query, key, value, **arguments)
        return reads, states or {}

    def advance_expectation(self, query, scored, memory_keys, key, value, gates, states, lengths, output_states):
        groups = self.num_reads // self.num_states
        scoring_key = self.readout.rotate(scored.keys, scored.positions)
        scoring_key, memory_keys = (x.repeat_interleave(groups, dim=2) for x in (scoring_key, memory_keys))
        reads, states = self.expectation_operator(
            self.readout.rotate(query, scored.query_positions),
            scoring_key,
            memory_keys,
            scored.visible(),
            key,
            value,
            scale=self.readout.head_dim**-0.5,
            **self.inner_arguments(query.shape[2], gates, states, lengths, output_states),
        )
        return reads, states or {}


class TTTLinearMixer(TTTMixer):
    """mu(x) = W1 x + b1."""

    default_base_lr = 1.0
    state_names = ("W1", "b1", "dW1", "db1", "place")

    def inner_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"W1": (self.key_dim, self.value_dim), "b1": (1, self.value_dim)}

    @property
    def reads_linearly(self) -> bool:
        return not self.config.ttt_inner_norm


class TTTMLPMixer(TTTMixer):
    """mu(x) = W2 gelu(W1 x + b1) + b2, with 4 head_dim hidden units."""

    default_base_lr = 0.1
    state_names = ("W1", "b1", "W2", "b2", "dW1", "db1", "dW2", "db2", "place")
    operator = staticmethod(ttt_mlp)
    expectation_operator = staticmethod(ttt_mlp_expectation)

    def inner_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden = 4 * self.key_dim
        return {
            "W1": (self.key_dim, hidden),
            "b1": (1, hidden),
            "W2": (hidden, self.value_dim),
            "b2": (1, self.value_dim),
        }
