"""The short convolution against PyTorch's own, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from modeling_avgpath.op_conv import causal_depthwise_conv


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 67])
def test_against_conv1d(taps, length):
    x = torch.randn(3, taps - 1 + length, 10, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 1, taps, dtype=torch.float64, requires_grad=True)
    expected = F.conv1d(x.transpose(1, 2), weight, groups=10).transpose(1, 2)
    actual = causal_depthwise_conv(x, weight)
    torch.testing.assert_close(actual, expected)
    gradient = torch.randn_like(expected)
    for got, wanted in zip(
        torch.autograd.grad(actual, (x, weight), gradient),
        torch.autograd.grad(expected, (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)
