"""The short convolution against PyTorch's own, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from laws.cases import relative_error

from modeling_avgpath.op_conv import causal_conv_silu


def reference(x, weight, unit_size=None):
    y = F.silu(F.conv1d(x.transpose(1, 2), weight, groups=len(weight)).transpose(1, 2))
    if unit_size is None:
        return y
    heads = y.unflatten(-1, (-1, unit_size))
    return (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(2)


@pytest.mark.parametrize("unit_size", [None, 5])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 67])
def test_against_conv1d(taps, length, unit_size):
    x = torch.randn(3, taps - 1 + length, 10, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 1, taps, dtype=torch.float64, requires_grad=True)
    expected, actual = reference(x, weight, unit_size), causal_conv_silu(x, weight, unit_size)
    torch.testing.assert_close(actual, expected)
    gradient = torch.randn_like(expected)
    for got, wanted in zip(
        torch.autograd.grad(actual, (x, weight), gradient),
        torch.autograd.grad(expected, (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("unit_size", [None, 8])
@pytest.mark.parametrize("length", [1, 67])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_sums_are_taken_in_fp32(length, weight_dtype, unit_size):
    """Of bf16 inputs, with weights in bf16 or, as under autocast, in fp32: one rounding, of the result."""
    x = torch.randn(2, 3 + length, 16).bfloat16().requires_grad_()
    weight = torch.randn(16, 1, 4).to(weight_dtype).requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    actual, expected = causal_conv_silu(x, weight, unit_size), reference(*exact, unit_size)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-6)
    gradient = torch.randn_like(actual)
    got = torch.autograd.grad(actual, (x, weight), gradient)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    for tensor, ours, theirs in zip((x, weight), got, wanted, strict=True):
        assert ours.dtype == tensor.dtype and relative_error(ours, theirs) < 2**-8
