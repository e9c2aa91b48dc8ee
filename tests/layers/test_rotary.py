"""The rotation of queries and keys against its definition by complex numbers, with its gradients."""

import pytest
import torch
from laws.cases import relative_error

from modeling_avgpath.rotary import rotate


def definition(x, angles):
    """Pair (i, i + R/2) as a complex number, times exp(i angle)."""
    half = angles.shape[-1]
    pairs = (
        torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    )
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1)


def angles_of(*shape):
    angles = torch.randn(*shape, dtype=torch.float64)
    doubled = torch.cat((angles, angles), dim=-1)
    return angles, doubled.cos(), doubled.sin()


@pytest.mark.parametrize("rotated", [8, 4])
def test_against_complex_numbers(rotated):
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    angles, cos, sin = angles_of(2, 5, rotated // 2)
    actual, expected = rotate(x, cos, sin), definition(x, angles)
    torch.testing.assert_close(actual, expected)
    with torch.no_grad():
        torch.testing.assert_close(rotate(x, cos, sin), expected)
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(actual, x, gradient), torch.autograd.grad(expected, x, gradient))
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, cos, sin), (x,))


def test_rounded_once():
    """bf16 projections meet fp32 angles under autocast."""
    x = torch.randn(2, 5, 3, 64).bfloat16().requires_grad_()
    angles, cos, sin = angles_of(2, 5, 32)
    y = rotate(x, cos.float(), sin.float())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), definition(x.double(), angles), rtol=2**-8, atol=1e-6)
    dx = torch.autograd.grad(y.float().square().sum(), x)[0]
    assert dx.dtype == torch.bfloat16 and relative_error(dx, 2 * x.double()) < 2**-6  # a rotation keeps lengths
