"""The backward pass of `Fit` against numerical derivatives, for every form of the inner model and of its loss."""

import pytest
import torch

from modeling_avgpath import op_ttt_fit
from modeling_avgpath.op_ttt_fit import Fit

COUNT, MEMORIES, SIZE, DIM, HIDDEN = 5, 2, 3, 4, 6


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("segment_weights", [1, 200, 1 << 22])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("is_mlp", [False, True])
def test_gradients(is_mlp, has_norm, has_bias, segment_weights, monkeypatch):
    monkeypatch.setattr(op_ttt_fit, "SEGMENT_WEIGHTS", segment_weights)
    torch.manual_seed(0)
    tokens = [leaf(COUNT, MEMORIES, SIZE, DIM) for _ in range(3)]
    coefficients = (0.3 * torch.rand(COUNT, MEMORIES, SIZE, SIZE, dtype=torch.float64)).tril().requires_grad_()
    rates = (0.3 * torch.rand(COUNT, MEMORIES, SIZE, 1, dtype=torch.float64)).requires_grad_()
    norm = [leaf(MEMORIES, 1, DIM) for _ in range(2)] if has_norm else [None, None]
    weights = [leaf(MEMORIES, DIM + has_bias, HIDDEN if is_mlp else DIM)]
    if is_mlp:
        weights.append(leaf(MEMORIES, HIDDEN + has_bias, DIM))
    inputs = [x for x in (*tokens, coefficients, rates, *norm, *weights) if x is not None]

    def run(*given):
        given = [*given[:5], *(() if has_norm else (None, None)), *given[5:]]
        return Fit.apply([has_bias] * len(weights), *given)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
