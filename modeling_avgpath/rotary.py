# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Rotary position embedding (Su et al., 2021) in the half-split layout of Transformers."""

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .norms import upcast


class AvgPathRotaryEmbedding(nn.Module):
    """Cosines and sines of the rotation at given positions, `[B, T, R]` each, for any rope type of the config.

    R is `head_dim`, or `partial_rotary_factor` (of the config's `rope_parameters`) times that.
    """

    inv_freq: torch.Tensor

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        if self.rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            known = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
            raise ValueError(f"Unknown rope_type {self.rope_type!r} in rope_parameters. Known: {known}.")
        initialise = (
            self.compute_default_rope_parameters if self.rope_type == "default" else ROPE_INIT_FUNCTIONS[self.rope_type]
        )
        inv_freq, self.attention_scaling = initialise(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config, device=None, seq_len=None, **kwargs) -> tuple[torch.Tensor, float]:
        """Inverse frequencies theta^(-2i / R), and the scaling of cosines and sines (none)."""
        size = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.float, device=device) / size
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float().to(x.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R channels of `x` `[B, T, H, D]` by the angles of `cos`, `sin` `[B, T, R]`; pairs: (i, i + R/2)."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    cos, sin = cos.unsqueeze(2), sin[..., : size // 2].unsqueeze(2)
    return _Rotation.apply(x, cos, sin) if torch.is_grad_enabled() else _rotate_pairs(x, cos, sin)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` `[B, T, H, R]` rotated; cos `[B, T, 1, R]`, sin `[B, T, 1, R / 2]`; rounded to x's dtype once, at the end."""
    first, second = x.chunk(2, dim=-1)
    y = x * cos
    y_first, y_second = y.chunk(2, dim=-1)
    y_first.addcmul_(second, sin, value=-1)
    y_second.addcmul_(first, sin)
    return y.to(x.dtype)


class _Rotation(torch.autograd.Function):
    """`_rotate_pairs`, with the rotation back as its gradient: fewer passes over memory than autograd's."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate_pairs(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(dy, cos, -sin), None, None


def rotate_interleaved(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate neighbouring pairs (2i, 2i + 1) of `x` `[B, T, H, D]` at `positions` `[B, T]`, in fp32."""
    size = x.shape[-1]
    inv_freq = theta ** (-torch.arange(0, size, 2, dtype=torch.float, device=x.device) / size)
    angles = positions[:, :, None, None].float() * inv_freq  # [B, T, 1, D / 2]
    even, odd = upcast(x).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
