# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Test-time training of a linear map or a two-layer MLP: the `ttt_linear` and `ttt_mlp` operators.

The memory of a head is a small model mu_W(k) that is fitted to the pairs (k_s, v_s) while the sequence is read
(Sun et al., "Learning to (Learn at Test Time): RNNs with Expressive Hidden States", https://arxiv.org/abs/2407.04620).

    mu_W(x) = x W1 + b1                             ttt_linear
    mu_W(x) = gelu_tanh(x W1 + b1) W2 + b2          ttt_mlp

    inner_norm=True:   f_W(x) = x + LN(mu_W(x)),    loss_s(W) = 1/2 |LN(mu_W(k_s)) - (v_s - k_s)|^2
    inner_norm=False:  f_W(x) = mu_W(x),            loss_s(W) = 1/2 |mu_W(k_s) - v_s|^2

Tokens are taken in mini-batches of b. All gradients of a mini-batch are taken at the weights W_b that it began with, so
with learning rates eta_s and token scales c_0 .. c_{b-1} the token at place t of its mini-batch reads with

    W_t = W_b - c_t sum_{s <= t} eta_s grad loss_s(W_b),       o_t = f_{W_t}(q_t),

and the next mini-batch begins with the weights of this one's last token.

The same function has three forms here. The chunked one is the paper's dual form: inside a mini-batch the products with
W_t become attention-like products, so no W_t is formed and only the mini-batches are sequential. The step takes one
token per row. The oracle takes every token in turn in float64 and lets autograd differentiate the loss.
`ttt_linear_expectation` and `ttt_mlp_expectation` read the same memories by expectation, o_t = sum_i a_ti f_{W_t}(k_i).

Layout is [B, T, H, D] = [batch, time, heads, head dim]. A state is a dict of batch-first tensors, fp32 (float64 for
float64 inputs), in which every row of the batch is at its own phase:

    W1 [B, H, Dk, Dv], b1 [B, H, Dv]      the weights W_b at the start of the current mini-batch
    dW1, db1 (same shapes)                the sum of eta_s grad loss_s over the tokens of the unfinished mini-batch
    W2, b2, dW2, db2                      the second layer of `ttt_mlp`: W1 [B, H, Dk, M], W2 [B, H, M, Dv]
    place [B] int64                       the number of tokens already in the current mini-batch, 0 .. b-1
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .op_common import check_backend, check_tensor, no_autocast
from .op_fla import fla_ttt_linear, refuse_kernel, ttt_refusal, uses_kernel
from .op_ttt_fit import NORM_EPS, Fit, Layer, LossNorm, affine

__all__ = [
    "ttt_initial_state",
    "ttt_linear",
    "ttt_linear_expectation",
    "ttt_linear_oracle",
    "ttt_linear_step",
    "ttt_mlp",
    "ttt_mlp_expectation",
    "ttt_mlp_oracle",
    "ttt_mlp_step",
]

# The expectation readout takes the memory's positions in blocks. Elements of the largest tensor inside a block:
# measured best for a CPU's cache, and enough to fill an accelerator.
BLOCK_ELEMENTS = 1 << 21
ACCELERATOR_BLOCK_ELEMENTS = 1 << 25
MIN_BLOCK = 16  # positions


class _Training(NamedTuple):
    """How a memory is trained: the arguments, as given, that all forms share."""

    num_layers: int
    weights: dict[str, Tensor]
    mini_batch_size: int
    inner_norm: bool
    token_scale: Tensor | None
    lengths: Tensor | None

    def weight_names(self) -> list[str]:
        return _weight_names(self.num_layers, self.weights)

    def norm(self, batch: int, dtype: torch.dtype) -> LossNorm | None:
        if not self.inner_norm:
            return None
        parameters = (self.weights[name].to(dtype) for name in ("ln_weight", "ln_bias"))
        return LossNorm(*(x.expand(batch, *x.shape).flatten(0, 1).unsqueeze(1) for x in parameters))

    def scale(self, like: Tensor) -> Tensor:
        """c_t [C, 1] in the dtype and on the device of `like`."""
        scale = self.token_scale
        if scale is None:
            scale = 1 / torch.arange(1, self.mini_batch_size + 1, dtype=like.dtype, device=like.device)
        return scale.to(like.dtype).unsqueeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# The inner model: values, gradients, updates and reads of one mini-batch of C tokens, for R = B * H memories.
# ---------------------------------------------------------------------------------------------------------------------


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad * gelu_tanh'(x), as one kernel that autograd can differentiate again."""
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def _standardise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x - mean) / std over the last dimension, and 1 / std."""
    x = x - x.mean(-1, keepdim=True)
    inverse_std = torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)
    return x * inverse_std, inverse_std


def _loss_gradient(prediction: Tensor, target: Tensor, norm: LossNorm | None) -> Tensor:
    """Gradient of 1/2 |LN(z) - target|^2, without a norm 1/2 |z - target|^2, with respect to z = mu(k)."""
    if norm is None:
        return prediction - target
    x_hat, inverse_std = _standardise(prediction)
    grad = (torch.addcmul(norm.bias, norm.weight, x_hat) - target) * norm.weight
    grad = grad - grad.mean(-1, keepdim=True) - x_hat * (grad * x_hat).mean(-1, keepdim=True)
    return grad * inverse_std


def _inner_gradients(
    layers: list[Layer], k: Tensor, target: Tensor, norm: LossNorm | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The factors of every token's inner gradient, which is inputs_s^T grads_s for a weight and grads_s for a bias.

    k [R, C, Dk], target [R, C, Dv]; for each layer inputs [R, C, D_in] and grads [R, C, D_out].
    """
    inputs, outputs = [k], []
    for layer in layers[:-1]:
        outputs.append(affine(inputs[-1], layer))
        inputs.append(_gelu(outputs[-1]))
    grads = [_loss_gradient(affine(inputs[-1], layers[-1]), target, norm)]
    for layer, z in zip(layers[:0:-1], outputs[::-1], strict=True):
        grads.append(_gelu_gradient(torch.bmm(grads[-1], layer.weight.mT), z))
    return inputs, grads[::-1]


def _accumulate(layers: list[Layer], inputs: list[Tensor], grads: list[Tensor], rate: Tensor, sign: int) -> list[Layer]:
    """layers + sign * sum_s rate_s (gradient of token s), rate [R, C, 1]."""
    result = []
    for layer, x, grad in zip(layers, inputs, grads, strict=True):
        scaled = rate * grad
        weight = torch.baddbmm(layer.weight, x.mT, scaled, alpha=sign)
        bias = None if layer.bias is None else torch.add(layer.bias, scaled.sum(1, keepdim=True), alpha=sign)
        result.append(Layer(weight, bias))
    return result


def _map_layers(function: Callable[..., Tensor], *models: list[Layer]) -> list[Layer]:
    """`function` of the corresponding tensors of several models."""
    return [
        Layer(*(None if tensors[0] is None else function(*tensors) for tensors in zip(*layers, strict=True)))
        for layers in zip(*models, strict=True)
    ]


def _with_bias_input(products: Tensor, coefficients: Tensor, has_bias: bool) -> Tensor:
    """coefficients * (x·y + 1), the 1 being the product of the bias's constant inputs; without a bias x·y alone."""
    return torch.addcmul(coefficients, coefficients, products) if has_bias else coefficients * products


class _MiniBatch(NamedTuple):
    """Mini-batch `index` as a readout sees it: with these, W_t acts on any point without being formed."""

    index: int
    layers: list[Layer]  # W_b
    inputs: list[Tensor]  # of the layers, at the keys of the mini-batch: [R, C, D_in]
    grads: list[Tensor]  # [R, C, D_out]
    coefficients: Tensor  # c_t eta_s where s <= t, else 0: [R, C, C]
    token_scale: Tensor  # c_t: [C, 1]
    pending: list[Layer] | None  # the gradient sum that an earlier call left in this mini-batch


def _read_queries(part: _MiniBatch, q: Tensor, products: Tensor) -> Tensor:
    """mu_{W_t}(q_t): q [R, C, Dk], products q_t·k_s [R, C, C] -> [R, C, Dv]."""
    y = q
    for index, (layer, x, grad) in enumerate(zip(part.layers, part.inputs, part.grads, strict=True)):
        if index > 0:
            y = _gelu(y)
            products = torch.bmm(y, x.mT)
        attention = _with_bias_input(products, part.coefficients, layer.bias is not None)
        z = torch.baddbmm(affine(y, layer), attention, grad, alpha=-1)
        if part.pending is not None:
            z = z - part.token_scale * affine(y, part.pending[index])
        y = z
    return y


# ---------------------------------------------------------------------------------------------------------------------
# Arguments and states
# ---------------------------------------------------------------------------------------------------------------------


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _weight_names(num_layers: int, weights: dict[str, Tensor]) -> list[str]:
    """W1, b1, W2, b2, ..., without the biases that `weights` lacks."""
    names = [f"{kind}{index}" for index in range(1, num_layers + 1) for kind in "Wb"]
    return [name for name in names if name[0] == "W" or name in weights]


def _describe(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{type(x).__name__}"


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...], layout: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {layout} of shape {shape}, got {_describe(x)}.")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {layout} of shape {shape}, got {_describe(x)}.")


def _check_weights(training: _Training) -> tuple[int, int, int]:
    """Returns (H, Dk, Dv)."""
    num_layers, weights, inner_norm = training.num_layers, training.weights, training.inner_norm
    op = "ttt_linear" if num_layers == 1 else "ttt_mlp"
    matrices = [f"W{index}" for index in range(1, num_layers + 1)]
    required = matrices + ["ln_weight", "ln_bias"] * inner_norm
    missing = [name for name in required if name not in weights]
    if missing:
        raise ValueError(
            f"{op} with inner_norm={inner_norm} needs the weights {required}, but {missing} are missing; "
            f"given: {sorted(weights)}."
        )
    if num_layers == 1 and "W2" in weights:
        raise ValueError("ttt_linear trains W1 and b1 only, but weights also holds W2; call ttt_mlp for two layers.")
    for name in matrices:
        if weights[name].ndim != 3:
            raise ValueError(f"weights[{name!r}] must be [heads, in, out], got {_describe(weights[name])}.")
    heads, key_dim, width = weights["W1"].shape
    value_dim = weights[matrices[-1]].shape[-1]
    if inner_norm and key_dim != value_dim:
        raise ValueError(
            f"inner_norm=True adds mu(x) to x, so the key and value dims must be equal, got Dk={key_dim} and "
            f"Dv={value_dim}; use equal dims or inner_norm=False."
        )
    expected = {"b1": (heads, width)}
    if num_layers == 2:
        expected.update(W2=(heads, width, value_dim), b2=(heads, value_dim))
    if inner_norm:
        expected.update(ln_weight=(heads, value_dim), ln_bias=(heads, value_dim))
    for name, shape in expected.items():
        if name in weights:
            _check_shape(f"weights[{name!r}]", weights[name], shape, "[heads, *dims]")
    return heads, key_dim, value_dim


def _check_state(state: dict[str, Tensor], training: _Training, batch: int) -> None:
    names = training.weight_names()
    expected = {*names, *(f"d{name}" for name in names), "place"}
    if set(state) != expected:
        raise ValueError(
            f"The initial state must hold the tensors {sorted(expected)}, got {sorted(state)}; start from "
            "ttt_initial_state(weights, batch_size) or from the final state of an earlier call."
        )
    for name in names:
        shape = (batch, *training.weights[name].shape)
        for key in (name, f"d{name}"):
            _check_shape(f"initial_state[{key!r}]", state[key], shape, "[batch, heads, *dims]")
    _check_shape("initial_state['place']", state["place"], (batch,), "[batch]")


def _check_arguments(
    training: _Training,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    initial_state: dict[str, Tensor] | None,
    backend: str,
) -> None:
    """Raises before anything is computed."""
    check_backend(backend)
    size = training.mini_batch_size
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"mini_batch_size must be an int >= 1, got {size!r}.")
    if size < 1:
        raise ValueError(f"mini_batch_size must be >= 1, got {size}.")
    heads, key_dim, value_dim = _check_weights(training)
    if not isinstance(k, Tensor) or k.ndim != 4 or k.shape[1] == 0:
        raise ValueError(f"k must be a tensor [batch, time >= 1, heads, key dim], got {_describe(k)}.")
    batch, time = k.shape[:2]
    _check_shape("q", q, (batch, time, heads, key_dim), "[batch, time, heads, key dim]")
    _check_shape("k", k, (batch, time, heads, key_dim), "[batch, time, heads, key dim]")
    _check_shape("v", v, (batch, time, heads, value_dim), "[batch, time, heads, value dim]")
    if eta is None:
        raise ValueError("eta, the inner learning rate of every token [batch, time, heads], is required, got None.")
    _check_shape("eta", eta, (batch, time, heads), "[batch, time, heads]")
    for name, x in {"q": q, "k": k, "v": v, "eta": eta}.items():
        check_tensor("ttt", name, x)
    if training.token_scale is not None:
        _check_shape("token_scale", training.token_scale, (size,), "[mini_batch_size]")
    lengths = training.lengths
    if lengths is not None:
        _check_shape("lengths", lengths, (batch,), "[batch]")
        if lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise TypeError(f"lengths must be an integer tensor, got {lengths.dtype}.")
        # Reading values back from an accelerator would stall it; there they are clamped instead.
        if lengths.device.type == "cpu" and batch and (lengths.min() < 0 or lengths.max() > time):
            raise ValueError(f"lengths must lie between 0 and the {time} given tokens, got {lengths.tolist()}.")
    if initial_state is not None:
        _check_state(initial_state, training, batch)


def ttt_initial_state(
    weights: dict[str, Tensor], batch_size: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The state before the first token: every row has the learned weights, no gradients yet and place 0.

    Args:
        weights: W1 [H, Dk, Dv] and, where the model has it, b1 [H, Dv]; of an MLP W1 [H, Dk, M], b1 [H, M],
            W2 [H, M, Dv], b2 [H, Dv]. Other entries are ignored. Gradients flow back to the weights.
        batch_size: rows of the batch, >= 1.
        dtype: fp32, or float64 for a computation in float64.

    Returns:
        The state described at the top of this file.

    Raises:
        ValueError: batch_size < 1, or no W1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1, got {batch_size}.")
    if "W1" not in weights:
        raise ValueError(f"weights must hold W1, got {sorted(weights)}.")
    state = {}
    for name in _weight_names(2 if "W2" in weights else 1, weights):
        weight = weights[name].to(dtype)
        state[name] = weight.expand(batch_size, *weight.shape).clone()
        state[f"d{name}"] = torch.zeros_like(state[name])
    state["place"] = torch.zeros(batch_size, dtype=torch.int64, device=weights["W1"].device)
    return state


def _unpack_state(state: dict[str, Tensor], num_layers: int, dtype: torch.dtype) -> tuple[list[Layer], list[Layer]]:
    """The weights W_b and the gradient sums of a state, batch and heads joined."""

    def layer(prefix: str, index: int) -> Layer:
        weight, bias = state[f"{prefix}W{index}"], state.get(f"{prefix}b{index}")
        return Layer(
            weight.to(dtype).flatten(0, 1), None if bias is None else bias.to(dtype).flatten(0, 1).unsqueeze(1)
        )

    weights, pending = ([layer(prefix, index + 1) for index in range(num_layers)] for prefix in ("", "d"))
    return weights, pending


def _pack_state(layers: list[Layer], pending: list[Layer], place: Tensor) -> dict[str, Tensor]:
    """Inverse of `_unpack_state`."""
    state = {}
    batch = place.shape[0]
    for prefix, model in (("", layers), ("d", pending)):
        for index, layer in enumerate(model, start=1):
            state[f"{prefix}W{index}"] = layer.weight.unflatten(0, (batch, -1))
            if layer.bias is not None:
                state[f"{prefix}b{index}"] = layer.bias.squeeze(1).unflatten(0, (batch, -1))
    state["place"] = place
    return state


# ---------------------------------------------------------------------------------------------------------------------
# The chunked form
# ---------------------------------------------------------------------------------------------------------------------


class _Grid:
    """N mini-batches of C places, in which each row's tokens stand as its phase demands.

    Token t of row r stands at place `place[r] + t`. The other places hold zeros, learning rate included, and so do
    nothing. Everything is index arithmetic on the device.
    """

    def __init__(self, k: Tensor, mini_batch_size: int, place: Tensor | None, lengths: Tensor | None):
        self.batch, self.time = k.shape[:2]
        self.size = mini_batch_size
        self.carried = place is not None
        self.padded = lengths is not None
        # The host does not know the phases of a carried state, so the grid has room for the largest.
        slots = self.time + mini_batch_size - 1 if self.carried else self.time
        self.num = -(-slots // mini_batch_size)
        self.place = place if self.carried else torch.zeros(self.batch, dtype=torch.int64, device=k.device)
        self.lengths = lengths.clamp(0, self.time) if self.padded else torch.full_like(self.place, self.time)
        # Which token of row r stands at place j [B, N * C]; clamped where there is none.
        token = torch.arange(self.num * mini_batch_size, device=k.device) - self.place.unsqueeze(1)
        self.real = (token >= 0) & (token < self.lengths.unsqueeze(1))
        self.token = token.clamp(0, self.time - 1)

    @staticmethod
    def _take(x: Tensor, index: Tensor) -> Tensor:
        """x[r, index[r, j]]: x [B, T, *], index [B, J] -> [B, J, *]. The backward of `index_select` on rows is fast."""
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1) * x.shape[1]
        return x.flatten(0, 1).index_select(0, (rows + index).flatten()).unflatten(0, index.shape)

    def scatter(self, x: Tensor) -> Tensor:
        """[B, T, H, D] -> [N, R, C, D]."""
        if self.carried or self.padded:
            x = torch.where(self.real[:, :, None, None], self._take(x, self.token), 0)
        else:
            x = F.pad(x, (0, 0, 0, 0, 0, self.num * self.size - self.time))
        return x.unflatten(1, (self.num, self.size)).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()

    def gather(self, x: Tensor) -> Tensor:
        """[N, R, C, D] -> [B, T, H, D]."""
        x = x.unflatten(1, (self.batch, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        if not self.carried:
            return x[:, : self.time]
        return self._take(x, self.place.unsqueeze(1) + torch.arange(self.time, device=x.device))

    def completed(self, heads: int) -> Tensor:
        """[N, R, 1, 1] bool: the row has filled this mini-batch."""
        ends = torch.arange(1, self.num + 1, device=self.place.device) * self.size
        completed = self.place + self.lengths >= ends.unsqueeze(1)
        return completed.repeat_interleave(heads, 1)[:, :, None, None]

    def rates(self, eta: Tensor, token_scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From eta [N, R, C, 1]: the coefficients c_t eta_s where s <= t, else 0, [N, R, C, C]; the rates of the update of
        filled mini-batches and of the gradient sum of unfinished ones, [N, R, C, 1], 0 elsewhere; and which are filled
        [N, R, 1, 1].
        """
        completed = self.completed(eta.shape[1] // self.batch)
        causal = torch.ones(self.size, self.size, dtype=torch.bool, device=eta.device).tril()
        coefficients = torch.where(causal, token_scale * eta.mT, 0)
        return (
            coefficients,
            torch.where(completed, token_scale[-1] * eta, 0),
            torch.where(completed, 0, eta),
            completed,
        )

    def final_place(self) -> Tensor:
        return (self.place + self.lengths) % self.size

    def first_open(self) -> int:
        """The first mini-batch that a row can leave unfinished."""
        return 0 if self.padded else max(self.num - 1 - self.carried, 0)


def _scan(
    training: _Training,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    initial_state: dict[str, Tensor] | None,
    output_final_state: bool,
    dtype: torch.dtype,
    make_read: Callable[[_Grid, Tensor], Callable[[_MiniBatch], Tensor]],
    checkpoint_group_size: int,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """Trains the memories on k [B, T, H, Dk], v [B, T, H, Dv], eta [B, T, H]; returns the reads and the final state.

    `make_read(grid, keys [N, R, C, Dk])` prepares the function that reads [R, C, Dv] from a mini-batch; all reads come
    back as [B, T, H, Dv].
    """
    batch = k.shape[0]
    grid = _Grid(
        k, training.mini_batch_size, None if initial_state is None else initial_state["place"], training.lengths
    )
    k, v, eta = (grid.scatter(x.to(dtype)) for x in (k, v, eta.unsqueeze(-1)))  # [N, R, C, *]
    read = make_read(grid, k)
    norm, token_scale = training.norm(batch, dtype), training.scale(k)
    layers, pending = _unpack_state(
        ttt_initial_state(training.weights, batch, dtype) if initial_state is None else initial_state,
        training.num_layers,
        dtype,
    )

    # All that does not depend on the weights, for all mini-batches at once.
    *rates, completed = grid.rates(eta, token_scale)
    coefficients, update_rates, pending_rates = (x.unbind(0) for x in rates)
    keys, targets = k.unbind(0), (v if norm is None else v - k).unbind(0)

    def run(
        start: int, stop: int, layers: list[Layer], pending: list[Layer]
    ) -> tuple[list[Tensor], list[Layer], list[Layer]]:
        outputs = []
        for index in range(start, stop):
            carried = pending if index == 0 and grid.carried else None
            inputs, grads = _inner_gradients(layers, keys[index], targets[index], norm)
            outputs.append(read(_MiniBatch(index, layers, inputs, grads, coefficients[index], token_scale, carried)))
            if output_final_state or index < grid.num - 1:
                layers = _accumulate(layers, inputs, grads, update_rates[index], sign=-1)
                if carried is not None:
                    used = completed[0] * token_scale[-1]
                    layers = _map_layers(lambda w, dw, used=used: w - used * dw, layers, carried)
            if carried is not None and output_final_state:
                pending = _map_layers(lambda dw: torch.where(completed[0], 0, dw), carried)
            if index >= grid.first_open() and output_final_state:
                pending = _accumulate(pending, inputs, grads, pending_rates[index], sign=1)
        return outputs, layers, pending

    outputs = []
    recompute = checkpoint_group_size > 0 and torch.is_grad_enabled()
    group = checkpoint_group_size if recompute else grid.num
    for start in range(0, grid.num, group):
        arguments = (start, min(start + group, grid.num), layers, pending)
        if recompute:
            part, layers, pending = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            part, layers, pending = run(*arguments)
        outputs += part
    o = grid.gather(torch.stack(outputs))
    return o, _pack_state(layers, pending, grid.final_place()) if output_final_state else None


def _fit_from_start(
    training: _Training, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, output_final_state: bool, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """The reads mu_{W_t}(q_t) [B, T, H, Dv] of memories that begin with their learned weights, and the final state.

    Every mini-batch starts at its first place, so all of them go through `Fit`, which has a backward pass of its own.
    """
    batch, _, heads, _ = k.shape
    grid = _Grid(k, training.mini_batch_size, None, training.lengths)
    q, k, v, eta = (grid.scatter(x.to(dtype)) for x in (q, k, v, eta.unsqueeze(-1)))  # [N, R, C, *]
    norm, token_scale = training.norm(batch, dtype), training.scale(k)
    state = ttt_initial_state(training.weights, batch, dtype)
    layers, pending = _unpack_state(state, training.num_layers, dtype)
    coefficients, update_rates, pending_rates, _ = grid.rates(eta, token_scale)
    targets = v if norm is None else v - k
    reads, *final = Fit.apply(
        output_final_state,
        k,
        targets,
        q,
        coefficients,
        update_rates,
        *(norm or (None, None)),
        *(w for layer in layers for w in layer),
    )
    reads = grid.gather(reads)
    if not output_final_state:
        return reads, None
    layers = [Layer(*pair) for pair in zip(final[::2], final[1::2], strict=True)]
    # The mini-batch that a row has left unfinished began with the final weights.
    unfinished = (grid.lengths // grid.size).clamp(max=grid.num - 1).repeat_interleave(heads)
    k, targets, rates = (
        x[unfinished, torch.arange(len(unfinished), device=k.device)] for x in (k, targets, pending_rates)
    )
    pending = _accumulate(pending, *_inner_gradients(layers, k, targets, norm), rates, sign=1)
    return reads, _pack_state(layers, pending, grid.final_place())


def _ttt(
    training: _Training,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    initial_state: dict[str, Tensor] | None,
    output_final_state: bool,
    backend: str,
    checkpoint_group_size: int,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    _check_arguments(training, q, k, v, eta, initial_state, backend)
    if checkpoint_group_size < 0:
        raise ValueError(f"checkpoint_group_size must be >= 0 (0 = off), got {checkpoint_group_size}.")
    num_layers, weights, size, inner_norm, _, lengths = training
    op = "ttt_linear" if num_layers == 1 else "ttt_mlp"
    if uses_kernel(op, backend, q, k, v, lambda: ttt_refusal(weights, eta, size, inner_norm, lengths, initial_state)):
        state = ttt_initial_state(weights, q.shape[0]) if initial_state is None else initial_state
        whole = q.shape[1] - q.shape[1] % size
        scale = training.scale(eta.float())
        o, state = fla_ttt_linear(*(x[:, :whole] for x in (q, k, v, eta)), weights, scale, NORM_EPS, state)
        if whole < q.shape[1]:
            rest = (x[:, whole:] for x in (q, k, v, eta))
            rest, state = _ttt(training, *rest, state, output_final_state, "torch", checkpoint_group_size)
            o = torch.cat([o, rest], 1)
        return o, state if output_final_state else None
    dtype = _compute_dtype(q, k, v)
    with no_autocast(q):
        if k.shape[1] == 1:
            layers, state = _train_step(training, k, v, eta, initial_state, dtype)
            mu = affine(q.to(dtype).reshape(-1, 1, q.shape[-1]), layers[0])  # [R, 1, D_out]
            for layer in layers[1:]:
                mu = affine(_gelu(mu), layer)
            mu = mu.view(v.shape)
        elif initial_state is None:
            mu, state = _fit_from_start(training, q, k, v, eta, output_final_state, dtype)
        else:

            def make_read(grid: _Grid, keys: Tensor) -> Callable[[_MiniBatch], Tensor]:
                queries = grid.scatter(q.to(dtype))
                products = torch.matmul(queries, keys.mT).unbind(0)  # N x [R, C, C]
                queries = queries.unbind(0)
                return lambda part: _read_queries(part, queries[part.index], products[part.index])

            mu, state = _scan(
                training, k, v, eta, initial_state, output_final_state, dtype, make_read, checkpoint_group_size
            )
        o = mu
        if training.inner_norm:
            weight, bias = (training.weights[name].to(dtype) for name in ("ln_weight", "ln_bias"))  # [H, Dv]
            o = q.to(dtype) + torch.addcmul(bias, weight, _standardise(mu)[0])
    return o.to(q.dtype), state if output_final_state else None


# ---------------------------------------------------------------------------------------------------------------------
# One token
# ---------------------------------------------------------------------------------------------------------------------


def _train_step(
    training: _Training, k: Tensor, v: Tensor, eta: Tensor, state: dict[str, Tensor] | None, dtype: torch.dtype
) -> tuple[list[Layer], dict[str, Tensor]]:
    """Trains on one token, k [B, 1, H, Dk], v [B, 1, H, Dv], eta [B, 1, H]; returns its W_t and the new state."""
    batch, _, heads, _ = k.shape
    if state is None:
        state = ttt_initial_state(training.weights, batch, dtype)
    layers, pending = _unpack_state(state, training.num_layers, dtype)
    norm = training.norm(batch, dtype)
    keys, values = (x.to(dtype).squeeze(1).flatten(0, 1).unsqueeze(1) for x in (k, v))  # [R, 1, D]
    rate = eta.to(dtype).squeeze(1)  # [B, H]
    count = 1
    if training.lengths is not None:
        count = training.lengths.clamp(0, 1)
        rate = torch.where(count.bool().unsqueeze(1), rate, 0)
    filled = state["place"] + count
    scale, completed = (
        x.repeat_interleave(heads)[:, None, None]  # [R, 1, 1]
        for x in (training.scale(keys)[:, 0][state["place"]], filled == training.mini_batch_size)
    )
    inputs, grads = _inner_gradients(layers, keys, values if norm is None else values - keys, norm)
    pending = _accumulate(pending, inputs, grads, rate.reshape(-1, 1, 1), sign=1)
    current = _map_layers(lambda w, dw: w - scale * dw, layers, pending)
    layers = _map_layers(lambda new, old: torch.where(completed, new, old), current, layers)
    pending = _map_layers(lambda dw: torch.where(completed, 0, dw), pending)
    return current, _pack_state(layers, pending, filled % training.mini_batch_size)


def _ttt_step(
    training: _Training, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, state: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise ValueError(f"{name} of a one-token step must be a tensor [batch, heads, dim], got {_describe(x)}.")
    if not isinstance(eta, Tensor) or eta.ndim != 2:
        raise ValueError(f"eta of a one-token step must be a tensor [batch, heads], got {_describe(eta)}.")
    token = (x.unsqueeze(1) for x in (q, k, v, eta))
    o, state = _ttt(training, *token, state, output_final_state=True, backend="auto", checkpoint_group_size=0)
    return o.squeeze(1), state


# ---------------------------------------------------------------------------------------------------------------------
# Reading by expectation
# ---------------------------------------------------------------------------------------------------------------------


class _Positions(NamedTuple):
    """The S positions of the memory that an expectation runs over."""

    scoring_k: Tensor  # [R, S, E]
    keys: Tensor  # [R, S, Dk]
    scale: float
    norm: LossNorm | None
    block: int  # positions evaluated at once


def _mu_at_tokens(layers: list[Layer], part: _MiniBatch | None, points: Tensor) -> Tensor:
    """mu_{W_t}(points_i) for every token t of a mini-batch: points [R, S, Dk] -> [R, C, S, Dv].

    Without `part`, the layers are those of the only token that reads, and C = 1.
    """
    y = points.unsqueeze(1)  # [R, 1, S, Dk]: the points are the same for all tokens until W_t has acted on them
    for index, layer in enumerate(layers):
        if index > 0:
            y = _gelu(y)
        tokens = y.shape[1]
        flat = y.flatten(1, 2)
        y = affine(flat, layer).unflatten(1, (tokens, -1))
        if part is not None:
            products = torch.bmm(flat, part.inputs[index].mT).unflatten(1, (tokens, -1))  # [R, 1 or C, S, C]
            attention = _with_bias_input(products, part.coefficients.unsqueeze(2), layer.bias is not None)
            y = y - torch.bmm(attention.flatten(1, 2), part.grads[index]).view(*attention.shape[:3], -1)
            if part.pending is not None:
                carried = affine(flat, part.pending[index]).unflatten(1, (tokens, -1))
                y = y - part.token_scale.unsqueeze(-1) * carried
    return y


def _masked_scores(scoring_q: Tensor, scoring_k: Tensor, scale: float, allowed: Tensor) -> Tensor:
    """Scores [R, C, S], -inf where `allowed` [B, C, S] is False."""
    scores = torch.bmm(scoring_q * scale, scoring_k.mT).unflatten(0, (allowed.shape[0], -1))
    return scores.masked_fill(~allowed.unsqueeze(1), float("-inf")).flatten(0, 1)


def _expectation_block(
    positions: _Positions,
    start: int,
    stop: int,
    scoring_q: Tensor,
    allowed: Tensor,
    peak: Tensor,
    layers: list[Layer],
    part: _MiniBatch | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over the positions start .. stop - 1 of p_ti, of p_ti mu and of p_ti k_i, p_ti = exp(score_ti - peak_t).

    With a norm, mu stands for the standardised mu: the norm's weight and bias wait until all blocks are summed.
    """
    points = positions.keys[:, start:stop]
    scores = _masked_scores(scoring_q, positions.scoring_k[:, start:stop], positions.scale, allowed[:, :, start:stop])
    p = torch.exp(scores - peak)  # [R, C, S of the block]
    mu = _mu_at_tokens(layers, part, points)  # [R, C, S of the block, Dv]
    weight = p
    if positions.norm is not None:
        mu = mu - mu.mean(-1, keepdim=True)
        weight = p * torch.rsqrt(mu.square().mean(-1) + NORM_EPS)
    return p.sum(-1, keepdim=True), torch.matmul(weight.unsqueeze(2), mu).squeeze(2), torch.bmm(p, points)


def _read_expectation(
    positions: _Positions, scoring_q: Tensor, allowed: Tensor, layers: list[Layer], part: _MiniBatch | None
) -> Tensor:
    """sum_i a_ti f_{W_t}(k_i) [R, C, Dv] over the first positions, as many as `allowed` [B, C, S] has."""
    num = allowed.shape[-1]
    with torch.no_grad():
        # Any finite shift gives the same softmax, so no gradient passes through the peak.
        scores = _masked_scores(scoring_q, positions.scoring_k[:, :num], positions.scale, allowed)
        peak = scores.amax(-1, keepdim=True)
        peak = torch.where(peak.isfinite(), peak, 0)
        del scores
    sums = None
    for start in range(0, num, positions.block):
        stop = min(start + positions.block, num)
        # A CPU can skip what no query attends to; an accelerator would stall for the answer, a compiled graph break.
        is_readable = allowed.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_readable and not allowed[:, :, start:stop].any():
            continue
        arguments = (positions, start, stop, scoring_q, allowed, peak, layers, part)
        if torch.is_grad_enabled():
            block = checkpoint(_expectation_block, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            block = _expectation_block(*arguments)
        sums = block if sums is None else tuple(a + b for a, b in zip(sums, block, strict=True))
    if sums is None:
        return scoring_q.new_zeros(*scoring_q.shape[:2], layers[-1].weight.shape[-1])
    total, mu, points = sums
    attends = total > 0
    total = torch.where(attends, total, 1)
    norm = positions.norm
    if norm is None:
        return mu / total
    return torch.where(attends, (points + norm.weight * mu) / total + norm.bias, 0)


def _ttt_expectation(
    training: _Training,
    scoring_q: Tensor,
    scoring_k: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    scale: float | None,
    initial_state: dict[str, Tensor] | None,
    output_final_state: bool,
    backend: str,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    # What trains the memory obeys the rules of the query readout, whose q has the shape of k.
    refuse_kernel("expectation", backend)
    _check_arguments(training, k, k, v, eta, initial_state, backend)
    batch, time, heads, key_dim = k.shape
    if not isinstance(keys, Tensor) or keys.ndim != 4 or keys.shape[1] < time:
        raise ValueError(
            f"keys must be a tensor [batch, positions, heads, key dim] of all the memory's keys, the {time} new ones "
            f"last, got {_describe(keys)}."
        )
    num = keys.shape[1]
    _check_shape("keys", keys, (batch, num, heads, key_dim), "[batch, positions, heads, key dim]")
    if not isinstance(scoring_q, Tensor) or scoring_q.ndim != 4:
        raise ValueError(f"scoring_q must be a tensor [batch, time, heads, scoring dim], got {_describe(scoring_q)}.")
    scoring_dim = scoring_q.shape[-1]
    _check_shape("scoring_q", scoring_q, (batch, time, heads, scoring_dim), "[batch, time, heads, scoring dim]")
    _check_shape("scoring_k", scoring_k, (batch, num, heads, scoring_dim), "[batch, positions, heads, scoring dim]")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool (True = may attend), got {mask.dtype}.")
        if mask.ndim != 4 or mask.shape[0] not in (1, batch) or tuple(mask.shape[1:]) != (1, time, num):
            raise ValueError(
                f"mask must be [batch or 1, 1, time, positions] = [{batch}, 1, {time}, {num}], got {_describe(mask)}."
            )
        mask = mask[:, 0].expand(batch, -1, -1)  # [B, T, S]
    dtype = _compute_dtype(scoring_q, k, v)

    with no_autocast(k):
        tokens = 1 if time == 1 else training.mini_batch_size
        width = max(training.weights[f"W{index + 1}"].shape[-1] for index in range(training.num_layers))
        elements = BLOCK_ELEMENTS if k.device.type == "cpu" else ACCELERATOR_BLOCK_ELEMENTS
        positions = _Positions(
            *(x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (scoring_k, keys)),
            scoring_dim**-0.5 if scale is None else scale,
            training.norm(batch, dtype),
            max(MIN_BLOCK, elements // (batch * heads * tokens * width)),
        )
        if time == 1:
            layers, state = _train_step(training, k, v, eta, initial_state, dtype)
            queries = scoring_q.to(dtype).transpose(1, 2).flatten(0, 1)  # [R, 1, E]
            allowed = torch.ones(batch, 1, num, dtype=torch.bool, device=k.device) if mask is None else mask
            o = _read_expectation(positions, queries, allowed, layers, None).view(v.shape)
        else:

            def make_read(grid: _Grid, _: Tensor) -> Callable[[_MiniBatch], Tensor]:
                query_list = grid.scatter(scoring_q.to(dtype)).unbind(0)
                token_list = grid.token.unsqueeze(-1).split(grid.size, 1)  # N x [B, C, 1]

                def read(part: _MiniBatch) -> Tensor:
                    token = token_list[part.index]
                    if mask is None:
                        # A row's own place can only delay its tokens, so no row sees beyond `visible`.
                        visible = num - time + min(time, (part.index + 1) * grid.size)
                        allowed = torch.arange(visible, device=token.device) <= token + (num - time)
                    else:
                        allowed = mask.take_along_dim(token, 1)
                    return _read_expectation(positions, query_list[part.index], allowed, part.layers, part)

                return read

            o, state = _scan(
                training, k, v, eta, initial_state, output_final_state, dtype, make_read, checkpoint_group_size=0
            )
    return o.to(scoring_q.dtype), state if output_final_state else None


# ---------------------------------------------------------------------------------------------------------------------
# The oracle
# ---------------------------------------------------------------------------------------------------------------------


def _ttt_oracle(
    training: _Training,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    initial_state: dict[str, Tensor] | None,
    output_final_state: bool,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """Token by token in float64; the inner gradient is autograd's derivative of the loss as it is written."""
    _check_arguments(training, q, k, v, eta, initial_state, "torch")
    num_layers, weights, size, inner_norm, token_scale, lengths = training
    batch, time = k.shape[:2]
    q, k, v, eta = (x.double() for x in (q, k, v, eta))
    state = ttt_initial_state(weights, batch, torch.float64) if initial_state is None else initial_state
    names = training.weight_names()
    start = {name: state[name].double() for name in names}
    pending = {name: state[f"d{name}"].double() for name in names}
    place = state["place"]
    if token_scale is None:
        token_scale = 1 / torch.arange(1, size + 1, dtype=torch.float64, device=k.device)
    differentiate = torch.is_grad_enabled()

    def predict(w: dict[str, Tensor], x: Tensor) -> Tensor:
        """mu(x), with inner_norm LN(mu(x)): x [B, H, Dk] -> [B, H, Dv]."""
        for index in range(1, num_layers + 1):
            x = torch.einsum("bhi,bhij->bhj", x, w[f"W{index}"]) + w.get(f"b{index}", 0)
            if index < num_layers:
                x = F.gelu(x, approximate="tanh")
        if not inner_norm:
            return x
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) / torch.sqrt(variance + NORM_EPS) * weights["ln_weight"] + weights["ln_bias"]

    def per_row(x: Tensor, like: Tensor) -> Tensor:
        """x [B] or [B, H] with the trailing dimensions that broadcast it against `like`."""
        return x.view(*x.shape, *[1] * (like.ndim - x.ndim))

    outputs = []
    for t in range(time):
        with torch.enable_grad():
            w = {name: x if x.requires_grad else x.clone().requires_grad_() for name, x in start.items()}
            target = v[:, t] - k[:, t] if inner_norm else v[:, t]
            loss = 0.5 * (predict(w, k[:, t]) - target).square().sum()
            grads = torch.autograd.grad(loss, list(w.values()), create_graph=differentiate)
        real = torch.ones_like(place) if lengths is None else (lengths > t).long()
        rate = eta[:, t] * real.unsqueeze(1)
        pending = {name: pending[name] + per_row(rate, g) * g for name, g in zip(names, grads, strict=True)}
        current = {name: start[name] - per_row(token_scale[place], dw) * dw for name, dw in pending.items()}
        prediction = predict(current, q[:, t])
        outputs.append(q[:, t] + prediction if inner_norm else prediction)
        filled = place + real
        for name in names:
            full = per_row(filled == size, start[name])
            start[name] = torch.where(full, current[name], start[name])
            pending[name] = torch.where(full, 0, pending[name])
        place = filled % size
    final = {**start, **{f"d{name}": dw for name, dw in pending.items()}, "place": place}
    return torch.stack(outputs, 1), final if output_final_state else None


# ---------------------------------------------------------------------------------------------------------------------
# Public operators
# ---------------------------------------------------------------------------------------------------------------------


def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    weights: dict[str, Tensor],
    mini_batch_size: int = 16,
    inner_norm: bool = True,
    token_scale: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_state: dict[str, Tensor] | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
    checkpoint_group_size: int = 0,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """TTT-Linear: a linear model trained by mini-batch gradient descent while the sequence is read.

    The formulas stand at the top of this file. Time and memory are linear in T, forward and backward. Computation and
    state are fp32 for any input dtype (float64 for float64 inputs), under autocast too. Differentiable in all floating
    arguments, the initial state included, through the inner gradients.

    Args:
        q, k: queries and keys [B, T, H, Dk], already rotated where the layer rotates.
        v: values [B, T, H, Dv].
        eta: inner learning rate >= 0 of every token [B, T, H].
        weights: the learned weights of each head, with which a sequence starts: W1 [H, Dk, Dv]; b1 [H, Dv], without
            which mu has no bias. With inner_norm also ln_weight, ln_bias [H, Dv], which the inner loop does not train.
        mini_batch_size: b >= 1, the number of tokens whose gradients are taken at the same weights.
        inner_norm: f(x) = x + LN(mu(x)), which needs Dk = Dv; otherwise f(x) = mu(x).
        token_scale: c_t of each place in the mini-batch [b]; None is 1 / (t + 1).
        lengths: the number of real tokens of each row [B] int64, None for all T. Those after them change nothing and
            get no gradient; their outputs are finite and mean nothing.
        initial_state: the final state of an earlier call, or of `ttt_initial_state`; it replaces W1 and b1.
        output_final_state: also return the state after the last real token of each row.
        backend: "auto", "torch" or "fla" (a Triton kernel, for a learning rate that all tokens share; see op_fla).
        checkpoint_group_size: from an initial state on, keep the weights of every n-th mini-batch only and compute the
            rest again in the backward pass: one more forward pass for a fraction of the memory, the least near the root
            of the number of mini-batches. 0 keeps all. (Without an initial state this is always so, by segments.)

    Returns:
        o [B, T, H, Dv] in q's dtype, and the final state (see the top of this file) or None.

    Raises:
        ValueError, TypeError: shapes that do not fit together, missing weights, mini_batch_size < 1, lengths outside
            0 .. T (clamped instead on an accelerator), a state of another model or batch.
    """
    training = _Training(1, weights, mini_batch_size, inner_norm, token_scale, lengths)
    return _ttt(training, q, k, v, eta, initial_state, output_final_state, backend, checkpoint_group_size)


def ttt_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    weights: dict[str, Tensor],
    mini_batch_size: int = 16,
    inner_norm: bool = True,
    token_scale: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_state: dict[str, Tensor] | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
    checkpoint_group_size: int = 0,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """TTT-MLP: a two-layer MLP trained by mini-batch gradient descent while the sequence is read.

    As `ttt_linear`, with mu(x) = gelu_tanh(x W1 + b1) W2 + b2: weights holds W1 [H, Dk, M], W2 [H, M, Dv] and, for
    biases, b1 [H, M], b2 [H, Dv]. The reference has M = 4 Dk.
    """
    training = _Training(2, weights, mini_batch_size, inner_norm, token_scale, lengths)
    return _ttt(training, q, k, v, eta, initial_state, output_final_state, backend, checkpoint_group_size)


def ttt_linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    weights: dict[str, Tensor],
    state: dict[str, Tensor],
    mini_batch_size: int = 16,
    inner_norm: bool = True,
    token_scale: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ttt_linear` on one token per row: q, k [B, H, Dk], v [B, H, Dv], eta [B, H] -> o [B, H, Dv] and the new state.

    Its cost is that of the state, wherever in its mini-batch a row is. `lengths` [B] is 1, or 0 for a row that has no
    token now. The other arguments and the errors are those of `ttt_linear`.
    """
    training = _Training(1, weights, mini_batch_size, inner_norm, token_scale, lengths)
    return _ttt_step(training, q, k, v, eta, state)


def ttt_mlp_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    weights: dict[str, Tensor],
    state: dict[str, Tensor],
    mini_batch_size: int = 16,
    inner_norm: bool = True,
    token_scale: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ttt_mlp` on one token per row: q, k [B, H, Dk], v [B, H, Dv], eta [B, H] -> o [B, H, Dv] and the new state.

    Its cost is that of the state, wherever in its mini-batch a row is. `lengths` [B] is 1, or 0 for a row that has no
    token now. The other arguments and the errors are those of `ttt_mlp`.
    """
    training = _Training(2, weights, mini_batch_size, inner_norm, token_scale, lengths)
    return _ttt_step(training, q, k, v, eta, state)


def ttt_linear_expectation(
    scoring_q: Tensor,
    scoring_k: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    weights: dict[str, Tensor],
    scale: float | None = None,
    mini_batch_size: int = 16,
    inner_norm: bool = True,
    token_scale: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_state: dict[str, Tensor] | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """TTT-Linear read by expectation: o_t = sum_i a_ti f_{W_t}(key_i), a_ti = softmax_i(scale scoring_q_t·scoring_k_i).

    W_t are the weights of `ttt_linear` after token t. Time grows as T * S. Memory does not, forward or backward: each
    mini-batch of queries takes the positions in blocks, and the backward pass computes every block again.

    Args:
        scoring_q: rotated queries [B, T, H, E].
        scoring_k: rotated keys of all S >= T positions of the memory [B, S, H, E].
        keys: those keys without rotation [B, S, H, Dk], at which f is evaluated.
        mask: bool [B or 1, 1, T, S], True = may attend. None is causal, the T queries being at the last T positions. A
            query that may attend nowhere gives 0.
        k, v, eta: the T new tokens, which train the memory as in `ttt_linear`.
        scale: of the scores; None is E ** -0.5.
        weights, mini_batch_size, inner_norm, token_scale, lengths, initial_state, output_final_state, backend: as in
            `ttt_linear`.

    Returns:
        o [B, T, H, Dv] in scoring_q's dtype, and the final state or None.

    Raises:
        ValueError, TypeError: as `ttt_linear`, and for a mask, keys or scoring tensors of another shape or type.
    """
    training = _Training(1, weights, mini_batch_size, inner_norm, token_scale, lengths)
    return _ttt_expectation(
        training, scoring_q, scoring_k, keys, mask, k, v, eta, scale, initial_state, output_final_state, backend
    )


def ttt_mlp_expectation(
    scoring_q: Tensor,
    scoring_k: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    weights: dict[str, Tensor],
    scale: float | None = None,
    mini_batch_size: int = 16,
    inner_norm: bool = True,
    token_scale: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_state: dict[str, Tensor] | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """TTT-MLP read by expectation: `ttt_linear_expectation` with the memory of `ttt_mlp`."""
    training = _Training(2, weights, mini_batch_size, inner_norm, token_scale, lengths)
    return _ttt_expectation(
        training, scoring_q, scoring_k, keys, mask, k, v, eta, scale, initial_state, output_final_state, backend
    )


def ttt_linear_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    weights: dict[str, Tensor],
    mini_batch_size: int = 16,
    inner_norm: bool = True,
    token_scale: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_state: dict[str, Tensor] | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """`ttt_linear` by its definition: one token at a time in float64, the inner gradients by autograd. For tests.

    The arguments and errors are those of `ttt_linear`; output and state are float64.
    """
    training = _Training(1, weights, mini_batch_size, inner_norm, token_scale, lengths)
    return _ttt_oracle(training, q, k, v, eta, initial_state, output_final_state)


def ttt_mlp_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    weights: dict[str, Tensor],
    mini_batch_size: int = 16,
    inner_norm: bool = True,
    token_scale: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_state: dict[str, Tensor] | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """`ttt_mlp` by its definition: one token at a time in float64, the inner gradients by autograd. For tests.

    The arguments and errors are those of `ttt_mlp`; output and state are float64.
    """
    training = _Training(2, weights, mini_batch_size, inner_norm, token_scale, lengths)
    return _ttt_oracle(training, q, k, v, eta, initial_state, output_final_state)
