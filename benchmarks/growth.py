# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Time and peak memory of every operator, forward + backward, as the text grows, fp32.

All operators of a length are timed in turn. Memory is the peak of one call beyond its inputs, each in a process of its
own. The ratios are per token, to the same operator at the reference length: 1 is linear growth.
"""

import argparse

import torch

from benchmarks.cases import SOFTMAX, SOFTMAX_OPERATOR, Shape, make_inputs, make_pass, operators
from benchmarks.measure import in_fresh_process, interleave, peak_bytes
from benchmarks.options import Option
from benchmarks.report import Column, Report, axes_of, lines

OPTIONS = {
    "lengths": Option([1024, 2048, 4096, 16384, 65536], [64, 128], "tokens"),
    "reference": Option(2048, 64, "the length that growth is relative to"),
    "longest_softmax": Option(
        16384, 256, "softmax attention, which grows quadratically, is measured up to here; 0: not at all", 0
    ),
    "repeats": Option(3, 1, "timed runs of each operator and length"),
    "heads": Option(8, 2, "heads"),
    "dim": Option(64, 16, "key and value size of a head"),
}
COLUMNS = (
    Column("operator", "operator"),
    Column("tokens", "tokens", "{:,}"),
    Column("seconds", "time (s)", "{:.3f}"),
    Column("us_per_token", "per token (µs)", "{:.1f}"),
    Column("time_growth", "of the reference", "{:.2f}"),
    Column("peak_mb", "peak (MB)", "{:,.1f}"),
    Column("kb_per_token", "per token (kB)", "{:.1f}"),
    Column("memory_growth", "of the reference", "{:.2f}"),
)
WARM_UP = 128  # tokens of a first call, after which threads and libraries hold what they need


def make_call(name: str, length: int, shape: Shape, device: str):
    """Forward + backward of an operator by name, softmax attention included."""
    operator = {**operators(device), SOFTMAX: SOFTMAX_OPERATOR}[name]
    return make_pass(operator.run, make_inputs(operator.gates, length, shape, device=device), backward=True)


def operator_peak(name: str, length: int, shape: Shape, device: str, threads: int) -> int:
    """Peak bytes of one call beyond its inputs."""
    torch.set_num_threads(threads)
    make_call(name, WARM_UP, shape, device)()
    return peak_bytes(make_call(name, length, shape, device))


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    shape, device = Shape(1, settings.heads, settings.dim), settings.device
    rows = []
    for length in settings.lengths:
        names = [*operators(device), *([SOFTMAX] if length <= settings.longest_softmax else [])]
        arguments = length, shape, device, settings.threads
        peaks = {name: in_fresh_process(operator_peak, name, *arguments) for name in names}
        timings = interleave({name: make_call(name, length, shape, device) for name in names}, settings.repeats)
        rows += [
            {
                "operator": name,
                "tokens": length,
                "seconds": timings[name].median,
                "runs": timings[name].runs,
                "us_per_token": 1e6 * timings[name].median / length,
                "peak_mb": peaks[name] / 1e6,
                "kb_per_token": peaks[name] / 1e3 / length,
            }
            for name in names
        ]
    reference = {row["operator"]: row for row in rows if row["tokens"] == settings.reference}
    for row in rows:
        first = reference.get(row["operator"])
        if first is None:
            continue
        row["time_growth"] = row["us_per_token"] / first["us_per_token"]
        row["memory_growth"] = row["kb_per_token"] / first["kb_per_token"] if first["kb_per_token"] else None
    rows.sort(key=lambda row: [*operators(device), SOFTMAX].index(row["operator"]))
    title = (
        f"Operators, forward + backward, fp32, {shape}; medians of {settings.repeats}; reference: "
        f"{settings.reference:,} tokens."
    )
    return title, rows, {}


def draw(report: Report):
    common = {"xlabel": "tokens", "xscale": "log", "yscale": "log"}
    figure, (left, right) = axes_of([{**common, "ylabel": "µs a token"}, {**common, "ylabel": "peak kB a token"}])
    lines(left, report.rows, "operator", "tokens", "us_per_token")
    lines(right, report.rows, "operator", "tokens", "kb_per_token")
    return figure
