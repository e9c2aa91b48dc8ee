# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""MesaNet: values are read through the closed-form ridge regression of all values on all keys so far.

    G_t = exp(g_t) G_{t-1} + beta_t k_t v_t^T,    H_t = exp(g_t) H_{t-1} + beta_t k_t k_t^T,
    o_t = G_t^T y_t,    (H_t + diag(lamb)) y_t = q_t

von Oswald et al. 2025 (arXiv:2506.05233). The systems of all tokens are solved together by conjugate gradients: H_t
is never formed per token, since H_t x is a linear-attention read with query x, keys k and values k. Three forms stand
here: chunk-parallel (`mesa`), one token (`mesa_step`), and the float64 definition (`mesa_oracle`).
"""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from .op_common import (
    check_inputs,
    check_tensor,
    chunk_decays,
    chunk_inputs,
    compute_dtype,
    first_state,
    from_chunks_,
    last_state,
    no_autocast,
    segments,
    to_chunks,
)
from .op_fla import fla_mesa, uses_kernel
from .op_linear import decayed_update, linear_backward, linear_read, linear_states

CHUNK_SIZE = 64
# Where the preconditioner inverts the very matrix of the system, all that is left to solve is its rounding: 2 steps for
# 65,536 near-duplicate keys. A compiled graph runs them all.
DIRECT_SOLVE_STEPS = 4
MesaState = tuple[torch.Tensor, torch.Tensor]


def mesa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    lamb: torch.Tensor,
    max_cg_steps: int = 30,
    tolerance: float = 1e-6,
    initial_state: MesaState | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, MesaState | None]:
    """The mesa layer's read, chunk-parallel: time and memory grow linearly with T, forward and backward.

    Args:
        q, k: `[B, T, H, D_k]`, any floating dtype; both are expected L2-normalised by the caller.
        v: `[B, T, H, D_v]`.
        g: log-decay <= 0, `[B, T, H]`. A token with g = 0 and beta = 0 leaves the state as it is.
        beta: weight >= 0 of the token in the regression, `[B, T, H]`.
        lamb: ridge > 0 per channel, `[H, D_k]`.
        max_cg_steps: upper bound on the steps of the solver, forward and backward each.
        tolerance: a token's solve ends when its residual has fallen to this fraction of the right-hand side, both in
            the norm of the preconditioner.
        initial_state: (H_0 `[B, H, D_k, D_k]` symmetric, G_0 `[B, H, D_k, D_v]`); None means zeros. Differentiable.
        output_final_state: also return (H_T, G_T). Differentiable.
        backend: "auto" or "torch", which are one here, or "fla" (a Triton kernel without tolerance; see op_fla).
    Returns:
        o `[B, T, H, D_v]` in v's dtype, and (H_T, G_T) in float32, or None. float64 inputs are computed in float64, all
        others in float32.
    Raises:
        TypeError, ValueError: arguments that are no floating-point tensors, or whose shapes or devices do not agree.

    The systems are solved by conjugate gradients with one preconditioner a chunk, the inverse at the mean of the H
    before and after it. (Keys usually share a large mean; a diagonal preconditioner then needs over 100 steps.) At the
    default tolerance, outputs for random, near-duplicate, low-rank and badly scaled L2-normalised keys with lamb = 0.25
    agreed with the oracle to 2e-5 and gradients to 1e-4, within 30 steps; the error is in proportion to the tolerance
    until float32 ends it. The gradient is the implicit one, through one more solve with the same matrices.
    """
    _check("mesa", q, k, v, g, beta, lamb, max_cg_steps, tolerance, initial_state)
    if uses_kernel("mesa", backend, q, k, v):
        return fla_mesa(q, k, v, g, beta, lamb, max_cg_steps, initial_state, output_final_state)
    if q.shape[1] == 1:
        o, state = _step(*(x[:, 0] for x in (q, k, v, g, beta)), lamb, max_cg_steps, tolerance, initial_state)
        o = o.unsqueeze(1)
    else:
        o, *state = _Mesa.apply(q, k, v, g, beta, lamb, max_cg_steps, tolerance, *(initial_state or (None, None)))
    return o, tuple(state) if output_final_state else None


def _check(op, q, k, v, g, beta, lamb, max_cg_steps, tolerance, initial_state, step=False):
    if initial_state is None:
        initial_state = (None, None)
    elif (
        not isinstance(initial_state, tuple | list) or len(initial_state) != 2 or any(x is None for x in initial_state)
    ):
        raise TypeError(f"{op}: initial_state must be a pair (H, G) of tensors, got {type(initial_state).__name__}")
    states = {"initial_state[0]": (initial_state[0], k), "initial_state[1]": (initial_state[1], v)}
    check_inputs(op, q, k, v, {"g": g, "beta": beta}, states, step)
    check_tensor(op, "lamb", lamb, q.device)
    if list(lamb.shape) != [q.shape[-2], q.shape[-1]]:
        raise ValueError(f"{op}: lamb must have shape [heads, key dim] = {list(q.shape[-2:])}, got {list(lamb.shape)}")
    if max_cg_steps < 1:
        raise ValueError(f"{op}: max_cg_steps must be at least 1, got {max_cg_steps}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"{op}: tolerance must be in [0, 1), got {tolerance}")


def mesa_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    lamb: torch.Tensor,
    max_cg_steps: int = 30,
    tolerance: float = 1e-6,
    initial_state: MesaState | None = None,
) -> tuple[torch.Tensor, MesaState]:
    """One token of `mesa`: q, k `[B, H, D_k]`, v `[B, H, D_v]`, g, beta `[B, H]`, lamb `[H, D_k]`.

    Returns o `[B, H, D_v]` and the new (H, G); `initial_state` itself is left as it is. Raises as `mesa`.
    """
    _check("mesa_step", q, k, v, g, beta, lamb, max_cg_steps, tolerance, initial_state, step=True)
    return _step(q, k, v, g, beta, lamb, max_cg_steps, tolerance, initial_state)


def _step(q, k, v, g, beta, lamb, max_cg_steps, tolerance, initial_state):
    dtype = compute_dtype(q, k, v)
    old_h, old_g = initial_state or (None, None)
    with no_autocast(q):
        q_, k_, v_ = (x.to(dtype) for x in (q, k, v))
        new_h = decayed_update(old_h, k_, k_, g, beta)
        new_g = decayed_update(old_g, k_, v_, g, beta)
        y = _Solve.apply(new_h, lamb.to(dtype), q_, max_cg_steps, tolerance)
        o = (y.unsqueeze(-2) @ new_g).squeeze(-2)
    return o.to(v.dtype), (new_h, new_g)


def mesa_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    lamb: torch.Tensor,
    max_cg_steps: int = 30,
    tolerance: float = 1e-6,
    initial_state: MesaState | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, MesaState | None]:
    """The definition, token by token in float64 with a direct solve: arguments of `mesa`, results in float64.

    `max_cg_steps` and `tolerance` have no effect.
    """
    q, k, v, g, beta, lamb = (x.double() for x in (q, k, v, g, beta, lamb))
    batch, length, heads, dim = q.shape
    if initial_state is None:
        state_h, state_g = q.new_zeros(batch, heads, dim, dim), q.new_zeros(batch, heads, dim, v.shape[-1])
    else:
        state_h, state_g = (x.double() for x in initial_state)
    outputs = []
    for t in range(length):
        decay = g[:, t].exp()[..., None, None]
        state_h = decay * state_h + torch.einsum("bh,bhi,bhj->bhij", beta[:, t], k[:, t], k[:, t])
        state_g = decay * state_g + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], v[:, t])
        y = torch.linalg.solve(state_h + torch.diag_embed(lamb), q[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", y, state_g))
    return torch.stack(outputs, 1), (state_h, state_g) if output_final_state else None


def conjugate_gradients(
    matrix: Callable[[torch.Tensor], torch.Tensor],
    preconditioner: torch.Tensor,
    right: torch.Tensor,
    max_steps: int,
    tolerance: float,
) -> torch.Tensor:
    """Solves a symmetric positive definite system for every row at once.

    Args:
        matrix: x `[..., C, D]` -> A x, row by row; each row may have a matrix A of its own.
        preconditioner: `[..., D, D]`, symmetric positive definite, close to the inverses of the C matrices.
        right: right-hand sides `[..., C, D]`. A zero row gives a zero row.
        max_steps, tolerance: as in `mesa`. A row that has converged is no longer changed.
    """
    size = right.abs().amax(-1, keepdim=True)
    residual = right / torch.where(size > 0, size, 1)  # to unit size: no square can underflow or overflow
    x = torch.zeros_like(right)
    z = residual @ preconditioner
    p = z.clone()
    rz = (residual * z).sum(-1, keepdim=True)
    stop = rz * tolerance**2
    for _ in range(max_steps):
        active = rz > stop
        # Elsewhere the test would wait for the device, and it would break a compiled graph.
        if x.device.type == "cpu" and not torch.compiler.is_compiling() and not active.any():
            break
        ap = matrix(p)
        alpha = torch.where(active, rz / (p * ap).sum(-1, keepdim=True), 0)
        x.addcmul_(alpha, p)
        residual.addcmul_(alpha, ap, value=-1)
        z = residual @ preconditioner
        rz_new = (residual * z).sum(-1, keepdim=True)
        p.mul_(torch.where(active, rz_new / rz, 0)).add_(z)
        rz = torch.where(active, rz_new, rz)
    return x.mul_(size)


def ridge_inverse(h: torch.Tensor, lamb: torch.Tensor) -> torch.Tensor:
    """(h + diag(lamb))^-1 for symmetric h `[..., D, D]`, approximately: a preconditioner.

    Where h is so large that lamb is lost in its rounding, the sum may come out indefinite; a trace of h's largest entry
    on the diagonal prevents that.
    """
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    trace = h.shape[-1] * torch.finfo(h.dtype).eps * diagonal.amax(-1, keepdim=True)
    factor, _ = torch.linalg.cholesky_ex(h + torch.diag_embed(lamb + trace))
    identity = torch.eye(h.shape[-1], dtype=h.dtype, device=h.device).expand_as(h)
    root = torch.linalg.solve_triangular(factor, identity, upper=False)
    return root.mT @ root


class _Solve(torch.autograd.Function):
    """y with (H + diag(lamb)) y = q: H `[B, H, D, D]` symmetric, lamb `[H, D]`, q `[B, H, D]`."""

    @staticmethod
    def forward(ctx, state_h, lamb, q, max_cg_steps, tolerance):
        ctx.settings = max_cg_steps, tolerance
        y = _Solve.solve(state_h, lamb, q, max_cg_steps, tolerance)
        ctx.save_for_backward(state_h, lamb, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        state_h, lamb, y = ctx.saved_tensors
        z = _Solve.solve(state_h, lamb, dy, *ctx.settings)
        return -z.unsqueeze(-1) * y.unsqueeze(-2), -(z * y).sum(0), z, None, None

    @staticmethod
    def solve(state_h, lamb, right, max_cg_steps, tolerance):
        def matrix(x):
            return torch.addcmul(x @ state_h, lamb.unsqueeze(-2), x)

        with no_autocast(right):
            inverse = ridge_inverse(state_h, lamb)
            steps = min(max_cg_steps, DIRECT_SOLVE_STEPS)
            return conjugate_gradients(matrix, inverse, right.unsqueeze(-2), steps, tolerance).squeeze(-2)


def _solve_chunks(k, beta, lamb, decays, states_h, right, max_cg_steps, tolerance):
    """Solves (H_t + diag(lamb)) x_t = right_t for the tokens of all chunks, `[N, M, C, D_k]`; lamb `[M, D_k]`.

    The preconditioner is one matrix a chunk: the inverse at the mean of the H before and after the chunk. Keys usually
    share a large mean, against which a diagonal preconditioner is helpless.
    """
    size, dim = k.shape[-2:]
    # One product meets both what came before the chunk (H) and the chunk's own keys.
    operand = torch.cat([states_h[:-1], k.mT], -1)  # [N, M, D_k, D_k + C]
    weight = torch.cat([decays.start.unsqueeze(-1).expand(*k.shape), decays.pair * beta.unsqueeze(-2)], -1)
    lamb_row = lamb.unsqueeze(-2)

    def matrix(x):
        before, inside = (x @ operand).mul_(weight).split([dim, size], -1)
        return (before + inside @ k).addcmul_(lamb_row, x)

    preconditioner = ridge_inverse((states_h[:-1] + states_h[1:]) / 2, lamb)
    return conjugate_gradients(matrix, preconditioner, right, max_cg_steps, tolerance)


class _Mesa(torch.autograd.Function):
    """(o, H_T, G_T), segment by segment. Saves the inputs, y, and the states before each segment.

    With w_t = G_t do_t the gradient of y_t, and z_t = (H_t + diag(lamb))^-1 w_t, the loss has the gradients z_t for
    q_t, y_t do_t^T for G_t and -z_t y_t^T for H_t. The latter two are those of two linear-attention reads: of v by the
    queries y with output gradient do, and of k by the queries z with output gradient -y.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, lamb, max_cg_steps, tolerance, initial_h, initial_g):
        size = min(CHUNK_SIZE, q.shape[1])
        dtype = compute_dtype(q, k, v)
        parts = segments(q, size)
        o, y = v.new_empty(v.shape), q.new_empty(q.shape, dtype=dtype)
        with no_autocast(q):
            state_h, state_g = first_state(initial_h, k, k, dtype), first_state(initial_g, k, v, dtype)
            starts_h, starts_g = (x.new_empty(len(parts), *x.shape) for x in (state_h, state_g))
            lamb_ = lamb.to(dtype).repeat(q.shape[0], 1)  # [M, D_k]
            for start_h, start_g, part in zip(starts_h, starts_g, parts, strict=True):
                start_h.copy_(state_h)
                start_g.copy_(state_g)
                q_, k_, v_, g_, beta_ = chunk_inputs(part, size, q, k, v, g, beta)
                decays = chunk_decays(g_)
                k_beta, v_beta = k_ * beta_.unsqueeze(-1), v_ * beta_.unsqueeze(-1)
                states_h = linear_states(k_, k_beta, decays, state_h)
                states_g = linear_states(k_, v_beta, decays, state_g)
                y_ = _solve_chunks(k_, beta_, lamb_, decays, states_h, q_, max_cg_steps, tolerance)
                from_chunks_(y[:, part], y_)
                from_chunks_(o[:, part], linear_read(y_, k_, v_beta, decays, states_g))
                state_h, state_g = states_h[-1], states_g[-1]
        ctx.save_for_backward(q, k, v, g, beta, lamb, y, starts_h, starts_g)
        ctx.settings, ctx.size, ctx.parts = (max_cg_steps, tolerance), size, parts
        return o, last_state(state_h, q), last_state(state_g, q)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_h, d_g):
        q, k, v, g, beta, lamb, y, starts_h, starts_g = ctx.saved_tensors
        batch, dtype, size = q.shape[0], y.dtype, ctx.size
        grads = [x.new_empty(x.shape) for x in (q, k, v, g, beta)]
        lamb_ = lamb.to(dtype).repeat(batch, 1)
        d_lamb = torch.zeros_like(lamb_)
        d_state_h, d_state_g = (x.to(dtype).flatten(0, 1) for x in (d_h, d_g))
        with no_autocast(q):
            for start_h, start_g, part in zip(starts_h.flip(0), starts_g.flip(0), reversed(ctx.parts), strict=True):
                y_, k_, v_, g_, beta_ = chunk_inputs(part, size, y, k, v, g, beta)
                do_ = to_chunks(do[:, part], size, dtype)
                decays = chunk_decays(g_)
                states_h = linear_states(k_, k_ * beta_.unsqueeze(-1), decays, start_h)
                states_g = linear_states(k_, v_ * beta_.unsqueeze(-1), decays, start_g)
                dy, dk_, dv_, dg_, dbeta_, d_state_g = linear_backward(
                    y_, k_, v_, beta_, decays, states_g, do_, d_state_g
                )
                z = _solve_chunks(k_, beta_, lamb_, decays, states_h, dy, *ctx.settings)
                d_lamb -= (z * y_).sum((0, 2))
                _, dk_read, dk_write, dg_h, dbeta_h, d_state_h = linear_backward(
                    z, k_, k_, beta_, decays, states_h, -y_, d_state_h
                )
                parts_ = z, dk_ + dk_read + dk_write, dv_, dg_ + dg_h, dbeta_ + dbeta_h
                for grad, grad_ in zip(grads, parts_, strict=True):
                    from_chunks_(grad[:, part], grad_)
        d_lamb = d_lamb.unflatten(0, (batch, -1)).sum(0)
        d_states = [d_state_h.view(d_h.shape), d_state_g.view(d_g.shape)]
        d_states = [x if needed else None for x, needed in zip(d_states, ctx.needs_input_grad[-2:], strict=True)]
        return *grads, d_lamb, None, None, *d_states
