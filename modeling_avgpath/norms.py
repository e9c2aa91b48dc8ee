# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Normalisations shared by the mixers and the decoder, and the precision they run in."""

import torch
from torch import nn


def upcast(x: torch.Tensor) -> torch.Tensor:
    """`x` in fp32, or as it is where it already has more."""
    return x if x.dtype == torch.float64 else x.float()


class AvgPathRMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, computed in fp32 (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = upcast(x)
        normed = normed * torch.rsqrt(normed.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class JointRMSNorm(AvgPathRMSNorm):
    """RMSNorm over all heads joined, of `[B, T, H, D]`; the weight is `[H * D]`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(2)).view_as(x)


def make_qk_norms(config) -> tuple[AvgPathRMSNorm, AvgPathRMSNorm] | tuple[None, None]:
    """The norms of softmax-scored queries and keys that the config asks for."""
    if not config.use_qk_norm:
        return None, None
    eps = config.rms_norm_eps
    if config.qk_norm_type == "per_head":
        return AvgPathRMSNorm(config.head_dim, eps), AvgPathRMSNorm(config.head_dim, eps)
    query_size, key_size = (
        heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    return JointRMSNorm(query_size, eps), JointRMSNorm(key_size, eps)


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x` scaled to unit length over its last axis, in fp32; `eps` under the root keeps a zero vector zero."""
    scaled = upcast(x)
    return (scaled * torch.rsqrt(scaled.square().sum(dim=-1, keepdim=True) + eps)).to(x.dtype)
