# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What the chunk-parallel operators share: input checks, precision, the chunk layout, decays inside a chunk.

Every operator cuts the sequence into chunks of C tokens. Inside a chunk all tokens are handled at once by matrix
products; from chunk to chunk a small state is carried. Tensors in chunk layout are `[N, M, C, ...]` with N chunks
(leading, so that one chunk of all heads is contiguous for the scan), M = batch * heads, and C tokens. Chunks are
grouped into segments, which are worked through one after the other: this bounds temporary memory and keeps the
working set in the cache.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

BACKENDS = ("auto", "torch", "fla")
SEGMENT_ROWS = {"cpu": 2**12}  # tokens * heads worked on at a time: on a CPU about what its cache holds
SEGMENT_ROWS_ELSEWHERE = 2**18


def check_backend(backend: str) -> None:
    """Raises ValueError unless `backend` is one that this package has; "auto" chooses by the tensors' device."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(map(repr, BACKENDS))}")


def check_inputs(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: dict[str, torch.Tensor],
    states: dict[str, tuple[torch.Tensor | None, torch.Tensor]],
    step: bool = False,
) -> None:
    """Checks the arguments of one operator before anything is computed.

    Args:
        op: name of the operator, for the messages.
        q, k, v: `[B, T, H, D_k]`, `[B, T, H, D_k]`, `[B, T, H, D_v]`; without T if `step`.
        gates: name -> `[B, T, H]`; without T if `step`.
        states: name -> (state or None, k or v), the state of shape `[B, H, D_k, last size of that k or v]`.
    Raises:
        TypeError: an argument is not a floating-point tensor.
        ValueError: a shape or device does not fit q, or the sequence is empty.
    """
    layout = "[batch, heads, dim]" if step else "[batch, time, heads, dim]"
    given_states = {name: state for name, (state, _) in states.items() if state is not None}
    for name, x in {"q": q, "k": k, "v": v, **gates, **given_states}.items():
        check_tensor(op, name, x, q.device if name != "q" else None)
    if q.dim() != (3 if step else 4):
        raise ValueError(f"{op}: q must be {layout}, got shape {list(q.shape)}")
    if not step and q.shape[1] == 0:
        raise ValueError(f"{op}: the sequence is empty (q has shape {list(q.shape)}); pass at least one token")
    if not q.shape[0] or not q.shape[-2]:
        raise ValueError(f"{op}: q has shape {list(q.shape)}; pass at least one row and one head")
    if k.shape != q.shape:
        raise ValueError(f"{op}: k must have the shape of q, {list(q.shape)}, got {list(k.shape)}; repeat shared heads")
    if v.shape[:-1] != q.shape[:-1]:
        raise ValueError(
            f"{op}: v must agree with q in all sizes but the last, {list(q.shape[:-1])}, got {list(v.shape)}; "
            "repeat shared heads"
        )
    for name, x in gates.items():
        if x.shape != q.shape[:-1]:
            raise ValueError(f"{op}: {name} must have shape {list(q.shape[:-1])}, got {list(x.shape)}")
    for name, x in given_states.items():
        expected = [q.shape[0], q.shape[-2], q.shape[-1], states[name][1].shape[-1]]
        if list(x.shape) != expected:
            raise ValueError(f"{op}: {name} must have shape {expected}, got {list(x.shape)}")


def check_tensor(op: str, name: str, x: torch.Tensor, device: torch.device | None = None) -> None:
    """Raises TypeError unless x is a floating-point tensor, ValueError if it is not on `device`."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        found = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{op}: {name} must be a floating-point tensor, got {found}")
    if device is not None and x.device != device:
        raise ValueError(f"{op}: {name} is on {x.device} but q is on {device}; move them to one device")


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """float32, whatever the inputs and autocast say; float64 if one of the inputs is float64."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def no_autocast(x: torch.Tensor) -> AbstractContextManager:
    """Context in which matrix products keep the precision of their operands."""
    device_type = x.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def segments(q: torch.Tensor, chunk_size: int) -> list[slice]:
    """Slices of q's time axis: each of whole chunks (the last one excepted), at least one chunk, as few as allowed."""
    batch, length, heads, _ = q.shape
    rows = SEGMENT_ROWS.get(q.device.type, SEGMENT_ROWS_ELSEWHERE)
    size = max(1, rows // (batch * heads * chunk_size)) * chunk_size
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def to_chunks(x: torch.Tensor, chunk_size: int, dtype: torch.dtype) -> torch.Tensor:
    """`[B, T, H, ...]` -> `[N, B * H, C, ...]` in `dtype`; a last short chunk is filled up with zeros.

    Zeros are no-ops for every operator: a zero log-decay keeps the state, and a zero step size writes nothing.
    """
    batch, length, heads, *rest = x.shape
    if pad := -length % chunk_size:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad))
    x = x.unflatten(1, (-1, chunk_size)).transpose(0, 1).transpose(2, 3)  # [N, B, H, C, ...]
    out = torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)
    return out.view(-1, batch * heads, chunk_size, *rest)


def from_chunks_(out: torch.Tensor, x: torch.Tensor) -> None:
    """Writes `[N, B * H, C, ...]` back into `out` `[B, T, H, ...]` of any dtype, dropping the filled-up tokens."""
    batch, length, heads, *rest = out.shape
    x = x.view(x.shape[0], batch, heads, *x.shape[2:]).transpose(2, 3).transpose(0, 1).flatten(1, 2)
    out.copy_(x[:, :length])


class Decays(NamedTuple):
    """The decay between points of a chunk: products of exp(g) over the tokens in between, all at most 1."""

    pair: torch.Tensor  # [N, M, C, C]: from just after token j to just after token i; 0 for j > i
    start: torch.Tensor  # [N, M, C]: from the chunk's start to just after token i
    end: torch.Tensor  # [N, M, C]: from just after token j to the chunk's end
    total: torch.Tensor  # [N, M]: over the whole chunk


def chunk_decays(g: torch.Tensor) -> Decays:
    """Decays of a chunk from its log-decays g `[N, M, C]`.

    Each pair's exponent is summed over its own tokens. (As a difference of two cumulative sums it would lose its
    digits behind a run of strong decay.) No positive number is ever exponentiated.
    """
    size = g.shape[-1]
    below = torch.ones(size, size, dtype=g.dtype, device=g.device).tril_(-1)
    pair = (g.unsqueeze(-1) * below).cumsum_(-2).exp_().tril_()
    start = g.cumsum(-1).exp_()
    return Decays(pair, start, pair[..., -1, :], start[..., -1])


def chunk_decays_backward(
    d_pair: torch.Tensor, d_start: torch.Tensor, d_end: torch.Tensor, d_total: torch.Tensor
) -> torch.Tensor:
    """Gradient of g `[N, M, C]` from the gradients of the four decays, each already multiplied by its decay.

    Token s decays the pairs j < s <= i, the reads at i >= s, the writes at j < s, and the chunk as a whole.
    `d_pair` must be zero on and above the diagonal.
    """
    reads = d_pair.sum(-1).sub_(d_pair.sum(-2)).add_(d_start)
    dg = reads.flip(-1).cumsum(-1).flip(-1)
    dg[..., 1:] += d_end[..., :-1].cumsum(-1)
    return dg.add_(d_total.unsqueeze(-1))


def scan(transition: torch.Tensor, updates: torch.Tensor, state: torch.Tensor, reverse: bool = False) -> torch.Tensor:
    """The states between chunks, `[N + 1, M, D_k, D_v]` in time order, of state <- transition state + update.

    Args:
        transition: per chunk a factor `[N, M]` or a matrix `[N, M, D_k, D_k]`.
        updates: `[N, M, D_k, D_v]`.
        state: `[M, D_k, D_v]`, the first of the states; the last one if `reverse`.
    """
    count = updates.shape[0]
    states = updates.new_empty(count + 1, *updates.shape[1:])
    states[count if reverse else 0] = state
    for n in reversed(range(count)) if reverse else range(count):
        old, new = (states[n + 1], states[n]) if reverse else (states[n], states[n + 1])
        if transition.dim() == 2:
            torch.addcmul(updates[n], transition[n, :, None, None], old, out=new)
        else:
            torch.baddbmm(updates[n], transition[n], old, out=new)
    return states


class ChunkRule(NamedTuple):
    """How one operator treats a run of chunks; tensors in chunk layout and in the dtype of the computation.

    forward(q, k, v, g, beta, state) -> (o, new state)
    backward(q, k, v, g, beta, state, do, d_new_state) -> (dq, dk, dv, dg, dbeta, d_state)
    """

    forward: Callable[..., tuple[torch.Tensor, ...]]
    backward: Callable[..., tuple[torch.Tensor, ...]]


class ChunkedRecurrence(torch.autograd.Function):
    """(o, final state) of a ChunkRule over a whole sequence, segment by segment.

    Saves the inputs and the state before each segment only; what happens inside a segment is computed again in the
    backward pass. The gradients are written out by hand, so results may be written into slices of one output.
    """

    @staticmethod
    def forward(ctx, rule, chunk_size, q, k, v, g, beta, scale, initial_state):
        size = min(chunk_size, q.shape[1])
        parts = segments(q, size)
        o = v.new_empty(v.shape)
        with no_autocast(q):
            state = first_state(initial_state, k, v, compute_dtype(q, k, v))
            starts = state.new_empty(len(parts), *state.shape)
            for start, part in zip(starts, parts, strict=True):
                start.copy_(state)
                o_, state = rule.forward(*chunk_inputs(part, size, q, k, v, g, beta, scale), state)
                from_chunks_(o[:, part], o_)
        ctx.save_for_backward(q, k, v, g, beta, starts)
        ctx.rule, ctx.scale, ctx.size, ctx.parts = rule, scale, size, parts
        return o, last_state(state, q)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, d_state):
        *inputs, starts = ctx.saved_tensors
        q, k, v, g, beta = inputs
        grads = [None if x is None else x.new_empty(x.shape) for x in inputs]
        d_state_ = d_state.to(starts.dtype).flatten(0, 1)
        with no_autocast(q):
            for start, part in zip(starts.flip(0), reversed(ctx.parts), strict=True):
                inputs_ = chunk_inputs(part, ctx.size, q, k, v, g, beta, ctx.scale)
                do_ = to_chunks(do[:, part], ctx.size, starts.dtype)
                *grads_, d_state_ = ctx.rule.backward(*inputs_, start, do_, d_state_)
                grads_[0].mul_(ctx.scale)
                for grad, grad_ in zip(grads, grads_, strict=True):
                    if grad is not None:
                        from_chunks_(grad[:, part], grad_)
        return None, None, *grads, None, d_state_.view(d_state.shape) if ctx.needs_input_grad[-1] else None


def first_state(state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`initial_state` `[B, H, D_k, D_v]` as `[M, D_k, D_v]` in `dtype`; zeros for None."""
    batch, _, heads, dim = k.shape
    if state is None:
        return k.new_zeros(batch * heads, dim, v.shape[-1], dtype=dtype)
    return state.to(dtype).flatten(0, 1)


def last_state(state: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`[M, D_k, D_v]` as `[B, H, D_k, D_v]`, in memory of its own."""
    return state.unflatten(0, (q.shape[0], q.shape[2])).clone(memory_format=torch.contiguous_format)


def chunk_inputs(
    part: slice,
    size: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    scale: float = 1.0,
) -> list[torch.Tensor]:
    """scale * q, k, v, g, beta of one segment in chunk layout; without decay g is 0, without step size beta is 1."""
    dtype = compute_dtype(q, k, v)
    q_, k_, v_ = (to_chunks(x[:, part], size, dtype) for x in (q, k, v))
    if scale != 1.0:
        q_.mul_(scale)
    g_ = q_.new_zeros(q_.shape[:-1]) if g is None else to_chunks(g[:, part], size, dtype)
    beta_ = q_.new_ones(q_.shape[:-1]) if beta is None else to_chunks(beta[:, part], size, dtype)
    return [q_, k_, v_, g_, beta_]
