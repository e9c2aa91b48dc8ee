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
    check_backend,
    check_inputs,
    chunk_decays,
    chunk_inputs,
    compute_dtype,
    first_state,
    from_chunks_,
    no_autocast,
    segments,
    to_chunks,
)
from .op_linear import decayed_update, linear_backward, linear_read, linear_states

CHUNK_SIZE = 64
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
        initial_state: (H_0 `[B, H, D_k, D_k]`, G_0 `[B, H, D_k, D_v]`), H_0 symmetric; None means zeros. Differentiable.
        output_final_state: also return (H_T, G_T). Differentiable.
        backend: "auto" or "torch".
    Returns:
        o `[B, T, H, D_v]` in v's dtype, and (H_T, G_T) in float32, or None. float64 inputs are computed in float64, all
        others in float32.
    Raises:
        TypeError, ValueError: arguments that are no floating-point tensors, or whose shapes or devices do not agree.

    The gradient is the implicit one, through one more solve with the same matrices; it does not depend on the path the
    solver took.
    """
    check_backend(backend)
    _check("mesa", q, k, v, g, beta, lamb, max_cg_steps, tolerance, initial_state)
    if q.shape[1] == 1:
        o, state = _step(*(x[:, 0] for x in (q, k, v, g, beta)), lamb, max_cg_steps, tolerance, initial_state)
        o = o.unsqueeze(1)
    else:
        o, *state = _Mesa.apply(q, k, v, g, beta, lamb, max_cg_steps, tolerance, *(initial_state or (None, None)))
    return o, tuple(state) if output_final_state else None


def _check(op, q, k, v, g, beta, lamb, max_cg_steps, tolerance, initial_state, step=False):
    if initial_state is None:
        initial_state = (None, None)
    elif not isinstance(initial_state, (tuple, list)) or len(initial_state) != 2:
        raise TypeError(f"{op}: initial_state must be a pair (H, G) of tensors, got {type(initial_state).__name__}")
    dim = q.shape[-1]
    states = {"initial_state[0]": (initial_state[0], dim, dim), "initial_state[1]": (initial_state[1], dim, v.shape[-1])}
    check_inputs(op, q, k, v, {"g": g, "beta": beta}, states, step)
    if list(lamb.shape) != [q.shape[-2], dim]:
        raise ValueError(f"{op}: lamb must have shape [heads, key dim] = {[q.shape[-2], dim]}, got {list(lamb.shape)}")
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
    diagonal: torch.Tensor,
    right: torch.Tensor,
    max_steps: int,
    tolerance: float,
) -> torch.Tensor:
    """Solves one symmetric positive definite system per row, all rows at once, with the Jacobi preconditioner.

    Args:
        matrix: x `[..., D]` -> A x, row by row.
        diagonal: of A, `[..., D]`, positive.
        right: right-hand sides `[..., D]`. A zero row gives a zero row.
        max_steps, tolerance: as in `mesa`. A row that has converged is no longer changed.
    """
    size = right.abs().amax(-1, keepdim=True)
    residual = right / torch.where(size > 0, size, 1)  # to unit size: no sum of squares can underflow or overflow
    x = torch.zeros_like(right)
    z = residual / diagonal
    p = z.clone()
    rz = (residual * z).sum(-1, keepdim=True)
    stop = rz * tolerance**2
    for _ in range(max_steps):
        active = rz > stop
        if x.device.type == "cpu" and not active.any():  # elsewhere the test would wait for the device
            break
        ap = matrix(p)
        alpha = torch.where(active, rz / (p * ap).sum(-1, keepdim=True), 0)
        x.addcmul_(alpha, p)
        residual.addcmul_(alpha, ap, value=-1)
        z = residual / diagonal
        rz_new = (residual * z).sum(-1, keepdim=True)
        p = torch.where(active, torch.addcmul(z, rz_new / rz, p), 0)
        rz = torch.where(active, rz_new, rz)
    return x * size


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
            return torch.addcmul((x.unsqueeze(-2) @ state_h).squeeze(-2), lamb, x)

        with no_autocast(right):
            diagonal = state_h.diagonal(dim1=-2, dim2=-1) + lamb
            return conjugate_gradients(matrix, diagonal, right, max_cg_steps, tolerance)


def _solve_chunks(k, beta, lamb, decays, states_h, right, max_cg_steps, tolerance):
    """Solves (H_t + diag(lamb)) x_t = right_t for the tokens of all chunks, `[N, M, C, D_k]`; lamb `[M, D_k]`."""
    size, dim = k.shape[-2:]
    lamb = lamb.unsqueeze(-2)
    pair = decays.pair * beta.unsqueeze(-2)
    # One product meets both what came before the chunk (H) and the chunk's own keys.
    operand = torch.cat([states_h[:-1], k.mT], -1)  # [N, M, D_k, D_k + C]
    weight = torch.cat([decays.start.unsqueeze(-1).expand(*k.shape), pair], -1)  # [N, M, C, D_k + C]

    def matrix(x):
        before, inside = (x @ operand).mul_(weight).split([dim, size], -1)
        return torch.addcmul(before + inside @ k, lamb, x)

    before = states_h[:-1].diagonal(dim1=-2, dim2=-1).unsqueeze(-2) * decays.start.unsqueeze(-1)
    diagonal = before + pair @ k.square() + lamb
    return conjugate_gradients(matrix, diagonal, right, max_cg_steps, tolerance)


class _Mesa(torch.autograd.Function):
    """(o, H_T, G_T), segment by segment. Saves the inputs, y, and the states before each segment.

    With w_t = G_t do_t the gradient of y_t, and z_t = (H_t + diag(lamb))^-1 w_t, the loss has the gradients z_t for
    q_t, y_t do_t^T for G_t and -z_t y_t^T for H_t. The latter two are those of two linear-attention reads: of v by the
    queries y with output gradient do, and of k by the queries z with output gradient -y.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, lamb, max_cg_steps, tolerance, initial_h, initial_g):
        batch, length, heads, dim = q.shape
        size = min(CHUNK_SIZE, length)
        dtype = compute_dtype(q, k, v)
        parts = segments(batch * heads, length, size)
        o, y = v.new_empty(v.shape), q.new_empty(q.shape, dtype=dtype)
        starts_h, starts_g = [], []
        with no_autocast(q):
            state_h, state_g = first_state(initial_h, q, k, dtype), first_state(initial_g, q, v, dtype)
            lamb_ = lamb.to(dtype).repeat(batch, 1)  # [M, D_k]
            for part in parts:
                starts_h.append(state_h)
                starts_g.append(state_g)
                q_, k_, v_, g_, beta_ = chunk_inputs(part, size, q, k, v, g, beta)
                decays = chunk_decays(g_)
                k_beta, v_beta = k_ * beta_.unsqueeze(-1), v_ * beta_.unsqueeze(-1)
                states_h = linear_states(k_, k_beta, decays, state_h)
                states_g = linear_states(k_, v_beta, decays, state_g)
                y_ = _solve_chunks(k_, beta_, lamb_, decays, states_h, q_, max_cg_steps, tolerance)
                from_chunks_(y[:, part], y_)
                from_chunks_(o[:, part], linear_read(y_, k_, v_beta, decays, states_g))
                state_h, state_g = states_h[-1], states_g[-1]
        ctx.save_for_backward(q, k, v, g, beta, lamb, y, torch.stack(starts_h), torch.stack(starts_g))
        ctx.settings, ctx.size, ctx.parts = (max_cg_steps, tolerance), size, parts
        return o, *(x.reshape(batch, heads, dim, -1).clone() for x in (state_h, state_g))

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
            for start_h, start_g, part in zip(
                reversed(starts_h.unbind()), reversed(starts_g.unbind()), reversed(ctx.parts), strict=True
            ):
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
        d_initial = (d_state_h.view(d_h.shape), d_state_g.view(d_g.shape)) if any(ctx.needs_input_grad[-2:]) else (None, None)
        return *grads, d_lamb, None, None, *d_initial
