# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""A softmax model converted by training/convert.py, with several mixers: perplexity and recall beside the teacher's.

Each run has a folder of its own; the command may be stopped and started again. "copied" is a hybrid with the teacher's
weights and nothing else, "calibrated" one before any training; these two and "aligned" are of a part of the held-out rows.
Perplexities of a column are on the same rows of each source, and their ratios to the teacher's have 95% intervals from the
bootstrap over rows. "Without" is the final model with its recurrent layers zeroed.

The facts hold perplexities on longer windows than the students were trained on, of the hybrid of softmax layers alone as
well; what students lose where a pair of tokens comes again, which attention can look up (Arora et al., 2024), and on the
other tokens; and the recall probes.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.options import Option
from benchmarks.report import COLOURS, Column, Report, axes_of
from benchmarks.runs import quick_data, quick_teacher, run_script
from modeling_avgpath.conversion import from_softmax
from training.conversion_report import HeldOutRows
from training.convert import load_teacher
from training.data import collate, prepare_data
from training.machine import choose_precision
from training.modeling import load_causal_lm
from training.recipe import ConversionRecipe, TokenizerRecipe, load_recipe
from training.tracking import read_metrics

RECIPE = "configuration/convert.yaml"
OPTIONS = {
    "teacher": Option("runs/teacher", "", "folder of the softmax model; quick makes one"),
    "mixers": Option(["gated_delta_net", "mesa_net", "ttt_linear"], ["gated_delta_net"], "of the converted layers"),
    "align_tokens": Option(0, 64, "of each run; 0: no alignment", least=0),
    "distil_tokens": Option(102_400, 64, "of each run but the first; 0: no distillation", least=0),
    "first_distil_tokens": Option(409_600, 64, "of the first mixer's run; 0: no distillation", least=0),
    "rows": Option(64, 2, "held-out rows of each source in the last evaluation"),
    "window": Option(2048, 64, "tokens of the longer windows"),
    "windows": Option(24, 2, "held-out windows of each source"),
    "changes": Option([""], [""], "further fields of the recipe, for every run"),
    "first_changes": Option([""], [""], "further fields for the first mixer's run alone"),
    "runs": Option("runs/conversion", "", "folder of the runs; empty: a temporary one"),
}
COLUMNS = (
    Column("mixer", "mixer"),
    Column("source", "held-out text"),
    Column("teacher", "teacher", "{:.2f}"),
    Column("copied", "copied", "{:.1f}x"),
    Column("calibrated", "calibrated", "{:.2f}x"),
    Column("aligned", "aligned", "{:.2f}x"),
    Column("final", "distilled"),
    Column("without", "without", "{:,.0f}x"),
    Column("tokens", "training tokens", "{:,}"),
    Column("minutes", "minutes", "{:.0f}"),
)
PROBES = {"phrases": "distance", "lookup": "pairs", "copying": "length"}


def interval_of(ratio: dict) -> str:
    """An estimate, with its interval if it has one."""
    return "" if ratio["low"] is None else f" ({ratio['low']:.3f} to {ratio['high']:.3f})"


def read_run(mixer: str, folder: Path, summary: dict, copied: dict) -> list[dict]:
    """The rows of one run, one a source; the first holds the recall probes too."""
    watched = read_metrics(folder / "metrics.jsonl", "evaluation")
    counts = [[source["rows"] for source in record["sources"]] for record in watched]
    # The last one is of more rows, which are no point of the same curve.
    watched = [record for record, count in zip(watched, counts, strict=True) if count == counts[0]]
    curves = [
        [[record["tokens"], record["sources"][index]["ratio"]["mean"]] for record in watched]
        for index in range(len(summary["evaluation"]))
    ]
    align = read_metrics(folder / "metrics.jsonl", "align")
    aligned = align[-1]["tokens"] if align else None
    rows = []
    for index, source in enumerate(summary["evaluation"]):
        ratio, teacher = source["ratio"], source["teacher"]["perplexity"]["mean"]
        at = dict(curves[index])
        rows.append(
            {
                "mixer": mixer,
                "source": source["name"],
                "teacher": teacher,
                "copied": copied["evaluation"][index]["ratio"]["mean"],
                "calibrated": at[0],
                "aligned": at.get(aligned),
                "final": f"{ratio['mean']:.3f}x{interval_of(ratio)}",
                "interval": ratio,
                "without": source["without_recurrence"]["perplexity"]["mean"] / teacher,
                "tokens": summary["training_tokens"],
                "minutes": summary["seconds"] / 60,
                "curve": curves[index],
                "probes": summary["probes"] if index == 0 else None,
            }
        )
    return rows


def repeats(ids: torch.Tensor) -> torch.Tensor:
    """Which tokens t + 1 of rows `[N, T]` follow token t as they did before in the row: `[N, T - 1]`."""
    pairs = torch.stack((ids[:, :-1], ids[:, 1:]), dim=-1)
    is_same = (pairs[:, :, None] == pairs[:, None, :]).all(dim=-1)  # [N, T - 1, T - 1]
    return is_same.tril(-1).any(dim=-1)


def describe_excess(known: Sequence[tuple[torch.Tensor, ...]], found: Sequence[tuple[torch.Tensor, ...]]) -> str:
    """What a student loses to its teacher in nats per token, on tokens that end a pair read before and on the others."""
    excess = torch.cat([(now[0] - before[0])[:, :-1].flatten() for now, before in zip(found, known, strict=True)])
    is_repeat = torch.cat([repeats(ids).flatten() for _, ids, _ in known])
    is_target = torch.cat([of_source[2][:, :-1].flatten() for of_source in known])
    again, others = is_repeat & is_target, ~is_repeat & is_target
    return (
        f"pairs read before, {again.sum() / is_target.sum():.0%} of the tokens, {excess[again].mean():.3f}; "
        f"others {excess[others].mean():.3f}"
    )


def compare_lengths(
    recipe: ConversionRecipe, students: Mapping[str, Path], settings: argparse.Namespace
) -> dict[str, str]:
    """Facts of the AvgPath model with the teacher's weights and of each student: perplexity on long windows, and what
    students lose on rows of `data.sequence_length` where they could recall."""
    precision = choose_precision(recipe.train.mixed_precision)
    teacher = load_teacher(recipe, torch.float32)

    def held_out(length: int) -> HeldOutRows:
        data = dataclasses.replace(recipe.data, sequence_length=length)
        data = prepare_data(data, TokenizerRecipe(path=recipe.teacher.path), teacher.config.vocab_size)
        return HeldOutRows(data, recipe.bootstrap, recipe.seed, batch_size=1)

    rows, windows = held_out(recipe.data.sequence_length), held_out(settings.window)
    ids = collate([part.rows[0] for part in windows.parts])["input_ids"]
    with torch.no_grad():
        change = (from_softmax(teacher)(ids).logits - teacher(ids).logits).abs().max().item()
    if precision == "bf16":
        teacher = load_teacher(recipe, torch.bfloat16)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

    known = windows.score(teacher, settings.windows, autocast), rows.losses(teacher, settings.rows, autocast)
    facts = {"all layers softmax, fp32": f"largest difference of a logit to the teacher's {change:.1e}"}
    models = {"all layers softmax": lambda: from_softmax(teacher)}
    models |= {
        name: lambda path=path: load_causal_lm(str(path), dtype=torch.float32) for name, path in students.items()
    }
    for name, make in models.items():
        model = make()
        found = windows.summarise({"teacher": known[0], "student": windows.score(model, settings.windows, autocast)})
        facts[f"{name}, windows of {settings.window:,} tokens, {precision}"] = "; ".join(
            f"{part['name']} {part['student']['perplexity']['mean']:.2f}, teacher "
            f"{part['teacher']['perplexity']['mean']:.2f}, {part['ratio']['mean']:.3f}x{interval_of(part['ratio'])}"
            for part in found
        )
        if name in students:
            found = rows.losses(model, settings.rows, autocast)
            facts[f"{name}, loss above the teacher's, nats per token"] = describe_excess(known[1], found)
    return facts


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(settings.runs or temporary).resolve()
        teacher = settings.teacher or quick_teacher(Path(temporary), settings.threads)
        common = [f"teacher.path={Path(teacher).resolve()}", f"evaluation.rows={settings.rows}"]
        common += [change for change in settings.changes if change]
        if settings.quick:
            common += [*quick_data(Path(temporary)), "layers.count=1", "calibration.tokens=64", "calibration.fit_tokens=64",
                       "evaluation.probes=[lookup]", "lookup.pairs=[2]", "probes.samples=2"]  # fmt: skip
        for index, mixer in enumerate(settings.mixers):
            own = [
                *common,
                *(change for change in settings.first_changes if change and not index),
                f"layers.mixer={mixer}",
            ]
            plain = [*own, "calibration.tokens=0", "align.tokens=0", "distil.tokens=0", "evaluation.probes=[]",
                     f"evaluation.rows={min(settings.rows, 16)}"]  # fmt: skip
            copied = run_script("convert.py", RECIPE, runs / f"{mixer}-copied", plain, settings.threads)
            distil = settings.distil_tokens if index else settings.first_distil_tokens
            own += [f"align.tokens={settings.align_tokens}", f"distil.tokens={distil}"]
            folder = runs / mixer
            rows += read_run(mixer, folder, run_script("convert.py", RECIPE, folder, own, settings.threads), copied)
        recipe = load_recipe(RECIPE, common, ConversionRecipe)
        facts = compare_lengths(recipe, {mixer: runs / mixer / "final" for mixer in settings.mixers}, settings)
    title = (
        f"{Path(teacher).name} converted: `python training/convert.py {RECIPE}` with `layers.mixer`, `align.tokens` and "
        "`distil.tokens`; perplexity of the teacher, and the hybrid's as a multiple of it. What holds and what does not: "
        "[conversion.md](../conversion.md)."
    )
    facts |= {
        f"{row['mixer']}, {task}, nats per token by {key}": "; ".join(
            f"{record[key]}: {record['nll']['mean']:.2f} (teacher {known['nll']['mean']:.2f}, never told "
            f"{record['unseen_nll']['mean']:.2f})"
            for record, known in zip(row["probes"][task]["student"], row["probes"][task]["teacher"], strict=True)
        )
        for row in rows if row["probes"]
        for task, key in PROBES.items() if task in row["probes"]
    }  # fmt: skip
    return title, rows, facts


def draw(report: Report):
    """Held-out perplexity over the teacher's, against training tokens: one panel a source."""
    sources = list(dict.fromkeys(row["source"] for row in report.rows))
    figure, all_axes = axes_of(
        [
            {
                "xlabel": "training tokens",
                "ylabel": f"perplexity over the teacher's, {Path(source).name}",
                "yscale": "log",
            }
            for source in sources
        ]
    )
    for axes, source in zip(all_axes, sources, strict=True):
        of_source = (row for row in report.rows if row["source"] == source)
        for row, colour in zip(of_source, COLOURS, strict=False):
            axes.plot(*zip(*row["curve"], strict=True), color=colour, marker="o", ms=3, lw=1.3, label=row["mixer"])
        axes.axhline(1, color=COLOURS[5], lw=0.8, ls="--")
        for which in ("major", "minor"):
            getattr(axes.yaxis, f"set_{which}_formatter")(lambda value, _: f"{value:g}x")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
        axes.legend(frameon=False, fontsize=8)
    return figure
