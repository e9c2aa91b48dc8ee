# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What AvgPath is measured against, each in the layout of `modeling_avgpath.ops`: `[B, T, H, D]` in and out.

In-tree: the PyTorch functions and models of Transformers. fla: flash-linear-attention's plain PyTorch functions, and on
a GPU its Triton kernels. The TTT reference form is written here, from the paper's formulas.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, OlmoHybridConfig, OlmoHybridForCausalLM, PreTrainedModel
from transformers.models.olmo_hybrid import modeling_olmo_hybrid

NORM_EPS = 1e-6
KERNEL_NAMES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def has_fla() -> bool:
    return importlib.util.find_spec("fla") is not None


# Operators


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, **gates) -> Tensor:
    """Causal `scaled_dot_product_attention`; gates, if given, play no part."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def in_tree_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None) -> Tensor:
    """The chunked PyTorch function of OLMo-Hybrid and Qwen3-Next, also where its name leads to a GPU kernel."""
    function = inspect.unwrap(modeling_olmo_hybrid.torch_chunk_gated_delta_rule)
    return function(q, k, v, torch.zeros_like(beta) if g is None else g, beta)[0]


def fla_plain_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    return naive_chunk_gated_delta_rule(q, k, v, g, beta)[0].to(v.dtype)


def fla_plain_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    from fla.ops.delta_rule.naive import delta_rule_chunkwise

    return delta_rule_chunkwise(*(x.transpose(1, 2).float() for x in (q, k, v, beta)))[0].transpose(1, 2).to(v.dtype)


def fla_plain_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla

    return naive_chunk_simple_gla(q, k * beta.unsqueeze(-1), v, g)[0].to(v.dtype)


def fla_plain_mesa(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lamb: Tensor) -> Tensor:
    """Always 30 steps of plain conjugate gradients, which autograd differentiates one by one."""
    from fla.ops.mesa_net.naive import naive_mesa_net_CG

    return naive_mesa_net_CG(q, k, v, g, lamb, beta, chunk_size=64, max_CG_iteration=30)[0].to(v.dtype)


def fla_kernel_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]


def fla_kernel_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    from fla.ops.delta_rule import chunk_delta_rule

    return chunk_delta_rule(q, k, v, beta=beta.to(v.dtype))[0]


def fla_kernel_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, (k * beta.unsqueeze(-1)).to(k.dtype), v, g=g)[0]


def fla_kernel_mesa(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lamb: Tensor) -> Tensor:
    from fla.ops.mesa_net import chunk_mesa_net

    return chunk_mesa_net(q, k, v, g, beta, lamb, max_CG_iteration=30)[0]


def ttt_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    weights: dict[str, Tensor],
    mini_batch_size: int = 16,
    token_scale: Tensor | None = None,
) -> Tensor:
    """TTT-Linear or TTT-MLP (by the weights given) as the paper's dual form reads, left to autograd.

    Mini-batches in sequence; inside one, with the gradient Z of the loss at every token's output and the masked rates
    A_ts = c_t eta_s (s <= t), token t reads x W_t + b_t = x W + b - (A * (x k^T)) Z - A Z, at each layer of the model.
    Arguments as in `modeling_avgpath.ops.ttt_linear` with the inner norm.
    """
    dtype = q.dtype
    q, k, v, eta = (x.float().transpose(1, 2) for x in (q, k, v, eta.unsqueeze(-1)))  # [B, H, T, *]
    if token_scale is None:
        token_scale = 1 / torch.arange(1, mini_batch_size + 1, device=q.device)
    ln_weight, ln_bias = (weights[name].unsqueeze(-2) for name in ("ln_weight", "ln_bias"))
    w1, b1 = weights["W1"], weights["b1"].unsqueeze(-2)
    is_mlp = "W2" in weights
    if is_mlp:
        w2, b2 = weights["W2"], weights["b2"].unsqueeze(-2)
    outputs = []
    for x_q, x_k, x_v, rate in zip(*(x.split(mini_batch_size, dim=2) for x in (q, k, v, eta)), strict=True):
        rates = token_scale[: x_q.shape[2], None] * rate.mT.expand(-1, -1, x_q.shape[2], -1)
        rates, last = rates.tril(), rates[..., -1, :, None]
        z1 = x_k @ w1 + b1
        if is_mlp:
            x2 = F.gelu(z1, approximate="tanh")
            grad2 = _layer_norm_loss_gradient(x2 @ w2 + b2, x_v - x_k, ln_weight, ln_bias)
            grad1 = grad2 @ w2.mT * _gelu_derivative(z1)
        else:
            grad1 = _layer_norm_loss_gradient(z1, x_v - x_k, ln_weight, ln_bias)
        read = x_q @ w1 + b1 - (rates * (x_q @ x_k.mT)) @ grad1 - rates @ grad1
        if is_mlp:
            read = F.gelu(read, approximate="tanh")
            read = read @ w2 + b2 - (rates * (read @ x2.mT)) @ grad2 - rates @ grad2
            w2, b2 = w2 - (last * x2).mT @ grad2, b2 - (last * grad2).sum(-2, keepdim=True)
        w1, b1 = w1 - (last * x_k).mT @ grad1, b1 - (last * grad1).sum(-2, keepdim=True)
        outputs.append(x_q + F.layer_norm(read, read.shape[-1:], eps=NORM_EPS) * ln_weight + ln_bias)
    return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype)


def _layer_norm_loss_gradient(z: Tensor, target: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Gradient of 1/2 |LN(z) - target|^2 with respect to z `[..., D]`."""
    std = torch.sqrt(z.var(-1, correction=0, keepdim=True) + NORM_EPS)
    z_hat = (z - z.mean(-1, keepdim=True)) / std
    grad = (weight * z_hat + bias - target) * weight
    return (grad - grad.mean(-1, keepdim=True) - z_hat * (grad * z_hat).mean(-1, keepdim=True)) / std


def _gelu_derivative(x: Tensor) -> Tensor:
    inner = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    return 0.5 * x * (1 - inner * inner) * (0.79788456 + 0.1070322243 * x * x) + 0.5 * (1 + inner)


# Models and layers


@contextmanager
def plain_functions(device: str) -> Iterator[None]:
    """On a CPU, the in-tree models run their PyTorch functions.

    Wherever flash-linear-attention imports, they take its GPU kernels, which a CPU cannot run.
    """
    names = {name: getattr(modeling_olmo_hybrid, name) for name in KERNEL_NAMES if device == "cpu"}
    for name, function in names.items():
        setattr(modeling_olmo_hybrid, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for name, function in names.items():
            setattr(modeling_olmo_hybrid, name, function)


def llama_config(shape: dict[str, int]) -> LlamaConfig:
    return LlamaConfig(**shape, attn_implementation="sdpa")


def olmo_hybrid_config(shape: dict[str, int]) -> OlmoHybridConfig:
    """Three gated delta layers to one softmax layer; heads of one size everywhere."""
    heads = shape["num_attention_heads"]
    dim = shape["hidden_size"] // heads
    return OlmoHybridConfig(
        **shape, num_key_value_heads=heads, linear_num_key_heads=heads, linear_num_value_heads=heads,
        linear_key_head_dim=dim, linear_value_head_dim=dim, attn_implementation="sdpa",
        pad_token_id=None, eos_token_id=None,
    )  # fmt: skip


MODELS: dict[str, Callable[[dict[str, int]], PreTrainedModel]] = {
    "Llama": lambda shape: LlamaForCausalLM(llama_config(shape)),
    "OLMo-Hybrid": lambda shape: OlmoHybridForCausalLM(olmo_hybrid_config(shape)),
}
