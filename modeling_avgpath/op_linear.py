# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Linear attention with optional decay and step size: a decayed sum of outer products, read by the query.

    G_t = exp(g_t) G_{t-1} + beta_t k_t v_t^T,    o_t = scale * q_t G_t

Katharopoulos et al. 2020 (arXiv:2006.16236); the chunk-parallel form with decay is that of Yang et al. 2024
(arXiv:2312.06635). Three forms stand here: chunk-parallel (`linear_attention`), one token (`linear_attention_step`),
and the float64 definition (`linear_attention_oracle`). The functions of chunks also serve MesaNet.
"""

import torch

from .op_common import (
    ChunkedRecurrence,
    ChunkRule,
    Decays,
    check_inputs,
    chunk_decays,
    chunk_decays_backward,
    compute_dtype,
    no_autocast,
    scan,
)
from .op_fla import fla_linear_attention, uses_kernel

CHUNK_SIZE = 64


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal linear attention, chunk-parallel: time and memory grow linearly with T, forward and backward.

    Args:
        q, k: `[B, T, H, D_k]`, any floating dtype.
        v: `[B, T, H, D_v]`.
        g: log-decay <= 0, `[B, T, H]`; None means no decay.
        beta: step size, `[B, T, H]`; None means 1. A token with g = 0 and beta = 0 leaves the state as it is.
        scale: factor on the output; None means D_k ** -0.5.
        initial_state: G_0, `[B, H, D_k, D_v]`; None means zeros. Differentiable.
        output_final_state: also return G_T. Differentiable.
        backend: "auto", "torch" or "fla" (Triton kernels; see op_fla).
    Returns:
        o `[B, T, H, D_v]` in v's dtype, and G_T `[B, H, D_k, D_v]` in float32, or None. float64 inputs are computed in
        float64, all others in float32.
    Raises:
        TypeError, ValueError: arguments that are no floating-point tensors, or whose shapes or devices do not agree.
    """
    _check("linear_attention", q, k, v, g, beta, initial_state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if uses_kernel("linear_attention", backend, q, k, v):
        return fla_linear_attention(q, k, v, g, beta, scale, initial_state, output_final_state)
    if q.shape[1] == 1:
        gates = (x if x is None else x[:, 0] for x in (g, beta))
        o, state = _step(q[:, 0], k[:, 0], v[:, 0], *gates, scale, initial_state)
        o = o.unsqueeze(1)
    else:
        o, state = ChunkedRecurrence.apply(_RULE, CHUNK_SIZE, q, k, v, g, beta, scale, initial_state)
    return o, state if output_final_state else None


def linear_attention_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of `linear_attention`: q, k `[B, H, D_k]`, v `[B, H, D_v]`, g, beta `[B, H]`.

    Returns o `[B, H, D_v]` and the new state; `initial_state` itself is left as it is. Raises as `linear_attention`.
    """
    _check("linear_attention_step", q, k, v, g, beta, initial_state, step=True)
    return _step(q, k, v, g, beta, q.shape[-1] ** -0.5 if scale is None else scale, initial_state)


def _check(op, q, k, v, g, beta, initial_state, step=False):
    gates = {name: x for name, x in (("g", g), ("beta", beta)) if x is not None}
    check_inputs(op, q, k, v, gates, {"initial_state": (initial_state, v)}, step)


def _step(q, k, v, g, beta, scale, state):
    dtype = compute_dtype(q, k, v)
    with no_autocast(q):
        state = decayed_update(state, k.to(dtype), v.to(dtype), g, beta)
        o = (scale * q.to(dtype).unsqueeze(-2) @ state).squeeze(-2)
    return o.to(v.dtype), state


def decayed_update(
    state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None
) -> torch.Tensor:
    """exp(g) state + beta k v^T for one token: k `[B, H, D_k]`, v `[B, H, D_v]`, both in the dtype of the state."""
    if beta is not None:
        v = v * beta.to(v.dtype).unsqueeze(-1)
    update = k.unsqueeze(-1) * v.unsqueeze(-2)
    if state is None:
        return update
    state = state.to(update.dtype)
    if g is not None:
        state = state * g.to(update.dtype).exp()[..., None, None]
    return state + update


def linear_attention_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The definition, token by token in float64: arguments of `linear_attention`, results in float64."""
    q, k, v = q.double(), k.double(), v.double()
    g = torch.zeros_like(q[..., 0]) if g is None else g.double()
    beta = torch.ones_like(q[..., 0]) if beta is None else beta.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, length, heads, dim = q.shape
    state = q.new_zeros(batch, heads, dim, v.shape[-1]) if initial_state is None else initial_state.double()
    outputs = []
    for t in range(length):
        write = torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], v[:, t])
        state = g[:, t].exp()[..., None, None] * state + write
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state if output_final_state else None


def linear_states(k: torch.Tensor, w: torch.Tensor, decays: Decays, state: torch.Tensor) -> torch.Tensor:
    """States between chunks `[N + 1, M, D_k, D_v]`, given k `[N, M, C, D_k]` and w = beta v `[N, M, C, D_v]`."""
    return scan(decays.total, (k * decays.end.unsqueeze(-1)).mT @ w, state)


def linear_read(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, decays: Decays, states: torch.Tensor
) -> torch.Tensor:
    """What q `[N, M, C, D_k]` reads `[N, M, C, D_v]`: the state before its chunk, and the chunk up to its own token."""
    return (q * decays.start.unsqueeze(-1)) @ states[:-1] + ((q @ k.mT).mul_(decays.pair)) @ w


def linear_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decays: Decays,
    states: torch.Tensor,
    do: torch.Tensor,
    d_state: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v, g, beta and of the first state, given those of the reads `do` and of the last state."""
    start, end = decays.start.unsqueeze(-1), decays.end.unsqueeze(-1)
    w, q_start, k_end = v * beta.unsqueeze(-1), q * start, k * end
    attention = (q @ k.mT).mul_(decays.pair)
    d_states = scan(decays.total, q_start.mT @ do, d_state, reverse=True)

    dw = attention.mT @ do + k_end @ d_states[1:]
    d_attention = do @ w.mT
    dg = chunk_decays_backward(
        (d_attention * attention).tril_(-1),
        q_start.mul_(d_q_start := do @ states[:-1].mT).sum(-1),
        k_end.mul_(d_k_end := w @ d_states[1:].mT).sum(-1),
        (d_states[1:] * states[:-1]).sum((-1, -2)).mul_(decays.total),
    )
    d_attention.mul_(decays.pair)
    dq = d_attention @ k + d_q_start.mul_(start)
    dk = d_attention.mT @ q + d_k_end.mul_(end)
    dbeta = (dw * v).sum(-1)
    return dq, dk, dw.mul_(beta.unsqueeze(-1)), dg, dbeta, d_states[0]


def _forward(q, k, v, g, beta, state):
    decays = chunk_decays(g)
    w = v * beta.unsqueeze(-1)
    states = linear_states(k, w, decays, state)
    return linear_read(q, k, w, decays, states), states[-1]


def _backward(q, k, v, g, beta, state, do, d_state):
    decays = chunk_decays(g)
    states = linear_states(k, v * beta.unsqueeze(-1), decays, state)
    return linear_backward(q, k, v, beta, decays, states, do, d_state)


_RULE = ChunkRule(_forward, _backward)
