# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Every operator against its peers and softmax attention: forward (no gradients) and forward + backward.

All sides of a length and pass see the same inputs in turn. Before it is timed, a peer that computes the same function
must agree with ours, gradients included. "inputs" is the dtype of q, k and v; gates are fp32. The ratio is the peer's
time over ours: above 1 ours is faster. `fp32` as a peer of bf16 inputs is our own operator on fp32 inputs; peers that
compute in fp32 whatever they are given are timed on fp32 inputs only, and peers that take whole chunks alone (of 32 tokens
the plain delta rule, of 64 the plain mesa) have no row at other lengths.
`mesa_net (residual of the peer)` solves to the accuracy that the plain peer reaches, instead of its default tolerance.
"""

import argparse

from benchmarks import peers
from benchmarks.cases import (
    DTYPES,
    PASSES,
    Shape,
    check_peers,
    make_inputs,
    make_pass,
    mesa_at_the_residual_of_peer,
    operators,
)
from benchmarks.measure import interleave
from benchmarks.options import Option
from benchmarks.report import SIDE_BY_SIDE, Column, Report, bars

OPTIONS = {
    "lengths": Option([4096, 16384], [128], "tokens"),
    "dtypes": Option(["fp32", "bf16"], ["fp32", "bf16"], "inputs", known=DTYPES),
    "repeats": Option(5, 1, "timed runs of each side at most"),
    "seconds": Option(6.0, 1.0, "a side is not run again once its runs add up to this, three runs excepted"),
    "heads": Option(8, 2, "heads"),
    "dim": Option(64, 16, "key and value size of a head"),
}
COLUMNS = (
    Column("operator", "operator"),
    Column("tokens", "tokens", "{:,}"),
    Column("inputs", "inputs"),
    *SIDE_BY_SIDE,
    Column("difference", "difference", "{:.0e}"),
)
MATCHED = "mesa_net (residual of the peer)"


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    shape, device = Shape(1, settings.heads, settings.dim), settings.device
    cases, facts = operators(device), {}
    if peers.has_fla():
        cases[MATCHED], errors = mesa_at_the_residual_of_peer(shape, device)
        facts = {f"mesa, error of the output in units of 1e-6, {side}": 1e6 * error for side, error in errors.items()}
    differences = {name: check_peers(name, operator, shape, device) for name, operator in cases.items()}
    rows = []
    for length in settings.lengths:
        for backward, name in enumerate(PASSES):
            rows += compare(settings, cases, differences, shape, length, name, bool(backward))
    title = f"Operators, {shape}; medians of {settings.repeats} runs, of 3 where they are long."
    return title, rows, facts


def compare(settings, cases, differences, shape, length, pass_name, backward) -> list[dict]:
    """Time everything of one length and pass in turn; one row for each operator, dtype and peer."""
    sides, pairs = {}, []
    for dtype in settings.dtypes:
        for name, operator in cases.items():
            if name == MATCHED and dtype != "fp32":
                continue
            inputs = make_inputs(operator.gates, length, shape, DTYPES[dtype], settings.device)
            ours = name, "", dtype
            sides[ours] = make_pass(operator.run, inputs, backward)
            if dtype != "fp32" and "fp32" in settings.dtypes:
                pairs.append((ours, "fp32", (name, "", "fp32")))
            for peer_name, peer in operator.peers.items():
                if not peer.takes(length, dtype):
                    continue
                # Softmax attention is one for all operators, and so is the peer of both kinds of mesa.
                owner = name.split()[0] if peer.tolerance is not None else ""
                theirs = owner, peer_name, dtype
                sides.setdefault(theirs, make_pass(peer.function, inputs, backward))
                pairs.append((ours, peer_name, theirs))
    compared = {side for ours, _, theirs in pairs for side in (ours, theirs)}
    timings = interleave({side: sides[side] for side in sides if side in compared}, settings.repeats, settings.seconds)
    return [
        {
            "operator": ours[0],
            "tokens": length,
            "inputs": ours[2],
            "pass": pass_name,
            "seconds": timings[ours].median,
            "runs": timings[ours].runs,
            "peer": peer_name,
            "peer_seconds": timings[theirs].median,
            "peer_runs": timings[theirs].runs,
            "ratio": timings[theirs].median / timings[ours].median,
            "difference": differences[ours[0]].get(peer_name),
        }
        for ours, peer_name, theirs in pairs
    ]


def draw(report: Report):
    rows = [row for row in report.rows if row["inputs"] == "fp32" and row["pass"] == PASSES[1]]
    labels = [f"{row['operator']} against {row['peer']}, {row['tokens']:,}" for row in rows]
    return bars(labels, [row["ratio"] for row in rows], "peer's time over ours, fp32, forward + backward", 1, log=True)
