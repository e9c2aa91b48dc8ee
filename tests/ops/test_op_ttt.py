# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The TTT operators: against their float64 oracle, the reference layer's recorded cases, and the laws of a recurrence."""

import functools
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from modeling_avgpath import op_ttt
from modeling_avgpath.op_ttt import (
    ttt_initial_state,
    ttt_linear,
    ttt_linear_expectation,
    ttt_linear_oracle,
    ttt_linear_step,
    ttt_mlp,
    ttt_mlp_expectation,
    ttt_mlp_oracle,
    ttt_mlp_step,
)

DATA = Path(__file__).parents[1] / "data"
B, H, D, M, MINI_BATCH = 3, 2, 6, 10, 5
LENGTHS = (1, 2, MINI_BATCH - 1, MINI_BATCH, MINI_BATCH + 1, 2 * MINI_BATCH + 3)
OPS = {"linear": ttt_linear, "mlp": ttt_mlp}
ORACLES = {"linear": ttt_linear_oracle, "mlp": ttt_mlp_oracle}
STEPS = {"linear": ttt_linear_step, "mlp": ttt_mlp_step}
EXPECTATIONS = {"linear": ttt_linear_expectation, "mlp": ttt_mlp_expectation}

both_models = pytest.mark.parametrize("model", ["linear", "mlp"])
both_norms = pytest.mark.parametrize("inner_norm", [True, False], ids=["inner_norm", "plain"])


def relative_error(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def assert_close(value, expected, tolerance, name=""):
    assert value.shape == expected.shape, name
    assert relative_error(value, expected) <= tolerance, (name, relative_error(value, expected))


def assert_states_close(state, expected, tolerance):
    assert set(state) == set(expected)
    assert torch.equal(state["place"], expected["place"])
    for name in set(state) - {"place"}:
        if expected[name].any():
            assert_close(state[name], expected[name], tolerance, name)
        else:
            assert state[name].abs().max() <= tolerance, name


def make_weights(model, inner_norm, dtype=torch.float64, heads=H, dim=D, hidden=M, value_dim=None, bias=True):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape, std=0.3):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(std).to(dtype)

    value_dim = dim if inner_norm or value_dim is None else value_dim
    widths = [dim, value_dim] if model == "linear" else [dim, hidden, value_dim]
    weights = {}
    for index, (fan_in, fan_out) in enumerate(zip(widths, widths[1:], strict=False), start=1):
        weights[f"W{index}"] = normal(heads, fan_in, fan_out)
        if bias:
            weights[f"b{index}"] = normal(heads, fan_out)
    if inner_norm:
        weights["ln_weight"] = 1 + normal(heads, value_dim, std=0.1)
        weights["ln_bias"] = normal(heads, value_dim, std=0.1)
    return weights


def make_tokens(time, dtype=torch.float64, batch=B, heads=H, dim=D, value_dim=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, time, heads, size, generator=generator, dtype=torch.float64).to(dtype)
        for size in (dim, dim, value_dim or dim)
    )
    eta = torch.rand(batch, time, heads, generator=generator, dtype=torch.float64).mul(0.4).to(dtype)
    return q, k, v, eta


def make_state(weights, places, seed=2):
    """A state as an earlier call leaves it: rows at their own places, no gradients where a mini-batch has just begun."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.tensor(places)
    state = ttt_initial_state(weights, len(places), torch.float64)
    for name, tensor in state.items():
        if name == "place":
            continue
        noise = 0.2 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if name.startswith("d"):
            noise = torch.where((places > 0).view(-1, *[1] * (tensor.ndim - 1)), noise, 0)
        state[name] = tensor.detach() + noise
    return {**state, "place": places}


def make_scale(dtype=torch.float64):
    return (1 / torch.arange(1, MINI_BATCH + 1) + torch.linspace(-0.1, 0.2, MINI_BATCH)).to(dtype)


def gradients(function, inputs, seed=3):
    """Gradients of a random projection of everything that `function(leaves)` returns, with respect to the inputs."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    outputs = function(leaves)
    generator = torch.Generator().manual_seed(seed)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in outputs)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


# --------------------------------------------------------------------------------------------------------- definitions


@both_models
@both_norms
@pytest.mark.parametrize("phase", ["start", "phases"])
@pytest.mark.parametrize("time", LENGTHS)
def test_forward_state_and_gradients_equal_the_oracle(model, inner_norm, phase, time):
    weights = make_weights(model, inner_norm, value_dim=D if inner_norm else D + 1)
    value_dim = weights["W2" if model == "mlp" else "W1"].shape[-1]
    q, k, v, eta = make_tokens(time, value_dim=value_dim)
    inputs = {"q": q, "k": k, "v": v, "eta": eta, "token_scale": make_scale(), **weights}
    places = None
    if phase == "phases":
        state = make_state(weights, [0, 2, MINI_BATCH - 1])
        places = state.pop("place")
        inputs.update({f"state.{name}": x for name, x in state.items()})

    def run(op, leaves):
        state = {name[6:]: x for name, x in leaves.items() if name.startswith("state.")}
        return op(
            *(leaves[name] for name in ("q", "k", "v", "eta")),
            {name: leaves[name] for name in weights},
            MINI_BATCH,
            inner_norm,
            leaves["token_scale"],
            initial_state={**state, "place": places} if state else None,
            output_final_state=True,
        )

    op, oracle = OPS[model], ORACLES[model]
    expected_o, expected_state = run(oracle, inputs)
    o, state = run(op, inputs)
    assert o.dtype == torch.float64
    assert_close(o, expected_o, 1e-10)
    assert_states_close(state, expected_state, 1e-10)

    o, state = run(op, {name: x.float() for name, x in inputs.items()})
    assert o.dtype == torch.float32 and state["W1"].dtype == torch.float32
    assert_close(o, expected_o, 1e-5)
    assert_states_close(state, expected_state, 1e-5)

    def outputs(op, leaves):
        o, state = run(op, leaves)
        return [o, *(state[name] for name in sorted(state) if name != "place")]

    expected = gradients(functools.partial(outputs, oracle), inputs)
    for name, grad in gradients(functools.partial(outputs, op), inputs).items():
        if expected[name] is None:  # the learned weights do not matter once a state is given
            assert grad is None, name
        else:
            assert_close(grad, expected[name], 1e-9, name)


@pytest.mark.parametrize("case", ["ttt_linear_L37", "ttt_linear_L48", "ttt_mlp_L37", "ttt_mlp_L48"])
def test_reference_layer(case):
    """The TTT layer of the reference implementation, rebuilt around the op: its recorded output and input gradient."""
    with safe_open(DATA / f"{case}.safetensors", "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    p = {name.removeprefix("weights."): x for name, x in tensors.items() if name.startswith("weights.")}
    size, heads, theta = int(metadata["mini_batch_size"]), int(metadata["num_heads"]), float(metadata["rope_theta"])
    x = tensors["input"].requires_grad_()
    batch, time, width = x.shape
    head_dim = width // heads

    def rotate(x):
        """Rotary embedding of interleaved pairs, by the position within the mini-batch."""
        frequencies = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = ((torch.arange(time) % size).unsqueeze(1) * frequencies).unsqueeze(1)  # [T, 1, D/2]
        even, odd = x[..., 0::2], x[..., 1::2]
        pairs = (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin())
        return torch.stack(pairs, -1).flatten(-2)

    q, k, v = (F.linear(x, p[f"{name}_proj.weight"]).view(batch, time, heads, head_dim) for name in "qkv")
    logits = x @ p["learnable_ttt_lr_weight"].squeeze(1).T + p["learnable_ttt_lr_bias"].squeeze(1)
    eta = float(metadata["ttt_base_lr"]) * torch.sigmoid(logits) / head_dim
    token_scale = (1 / torch.arange(1, size + 1) + p["learnable_token_idx"]).clamp_min(0)
    weights = {name: p[name] for name in ("W1", "W2") if name in p}
    weights.update({name: p[name].squeeze(1) for name in ("b1", "b2") if name in p})
    weights.update(ln_weight=p["ttt_norm_weight"], ln_bias=p["ttt_norm_bias"])
    op = ttt_mlp if "W2" in weights else ttt_linear
    o, _ = op(rotate(q), rotate(k), v, eta, weights, size, token_scale=token_scale)
    o = F.layer_norm(o.flatten(2), (width,), p["post_norm.weight"], p["post_norm.bias"], eps=1e-6)
    output = F.linear(o, p["o_proj.weight"])
    output.backward(tensors["grad_output"])
    assert_close(output, tensors["output"], 1e-5)
    assert_close(x.grad, tensors["grad_input"], 1e-5)
    torch.testing.assert_close(output, tensors["output"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, tensors["grad_input"], rtol=1e-4, atol=1e-5)


def test_state_equals_plain_fla_reference():
    """flash-linear-attention's plain TTT-Linear trains by the same rule when eta is constant and every c_t is 1."""
    naive = pytest.importorskip("fla.ops.ttt.naive")
    time = 3 * MINI_BATCH
    weights = make_weights("linear", True, torch.float32)
    q, k, v, _ = make_tokens(time, torch.float32)
    state = ttt_initial_state(weights, B)
    eta = torch.full((B, time, H), 0.1)
    _, final_state = ttt_linear(
        q,
        k,
        v,
        eta,
        weights,
        MINI_BATCH,
        token_scale=torch.ones(MINI_BATCH),
        initial_state=state,
        output_final_state=True,
    )
    _, w, b = naive.chunk_ttt_linear_ref(
        q,
        k,
        v,
        weights["ln_weight"],
        weights["ln_bias"],
        eta.unsqueeze(-1),
        scale=1.0,
        mini_batch_size=MINI_BATCH,
        initial_state=state["W1"],
        initial_state_bias=state["b1"].unsqueeze(2),
        output_final_state=True,
    )
    assert_close(final_state["W1"], w, 1e-5)
    assert_close(final_state["b1"], b.squeeze(2), 1e-5)


def test_mini_batch_of_one_without_norm_is_the_delta_rule():
    time, value_dim = 11, 4
    q, k, v, beta = make_tokens(time, value_dim=value_dim)
    k = F.normalize(k, dim=-1)
    weights = {"W1": torch.zeros(H, D, value_dim, dtype=torch.float64)}
    o, state = ttt_linear(q, k, v, beta, weights, mini_batch_size=1, inner_norm=False, output_final_state=True)
    w = torch.zeros(B, H, D, value_dim, dtype=torch.float64)
    expected = []
    for t in range(time):
        error = torch.einsum("bhi,bhij->bhj", k[:, t], w) - v[:, t]
        w = w - beta[:, t, :, None, None] * k[:, t].unsqueeze(-1) * error.unsqueeze(-2)
        expected.append(torch.einsum("bhi,bhij->bhj", q[:, t], w))
    assert_close(o, torch.stack(expected, 1), 1e-12)
    assert_close(state["W1"], w, 1e-12)
    assert set(state) == {"W1", "dW1", "place"}


# ---------------------------------------------------------------------------------------------------------------- laws


@both_models
@both_norms
@pytest.mark.parametrize("pieces", [[1] * 13, [2, 3, 1, 7], [4, 1, 5, 3], [12, 1], [6, 7]], ids=str)
def test_any_split_gives_outputs_state_and_gradients_of_one_pass(model, inner_norm, pieces):
    op, time = OPS[model], sum(pieces)
    weights = make_weights(model, inner_norm)
    inputs = dict(zip("qkve", make_tokens(time), strict=True), scale=make_scale(), **weights)

    def run(pieces, leaves):
        learned = {name: leaves[name] for name in weights}
        state, outputs = None, []
        for tokens in zip(*(leaves[name].split(pieces, 1) for name in "qkve"), strict=True):
            o, state = op(
                *tokens,
                learned,
                MINI_BATCH,
                inner_norm,
                leaves["scale"],
                initial_state=state,
                output_final_state=True,
            )
            outputs.append(o)
        return torch.cat(outputs, 1), state

    single = {name: x.float() for name, x in inputs.items()}
    o, state = run(pieces, single)
    expected_o, expected_state = run([time], single)
    assert_close(o, expected_o, 1e-5)
    assert_states_close(state, expected_state, 1e-5)

    def outputs(pieces, leaves):
        o, state = run(pieces, leaves)
        return [o, *(state[name] for name in sorted(state) if name != "place")]

    expected = gradients(functools.partial(outputs, [time]), inputs)
    for name, grad in gradients(functools.partial(outputs, pieces), inputs).items():
        assert_close(grad, expected[name], 1e-9, name)


@both_models
@pytest.mark.parametrize("phase", ["start", "phases"])
@pytest.mark.parametrize("time,lengths", [(13, [13, 4, 0]), (13, [5, 12, 6]), (4, [1, 3, 2]), (1, [1, 0, 1])], ids=str)
def test_a_padded_row_gives_what_it_gives_alone(model, phase, time, lengths):
    op = OPS[model]
    weights = make_weights(model, True)
    tokens = make_tokens(time)
    state = make_state(weights, [3, 0, 4]) if phase == "phases" else None
    leaves = [x.clone().requires_grad_() for x in tokens]
    o, final_state = op(
        *leaves,
        weights,
        MINI_BATCH,
        lengths=torch.tensor(lengths),
        initial_state=state,
        output_final_state=True,
    )
    assert o.isfinite().all()
    real = torch.arange(time) < torch.tensor(lengths).unsqueeze(1)
    (o.square() * real[:, :, None, None]).sum().backward()
    start = ttt_initial_state(weights, B, torch.float64) if state is None else state
    for row, length in enumerate(lengths):
        row_start = {name: x[row : row + 1] for name, x in start.items()}
        row_final = {name: x[row : row + 1] for name, x in final_state.items()}
        for x in leaves:
            assert not x.grad[row, length:].any()
        if length == 0:
            assert_states_close(row_final, row_start, 0)
            continue
        alone = [x[row : row + 1, :length].clone().requires_grad_() for x in tokens]
        expected, expected_state = op(*alone, weights, MINI_BATCH, initial_state=row_start, output_final_state=True)
        expected.square().sum().backward()
        assert_close(o[row : row + 1, :length], expected, 1e-12)
        assert_states_close(row_final, expected_state, 1e-12)
        for x, x_alone in zip(leaves, alone, strict=True):
            assert_close(x.grad[row : row + 1, :length], x_alone.grad, 1e-10)


@both_models
def test_rows_are_independent_of_their_order(model):
    weights = make_weights(model, True)
    tokens = make_tokens(MINI_BATCH + 2)
    state = make_state(weights, [1, 4, 0])
    run = functools.partial(OPS[model], weights=weights, mini_batch_size=MINI_BATCH, output_final_state=True)
    o, final_state = run(*tokens, initial_state=state)
    order = torch.tensor([2, 0, 0, 1])
    o_2, final_state_2 = run(*(x[order] for x in tokens), initial_state={name: x[order] for name, x in state.items()})
    assert_close(o_2, o[order], 1e-12)
    assert_states_close(final_state_2, {name: x[order] for name, x in final_state.items()}, 1e-12)


@both_models
@pytest.mark.parametrize("time", [1, 7])
def test_arguments_are_left_as_they_were(model, time):
    weights = make_weights(model, True)
    state = make_state(weights, [0, 2, 4])
    tokens = make_tokens(time)
    before = [x.clone() for x in (*tokens, *weights.values(), *state.values())]
    _, final_state = OPS[model](*tokens, weights, MINI_BATCH, initial_state=state, output_final_state=True)
    for x in final_state.values():
        x.zero_()
    for x, y in zip((*tokens, *weights.values(), *state.values()), before, strict=True):
        assert torch.equal(x, y)


@both_models
def test_step_is_the_operator_on_one_token(model):
    weights = make_weights(model, True)
    q, k, v, eta = make_tokens(1)
    state = make_state(weights, [0, 2, 4])
    o, final_state = OPS[model](q, k, v, eta, weights, MINI_BATCH, initial_state=state, output_final_state=True)
    token = (x.squeeze(1) for x in (q, k, v, eta))
    o_step, state_step = STEPS[model](*token, weights, state, MINI_BATCH)
    assert torch.equal(o_step, o.squeeze(1))
    assert all(torch.equal(state_step[name], final_state[name]) for name in final_state)


# ----------------------------------------------------------------------------------------------------------- precision


@both_models
@both_norms
def test_bf16_inputs_are_computed_in_fp32(model, inner_norm):
    weights = make_weights(model, inner_norm, torch.float32)
    tokens = make_tokens(2 * MINI_BATCH + 3, torch.bfloat16)
    expected, _ = ORACLES[model](*tokens, weights, MINI_BATCH, inner_norm)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            o, state = OPS[model](*tokens, weights, MINI_BATCH, inner_norm, output_final_state=True)
        assert o.dtype == torch.bfloat16
        assert all(x.dtype == torch.float32 for name, x in state.items() if name != "place")
        assert_close(o, expected, 5e-3)  # the rounding of the output itself


@both_models
def test_finite_over_a_long_sequence_of_near_duplicate_keys(model):
    time, dim = 65_536, 8
    weights = make_weights(model, True, torch.float32, heads=1, dim=dim, hidden=2 * dim)
    generator = torch.Generator().manual_seed(0)
    k = (torch.ones(1, 1, 1, dim) + 1e-3 * torch.randn(1, time, 1, dim, generator=generator)).bfloat16()
    v = torch.randn(1, time, 1, dim, generator=generator).bfloat16()
    eta = torch.full((1, time, 1), 1 / dim)
    with torch.no_grad():
        o, state = OPS[model](k, k, v, eta, weights, mini_batch_size=64, output_final_state=True)
    assert o.isfinite().all() and all(x.isfinite().all() for x in state.values())


# ---------------------------------------------------------------------------------------------------------------- cost


class PeakMemory(TorchDispatchMode):
    """Bytes of all storages made inside the context: the largest sum alive at once, and the largest single one."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.largest = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
                    self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def cost(run, time, backward):
    """Peak bytes, bytes of the largest tensor, and matrix-product flops of a forward pass (and backward)."""
    with PeakMemory() as memory, FlopCounterMode(display=False) as flops:
        if backward:
            run(time).square().sum().backward()
        else:
            with torch.no_grad():
                run(time)
    return memory.peak, memory.largest, flops.get_total_flops()


@both_models
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_cost_grows_linearly(model, backward):
    weights = make_weights(model, True, torch.float32)

    def run(time):
        tokens = [x.requires_grad_() for x in make_tokens(time, torch.float32, batch=1)]
        return OPS[model](*tokens, weights, MINI_BATCH)[0]

    peak, _, flops = cost(run, 20 * MINI_BATCH, backward)
    peak_4, _, flops_4 = cost(run, 80 * MINI_BATCH, backward)
    assert flops > 0 and flops_4 <= 4.2 * flops
    assert peak_4 <= 4.4 * peak


@both_models
def test_checkpoint_groups_save_memory_and_change_nothing(model):
    time = 60 * MINI_BATCH
    weights = make_weights(model, True)
    inputs = dict(zip("qkve", make_tokens(time, batch=1), strict=True), **weights)

    def run(group, leaves):
        tokens = (leaves[name] for name in "qkve")
        learned = {name: leaves[name] for name in weights}
        state = ttt_initial_state(learned, 1, torch.float64)
        options = {"initial_state": state, "output_final_state": True, "checkpoint_group_size": group}
        o, state = OPS[model](*tokens, learned, MINI_BATCH, **options)
        return [o, state["W1"], state["b1"]]

    expected = gradients(functools.partial(run, 0), inputs)
    for group in (1, 7, 60, 100):
        for name, grad in gradients(functools.partial(run, group), inputs).items():
            assert_close(grad, expected[name], 1e-12, name)
        assert all(torch.equal(x, y) for x, y in zip(run(group, inputs), run(0, inputs), strict=True))

    peaks = {}
    for group in (0, 8):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        with PeakMemory() as memory:
            sum(x.sum() for x in run(group, leaves)).backward()
        peaks[group] = memory.peak
    assert peaks[8] < 0.7 * peaks[0]


# --------------------------------------------------------------------------------------------------------- expectation


def make_memory(time, positions, dtype=torch.float64, batch=B, heads=H, dim=D, scoring_dim=8, seed=5):
    generator = torch.Generator().manual_seed(seed)
    sizes = [(time, scoring_dim), (positions, scoring_dim), (positions, dim)]
    return [torch.randn(batch, n, heads, d, generator=generator, dtype=torch.float64).to(dtype) for n, d in sizes]


def brute_force_expectation(model, scoring_q, scoring_k, keys, mask, k, v, eta, weights, scale, inner_norm, **options):
    """f_{W_t}(key_i) of every pair, weighted by one softmax: what the oracle reads at token t when its query is key_i."""
    time, positions = k.shape[1], keys.shape[1]
    if mask is None:
        mask = torch.ones(time, positions, dtype=torch.bool).tril(positions - time)[None, None]
    scores = torch.einsum("bthe,bshe->bhts", scoring_q, scoring_k) * scale
    attention = torch.softmax(scores.masked_fill(~mask, -1e300), -1) * mask.any(-1, keepdim=True)
    outputs = []
    for t in range(time):
        values = []
        for i in range(positions):
            queries = torch.cat([k[:, :t], keys[:, i : i + 1]], 1)
            o, _ = ORACLES[model](
                queries, k[:, : t + 1], v[:, : t + 1], eta[:, : t + 1], weights, MINI_BATCH, inner_norm, **options
            )
            values.append(o[:, -1])
        outputs.append(torch.einsum("bhs,bshd->bhd", attention[:, :, t], torch.stack(values, 1)))
    return torch.stack(outputs, 1)


@both_models
@both_norms
@pytest.mark.parametrize(
    "time,earlier,mask,phase",
    [
        (1, 0, None, "start"),
        (1, 4, "random", "phases"),
        (7, 0, None, "start"),
        (6, 3, "random", "phases"),
        (4, 2, None, "phases"),
    ],
)
def test_expectation_equals_brute_force(model, inner_norm, time, earlier, mask, phase, monkeypatch):
    monkeypatch.setattr(op_ttt, "MIN_BLOCK", 2)
    monkeypatch.setattr(op_ttt, "BLOCK_ELEMENTS", 3 * B * H * MINI_BATCH * M)  # blocks of 3 (mlp) or 5 positions
    value_dim = D if inner_norm else D + 1
    weights = make_weights(model, inner_norm, value_dim=value_dim)
    _, k, v, eta = make_tokens(time, value_dim=value_dim)
    memory = make_memory(time, earlier + time)
    if mask is not None:
        generator = torch.Generator().manual_seed(6)
        mask = torch.rand(B, 1, time, earlier + time, generator=generator) < 0.6
        mask[0, 0, 0] = False  # a query that may attend nowhere
        mask[1, 0, :, 0] = True
    inputs = dict(zip(["scoring_q", "scoring_k", "keys", "k", "v", "eta"], [*memory, k, v, eta], strict=True))
    inputs.update(weights, token_scale=make_scale())
    places = None
    if phase == "phases":
        state = make_state(weights, [3, 0, 4])
        places = state.pop("place")
        inputs.update({f"state.{name}": x for name, x in state.items()})

    def run(op, leaves, scale):
        state = {name[6:]: x for name, x in leaves.items() if name.startswith("state.")}
        return op(
            *(leaves[name] for name in ("scoring_q", "scoring_k", "keys")),
            mask,
            *(leaves[name] for name in ("k", "v", "eta")),
            {name: leaves[name] for name in weights},
            scale,
            inner_norm=inner_norm,
            token_scale=leaves["token_scale"],
            initial_state={**state, "place": places} if state else None,
        )

    def op(*args, **options):
        o, state = EXPECTATIONS[model](*args, mini_batch_size=MINI_BATCH, output_final_state=True, **options)
        queries = args[4]
        _, expected_state = ORACLES[model](queries, *args[4:8], MINI_BATCH, output_final_state=True, **options)
        assert_states_close(state, expected_state, 1e-9)
        return o

    brute_force = functools.partial(brute_force_expectation, model)
    expected = run(brute_force, inputs, 0.7)
    assert_close(run(op, inputs, 0.7), expected, 1e-10)
    with torch.no_grad():
        assert_close(run(op, inputs, 0.7), expected, 1e-10)
    if mask is not None:
        assert not expected[0, 0].any()
    default = run(brute_force, inputs, 8**-0.5)
    assert_close(run(op, inputs, None), default, 1e-10)

    expected = gradients(lambda leaves: [run(brute_force, leaves, 0.7)], inputs)
    for name, grad in gradients(lambda leaves: [run(op, leaves, 0.7)], inputs).items():
        if expected[name] is None:
            assert grad is None, name
        elif not expected[name].any():  # attention to one position has no gradient
            assert grad.abs().max() <= 1e-12, name
        else:
            assert_close(grad, expected[name], 1e-9, name)


@both_models
def test_expectation_split_and_padding(model):
    time, lengths = 13, [13, 4, 9]
    weights = make_weights(model, True, torch.float32)
    _, k, v, eta = make_tokens(time, torch.float32)
    scoring_q, scoring_k, keys = make_memory(time, time, torch.float32)
    run = functools.partial(EXPECTATIONS[model], weights=weights, mini_batch_size=MINI_BATCH, output_final_state=True)
    o, final_state = run(scoring_q, scoring_k, keys, None, k, v, eta)
    state, start = None, 0
    for size in (1, 2, 6, 1, 3):
        stop = start + size
        piece, state = run(
            scoring_q[:, start:stop],
            scoring_k[:, :stop],
            keys[:, :stop],
            None,
            k[:, start:stop],
            v[:, start:stop],
            eta[:, start:stop],
            initial_state=state,
        )
        assert_close(piece, o[:, start:stop], 1e-5)
        start = stop
    assert_states_close(state, final_state, 1e-5)

    padded, final_state = run(scoring_q, scoring_k, keys, None, k, v, eta, lengths=torch.tensor(lengths))
    assert padded.isfinite().all()
    for row, length in enumerate(lengths):
        alone = [x[row : row + 1, :length] for x in (scoring_q, scoring_k, keys, k, v, eta)]
        expected, expected_state = run(*alone[:3], None, *alone[3:])
        assert_close(padded[row : row + 1, :length], expected, 1e-5)
        assert_states_close({name: x[row : row + 1] for name, x in final_state.items()}, expected_state, 1e-5)


@both_models
def test_expectation_of_bf16_inputs_is_computed_in_fp32(model):
    time = 2 * MINI_BATCH + 3
    weights = make_weights(model, True, torch.float32)
    memory, tokens = make_memory(time, time, torch.bfloat16), make_tokens(time, torch.bfloat16)[1:]
    double = [[x.double() for x in tensors] for tensors in (memory, tokens)]
    expected, _ = EXPECTATIONS[model](*double[0], None, *double[1], weights, mini_batch_size=MINI_BATCH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = EXPECTATIONS[model](
            *memory, None, *tokens, weights, mini_batch_size=MINI_BATCH, output_final_state=True
        )
    assert o.dtype == torch.bfloat16 and state["W1"].dtype == torch.float32
    assert_close(o, expected, 5e-3)


def test_expectation_of_a_plain_linear_model_is_its_mean_field():
    time, earlier, value_dim = 13, 4, 3
    weights = make_weights("linear", False, value_dim=value_dim)
    _, k, v, eta = make_tokens(time, value_dim=value_dim)
    scoring_q, scoring_k, keys = make_memory(time, earlier + time)
    o, _ = ttt_linear_expectation(
        scoring_q, scoring_k, keys, None, k, v, eta, weights, mini_batch_size=MINI_BATCH, inner_norm=False
    )
    mask = torch.ones(time, earlier + time, dtype=torch.bool).tril(earlier)
    q, key, value = (x.transpose(1, 2) for x in (scoring_q, scoring_k, keys))
    mean_key = F.scaled_dot_product_attention(q, key, value, attn_mask=mask).transpose(1, 2)
    expected, _ = ttt_linear(mean_key, k, v, eta, weights, MINI_BATCH, inner_norm=False)
    assert_close(o, expected, 1e-12)


@both_models
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
def test_expectation_memory_grows_linearly(model, masked, monkeypatch):
    """Peak memory over forward and backward grows as T, the flops as T * S."""
    monkeypatch.setattr(op_ttt, "BLOCK_ELEMENTS", 16 * H * MINI_BATCH * M)
    weights = make_weights(model, True, torch.float32)

    def run(time):
        mask = torch.ones(1, 1, time, time, dtype=torch.bool).tril() if masked else None
        memory = [x.requires_grad_() for x in make_memory(time, time, torch.float32, batch=1)]
        tokens = [x.requires_grad_() for x in make_tokens(time, torch.float32, batch=1)[1:]]
        return EXPECTATIONS[model](*memory, mask, *tokens, weights, mini_batch_size=MINI_BATCH)[0]

    time = 8 * MINI_BATCH
    peak, _, flops = cost(run, time, backward=True)
    peak_4, largest, flops_4 = cost(run, 4 * time, backward=True)
    assert flops_4 >= 8 * flops  # the work itself is quadratic: the blocks are not skipped
    assert peak_4 <= 5 * peak + (4 * time) ** 2 * masked  # and the given mask, one byte a pair
    assert largest < (4 * time) ** 2 * H * 4


# -------------------------------------------------------------------------------------------------------------- errors


def test_wrong_arguments_are_named():
    q, k, v, eta = make_tokens(4, torch.float32)
    weights = make_weights("linear", True, torch.float32)
    state = ttt_initial_state(weights, B)
    for changes, error, message in [
        ({"q": q[:, :3]}, ValueError, r"q must be .* \(3, 4, 2, 6\), got shape \(3, 3, 2, 6\)"),
        ({"k": k[0]}, ValueError, "k must be"),
        ({"k": k[:, :0]}, ValueError, "time >= 1"),
        ({"v": v[..., :5]}, ValueError, "v must be"),
        ({"eta": None}, ValueError, "eta, the inner learning rate"),
        ({"eta": 0.1}, TypeError, "eta must be a tensor"),
        ({"q": q.long()}, TypeError, "q must be a floating-point tensor, got torch.int64"),
        ({"eta": eta.unsqueeze(-1)}, ValueError, "eta must be"),
        ({"mini_batch_size": 0}, ValueError, "mini_batch_size must be >= 1, got 0"),
        ({"mini_batch_size": 2.0}, TypeError, "mini_batch_size must be an int"),
        ({"token_scale": torch.ones(15)}, ValueError, r"token_scale must be .* \(16,\), got shape \(15,\)"),
        ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths must be"),
        ({"lengths": torch.tensor([1, -2, 3])}, ValueError, r"between 0 and the 4 given tokens, got \[1, -2, 3\]"),
        ({"lengths": torch.tensor([1, 2, 5])}, ValueError, "between 0 and the 4 given tokens"),
        ({"lengths": torch.ones(3)}, TypeError, "lengths must be an integer tensor"),
        ({"checkpoint_group_size": -1}, ValueError, "checkpoint_group_size must be >= 0"),
        ({"backend": "fla"}, ValueError, "backend must be 'auto' or 'torch'"),
        ({"weights": {"W1": weights["W1"]}}, ValueError, r"\['ln_weight', 'ln_bias'\] are missing"),
        ({"weights": {**weights, "W1": weights["W1"][..., :5]}}, ValueError, "Dk=6 and Dv=5"),
        ({"weights": {**weights, "W1": weights["W1"][0]}}, ValueError, r"W1'\] must be \[heads, in, out\]"),
        ({"weights": {**weights, "b1": weights["b1"][:, None]}}, ValueError, r"b1'\] must be .* \(2, 6\)"),
        ({"weights": make_weights("mlp", True)}, ValueError, "call ttt_mlp"),
        ({"initial_state": {"W1": state["W1"]}}, ValueError, "ttt_initial_state"),
        ({"initial_state": ttt_initial_state(weights, B + 1)}, ValueError, "initial_state"),
        ({"initial_state": {**state, "place": state["place"][:1]}}, ValueError, "place"),
    ]:
        with pytest.raises(error, match=message):
            ttt_linear(**{"q": q, "k": k, "v": v, "eta": eta, "weights": weights, **changes})
    with pytest.raises(ValueError, match=r"\['W2'\] are missing"):
        ttt_mlp(q, k, v, eta, weights)
    with pytest.raises(ValueError, match=r"q of a one-token step must be a tensor \[batch, heads, dim\]"):
        ttt_linear_step(q, k[:, 0], v[:, 0], eta[:, 0], weights, state)
    with pytest.raises(ValueError, match=r"eta of a one-token step"):
        ttt_linear_step(q[:, 0], k[:, 0], v[:, 0], None, weights, state)
    with pytest.raises(ValueError, match="batch_size must be >= 1"):
        ttt_initial_state(weights, 0)
    with pytest.raises(ValueError, match="must hold W1"):
        ttt_initial_state({}, 1)


def test_wrong_expectation_arguments_are_named():
    _, k, v, eta = make_tokens(4, torch.float32)
    scoring_q, scoring_k, keys = make_memory(4, 6, torch.float32)
    weights = make_weights("mlp", True, torch.float32)
    mask = torch.ones(B, 1, 4, 6, dtype=torch.bool)
    arguments = {"scoring_q": scoring_q, "scoring_k": scoring_k, "keys": keys, "mask": mask}
    arguments.update(k=k, v=v, eta=eta, weights=weights)
    ttt_mlp_expectation(**arguments)
    for changes, error, message in [
        ({"keys": keys[:, :3]}, ValueError, "the 4 new ones last"),
        ({"keys": keys[..., :5]}, ValueError, "keys must be"),
        ({"scoring_q": scoring_q[:, :3]}, ValueError, "scoring_q must be"),
        ({"scoring_q": scoring_q[0]}, ValueError, "scoring_q must be"),
        ({"scoring_k": scoring_k[:, :5]}, ValueError, "scoring_k must be"),
        ({"mask": mask.float()}, TypeError, "mask must be bool"),
        ({"mask": mask[:, :, :3]}, ValueError, "mask must be"),
        ({"eta": None}, ValueError, "eta"),
    ]:
        with pytest.raises(error, match=message):
            ttt_mlp_expectation(**{**arguments, **changes})
