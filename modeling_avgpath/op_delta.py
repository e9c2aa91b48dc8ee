# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The delta rule, with and without decay: one step of gradient descent on 1/2 |S^T k - v|^2 per token.

    S'_t = exp(g_t) S_{t-1},    S_t = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T,    o_t = scale * S_t^T q_t

Schlag et al. 2021 (arXiv:2102.11174); decay: Yang et al. 2025 (arXiv:2412.06464). Chunks are parallel over tokens by
the WY / UT transform of Yang et al. 2024 (arXiv:2406.06484): with D_ij the decay from token j to token i, d_i that from
the chunk's start to token i, and S the state before the chunk, the writes u_i = beta_i (v_i - S'_i^T k_i) solve

    (I + L) U = beta V - (beta d K) S,    L_ij = beta_i D_ij (k_i . k_j) for j < i,

so that U = Y - W S with Y, W independent of S, and the state after the chunk is linear in S. Three forms stand here:
chunk-parallel (`delta_rule`, `gated_delta_rule`), one token (`*_step`), and the float64 definition (`*_oracle`).
"""

import torch

from .op_common import (
    ChunkedRecurrence,
    ChunkRule,
    check_inputs,
    chunk_decays,
    chunk_decays_backward,
    compute_dtype,
    no_autocast,
    scan,
)
from .op_fla import fla_delta_rule, uses_kernel

CHUNK_SIZE = 64


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The delta rule with decay, chunk-parallel: time and memory grow linearly with T, forward and backward.

    Args:
        q, k: `[B, T, H, D_k]`, any floating dtype; k is expected L2-normalised by the caller.
        v: `[B, T, H, D_v]`.
        g: log-decay <= 0, `[B, T, H]`. A token with g = 0 and beta = 0 leaves the state as it is.
        beta: step size, `[B, T, H]`, in [0, 1], or in [0, 2] where negative eigenvalues are wanted.
        scale: factor on the output; None means D_k ** -0.5.
        initial_state: S_0, `[B, H, D_k, D_v]`; None means zeros. Differentiable.
        output_final_state: also return S_T. Differentiable.
        backend: "auto", "torch" or "fla" (Triton kernels; see op_fla).
    Returns:
        o `[B, T, H, D_v]` in v's dtype, and S_T `[B, H, D_k, D_v]` in float32, or None. float64 inputs are computed in
        float64, all others in float32.
    Raises:
        TypeError, ValueError: arguments that are no floating-point tensors, or whose shapes or devices do not agree.
    """
    _check("gated_delta_rule", q, k, v, {"g": g, "beta": beta}, initial_state)
    return _run(q, k, v, g, beta, scale, initial_state, output_final_state, backend)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`gated_delta_rule` without decay (g = 0); arguments, results and errors otherwise as there."""
    _check("delta_rule", q, k, v, {"beta": beta}, initial_state)
    return _run(q, k, v, None, beta, scale, initial_state, output_final_state, backend)


def _check(op, q, k, v, gates, initial_state, step=False):
    check_inputs(op, q, k, v, gates, {"initial_state": (initial_state, v)}, step)


def _run(q, k, v, g, beta, scale, initial_state, output_final_state, backend):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if uses_kernel("delta_rule" if g is None else "gated_delta_rule", backend, q, k, v):
        return fla_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state)
    if q.shape[1] == 1:
        gate = None if g is None else g[:, 0]
        o, state = _step(q[:, 0], k[:, 0], v[:, 0], gate, beta[:, 0], scale, initial_state)
        o = o.unsqueeze(1)
    else:
        o, state = ChunkedRecurrence.apply(_RULE, CHUNK_SIZE, q, k, v, g, beta, scale, initial_state)
    return o, state if output_final_state else None


def gated_delta_rule_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of `gated_delta_rule`: q, k `[B, H, D_k]`, v `[B, H, D_v]`, g, beta `[B, H]`.

    Returns o `[B, H, D_v]` and the new state; `initial_state` itself is left as it is. Raises as `gated_delta_rule`.
    """
    _check("gated_delta_rule_step", q, k, v, {"g": g, "beta": beta}, initial_state, step=True)
    return _step(q, k, v, g, beta, q.shape[-1] ** -0.5 if scale is None else scale, initial_state)


def delta_rule_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of `delta_rule`; see `gated_delta_rule_step`."""
    _check("delta_rule_step", q, k, v, {"beta": beta}, initial_state, step=True)
    return _step(q, k, v, None, beta, q.shape[-1] ** -0.5 if scale is None else scale, initial_state)


def _step(q, k, v, g, beta, scale, state):
    dtype = compute_dtype(q, k, v)
    with no_autocast(q):
        q_, k_, v_, beta_ = (x.to(dtype).unsqueeze(-2) for x in (q, k, v, beta.unsqueeze(-1)))  # [B, H, 1, D]
        if state is None:
            state = k_.mT @ (beta_ * v_)
        else:
            state = state.to(dtype)
            if g is not None:
                state = state * g.to(dtype).exp()[..., None, None]
            state = state + k_.mT @ (beta_ * (v_ - k_ @ state))
        o = (scale * q_ @ state).squeeze(-2)
    return o.to(v.dtype), state


def gated_delta_rule_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The definition, token by token in float64: arguments of `gated_delta_rule`, results in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, length, heads, dim = q.shape
    state = q.new_zeros(batch, heads, dim, v.shape[-1]) if initial_state is None else initial_state.double()
    outputs = []
    for t in range(length):
        state = g[:, t].exp()[..., None, None] * state
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state if output_final_state else None


def delta_rule_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The definition, token by token in float64: arguments of `delta_rule`, results in float64."""
    return gated_delta_rule_oracle(q, k, v, torch.zeros_like(beta), beta, scale, initial_state, output_final_state)


class _Chunks:
    """What a run of chunks needs both ways. q and beta k are handled as one block of 2 C rows: both meet the keys."""

    def __init__(self, q, k, v, g, beta, state):
        size, dim = k.shape[-2:]
        decays = chunk_decays(g)
        self.decays = decays
        self.rows = torch.cat([q, k * beta.unsqueeze(-1)], -2)  # [N, M, 2 C, D_k]
        self.pairs = (self.rows @ k.mT).unflatten(-2, (2, size)).mul_(decays.pair.unsqueeze(-3))  # [N, M, 2, C, C]
        self.attention, lower = self.pairs.unbind(-3)
        identity = torch.eye(size, dtype=k.dtype, device=k.device).expand_as(lower)
        self.inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)  # (I + L)^-1
        self.rows_start = (self.rows.unflatten(-2, (2, size)) * decays.start[..., None, :, None]).flatten(-3, -2)
        self.k_end = k * decays.end.unsqueeze(-1)

        right = torch.cat([self.rows_start[..., size:, :], v * beta.unsqueeze(-1)], -1)
        self.w, y = (self.inverse @ right).split([dim, v.shape[-1]], -1)
        # S <- (total - K_end^T W) S + K_end^T Y
        self.transition = (self.k_end.mT @ self.w).neg_()
        self.transition.diagonal(dim1=-2, dim2=-1).add_(decays.total.unsqueeze(-1))
        self.states = scan(self.transition, self.k_end.mT @ y, state)
        self.u = y - self.w @ self.states[:-1]


def _forward(q, k, v, g, beta, state):
    c = _Chunks(q, k, v, g, beta, state)
    return c.rows_start[..., : q.shape[-2], :] @ c.states[:-1] + c.attention @ c.u, c.states[-1]


def _backward(q, k, v, g, beta, state, do, d_state):
    c = _Chunks(q, k, v, g, beta, state)
    size = q.shape[-2]

    # The last state's gradient runs back through the same scan, transposed.
    du = c.attention.mT @ do
    d_states = scan(c.transition.mT, c.rows_start[..., :size, :].mT @ do - c.w.mT @ du, d_state, reverse=True)
    du += c.k_end @ d_states[1:]
    dw = c.inverse.mT @ du  # of the right-hand side beta V - (beta d K) S

    # do reaches the states and U through the rows of q; -dw does so through those of beta k.
    d_reads = torch.cat([do, -dw], -2)
    d_rows_start = d_reads @ c.states[:-1].mT
    d_pairs = (d_reads @ c.u.mT).unflatten(-2, (2, size))
    d_k_end = c.u @ d_states[1:].mT
    dg = chunk_decays_backward(
        (d_pairs * c.pairs).sum(-3).tril_(-1),
        (d_rows_start * c.rows_start).sum(-1).unflatten(-1, (2, size)).sum(-2),
        (d_k_end * c.k_end).sum(-1),
        (d_states[1:] * c.states[:-1]).sum((-1, -2)).mul_(c.decays.total),
    )
    d_pairs.mul_(c.decays.pair.unsqueeze(-3))
    d_pairs[..., 1, :, :].tril_(-1)
    d_pairs = d_pairs.flatten(-3, -2)
    d_rows = d_rows_start.unflatten(-2, (2, size)).mul_(c.decays.start[..., None, :, None]).flatten(-3, -2)
    d_rows += d_pairs @ k
    dq, dk_beta = d_rows.split(size, -2)
    dk = d_pairs.mT @ c.rows + d_k_end.mul_(c.decays.end.unsqueeze(-1)) + dk_beta * beta.unsqueeze(-1)
    dbeta = (dk_beta * k).sum(-1) + (dw * v).sum(-1)
    return dq, dk, dw * beta.unsqueeze(-1), dg, dbeta, d_states[0]


_RULE = ChunkRule(_forward, _backward)
