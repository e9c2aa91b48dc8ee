# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Normalisations shared by the mixers and the decoder, and the precision they run in."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

L2_EPS = 1e-6  # under the root, as in flash-linear-attention
GATE_ACTIVATIONS = {"sigmoid": torch.sigmoid, "silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def upcast(x: torch.Tensor) -> torch.Tensor:
    """`x` in fp32, or as it is where it already has more."""
    return x if x.dtype == torch.float64 else x.float()


def inverse_length(x: torch.Tensor, size: int, eps: float) -> torch.Tensor:
    """1 / sqrt(|x|^2 / size + eps) over the last axis of an fp32 `x`, kept as an axis of one."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()


def normalise_backward(dnormed: torch.Tensor, normed: torch.Tensor, scale: torch.Tensor, size: int) -> torch.Tensor:
    """The gradient of x, where normed = x * scale and scale = inverse_length(x, size, eps); `normed` is overwritten."""
    along = torch.linalg.vecdot(dnormed, normed)[..., None].div_(size)
    return (dnormed - normed.mul_(along)).mul_(scale)


def is_step(x: torch.Tensor) -> bool:
    """Whether `x` `[B, T, ...]` is what a decoding step works on: one token a row, and no graph to keep.

    There PyTorch's fused norm wins, by calling less; over many tokens ours do. (Not for more than one: a pass that
    activation checkpointing repeats with a graph must round alike.)
    """
    return not torch.is_grad_enabled() and x.ndim > 2 and x.shape[1] == 1


def rms_norm_step(x: torch.Tensor, size: int, eps: float) -> torch.Tensor:
    """x / sqrt(|x|^2 / size + eps) over the last axis, without an autograd function around it."""
    dim = x.shape[-1]
    normed = F.rms_norm(upcast(x), (dim,), None, eps * size / dim)
    return (normed if size == dim else normed * (size / dim) ** 0.5).to(x.dtype)


class _Normalise(torch.autograd.Function):
    """x / sqrt(|x|^2 / size + eps), times a weight if there is one; of the forward pass it keeps one number a row."""

    @staticmethod
    def forward(ctx, x, weight, size, eps):
        wide = upcast(x)
        scale = inverse_length(wide, size, eps)
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
        return normalise_backward(dy, normed, scale, ctx.size).to(x.dtype), dweight, None, None


class _NormaliseAndGate(torch.autograd.Function):
    """weight * RMSNorm(x) * activation(gate); what lies between x, gate and the product is computed again backwards."""

    @staticmethod
    def forward(ctx, x, weight, gate, activation, eps):
        wide = upcast(x)
        scale = inverse_length(wide, x.shape[-1], eps)
        ctx.save_for_backward(x, weight, gate, scale)
        ctx.activation = activation
        y = (wide * scale).mul_(weight).mul_(GATE_ACTIVATIONS[activation](upcast(gate)))
        return y.to(torch.promote_types(x.dtype, gate.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, gate, scale = ctx.saved_tensors
        dy, normed, wide_gate = upcast(dy), upcast(x) * scale, upcast(gate)
        factor = GATE_ACTIVATIONS[ctx.activation](wide_gate)
        dfactor = dy * normed
        dweight = (dfactor * factor).flatten(0, -2).sum(0).to(weight.dtype)
        dfactor.mul_(weight)
        if ctx.activation == "sigmoid":
            dgate = torch.ops.aten.sigmoid_backward(dfactor, factor)
        else:
            dgate = torch.ops.aten.silu_backward(dfactor, wide_gate)
        dnormed = factor.mul_(dy).mul_(weight)
        dx = normalise_backward(dnormed, normed, scale, x.shape[-1])
        return dx.to(x.dtype), dweight, dgate.to(gate.dtype), None, None


class AvgPathRMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, computed in fp32 (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_step(x):
            return self.weight * rms_norm_step(x, x.shape[-1], self.eps)
        return _Normalise.apply(x, self.weight, x.shape[-1], self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class GatedRMSNorm(AvgPathRMSNorm):
    """RMSNorm of a layer's reads, times an activation of its output gate where there is one."""

    def __init__(self, size: int, eps: float, activation: str):
        super().__init__(size, eps)
        self.activation = activation

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """`x` and `gate` `[..., size]`."""
        if gate is None:
            return super().forward(x)
        if is_step(x):
            return super().forward(x) * GATE_ACTIVATIONS[self.activation](gate)
        return _NormaliseAndGate.apply(x, self.weight, gate, self.activation, self.eps)


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


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """`x` scaled to unit length over its last axis, in fp32; a zero vector stays zero."""
    return rms_norm_step(x, 1, L2_EPS) if is_step(x) else _Normalise.apply(x, None, 1, L2_EPS)
