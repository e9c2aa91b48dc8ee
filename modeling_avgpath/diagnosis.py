# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""`diagnose`: the three averages of the path measured on a real softmax model, layer by layer and head by head.

The windows of text are split in two. On the first part everything that has to be fitted is fitted: linear and non-linear
maps from keys to values, maps from queries to mean keys, gates of the recurrent memories. On the other part all of it is
measured, so that every figure is out of sample, and its interval comes from resampling groups of those windows.

Five passes: `scales` (medians, by which outliers are drawn in), `fit`, `reads` (what a layer's memory returns against what
its attention does), `measure`, and `losses` (one layer at a time takes each step of the path, all else is exact). Of each
pass sums alone are kept, so memory depends on the model's heads and not on the number of tokens.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .diagnosis_report import STATISTICS, Diagnosis, Estimate, LayerDiagnosis
from .diagnosis_statistics import (
    LEAST,
    ONLINE_MEMORIES,
    Estimates,
    Gates,
    Resampling,
    apply_map,
    attention_moments,
    bootstrap,
    choose_gates,
    moments,
    online_errors,
    predict_online,
    products,
    random_features,
    read_memory,
    ridge,
    robust_scale,
    share_explained,
    squared_error,
    winsorise,
)
from .norms import l2_norm
from .softmax_models import LayerPass, SoftmaxLayer, check_text, decoder, softmax_layers, watch

PASSES = ("scales", "fit", "reads", "measure", "losses")
STEPS = ("mean_field", "query", "mapped_query")  # `expectation` is `mean_field`: these memories read linearly
SHORTEST_WINDOW = 3  # a sink, a pair to learn from, and one to foretell
SCALE_WINDOWS = 4  # medians hardly change after that
GATE_WINDOWS = 2  # every one is read with each candidate
LOGITS_AT_ONCE = 512  # tokens
SECONDS_BETWEEN_SAVES = 60.0

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DiagnosisSettings:
    """What `diagnose` is asked for, see there."""

    fit_windows: int | None = None
    groups: int = 16
    clip: float = 3.0
    memories: Sequence[str] = ("gated_delta_net",)
    loss_windows: int | None = 8
    layers: Sequence[int] | None = None
    confidence: float = 0.95
    resamples: int = 1000
    seed: int = 0

    def _check_types(self) -> None:
        optional = ("fit_windows", "loss_windows")
        for name in (*optional, "groups", "resamples", "seed"):
            value = getattr(self, name)
            if not (isinstance(value, int) or (value is None and name in optional)):
                raise TypeError(f"{name}={value!r} must be an integer{' or None' if name in optional else ''}.")
        for name in ("clip", "confidence"):
            if not isinstance(getattr(self, name), int | float):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a number.")
        for name in ("memories", "layers"):
            value = getattr(self, name)
            if not isinstance(value, Iterable) and not (value is None and name == "layers"):
                raise TypeError(
                    f"{name}={value!r} must be a list, such as {[0] if name == 'layers' else ['mesa_net']}."
                )

    def resolve(self, model: nn.Module, found: Sequence[SoftmaxLayer], windows: int) -> "DiagnosisSettings":
        """These settings with what they leave open filled in, for a model with the layers `found` and so many windows.

        Raises:
            TypeError: a setting of a wrong type.
            ValueError: a setting out of range.
        """
        self._check_types()
        if windows < 2:
            raise ValueError(
                "There is 1 window, and 2 are the least, one to fit and one to measure: cut the text in two."
            )
        fit_windows = windows // 2 if self.fit_windows is None else self.fit_windows
        if not 1 <= fit_windows < windows:
            raise ValueError(
                f"fit_windows={fit_windows} must leave some of the {windows} windows to measure: from 1 to {windows - 1}."
            )
        for name, least in (("groups", 1), ("loss_windows", 1), ("resamples", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        if not self.clip > 1:
            raise ValueError(f"clip={self.clip} must be greater than 1, the median distance itself.")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence={self.confidence} must lie between 0 and 1.")
        memories = (self.memories,) if isinstance(self.memories, str) else tuple(dict.fromkeys(self.memories))
        for memory in memories:
            if memory not in ONLINE_MEMORIES:
                raise ValueError(f"Unknown memory {memory!r} in memories; known: {', '.join(ONLINE_MEMORIES)}.")
        if memories and getattr(model, "lm_head", None) is None:
            raise ValueError(
                f"{type(model).__name__} has no language-model head (lm_head), so it has no loss to change: load it by "
                "AutoModelForCausalLM, or pass memories=()."
            )
        known = [layer.index for layer in found]
        layers = tuple(known) if self.layers is None else tuple(sorted(set(self.layers)))
        if unknown := [index for index in layers if index not in known]:
            raise ValueError(f"layers={unknown}: no softmax layers; those of this model are {known}.")
        if not layers:
            raise ValueError(f"layers is empty: name some of {known}, or leave it out for all.")
        groups = min(self.groups, windows - fit_windows)
        return replace(self, fit_windows=fit_windows, groups=groups, memories=memories, layers=layers)


def diagnose(
    model: nn.Module,
    data: torch.Tensor | Iterable,
    *,
    fit_windows: int | None = None,
    groups: int = 16,
    clip: float = 3.0,
    memories: Sequence[str] = ("gated_delta_net",),
    loss_windows: int | None = 8,
    layers: Sequence[int] | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure how well each step of the averaging path holds in every softmax layer of a model.

    The first token of a window is taken to be the attention sink and kept apart: maps and memories are fitted and judged
    on the others, and mean keys are averages over the others.

    Args:
        model: Llama, Mistral, Qwen2, Qwen3 or AvgPath, with a language-model head; any floating dtype and device. The
            statistics are computed in fp32 and summed in float64.
        data: windows of token ids that know nothing of each other: a tensor `[N, T]`, or an iterable of 1-D tensors, of
            `[B, T]` tensors, or of dicts with `input_ids` and optionally `attention_mask` (padding is dropped). They are
            kept as token ids. Windows of a text should begin as texts do (with its beginning-of-text token), for the
            first token is the sink.
        fit_windows: how many, the first ones, are for fitting; half by default.
        groups: the windows measured are dealt out to so many groups, from which intervals are made.
        clip: a query, key or value further from its head's median than `clip` times the median distance is drawn back to
            there, so that a few huge ones do not decide on a share of variance. Attention weights stay what they are.
        memories: those whose steps are judged by loss: `delta_net`, `gated_delta_net`, `mesa_net`; empty for none.
        loss_windows: how many of the measured windows are read for that, which takes by far the most time; `None` for all.
        layers: indices of the softmax layers to diagnose, by default all.
        confidence, resamples, seed: of the bootstrap; the seed also draws the random features.
        checkpoint: a file to which finished passes (and, every minute, finished windows) are saved; the same call goes on
            from there, and the file is removed at the end.
        progress: called as `progress(name of the pass, windows done, windows in all)`.

    Returns:
        a `Diagnosis`.

    Raises:
        TypeError, ValueError: another architecture, quantised weights, no softmax layer, no data, windows that are too
            long or too short, ids outside the vocabulary, settings of a wrong type or out of range, a checkpoint of another
            diagnosis, or in a folder that does not exist.
            Nothing has run then.
        FloatingPointError: the activations of the model are not finite.
    """
    if checkpoint is not None and not (folder := Path(checkpoint).absolute().parent).is_dir():
        raise ValueError(f"checkpoint={checkpoint}: the folder {folder} does not exist; make it first.")
    settings = DiagnosisSettings(fit_windows, groups, clip, memories, loss_windows, layers, confidence, resamples, seed)
    run = DiagnosisRun(model, data, settings, checkpoint, progress)
    run.run()
    if run.checkpoint is not None:
        run.checkpoint.unlink(missing_ok=True)
    return run.result()


def read_windows(model: nn.Module, data: torch.Tensor | Iterable) -> list[torch.Tensor]:
    """The windows of `data`, see `diagnose`, as 1-D int32 tensors on the CPU.

    Raises:
        TypeError: what is no token ids.
        ValueError: no window, one too long or too short, ids outside the vocabulary.
    """
    if isinstance(data, dict):
        data = [data]
    if not isinstance(data, Iterable) or isinstance(data, str) or getattr(data, "ndim", 2) < 2:
        found = f"a tensor of shape {tuple(data.shape)}" if hasattr(data, "shape") else repr(data)
        raise TypeError(f"data holds windows of token ids, a tensor [N, T] or an iterable of them; got {found}.")
    rows: list[torch.Tensor] = []
    for item in data:
        mask = None
        if hasattr(item, "keys"):
            if "input_ids" not in item:
                raise ValueError(f"An item of the data has the keys {', '.join(item.keys())}, but no input_ids.")
            item, mask = item["input_ids"], item.get("attention_mask")
        try:
            ids = torch.as_tensor(item)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"Windows are token ids, integers of shape [T] or [B, T]; got {item!r}.") from None
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.ndim not in (1, 2):
            raise TypeError(
                f"Windows are token ids, integers of shape [T] or [B, T]; got {ids.dtype} of shape {tuple(ids.shape)}."
            )
        ids = torch.atleast_2d(ids)
        if mask is None:
            rows += ids
        else:
            kept = torch.atleast_2d(torch.as_tensor(mask)) != 0
            if kept.shape != ids.shape:
                raise ValueError(f"attention_mask {tuple(kept.shape)} does not fit input_ids {tuple(ids.shape)}.")
            rows += [row[real] for row, real in zip(ids, kept, strict=True)]
    if not rows:
        raise ValueError("The data is empty: give at least two windows of token ids.")
    for number, row in enumerate(rows):
        check_text(row, model, f"Window {number}", SHORTEST_WINDOW)
    return [row.to("cpu", torch.int32) for row in rows]


@dataclass(frozen=True)
class Scale:
    """Where a head's vectors lie: median `[H, D]`, and median distance from it `[H]`, 1 where all are the same."""

    centre: torch.Tensor
    radius: torch.Tensor


@dataclass(frozen=True)
class Maps:
    """What is fitted in a layer; maps are affine, intercept first, between centred vectors.

    Attributes:
        static, nonlinear: from a key, and from its features, to its value, `[H_kv, D + 1, D]` and `[H_kv, D + M + 1, D]`.
        mean_key: from a query to the mean key, by statistic, `[H, D + 1, D]`.
        mean_key_with_sink: the same, tokens weighted by the attention that they leave for others than the sink.
        gates: of each recurrent memory.
        key_mean, key_covariance: of the centred keys, `[H_kv, D]`, `[H_kv, D, D]`.
    """

    static: torch.Tensor
    nonlinear: torch.Tensor
    mean_key: dict[str, torch.Tensor]
    mean_key_with_sink: dict[str, torch.Tensor]
    gates: dict[str, Gates]
    key_mean: torch.Tensor
    key_covariance: torch.Tensor


class DiagnosisRun:
    """The passes of one `diagnose`, and the sums that they leave. Attention runs on one window at a time.

    Its construction checks everything and raises what `diagnose` raises; `run` computes, `result` tells.
    """

    def __init__(
        self,
        model: nn.Module,
        data: torch.Tensor | Iterable,
        settings: DiagnosisSettings,
        checkpoint: str | Path | None = None,
        progress: Progress | None = None,
    ):
        found = softmax_layers(model)
        windows = read_windows(model, data)
        settings = settings.resolve(model, found, len(windows))
        self.model, self.settings, self.progress = model, settings, progress
        self.layers = [layer for layer in found if layer.index in settings.layers]
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        fit, measured = windows[: settings.fit_windows], windows[settings.fit_windows :]
        has_losses = bool(settings.memories)
        self.windows = {
            "scales": fit[:SCALE_WINDOWS],
            "fit": fit,
            "reads": fit if has_losses else [],
            "measure": measured,
            "losses": measured[: settings.loss_windows] if has_losses else [],
        }
        self.sums: dict[str, torch.Tensor] = {}
        self.done = dict.fromkeys(PASSES, 0)  # windows
        self.scales: dict[int, dict[str, Scale]] = {}
        self.sink_keys: dict[int, torch.Tensor] = {}  # [H_kv, D]
        self.maps: dict[int, Maps] = {}
        self.read_maps: dict[tuple[int, str, str], torch.Tensor] = {}
        dim = self.layers[0].head_dim
        generator = torch.Generator().manual_seed(settings.seed)
        # On keys of unit variance per channel: cosines that bend over about the spread of the keys.
        self.frequencies = torch.randn(2 * dim, dim, generator=generator) * dim**-0.5
        self.phases = torch.rand(2 * dim, generator=generator) * 2 * torch.pi
        self.fingerprint = _fingerprint(model, windows, settings) if checkpoint is not None else ""
        self.saved_at = time.monotonic()
        if self.checkpoint is not None and self.checkpoint.exists():
            self._load()

    @property
    def nbytes(self) -> int:
        """Bytes of all sums held."""
        return sum(value.nbytes for value in self.sums.values())

    # Running.

    @torch.no_grad()
    def run(self) -> None:
        """All windows of all passes that are not done yet.

        Raises:
            FloatingPointError: the model's activations are not finite.
        """
        visits = {
            "scales": self._see_scales,
            "fit": self._see_fit,
            "reads": self._see_reads,
            "measure": self._see_measure,
        }
        finish = {"scales": self._finish_scales, "fit": self._finish_fit, "reads": self._finish_reads}
        was_training = self.model.training
        self.model.eval()
        try:
            for name in PASSES:
                windows = self.windows[name]
                for number in range(self.done[name], len(windows)):
                    ids = windows[number].long()[None].to(self.model.device)
                    if name == "losses":
                        self._measure_losses(ids, number)
                    else:
                        with watch(self.layers, partial(visits[name], number)):
                            last = decoder(self.model)(input_ids=ids, use_cache=False).last_hidden_state
                        if name != "scales":  # after which the layers' own are checked
                            _check_finite(last, "last hidden states")
                    self.done[name] = number + 1
                    self._save(force=number + 1 == len(windows))
                    if self.progress is not None:
                        self.progress(name, number + 1, len(windows))
                if name in finish:
                    finish[name]()
        finally:
            self.model.train(was_training)

    def _save(self, force: bool) -> None:
        if self.checkpoint is None or not (force or time.monotonic() - self.saved_at > SECONDS_BETWEEN_SAVES):
            return
        temporary = self.checkpoint.with_name(f".{self.checkpoint.name}.partial")
        state = {"fingerprint": self.fingerprint, "done": self.done, "sums": self.sums, "settings": self._settings()}
        torch.save(state, temporary)
        temporary.replace(self.checkpoint)
        self.saved_at = time.monotonic()

    def _load(self) -> None:
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            fingerprint, settings = state["fingerprint"], state["settings"]
            self.done, self.sums = state["done"], state["sums"]
        except Exception as error:  # whatever a file that is something else makes torch.load raise
            raise ValueError(f"{self.checkpoint} is no checkpoint of a diagnosis ({error}): remove it.") from error
        if fingerprint != self.fingerprint:
            now = self._settings()
            changed = [
                f"{name}={value!r} (now {now[name]!r})" for name, value in settings.items() if value != now[name]
            ]
            raise ValueError(
                f"{self.checkpoint} was left by a diagnosis of {', '.join(changed) or 'another model or other data'}: go on "
                "with that, remove the file, or give another one."
            )

    def _settings(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.settings.__dict__))

    def _add(self, name: str, value: torch.Tensor, window: int | None = None) -> None:
        """Add to the sum `name`, for a measured `window` to that of its group."""
        value = value.double()
        if window is None:
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            return
        if name not in self.sums:
            self.sums[name] = value.new_zeros(self.settings.groups, *value.shape)
        self.sums[name][window % self.settings.groups] += value

    def _add_all(self, prefix: str, values: dict[str, torch.Tensor], window: int | None = None) -> None:
        for name, value in values.items():
            self._add(f"{prefix}.{name}", value, window)

    def _taken(self, prefix: str) -> dict[str, torch.Tensor]:
        """The sums whose names begin with `prefix` and a dot, by the rest of their names."""
        return {
            name.removeprefix(f"{prefix}."): value
            for name, value in self.sums.items()
            if name.startswith(f"{prefix}.") and "." not in name.removeprefix(f"{prefix}.")
        }

    # What is seen of a layer.

    def _centred(self, seen: LayerPass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of all tokens but the sink, centred and winsorised, fp32; and where k or v was `[T - 1, H_kv]`."""
        scales, clip = self.scales[seen.layer.index], self.settings.clip
        found, far = {}, {}
        for name in ("q", "k", "v"):
            x, scale = getattr(seen, name)[0, 1:].float(), scales[name]
            found[name], far[name] = winsorise(x, scale.centre.to(x), scale.radius.to(x), clip)
        return found["q"], found["k"], found["v"], far["k"] | far["v"]

    def _features(self, k: torch.Tensor, layer: SoftmaxLayer, groups: int = 1) -> torch.Tensor:
        """Features of centred keys `[T, H_kv * groups, D]`: they themselves at unit size, and random ones."""
        radius = self.scales[layer.index]["k"].radius.repeat_interleave(groups)
        x = k * (layer.head_dim**0.5 / radius).to(k)[:, None]
        return random_features(x, self.frequencies, self.phases)

    def _attention(self, seen: LayerPass, vectors: torch.Tensor):
        layer, position_embeddings = seen.layer, seen.position_embeddings
        q, k = (layer.rotate(x.float(), position_embeddings)[0] for x in (seen.q, seen.k))
        return attention_moments(q, k, vectors, layer.visible(len(q), q.device), layer.scaling)

    def _see_scales(self, window: int, seen: LayerPass) -> None:
        found = {"sink_key": seen.k[0, 0].float()}
        for name in ("q", "k", "v"):
            found[f"{name}_centre"], found[f"{name}_radius"] = robust_scale(getattr(seen, name)[0, 1:].float())
        for name, value in found.items():
            key, value = f"{seen.layer.index}.scales.{name}", value.cpu()[None]
            self.sums[key] = torch.cat((self.sums[key], value)) if key in self.sums else value

    def _finish_scales(self) -> None:
        for layer in self.layers:
            found = self._taken(f"{layer.index}.scales")
            self.sink_keys[layer.index] = found["sink_key"].median(dim=0).values
            self.scales[layer.index] = {}
            for name in ("q", "k", "v"):
                centre, radius = (found[f"{name}_{part}"].median(dim=0).values for part in ("centre", "radius"))
                _check_finite(torch.cat((centre.flatten(), radius)), f"{name} of layer {layer.index}")
                self.scales[layer.index][name] = Scale(centre, torch.where(radius > 0, radius, 1.0))

    def _see_fit(self, window: int, seen: LayerPass) -> None:
        layer = seen.layer
        q, k, v, _ = self._centred(seen)
        scales = self.scales[layer.index]
        self._add_all(f"{layer.index}.values", products(self._features(k, layer), v))
        found = self._attention(seen, k)
        query = q + scales["q"].centre.to(q)
        mean_key = found.means + scales["k"].centre.to(q).repeat_interleave(layer.groups, dim=0)
        for name, weight in (("apart", None), ("with_sink", found.rest)):
            self._add_all(f"{layer.index}.{name}", products(q, found.means, weight))
            square = torch.ones_like(found.sink) if weight is None else weight.square()
            along = {"product": (query * mean_key).sum(-1) * square, "square": query.square().sum(-1) * square}
            self._add_all(f"{layer.index}.{name}", {key: value.sum(0).cpu() for key, value in along.items()})
        if window < GATE_WINDOWS:
            pairs = (k + scales["k"].centre.to(k), v + scales["v"].centre.to(v))
            for memory in ONLINE_MEMORIES:
                self._add(f"{layer.index}.gates.{memory}", online_errors(*pairs, memory))

    def _finish_fit(self) -> None:
        for layer in self.layers:
            index, dim, scales = layer.index, layer.head_dim, self.scales[layer.index]
            values = self._taken(f"{index}.values")
            unit = scales["k"].radius.double() / dim**0.5  # of a feature, in the keys' own size
            n = values["n"]
            key_mean = values["xx"][:, 0, 1 : dim + 1] / n
            second = values["xx"][:, 1 : dim + 1, 1 : dim + 1] / n
            covariance = (second - key_mean[:, :, None] * key_mean[:, None]) * unit[:, None, None].square()
            key_mean = key_mean * unit[:, None]
            static = ridge(values, dim)
            static[:, 1:] /= unit[:, None, None]
            centres = {name: scales[name].centre.double() for name in ("q", "k")}
            mean_keys = {}
            for name in ("apart", "with_sink"):
                sums = self._taken(f"{index}.{name}")
                factor = sums["product"] / sums["square"].clamp(min=LEAST)
                mean_keys[name] = {
                    "query": scaled_query_map(factor, centres["q"], centres["k"]),
                    "gaussian": gaussian_map(key_mean, covariance, centres["q"], layer.scaling),
                    "affine": ridge(sums),
                }
            errors = self._taken(f"{index}.gates")
            self.maps[index] = Maps(
                static=static,
                nonlinear=ridge(values),
                mean_key=mean_keys["apart"],
                mean_key_with_sink=mean_keys["with_sink"],
                gates={memory: choose_gates(errors[memory], memory) for memory in ONLINE_MEMORIES},
                key_mean=key_mean,
                key_covariance=covariance,
            )

    def _reads(self, seen: LayerPass, memory: str) -> torch.Tensor:
        """What the memory of the layer's pairs returns at each of `STEPS`, `[steps, T, H, D]`, fp32.

        The memory sees all tokens, un-rotated keys at unit length, and is read after a token's own pair is written.
        """
        layer, maps = seen.layer, self.maps[seen.layer.index]
        scales = self.scales[layer.index]
        first = replace(seen, hidden_states=seen.hidden_states[:1])
        q, k, v = (x.float() for x in first.projections)
        centres = {name: scales[name].centre.to(q) for name in ("q", "k")}
        mapped = apply_map(q - centres["q"], maps.mean_key["affine"])
        mapped = mapped + centres["k"].repeat_interleave(layer.groups, dim=0)
        queries = torch.cat((first.average(l2_norm(k)), l2_norm(q), l2_norm(mapped)))
        k, v = (x.repeat_interleave(layer.groups, dim=2).expand(len(STEPS), -1, -1, -1) for x in (k, v))
        return read_memory(queries, k, v, maps.gates[memory].repeat(layer.groups))

    def _see_reads(self, window: int, seen: LayerPass) -> None:
        averages = seen.average(seen.v.float())[0]
        for memory in self.settings.memories:
            for step, reads in zip(STEPS, self._reads(seen, memory), strict=True):
                self._add_all(f"{seen.layer.index}.reads.{memory}.{step}", products(reads, averages))

    def _finish_reads(self) -> None:
        for layer in self.layers:
            for memory in self.settings.memories:
                for step in STEPS:
                    sums = self._taken(f"{layer.index}.reads.{memory}.{step}")
                    self.read_maps[layer.index, memory, step] = ridge(sums)

    def _see_measure(self, window: int, seen: LayerPass) -> None:
        layer, maps = seen.layer, self.maps[seen.layer.index]
        index, groups = layer.index, layer.groups
        q, k, v, is_far = self._centred(seen)
        centres = {name: scale.centre.to(q) for name, scale in self.scales[index].items()}
        add, add_all = partial(self._add, window=window), partial(self._add_all, window=window)

        # Step 1: values from keys.
        mu = apply_map(self._features(k, layer), maps.nonlinear)
        add_all(f"{index}.v", moments(v))
        add(f"{index}.error.v_static", squared_error(v - apply_map(k, maps.static)))
        add(f"{index}.error.v_nonlinear", squared_error(v - mu))
        pairs = (k + centres["k"], v + centres["v"])
        add_all(f"{index}.next_v", moments(v[1:]))
        for memory, gates in maps.gates.items():
            predicted = predict_online(*(x[None] for x in pairs), gates)[0]
            add(f"{index}.error.v_{memory}", squared_error(pairs[1][1:] - predicted))
        add(f"{index}.total.clipped", is_far.sum(0).cpu())

        # Step 2: the mean inside mu, against the mean of mu.
        found = self._attention(seen, torch.cat((k, mu), dim=-1))
        mean_key, mean_mu = found.means.split(layer.head_dim, dim=-1)
        nonlinear = maps.nonlinear.repeat_interleave(groups, dim=0)
        at_mean = apply_map(self._features(mean_key, layer, groups), nonlinear)
        add_all(f"{index}.mean_mu", moments(mean_mu))
        add(f"{index}.error.mean_field_gap", squared_error(mean_mu - at_mean))

        # Step 3: the mean key from the query.
        rest = found.rest
        add_all(f"{index}.mean_key", moments(mean_key))
        # From the usual sink key on, which may be so large that nothing else would be seen beside it.
        usual = self.sink_keys[index].to(k)
        sink_key, from_usual = (
            x.repeat_interleave(groups, dim=0) for x in (seen.k[0, 0].float() - usual, centres["k"] - usual)
        )
        whole = found.sink[..., None] * sink_key + rest[..., None] * (mean_key + from_usual)
        add_all(f"{index}.mean_key_with_sink", moments(whole))
        for name, affine in maps.mean_key.items():
            add(f"{index}.error.mean_key_{name}", squared_error(mean_key - apply_map(q, affine)))
            error = mean_key - apply_map(q, maps.mean_key_with_sink[name])
            add(f"{index}.error.mean_key_with_sink_{name}", squared_error(rest[..., None] * error))

        # The attention itself.
        places = torch.arange(1, len(q) + 1, device=q.device)[:, None]
        whole_distance = found.sink * places + rest * found.distance
        for name, value in (
            ("sink_mass", found.sink),
            ("entropy", found.entropy),
            ("distance", found.distance),
            ("distance_with_sink", whole_distance),
        ):
            add(f"{index}.total.{name}", value.sum(0).cpu())

    # Losses.

    def _measure_losses(self, ids: torch.Tensor, window: int) -> None:
        """The window's loss, and that with one layer at a time on each step of the path."""
        body = decoder(self.model)
        calls: list[tuple[tuple, dict]] = []  # what each decoder layer was called with
        handles = [
            block.register_forward_pre_hook(lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
            for block in body.layers
        ]
        try:
            last = body(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        exact = self._loss(last, ids)
        _check_finite(exact, "logits")
        self._add("loss.n", torch.tensor(float(ids.shape[1] - 1)), window)
        self._add("loss.exact", exact, window)
        for layer in self.layers:
            hidden_states = calls[layer.index][0][0].expand(len(STEPS), -1, -1)
            for memory in self.settings.memories:
                with watch([layer], partial(self._take_steps, memory)):
                    rows = self._run_block(layer.index, hidden_states, calls)
                for index in range(layer.index + 1, len(body.layers)):
                    rows = self._run_block(index, rows, calls)
                change = torch.stack([self._loss(body.norm(row[None]), ids) - exact for row in rows])
                self._add(f"{layer.index}.loss.{memory}", change, window)

    def _run_block(self, index: int, hidden_states: torch.Tensor, calls) -> torch.Tensor:
        (_, *args), kwargs = calls[index]
        return decoder(self.model).layers[index](hidden_states, *args, **kwargs)

    def _take_steps(self, memory: str, seen: LayerPass) -> torch.Tensor:
        """The layer's output with each of `STEPS`, `[steps, T, hidden_size]`; all rows of its input are the same."""
        layer = seen.layer
        maps = [self.read_maps[layer.index, memory, step] for step in STEPS]
        reads = zip(self._reads(seen, memory), maps, strict=True)
        averages = torch.stack([apply_map(read, affine) for read, affine in reads])
        return layer.project_output(averages.to(seen.output.dtype), seen.hidden_states)

    def _loss(self, hidden_states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of a window, nats in all, for the normed last `hidden_states` `[1, T, hidden_size]`."""
        total = torch.zeros((), dtype=torch.float64)
        for states, targets in zip(
            hidden_states[0, :-1].split(LOGITS_AT_ONCE), ids[0, 1:].split(LOGITS_AT_ONCE), strict=True
        ):
            total += F.cross_entropy(self.model.lm_head(states).float(), targets, reduction="sum").cpu().double()
        return total

    # Results.

    def result(self) -> Diagnosis:
        """The diagnosis, from the sums of all passes."""
        settings = self.settings
        resampling = Resampling(settings.confidence, settings.resamples, settings.seed)
        config = self.model.config
        loss = None
        if self.windows["losses"]:
            sums = {"n": self.sums["loss.n"], "value": self.sums["loss.exact"][:, None]}
            loss = _estimates(bootstrap(_per_token, sums, resampling))[0]
        return Diagnosis(
            model=getattr(config, "_name_or_path", "") or config.model_type,
            model_type=config.model_type,
            layers=[self._layer_result(layer, resampling) for layer in self.layers],
            loss=loss,
            tokens={
                name: sum(map(len, self.windows[windows]))
                for name, windows in (("fitted", "fit"), ("measured", "measure"), ("losses", "losses"))
            },
            windows={name: len(windows) for name, windows in self.windows.items()},
            settings=self._settings(),
            maps={name: value for layer in self.layers for name, value in self._layer_maps(layer).items()},
        )

    def _layer_result(self, layer: SoftmaxLayer, resampling: Resampling) -> LayerDiagnosis:
        index, maps = layer.index, self.maps[layer.index]
        estimate = partial(bootstrap, resampling=resampling)
        error = self._taken(f"{index}.error")
        total = self._taken(f"{index}.total")
        targets = {name: self._taken(f"{index}.{name}") for name in STATISTIC_TARGETS}
        heads, mean = {}, {}
        for name, statistic in STATISTICS.items():
            if name in ("isotropy", "key_isotropy", "key_mean_share"):
                continue
            if statistic.target is None:
                sums, function = {"n": targets["v"]["n"], "value": total[name]}, _per_token
            else:
                sums = {**targets[statistic.target], "error": error[name]}
                function = _unexplained if name == "mean_field_gap" else _explained
            most = 1.0 if function is _explained else None
            heads[name] = _estimates(estimate(function, sums), most)
            mean[name] = _estimates(estimate(partial(_head_mean, function), sums), most)[0]
            if name == "mean_key_affine":
                clamped = estimate(partial(_head_mean, function, least=0.0), sums)
                mean["isotropy"] = _estimates(clamped, most)[0]
        # Of the fitted windows' keys, hence without interval.
        trace = maps.key_covariance.diagonal(dim1=1, dim2=2).sum(-1)
        squares = maps.key_covariance.square().sum((1, 2))
        key_mean = (maps.key_mean + self.scales[index]["k"].centre.double()).square().sum(-1)
        for name, values in (
            ("key_isotropy", trace.square() / (layer.head_dim * squares).clamp(min=LEAST)),
            ("key_mean_share", key_mean / (key_mean + trace).clamp(min=LEAST)),
        ):
            heads[name] = [Estimate(value, None, None) for value in values.tolist()]
            mean[name] = Estimate(values.mean().item(), None, None)
        changes = {}
        for memory in self.settings.memories:
            sums = {"n": self.sums["loss.n"], "value": self.sums[f"{index}.loss.{memory}"]}
            found = dict(zip(STEPS, _estimates(estimate(_per_token, sums)), strict=True))
            changes[memory] = {"expectation": found["mean_field"], **found}
        gates = {
            memory: {
                name: [value if value < float("inf") else None for value in field.tolist()]
                for name, field in vars(values).items()
                if field is not None
            }
            for memory, values in maps.gates.items()
        }
        return LayerDiagnosis(layer=index, heads=heads, mean=mean, gates=gates, loss_change=changes)

    def _layer_maps(self, layer: SoftmaxLayer) -> dict[str, torch.Tensor]:
        """The fitted maps between vectors as they are, not centred; see `Diagnosis.maps`."""
        maps, scales, index = self.maps[layer.index], self.scales[layer.index], layer.index
        q, k, v = (scales[name].centre.double() for name in ("q", "k", "v"))
        found = {
            "query_map": uncentre(maps.mean_key["affine"], q, k.repeat_interleave(layer.groups, dim=0)),
            "value_map": uncentre(maps.static, k, v),
            "key_mean": maps.key_mean + k,
            "key_covariance": maps.key_covariance,
        }
        for memory in self.settings.memories:
            for step in STEPS:
                found[f"read_map.{memory}.{step}"] = self.read_maps[index, memory, step]
        return {f"{index}.{name}": value.float() for name, value in found.items()}


STATISTIC_TARGETS = {statistic.target for statistic in STATISTICS.values() if statistic.target is not None}


def _check_finite(values: torch.Tensor, what: str) -> None:
    """Raises `FloatingPointError` unless all `values` are finite."""
    if not values.isfinite().all():
        raise FloatingPointError(
            f"The {what} are not finite: the model's weights may be broken, or its precision too low."
        )


def scaled_query_map(factor: torch.Tensor, q_centre: torch.Tensor, k_centre: torch.Tensor) -> torch.Tensor:
    """mean key = factor * q as a map between centred vectors `[H, D + 1, D]`; factor `[H]`, `k_centre` `[H_kv, D]`."""
    k_centre = k_centre.repeat_interleave(len(factor) // len(k_centre), dim=0)
    slope = factor[:, None, None] * torch.eye(q_centre.shape[-1], dtype=factor.dtype)
    return torch.cat(((factor[:, None] * q_centre - k_centre)[:, None], slope), dim=1)


def gaussian_map(
    key_mean: torch.Tensor, covariance: torch.Tensor, q_centre: torch.Tensor, scaling: float
) -> torch.Tensor:
    """mean key = m + scaling * Sigma q, exact for Gaussian keys, as a map between centred vectors `[H, D + 1, D]`.

    Args:
        key_mean, covariance: of the centred keys, `[H_kv, D]`, `[H_kv, D, D]`; q_centre: `[H, D]`.
    """
    groups = len(q_centre) // len(key_mean)
    slope = scaling * covariance.repeat_interleave(groups, dim=0)
    intercept = key_mean.repeat_interleave(groups, dim=0) + (q_centre[:, None] @ slope)[:, 0]
    return torch.cat((intercept[:, None], slope), dim=1)


def uncentre(affine: torch.Tensor, x_centre: torch.Tensor, y_centre: torch.Tensor) -> torch.Tensor:
    """The map `[H, D + 1, E]` between vectors as they are, for one between those with the centres taken off."""
    intercept = affine[:, :1] - x_centre[:, None] @ affine[:, 1:] + y_centre[:, None]
    return torch.cat((intercept, affine[:, 1:]), dim=1)


def _per_token(sums: dict[str, torch.Tensor]) -> torch.Tensor:
    return sums["value"] / sums["n"][:, None]


def _explained(sums: dict[str, torch.Tensor]) -> torch.Tensor:
    return share_explained(sums["error"], sums)


def _unexplained(sums: dict[str, torch.Tensor]) -> torch.Tensor:
    return 1 - share_explained(sums["error"], sums)


def _head_mean(function, sums: dict[str, torch.Tensor], least: float | None = None) -> torch.Tensor:
    values = function(sums)
    return (values if least is None else values.clamp(min=least)).mean(-1, keepdim=True)


def _estimates(found: Estimates, most: float | None = None) -> list[Estimate]:
    """One by one; `most` is the largest value there can be, which intervals of few groups may overstep."""
    mean = found.mean.tolist()
    if found.low is None:
        return [Estimate(value, None, None) for value in mean]
    high = found.high if most is None else found.high.clamp(max=most)
    return [Estimate(*values) for values in zip(mean, found.low.tolist(), high.tolist(), strict=True)]


def _fingerprint(model: nn.Module, windows: Sequence[torch.Tensor], settings: DiagnosisSettings) -> str:
    """Changes when the model, the data or a setting does."""
    digest = hashlib.sha256()
    described: dict[str, Any] = {"config": model.config.to_dict(), "settings": settings.__dict__}
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    for window in windows:
        digest.update(len(window).to_bytes(8, "little") + window.numpy().tobytes())
    for name, parameter in model.named_parameters():
        some = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)].float().cpu()
        digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()
