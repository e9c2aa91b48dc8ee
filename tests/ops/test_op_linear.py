# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Linear attention: chunked and step forms against the float64 definition, its laws, and its peers."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ops import recurrences as R

from modeling_avgpath import op_linear
from modeling_avgpath.op_linear import linear_attention, linear_attention_oracle, linear_attention_step

with_and_without_state = pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "carried"])


@with_and_without_state
@pytest.mark.parametrize("length", R.LENGTHS)
def test_matches_oracle(length, with_state):
    inputs = R.make_inputs(length=length)
    state = R.make_state(inputs) if with_state else ()
    results = R.run(linear_attention, inputs, state)
    R.assert_close(results, R.run_oracle(linear_attention_oracle, inputs, state), 1e-5)


@pytest.mark.parametrize("gates", [(), ("g",), ("beta",)], ids=["plain", "decay", "step size"])
def test_gates_are_optional(gates):
    inputs = {name: x for name, x in R.make_inputs().items() if name in ("q", "k", "v", *gates)}
    results = R.run(linear_attention, inputs, scale=0.3)
    R.assert_close(results, R.run_oracle(linear_attention_oracle, inputs, scale=0.3), 1e-5)


@given(R.sizes)
@settings(max_examples=20)
def test_matches_oracle_at_any_size(size):
    with pytest.MonkeyPatch.context() as monkeypatch:
        R.use_small_chunks(monkeypatch, op_linear)
        inputs = R.make_inputs(**size, dtype=torch.float64)
        state = R.make_state(inputs)
        results = R.run(linear_attention, inputs, state)
    assert all(x.dtype == torch.float64 for x in results.values())
    R.assert_close(results, R.run_oracle(linear_attention_oracle, inputs, state), 1e-12)


def test_numerical_gradients(monkeypatch):
    R.use_small_chunks(monkeypatch, op_linear)
    inputs = R.make_inputs(1, 10, 1, 3, 2, torch.float64)
    R.check_gradients_numerically(linear_attention, inputs, R.make_state(inputs))


@given(st.lists(st.integers(1, 90), min_size=2, max_size=4))
@settings(max_examples=10)
def test_split(pieces):
    inputs = R.make_inputs(length=sum(pieces))
    R.check_split(linear_attention, inputs, R.make_state(inputs), pieces, 1e-5)


def test_steps():
    inputs = R.make_inputs(length=70)
    R.check_steps(linear_attention_step, linear_attention, inputs, R.make_state(inputs), 1e-5)
    plain = {name: inputs[name] for name in ("q", "k", "v")}
    R.check_steps(linear_attention_step, linear_attention, plain, (), 1e-5)


def test_no_op_tokens():
    inputs = R.make_inputs()
    R.check_no_op_tokens(linear_attention, inputs, R.make_state(inputs), 1e-6)


@pytest.mark.parametrize("decay", ["strong", "mixed", "none"])
def test_extreme_decay(decay):
    inputs = R.make_inputs()
    inputs["g"] = R.extreme_decay(decay, inputs["g"])
    state = R.make_state(inputs)
    results = R.run(linear_attention, inputs, state)
    R.assert_close(results, R.run_oracle(linear_attention_oracle, inputs, state), 1e-5)


def test_bfloat16_inputs():
    inputs = R.make_inputs(key_dim=32, value_dim=32, dtype=torch.bfloat16)
    state = tuple(x.float() for x in R.make_state(inputs))
    results = R.run(linear_attention, inputs, state)
    assert results["o"].dtype == torch.bfloat16 and results["state 0"].dtype == torch.float32
    R.assert_close(results, R.run_oracle(linear_attention_oracle, inputs, state), 2e-2)


def test_autocast_changes_nothing():
    inputs = R.make_inputs()
    expected = R.run(linear_attention, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = R.run(linear_attention, inputs)
        o, state = linear_attention_step(**{name: x[:, 0] for name, x in inputs.items()})
    assert all(torch.equal(results[name], x) for name, x in expected.items())
    assert o.dtype == state.dtype == torch.float32


def test_views_as_inputs():
    inputs = R.make_inputs(heads=2)
    shared = inputs["k"][:, :, :1]
    views = {
        **inputs,
        "k": shared.expand_as(inputs["q"]),
        "v": inputs["v"].transpose(0, 1).contiguous().transpose(0, 1),
    }
    copies = {name: x.clone() for name, x in views.items()}
    R.assert_close(R.run(linear_attention, views), R.run(linear_attention, copies), 1e-7)


def test_cost_is_linear():
    R.check_linear_cost(linear_attention, lambda length: R.make_inputs(1, length, 8, 16, 16))


def test_final_state_only_on_request():
    inputs = R.make_inputs(length=5)
    assert linear_attention(**inputs)[1] is None
    assert linear_attention_oracle(**inputs)[1] is None


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"backend": "cuda"}, ValueError, "backend='cuda'.*'auto', 'torch'"),
        ({"k": torch.zeros(2, 5, 1, 8)}, ValueError, r"k must have the shape of q, \[2, 5, 2, 8\], got \[2, 5, 1, 8\]"),
        ({"v": torch.zeros(2, 4, 2, 6)}, ValueError, r"v must agree with q.*\[2, 5, 2\], got \[2, 4, 2, 6\]"),
        ({"g": torch.zeros(2, 5)}, ValueError, r"g must have shape \[2, 5, 2\], got \[2, 5\]"),
        ({"beta": torch.zeros(2, 5, 2, 1)}, ValueError, r"beta must have shape \[2, 5, 2\]"),
        ({"initial_state": torch.zeros(2, 2, 6, 8)}, ValueError, r"initial_state must have shape \[2, 2, 8, 6\]"),
        ({"q": torch.zeros(2, 5, 16)}, ValueError, r"q must be \[batch, time, heads, dim\]"),
        ({"q": torch.zeros(2, 0, 2, 8)}, ValueError, "sequence is empty"),
        ({"v": torch.zeros(2, 5, 2, 6, dtype=torch.long)}, TypeError, "v must be a floating-point tensor.*int64"),
        ({"k": [1.0]}, TypeError, "k must be a floating-point tensor, got list"),
        ({"v": torch.zeros(2, 5, 2, 6, device="meta")}, ValueError, "v is on meta but q is on cpu"),
    ],
)
def test_bad_arguments(change, error, words):
    with pytest.raises(error, match=words):
        linear_attention(**{**R.make_inputs(length=5), **change})


def test_recurrent_peer():
    peer = pytest.importorskip("fla.ops.linear_attn.naive", reason="flash-linear-attention is not installed")
    inputs = R.make_inputs()
    plain = {name: inputs[name] for name in ("q", "k", "v")}
    (state,) = R.make_state(inputs)
    o, final = linear_attention(**plain, initial_state=state, output_final_state=True)
    expected, expected_final = peer.naive_recurrent_linear_attn(**plain, initial_state=state, output_final_state=True)
    R.assert_close({"o": o, "state": final}, {"o": expected, "state": expected_final}, 1e-5)


def test_chunked_peer():
    peer = pytest.importorskip("fla.ops.linear_attn.naive", reason="flash-linear-attention is not installed")
    inputs = R.make_inputs(length=2 * R.CHUNK)
    plain = {name: inputs[name] for name in ("q", "k", "v")}
    expected = peer.naive_chunk_linear_attn(**plain)
    assert R.relative_error(linear_attention(**plain)[0], expected) <= 1e-5


def test_long_sequence_is_finite():
    length = 65536
    q = F.normalize(torch.randn(1, length, 1, 16), dim=-1).bfloat16()
    k = F.normalize(1 + 0.01 * torch.randn(1, length, 1, 16), dim=-1).bfloat16()
    inputs = {"q": q, "k": k, "v": torch.randn(1, length, 1, 16).bfloat16()}
    assert all(x.isfinite().all() for x in R.run(linear_attention, inputs).values())
