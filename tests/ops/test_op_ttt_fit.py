"""The backward pass of `Fit` against numerical derivatives, for every form of the inner model and of its loss."""

import pytest
import torch

from modeling_avgpath import op_ttt_fit
from modeling_avgpath.op_ttt_fit import Fit

COUNT, MEMORIES, SIZE, DIM, HIDDEN = 5, 2, 3, 4, 6


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("output_weights", [True, False])
@pytest.mark.parametrize("segment_weights", [1, 200, 1 << 22])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("is_mlp", [False, True])
def test_gradients(is_mlp, has_norm, has_bias, segment_weights, output_weights, monkeypatch):
    monkeypatch.setattr(op_ttt_fit, "SEGMENT_WEIGHTS", segment_weights)
    torch.manual_seed(0)
    tokens = [leaf(COUNT, MEMORIES, SIZE, DIM) for _ in range(3)]
    coefficients = (0.3 * torch.rand(COUNT, MEMORIES, SIZE, SIZE, dtype=torch.float64)).tril().requires_grad_()
    rates = (0.3 * torch.rand(COUNT, MEMORIES, SIZE, 1, dtype=torch.float64)).requires_grad_()
    norm = [leaf(MEMORIES, 1, DIM) for _ in range(2)] if has_norm else [None, None]
    sizes = [(DIM, HIDDEN), (HIDDEN, DIM)] if is_mlp else [(DIM, DIM)]
    weights = [
        w for sides in sizes for w in (leaf(MEMORIES, *sides), leaf(MEMORIES, 1, sides[1]) if has_bias else None)
    ]
    inputs = [x for x in (*tokens, coefficients, rates, *norm, *weights) if x is not None]

    def run(*given):
        given = iter(given)
        arguments = [None if x is None else next(given) for x in (*tokens, coefficients, rates, *norm, *weights)]
        return tuple(x for x in Fit.apply(output_weights, *arguments) if x is not None)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
