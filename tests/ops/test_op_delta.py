# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The delta rule with and without decay: chunked and step forms against the definition, its laws, and its peers."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ops import recurrences as R

from modeling_avgpath import op_delta
from modeling_avgpath.op_delta import (
    delta_rule,
    delta_rule_oracle,
    delta_rule_step,
    gated_delta_rule,
    gated_delta_rule_oracle,
    gated_delta_rule_step,
)

OPS = {"delta": delta_rule, "gated": gated_delta_rule}
ORACLES = {"delta": delta_rule_oracle, "gated": gated_delta_rule_oracle}
STEPS = {"delta": delta_rule_step, "gated": gated_delta_rule_step}

both = pytest.mark.parametrize("rule", ["delta", "gated"])
with_and_without_state = pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "carried"])


def make_inputs(rule, *args, **kwargs):
    inputs = R.make_inputs(*args, **kwargs)
    if rule == "delta":
        del inputs["g"]
    return inputs


@both
@with_and_without_state
@pytest.mark.parametrize("length", R.LENGTHS)
def test_matches_oracle(rule, length, with_state):
    inputs = make_inputs(rule, length=length)
    state = R.make_state(inputs) if with_state else ()
    R.assert_close(R.run(OPS[rule], inputs, state), R.run_oracle(ORACLES[rule], inputs, state), 1e-5)


@both
@given(size=R.sizes)
@settings(max_examples=20)
def test_matches_oracle_at_any_size(rule, size):
    with pytest.MonkeyPatch.context() as monkeypatch:
        R.use_small_chunks(monkeypatch, op_delta)
        inputs = make_inputs(rule, **size, dtype=torch.float64)
        state = R.make_state(inputs)
        results = R.run(OPS[rule], inputs, state, scale=0.7)
    assert all(x.dtype == torch.float64 for x in results.values())
    R.assert_close(results, R.run_oracle(ORACLES[rule], inputs, state, scale=0.7), 1e-12)


@both
def test_numerical_gradients(rule, monkeypatch):
    R.use_small_chunks(monkeypatch, op_delta)
    inputs = make_inputs(rule, 1, 10, 1, 3, 2, torch.float64)
    R.check_gradients_numerically(OPS[rule], inputs, R.make_state(inputs))


@both
@given(pieces=st.lists(st.integers(1, 90), min_size=2, max_size=4))
@settings(max_examples=8)
def test_split(rule, pieces):
    inputs = make_inputs(rule, length=sum(pieces))
    R.check_split(OPS[rule], inputs, R.make_state(inputs), pieces, 1e-5)


@both
def test_steps(rule):
    inputs = make_inputs(rule, length=70)
    R.check_steps(STEPS[rule], OPS[rule], inputs, R.make_state(inputs), 1e-5)
    R.check_steps(STEPS[rule], OPS[rule], inputs, (), 1e-5)


def test_no_op_tokens():
    inputs = R.make_inputs()
    R.check_no_op_tokens(gated_delta_rule, inputs, R.make_state(inputs), 1e-6)


def test_without_decay_it_is_the_delta_rule():
    inputs = R.make_inputs()
    inputs["g"].zero_()
    state = R.make_state(inputs)
    results = R.run(gated_delta_rule, inputs, state)
    del inputs["g"], results["gradient of g"]
    R.assert_close(results, R.run(delta_rule, inputs, state), 1e-6)


@pytest.mark.parametrize("decay", ["strong", "mixed", "none"])
def test_extreme_decay(decay):
    inputs = R.make_inputs()
    inputs["g"] = R.extreme_decay(decay, inputs["g"])
    state = R.make_state(inputs)
    results = R.run(gated_delta_rule, inputs, state)
    R.assert_close(results, R.run_oracle(gated_delta_rule_oracle, inputs, state), 1e-5)


@both
def test_negative_eigenvalues(rule):
    inputs = make_inputs(rule, length=4 * R.CHUNK)
    inputs["beta"] = 2 * inputs["beta"].sqrt()  # mostly above 1
    state = R.make_state(inputs)
    R.assert_close(R.run(OPS[rule], inputs, state), R.run_oracle(ORACLES[rule], inputs, state), 1e-5)


# At a step size of 2 every token is a reflection: nothing is forgotten, and rounding errors add up.
@pytest.mark.parametrize(("beta", "tolerance"), [(0.999, 1e-5), (2.0, 1e-4)])
def test_near_duplicate_keys(beta, tolerance):
    inputs = make_inputs("delta", length=4 * R.CHUNK, key_dim=16)
    inputs["k"] = F.normalize(torch.ones(16) + 0.02 * torch.randn_like(inputs["k"]), dim=-1)
    inputs["beta"] = torch.full_like(inputs["beta"], beta)
    R.assert_close(R.run(delta_rule, inputs), R.run_oracle(delta_rule_oracle, inputs), tolerance)


@pytest.mark.parametrize("length", [R.LENGTHS[-1], 1])
def test_bfloat16_inputs(length):
    inputs = R.make_inputs(length=length, key_dim=32, value_dim=32, dtype=torch.bfloat16)
    state = tuple(x.float() for x in R.make_state(inputs))
    results = R.run(gated_delta_rule, inputs, state)
    assert results["o"].dtype == torch.bfloat16 and results["state 0"].dtype == torch.float32
    assert all(results[f"gradient of {name}"].dtype == x.dtype for name, x in inputs.items())
    R.assert_close(results, R.run_oracle(gated_delta_rule_oracle, inputs, state), 2e-2)


def test_long_sequence_is_finite():
    length, shape = 65536, (1, 65536, 1, 16)
    k = F.normalize(1 + 0.01 * torch.randn(shape), dim=-1)
    inputs = {"q": k + 0.1 * torch.randn(shape), "k": k, "v": torch.randn(shape), "beta": torch.full(shape[:-1], 0.999)}
    results = R.run(delta_rule, {name: x.bfloat16() for name, x in inputs.items()})
    assert results["o"].shape[1] == length and all(x.isfinite().all() for x in results.values())


def test_autocast_changes_nothing():
    inputs = R.make_inputs()
    expected = R.run(gated_delta_rule, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = R.run(gated_delta_rule, inputs)
        o, state = gated_delta_rule_step(**{name: x[:, 0] for name, x in inputs.items()})
    assert all(torch.equal(results[name], x) for name, x in expected.items())
    assert o.dtype == state.dtype == torch.float32


@both
def test_cost_is_linear(rule):
    R.check_linear_cost(OPS[rule], lambda length: make_inputs(rule, 1, length, 8, 16, 16))


@both
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"backend": "triton"}, ValueError, "backend='triton'.*'auto', 'torch'"),
        ({"k": torch.zeros(2, 5, 2, 7)}, ValueError, r"k must have the shape of q, \[2, 5, 2, 8\], got \[2, 5, 2, 7\]"),
        ({"beta": torch.zeros(2, 5)}, ValueError, r"beta must have shape \[2, 5, 2\], got \[2, 5\]"),
        ({"beta": None}, TypeError, "beta must be a floating-point tensor, got NoneType"),
        ({"initial_state": torch.zeros(1, 2, 8, 6)}, ValueError, r"initial_state must have shape \[2, 2, 8, 6\]"),
    ],
)
def test_bad_arguments(rule, change, error, words):
    with pytest.raises(error, match=words):
        OPS[rule](**{**make_inputs(rule, length=5), **change})


@both
def test_an_empty_batch_is_refused(rule):
    with pytest.raises(ValueError, match=r"q has shape \[0, 5, 2, 8\]; pass at least one row and one head"):
        OPS[rule](**{name: x[:0] for name, x in make_inputs(rule, length=5).items()})


def test_the_gated_rule_needs_its_decay():
    with pytest.raises(TypeError, match="gated_delta_rule: g must be a floating-point tensor, got NoneType"):
        gated_delta_rule(**{**R.make_inputs(length=5), "g": None})


def test_step_rejects_a_time_axis():
    with pytest.raises(ValueError, match=r"delta_rule_step: q must be \[batch, heads, dim\], got shape \[2, 5, 2, 8\]"):
        delta_rule_step(**make_inputs("delta", length=5))


def test_recurrent_peer_of_the_delta_rule():
    peer = pytest.importorskip("fla.ops.delta_rule.naive", reason="flash-linear-attention is not installed")
    inputs = make_inputs("delta")
    (state,) = R.make_state(inputs)
    o, final = delta_rule(**inputs, initial_state=state, output_final_state=True)
    by_head = {name: x.transpose(1, 2) for name, x in inputs.items()}  # the peer's layout is [B, H, T, D]
    expected, expected_final = peer.delta_rule_recurrence(**by_head, initial_state=state)
    R.assert_close({"o": o, "state": final}, {"o": expected.transpose(1, 2), "state": expected_final}, 1e-5)


@pytest.mark.parametrize("form", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"])
def test_peers_of_the_gated_delta_rule(form):
    peer = pytest.importorskip("fla.ops.gated_delta_rule.naive", reason="flash-linear-attention is not installed")
    inputs = R.make_inputs()
    (state,) = R.make_state(inputs)
    o, final = gated_delta_rule(**inputs, initial_state=state, output_final_state=True)
    expected, expected_final = getattr(peer, form)(**inputs, initial_state=state, output_final_state=True)
    R.assert_close({"o": o, "state": final}, {"o": expected, "state": expected_final}, 1e-5)


@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_peers_in_transformers(form):
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid

    # With flash-linear-attention installed the public name stands for its GPU kernel.
    peer = inspect.unwrap(getattr(modeling_olmo_hybrid, form))
    inputs = R.make_inputs()
    (state,) = R.make_state(inputs)
    o, final = gated_delta_rule(**inputs, initial_state=state, output_final_state=True)
    expected, expected_final = peer(*inputs.values(), initial_state=state, output_final_state=True)
    R.assert_close({"o": o, "state": final}, {"o": expected, "state": expected_final}, 1e-5)
