# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""MesaNet: chunked and step forms against the float64 definition and ridge regression, its laws, and its peers."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ops import recurrences as R

from modeling_avgpath import op_mesa
from modeling_avgpath.op_mesa import conjugate_gradients, mesa, mesa_oracle, mesa_step

exact_mesa = functools.partial(mesa, tolerance=1e-14, max_cg_steps=100)  # for float64
PEER_SCALE = 100  # the peers' solver adds 1e-5 to squared residuals in its denominators: that must not count
with_and_without_state = pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "carried"])


def make_inputs(*args, **kwargs):
    inputs = R.make_inputs(*args, **kwargs)
    heads, dim = inputs["q"].shape[2:]
    return {**inputs, "lamb": (0.25 + torch.rand(heads, dim)).to(inputs["q"].dtype)}


def make_state(inputs):
    """H, symmetric and positive semi-definite, and G."""
    (state_g,) = R.make_state(inputs)
    root = torch.randn(*state_g.shape[:-1], state_g.shape[-2], dtype=state_g.dtype)
    return root @ root.mT / root.shape[-1], state_g


@with_and_without_state
@pytest.mark.parametrize("length", R.LENGTHS)
def test_matches_oracle(length, with_state):
    inputs = make_inputs(length=length)
    state = make_state(inputs) if with_state else ()
    R.assert_close(R.run(mesa, inputs, state), R.run_oracle(mesa_oracle, inputs, state), 1e-5)


@given(R.sizes)
@settings(max_examples=20)
def test_matches_oracle_at_any_size(size):
    with pytest.MonkeyPatch.context() as monkeypatch:
        R.use_small_chunks(monkeypatch, op_mesa)
        inputs = make_inputs(**size, dtype=torch.float64)
        state = make_state(inputs)
        results = R.run(exact_mesa, inputs, state)
    assert all(x.dtype == torch.float64 for x in results.values())
    R.assert_close(results, R.run_oracle(mesa_oracle, inputs, state), 1e-10)


def test_numerical_gradients(monkeypatch):
    R.use_small_chunks(monkeypatch, op_mesa)
    inputs = make_inputs(1, 10, 1, 3, 2, torch.float64)

    def symmetric(initial_state, **arguments):  # a finite difference must not leave the symmetric matrices
        state_h, state_g = initial_state
        return exact_mesa(initial_state=((state_h + state_h.mT) / 2, state_g), **arguments)

    R.check_gradients_numerically(symmetric, inputs, make_state(inputs))


@pytest.mark.parametrize("decay", [0.0, -0.01, "resets"])
@pytest.mark.parametrize("keys", ["random", "common mean", "near duplicates", "low rank", "unequal channels"])
def test_default_solver_suffices(keys, decay):
    inputs = make_inputs(1, 4 * R.CHUNK, 1, 64, 16)
    noise = torch.randn_like(inputs["k"])
    raw = {
        "random": noise,
        "common mean": noise + 3 * torch.randn(64),
        "near duplicates": torch.randn(64) + 0.03 * noise,
        "low rank": noise[..., :4] @ torch.randn(4, 64) + 0.01 * noise,
        "unequal channels": noise * torch.logspace(0, -3, 64),
    }[keys]
    inputs["k"] = F.normalize(raw, dim=-1)
    inputs["beta"].fill_(1)
    inputs["lamb"].fill_(0.25)
    inputs["g"].fill_(0 if decay == "resets" else decay)
    if decay == "resets":
        inputs["g"][torch.rand_like(inputs["g"]) < 0.02] = -5
    R.assert_close(R.run(mesa, inputs), R.run_oracle(mesa_oracle, inputs), 1e-4)


def test_solver_settings_matter():
    inputs = make_inputs(1, 3 * R.CHUNK, 1, 32, 8)
    expected = R.run_oracle(mesa_oracle, inputs, gradients=False)["o"]

    def error(**settings):
        return R.relative_error(mesa(**inputs, **settings)[0], expected)

    assert error(max_cg_steps=1) > error(max_cg_steps=4) > 1e-4
    assert error(tolerance=1e-1) > error(tolerance=1e-3) > 1e-5


def test_without_decay_it_is_ridge_regression():
    inputs = make_inputs(1, 2 * R.CHUNK + 3, 1, 8, 5)
    inputs["g"].zero_()
    o, _ = mesa(**inputs)
    q, k, v, beta = (inputs[name][0, :, 0].double() for name in ("q", "k", "v", "beta"))
    ridge = inputs["lamb"][0].double().sqrt().diag()
    weight = beta.sqrt()[:, None]
    for t in (0, 1, 7, R.CHUNK - 1, R.CHUNK, 2 * R.CHUNK + 2):
        rows = torch.cat([weight[: t + 1] * k[: t + 1], ridge])
        targets = torch.cat([weight[: t + 1] * v[: t + 1], torch.zeros(8, 5, dtype=torch.float64)])
        fit = torch.linalg.lstsq(rows, targets).solution
        assert R.relative_error(o[0, t, 0], q[t] @ fit) <= 1e-5


@given(st.lists(st.integers(1, 90), min_size=2, max_size=4))
@settings(max_examples=8)
def test_split(pieces):
    inputs = make_inputs(length=sum(pieces))
    R.check_split(mesa, inputs, make_state(inputs), pieces, 1e-5)


def test_steps():
    inputs = make_inputs(length=70)
    R.check_steps(mesa_step, mesa, inputs, make_state(inputs), 1e-5)
    R.check_steps(mesa_step, mesa, inputs, (), 1e-5)


def test_no_op_tokens():
    inputs = make_inputs()
    R.check_no_op_tokens(mesa, inputs, make_state(inputs), 1e-5)


@pytest.mark.parametrize("decay", ["strong", "mixed", "none"])
def test_extreme_decay(decay):
    inputs = make_inputs()
    inputs["g"] = R.extreme_decay(decay, inputs["g"])
    state = make_state(inputs)
    R.assert_close(R.run(mesa, inputs, state), R.run_oracle(mesa_oracle, inputs, state), 1e-5)


def test_zero_rows_are_safe():
    inputs = make_inputs()
    for name in inputs:
        if name != "lamb":
            inputs[name][:, ::2] = 0
    results = R.run(mesa, inputs)
    assert not results["o"][:, ::2].any()
    R.assert_close(results, R.run_oracle(mesa_oracle, inputs), 1e-5)


def test_gradients_of_any_magnitude():
    inputs = {name: x.requires_grad_() for name, x in make_inputs().items()}
    o, _ = mesa(**inputs)
    weight = torch.randn_like(o)
    for scale in (2.0**-60, 2.0**60):  # squares of these leave the range of float32
        expected, scaled = (
            torch.autograd.grad(o, list(inputs.values()), weight * s, retain_graph=True) for s in (1, scale)
        )
        for x, y in zip(scaled, expected, strict=True):
            assert R.relative_error(x / scale, y) <= 1e-5


def test_converged_rows_stay():
    matrices = torch.stack([torch.eye(16), torch.diag(torch.logspace(0, 4, 16))])  # one step, many steps
    right = torch.randn(2, 16)
    steps = []

    def matrix(x):
        steps.append(x)
        return torch.einsum("rij,rj->ri", matrices, x)

    x = conjugate_gradients(matrix, torch.eye(16), right, max_steps=200, tolerance=1e-6)
    assert 10 < len(steps) < 200
    assert R.relative_error(x[0], right[0]) <= 1e-6
    assert R.relative_error(torch.einsum("rij,rj->ri", matrices, x), right) <= 1e-5


def test_bfloat16_inputs():
    inputs = make_inputs(key_dim=16, value_dim=16)
    inputs = {name: x.bfloat16() if name in ("q", "k", "v") else x for name, x in inputs.items()}
    state = make_state({name: x.float() for name, x in inputs.items()})
    results = R.run(mesa, inputs, state)
    assert results["o"].dtype == torch.bfloat16
    assert results["state 0"].dtype == results["state 1"].dtype == torch.float32
    R.assert_close(results, R.run_oracle(mesa_oracle, inputs, state), 2e-2)


def test_long_sequence_is_finite():
    shape = 1, 65536, 1, 16
    k = F.normalize(1 + 0.01 * torch.randn(shape), dim=-1)
    inputs = {"q": F.normalize(torch.randn(shape), dim=-1), "k": k, "v": torch.randn(shape)}
    inputs |= {"g": torch.zeros(shape[:-1]), "beta": torch.full(shape[:-1], 0.999)}
    inputs = {name: x.bfloat16() for name, x in inputs.items()} | {"lamb": torch.full((1, 16), 0.25)}
    assert all(x.isfinite().all() for x in R.run(mesa, inputs).values())


def test_huge_states_are_safe():
    inputs = make_inputs()
    huge = torch.full((2, 2, 8, 8), 2.0**30)  # of rank 1; the ridge is lost in its rounding
    results = R.run(mesa, inputs, (huge, make_state(inputs)[1]))
    assert all(x.isfinite().all() for x in results.values())


def test_autocast_changes_nothing():
    inputs = make_inputs()
    expected = R.run(mesa, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = R.run(mesa, inputs)
        token = {name: x[:, 0] if name in R.TIMED else x for name, x in inputs.items()}
        o, state = mesa_step(**token)
    assert all(torch.equal(results[name], x) for name, x in expected.items())
    assert o.dtype == state[0].dtype == state[1].dtype == torch.float32


def test_cost_is_linear():
    four_steps = functools.partial(mesa, max_cg_steps=4, tolerance=0.0)
    R.check_linear_cost(four_steps, lambda length: make_inputs(1, length, 8, 16, 16))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"backend": "fast"}, ValueError, "backend='fast'.*'auto', 'torch'"),
        ({"lamb": torch.ones(8)}, ValueError, r"lamb must have shape \[heads, key dim\] = \[2, 8\], got \[8\]"),
        ({"lamb": 1.0}, TypeError, "lamb must be a floating-point tensor, got float"),
        ({"max_cg_steps": 0}, ValueError, "max_cg_steps must be at least 1, got 0"),
        ({"tolerance": 1.0}, ValueError, r"tolerance must be in \[0, 1\), got 1.0"),
        ({"initial_state": torch.zeros(2, 2, 8, 8)}, TypeError, r"initial_state must be a pair \(H, G\)"),
        ({"initial_state": (torch.zeros(2, 2, 8, 8), None)}, TypeError, r"initial_state must be a pair \(H, G\)"),
        (
            {"initial_state": (torch.zeros(2, 2, 8, 6), torch.zeros(2, 2, 8, 6))},
            ValueError,
            r"initial_state\[0\] must have shape \[2, 2, 8, 8\], got \[2, 2, 8, 6\]",
        ),
    ],
)
def test_bad_arguments(change, error, words):
    with pytest.raises(error, match=words):
        mesa(**{**make_inputs(length=5), **change})


@pytest.mark.parametrize("form", ["exact", "conjugate gradients"])
def test_peers(form):
    peer = pytest.importorskip("fla.ops.mesa_net.naive", reason="flash-linear-attention is not installed")
    inputs = make_inputs(length=2 * R.CHUNK, key_dim=8, value_dim=8)  # the peers need square states
    inputs["q"] *= PEER_SCALE
    state_h, state_g = make_state(inputs)
    o, (final_h, final_g) = mesa(**inputs, initial_state=(state_h, state_g), output_final_state=True)
    solve = peer.naive_mesa_net_exact
    if form != "exact":
        solve = functools.partial(peer.naive_mesa_net_CG, chunk_size=R.CHUNK)
    expected = solve(**inputs, h_kk_init=state_h, h_kv_init=state_g)
    R.assert_close(dict(zip("oHG", (o, final_h, final_g), strict=True)), dict(zip("oHG", expected, strict=True)), 1e-4)


def test_decoding_peer():
    peer = pytest.importorskip("fla.ops.mesa_net.naive", reason="flash-linear-attention is not installed")
    inputs = make_inputs(length=1)
    inputs["q"] *= PEER_SCALE
    token = {name: x[:, 0] if name in R.TIMED else x for name, x in inputs.items()}
    state_h, state_g = make_state(inputs)
    o, (new_h, new_g) = mesa_step(**token, initial_state=(state_h, state_g))
    expected = peer.naive_mesa_net_decoding_one_step(**token, prev_h_kk=state_h, prev_h_kv=state_g)
    R.assert_close(dict(zip("oHG", (o, new_h, new_g), strict=True)), dict(zip("oHG", expected, strict=True)), 1e-4)
