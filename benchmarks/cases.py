# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What is measured: the operators with their inputs and peers, and models of one shape."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import peers
from benchmarks.measure import relative_error
from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM, ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = ("forward", "forward + backward")
SOFTMAX = "softmax (sdpa)"
Inputs = dict[str, Tensor]


class Shape(NamedTuple):
    """Batch, heads, and key and value size of a head."""

    batch: int = 1
    heads: int = 8
    dim: int = 64

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.heads} heads of {self.dim}"


class Peer(NamedTuple):
    """A function of the operator's inputs that returns its output.

    Attributes:
        function: q, k, v and the gates by name -> o.
        tolerance: relative difference up to which it computes the same function in fp32; None if it is another one.
        longest: sequences beyond are not timed: autograd makes these quadratic, and the shorter ones have shown it.
        multiple: it takes sequences of whole chunks of so many tokens; others are not timed.
        fp32_only: whatever it is given, it computes in fp32; other inputs are not timed.
    """

    function: Callable[..., Tensor]
    tolerance: float | None = 1e-4
    longest: int | None = None
    multiple: int = 1
    fp32_only: bool = False

    def takes(self, length: int, dtype: str) -> bool:
        """Whether it is timed on so many tokens of `dtype`, a key of `DTYPES`."""
        return (
            (self.longest is None or length <= self.longest)
            and length % self.multiple == 0
            and (dtype == "fp32" or not self.fp32_only)
        )


# Its small constants in the denominators end the descent at about this accuracy.
PLAIN_MESA = Peer(peers.fla_plain_mesa, tolerance=2e-2, longest=4096, multiple=64, fp32_only=True)


class Operator(NamedTuple):
    """One of `modeling_avgpath.ops`, its inputs beside q, k and v, and its peers by name."""

    ours: Callable[..., tuple[Tensor, object]]
    gates: tuple[str, ...]
    peers: dict[str, Peer]

    def run(self, **inputs: Tensor) -> Tensor:
        return self.ours(**inputs)[0]


# Softmax attention where it is measured like one of ours.
SOFTMAX_OPERATOR = Operator(lambda **inputs: (peers.softmax_attention(**inputs), None), (), {})


def _ttt(ours: Callable) -> Operator:
    def run(q, k, v, eta, **weights):
        return ours(q, k, v, eta, weights)

    def reference(q, k, v, eta, **weights):
        return peers.ttt_reference(q, k, v, eta, weights)

    layers = ("W1", "b1") if ours is ops.ttt_linear else ("W1", "b1", "W2", "b2")
    return Operator(
        run, ("eta", *layers, "ln_weight", "ln_bias"), {"TTT reference": Peer(reference, longest=4096, fp32_only=True)}
    )


def operators(device: str) -> dict[str, Operator]:
    """Every operator with the peers that `device` can run; flash-linear-attention's where it is installed."""
    in_tree = {"in-tree": Peer(peers.in_tree_gated_delta_rule, fp32_only=True)}
    found = {
        "linear": Operator(ops.linear_attention, ("g", "beta"), {}),
        "delta_net": Operator(ops.delta_rule, ("beta",), dict(in_tree)),
        "gated_delta_net": Operator(ops.gated_delta_rule, ("g", "beta"), dict(in_tree)),
        "mesa_net": Operator(ops.mesa, ("g", "beta", "lamb"), {}),
        "ttt_linear": _ttt(ops.ttt_linear),
        "ttt_mlp": _ttt(ops.ttt_mlp),
    }
    if peers.has_fla():
        plain = {
            "linear": Peer(peers.fla_plain_linear_attention, longest=4096, fp32_only=True),
            "delta_net": Peer(peers.fla_plain_delta_rule, longest=4096, multiple=32, fp32_only=True),
            "gated_delta_net": Peer(peers.fla_plain_gated_delta_rule, longest=4096, fp32_only=True),
            "mesa_net": PLAIN_MESA,
        }
        kernels = {
            "linear": Peer(peers.fla_kernel_linear_attention, tolerance=2e-2),
            "delta_net": Peer(peers.fla_kernel_delta_rule, tolerance=2e-2),
            "gated_delta_net": Peer(peers.fla_kernel_gated_delta_rule, tolerance=2e-2),
            "mesa_net": Peer(peers.fla_kernel_mesa, tolerance=2e-2),
        }
        for name, peer in plain.items():
            found[name].peers["fla, plain"] = peer
        for name, peer in kernels.items() if device == "cuda" else ():
            found[name].peers["fla, kernel"] = peer
    for operator in found.values():
        operator.peers[SOFTMAX] = Peer(peers.softmax_attention, tolerance=None)
    return found


def make_inputs(
    gates: tuple[str, ...], length: int, shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Inputs:
    """q, k (L2-normalised) and v `[B, T, H, D]` in `dtype`; gates and weights in fp32; all want gradients.

    Decays average to a horizon of some 20 tokens, and the TTT weights are drawn as a new layer's.
    """
    generator = torch.Generator().manual_seed(0)
    batch, heads, dim = shape
    hidden = 4 * dim if "W2" in gates else dim

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    q, k = (F.normalize(normal(batch, length, heads, dim), dim=-1) for _ in range(2))
    drawn = {
        "g": lambda: F.logsigmoid(normal(batch, length, heads) + 3),
        "beta": lambda: normal(batch, length, heads).sigmoid(),
        "lamb": lambda: torch.ones(heads, dim),
        "eta": lambda: normal(batch, length, heads).sigmoid() / dim,
        "W1": lambda: 0.02 * normal(heads, dim, hidden),
        "b1": lambda: torch.zeros(heads, hidden),
        "W2": lambda: 0.02 * normal(heads, hidden, dim),
        "b2": lambda: torch.zeros(heads, dim),
        "ln_weight": lambda: torch.ones(heads, dim),
        "ln_bias": lambda: torch.zeros(heads, dim),
    }
    streams = {"q": q, "k": k, "v": normal(batch, length, heads, dim)}
    inputs = {name: x.to(device, dtype) for name, x in streams.items()}
    inputs |= {name: drawn[name]().to(device) for name in gates}
    return {name: x.requires_grad_() for name, x in inputs.items()}


def make_pass(function: Callable[..., Tensor], inputs: Inputs, backward: bool) -> Callable[[], list[Tensor]]:
    """A call without arguments: the output, and with `backward` also the gradient of every input that has one."""

    @torch.no_grad()
    def forward() -> list[Tensor]:
        return [function(**inputs)]

    # Not all ones: a layer norm's output adds up to the same whatever goes in, and nothing would flow back.
    v, generator = inputs["v"], torch.Generator().manual_seed(1)
    do = torch.randn(v.shape, generator=generator).to(v)

    def both() -> list[Tensor]:
        o = function(**inputs)
        return [o, *torch.autograd.grad(o, list(inputs.values()), do, allow_unused=True)]

    return both if backward else forward


def check_peers(name: str, operator: Operator, shape: Shape, device: str, length: int = 128) -> dict[str, float]:
    """Largest relative difference of output and gradients from ours, of each peer that computes the same function.

    Raises:
        ValueError: a peer differs by more than its tolerance; its times would mean nothing.
    """
    inputs = make_inputs(operator.gates, length, shape, device=device)
    ours = make_pass(operator.run, inputs, backward=True)()
    differences = {}
    for peer_name, peer in operator.peers.items():
        if peer.tolerance is None:
            continue
        theirs = make_pass(peer.function, inputs, backward=True)()
        difference = max(relative_error(a, b) for a, b in zip(theirs, ours, strict=True))
        if not difference <= peer.tolerance:
            raise ValueError(f"{name}: {peer_name} differs by {difference:.1e}, more than {peer.tolerance:.1e}")
        differences[peer_name] = difference
    return differences


def mesa_at_the_residual_of_peer(shape: Shape, device: str, length: int = 256) -> tuple[Operator, dict[str, float]]:
    """`mesa` with the loosest tolerance that is as accurate as the plain peer, and both errors.

    The error is that of the output against the float64 direct solve, for the inputs that are timed.
    """
    inputs = make_inputs(("g", "beta", "lamb"), length, shape, device=device)
    with torch.no_grad():
        exact = ops.mesa_oracle(**inputs)[0]
        theirs = relative_error(peers.fla_plain_mesa(**inputs), exact)
        for exponent in range(1, 7):
            ours = partial(ops.mesa, tolerance=10.0**-exponent)
            error = relative_error(ours(**inputs)[0], exact)
            if error <= theirs:
                break
    return Operator(ours, ("g", "beta", "lamb"), {"fla, plain": PLAIN_MESA}), {"ours": error, "theirs": theirs}


MODEL_SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
QUICK_MODEL_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}


def make_model(name: str, shape: dict[str, int], device: str = "cpu") -> PreTrainedModel:
    """A model with random weights, in evaluation mode.

    Args:
        name: one of `peers.MODELS`, or a mixer spec, with or without the ratio of recurrent to softmax layers behind a
            space (`"mesa_net 3:1"`; `"softmax"`, `"mesa_net"`: all layers alike).
        shape: fields that all configs share; `MODEL_SHAPE` gives 34 to 36M parameters.

    Raises:
        ValueError: unknown mixer or malformed ratio, as `AvgPathConfig`.
    """
    torch.manual_seed(0)
    if name in peers.MODELS:
        model = peers.MODELS[name](shape)
    else:
        mixer, _, ratio = name.partition(" ")
        model = AvgPathForCausalLM(AvgPathConfig(**shape, mixer=mixer, hybrid_ratio=ratio or "1:0"))
    return model.eval().to(device)
