# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The `fla` backend: flash-linear-attention's Triton kernels behind this package's operators.

An operator runs on its kernel when the tensors lie on a GPU that runs it and when the kernel computes that very function;
otherwise on the `torch` backend. flash-linear-attention is imported at the first call that needs it, never on a CPU.

What the kernels of release 0.6 take, and what is done here about it:

    all         q, k, v in bf16 or fp16 (the 32-bit ones multiply in TF32, which is no fp32), even head dims, at most 65,535
                rows times heads; gates and states go in, and states come out, in fp32 and in our layout [B, H, D_k, D_v]
    delta_rule, gated_delta_rule    D_k <= 256
    linear_attention    no step size: beta multiplies v beforehand
    mesa        D_k = D_v <= 128; q and k in fp16; exactly `max_cg_steps` steps of conjugate gradients without
                preconditioner or tolerance, on an H that is rounded to TF32. Keys that are nearly the same, remembered
                for long, make that H indefinite; so "auto" leaves this kernel alone. Its gradients pass through
                fp16: they are scaled on the way, for a mean over many tokens would underflow
    ttt_linear  D_k = D_v <= 64, mini-batches of 16, 32 or 64, a bias and the inner norm; one learning rate for all
                tokens of a row and head, because the kernel multiplies each gradient by the rate of the token that
                reads it, not of the token that made it. It reads z + LN(z), so its core is called, which returns
                z = mu(q), and q + LN(z) is formed here. Only whole mini-batches go through it. It gets fp32 copies, for
                in bf16 it would sum the norm's gradients over the sequence in bf16; hence the smaller limit of D
"""

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .op_common import check_backend, no_autocast

MIN_VERSION = (0, 6)
MAX_ROWS = 65_535  # batch * heads: the second dimension of a CUDA grid
GRADIENT_PEAK = -4  # log2 of the largest gradient that enters mesa's fp16: room above for sums over the sequence


class _Kernel(NamedTuple):
    """Where a kernel is found and which head dims it has."""

    module: str
    name: str
    max_dim: int | None = None
    square: bool = False  # D_k = D_v
    automatic: bool = True  # whether "auto" may choose it


KERNELS = {
    "delta_rule": _Kernel("fla.ops.delta_rule", "chunk_delta_rule", max_dim=256),
    "gated_delta_rule": _Kernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", max_dim=256),
    "linear_attention": _Kernel("fla.ops.simple_gla", "chunk_simple_gla"),
    "mesa": _Kernel("fla.ops.mesa_net", "chunk_mesa_net", max_dim=128, square=True, automatic=False),
    "ttt_linear": _Kernel("fla.ops.ttt.chunk", "ChunkTTTLinearFunction", max_dim=64, square=True),
}


def uses_kernel(
    op: str,
    backend: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    other_refusal: Callable[[], str | None] = lambda: None,
) -> bool:
    """Whether this call of `op` runs on its kernel.

    Args:
        op: name of the operator.
        backend: "auto" takes the kernel for two tokens or more, where it computes the same function; "torch" never does;
            "fla" insists.
        q, k, v: the operator's, already checked: `[B, T, H, D_k]`, `[B, T, H, D_k]`, `[B, T, H, D_v]`.
        other_refusal: called last; says why the kernel cannot do this call, or None.
    Raises:
        ValueError: an unknown backend, or backend="fla" where the kernel cannot do this call; the message says why.
    """
    check_backend(backend)
    if backend == "torch":
        return False
    if backend == "auto":
        # A compiled graph stays whole: the kernels would break it.
        if q.shape[1] == 1 or torch.compiler.is_compiling() or op in KERNELS and not KERNELS[op].automatic:
            return False
    reason = _refusal(op, q, k, v) or other_refusal()
    if reason is not None and backend == "fla":
        raise ValueError(f"{op}: backend must be 'auto' or 'torch' here, got 'fla': {reason}")
    return reason is None


def refuse_kernel(op: str, backend: str) -> None:
    """Raises ValueError for an unknown backend, and for backend="fla" in an operator that has no kernel."""
    check_backend(backend)
    if backend == "fla":
        raise ValueError(f"{op}: backend must be 'auto' or 'torch' here, got 'fla': {_no_kernel(op)}")


def _no_kernel(op: str) -> str:
    return f"flash-linear-attention has no kernel for {op}"


def _refusal(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why tensors like these cannot go through the kernel of `op`, or None. Imports nothing unless all else fits."""
    if op not in KERNELS:
        return _no_kernel(op)
    if not _device_runs_triton(q.device):
        return (
            f"the tensors are on {q.device}, and the kernels need an NVIDIA GPU of compute capability 8.0 or later or "
            "an AMD GPU"
        )
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return f"q, k and v must all be bfloat16 or all float16, got {q.dtype}, {k.dtype} and {v.dtype}"
    kernel, dims = KERNELS[op], (q.shape[-1], v.shape[-1])
    if any(dim % 2 for dim in dims):
        return f"the head dims must be even, got D_k={dims[0]} and D_v={dims[1]}"
    if kernel.square and dims[0] != dims[1]:
        return f"the key and value head dims must be equal, got D_k={dims[0]} and D_v={dims[1]}"
    if kernel.max_dim is not None and dims[0] > kernel.max_dim:
        return f"the key head dim must be at most {kernel.max_dim}, got D_k={dims[0]}"
    if q.shape[0] * q.shape[2] > MAX_ROWS:
        return f"batch * heads must be at most {MAX_ROWS:,}, got {q.shape[0]} * {q.shape[2]}"
    return _load(op)[1]


def _device_runs_triton(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _load(op: str) -> tuple[Callable | None, str | None]:
    """The kernel of `op`, or None and why there is none."""
    advice = f"install flash-linear-attention >= {'.'.join(map(str, MIN_VERSION))}"
    try:
        version = import_module("fla").__version__
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_VERSION:
            return None, f"flash-linear-attention {version} is too old; {advice}"
        return getattr(import_module(KERNELS[op].module), KERNELS[op].name), None
    except Exception as error:  # whatever is wrong with an optional package, "auto" still has the other backend
        found = f"{KERNELS[op].module}.{KERNELS[op].name} cannot be imported ({type(error).__name__}: {error})"
        return None, f"{found}; {advice}"


def _fp32(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.float()


def fla_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`gated_delta_rule` on its kernel, without g `delta_rule` on its own; shapes as there."""
    op, gates = ("delta_rule", {}) if g is None else ("gated_delta_rule", {"g": g.float()})
    return _run_chunks(op, q, k, v, {**gates, "beta": beta.float()}, scale, initial_state, output_final_state)


def fla_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    scale: float,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`linear_attention` on the kernel of simple gated linear attention; shapes as there."""
    if beta is not None:
        v = (v.float() * beta.float().unsqueeze(-1)).to(v.dtype)
    return _run_chunks("linear_attention", q, k, v, {"g": _fp32(g)}, scale, initial_state, output_final_state)


def _run_chunks(op, q, k, v, gates, scale, initial_state, output_final_state):
    kernel, _ = _load(op)
    return kernel(
        q=q,
        k=k,
        v=v,
        **gates,
        scale=scale,
        initial_state=_fp32(initial_state),
        output_final_state=output_final_state,
    )


def fla_mesa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    lamb: torch.Tensor,
    max_cg_steps: int,
    initial_state: tuple[torch.Tensor, torch.Tensor] | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """`mesa` on its kernel; shapes as there."""
    kernel, _ = _load("mesa")
    state_h, state_g = initial_state or (None, None)
    inputs = (q, k, v, *map(_fp32, (g, beta, lamb, state_h, state_g)))
    scale: list[torch.Tensor] = []
    q, k, v, g, beta, lamb, state_h, state_g = _DivideGradients.apply(scale, *inputs)
    o, state_h, state_g = kernel(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        lamb=lamb,
        h_kk_init=state_h,
        h_kv_init=state_g,
        output_final_state=output_final_state,
        max_CG_iteration=max_cg_steps,
    )
    o, state_h, state_g = _MultiplyGradients.apply(scale, o, state_h, state_g)
    return o, (state_h, state_g) if output_final_state else None


class _MultiplyGradients(torch.autograd.Function):
    """The outputs as they are; their gradients times the power of two that brings the largest to 2^GRADIENT_PEAK.

    `scale` holds that factor for `_DivideGradients` of the same call, which the backward pass reaches later.
    """

    @staticmethod
    def forward(ctx, scale, *outputs):
        ctx.scale = scale
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        peak = torch.stack([grad.abs().amax().float() for grad in grads if grad is not None]).amax()
        factor = torch.exp2(GRADIENT_PEAK - peak.log2().ceil())
        ctx.scale[:] = [torch.where(factor.isfinite() & (factor > 0), factor, 1)]
        return None, *(None if grad is None else grad * ctx.scale[0].to(grad.dtype) for grad in grads)


class _DivideGradients(torch.autograd.Function):
    """The inputs as they are; their gradients by the factor of `_MultiplyGradients`."""

    @staticmethod
    def forward(ctx, scale, *inputs):
        ctx.scale = scale
        return inputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, *(None if grad is None else grad / ctx.scale[0].to(grad.dtype) for grad in grads)


def ttt_refusal(
    weights: dict[str, torch.Tensor],
    eta: torch.Tensor,
    mini_batch_size: int,
    inner_norm: bool,
    lengths: torch.Tensor | None,
    initial_state: dict[str, torch.Tensor] | None,
) -> str | None:
    """Why a call of `ttt_linear` with these arguments is not what the kernel computes, or None."""
    if mini_batch_size not in (16, 32, 64):
        return f"mini_batch_size must be 16, 32 or 64, got {mini_batch_size}"
    if eta.shape[1] < mini_batch_size:
        return f"the {eta.shape[1]} tokens fill no mini-batch of {mini_batch_size}"
    if not inner_norm or "b1" not in weights:
        return "mu must have a bias b1 and the inner norm"
    if lengths is not None:
        return "rows that end at different lengths leave mini-batches unfinished; leave out lengths"
    if eta.stride(1) != 0 or (eta.requires_grad and eta.is_leaf):
        return (
            "the kernel multiplies each token's gradient by the learning rate of the token that reads it; eta must be "
            "the same for all tokens of a row and head, expanded over time: eta[:, :1].expand(-1, T, -1)"
        )
    # Asking the device stalls it, hence last.
    if initial_state is not None and initial_state["place"].any():
        return "the initial state is in the middle of a mini-batch"
    return None


def fla_ttt_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    eta: torch.Tensor,
    weights: dict[str, torch.Tensor],
    token_scale: torch.Tensor,
    norm_eps: float,
    state: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`ttt_linear` of whole mini-batches on its kernel; shapes as there, token_scale c_t `[C, 1]`, `state` at place 0."""
    kernel, _ = _load("ttt_linear")
    rate = eta[:, :1].float() * token_scale.repeat(q.shape[1] // len(token_scale), 1)  # c_t eta, [B, T, H]
    norm = weights["ln_weight"].float(), weights["ln_bias"].float()
    # In the order of the core's parameters, since an autograd function takes no names.
    arguments = {
        "q": q.float(),
        "k": k.float(),
        "v": v.float(),
        "w": norm[0],
        "b": norm[1],
        "chunk_size": len(token_scale),
        "eta": rate.unsqueeze(-1),
        "scale": 1.0,
        "eps": norm_eps,
        "initial_state": state["W1"].float(),
        "initial_state_bias": state["b1"].float().unsqueeze(2),
        "output_final_state": True,
        "cu_seqlens": None,
        "cu_seqlens_cpu": None,
    }
    mu, weight, bias = kernel.apply(*arguments.values())
    with no_autocast(q):
        reads = F.layer_norm(mu, q.shape[-1:], eps=norm_eps)
        o = (q.float() + norm[0] * reads + norm[1]).to(q.dtype)
    final = {"W1": weight, "b1": bias.squeeze(2)}
    pending = {f"d{name}": torch.zeros_like(x) for name, x in final.items()}
    return o, {**final, **pending, "place": torch.zeros_like(state["place"])}
