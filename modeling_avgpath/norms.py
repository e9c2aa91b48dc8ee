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


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x` scaled to unit length over its last axis, in fp32; `eps` under the root keeps a zero vector zero."""
    scaled = upcast(x)
    return (scaled * torch.rsqrt(scaled.square().sum(dim=-1, keepdim=True) + eps)).to(x.dtype)
