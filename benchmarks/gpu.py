# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""One GPU, under 8 minutes: are the laws kept in bf16 and fp32, and how fast is it beside flash-linear-attention?

    python -m benchmarks.gpu                        # writes docs/results/gpu.json and gpu.md (or into $OUT, or --out)
    python -m benchmarks.gpu --device cpu --quick   # a smoke test of this script, on the torch backend

Parts, each with its share of the time; a case that fails is printed and recorded, and the next one runs:

    laws       every operator, on the `torch` and the `fla` backend, against its float64 definition: output, final state,
               gradients; a sequence split between the backends; 65,536 near-duplicate keys
    models     padding, packing, cached pieces and generation through whole models; the logits of flash-linear-attention's
               own models with the same weights
    ops        operators of both backends, flash-linear-attention's kernel called directly, softmax with flash attention
    layers     our mixers and flash-linear-attention's layers
    training   whole models: ours on both backends, flash-linear-attention's, Llama with flash attention
    decoding   the same models, one token at a time after a context

The exit status is 1 if a law was broken or a case raised an error, after all results have been written.
"""

import argparse
import functools
import gc
import json
import os
import shlex
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.measure import machine_facts
from benchmarks.report import Column, table
from modeling_avgpath import AvgPathCache, AvgPathConfig, AvgPathForCausalLM, op_fla, ops
from modeling_avgpath.mixer import RecurrentMixer
from modeling_avgpath.peers import from_peer

MINI_BATCH = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LIMITS = {  # relative errors
    ("fp32", "output"): 1e-5,
    ("fp32", "state"): 1e-5,
    ("fp32", "gradient"): 1e-4,
    ("fp32", "model"): 1e-4,
    ("bf16", "output"): 2e-2,
    ("bf16", "state"): 2e-2,
    ("bf16", "gradient"): 2e-2,
    ("bf16", "model"): 2e-2,
}
OPERATORS = {
    "gated_delta_rule": ("g", "beta"),
    "delta_rule": ("beta",),
    "linear_attention": ("g", "beta"),
    "mesa": ("g", "beta", "lamb"),
    "ttt_linear": ("rate", "W1", "b1", "ln_weight", "ln_bias"),
}
MIXERS = ("gated_delta_net", "delta_net", "linear", "mesa_net", "ttt_linear")
SHARES = {"laws": 0.24, "models": 0.16, "ops": 0.22, "layers": 0.08, "training": 0.18, "decoding": 0.12}


@dataclass(frozen=True)
class Sizes:
    """Heads and head dim are the same everywhere, for Triton tunes its kernels anew for every other."""

    heads: int = 16
    dim: int = 64
    law_length: int = 8 * MINI_BATCH + 3
    near_duplicates: int = 65_536
    lengths: tuple[int, ...] = (2048, 8192, 32_768, 65_536)
    layers: int = 8
    vocabulary: int = 8192
    step_tokens: int = 32_768  # of a training step, or one sequence if that is longer
    decoded: int = 32
    large_batch: int = 16  # decoded at the shortest context

    @property
    def width(self) -> int:
        return self.heads * self.dim

    @property
    def shape(self) -> dict[str, int]:
        """Fields that all models' configs share."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": 4 * self.width * 2 // 3,
            "num_hidden_layers": self.layers,
        }


QUICK = Sizes(2, 16, 4 * MINI_BATCH + 3, 512, (64, 128), 2, 64, 128, 2, 2)


class OutOfTime(BaseException):
    """Raised inside a case when its part's time is up; no library's `except Exception` may swallow it."""


@dataclass
class Run:
    """Settings and records of one run of the script."""

    device: str
    sizes: Sizes
    seconds: float
    folder: Path
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {part: [] for part in SHARES})
    failures: list[dict[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    part: str = ""
    deadline: float = 0.0

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def backends(self) -> tuple[str, ...]:
        return ("torch", "fla") if self.on_gpu else ("torch",)

    def attempt(self, case: str, function: Callable[[], Any]) -> Any:
        """The function's result; None if it failed, which is recorded, or if the part has no time left for it."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            self.skipped.append(f"{self.part}: {case}")
            return None
        signal.setitimer(signal.ITIMER_REAL, left + 5)
        try:
            return function()
        except OutOfTime:
            self.skipped.append(f"{self.part}: {case} (cut off)")
        except Exception as error:
            self.fail(case, f"{type(error).__name__}: {error}".splitlines()[0], traceback.format_exc())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()
        return None

    def fail(self, case: str, reason: str, details: str = "") -> None:
        print(f"FAILED {self.part}: {case}: {reason}", flush=True)
        self.failures.append({"part": self.part, "case": case, "reason": reason, "details": details})

    def record(self, **row: Any) -> None:
        self.rows[self.part].append(row)
        print(" ", self.part, " ".join(f"{name}={_short(value)}" for name, value in row.items()), flush=True)

    def check(self, case: str, dtype: str, backend: str, what: str, error: float, limit: float) -> None:
        """Record a law: `error` must not exceed `limit`, nor be NaN."""
        passed = error <= limit
        self.record(case=case, dtype=dtype, backend=backend, what=what, error=error, limit=limit, passed=str(passed))
        if not passed:
            self.fail(f"{case}, {dtype}, {backend}", f"{what} is off by {error:.1e}, more than {limit:.0e}")

    def clock(self, function: Callable[[], Any], seconds: float = 0.5, runs: int = 5) -> tuple[float, int | None]:
        """Median seconds of a call, and on a GPU the most bytes that it held beyond what was held before."""
        before = None
        if self.on_gpu:
            function()  # compiles and tunes
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        times: list[float] = []
        while len(times) < runs and sum(times) < seconds:
            start = time.perf_counter()
            function()
            if self.on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times), None if before is None else torch.cuda.max_memory_allocated() - before

    def time_case(self, case: str, amount: int, function: Callable[[], Any], **row: Any) -> None:
        """Record the time of a call that handles `amount` tokens."""
        timed = self.attempt(case, lambda: self.clock(function))
        if timed is not None:
            seconds, peak = timed
            peak_gib = None if peak is None else peak / 2**30
            self.record(**row, ms=1e3 * seconds, tokens_per_second=amount / seconds, peak_gib=peak_gib)


def _short(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value


@contextmanager
def only_torch(backend: str = "torch") -> Iterator[None]:
    """With "torch", models and operators do not know of any kernel; with another name nothing changes."""
    with mock.patch.object(op_fla, "KERNELS", {}) if backend == "torch" else nullcontext():
        yield


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected (over 1 where nothing is expected)."""
    actual, expected = actual.detach().double(), expected.detach().double()
    norm = expected.norm().item()
    return (actual - expected).norm().item() / (norm if norm > 1e-12 else 1.0)


# Operators


def make_inputs(run: Run, name: str, length: int, dtype: torch.dtype, batch: int = 1) -> dict[str, Tensor]:
    """q, k (L2-normalised), v `[B, T, H, D]` in `dtype`; what the operator needs beside them in fp32."""
    generator = torch.Generator().manual_seed(0)
    heads, dim = run.sizes.heads, run.sizes.dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (F.normalize(normal(batch, length, heads, dim), dim=-1) for _ in range(2))
    inputs = {"q": q, "k": k, "v": normal(batch, length, heads, dim)}
    inputs = {key: x.to(run.device, dtype) for key, x in inputs.items()}
    drawn = {
        "g": lambda: F.logsigmoid(normal(batch, length, heads) + 3),
        "beta": lambda: normal(batch, length, heads).sigmoid(),
        "lamb": lambda: 0.25 + normal(heads, dim).abs(),
        "rate": lambda: normal(batch, 1, heads).sigmoid() / dim,  # one for all tokens: all that the kernel can do
        "W1": lambda: 0.1 * normal(heads, dim, dim),
        "b1": lambda: 0.1 * normal(heads, dim),
        "ln_weight": lambda: 1 + 0.1 * normal(heads, dim),
        "ln_bias": lambda: 0.1 * normal(heads, dim),
    }
    return inputs | {key: drawn[key]().to(run.device) for key in OPERATORS[name]}


def call(name: str, backend: str, inputs: dict[str, Tensor], state: Any = None, output_state: bool = True):
    """(o, final state) on a backend; "oracle" is the float64 definition."""
    function = getattr(ops, f"{name}_oracle" if backend == "oracle" else name)
    options: dict[str, Any] = {"initial_state": state, "output_final_state": output_state}
    if backend != "oracle":
        options["backend"] = backend
    if name != "ttt_linear":
        return function(**inputs, **options)
    q, k, v = (inputs[key] for key in "qkv")
    weights = {key: inputs[key] for key in ("W1", "b1", "ln_weight", "ln_bias")}
    return function(q, k, v, inputs["rate"].expand(-1, q.shape[1], -1), weights, MINI_BATCH, **options)


def state_tensors(state: Any) -> list[Tensor]:
    tensors = state.values() if isinstance(state, dict) else state if isinstance(state, tuple | list) else [state]
    return [x for x in tensors if x is not None and x.is_floating_point()]


def results(name: str, backend: str, inputs: dict[str, Tensor], state: Any = None) -> dict[str, list[Tensor]]:
    """Output, final state, and the gradients of a random weighting of both."""
    double = backend == "oracle"
    leaves = {key: (x.double() if double else x).detach().requires_grad_() for key, x in inputs.items()}
    o, final = call(name, backend, leaves, state)
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=generator).to(x.device)).sum() for x in (o, *state_tensors(final))
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"output": [o], "state": state_tensors(final), "gradient": list(gradients)}


def compare(run: Run, case: str, dtype: str, backend: str, actual: dict, expected: dict) -> None:
    for what, tensors in expected.items():
        error = max(relative_error(a, b) for a, b in zip(actual[what], tensors, strict=True))
        limit = LIMITS[dtype, what]
        # The solver's tolerance, not fp32, ends the accuracy of mesa.
        run.check(case, dtype, backend, what, error, max(limit, 1e-4) if case.startswith("mesa") else limit)


def laws(run: Run) -> None:
    length = run.sizes.law_length
    for name in OPERATORS:
        for dtype_name, dtype in DTYPES.items():
            inputs = make_inputs(run, name, length, dtype)
            expected = run.attempt(f"{name} oracle", functools.partial(results, name, "oracle", inputs))
            for backend in run.backends if expected is not None else ():
                if backend == "fla" and dtype_name == "fp32":
                    run.attempt(f"{name} refuses fp32", functools.partial(expect_refusal, name, inputs))
                    continue
                actual = run.attempt(f"{name} {dtype_name} {backend}", lambda: results(name, backend, inputs))  # noqa: B023
                if actual is not None:
                    compare(run, name, dtype_name, backend, actual, expected)
    for name in OPERATORS if run.on_gpu else ():
        run.attempt(f"{name} split", functools.partial(split_law, run, name))
    for name in OPERATORS:
        run.attempt(f"{name} near-duplicate keys", functools.partial(near_duplicates, run, name))


def expect_refusal(name: str, inputs: dict[str, Tensor]) -> None:
    try:
        call(name, "fla", inputs)
    except ValueError:
        return
    raise AssertionError("backend='fla' took fp32 inputs, which its kernels multiply in TF32")


def split_law(run: Run, name: str) -> None:
    """The first part on one backend, the rest on the other, against the definition on the whole."""
    inputs = make_inputs(run, name, run.sizes.law_length, torch.bfloat16)
    expected = results(name, "oracle", inputs)
    del expected["gradient"]
    timed = {key for key, x in inputs.items() if x.ndim > 1 and x.shape[1] == run.sizes.law_length}
    cut = run.sizes.law_length // 2 // MINI_BATCH * MINI_BATCH
    for first, second in (("torch", "fla"), ("fla", "torch")):
        with torch.no_grad():
            parts = [
                {key: x[:, part] if key in timed else x for key, x in inputs.items()}
                for part in (slice(0, cut), slice(cut, None))
            ]
            head, state = call(name, first, parts[0])
            tail, state = call(name, second, parts[1], state)
        actual = {"output": [torch.cat([head, tail], 1)], "state": state_tensors(state)}
        compare(run, f"{name} split", "bf16", f"{first}, then {second}", actual, expected)


@torch.no_grad()
def near_duplicates(run: Run, name: str) -> None:
    """Long memory of nearly the same key: bf16 against fp32 on the same numbers."""
    inputs = make_inputs(run, name, run.sizes.near_duplicates, torch.bfloat16)
    base = F.normalize(torch.randn(1, 1, *inputs["k"].shape[2:], device=run.device), dim=-1)
    inputs["k"] = F.normalize(base + 0.02 * inputs["k"].float(), dim=-1).bfloat16()
    if "g" in inputs:
        inputs["g"] = inputs["g"] / 100
    full = {key: x.float() for key, x in inputs.items()}
    expected, _ = call(name, "torch", full, output_state=False)
    for backend in run.backends:
        o, _ = call(name, backend, inputs, output_state=False)
        error, case = relative_error(o, expected), f"{name}, {o.shape[1]:,} near-duplicate keys"
        if backend == "fla" and not op_fla.KERNELS[name].automatic:  # for this very reason: reported, not required
            run.record(case=case, dtype="bf16", backend=backend, what="output", error=error, passed="not required")
        else:
            run.check(case, "bf16", backend, "output", error, 2e-2)


# Models


def ours(sizes: Sizes, mixer: str, ratio: str = "1:0", **changes: Any) -> AvgPathForCausalLM:
    heads = {
        "num_attention_heads": sizes.heads,
        "linear_num_key_heads": sizes.heads,
        "linear_num_value_heads": sizes.heads,
        "linear_key_head_dim": sizes.dim,
        "linear_value_head_dim": sizes.dim,
    }
    torch.manual_seed(0)
    return AvgPathForCausalLM(AvgPathConfig(**sizes.shape | heads | changes, mixer=mixer, hybrid_ratio=ratio))


def theirs(sizes: Sizes, mixer: str, **changes: Any):
    """flash-linear-attention's model of that mixer, of the same shape."""
    from fla import models

    configs = {
        "gated_delta_net": (models.GatedDeltaNetConfig, {"head_dim": sizes.dim, "expand_v": 1.0}),
        "delta_net": (models.DeltaNetConfig, {"use_gate": True}),
        "linear": (models.LinearAttentionConfig, {}),
        "mesa_net": (models.MesaNetConfig, {"head_dim": sizes.dim, "use_output_gate": True}),
    }
    make_config, fields = configs[mixer]
    config = make_config(**sizes.shape | fields | changes, num_heads=sizes.heads)
    torch.manual_seed(0)
    return models_class(config)(config)


def models_class(config: Any) -> type:
    """The class for causal language modelling of one of flash-linear-attention's configs."""
    from fla import models

    return getattr(models, type(config).__name__.removesuffix("Config") + "ForCausalLM")


def llama(sizes: Sizes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes.shape, num_attention_heads=sizes.heads, attn_implementation="sdpa")
    return LlamaForCausalLM(config)


def models(run: Run) -> None:
    for mixer in (*MIXERS, "softmax"):
        for dtype in DTYPES:
            run.attempt(f"{mixer} {dtype}", functools.partial(model_laws, run, mixer, dtype))
    for mixer in ("gated_delta_net", "delta_net", "mesa_net") if run.on_gpu else ():
        run.attempt(f"{mixer} with flash-linear-attention's weights", functools.partial(same_logits, run, mixer))


@torch.no_grad()
def model_laws(run: Run, mixer: str, dtype: str) -> None:
    model = ours(run.sizes, mixer, num_hidden_layers=2).to(run.device, DTYPES[dtype]).eval()
    lengths = run.sizes.law_length, run.sizes.law_length // 2
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, run.sizes.vocabulary, (1, n), generator=generator).to(run.device) for n in lengths]
    alone = [model(text).logits for text in texts]
    limit = LIMITS[dtype, "model"]

    def check(case: str, actual: Tensor, expected: Tensor) -> None:
        run.check(f"{mixer}: {case}", dtype, "auto", "logits", relative_error(actual, expected), limit)

    gap = lengths[0] - lengths[1]
    padded = torch.cat([texts[0], F.pad(texts[1], (gap, 0))])
    mask = torch.ones_like(padded)
    mask[1, :gap] = 0
    check("padded on the left", model(padded, attention_mask=mask).logits[1:, gap:], alone[1])
    documents = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=run.device)
    check("packed", model(torch.cat(texts, 1), cu_seq_lens_q=documents).logits, torch.cat(alone, 1))
    cache, pieces = AvgPathCache(model.config), []
    for piece in texts[0].split([lengths[0] - 2 * MINI_BATCH - 2, 2 * MINI_BATCH, 1, 1], dim=1):
        pieces.append(model(piece, cache=cache).logits)
    check("cached in pieces", torch.cat(pieces, 1), alone[0])
    if dtype == "fp32":
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        batched = model.generate(padded, attention_mask=mask, **options)[1, lengths[0] :]
        single = model.generate(texts[1], **options)[0, lengths[1] :]
        differing = (batched != single).float().mean().item()
        run.check(f"{mixer}: generated from a padded row", dtype, "auto", "share of tokens", differing, 0.0)


@torch.no_grad()
def same_logits(run: Run, mixer: str) -> None:
    peer = theirs(run.sizes, mixer, num_hidden_layers=2).to(run.device, torch.bfloat16).eval()
    model = from_peer(peer).to(run.device).eval()
    ids = torch.randint(1, run.sizes.vocabulary, (2, 2 * run.sizes.law_length), device=run.device)
    error = relative_error(model(ids).logits, peer(ids).logits)
    # Two independent bf16 computations: each may be off by what a model may.
    run.check(f"{mixer}: logits of the peer", "bf16", "auto", "logits", error, 2 * LIMITS["bf16", "model"])


# Times


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention, on a GPU by no other kernel than flash attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def direct_kernel(name: str, inputs: dict[str, Tensor]) -> Tensor:
    """flash-linear-attention's public function, called as its documentation does."""
    q, k, v = (inputs[key] for key in "qkv")
    if name == "ttt_linear":
        from fla.ops.ttt import chunk_ttt_linear

        steps = torch.arange(1, MINI_BATCH + 1, device=q.device).repeat(-(-q.shape[1] // MINI_BATCH))[: q.shape[1]]
        eta = (inputs["rate"] / steps[:, None]).to(q.dtype).unsqueeze(-1)
        weight, bias = (inputs[key].to(q.dtype) for key in ("ln_weight", "ln_bias"))
        state, state_bias = (inputs[key].expand(len(q), *inputs[key].shape) for key in ("W1", "b1"))
        return chunk_ttt_linear(
            q, k, v, weight, bias, eta, scale=1.0, chunk_size=MINI_BATCH,
            initial_state=state, initial_state_bias=state_bias.unsqueeze(2),
        )[0]  # fmt: skip
    if name == "mesa":
        from fla.ops.mesa_net import chunk_mesa_net

        return chunk_mesa_net(q, k, v, inputs["g"], inputs["beta"], inputs["lamb"])[0]
    if name == "linear_attention":
        from fla.ops.simple_gla import chunk_simple_gla

        return chunk_simple_gla(q, k, (v * inputs["beta"].unsqueeze(-1)).to(v.dtype), inputs["g"])[0]
    if name == "delta_rule":
        from fla.ops.delta_rule import chunk_delta_rule

        return chunk_delta_rule(q, k, v, inputs["beta"])[0]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, inputs["g"], inputs["beta"])[0]


def time_ops(run: Run) -> None:
    for length in run.sizes.lengths:
        for name in OPERATORS:
            inputs = make_inputs(run, name, length, torch.bfloat16)
            inputs = {key: x.requires_grad_() for key, x in inputs.items()}
            sides: dict[str, Callable[[dict], Tensor]] = {
                f"ours, {backend}": lambda x, b=backend, n=name: call(n, b, x, output_state=False)[0]
                for backend in reversed(run.backends)
            }
            if run.on_gpu:
                sides["flash-linear-attention"] = functools.partial(direct_kernel, name)
            if name == next(iter(OPERATORS)):
                sides["softmax, flash attention"] = lambda x: flash(x["q"], x["k"], x["v"])
            for side, function in sides.items():
                forward, both = passes(function, inputs)
                for kind, timed in (("forward", forward), ("forward + backward", both)):
                    row = {
                        "op": name if "softmax" not in side else "softmax",
                        "tokens": length,
                        "pass": kind,
                        "side": side,
                    }
                    run.time_case(f"{name} {length} {side} {kind}", length, timed, **row)


def passes(function: Callable[[dict], Tensor], inputs: dict[str, Tensor]) -> tuple[Callable, Callable]:
    grad = torch.ones_like(inputs["v"])

    @torch.no_grad()
    def forward() -> None:
        function(inputs)

    def both() -> None:
        o = function(inputs)
        torch.autograd.grad(o, [x for x in inputs.values()], grad, allow_unused=True)

    return forward, both


def time_layers(run: Run) -> None:
    for length in run.sizes.lengths:
        x = torch.randn(1, length, run.sizes.width, device=run.device, dtype=torch.bfloat16, requires_grad=True)
        for mixer in MIXERS:
            sides = {f"ours, {'auto' if backend == 'fla' else backend}": backend for backend in reversed(run.backends)}
            if run.on_gpu and mixer != "ttt_linear":
                sides["flash-linear-attention"] = "peer"
            for side, backend in sides.items():
                layer = run.attempt(f"{mixer} {side}", functools.partial(make_layer, run, mixer, backend == "peer"))
                if layer is None:
                    continue

                def step(layer=layer, backend=backend, x=x) -> None:
                    with only_torch(backend):
                        layer(x)[0].sum().backward()

                run.time_case(f"{mixer} {length} {side}", length, step, mixer=mixer, tokens=length, side=side)


def make_layer(run: Run, mixer: str, peer: bool) -> torch.nn.Module:
    make = theirs if peer else ours
    model = make(run.sizes, mixer, num_hidden_layers=1)
    if peer:
        layer = model.model.layers[0].attn
    else:
        layer = next(module for module in model.modules() if isinstance(module, RecurrentMixer))
    return layer.to(run.device, torch.bfloat16).train()


def contenders(run: Run) -> dict[str, tuple[Callable[[], torch.nn.Module], str]]:
    """Name -> (a function that makes the model, backend)."""
    sizes = run.sizes
    made: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {}
    made["gated_delta_net"] = functools.partial(ours, sizes, "gated_delta_net"), "auto"
    if run.on_gpu:
        made["flash-linear-attention GatedDeltaNet"] = functools.partial(theirs, sizes, "gated_delta_net"), "auto"
    made["Llama, flash attention"] = functools.partial(llama, sizes), "auto"
    made["gated_delta_net 3:1"] = functools.partial(ours, sizes, "gated_delta_net", "3:1"), "auto"
    for mixer, peer in (("delta_net", "DeltaNet"), ("mesa_net", "MesaNet"), ("linear", "LinearAttention")):
        made[mixer] = functools.partial(ours, sizes, mixer), "auto"
        if run.on_gpu:
            made[f"flash-linear-attention {peer}"] = functools.partial(theirs, sizes, mixer), "auto"
    made["ttt_linear"] = functools.partial(ours, sizes, "ttt_linear"), "auto"
    if run.on_gpu:
        made["gated_delta_net, torch backend"] = functools.partial(ours, sizes, "gated_delta_net"), "torch"
    return made


def training(run: Run) -> None:
    for length in run.sizes.lengths:
        batch = max(1, run.sizes.step_tokens // length)
        ids = torch.randint(run.sizes.vocabulary, (batch, length), device=run.device)
        for name, (make, backend) in contenders(run).items():
            model = run.attempt(name, lambda make=make: make().to(run.device, torch.bfloat16).train())
            if model is None:
                continue
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=run.on_gpu)

            def step(model=model, optimizer=optimizer, backend=backend, ids=ids) -> None:
                with only_torch(backend):
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
            row = {"model": name, "tokens": length, "batch": batch, "parameters": parameters}
            run.time_case(f"{name} {length}", ids.numel(), step, **row)
            del model, optimizer, step


def decoding(run: Run) -> None:
    shortest = run.sizes.lengths[0]
    cases = [(run.sizes.lengths[-1], 1), (shortest, 1), (shortest, run.sizes.large_batch)]
    cases += [(length, 1) for length in run.sizes.lengths[1:-1]]
    names = ("gated_delta_net", "gated_delta_net 3:1", "mesa_net", "ttt_linear", "Llama", "flash-linear-attention")
    for context, batch in cases:
        for name, (make, backend) in contenders(run).items():
            if not name.startswith(names) or backend == "torch":
                continue
            seconds = run.attempt(
                f"{name} {context} x {batch}", functools.partial(decode, run, make, name, context, batch)
            )
            if seconds is not None:
                row = {"model": name, "context": context, "batch": batch}
                run.record(**row, ms=1e3 * seconds, tokens_per_second=batch / seconds)


@torch.no_grad()
def decode(run: Run, make: Callable[[], Any], name: str, context: int, batch: int) -> float:
    """Median seconds of one token for the whole batch."""
    model = make().to(run.device, torch.bfloat16).eval()
    ids = torch.randint(run.sizes.vocabulary, (batch, context), device=run.device)
    if name.startswith("flash-linear-attention"):
        past = model(ids, use_cache=True, logits_to_keep=1).past_key_values

        def step(token: Tensor) -> None:
            model(token, past_key_values=past, use_cache=True)

    else:
        is_ours = isinstance(model, AvgPathForCausalLM)
        cache = AvgPathCache(model.config) if is_ours else DynamicCache(config=model.config)
        model(input_ids=ids, cache=cache, logits_to_keep=1)

        def step(token: Tensor) -> None:
            model(input_ids=token, cache=cache)

    times = []
    for count in range(3 + run.sizes.decoded):
        start = time.perf_counter()
        step(ids[:, :1])
        if run.on_gpu:
            torch.cuda.synchronize()
        if count >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


# Results

CHECKED = (
    Column("case", "case"),
    Column("dtype", "dtype"),
    Column("backend", "backend"),
    Column("what", "of"),
    Column("error", "relative error", "{:.1e}"),
    Column("limit", "limit", "{:.0e}"),
    Column("passed", "kept"),
)
TIMED = (
    Column("ms", "ms", "{:.2f}"),
    Column("tokens_per_second", "tokens/s", "{:,.0f}"),
)
PEAK = Column("peak_gib", "peak GiB", "{:.2f}")
PARTS: dict[str, tuple[Callable[[Run], None], str, tuple[Column, ...]]] = {
    "laws": (laws, "Operators against their float64 definition", CHECKED),
    "models": (models, "Whole models, 2 layers", CHECKED),
    "ops": (
        time_ops,
        "Operators, bf16, batch 1",
        (
            Column("tokens", "tokens", "{:,}"),
            Column("op", "operator"),
            Column("pass", "pass"),
            Column("side", "side"),
            *TIMED,
            PEAK,
        ),
    ),
    "layers": (
        time_layers,
        "Layers, bf16, batch 1, forward + backward",
        (Column("tokens", "tokens", "{:,}"), Column("mixer", "mixer"), Column("side", "side"), *TIMED, PEAK),
    ),
    "training": (
        training,
        "Training steps (AdamW), bf16 weights",
        (
            Column("tokens", "tokens", "{:,}"),
            Column("batch", "batch"),
            Column("model", "model"),
            Column("parameters", "M parameters", "{:.0f}"),
            *TIMED,
            PEAK,
        ),
    ),
    "decoding": (
        decoding,
        "Decoding, bf16, milliseconds a token for the batch",
        (Column("context", "context", "{:,}"), Column("batch", "batch"), Column("model", "model"), *TIMED),
    ),
}


def facts(run: Run) -> dict[str, Any]:
    found = machine_facts()
    if run.on_gpu:
        found["fla backend"] = op_fla._load("gated_delta_rule")[1] or "available"
        found["cuda"] = torch.version.cuda or f"hip {torch.version.hip}"
        for package in ("fla", "triton"):
            try:
                found[package] = __import__(package).__version__
            except ImportError:
                found[package] = "not installed"
    return found


def save(run: Run, machine: dict[str, Any]) -> None:
    """Write gpu.json and gpu.md with what there is so far."""
    run.folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "machine": machine,
        "arguments": sys.argv[1:],
        "device": run.device,
        "sizes": vars(run.sizes),
        "rows": run.rows,
        "failures": run.failures,
        "skipped": run.skipped,
    }
    (run.folder / "gpu.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    sizes = run.sizes
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    lines = [
        "# gpu",
        "",
        f"{machine.get('gpu', machine['cpu'])}; "
        + "; ".join(
            f"{name} {machine[name]}"
            for name in ("torch", "cuda", "triton", "fla", "fla backend", "date")
            if name in machine
        )
        + f". {sizes.heads} heads of {sizes.dim}; models of {sizes.layers} layers, width {sizes.width}, vocabulary "
        f"{sizes.vocabulary}. Medians. Command: `{command}`",
        "",
        f"Failures: {len(run.failures)}; not run for want of time: {len(run.skipped)}.",
        "",
        *(f"- {failure['part']}: {failure['case']}: {failure['reason']}" for failure in run.failures),
        *([""] if run.failures else []),
    ]
    for part, (_, title, columns) in PARTS.items():
        if run.rows[part]:
            lines += [f"## {title}", "", *table(columns, run.rows[part])]
    (run.folder / "gpu.md").write_text("\n".join(lines), encoding="utf-8")


def _out_of_time(signum: int, frame: Any) -> None:
    raise OutOfTime


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: torch backend only")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of this script, not a measurement")
    parser.add_argument("--seconds", type=float, default=450, help="for all parts together (default: 450)")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "docs/results")),
        help="folder of gpu.json and gpu.md (default: $OUT, else docs/results)",
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available; use --device cpu --quick to test the script")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    run = Run(arguments.device, QUICK if arguments.quick else Sizes(), arguments.seconds, arguments.out)
    machine = facts(run)
    signal.signal(signal.SIGALRM, _out_of_time)
    begin = time.monotonic()
    shares = sum(SHARES[part] for part in arguments.parts)
    used = 0.0
    for part in PARTS:
        if part not in arguments.parts:
            continue
        used += SHARES[part] / shares
        # Time that a part leaves over goes to the next ones.
        run.part, run.deadline = part, begin + used * run.seconds
        print(f"{part}: until {used * run.seconds:.0f} s", flush=True)
        try:
            PARTS[part][0](run)
        except (Exception, OutOfTime) as error:
            run.fail("the whole part", f"{type(error).__name__}: {error}", traceback.format_exc())
        save(run, machine)
    print(f"{time.monotonic() - begin:.0f} s; failures: {len(run.failures)}; skipped: {len(run.skipped)}; {run.folder}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
