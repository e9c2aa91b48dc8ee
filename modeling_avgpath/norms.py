# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Normalisations shared by the mixers and the decoder, and the precision they run in."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable


def upcast(x: torch.Tensor) -> torch.Tensor:
    """`x` in fp32, or as it is where it already has more."""
    return x if x.dtype == torch.float64 else x.float()


class _Normalise(torch.autograd.Function):
    """x / sqrt(|x|^2 / size + eps), times a weight if there is one; of the forward pass it keeps one number a row."""

    @staticmethod
    def forward(ctx, x, weight, size, eps):
        wide = upcast(x)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.size = size
        normed = (wide * scale).to(x.dtype)
        return normed if weight is None else weight * normed

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        dy, normed, dweight = upcast(dy), upcast(x) * scale, None
        if weight is not None:
            dweight = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)
            dy = dy * weight
        along = torch.linalg.vecdot(dy, normed)[..., None].div_(ctx.size)
        dx = (dy - normed.mul_(along)).mul_(scale)
        return dx.to(x.dtype), dweight, None, None


class AvgPathRMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, computed in fp32 (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Normalise.apply(x, self.weight, x.shape[-1], self.eps)

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
    return _Normalise.apply(x, None, 1, eps)
