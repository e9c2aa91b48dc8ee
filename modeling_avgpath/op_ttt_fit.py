# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Test-time training of whole mini-batches with a backward pass written out by hand.

Only the weights are sequential. Forward, a mini-batch of C tokens takes a few small kernels to its weight update; all reads
of a segment of mini-batches are then made at once, from the weights that each of them began with. Backward, a segment's
weights are found again and everything is again computed for all of its mini-batches at once, but for the chain of the
weights' gradient, which passes through the inner gradient and so through the second derivatives of layer norm and GELU.

Notation, per mini-batch, with layers l of inputs x_l and outputs z_l (x_1 = k; of an MLP x_2 = gelu_tanh(z_1)):

    z_l = x_l W_l,   g_l = the gradient of the inner loss with respect to z_l,   W_l' = W_l - x_l^T (r g_l)
    y_1 = q,   u_l = y_l W_l - (c * (y_l x_l^T)) g_l,   y_2 = gelu_tanh(u_1)

with the rates r [C, 1] and the causal coefficients c [C, C]. A bias is the last row of W, met by a last input of ones.
The inner loss is 1/2 |LN(z) - t|^2, or 1/2 |z - t|^2 without a norm. With x^ = LN without scale and shift, rho = 1 / std,
m = the mean over channels and the symmetric J e = e - m(e) - x^ m(e x^),

    e = (w x^ + b - t) w,   g = rho J e;   for a gradient G of g:   a = rho J G (the gradient of e),
    dx^ = a w^2 - rho (G m(e x^) + e m(G x^)),   dz = rho (J dx^ - x^ m(G g)).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

NORM_EPS = 1e-6
SEGMENT_WEIGHTS = 1 << 22  # numbers in the weights of a segment's mini-batches


class LossNorm(NamedTuple):
    """Scale and shift of the layer norm in the inner loss, [R, 1, Dv]."""

    weight: Tensor
    bias: Tensor


def _with_ones(x: Tensor, has_bias: bool) -> Tensor:
    return F.pad(x, (0, 1), value=1.0) if has_bias else x


def _standardise(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x^, the means and 1 / std over the last axis."""
    return torch.native_layer_norm(z, z.shape[-1:], None, None, NORM_EPS)


def _unstandardise(grad: Tensor, z: Tensor, mean: Tensor, rho: Tensor) -> Tensor:
    """rho J grad, in one kernel."""
    return torch.ops.aten.native_layer_norm_backward(
        grad, z, z.shape[-1:], mean, rho, None, None, [True, False, False]
    )[0]


def _gelu_derivatives(x: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivative of gelu_tanh."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    tanh = torch.tanh(scale * x * (1 + cubic * square))
    slope = scale * (1 + 3 * cubic * square)
    sech = 1 - tanh * tanh
    first = 0.5 * (1 + tanh + x * sech * slope)
    second = sech * (slope + x * (3 * scale * cubic * x - tanh * slope * slope))
    return first, second


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Product of `[S, R, ., .]` tensors."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


class _Segment:
    """Mini-batches that are computed together: keys, targets `[S, R, C, D]`, rates `[S, R, C, 1]`, and what follows.

    Attributes:
        weights: per layer `[S + 1, R, D_in, D_out]`: those that each mini-batch begins with, and the last one's result.
        inputs, outputs, grads: per layer x_l, z_l, g_l, `[S, R, C, D]`.
    """

    def __init__(
        self,
        keys: Tensor,
        targets: Tensor,
        rates: Tensor,
        start: list[Tensor],
        biases: list[bool],
        norm: LossNorm | None,
    ):
        self.keys, self.targets, self.rates, self.norm, self.biases = keys, targets, rates, norm, biases
        count, memories, size = keys.shape[:3]
        self.weights = [w.new_empty(count + 1, *w.shape) for w in start]
        for weights, w in zip(self.weights, start, strict=True):
            weights[0] = w
        self.inputs = [_with_ones(keys, biases[0])]
        self.is_mlp = len(start) == 2
        if self.is_mlp:
            hidden = start[0].shape[-1]
            self.inputs.append(keys.new_ones(count, memories, size, hidden + biases[1]))
        self.outputs = [keys.new_empty(count, memories, size, w.shape[-1]) for w in start]
        self.grads = [torch.empty_like(z) for z in self.outputs]
        if norm is not None:
            self.square = norm.weight.square()
            self.shift = (norm.bias - targets) * norm.weight
        for n in range(count):
            self._fit(n)

    def _fit(self, n: int) -> None:
        weights, inputs = [w[n] for w in self.weights], [x[n] for x in self.inputs]
        outputs, grads = [z[n] for z in self.outputs], [g[n] for g in self.grads]
        torch.bmm(inputs[0], weights[0], out=outputs[0])
        if self.is_mlp:
            hidden = outputs[0].shape[-1]
            inputs[1][..., :hidden] = F.gelu(outputs[0], approximate="tanh")
            torch.bmm(inputs[1], weights[1], out=outputs[1])
        z = outputs[-1]
        if self.norm is None:
            torch.sub(z, self.targets[n], out=grads[-1])
        else:
            x_hat, mean, rho = _standardise(z)
            grads[-1].copy_(_unstandardise(torch.addcmul(self.shift[n], self.square, x_hat), z, mean, rho))
        if self.is_mlp:
            back = torch.bmm(grads[1], weights[1][:, :hidden].mT)
            grads[0].copy_(torch.ops.aten.gelu_backward(back, outputs[0], approximate="tanh"))
        for w, next_w, x, g in zip(weights, [w[n + 1] for w in self.weights], inputs, grads, strict=True):
            torch.baddbmm(w, x.mT, self.rates[n] * g, alpha=-1, out=next_w)

    def read(self, queries: Tensor, coefficients: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """y_l, y_l x_l^T and u_l of all mini-batches; the reads are the last u."""
        points, products, reads = [_with_ones(queries, self.biases[0])], [], []
        for layer, (w, x, g) in enumerate(zip(self.weights, self.inputs, self.grads, strict=True)):
            if layer:
                points.append(_with_ones(F.gelu(reads[-1], approximate="tanh"), self.biases[1]))
            products.append(_bmm(points[-1], x.mT))
            reads.append(_bmm(points[-1], w[:-1]) - _bmm(coefficients * products[-1], g))
        return points, products, reads

    def backward(
        self, queries: Tensor, coefficients: Tensor, d_reads: Tensor, d_weights: list[Tensor]
    ) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        """Gradients of the segment's inputs, and of the weights that it began with.

        Args:
            d_reads: `[S, R, C, Dv]`; d_weights: of the weights after the segment, per layer.
        """
        points, products, reads = self.read(queries, coefficients)
        last = len(self.weights) - 1
        d_coefficients = torch.zeros_like(coefficients)
        d_inputs, d_grads, d_read_weights = [None] * (last + 1), [None] * (last + 1), [None] * (last + 1)
        du = d_reads
        for layer in range(last, -1, -1):
            w, x, g, y = self.weights[layer][:-1], self.inputs[layer], self.grads[layer], points[layer]
            d_attention = _bmm(du, g.mT).neg_()
            d_coefficients.addcmul_(d_attention, products[layer])
            d_products = d_attention.mul_(coefficients)
            d_grads[layer] = _bmm((coefficients * products[layer]).mT, du).neg_()
            d_inputs[layer] = _bmm(d_products.mT, y)
            d_read_weights[layer] = _bmm(y.mT, du)
            dy = _bmm(du, w.mT) + _bmm(d_products, x)
            if layer:
                hidden = reads[0].shape[-1]
                du = torch.ops.aten.gelu_backward(dy[..., :hidden].contiguous(), reads[0], approximate="tanh")
        d_outputs, d_norm = self._chain(d_inputs, d_grads, d_read_weights, d_weights)
        d_rates = 0
        for layer, (dw, g) in enumerate(zip(d_read_weights, self.grads, strict=True)):
            # dw holds by now the gradient of the weights after each mini-batch.
            update = _bmm(self.inputs[layer], dw)
            d_rates = d_rates - (update * g).sum(-1, keepdim=True)
        scaled = self.rates * self.grads[0]
        d_keys = d_inputs[0] - _bmm(scaled, d_read_weights[0].mT) + _bmm(d_outputs[0], self.weights[0][:-1].mT)
        key_dim = self.keys.shape[-1]
        gradients = {
            "keys": d_keys[..., :key_dim], "targets": d_norm.pop("targets"), "queries": dy[..., :key_dim],
            "coefficients": d_coefficients, "rates": d_rates, **d_norm,
        }  # fmt: skip
        return gradients, d_weights

    def _chain(
        self, d_inputs: list[Tensor], d_grads: list[Tensor], d_read_weights: list[Tensor], d_weights: list[Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The sequential part, last mini-batch first; `d_weights` becomes the gradient of the first weights.

        On the way d_read_weights are replaced by the gradient of the weights after each mini-batch. Returns the gradients
        of z_l, and those of targets and norm.
        """
        count = len(self.keys)
        z = self.outputs[-1]
        d_outputs = [torch.empty_like(z_) for z_ in self.outputs]
        if self.norm is not None:
            x_hat, mean, rho = _standardise(z)
            error = torch.addcmul(self.shift, self.square, x_hat)
            channels = z.shape[-1]
            error_part = rho * error / -channels
            grad_part = rho * (error * x_hat).mean(-1, keepdim=True)
            x_part = rho * x_hat / -channels
            d_error = torch.empty_like(z)
        if self.is_mlp:
            hidden = self.outputs[0].shape[-1]
            first, second = _gelu_derivatives(self.outputs[0])
            second.mul_(_bmm(self.grads[1], self.weights[1][:-1, :, :hidden].mT))
            scaled = self.rates * self.grads[1]
        for n in range(count - 1, -1, -1):
            rate = self.rates[n]
            dg = [
                torch.addcmul(d_grad[n], rate, torch.bmm(x[n], dw), value=-1)
                for d_grad, x, dw in zip(d_grads, self.inputs, d_weights, strict=True)
            ]
            if self.is_mlp:
                d_back = dg[0] * first[n]
                dg[1] = torch.baddbmm(dg[1], d_back, self.weights[1][n, :, :hidden])
            total = dg[-1]
            if self.norm is None:
                d_outputs[-1][n] = total
            else:
                a = _unstandardise(total, z[n], mean[n], rho[n])
                d_error[n] = a
                dx_hat = (a * self.square).addcmul_(total, grad_part[n], value=-1)
                dx_hat.addcmul_(error_part[n], torch.linalg.vecdot(total, x_hat[n])[..., None])
                dz = _unstandardise(dx_hat, z[n], mean[n], rho[n])
                torch.addcmul(
                    dz, x_part[n], torch.linalg.vecdot(total, self.grads[-1][n])[..., None], out=d_outputs[-1][n]
                )
            if self.is_mlp:
                dz = d_outputs[1][n]
                dx = d_inputs[1][n]
                dx = torch.baddbmm(dx, scaled[n], d_weights[1].mT, alpha=-1)
                dx = torch.baddbmm(dx, dz, self.weights[1][n].mT)
                torch.addcmul(dg[0] * second[n], dx[..., :hidden], first[n], out=d_outputs[0][n])
            for layer, dw in enumerate(d_weights):
                new = torch.baddbmm(dw, self.inputs[layer][n].mT, d_outputs[layer][n]).add_(d_read_weights[layer][n])
                if layer:
                    new[:, :hidden].baddbmm_(d_back.mT, self.grads[1][n])
                d_read_weights[layer][n] = dw
                d_weights[layer] = new
        if self.norm is None:
            return d_outputs, {"targets": d_outputs[-1].neg(), "weight": None, "bias": None}
        d_bias = d_error * self.norm.weight
        d_weight = d_error * (2 * self.norm.weight * x_hat + self.norm.bias - self.targets)
        return d_outputs, {
            "targets": -d_bias,
            "weight": d_weight.sum((0, 2)).unsqueeze(1),
            "bias": d_bias.sum((0, 2)).unsqueeze(1),
        }


class Fit(torch.autograd.Function):
    """Reads `[N, R, C, Dv]` of N mini-batches, and the final weights, per layer `[R, D_in (+ 1), D_out]`.

    Args:
        biases: per layer, whether the last row of its weights is a bias.
        keys, queries: `[N, R, C, Dk]`; targets: `[N, R, C, Dv]`; coefficients: `[N, R, C, C]`; rates: `[N, R, C, 1]`.
        norm_weight, norm_bias: `[R, 1, Dv]`, or `None` for the plain loss.

    Saves its inputs and the weights before each segment.
    """

    @staticmethod
    def forward(ctx, biases, keys, targets, queries, coefficients, rates, norm_weight, norm_bias, *weights):
        norm = None if norm_weight is None else LossNorm(norm_weight, norm_bias)
        count = max(1, SEGMENT_WEIGHTS // sum(w.numel() for w in weights))
        parts = [slice(start, start + count) for start in range(0, len(keys), count)]
        reads, starts, current = torch.empty_like(targets), [], list(weights)
        for part in parts:
            starts.append(current)
            segment = _Segment(keys[part], targets[part], rates[part], current, biases, norm)
            reads[part] = segment.read(queries[part], coefficients[part])[2][-1]
            current = [w[-1].clone() for w in segment.weights]
        ctx.save_for_backward(
            keys, targets, queries, coefficients, rates, norm_weight, norm_bias, *(w for start in starts for w in start)
        )
        ctx.biases, ctx.parts = biases, parts
        return reads, *current

    @staticmethod
    @once_differentiable
    def backward(ctx, d_reads, *d_weights):
        keys, targets, queries, coefficients, rates, norm_weight, norm_bias, *starts = ctx.saved_tensors
        norm = None if norm_weight is None else LossNorm(norm_weight, norm_bias)
        layers = len(ctx.biases)
        inputs = {
            "keys": keys, "targets": targets, "queries": queries, "coefficients": coefficients, "rates": rates
        }  # fmt: skip
        grads = {name: torch.empty_like(x) for name, x in inputs.items()}
        d_weights, d_norm = list(d_weights), [None, None]
        for index in range(len(ctx.parts) - 1, -1, -1):
            part = ctx.parts[index]
            start = starts[index * layers : (index + 1) * layers]
            segment = _Segment(keys[part], targets[part], rates[part], start, ctx.biases, norm)
            found, d_weights = segment.backward(queries[part], coefficients[part], d_reads[part], d_weights)
            for name, grad in grads.items():
                grad[part] = found[name]
            if norm is not None:
                d_norm = [
                    found[name] if old is None else old + found[name]
                    for name, old in zip(("weight", "bias"), d_norm, strict=True)
                ]
        return None, *grads.values(), *d_norm, *d_weights
