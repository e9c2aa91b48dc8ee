# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What `diagnose` returns: figures with intervals, as JSON, as Markdown tables and in plain words."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

FIGURES_FILE, MAPS_FILE = "diagnosis.json", "maps.safetensors"
LOSS_STEPS = ("expectation", "mean_field", "query", "mapped_query")


class Statistic(NamedTuple):
    """What one figure means.

    Attributes:
        title: in a few words.
        heads: `key` or `query`: which heads it is measured for.
        unit: `share` (of variance, attention or tokens), `nats` or `tokens`.
        target: the vectors whose variance it is a share of, a name of `diagnose`'s sums; `None` for means over tokens.
        meaning: in a sentence.
    """

    title: str
    heads: str
    unit: str
    target: str | None
    meaning: str


def _explained(title: str, heads: str, target: str, meaning: str) -> Statistic:
    return Statistic(title, heads, "share", target, meaning)


# Shares are R^2 out of sample, 1 - squared error / squared distance from the mean: below 0 is worse than the mean.
STATISTICS: dict[str, Statistic] = {
    "v_static": _explained("v: linear map of k", "key", "v", "R^2 of the value by a fitted affine map of its key."),
    "v_nonlinear": _explained(
        "v: non-linear map of k", "key", "v", "The same with random Fourier features of the key beside it."
    ),
    "v_delta_net": _explained(
        "v: delta net",
        "key",
        "next_v",
        "R^2 of the value by the delta rule, fitted online on the pairs before it in the window; step size by head.",
    ),
    "v_gated_delta_net": _explained(
        "v: gated delta net", "key", "next_v", "The same with a constant decay by head beside the step size."
    ),
    "v_mesa_net": _explained(
        "v: mesa net", "key", "next_v", "The same by ridge regression on the pairs before it; decay and ridge by head."
    ),
    "mean_field_gap": _explained(
        "mean-field gap",
        "query",
        "mean_mu",
        "Squared difference of E mu(k) and mu(E k), mu the non-linear map, as a share of the variance of E mu(k).",
    ),
    "mean_key_query": _explained(
        "mean key: lambda q",
        "query",
        "mean_key",
        "R^2 of the attention's mean key, sink apart, by a multiple of the query.",
    ),
    "mean_key_gaussian": _explained(
        "mean key: m + Sigma q / sqrt(d)",
        "query",
        "mean_key",
        "The same by mean and covariance of the keys and nothing fitted: exact for Gaussian keys without rotation.",
    ),
    "mean_key_affine": _explained(
        "mean key: affine map of q", "query", "mean_key", "The same by a fitted affine map of the query."
    ),
    "mean_key_with_sink_query": _explained(
        "with sink: lambda q",
        "query",
        "mean_key_with_sink",
        "R^2 of the mean key with the sink in it, its share s and its key known: s k_0 + (1 - s) lambda q.",
    ),
    "mean_key_with_sink_gaussian": _explained(
        "with sink: m + Sigma q / sqrt(d)", "query", "mean_key_with_sink", "Likewise with m + Sigma q / sqrt(d)."
    ),
    "mean_key_with_sink_affine": _explained(
        "with sink: affine map of q", "query", "mean_key_with_sink", "Likewise with an affine map of the query."
    ),
    "sink_mass": Statistic("sink mass", "query", "share", None, "Attention on the first token of the window."),
    "entropy": Statistic("entropy", "query", "nats", None, "Of the attention, sink included."),
    "distance": Statistic("distance", "query", "tokens", None, "Mean distance of what is attended, sink apart."),
    "distance_with_sink": Statistic("distance with sink", "query", "tokens", None, "The same, sink included."),
    "clipped": Statistic("clipped", "key", "share", None, "Tokens whose key or value is an outlier and was drawn in."),
    "key_isotropy": Statistic(
        "key isotropy",
        "key",
        "share",
        None,
        "(tr C)^2 / (D tr C^2) of the keys' covariance C: 1 if the same in all directions, 1/D if in one.",
    ),
    "key_mean_share": Statistic(
        "mean of keys", "key", "share", None, "Share of the keys' mean in their mean square: 0 if they are centred."
    ),
    "isotropy": Statistic(
        "isotropy score",
        "query",
        "share",
        None,
        "How well the query stands for the mean key, as isotropic keys would have it: mean over heads of the R^2 of the "
        "affine map, sink apart, negative ones counted as 0.",
    ),
}


@dataclass(frozen=True)
class Estimate:
    """A figure and the bounds of its interval, `None` where nothing tells its spread."""

    mean: float
    low: float | None = None
    high: float | None = None

    def text(self, digits: int = 2, factor: float = 1.0) -> str:
        """Such as ``0.71 (0.68 to 0.74)``."""
        text = f"{self.mean * factor:.{digits}f}"
        if self.low is None:
            return text
        return f"{text} ({self.low * factor:.{digits}f} to {self.high * factor:.{digits}f})"


@dataclass(frozen=True)
class LayerDiagnosis:
    """The figures of one layer.

    Attributes:
        layer: its index in the model.
        heads: by name of `STATISTICS`, one figure for each query or key head (`isotropy`, the layer's score, has none).
        mean: by name of `STATISTICS`, the mean over heads.
        gates: of the recurrent memories, chosen by head for predicting values: memory -> `beta` (step size), `span`
            (tokens, the decay is exp(-1/span); `None` for no decay) and mesa's `ridge`, one for each key head.
        loss_change: memory -> step (`expectation`, `mean_field`, `query`, `mapped_query`) -> change of the model's loss in
            nats per token when this layer alone takes that step. The memories are linear, so the first two are one.
    """

    layer: int
    heads: dict[str, list[Estimate]]
    mean: dict[str, Estimate]
    gates: dict[str, dict[str, list[float | None]]]
    loss_change: dict[str, dict[str, Estimate]]


@dataclass(frozen=True)
class Diagnosis:
    """How well each step of the averaging path holds in each softmax layer of a model.

    Attributes:
        model, model_type: what was diagnosed.
        layers: in the model's order.
        loss: of the unchanged model on the windows that losses were measured on, nats per token; `None` if none were.
        tokens: how many were `fitted` on, `measured`, and read for `losses`; windows: how many, by pass.
        settings: those of `diagnose`.
        maps: what was fitted, as tensors, affine maps with the intercept in row 0: `{layer}.query_map` `[H, D + 1, D]`
            (query to mean key, sink apart), `{layer}.value_map` `[H_kv, D + 1, D]` (key to value),
            `{layer}.read_map.{memory}.{step}` `[H, D + 1, D]` (what the memory returns to what the attention does),
            `{layer}.key_mean` `[H_kv, D]`, `{layer}.key_covariance` `[H_kv, D, D]`; un-rotated queries and keys.
    """

    model: str
    model_type: str
    layers: list[LayerDiagnosis]
    loss: Estimate | None
    tokens: dict[str, int]
    windows: dict[str, int]
    settings: dict[str, Any]
    maps: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def scores(self, by: str | None = None) -> dict[int, float]:
        """One number a layer.

        Args:
            by: a name of `STATISTICS`, its mean over heads; or `loss_change`, that of step 3 with a query map and the first
                memory, which is the default if losses were measured, for it tells best which layers a hybrid misses
                (docs/conversion.md), or else `isotropy`.

        Raises:
            ValueError: an unknown name, or losses that were not measured.
        """
        by = self._score(by)
        if by == "loss_change":
            self._need_losses()
            memory = self.settings["memories"][0]
            return {layer.layer: layer.loss_change[memory]["mapped_query"].mean for layer in self.layers}
        if by not in STATISTICS:
            raise ValueError(f"Unknown score {by!r}; known: loss_change, {', '.join(STATISTICS)}.")
        return {layer.layer: layer.mean[by].mean for layer in self.layers}

    def softmax_needs(self, by: str | None = None) -> dict[int, float]:
        """How much each layer should stay softmax: the figure of `scores`, with the sign that makes hard layers high.

        `loss_change`, `mean_field_gap` and `sink_mass` are taken to be the harder the higher, all others the lower.
        """
        sign = 1 if self._score(by) in ("loss_change", "mean_field_gap", "sink_mass") else -1
        return {layer: sign * score for layer, score in self.scores(by).items()}

    def rank(self, by: str | None = None) -> list[int]:
        """Layer indices in the order in which they should stay softmax, the most needed first; see `softmax_needs`."""
        needs = self.softmax_needs(by)
        return sorted(needs, key=lambda layer: (-needs[layer], layer))

    def rank_correlation(self, by: str = "isotropy") -> Estimate:
        """Spearman's correlation over layers of a score with the loss change of step 3 (query map, first memory).

        Its interval is about the number of layers alone: `rank_correlation`.

        Raises:
            ValueError: losses were not measured, or fewer than three layers.
        """
        pairs = self.scores(by), self.scores("loss_change")
        if len(self.layers) < 3:
            raise ValueError(f"A correlation over {len(self.layers)} layers says nothing: three are the least.")
        return rank_correlation(*(list(scores.values()) for scores in pairs))

    def _score(self, by: str | None) -> str:
        """The name of the score that `by` asks for."""
        return by or ("isotropy" if self.loss is None else "loss_change")

    def _need_losses(self) -> None:
        if self.loss is None:
            raise ValueError("No losses were measured: give diagnose some memories.")

    # Files.

    def to_dict(self) -> dict[str, Any]:
        """Everything but `maps`, as JSON holds it."""
        held = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.name != "maps"}
        held["layers"] = [dataclasses.asdict(layer) for layer in self.layers]
        held["loss"] = None if self.loss is None else dataclasses.asdict(self.loss)
        return held

    @classmethod
    def from_dict(cls, held: dict[str, Any], maps: dict[str, torch.Tensor] | None = None) -> "Diagnosis":
        """The inverse of `to_dict`."""
        layers = [
            LayerDiagnosis(
                layer=layer["layer"],
                heads={name: [Estimate(**value) for value in values] for name, values in layer["heads"].items()},
                mean={name: Estimate(**value) for name, value in layer["mean"].items()},
                gates=layer["gates"],
                loss_change={
                    memory: {step: Estimate(**value) for step, value in steps.items()}
                    for memory, steps in layer["loss_change"].items()
                },
            )
            for layer in held["layers"]
        ]
        loss = None if held["loss"] is None else Estimate(**held["loss"])
        return cls(**{**held, "layers": layers, "loss": loss}, maps=maps or {})

    def save(self, folder: str | Path) -> None:
        """Write the figures (`diagnosis.json`) and the fitted maps (`maps.safetensors`)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FIGURES_FILE).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        save_file({name: value.contiguous() for name, value in self.maps.items()}, folder / MAPS_FILE)

    @classmethod
    def load(cls, folder: str | Path) -> "Diagnosis":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: the folder holds no diagnosis.
        """
        folder = Path(folder)
        for name in (FIGURES_FILE, MAPS_FILE):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} holds no diagnosis: {name} is missing. Diagnosis.save writes it.")
        held = json.loads((folder / FIGURES_FILE).read_text(encoding="utf-8"))
        return cls.from_dict(held, load_file(folder / MAPS_FILE))

    # Words.

    def markdown(self) -> str:
        """The whole diagnosis as Markdown tables."""
        confidence = f"{100 * self.settings['confidence']:g}%"
        lines = [
            f"# Diagnosis of {self.model}",
            "",
            f"{self.model_type}, {len(self.layers)} softmax layers; maps and gates fitted on {self.tokens['fitted']:,} "
            f"tokens ({self.windows['fit']} windows), figures from {self.tokens['measured']:,} others "
            f"({self.windows['measure']} windows). In brackets: {confidence} bootstrap intervals over "
            f"{self.settings['groups']} groups of windows. Shares of variance are R^2 out of sample, in per cent.",
            "",
            *(f"- {line}" for line in self.summary().splitlines()),
            "",
            "## Layers",
            "",
            "Means over heads.",
            "",
        ]
        lines += self._layer_table(
            ("isotropy", "v_static", "v_nonlinear", "v_delta_net", "v_gated_delta_net", "v_mesa_net", "mean_field_gap")
        )
        lines += self._layer_table(
            ("mean_key_query", "mean_key_gaussian", "mean_key_affine", "mean_key_with_sink_query",
             "mean_key_with_sink_gaussian", "mean_key_with_sink_affine")
        )  # fmt: skip
        lines += self._layer_table(
            ("sink_mass", "entropy", "distance", "distance_with_sink", "clipped", "key_isotropy", "key_mean_share")
        )
        if self.loss is not None:
            lines += self._loss_section()
        lines += ["## Heads", ""]
        for name in ("v_static", "v_mesa_net", "mean_key_affine", "mean_field_gap", "sink_mass", "distance"):
            lines += self._head_section(name)
        lines += ["## What the figures are", ""]
        lines += [f"- {statistic.title} (`{name}`): {statistic.meaning}" for name, statistic in STATISTICS.items()]
        return "\n".join(lines) + "\n"

    def _layer_table(self, names: Sequence[str]) -> list[str]:
        rows = [
            [layer.layer, *(_shown(STATISTICS[name].unit, layer.mean[name]) for name in names)] for layer in self.layers
        ]
        return _table(["layer", *(STATISTICS[name].title for name in names)], rows)

    def _loss_section(self) -> list[str]:
        lines = [
            "## Loss",
            "",
            f"The unchanged model: {self.loss.text(3)} nats per token ({self.tokens['losses']:,} tokens of "
            f"{self.windows['losses']} windows). Below: the change when one layer alone takes a step, everything else "
            "exact. The memory is made of the layer's own queries, un-rotated keys and values, its gates are constant, and "
            "an affine map per head from its reads to the attention's averages is fitted on the other windows.",
            "",
        ]
        for memory in self.settings["memories"]:
            header = ["layer", "steps 1 and 2: at the mean key", "step 3: at the query", "step 3: at the mapped query"]
            rows = [
                [layer.layer, *(layer.loss_change[memory][step].text(4) for step in LOSS_STEPS[1:])]
                for layer in self.layers
            ]
            lines += [f"### {memory}", "", *_table(header, rows)]
        return lines

    def _head_section(self, name: str) -> list[str]:
        statistic = STATISTICS[name]
        most = max(len(layer.heads[name]) for layer in self.layers)
        rows = [
            [layer.layer, *(_shown(statistic.unit, value, False) for value in layer.heads[name])]
            for layer in self.layers
        ]
        header = ["layer", *(f"{statistic.heads} head {index}" for index in range(most))]
        return [f"### {statistic.title}", "", *_table(header, rows)]

    def summary(self) -> str:
        """The findings in plain words, one a line."""
        lines = [
            f"Values from keys: a linear map of the key explains {self._overview('v_static')} of the value's variance, a "
            f"non-linear one {self._overview('v_nonlinear')}.",
            "Values from keys, learnt online within the window: delta net explains "
            f"{self._overview('v_delta_net')}, gated delta net {self._overview('v_gated_delta_net')}, mesa net "
            f"{self._overview('v_mesa_net')}.",
            "Mean field: moving the average inside a non-linear map changes "
            f"{self._overview('mean_field_gap')} of its output's variance.",
            f"Mean key from the query, sink apart: lambda q explains {self._overview('mean_key_query')}, "
            f"m + Sigma q / sqrt(d) {self._overview('mean_key_gaussian')}, an affine map of q "
            f"{self._overview('mean_key_affine')}.",
            self._attention_summary(),
        ]
        if self.loss is not None:
            lines += [self._loss_summary(memory) for memory in self.settings["memories"]]
        by = "isotropy score" if self.loss is None else f"loss of step 3 ({self.settings['memories'][0]}, mapped query)"
        order = ", ".join(map(str, self.rank()[: max(1, len(self.layers) // 4)]))
        line = f"By the {by} the layers to keep as softmax first are {order}"
        if self.loss is not None and len(self.layers) > 2 and not math.isnan((found := self.rank_correlation()).mean):
            line += (
                f"; the isotropy score's rank correlation with that loss over the layers is {found.text()} (minus one would "
                "be a perfect guide)"
            )
        return "\n".join([*lines, f"{line}."])

    def _overview(self, name: str) -> str:
        """The mean over layers in per cent, and the layers where it is highest and lowest."""
        scores = self.scores(name)
        if max(scores.values()) <= 0:
            return "nothing (R^2 is not above 0 in any layer)"
        mean = 100 * sum(scores.values()) / len(scores)
        if len(scores) == 1:
            return f"{mean:.0f}%"
        high, low = max(scores, key=scores.get), min(scores, key=scores.get)
        return f"{mean:.0f}% ({100 * scores[low]:.0f}% in layer {low}, {100 * scores[high]:.0f}% in layer {high})"

    def _attention_summary(self) -> str:
        held = [layer for layer, share in self.scores("sink_mass").items() if share >= 0.5]
        where = f"half or more in layers {_ranges(held)}" if held else "less than half in every layer"
        distance = self.scores("distance")
        near, far = min(distance, key=distance.get), max(distance, key=distance.get)
        return (
            f"Attention: the first token holds {self._overview('sink_mass')} of it, {where}; the rest looks "
            f"{distance[near]:.0f} tokens back in layer {near} and {distance[far]:.0f} in layer {far}."
        )

    def _loss_summary(self, memory: str) -> str:
        changes = {
            step: {layer.layer: layer.loss_change[memory][step].mean for layer in self.layers} for step in LOSS_STEPS
        }
        medians = {step: torch.tensor(list(found.values())).median().item() for step, found in changes.items()}
        last = changes["mapped_query"]
        worst, best = max(last, key=last.get), min(last, key=last.get)
        return (
            f"Loss ({memory}, one layer at a time, median over layers): {medians['mean_field']:+.3f} nats per token when "
            f"it is read at the mean key (steps 1 and 2), {medians['query']:+.3f} at the query (step 3), "
            f"{medians['mapped_query']:+.3f} at the mapped query; the last from {last[best]:+.3f} in layer {best} to "
            f"{last[worst]:+.3f} in layer {worst}."
        )


def _shown(unit: str, estimate: Estimate, with_bounds: bool = True) -> str:
    estimate = estimate if with_bounds else Estimate(estimate.mean)
    return estimate.text(1, 100.0) if unit == "share" else estimate.text(2 if unit == "nats" else 1)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", f"|{'---:|' * len(header)}"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """Spearman's correlation of two lists, with the 95% interval of Bonett & Wright (2000), which four values have or more.

    Equal values share the mean of their ranks.
    """

    def ranks(values: Sequence[float]) -> torch.Tensor:
        column = torch.tensor(values, dtype=torch.float64)
        below, equal = ((compare(column[:, None], column)).sum(1) for compare in (torch.gt, torch.eq))
        return below + (equal - 1) / 2

    found = torch.corrcoef(torch.stack((ranks(x), ranks(y))))[0, 1].item()
    if len(x) < 4:
        return Estimate(found)
    width = 1.96 * math.sqrt((1 + found**2 / 2) / (len(x) - 3))
    centre = math.atanh(min(max(found, -1 + 1e-9), 1 - 1e-9))
    return Estimate(found, math.tanh(centre - width), math.tanh(centre + width))


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in words: ``0, 3-5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
