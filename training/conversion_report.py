# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""A conversion judged beside its teacher: perplexity on the same held-out rows, the run's figure, the model card."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import EvalResult, ModelCard
from torch import nn

from modeling_avgpath import AvgPathForCausalLM
from training.card import build_card, describe_held_out, describe_texts, held_out_results, name_source
from training.corpus import list_sources
from training.data import IGNORE, TrainingData, collate
from training.distillation import PHASES, row_length
from training.probes import estimate, evaluation_mode, token_nll
from training.recipe import BootstrapRecipe, ConversionRecipe
from training.tracking import BLUE, GREY, RED, matplotlib, plt, read_metrics, tidy


class HeldOutRows:
    """The held-out rows of a run's data, and what models make of them."""

    def __init__(self, data: TrainingData, bootstrap: BootstrapRecipe, seed: int, batch_size: int):
        self.parts = data.held_out
        self.batch_size = batch_size
        self.bootstrap = {"confidence": bootstrap.confidence, "resamples": bootstrap.resamples, "seed": seed}

    def choose(self, part: int, rows: int | None) -> list[int]:
        """`rows` of a source's rows, spread evenly, or all."""
        total = len(self.parts[part].rows)
        count = min(rows or total, total)
        return [index * total // count for index in range(count)]

    def losses(self, model: nn.Module, rows: int | None, autocast: Callable) -> list[tuple[torch.Tensor, ...]]:
        """Nats of each next token, the tokens read, and whether there is a next one, `[rows, T]` each, for each source."""
        results = []
        with evaluation_mode(model), autocast():
            for index, part in enumerate(self.parts):
                found, chosen = [], self.choose(index, rows)
                for first in range(0, len(chosen), self.batch_size):
                    batch = collate([part.rows[row] for row in chosen[first : first + self.batch_size]])
                    inputs = {
                        name: batch[name].to(model.device) for name in batch if name in ("input_ids", "position_ids")
                    }
                    targets = batch["shift_labels"].to(model.device)
                    nll = token_nll(model(**inputs, use_cache=False).logits, targets)
                    found.append((nll.cpu(), batch["input_ids"], batch["shift_labels"] != IGNORE))
                results.append(tuple(map(torch.cat, zip(*found, strict=True))))
        return results

    def score(self, model: nn.Module, rows: int | None, autocast: Callable) -> list[np.ndarray]:
        """Nats and targets of each row, `[rows, 2]` for each source."""
        return [
            torch.stack((nll.double().sum(1), is_target.double().sum(1)), dim=1).numpy()
            for nll, _, is_target in self.losses(model, rows, autocast)
        ]

    def summarise(self, scores: Mapping[str, Sequence[np.ndarray]]) -> list[dict]:
        """One record a source.

        Returns:
            name, rows, tokens; loss and perplexity of `teacher` and `student` (and `without_recurrence` if scored); and
            `ratio`, the student's perplexity over the teacher's, with the interval of the paired rows.
        """
        records = []
        for index, part in enumerate(self.parts):
            tokens = scores["teacher"][index][:, 1]
            record = {"name": part.name, "rows": len(tokens), "tokens": int(tokens.sum())}
            for name, of_sources in scores.items():
                nats = of_sources[index][:, 0]
                record[name] = {
                    "loss": estimate(nats, tokens, **self.bootstrap),
                    "perplexity": estimate(nats, tokens, scale=math.exp, **self.bootstrap),
                }
            change = scores["student"][index][:, 0] - scores["teacher"][index][:, 0]
            record["ratio"] = estimate(change, tokens, scale=math.exp, **self.bootstrap)
            records.append(record)
        return records


def describe_evaluation(sources: Sequence[dict]) -> list[str]:
    """A line a source."""
    lines = []
    for record in sources:
        perplexity = {name: record[name]["perplexity"]["mean"] for name in ("teacher", "student")}
        ratio = record["ratio"]
        interval = "" if ratio["low"] is None else f" ({ratio['low']:,.3f} to {ratio['high']:,.3f})"
        line = (
            f"{record['name']}: held-out perplexity {perplexity['student']:,.2f}, teacher {perplexity['teacher']:,.2f}, "
            f"ratio {ratio['mean']:,.3f}{interval}"
        )
        if "without_recurrence" in record:
            line += f"; without its recurrent layers {record['without_recurrence']['perplexity']['mean']:,.1f}"
        lines.append(line)
    return lines


def plot_conversion(metrics: Path, image: Path, title: str) -> None:
    """Draw a run: relative error of each aligned layer, divergence while distilling, held-out perplexity beside the
    teacher's, each over training tokens. Panels without records are left out."""
    align, distil, evaluations = (read_metrics(metrics, kind) for kind in ("align", "distil", "evaluation"))
    panels = [name for name, found in (("align", align), ("distil", distil), ("ratio", evaluations)) if found]
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(0.4 + 4.1 * len(panels), 3.6), dpi=140, layout="constrained", squeeze=False
    )
    for axes, name in zip(all_axes[0], panels, strict=True):
        if name == "align":
            layers = list(align[0]["by_layer"])
            for place, layer in enumerate(layers):
                colour = plt.get_cmap("viridis_r")(0.15 + 0.85 * place / max(len(layers) - 1, 1))
                label = f"layer {layer}" if place in (0, len(layers) - 1) else None
                points = [(record["tokens"], record["by_layer"][layer]) for record in align]
                axes.plot(*zip(*points, strict=True), color=colour, lw=0.9, label=label)
            axes.plot([r["tokens"] for r in align], [r["loss"] for r in align], color=RED, lw=1.8, label="mean")
            axes.set(ylabel="error of the layer's output, over its variance", yscale="log", title="align")
            axes.legend(frameon=False, fontsize=8)
        elif name == "distil":
            axes.plot([r["tokens"] for r in distil], [r["kl"] for r in distil], color=BLUE, lw=1.3)
            axes.set(ylabel="KL to the teacher (nats per token)", yscale="log", title="distil")
        else:
            for index, source in enumerate(evaluations[0]["sources"]):
                points = [(r["tokens"], r["sources"][index]["ratio"]["mean"]) for r in evaluations]
                colour = (RED, BLUE, GREY)[index % 3]
                axes.plot(*zip(*points, strict=True), color=colour, marker="o", ms=3, lw=1.3, label=source["name"])
            axes.axhline(1, color=GREY, lw=0.8, ls="--")
            axes.set(ylabel="held-out perplexity over the teacher's", yscale="log", title="held out")
            axes.legend(frameon=False, fontsize=8)
        axes.set_xlabel("training tokens")
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        tidy(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(image)
    plt.close(figure)


def conversion_card(
    recipe: ConversionRecipe, student: AvgPathForCausalLM, data: TrainingData, summary: dict
) -> ModelCard:
    """The model card of a finished conversion; `summary` is what ``summary.json`` holds."""
    teacher = name_source(recipe.teacher.path)
    is_on_hub = not Path(recipe.teacher.path).expanduser().exists()
    layers = recipe.layers
    kept = [index for index, spec in enumerate(student.config.mixer_specs) if spec.readout is None]
    training = {
        "converted from": f"`{recipe.teacher.path if is_on_hub else teacher}`",
        "layers that stayed softmax": f"{', '.join(map(str, kept)) or 'none'} ({layers.strategy})",
        "calibration": f"{recipe.calibration.tokens:,} tokens" if recipe.calibration.tokens else "none, plain weights",
        "alignment": f"{recipe.align.tokens:,} tokens, each converted layer to its teacher layer",
        "distillation": f"{recipe.distil.tokens:,} tokens, KL to the teacher's logits"
        + (f" and {recipe.distil.ce_weight:g} x cross-entropy" if recipe.distil.ce_weight else "")
        + f"; trained: {recipe.distil.trained}",
        "mixed precision": summary["precision"],
        "seed": str(recipe.seed),
        "time": f"{summary['seconds'] / 60:,.0f} minutes on {student.device.type}",
    }
    results: list[EvalResult] = []
    for record in summary["evaluation"]:
        values = {
            "perplexity": record["student"]["perplexity"]["mean"],
            "teacher_perplexity": record["teacher"]["perplexity"]["mean"],
            "perplexity_without_recurrence": record["without_recurrence"]["perplexity"]["mean"],
        }
        names = {
            "perplexity": "perplexity",
            "teacher_perplexity": "perplexity of the teacher",
            "perplexity_without_recurrence": "perplexity with the recurrent layers zeroed",
        }
        results += held_out_results(name_source(record["name"]), names, values)
    for task, of_models in summary["probes"].items():
        for name, records in of_models.items():
            for record in records:
                key = next(key for key in ("distance", "pairs", "length") if key in record)
                metric = f"{task}_{record[key]}_{name}"
                label = f"{task}, {key} {record[key]}, {name}: accuracy"
                results += held_out_results("random tokens", {metric: label}, {metric: record["accuracy"]["mean"]})
    paths = {source.path for _, source in list_sources(recipe.data)}
    trained = [row_length(recipe, phase) for phase in PHASES if getattr(recipe, phase).tokens]
    rows = max(trained, default=recipe.data.sequence_length)
    return build_card(
        student,
        load_from=recipe.hub_model_id or str(Path(recipe.output_dir) / "final"),
        data=f"Converted from `{teacher}`, whose layers were taught to the new mixers on: {describe_texts(recipe.data)} "
        f"(held out: {describe_held_out(recipe.data)}).",
        training=training,
        results=results,
        limits=f"It has seen {summary['training_tokens']:,} tokens in rows of up to {rows} since the conversion, a small "
        "part of what its teacher was trained on: expect it to be weaker than its teacher in recall, at lengths beyond "
        f"{rows} tokens and on text unlike the above. What its teacher gets wrong it gets wrong too.",
        is_chat=bool(getattr(data.tokenizer, "chat_template", None)),
        license=recipe.license,
        language="en" if paths <= {"sotu", "wiki"} else None,
        base_model=recipe.teacher.path if is_on_hub else None,
        tags=["conversion"],
    )
