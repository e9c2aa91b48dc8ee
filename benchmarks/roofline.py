# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""How near every operator comes to what the machine can do.

"useful" is the arithmetic that the chunk-parallel form needs (chunks of 64, TTT mini-batches of 16; a backward pass does
each product twice and computes nothing again), "bytes" the least traffic: inputs, output and gradients once. "executed"
is what PyTorch's FlopCounter saw of our matrix products. The machine's rates are measured in the same run: large and
batched 64 x 64 matrix products, and a copy. The bound is the longer of useful / large and bytes / copy.
"""

import argparse
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import DTYPES, PASSES, SOFTMAX, SOFTMAX_OPERATOR, Inputs, Shape, make_inputs, make_pass, operators
from benchmarks.measure import interleave, relative_error
from benchmarks.options import Option
from benchmarks.report import Column, Report, axes_of
from modeling_avgpath import ops
from training.flops import Count, delta_count, linear_count, mesa_backward_count, mesa_count, softmax_count, ttt_count

OPTIONS = {
    "length": Option(4096, 128, "tokens"),
    "dtypes": Option(["fp32", "bf16"], ["fp32"], "inputs", known=DTYPES),
    "repeats": Option(5, 1, "timed runs of each side at most"),
    "heads": Option(8, 2, "heads"),
    "dim": Option(64, 16, "key and value size of a head"),
    "matrix": Option(2048, 128, "rows and columns of the large matrix product"),
    "copy_mb": Option(256, 1, "megabytes that the copy reads"),
}
COLUMNS = (
    Column("operator", "operator"),
    Column("inputs", "inputs"),
    Column("pass", "pass"),
    Column("useful_gflop", "useful (GFLOP)", "{:.2f}"),
    Column("executed", "executed / useful", "{:.2f}"),
    Column("megabytes", "bytes (MB)", "{:.1f}"),
    Column("seconds", "time (s)", "{:.4f}"),
    Column("gflops", "GFLOP/s", "{:.1f}"),
    Column("of_large", "of large products", "{:.1%}"),
    Column("of_batched", "of 64 x 64 products", "{:.1%}"),
    Column("of_copy", "of the copy rate", "{:.1%}"),
    Column("of_bound", "of the bound", "{:.1%}"),
)


def useful_count(name: str, dim: int, length: int, backward: bool, mesa_steps: float) -> Count:
    """Of the forward pass, or of both passes."""
    if name == "mesa_net":
        forward = mesa_count(dim, mesa_steps)
        return forward + mesa_backward_count(dim, mesa_steps) if backward else forward
    counts: dict[str, Callable[[], Count]] = {
        "linear": lambda: linear_count(dim),
        "delta_net": lambda: delta_count(dim),
        "gated_delta_net": lambda: delta_count(dim),
        "ttt_linear": lambda: ttt_count(dim, 1),
        "ttt_mlp": lambda: ttt_count(dim, 2),
        SOFTMAX: lambda: softmax_count(dim, length),
    }
    return counts[name]() * (3 if backward else 1)


def least_bytes(inputs: Inputs, backward: bool) -> int:
    """Inputs read and output written; backward, these inputs and the output's gradient read, all gradients written."""
    read = sum(x.nbytes for x in inputs.values())
    output = inputs["v"].nbytes
    return read + output + (2 * read + output if backward else 0)


def steps_to_converge(inputs: Inputs) -> int:
    """Fewest conjugate-gradient steps of `mesa` that give the result of its default settings, to 1e-5."""
    with torch.no_grad():
        converged = ops.mesa(**inputs)[0]
        for steps in range(1, 30):
            if relative_error(ops.mesa(**inputs, max_cg_steps=steps)[0], converged) < 1e-5:
                return steps
    return 30


def measure_rates(settings: argparse.Namespace) -> dict[str, float]:
    """GFLOP/s of matrix products, large and batched 64 x 64, in each dtype; GB/s of a copy, read and written."""
    size, batch = settings.matrix, max(1, settings.matrix**2 // 64**2)
    sides, work = {}, {}
    for name in settings.dtypes:
        for kind, shape in (("large", (size, size)), ("batched", (batch, 64, 64))):
            a, b = (torch.randn(shape, device=settings.device).to(DTYPES[name]) for _ in range(2))
            key = f"{kind} {name}"
            sides[key] = lambda a=a, b=b: a @ b
            work[key] = 2 * a.numel() * a.shape[-1]
    source = torch.ones(settings.copy_mb * 2**18, device=settings.device)
    target = torch.empty_like(source)
    sides["copy"], work["copy"] = lambda: target.copy_(source), 2 * source.nbytes
    timings = interleave(sides, 2 * settings.repeats)
    return {key: work[key] / timings[key].median / 1e9 for key in sides}


def executed_products(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    shape, length, device = Shape(1, settings.heads, settings.dim), settings.length, settings.device
    rates = measure_rates(settings)
    cases = {**operators(device), SOFTMAX: SOFTMAX_OPERATOR}
    steps = steps_to_converge(make_inputs(cases["mesa_net"].gates, length, shape, device=device))
    sides, facts = {}, {}
    for backward, pass_name in enumerate(PASSES):
        for dtype in settings.dtypes:
            for name, operator in cases.items():
                inputs = make_inputs(operator.gates, length, shape, DTYPES[dtype], device)
                key = name, dtype, pass_name
                sides[key] = make_pass(operator.run, inputs, bool(backward))
                useful = useful_count(name, shape.dim, length, bool(backward), steps).total
                facts[key] = useful * length * shape.heads * shape.batch, least_bytes(inputs, bool(backward))
    executed = {key: executed_products(run) for key, run in sides.items()}
    timings = interleave(sides, settings.repeats)
    rows = []
    for key, (flops, size) in facts.items():
        name, dtype, pass_name = key
        seconds = timings[key].median
        large, batched, copy = (1e9 * rates[rate] for rate in (f"large {dtype}", f"batched {dtype}", "copy"))
        rows.append(
            {
                "operator": name,
                "tokens": length,
                "inputs": dtype,
                "pass": pass_name,
                "useful_gflop": flops / 1e9,
                "executed": executed[key] / flops if executed[key] else None,
                "megabytes": size / 1e6,
                "seconds": seconds,
                "gflops": flops / seconds / 1e9,
                "of_large": flops / seconds / large,
                "of_batched": flops / seconds / batched,
                "of_copy": size / seconds / copy,
                "of_bound": max(flops / large, size / copy) / seconds,
            }
        )
    title = f"{length:,} tokens, {shape}; medians of {settings.repeats}. mesa_net converges in {steps} steps here."
    units = {key: f"{key}, {'GB/s' if key == 'copy' else 'GFLOP/s'}" for key in rates}
    return title, rows, {units[key]: rate for key, rate in rates.items()}


def draw(report: Report):
    """Achieved arithmetic against its intensity, below the roofs."""
    figure, (axes,) = axes_of(
        [{"xlabel": "useful FLOP per byte", "ylabel": "GFLOP/s", "xscale": "log", "yscale": "log"}], height=4.6
    )
    for dtype, marker in zip(report.options["dtypes"], "osd", strict=False):
        large, copy = report.facts[f"large {dtype}, GFLOP/s"], report.facts["copy, GB/s"]
        edge = large / copy
        axes.plot([edge / 30, edge, edge * 30], [large / 30, large, large], color="#5f6b76", linewidth=1)
        axes.annotate(f"{dtype} products", (edge * 30, large), ha="right", va="bottom", fontsize=8)
        for row in report.rows:
            if row["inputs"] == dtype and row["pass"] == PASSES[1]:
                point = 1e3 * row["useful_gflop"] / row["megabytes"], row["gflops"]
                axes.plot(*point, marker=marker, color="#1b6ca8" if dtype == "fp32" else "#d1495b")
                axes.annotate(row["operator"], point, xytext=(4, 3), textcoords="offset points", fontsize=7)
    return figure
