"""The norms' own backward passes against autograd through their definitions."""

import pytest
import torch
import torch.nn.functional as F
from laws.cases import relative_error

from modeling_avgpath.norms import AvgPathRMSNorm, GatedRMSNorm, l2_norm

ACTIVATIONS = {"sigmoid": torch.sigmoid, "silu": F.silu}


def definition(x, weight=None, gate=None, activation=None, size=None):
    y = x / (x.square().sum(-1, keepdim=True) / (size or x.shape[-1]) + 1e-6).sqrt()
    y = y if weight is None else y * weight
    return y if gate is None else y * ACTIVATIONS[activation](gate)


def gradients(y, *inputs):
    generator = torch.Generator().manual_seed(1)
    return torch.autograd.grad(y, inputs, torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_against_the_definitions(activation):
    x, gate = (torch.randn(2, 5, 3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    norm = GatedRMSNorm(7, 1e-6, activation).double()
    torch.nn.init.normal_(norm.weight)
    for actual, expected, inputs in (
        (norm(x, gate), definition(x, norm.weight, gate, activation), (x, norm.weight, gate)),
        (norm(x), definition(x, norm.weight), (x, norm.weight)),
        (l2_norm(x), definition(x, size=1), (x,)),
    ):
        torch.testing.assert_close(actual, expected)
        for ours, theirs in zip(gradients(actual, *inputs), gradients(expected, *inputs), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision(dtype, gate_dtype):
    """Reads in fp32 meet a gate in bf16 under autocast: the wider type wins, and each input gets its own back."""
    norm = GatedRMSNorm(64, 1e-6, "silu")
    x = torch.randn(2, 5, 3, 64).to(dtype).requires_grad_()
    gate = torch.randn(2, 5, 3, 64).to(gate_dtype).requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, norm.weight, gate)]
    actual, expected = norm(x, gate), definition(*exact, "silu")
    assert actual.dtype == torch.promote_types(dtype, gate_dtype)
    assert relative_error(actual, expected) < 2**-8
    for tensor, ours, theirs in zip(
        (x, norm.weight, gate), gradients(actual, x, norm.weight, gate), gradients(expected, *exact), strict=True
    ):
        assert ours.dtype == tensor.dtype and relative_error(ours, theirs) < 2**-7


def test_a_zero_vector_stays_zero():
    x = torch.zeros(1, 4, requires_grad=True)
    for y in (l2_norm(x), AvgPathRMSNorm(4)(x)):
        assert not y.any() and torch.autograd.grad(y.sum(), x)[0].isfinite().all()
