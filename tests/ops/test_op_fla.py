# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Dispatch to flash-linear-attention's kernels, tested at the package boundary: no GPU is needed.

A stand-in takes the kernels' place and CPU tensors count as a GPU's. It computes with the package's own plain functions
(for TTT with their formula, which is held against them), refuses arguments that the real kernel's signature does not have
or whose dtypes it does not take, and counts its calls.
"""

import functools
import inspect
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from ops import recurrences as R
from transformers.dynamic_module_utils import get_imports

from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM, op_fla
from modeling_avgpath.ops import (
    delta_rule,
    gated_delta_rule,
    linear_attention,
    mesa,
    mesa_oracle,
    ttt_initial_state,
    ttt_linear,
    ttt_linear_expectation,
    ttt_mlp,
)

LENGTH, SIZE = 37, 16  # tokens, and the TTT mini-batch: two whole ones and a rest
NORM_EPS = 1e-6


class Fp16Gradient(torch.autograd.Function):
    """Identity whose gradient passes through fp16, as in the mesa kernel."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.half().to(grad.dtype)


class StandIn:
    """The package `fla` as far as `op_fla` sees it."""

    def __init__(self):
        naive = pytest.importorskip("fla.ops.delta_rule.naive", reason="flash-linear-attention is not installed")
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
        from fla.ops.mesa_net import chunk_mesa_net
        from fla.ops.mesa_net.naive import naive_mesa_net_exact
        from fla.ops.simple_gla import chunk_simple_gla
        from fla.ops.simple_gla.naive import naive_recurrent_simple_gla
        from fla.ops.ttt.chunk import ChunkTTTLinearFunction
        from fla.ops.ttt.naive import chunk_ttt_linear_ref

        self.plain_ttt_linear = chunk_ttt_linear_ref
        self.calls: list[str] = []

        def delta(q, k, v, beta, scale, initial_state, output_final_state):
            scaled = q.float() * scale * q.shape[-1] ** 0.5  # the plain function has a scale of its own
            scaled, k, v = (x.transpose(1, 2) for x in (scaled, k, v))
            o, state = naive.delta_rule_recurrence(
                scaled, k, v, beta.transpose(1, 2), initial_state, output_final_state
            )
            return o.transpose(1, 2).to(k.dtype), state

        def gated_delta(q, k, v, g, beta, scale, initial_state, output_final_state):
            o, state = naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale, initial_state, output_final_state)
            return o.to(q.dtype), state

        def simple_gla(q, k, v, g, scale, initial_state, output_final_state):
            g = q.new_zeros(q.shape[:3], dtype=torch.float32) if g is None else g
            return naive_recurrent_simple_gla(q, k, v, g, scale, initial_state, output_final_state)

        def mesa_net(q, k, v, g, beta, lamb, h_kk_init, h_kv_init, output_final_state, max_CG_iteration):
            assert max_CG_iteration >= 1
            o, *states = naive_mesa_net_exact(q.float(), k, v, g, lamb, beta, h_kk_init, h_kv_init)
            states = map(Fp16Gradient.apply, states) if output_final_state else (None, None)
            return Fp16Gradient.apply(o).to(v.dtype), *states

        self.kernels = {
            "delta_rule": (chunk_delta_rule, self.like(chunk_delta_rule, delta)),
            "gated_delta_rule": (chunk_gated_delta_rule, self.like(chunk_gated_delta_rule, gated_delta)),
            "linear_attention": (chunk_simple_gla, self.like(chunk_simple_gla, simple_gla)),
            "mesa": (chunk_mesa_net, self.like(chunk_mesa_net, mesa_net)),
        }
        core = self.like(functools.partial(ChunkTTTLinearFunction.forward, None), ttt_core, halves=False)
        self.kernels["ttt_linear"] = ChunkTTTLinearFunction, types.SimpleNamespace(apply=core)

    def like(self, kernel, function, halves=True):
        """`function` under the signature of `kernel`."""
        signature = inspect.signature(kernel)

        def call(*args, **kwargs):
            arguments = signature.bind(*args, **kwargs).arguments
            self.calls.append(function.__name__)
            for name, x in arguments.items():
                if isinstance(x, torch.Tensor):
                    half = halves and name in "qkv"
                    assert x.dtype in ((torch.float16, torch.bfloat16) if half else (torch.float32,)), (name, x.dtype)
            return function(**{name: x for name, x in arguments.items() if not name.startswith("cu_seqlens")})

        return call

    def install(self, monkeypatch):
        """Put the stand-in in the package's place and count every tensor as a GPU's."""
        monkeypatch.setitem(sys.modules, "fla", types.SimpleNamespace(__version__="0.6.0"))
        for op, (_, stand_in) in self.kernels.items():
            kernel = op_fla.KERNELS[op]
            monkeypatch.setitem(sys.modules, kernel.module, types.SimpleNamespace(**{kernel.name: stand_in}))
        monkeypatch.setattr(op_fla, "_device_runs_triton", lambda device: True)


def ttt_core(q, k, v, w, b, chunk_size, eta, scale, eps, initial_state, initial_state_bias, output_final_state):
    """What the kernel of TTT-Linear returns before its last norm: `[B, T, H, D]`, whole mini-batches only."""
    assert q.shape[1] % chunk_size == 0 and output_final_state
    state, bias = initial_state, initial_state_bias  # [B, H, D, D], [B, H, 1, D]
    outputs = []
    for parts in zip(*(x.transpose(1, 2).split(chunk_size, 2) for x in (q, k, v, eta)), strict=True):
        q_, k_, v_, eta_ = parts  # [B, H, C, D]
        variance, mean = torch.var_mean(z := k_ @ state + bias, -1, correction=0, keepdim=True)
        z_hat, deviation = (z - mean) / (variance + eps).sqrt(), (variance + eps).sqrt()
        grad = (w[:, None] * z_hat + b[:, None] - (v_ - k_)) * w[:, None]
        grad = grad - grad.mean(-1, keepdim=True) - z_hat * (grad * z_hat).mean(-1, keepdim=True)
        grad = grad / deviation
        attention = (q_ @ k_.mT + 1).tril() * eta_  # the rate of the reader
        outputs.append(scale * (q_ @ state) + bias - attention @ grad)
        state = state - (eta_[:, :, -1:] * k_).mT @ grad
        bias = bias - (eta_[:, :, -1:] * grad).sum(2, keepdim=True)
    return torch.cat(outputs, 2).transpose(1, 2), state, bias


@pytest.fixture
def fla(monkeypatch):
    op_fla._load.cache_clear()
    stand_in = StandIn()
    stand_in.install(monkeypatch)
    yield stand_in
    op_fla._load.cache_clear()


def make_inputs(op, dtype=torch.float16, length=LENGTH, dim=8):
    inputs = R.make_inputs(2, length, 2, dim, dim, torch.float32)
    inputs = {name: x.to(dtype) if name in "qkv" else x for name, x in inputs.items()}
    if op is delta_rule:
        del inputs["g"]
    if op is mesa:
        inputs["lamb"] = 0.25 + torch.rand(2, dim)
    return inputs


def make_state(op, inputs):
    (state,) = R.make_state({name: x.float() for name, x in inputs.items()})
    return (state @ state.mT / state.shape[-1], state) if op is mesa else (state,)


@torch.no_grad()
def make_ttt(length=LENGTH, dim=8, dtype=torch.float16, with_grad=True):
    """The arguments of `ttt_linear` with one learning rate per row and head, and the leaves that they come from."""
    q, k, v = (torch.randn(2, length, 2, dim).to(dtype) for _ in range(3))
    weights = {"W1": torch.randn(2, dim, dim) / dim**0.5, "b1": torch.randn(2, dim) / 4}
    weights |= {"ln_weight": 1 + torch.randn(2, dim) / 4, "ln_bias": torch.randn(2, dim) / 4}
    leaves = {"q": q, "k": k, "v": v, "rate": torch.rand(2, 1, 2) / dim, "token_scale": torch.rand(SIZE), **weights}
    for x in leaves.values():
        x.requires_grad_(with_grad)
    with torch.enable_grad():
        arguments = {name: leaves[name] for name in ("q", "k", "v", "token_scale")}
        arguments |= {"eta": leaves["rate"].expand(-1, length, -1), "weights": {name: leaves[name] for name in weights}}
    return arguments, leaves


def run_ttt(state=None, backend="auto", **arguments):
    o, final = ttt_linear(**arguments, initial_state=state, output_final_state=True, backend=backend)
    return {"o": o, **final}


recurrent = pytest.mark.parametrize("op", [delta_rule, gated_delta_rule, linear_attention, mesa])


@recurrent
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "carried"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_kernel_gives_what_torch_gives(op, with_state, dtype, fla):
    inputs = make_inputs(op, dtype)
    state = make_state(op, inputs) if with_state else ()
    expected = R.run(op, inputs, state, backend="torch")
    assert not fla.calls
    results = R.run(op, inputs, state, backend="fla")
    assert len(fla.calls) == 1
    assert {name: x.dtype for name, x in results.items()} == {name: x.dtype for name, x in expected.items()}
    R.assert_close(results, expected, 2e-3 if dtype == torch.float16 else 1e-2)
    states = [name for name in results if name.startswith("state")]
    exact = op is not linear_attention  # whose values are multiplied by beta in half precision
    assert all(R.relative_error(results[name], expected[name]) < (1e-5 if exact else 5e-3) for name in states)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("op", [delta_rule, gated_delta_rule, linear_attention])
def test_scale(op, scale, fla):
    inputs = make_inputs(op)
    results = (R.run(op, inputs, scale=scale, backend=backend, gradients=False) for backend in ("auto", "torch"))
    R.assert_close(*results, 2e-3)
    assert len(fla.calls) == 1


def test_linear_attention_without_gates(fla):
    inputs = {name: x for name, x in make_inputs(linear_attention).items() if name in "qkv"}
    R.assert_close(*(R.run(linear_attention, inputs, backend=backend) for backend in ("auto", "torch")), 2e-3)
    assert fla.calls == ["simple_gla"]


def test_no_final_state_unless_wanted(fla):
    for op in (delta_rule, gated_delta_rule, linear_attention, mesa):
        assert op(**make_inputs(op), backend="fla")[1] is None
    arguments, _ = make_ttt()
    assert ttt_linear(**arguments, backend="fla")[1] is None
    assert len(fla.calls) == 5


@recurrent
@pytest.mark.parametrize("backends", [("torch", "fla"), ("fla", "torch")], ids="-then-".join)
def test_split_across_backends(op, backends, fla):
    """A state that one backend leaves is one that the other continues from, gradients included."""
    inputs = make_inputs(op)

    def in_halves(initial_state=None, output_final_state=True, **arguments):
        outputs = []
        for (start, stop), backend in zip([(0, 17), (17, LENGTH)], backends, strict=True):
            o, initial_state = op(
                **R.part_of(arguments, start, stop),
                initial_state=initial_state,
                output_final_state=True,
                backend=backend,
            )
            outputs.append(o)
        return torch.cat(outputs, 1), initial_state

    expected = R.run(op, inputs, backend="torch")
    R.assert_close(R.run(in_halves, inputs), expected, 5e-3)
    assert len(fla.calls) == 1


@recurrent
def test_automatic_choice(op, fla):
    inputs = make_inputs(op)
    R.run(op, inputs)
    assert len(fla.calls) == (op is not mesa)  # the mesa kernel is another function: see op_fla
    R.run(op, {name: x if name == "lamb" else x[:, :1] for name, x in inputs.items()})
    assert len(fla.calls) == (op is not mesa)  # one token is no work for a chunked kernel
    R.run(op, {name: x if name == "lamb" else x[:, :1] for name, x in inputs.items()}, backend="fla")
    assert len(fla.calls) == 1 + (op is not mesa)


def test_compiled_graph_stays_whole(fla):
    """`torch.compile` would break the graph at a kernel."""
    inputs = make_inputs(delta_rule)
    compiled = torch.compile(functools.partial(delta_rule, output_final_state=True), backend="eager", fullgraph=True)
    o, state = compiled(**inputs)
    assert not fla.calls
    expected_o, expected_state = delta_rule(**inputs, output_final_state=True, backend="torch")
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(state, expected_state)


def check_refused(op, arguments, reason, calls):
    """`backend="fla"` says why not, and "auto" gives what "torch" gives."""
    with pytest.raises(
        ValueError, match=rf"{op.__name__}: backend must be 'auto' or 'torch' here, got 'fla': .*{reason}"
    ):
        op(**arguments, backend="fla")
    automatic, _ = op(**arguments)
    expected, _ = op(**arguments, backend="torch")
    assert torch.equal(automatic, expected)
    assert not calls


@pytest.mark.parametrize(
    ("op", "change", "reason"),
    [
        (delta_rule, lambda x: x.float(), "q, k and v must all be bfloat16 or all float16, got torch.float32"),
        (gated_delta_rule, lambda x: x.double(), "got torch.float64"),
        (linear_attention, lambda x: x[..., :7], "head dims must be even, got D_k=7 and D_v=7"),
        (delta_rule, lambda x: x.repeat(1, 1, 1, 33), "at most 256, got D_k=264"),
        (gated_delta_rule, lambda x: x.repeat(1, 1, 1, 33), "at most 256, got D_k=264"),
    ],
)
def test_refused_tensors(op, change, reason, fla):
    inputs = make_inputs(op)
    check_refused(op, {name: change(x) if name in "qkv" else x for name, x in inputs.items()}, reason, fla.calls)


def test_other_refused_tensors(fla, monkeypatch):
    inputs = make_inputs(gated_delta_rule)
    mixed = {**inputs, "v": inputs["v"].float()}
    check_refused(gated_delta_rule, mixed, "float16, torch.float16 and torch.float32", fla.calls)
    wide = make_inputs(mesa, dim=130)
    check_refused(mesa, wide, "at most 128, got D_k=130", fla.calls)
    inputs = make_inputs(mesa)
    check_refused(mesa, {**inputs, "v": inputs["v"][..., :6]}, "must be equal, got D_k=8 and D_v=6", fla.calls)
    monkeypatch.setattr(op_fla, "MAX_ROWS", 3)
    check_refused(delta_rule, make_inputs(delta_rule), r"batch \* heads must be at most 3, got 2 \* 2", fla.calls)


def test_linear_attention_has_no_largest_dim(fla):
    inputs = make_inputs(linear_attention, length=3, dim=300)
    results = (linear_attention(**inputs, backend=backend)[0] for backend in ("auto", "torch"))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)
    assert fla.calls == ["simple_gla"]


@pytest.mark.parametrize("op", [delta_rule, gated_delta_rule, linear_attention])
def test_refused_installations(op, fla, monkeypatch):
    inputs, kernel = make_inputs(op), op_fla.KERNELS[op.__name__]
    advice = "install flash-linear-attention >= 0.6"
    for module, replacement, reason in [
        ("fla", types.SimpleNamespace(__version__="0.5.1"), f"flash-linear-attention 0.5.1 is too old; {advice}"),
        ("fla", None, f"cannot be imported .ModuleNotFoundError.*{advice}"),
        (kernel.module, types.SimpleNamespace(), rf"{kernel.name} cannot be imported .AttributeError.*{advice}"),
    ]:
        op_fla._load.cache_clear()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, replacement)
            check_refused(op, inputs, reason, fla.calls)


def test_cpu_tensors_never_import_the_package(fla, monkeypatch):
    monkeypatch.undo()
    inputs = make_inputs(gated_delta_rule)
    check_refused(gated_delta_rule, inputs, "the tensors are on cpu, and the kernels need an NVIDIA GPU", fla.calls)
    arguments, _ = make_ttt(with_grad=False)
    check_refused(ttt_linear, arguments, "the tensors are on cpu", fla.calls)
    assert op_fla._load.cache_info().currsize == 0


def test_hub_sees_no_requirement():
    assert not {"fla", "triton"} & set(get_imports(op_fla.__file__))


def test_mesa_gradients_survive_fp16(fla):
    """The kernel's gradients pass through fp16, which ends at 6e-8; those of a mean over many tokens are smaller."""

    def gradients(backend):
        inputs = {name: x.requires_grad_() for name, x in make_inputs(mesa, torch.bfloat16).items()}
        state = tuple(x.requires_grad_() for x in make_state(mesa, inputs))
        o, final = mesa(**inputs, initial_state=state, output_final_state=True, backend=backend)
        loss = sum(x.float().square().sum() for x in (o, *final)) * 1e-9
        leaves = {**inputs, "h": state[0], "g0": state[1]}
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    torch.manual_seed(1)
    expected = gradients("torch")
    torch.manual_seed(1)
    R.assert_close(gradients("fla"), expected, 2e-2)
    assert fla.calls == ["mesa_net"]


def tf32(x):
    """fp32 `x` to the 10 bits of mantissa that a TF32 product takes in."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def mesa_as_the_kernel_rounds(q, k, v, g, beta, lamb, size=64, steps=30):
    """The mesa kernel's arithmetic as its source reads: fp16 keys, H in fp32 met by TF32 products, G in bf16."""

    def chunks(x):
        return x.unflatten(1, (-1, size)).movedim(3, 1).float()  # [B, H, N, C, ...]

    q, k, v, g, beta = map(chunks, (q.half(), k.half(), v, g, beta))
    total = g.cumsum(-1)
    pairs = (total[..., None] - total[..., None, :]).exp().tril() * beta[..., None, :]
    writes = (k * (total[..., -1:] - total).exp()[..., None] * beta[..., None]).half().float()
    states_h, states_g = ([torch.zeros_like(k[:, :, 0].mT @ x[:, :, 0])] for x in (k, v))
    for n in range(q.shape[2] - 1):
        decay = total[:, :, n, -1, None, None].exp()
        states_h.append(decay * states_h[-1] + writes[:, :, n].mT @ k[:, :, n])
        states_g.append(decay * states_g[-1] + writes[:, :, n].bfloat16().float().mT @ v[:, :, n])
    states_h, states_g = tf32(torch.stack(states_h, 2)), torch.stack(states_g, 2).bfloat16().float()
    start = total.exp()[..., None]

    def product(p):  # H p + lamb p
        inside = ((p.half().float() @ k.mT) * pairs).half().float() @ k
        return inside + tf32(p * start) @ states_h + lamb[None, :, None, None] * p

    x, residual = torch.zeros_like(q), q.clone()
    p, delta = residual.clone(), residual.square().sum(-1, keepdim=True)
    for _ in range(steps):
        h_p = product(p)
        alpha = delta / ((p * h_p).sum(-1, keepdim=True) + 1e-5)
        x, residual = x + alpha * p, residual - alpha * h_p
        new = residual.square().sum(-1, keepdim=True)
        p, delta = residual + new / (delta + 1e-5) * p, new
    inside = ((x.half().float() @ k.mT) * pairs).bfloat16().float() @ v
    return (inside + (x * start).bfloat16().float() @ states_g).movedim(1, 3).flatten(1, 2)


@pytest.mark.parametrize("near_duplicates", [False, True], ids=["random", "near-duplicate"])
def test_why_auto_leaves_the_mesa_kernel(near_duplicates):
    """What its roundings make of ordinary keys is good to 1%; of a long memory of nearly the same key it is not."""
    inputs = make_inputs(mesa, torch.bfloat16, length=512, dim=64)
    inputs["g"], inputs["lamb"] = torch.zeros_like(inputs["g"]), torch.full_like(inputs["lamb"], 0.25)
    if near_duplicates:
        keys = torch.randn(1, 1, 2, 64) + 0.02 * torch.randn(2, 512, 2, 64)
        inputs["k"] = F.normalize(keys, dim=-1).bfloat16()
    expected, _ = mesa_oracle(**inputs)
    ours, _ = mesa(**inputs)
    assert R.relative_error(ours, expected) < 1e-2
    error = R.relative_error(mesa_as_the_kernel_rounds(**inputs), expected)
    assert not error < 5e-2 if near_duplicates else error < 1e-2


def test_mesa_without_gradient_of_the_output(fla):
    """Only the state is used further, and a loss of zero divides by nothing."""
    inputs = {name: x.requires_grad_() for name, x in make_inputs(mesa).items()}
    _, (state_h, _) = mesa(**inputs, output_final_state=True, backend="fla")
    (grad,) = torch.autograd.grad(state_h.sum() * 0, inputs["k"])
    assert torch.equal(grad, torch.zeros_like(grad))


def test_ttt_core_is_that_of_the_plain_function(fla):
    arguments, leaves = make_ttt(2 * SIZE, dtype=torch.float32, with_grad=False)
    eta = torch.rand(2, 2 * SIZE, 2, 1) / 8
    states = leaves["W1"].expand(2, -1, -1, -1), leaves["b1"].expand(2, -1, -1).unsqueeze(2)
    norm = leaves["ln_weight"], leaves["ln_bias"]
    tokens = [arguments[name] for name in ("q", "k", "v")]
    z, *final = ttt_core(*tokens, *norm, SIZE, eta, 1.0, NORM_EPS, *states, True)
    o = z + F.layer_norm(z, z.shape[-1:], eps=NORM_EPS) * norm[0] + norm[1]
    expected = fla.plain_ttt_linear(*(x.clone() for x in tokens), *norm, eta, 1.0, NORM_EPS, SIZE, *states, True)
    for x, y in zip((o, *final), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [SIZE, LENGTH], ids=["whole", "with a rest"])
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "carried"])
def test_ttt_kernel_gives_what_torch_gives(length, with_state, fla):
    results = {}
    for backend in ("torch", "auto"):
        torch.manual_seed(0)
        arguments, leaves = make_ttt(length)
        state = None
        if with_state:  # left by 16 tokens on the other path
            first, _ = make_ttt(SIZE)
            first["weights"] = arguments["weights"]
            state = ttt_linear(**first, output_final_state=True, backend="torch")[1]
        results[backend] = run_ttt(state, backend, **arguments)
        loss = sum((x.float() * torch.randn(x.shape)).sum() for x in results[backend].values() if x.is_floating_point())
        grads = torch.autograd.grad(loss, list(leaves.values()))
        results[backend] |= {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    assert fla.calls == ["ttt_core"]
    assert torch.equal(results["auto"].pop("place"), results["torch"].pop("place"))
    R.assert_close(results["auto"], results["torch"], 1e-3)


def test_ttt_split_across_backends(fla):
    arguments, _ = make_ttt(3 * SIZE + 5, with_grad=False)
    expected = run_ttt(backend="torch", **arguments)
    for backends in (("fla", "torch"), ("torch", "fla")):
        outputs, state = [], None
        for part, backend in zip((slice(0, SIZE), slice(SIZE, None)), backends, strict=True):
            piece = {name: arguments[name][:, part] for name in ("q", "k", "v", "eta")}
            result = run_ttt(state, backend, **{**arguments, **piece})
            outputs.append(result.pop("o"))
            state = result
        R.assert_close({"o": torch.cat(outputs, 1), **state}, expected, 1e-3)
    assert len(fla.calls) == 2


def test_refused_ttt(fla):
    arguments, _ = make_ttt(with_grad=False)
    weights, eta = arguments["weights"], arguments["eta"]
    fresh = ttt_initial_state(weights, 2)
    short = {**arguments, **{name: arguments[name][:, :15] for name in ("q", "k", "v", "eta")}}
    per_token = torch.rand(eta.shape) / 8
    no_bias = {name: x for name, x in weights.items() if name != "b1"}
    wide, _ = make_ttt(dim=66, with_grad=False)
    for changed, reason in [
        ({**arguments, "eta": per_token}, "the learning rate of the token that reads it"),
        ({**arguments, "eta": eta.detach().requires_grad_()}, "eta must be the same for all tokens"),
        (short, "the 15 tokens fill no mini-batch of 16"),
        ({**arguments, "mini_batch_size": 8, "token_scale": None}, "mini_batch_size must be 16, 32 or 64, got 8"),
        ({**arguments, "inner_norm": False}, "must have a bias b1 and the inner norm"),
        ({**arguments, "weights": no_bias}, "must have a bias b1 and the inner norm"),
        ({**arguments, "lengths": torch.tensor([3, LENGTH])}, "leave out lengths"),
        ({**arguments, "initial_state": {**fresh, "place": torch.tensor([0, 5])}}, "the middle of a mini-batch"),
        (wide, "at most 64, got D_k=66"),
    ]:
        check_refused(ttt_linear, changed, reason, fla.calls)


def test_operators_without_kernel(fla):
    arguments, leaves = make_ttt(with_grad=False)
    weights = {**arguments["weights"], "W2": leaves["W1"], "b2": leaves["b1"]}
    check_refused(ttt_mlp, {**arguments, "weights": weights}, "no kernel for ttt_mlp", fla.calls)
    q, k = arguments["q"], arguments["k"]
    with pytest.raises(ValueError, match="no kernel for expectation"):
        ttt_linear_expectation(q, k, k, None, k, q, arguments["eta"], leaves, backend="fla")


def test_model_runs_on_kernels(fla):
    """Training, padding and generation with layers on kernels, beside layers whose mixers have none."""
    kinds = ["delta_net", "gated_delta_net", "linear", "mesa_net", "ttt_linear", "ttt_mlp", "softmax"]
    config = AvgPathConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=len(kinds),
        num_attention_heads=2,
        mixer_types=kinds,
    )
    model = AvgPathForCausalLM(config).to(torch.bfloat16)
    input_ids = torch.randint(1, 32, (2, 21))
    mask = torch.ones_like(input_ids)
    mask[0, :6] = 0
    model(input_ids, attention_mask=mask, labels=input_ids).loss.backward()
    assert {"delta", "gated_delta", "simple_gla"} == set(fla.calls)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model.eval()
    with torch.no_grad():
        logits = model(input_ids, attention_mask=mask).logits
        alone = model(input_ids[:1, 6:]).logits
        assert R.relative_error(logits[:1, 6:], alone) < 2e-2
        generated = model.generate(input_ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert generated.shape == (2, 24)
