# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Causal depthwise convolution over time, channels last."""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def causal_depthwise_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y_t = sum_j weight_j x_{t + j} per channel: the last of the kernel's K taps meets the present token.

    Args:
        x: `[B, K - 1 + T, C]`, the K - 1 inputs before the text first.
        weight: `[C, 1, K]`, in x's dtype.

    Returns:
        `[B, T, C]`.
    """
    if x.shape[1] == weight.shape[-1]:  # one token: a product and a sum cost less than a convolution's set-up
        return (x * weight.squeeze(1).T).sum(dim=1, keepdim=True)
    return _CausalDepthwiseConv.apply(x, weight)


class _CausalDepthwiseConv(torch.autograd.Function):
    """PyTorch's convolution with a backward pass of its own: the built-in one is several times slower on a CPU."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.conv1d(x.transpose(1, 2), weight, groups=weight.shape[0]).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        taps, length = weight.shape[-1], dy.shape[1]
        padded = F.pad(dy, (0, 0, taps - 1, taps - 1)).transpose(1, 2)
        dx = F.conv1d(padded, weight.flip(-1), groups=weight.shape[0]).transpose(1, 2)
        dweight = torch.stack([(dy * x[:, tap : tap + length]).sum((0, 1)) for tap in range(taps)], dim=-1)
        return dx, dweight.unsqueeze(1)
