# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Test-time training of whole mini-batches with a backward pass written out by hand.

Only the weights are sequential. Forward, a mini-batch of C tokens takes a few small kernels to its weight update; all reads
of a segment of mini-batches are then made at once, from the weights that each of them began with. Backward, a segment's
weights are found again and everything is again computed for all of its mini-batches at once, but for the chain of the
weights' gradient, which passes through the inner gradient and so through the second derivatives of layer norm and GELU.

Notation, per mini-batch, with layers l of inputs x_l and outputs z_l (x_1 = k; of an MLP x_2 = gelu_tanh(z_1)):

    z_l = x_l W_l,   g_l = the gradient of the inner loss with respect to z_l,   W_l' = W_l - x_l^T (r g_l)
    y_1 = q,   u_l = y_l W_l - (c * (y_l x_l^T)) g_l,   y_2 = gelu_tanh(u_1)

with the rates r [C, 1] and the causal coefficients c [C, C]. A bias acts as another row of W does at an input of one, so
that y_l x_l^T is one more.
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


class Layer(NamedTuple):
    """One affine layer of the R inner models, or a gradient of it; behind a further axis those of several mini-batches."""

    weight: Tensor  # [R, D_in, D_out]
    bias: Tensor | None  # [R, 1, D_out]

    def at(self, index: int | slice) -> "Layer":
        """That of one mini-batch, or of some."""
        return Layer(*(None if w is None else w[index] for w in self))


class LossNorm(NamedTuple):
    """Scale and shift of the layer norm in the inner loss, [R, 1, Dv]."""

    weight: Tensor
    bias: Tensor


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


def affine(x: Tensor, layer: Layer, out: Tensor | None = None) -> Tensor:
    """x W + b, for `[R, ., .]` or (without `out`) `[S, R, ., .]` tensors."""
    weight, bias = layer
    if x.ndim == 4:
        flat = Layer(*(None if w is None else w.flatten(0, 1) for w in layer))
        return affine(x.flatten(0, 1), flat).unflatten(0, x.shape[:2])
    return torch.bmm(x, weight, out=out) if bias is None else torch.baddbmm(bias, x, weight, out=out)


class _Segment:
    """Mini-batches that are computed together: keys, targets `[S, R, C, D]`, rates `[S, R, C, 1]`, and what follows.

    Attributes:
        layers: the S + 1 weights that each mini-batch begins with, and the last one's result if it is wanted.
        inputs, outputs, grads: per layer x_l, z_l, g_l, `[S, R, C, D]`.
    """

    def __init__(
        self,
        keys: Tensor,
        targets: Tensor,
        rates: Tensor,
        start: list[Layer],
        norm: LossNorm | None,
        updates_last: bool,
    ):
        self.keys, self.targets, self.rates, self.norm = keys, targets, rates, norm
        count, memories, size = keys.shape[:3]
        self.layers = [
            Layer(*(None if w is None else w.new_empty(count + 1, *w.shape) for w in layer)) for layer in start
        ]
        for layers, layer in zip(self.layers, start, strict=True):
            layers.weight[0] = layer.weight
            if layer.bias is not None:
                layers.bias[0] = layer.bias
        self.is_mlp = len(start) == 2
        self.outputs = [keys.new_empty(count, memories, size, layer.weight.shape[-1]) for layer in start]
        self.inputs = [keys, torch.empty_like(self.outputs[0])] if self.is_mlp else [keys]
        self.grads = [torch.empty_like(z) for z in self.outputs]
        if norm is not None:
            self.square = norm.weight.square()
            self.shift = (norm.bias - targets) * norm.weight
        for n in range(count):
            self._fit(n)
            if updates_last or n + 1 < count:
                self._update(n)

    def _fit(self, n: int) -> None:
        layers, inputs = [layer.at(n) for layer in self.layers], [x[n] for x in self.inputs]
        outputs, grads = [z[n] for z in self.outputs], [g[n] for g in self.grads]
        for index, (x, layer, z) in enumerate(zip(inputs, layers, outputs, strict=True)):
            if index:
                x.copy_(F.gelu(outputs[0], approximate="tanh"))
            affine(x, layer, out=z)
        z = outputs[-1]
        if self.norm is None:
            torch.sub(z, self.targets[n], out=grads[-1])
        else:
            x_hat, mean, rho = _standardise(z)
            grads[-1].copy_(_unstandardise(torch.addcmul(self.shift[n], self.square, x_hat), z, mean, rho))
        if self.is_mlp:
            back = torch.bmm(grads[1], layers[1].weight.mT)
            grads[0].copy_(torch.ops.aten.gelu_backward(back, outputs[0], approximate="tanh"))

    def _update(self, n: int) -> None:
        for (weight, bias), x, g in zip(self.layers, self.inputs, self.grads, strict=True):
            scaled = self.rates[n] * g[n]
            torch.baddbmm(weight[n], x[n].mT, scaled, alpha=-1, out=weight[n + 1])
            if bias is not None:
                torch.baddbmm(bias[n], self.rates[n].mT, g[n], alpha=-1, out=bias[n + 1])

    def read(self, queries: Tensor, coefficients: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """y_l, y_l x_l^T (one more with a bias) and u_l of all mini-batches; the reads are the last u."""
        points, products, reads = [queries], [], []
        for index, (layer, x, g) in enumerate(zip(self.layers, self.inputs, self.grads, strict=True)):
            if index:
                points.append(F.gelu(reads[-1], approximate="tanh"))
            products.append(_bmm(points[-1], x.mT))
            if layer.bias is not None:
                products[-1] += 1
            z = affine(points[-1], layer.at(slice(None, -1)))
            reads.append(z - _bmm(coefficients * products[-1], g))
        return points, products, reads

    def backward(
        self, queries: Tensor, coefficients: Tensor, d_reads: Tensor, d_layers: list[Layer]
    ) -> tuple[dict[str, Tensor | None], list[Layer]]:
        """Gradients of the segment's inputs, and of the weights that it began with.

        Args:
            d_reads: `[S, R, C, Dv]`; d_layers: of the weights after the segment.
        """
        points, products, reads = self.read(queries, coefficients)
        last = len(self.layers) - 1
        d_coefficients = torch.zeros_like(coefficients)
        d_inputs, d_grads, d_read_layers = [None] * (last + 1), [None] * (last + 1), [None] * (last + 1)
        du = d_reads
        for layer in range(last, -1, -1):
            (w, bias), x, g, y = self.layers[layer], self.inputs[layer], self.grads[layer], points[layer]
            d_attention = _bmm(du, g.mT).neg_()
            d_coefficients.addcmul_(d_attention, products[layer])
            d_products = d_attention.mul_(coefficients)
            d_grads[layer] = _bmm((coefficients * products[layer]).mT, du).neg_()
            d_inputs[layer] = _bmm(d_products.mT, y)
            d_read_layers[layer] = Layer(_bmm(y.mT, du), None if bias is None else du.sum(-2, keepdim=True))
            dy = _bmm(du, w[:-1].mT) + _bmm(d_products, x)
            if layer:
                du = torch.ops.aten.gelu_backward(dy, reads[0], approximate="tanh")
        d_outputs, d_norm = self._chain(d_inputs, d_grads, d_read_layers, d_layers)
        d_rates = 0
        for x, d_layer, g in zip(self.inputs, d_read_layers, self.grads, strict=True):
            # d_layer is by now the gradient of the weights after each mini-batch.
            d_rates = d_rates - (affine(x, d_layer) * g).sum(-1, keepdim=True)
        scaled = self.rates * self.grads[0]
        dw, w = d_read_layers[0].weight, self.layers[0].weight[:-1]
        gradients = {
            "keys": d_inputs[0] - _bmm(scaled, dw.mT) + _bmm(d_outputs[0], w.mT), "queries": dy,
            "coefficients": d_coefficients, "rates": d_rates, **d_norm,
        }  # fmt: skip
        return gradients, d_layers

    def _chain(
        self, d_inputs: list[Tensor], d_grads: list[Tensor], d_read_layers: list[Layer], d_layers: list[Layer]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The sequential part, last mini-batch first; `d_layers` becomes the gradient of the first weights.

        On the way d_read_layers are replaced by the gradient of the weights after each mini-batch. Returns the gradients
        of z_l, and those of targets and norm.
        """
        count = len(self.keys)
        z = self.outputs[-1]
        d_outputs = [torch.empty_like(z_) for z_ in self.outputs]
        ones = torch.ones_like(self.rates[0]).mT  # a product sums in fewer calls
        if self.norm is not None:
            x_hat, mean, rho = _standardise(z)
            error = torch.addcmul(self.shift, self.square, x_hat)
            channels = z.shape[-1]
            error_part = rho * error / -channels
            grad_part = rho * (error * x_hat).mean(-1, keepdim=True)
            x_part = rho * x_hat / -channels
            d_error = torch.empty_like(z)
        if self.is_mlp:
            upper = self.layers[1].weight[:-1]
            first, second = _gelu_derivatives(self.outputs[0])
            second.mul_(_bmm(self.grads[1], upper.mT))
            scaled = self.rates * self.grads[1]
        for n in range(count - 1, -1, -1):
            rate = self.rates[n]
            dg = [
                torch.addcmul(d_grad[n], rate, affine(x[n], d_layer), value=-1)
                for d_grad, x, d_layer in zip(d_grads, self.inputs, d_layers, strict=True)
            ]
            if self.is_mlp:
                d_back = dg[0] * first[n]
                dg[1] = torch.baddbmm(dg[1], d_back, upper[n])
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
                dx = torch.baddbmm(d_inputs[1][n], scaled[n], d_layers[1].weight.mT, alpha=-1)
                dx = torch.baddbmm(dx, d_outputs[1][n], upper[n].mT)
                torch.addcmul(dg[0] * second[n], dx, first[n], out=d_outputs[0][n])
            for index, (d_layer, d_read) in enumerate(zip(list(d_layers), d_read_layers, strict=True)):
                dz = d_outputs[index][n]
                weight = torch.baddbmm(d_layer.weight, self.inputs[index][n].mT, dz).add_(d_read.weight[n])
                if index:
                    weight.baddbmm_(d_back.mT, self.grads[1][n])
                bias = None
                if d_layer.bias is not None:
                    bias = torch.baddbmm(d_layer.bias, ones, dz).add_(d_read.bias[n])
                    d_read.bias[n] = d_layer.bias
                d_read.weight[n] = d_layer.weight
                d_layers[index] = Layer(weight, bias)
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
    """Reads `[N, R, C, Dv]` of N mini-batches, and if wanted the final weights, as the first ones are given.

    Args:
        output_weights: whether they are wanted.
        keys, queries: `[N, R, C, Dk]`; targets: `[N, R, C, Dv]`; coefficients: `[N, R, C, C]`; rates: `[N, R, C, 1]`.
        norm_weight, norm_bias: `[R, 1, Dv]`, or `None` for the plain loss.
        weights: those that the first mini-batch begins with: weight and bias (or `None`) of each layer (see `Layer`).

    Saves its inputs and the weights before each segment.
    """

    @staticmethod
    def forward(ctx, output_weights, keys, targets, queries, coefficients, rates, norm_weight, norm_bias, *weights):
        norm = None if norm_weight is None else LossNorm(norm_weight, norm_bias)
        count = max(1, SEGMENT_WEIGHTS // sum(w.numel() for w in weights if w is not None))
        parts = [slice(start, start + count) for start in range(0, len(keys), count)]
        reads, starts, current = torch.empty_like(targets), [], list(weights)
        for part in parts:
            starts.append(current)
            goes_on = output_weights or part.stop < len(keys)
            segment = _Segment(keys[part], targets[part], rates[part], _pairs(current), norm, updates_last=goes_on)
            reads[part] = segment.read(queries[part], coefficients[part])[2][-1]
            if goes_on:
                current = [None if w is None else w[-1].clone() for layer in segment.layers for w in layer]
        ctx.save_for_backward(
            keys, targets, queries, coefficients, rates, norm_weight, norm_bias, *(w for start in starts for w in start)
        )
        ctx.parts = parts
        return reads, *(current if output_weights else ())

    @staticmethod
    @once_differentiable
    def backward(ctx, d_reads, *d_weights):
        keys, targets, queries, coefficients, rates, norm_weight, norm_bias, *starts = ctx.saved_tensors
        norm = None if norm_weight is None else LossNorm(norm_weight, norm_bias)
        inputs = {
            "keys": keys, "targets": targets, "queries": queries, "coefficients": coefficients, "rates": rates
        }  # fmt: skip
        grads = {name: torch.empty_like(x) for name, x in inputs.items()}
        count = len(starts) // len(ctx.parts)
        d_layers = _pairs(d_weights or [None if w is None else torch.zeros_like(w) for w in starts[:count]])
        d_norm = [None, None]
        for index in range(len(ctx.parts) - 1, -1, -1):
            part, start = ctx.parts[index], starts[index * count : (index + 1) * count]
            segment = _Segment(keys[part], targets[part], rates[part], _pairs(start), norm, updates_last=False)
            found, d_layers = segment.backward(queries[part], coefficients[part], d_reads[part], d_layers)
            for name, grad in grads.items():
                grad[part] = found[name]
            if norm is not None:
                d_norm = [
                    found[name] if old is None else old + found[name]
                    for name, old in zip(("weight", "bias"), d_norm, strict=True)
                ]
        return None, *grads.values(), *d_norm, *(w for layer in d_layers for w in layer)


def _pairs(weights) -> list[Layer]:
    """Weight, bias, weight, bias, ... as layers."""
    return [Layer(*pair) for pair in zip(weights[::2], weights[1::2], strict=True)]
