# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What the tests of the linear-family operators share: random inputs, and the laws that each operator obeys.

An operator's arguments are a dict: q, k, v, then its gates and parameters by name. A state is a tuple of tensors.
"""

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_avgpath import op_common

CHUNK = 64
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)
TIMED = ("q", "k", "v", "g", "beta")  # the arguments with a time axis

sizes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "length": st.integers(2, 23),
        "heads": st.integers(1, 3),
        "key_dim": st.integers(1, 6),
        "value_dim": st.integers(1, 6),
    }
)


def relative_error(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def assert_close(results, expected, tolerance):
    """Two dicts of tensors agree in names, shapes and, each tensor by its norm, in values."""
    assert results.keys() == expected.keys()
    for name, value in results.items():
        assert value.shape == expected[name].shape, name
        assert relative_error(value, expected[name]) <= tolerance, (name, relative_error(value, expected[name]))


def make_inputs(batch=2, length=2 * CHUNK + 3, heads=2, key_dim=8, value_dim=6, dtype=torch.float32):
    """q and k of length 1, decays between about 0.5 and 1, step sizes between 0 and 1."""
    shape = batch, length, heads
    q, k = (F.normalize(torch.randn(*shape, key_dim, dtype=torch.float64), dim=-1) for _ in range(2))
    inputs = {
        "q": q,
        "k": k,
        "v": torch.randn(*shape, value_dim, dtype=torch.float64),
        "g": F.logsigmoid(torch.randn(shape, dtype=torch.float64) + 2),
        "beta": torch.rand(shape, dtype=torch.float64),
    }
    return {name: x.to(dtype) for name, x in inputs.items()}


def extreme_decay(kind, like):
    """Log-decays `[B, T, H]` like `like` that overflow, or lose their digits, where they are summed or inverted badly."""
    place = torch.arange(like.shape[1])[:, None] % CHUNK
    strong = {"strong": place >= 0, "mixed": place < CHUNK - 10, "none": place < 0}[kind]
    return torch.where(strong, -20.0, 0.0 if kind == "none" else -1e-3).to(like).expand_as(like)


def make_state(inputs):
    """A random `[B, H, D_k, D_v]` state that fits `inputs`."""
    batch, _, heads, dim = inputs["k"].shape
    return (torch.randn(batch, heads, dim, inputs["v"].shape[-1], dtype=inputs["v"].dtype),)


def split_state(state):
    return () if state is None else tuple(state) if isinstance(state, tuple | list) else (state,)


def join_state(state):
    return None if not state else state[0] if len(state) == 1 else tuple(state)


def run(function, inputs, state=(), gradients=True, seed=1, **options):
    """Output, final state, and the gradients of a random weighting of both, as a dict of tensors."""
    inputs = {name: x.detach().requires_grad_(gradients) for name, x in inputs.items()}
    state = tuple(x.detach().requires_grad_(gradients) for x in state)
    o, final = function(**inputs, initial_state=join_state(state), output_final_state=True, **options)
    results = {"o": o, **{f"state {i}": x for i, x in enumerate(split_state(final))}}
    if gradients:
        generator = torch.Generator().manual_seed(seed)
        loss = sum((x.double() * torch.randn(x.shape, generator=generator).double()).sum() for x in results.values())
        loss.backward()
        leaves = {**inputs, **{f"state {i}": x for i, x in enumerate(state)}}
        results |= {
            f"gradient of {name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()
        }
    return {name: x.detach() for name, x in results.items()}


def run_oracle(oracle, inputs, state=(), gradients=True, **options):
    """`run` of the float64 definition on the same values."""
    inputs = {name: x.double() for name, x in inputs.items()}
    return run(oracle, inputs, tuple(x.double() for x in state), gradients, **options)


def part_of(inputs, start, stop):
    return {name: x[:, start:stop] if name in TIMED else x for name, x in inputs.items()}


def use_small_chunks(monkeypatch, module):
    """Chunks of 4 tokens in segments of at most 2 chunks, so that short sequences cross both."""
    monkeypatch.setattr(module, "CHUNK_SIZE", 4)
    monkeypatch.setattr(op_common, "SEGMENT_ROWS", {"cpu": 8})


def check_gradients_numerically(function, inputs, state):
    """Finite differences in float64, through the output and the final state."""
    names = list(inputs)

    def flat(*tensors):
        arguments = dict(zip(names, tensors[: len(names)], strict=True))
        initial = join_state(tensors[len(names) :])
        o, final = function(**arguments, initial_state=initial, output_final_state=True)
        return (o, *split_state(final))

    tensors = [x.detach().double().requires_grad_() for x in (*inputs.values(), *state)]
    assert torch.autograd.gradcheck(flat, tensors, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=True)


def check_split(function, inputs, state, pieces, tolerance):
    """Pieces run one after the other with the state carried give what one pass gives, gradients included."""

    def in_pieces(initial_state=None, output_final_state=True, **arguments):
        outputs, start = [], 0
        for size in pieces:
            o, initial_state = function(
                **part_of(arguments, start, start + size), initial_state=initial_state, output_final_state=True
            )
            outputs.append(o)
            start += size
        return torch.cat(outputs, 1), initial_state

    assert sum(pieces) == inputs["q"].shape[1]
    assert_close(run(in_pieces, inputs, state), run(function, inputs, state), tolerance)


def check_steps(step, function, inputs, state, tolerance):
    """The one-token form, repeated, gives the outputs and final state of one pass, and leaves its argument alone."""
    expected = run(function, inputs, state, gradients=False)
    outputs, carried = [], state
    for t in range(inputs["q"].shape[1]):
        token = {name: x[:, t] if name in TIMED else x for name, x in inputs.items()}
        before = [x.clone() for x in carried]
        o, new = step(**token, initial_state=join_state(carried))
        assert all(torch.equal(x, y) for x, y in zip(carried, before, strict=True))
        carried = split_state(new)
        outputs.append(o)
    results = {"o": torch.stack(outputs, 1), **{f"state {i}": x for i, x in enumerate(carried)}}
    assert_close(results, expected, tolerance)


def check_no_op_tokens(function, inputs, state, tolerance):
    """Tokens with g = 0 and beta = 0 leave the state bit for bit, and change nothing for the tokens around them."""
    zeros = {name: torch.zeros_like(x) for name, x in inputs.items() if name in ("g", "beta")}
    idle = run(function, {**inputs, **zeros}, state, gradients=False)
    assert all(torch.equal(idle[f"state {i}"], x) for i, x in enumerate(state))

    keep = torch.arange(inputs["q"].shape[1]) % 3 != 1
    thinned = {name: x[:, keep] if name in TIMED else x for name, x in inputs.items()}
    marked = dict(inputs)
    for name in zeros:
        marked[name] = torch.where(keep[:, None], inputs[name], 0)
    results, expected = run(function, marked, state, False), run(function, thinned, state, False)
    results["o"] = results["o"][:, keep]
    assert_close(results, expected, tolerance)


class Work(TorchDispatchMode):
    """Counts the elements that operations write."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements += sum(x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if _is_tensor(x))
        return out


def _is_tensor(x):
    return isinstance(x, torch.Tensor)


def cost(function, inputs, state=()):
    """Elements written, forward and backward, and bytes saved for the backward pass."""
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with Work() as work, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run(function, inputs, state)
    return work.elements, sum(saved.values())


def check_linear_cost(function, make, length=1024):
    """Four times the tokens take four times the work and the memory; `make(length)` gives the inputs."""
    for short, long in zip(cost(function, make(length)), cost(function, make(4 * length)), strict=True):
        assert 0 < long <= 4.3 * short
