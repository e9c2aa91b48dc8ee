# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Which layers should stay softmax: ways to choose them, side by side, after the same alignment of every layer.

training/convert.py first teaches a mixer to each layer of the teacher, each by itself. Every choice can then be judged at
equal budget and without further training: the teacher runs, and each layer that does not stay returns what its aligned
mixer makes of its input. KL is that of the teacher to this hybrid on held-out rows, in nats per token; recall the negative
log-likelihood of random phrases that come again (training/probes.py), in nats per token, mean over the distances.

The ways that score each layer look at training rows and at phrases of their own. `swap-one` keeps the layers that cost most
KL when they alone are converted, `restore-one` those that gain most when they alone are not, `recall` is swap-one by recall,
and the diagnosis's scores are those of a folder that training/diagnose.py wrote. Differences to the mean over the uniform
and over the random choices are paired by row and by sequence, and their 95% intervals bootstrapped over these.

What was measured is kept: the command may be stopped and started again.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from benchmarks.options import Option
from benchmarks.report import COLOURS, Column, Report, axes_of
from benchmarks.runs import quick_data, quick_teacher, run_script
from modeling_avgpath.conversion_layers import choose_softmax_layers
from modeling_avgpath.diagnosis_report import Diagnosis, rank_correlation
from modeling_avgpath.softmax_models import decoder
from training.conversion_report import HeldOutRows
from training.convert import load_teacher
from training.data import IGNORE, collate, prepare_data
from training.distillation import swapped_layers
from training.machine import choose_precision
from training.modeling import load_causal_lm
from training.probes import estimate, evaluation_mode, make_alphabet, phrase_sequences, score
from training.recipe import ConversionRecipe, TokenizerRecipe, load_recipe

RECIPE = "configuration/convert.yaml"
OPTIONS = {
    "teacher": Option("runs/teacher", "", "the softmax model; quick makes one"),
    "mixer": Option("gated_delta_net", "gated_delta_net", "of the layers that do not stay"),
    "count": Option(8, 1, "layers that stay softmax"),
    "align_tokens": Option(120_000, 64, "training tokens that all layers are aligned on; 0: no alignment", 0),
    "rows": Option(24, 2, "held-out rows of each source that judge a choice"),
    "choosing_rows": Option(8, 2, "training rows that scores look at"),
    "samples": Option(32, 2, "phrases of each distance"),
    "distances": Option([16, 64, 256], [8], "of the phrases"),
    "draws": Option(8, 2, "random choices"),
    "diagnosis": Option("", "", "a folder of training/diagnose.py; empty: its scores are left out"),
    "runs": Option("runs/selection", "", "folder of the run and of what was measured; empty: a temporary one"),
}
COLUMNS = (
    Column("choice", "choice"),
    Column("layers", "softmax layers"),
    Column("kl", "KL", "{:.4f}"),
    Column("kl_to_uniform", "to uniform's mean"),
    Column("kl_to_random", "to random's mean"),
    Column("recall", "recall", "{:.3f}"),
    Column("recall_to_uniform", "to uniform's mean"),
    Column("recall_to_random", "to random's mean"),
    Column("perplexity_by_source", "perplexity over the teacher's"),
)
DIAGNOSED = {"isotropy": "diagnosis, isotropy", "loss_change": "diagnosis, loss of swapping"}


@dataclass(frozen=True)
class Texts:
    """What hybrids are run on.

    Attributes:
        batches: of `collate`; sources: of each row, the name of its source.
        phrases: of each distance, the sequences `[N, T]` and the places `[M]` that are scored.
    """

    batches: list[dict[str, torch.Tensor]]
    sources: list[str]
    phrases: list[tuple[torch.Tensor, torch.Tensor]]


class Hybrids:
    """Hybrids of a teacher and its aligned mixers, measured; what is known is kept in a file.

    Args:
        file: JSON lines, one measurement each.
    """

    def __init__(
        self, teacher: nn.Module, mixers: Mapping[int, nn.Module], texts: dict[str, Texts], autocast, file: Path
    ):
        self.teacher, self.mixers, self.texts, self.autocast, self.file = teacher, mixers, texts, autocast, file
        self.known: dict[tuple, dict] = {}
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self.known[record["texts"], tuple(record["kept"])] = record
        with evaluation_mode(teacher), autocast():
            self.wanted = {
                name: [
                    decoder(teacher)(batch["input_ids"], use_cache=False).last_hidden_state for batch in part.batches
                ]
                for name, part in texts.items()
            }

    def measure(self, kept: Sequence[int], texts: str) -> dict[str, np.ndarray]:
        """`kl`, `nll` and `targets`, sums of each row; `recall`, mean nats of each sequence."""
        key = (texts, tuple(kept))
        if key not in self.known:
            record = {"texts": texts, "kept": list(kept), **self._run(kept, texts)}
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")
            self.known[key] = record
        return {name: np.array(self.known[key][name]) for name in ("kl", "nll", "targets", "recall")}

    def _run(self, kept: Sequence[int], texts: str) -> dict[str, list[float]]:
        part = self.texts[texts]
        swapped = {index: mixer for index, mixer in self.mixers.items() if index not in kept}
        rows, recall = [], []
        with evaluation_mode(self.teacher), swapped_layers(self.teacher, swapped, self.autocast), self.autocast():
            for batch, wanted in zip(part.batches, self.wanted[texts], strict=True):
                hidden = decoder(self.teacher)(batch["input_ids"], use_cache=False).last_hidden_state
                rows += [self._compare(*row) for row in zip(wanted, hidden, batch["shift_labels"], strict=True)]
            for sequences, places in part.phrases:
                recall += score(self.teacher, sequences).nll[:, places - 1].mean(1).tolist()
        kl, nll, targets = (list(column) for column in zip(*rows, strict=True))
        return {"kl": kl, "nll": nll, "targets": targets, "recall": recall}

    def _compare(self, wanted: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, int]:
        """Sums over a row's targets: KL(teacher || hybrid) and the hybrid's negative log-likelihood; and how many."""
        is_target = labels != IGNORE
        teacher, hybrid = (self.teacher.lm_head(x[is_target]).float().log_softmax(-1) for x in (wanted, hidden))
        kl = F.kl_div(hybrid, teacher, reduction="sum", log_target=True)
        return kl.item(), F.nll_loss(hybrid, labels[is_target], reduction="sum").item(), int(is_target.sum())


def layer_scores(hybrids: Hybrids, diagnosis: str) -> dict[str, list[float]]:
    """Way of scoring -> one number a layer, higher where softmax is missed more."""
    layers = sorted(hybrids.mixers)
    others = {layer: [other for other in layers if other != layer] for layer in layers}
    teacher = hybrids.measure(layers, "choosing")
    swapped = [hybrids.measure(others[layer], "choosing") for layer in tqdm(layers, "swap-one")]
    restored = [hybrids.measure([layer], "choosing") for layer in tqdm(layers, "restore-one")]
    scores = {
        "swap-one KL": [found["kl"].sum() for found in swapped],
        "restore-one KL": [-found["kl"].sum() for found in restored],
        "recall": [found["recall"].mean() - teacher["recall"].mean() for found in swapped],
    }
    if diagnosis:
        found = Diagnosis.load(diagnosis)
        scores |= {name: list(found.softmax_needs(by).values()) for by, name in DIAGNOSED.items()}
    return scores


def choices(num_layers: int, count: int, draws: int, scores: Mapping[str, Sequence[float]]) -> dict[str, list[int]]:
    """Name of the choice -> the layers that stay."""

    def choose(strategy: str, **how) -> list[int]:
        return choose_softmax_layers(strategy, num_layers, count, **how)

    found = {f"uniform, offset {x}": choose("uniform", offset=x) for x in range(math.ceil(num_layers / count))}
    found |= {f"random {seed}": choose("random", seed=seed) for seed in range(draws)}
    found |= {"first": choose("first"), "last": choose("last")}
    return found | {name: choose("score", scores=values) for name, values in scores.items()}


def describe(found: dict) -> str:
    """An estimate with its interval."""
    interval = "" if found["low"] is None else f" ({found['low']:+.3f} to {found['high']:+.3f})"
    return f"{found['mean']:+.3f}{interval}"


def compare(hybrids: Hybrids, chosen: dict[str, list[int]]) -> list[dict]:
    """The rows of the report: each choice by itself, and beside the means over uniform and random ones."""
    everything = sorted(hybrids.mixers)
    teacher = hybrids.measure(everything, "judging")
    found = {name: hybrids.measure(kept, "judging") for name, kept in tqdm(chosen.items(), "choices")}
    groups = {
        group: {
            key: np.mean([found[name][key] for name in chosen if name.startswith(group)], axis=0) for key in teacher
        }
        for group in ("uniform", "random")
    }
    sources = np.array(hybrids.texts["judging"].sources)
    targets, sequences = teacher["targets"], np.ones(len(teacher["recall"]))
    rows = []
    for name, kept in [*chosen.items(), ("none stays", []), ("teacher", everything)]:
        own = hybrids.measure(kept, "judging")
        row = {
            "choice": name,
            "kept": kept,
            "layers": ", ".join(map(str, kept)) if name != "teacher" else "all",
            "kl": float(own["kl"].sum() / targets.sum()),
            "recall": float(own["recall"].mean()),
        }
        for group, mean in groups.items():
            if name in chosen:
                row[f"kl_to_{group}"] = describe(estimate(own["kl"] - mean["kl"], targets))
                row[f"recall_to_{group}"] = describe(estimate(own["recall"] - mean["recall"], sequences))
        ratios = {}
        for source in dict.fromkeys(sources):
            is_source = sources == source
            more = (own["nll"] - teacher["nll"])[is_source].sum() / targets[is_source].sum()
            ratios[source] = math.exp(more)
        row["perplexity_by_source"] = "; ".join(f"{source} {ratio:.3f}" for source, ratio in ratios.items())
        rows.append({**row, "perplexity_ratios": ratios})
    return rows


def judge_texts(recipe: ConversionRecipe, data, settings: argparse.Namespace, vocab_size: int) -> dict[str, Texts]:
    """`choosing`: rows and phrases that scores look at; `judging`: held-out rows and other phrases."""
    alphabet = make_alphabet(data.tokenizer, vocab_size, recipe.probes.alphabet)

    def phrases(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        made = (phrase_sequences(alphabet, x, samples=settings.samples, seed=seed) for x in settings.distances)
        return [(sequences, places) for sequences, _, places in made]

    def batches(rows: Sequence[dict]) -> Iterator[dict[str, torch.Tensor]]:
        size = recipe.evaluation.batch_size
        return (collate(rows[first : first + size]) for first in range(0, len(rows), size))

    held_out = HeldOutRows(data, recipe.bootstrap, recipe.seed, recipe.evaluation.batch_size)
    judging, sources = [], []
    for index, part in enumerate(held_out.parts):
        rows = [part.rows[row] for row in held_out.choose(index, settings.rows)]
        judging += batches(rows)
        sources += [part.name] * len(rows)
    # An order of the training rows that neither the calibration nor the alignment has.
    training = data.batches(1, seed=recipe.seed + 1000)
    choosing = [next(training) for _ in range(settings.choosing_rows)]
    training.close()
    return {
        "choosing": Texts(choosing, ["training"] * len(choosing), phrases(seed=1)),
        "judging": Texts(judging, sources, phrases(seed=0)),
    }


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(settings.runs or temporary).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        teacher = settings.teacher or quick_teacher(Path(temporary), settings.threads)
        arguments = [
            f"teacher.path={Path(teacher).resolve()}", f"layers.mixer={settings.mixer}", "layers.strategy=list",
            "layers.softmax=[]", "layers.count=null", f"align.tokens={settings.align_tokens}", "distil.tokens=0",
            "evaluation.rows=16", "evaluation.probes=[]",
        ]  # fmt: skip
        if settings.quick:
            arguments += [*quick_data(Path(temporary)), "calibration.tokens=0"]
        run_script("convert.py", RECIPE, runs / "aligned", arguments, settings.threads)
        recipe = load_recipe(RECIPE, arguments, ConversionRecipe)
        precision = choose_precision(recipe.train.mixed_precision)
        model = load_teacher(recipe, torch.bfloat16 if precision == "bf16" else torch.float32)
        data = prepare_data(recipe.data, TokenizerRecipe(path=recipe.teacher.path), model.config.vocab_size)
        student = load_causal_lm(str(runs / "aligned" / "final"), dtype=torch.float32).eval()
        mixers = {index: layer.mixer for index, layer in enumerate(student.model.layers)}

        def autocast() -> torch.autocast:
            return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

        texts = judge_texts(recipe, data, settings, model.config.vocab_size)
        hybrids = Hybrids(model, mixers, texts, autocast, runs / "measured.jsonl")
        scores = layer_scores(hybrids, settings.diagnosis)
        rows = compare(hybrids, choices(len(mixers), settings.count, settings.draws, scores))
    facts = {}
    if len(mixers) > 4:
        for name in [name for name in scores if name != "swap-one KL"]:
            found = rank_correlation(scores[name], scores["swap-one KL"])
            facts[f"rank correlation of {name} with swap-one KL"] = found.text()
    title = (
        f"{settings.count} of {len(mixers)} layers stay softmax, the others are {settings.mixer}, aligned on "
        f"{settings.align_tokens:,} tokens. KL and perplexity on {settings.rows} held-out rows of each source, recall on "
        f"{settings.samples} phrases at each distance of {', '.join(map(str, settings.distances))}; lower is better."
    )
    return title, rows, facts


def draw(report: Report):
    """Each choice's KL and recall."""
    figure, (axes,) = axes_of(
        [{"xlabel": "KL to the teacher (nats per token)", "ylabel": "recall (nats per token)"}], 4.8
    )
    groups = {"uniform": COLOURS[0], "random": COLOURS[5]}
    for row in report.rows:
        name = row["choice"]
        if name in ("teacher", "none stays"):
            continue
        group = name.split(",")[0].split(" ")[0]
        axes.plot(row["kl"], row["recall"], "o", color=groups.get(group, COLOURS[1]), ms=5)
        label = name if group not in groups else name.rpartition(" ")[2]
        axes.annotate(label, (row["kl"], row["recall"]), xytext=(4, 3), textcoords="offset points", fontsize=7)
    for group, colour in {**groups, "by score, or an end": COLOURS[1]}.items():
        axes.plot([], [], "o", color=colour, ms=5, label=group)
    axes.legend(frameon=False, fontsize=8)
    return figure
