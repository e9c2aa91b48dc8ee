# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What the project promises of its speed, against what was measured: reads the other commands' JSON, measures nothing.

A row is one promise: the bound, the value found in the results, and whether it is kept. What is missing from the results
is said to be so; results of `--quick` count as missing. The folder of the results is the one that is read and written;
with `--quick` the table is printed only.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import PASSES, SOFTMAX
from benchmarks.layers import RECURRENT
from benchmarks.ops import MATCHED
from benchmarks.report import RESULTS, Column, Report
from benchmarks.training import MODELS

OPTIONS: dict = {}
COLUMNS = (
    Column("requirement", "requirement"),
    Column("bound", "bound"),
    Column("value", "measured", "{:.2f}"),
    Column("reached", "reached"),
    Column("date", "measured on"),
)


class Requirement(NamedTuple):
    """A bound on the value `key` of the rows of one command's results that have the values `where`.

    Several rows count as their worst.
    """

    text: str
    command: str
    where: dict[str, Any]
    bound: float
    key: str = "ratio"
    at_most: bool = False

    def check(self, results: dict[str, Report]) -> dict[str, Any]:
        report = results.get(self.command)
        rows = report.rows if report else []
        values = [
            row[self.key]
            for row in rows
            if row.get(self.key) is not None and all(row.get(name) == value for name, value in self.where.items())
        ]
        worst = (max(values) if self.at_most else min(values)) if values else None
        reached = "not measured"
        if worst is not None:
            reached = "yes" if (worst <= self.bound if self.at_most else worst >= self.bound) else "no"
        return {
            "requirement": self.text,
            "bound": f"{'≤' if self.at_most else '≥'} {self.bound:g}",
            "value": worst,
            "reached": reached,
            "date": report.machine["date"] if values else None,
        }


def requirements() -> list[Requirement]:
    both = {"inputs": "fp32", "pass": PASSES[1]}
    found = []
    for op in ("delta_net", "gated_delta_net"):
        for tokens, bound in ((4096, 3), (16384, 15)):
            text = f"{op} against the in-tree function, fp32, forward + backward, {tokens:,} tokens"
            found.append(Requirement(text, "ops", {**both, "operator": op, "tokens": tokens, "peer": "in-tree"}, bound))
        where = {"inputs": "fp32", "pass": PASSES[0], "operator": op, "peer": "in-tree"}
        found.append(Requirement(f"{op} against the in-tree function, fp32, forward alone", "ops", where, 1.5))
        where = {"inputs": "bf16", "pass": PASSES[1], "operator": op, "peer": "fp32"}
        found.append(Requirement(f"{op}, bf16 against our own fp32, forward + backward", "ops", where, 2))
    for mixer in ("ttt_linear", "ttt_mlp"):
        where = {**both, "mixer": mixer, "tokens": 4096, "peer": f"{mixer} reference"}
        text = f"{mixer} layer against the reference form, forward + backward, 4,096 tokens"
        found.append(Requirement(text, "layers", where, 4))
    where = {**both, "operator": MATCHED, "tokens": 4096, "peer": "fla, plain"}
    found.append(Requirement("mesa_net against the plain peer at equal residual, 4,096 tokens", "ops", where, 4))
    for op in RECURRENT:
        for tokens in (4096, 16384):
            bound = 5 if tokens == 16384 and "delta" in op else 1
            text = f"{op} against softmax attention, fp32, forward + backward, {tokens:,} tokens"
            found.append(Requirement(text, "ops", {**both, "operator": op, "tokens": tokens, "peer": SOFTMAX}, bound))
    for op in RECURRENT:
        where = {"operator": op, "tokens": 65536}
        for kind in ("time", "memory"):
            text = f"{op}, {kind} per token at 65,536 tokens relative to 2,048"
            found.append(Requirement(text, "growth", where, 1.25, f"{kind}_growth", at_most=True))
    hybrid = {"model": "gated_delta_net 3:1"}
    for mode in ("eager", "compiled"):
        for context, bound in ((512, 0.95), (16384, 3)):
            text = f"decode, gated_delta_net 3:1 against Llama, {mode}, context {context:,}"
            where = {**hybrid, "mode": mode, "context": context}
            found.append(Requirement(text, "decode", where, bound, "llama_ratio"))
    text = "decode, gated_delta_net 3:1 against OLMo-Hybrid, eager, every context"
    found.append(Requirement(text, "decode", {**hybrid, "mode": "eager"}, 1.5, "olmo_ratio"))
    text = "decode, all-recurrent models at context 65,536 relative to 1,024"
    found.append(Requirement(text, "decode", {"context": 65536}, 1.1, "growth", at_most=True))
    for name in MODELS:
        if name.endswith((":0", ":1")):
            where = {"model": name, "memory_tokens": 8192}
            text = f"peak training memory at 8,192 tokens, {name} relative to all softmax"
            found.append(Requirement(text, "training", where, 1, "memory_ratio", at_most=True))
    return found


def read_results(folder: Path) -> dict[str, Report]:
    """Command -> its full measurement in `folder`, of the commands that requirements are about.

    Raises:
        ValueError: there is none.
    """
    commands = dict.fromkeys(requirement.command for requirement in requirements())
    reports = (Report.load(path) for command in commands if (path := folder / f"{command}.json").exists())
    results = {report.command: report for report in reports if not report.options["quick"]}
    if not results:
        to_run = "; ".join(f"python -m benchmarks {command} --output {folder}" for command in commands)
        raise ValueError(
            f"{folder} holds no results of a full measurement: name the folder that does, or first run {to_run}"
        )
    return results


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    results = read_results(settings.output or RESULTS)
    rows = [requirement.check(results) for requirement in requirements()]
    kept = sum(row["reached"] == "yes" for row in rows)
    return f"{kept} of {len(rows)} requirements are reached. The ratios are a peer's time over ours.", rows, {}


draw = None
