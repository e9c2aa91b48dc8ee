# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""A start near the teacher, found by looking at it: statistics of a softmax model, and a fit layer by layer. No training.

`calibrate` streams texts through the model and keeps sums of each layer, whose size does not depend on the number of
tokens. `fit_start` then runs model and student side by side over a few of the texts and settles one layer after the other:

1. keys are conditioned by a power of their second moment, which is folded into the key projection;
2. the query map is the ridge regression of the mean key that a head attends to on its query. Gaussian keys would make it
   m + Sigma q / sqrt(d), which is why an affine map is enough;
3. decay and step size of each head are picked from a few, decay around the mean distance that the head looks back;
4. the output gate is the share of the attention that does not rest on the first token, the sink;
5. the output projection is the ridge regression of what the teacher's layer adds, from what the student reads on its own
   inputs, shrunk towards the inherited one. Its target includes the error of the layers before, lest errors add up.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from .conversion_start import (
    DEFAULT_STRENGTH,
    HeadSettings,
    InputMoments,
    QueryFit,
    best_factor,
    explained,
    read_memory,
    start_mixer,
)
from .mixer import RecurrentMixer
from .modeling_avgpath import AvgPathForCausalLM
from .softmax_models import LayerPass, SoftmaxLayer, check_text, decoder, softmax_layers, watch

MAP_RIDGE = 1e-2  # of the regressions on queries and inputs, relative to the mean of the second moment's diagonal
OUTPUT_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
EXPONENTS = (0.0, 0.5, 1.0)
SPAN_FACTORS = (0.5, 2.0, 8.0)  # of the mean attention distance, besides 1
STRENGTHS = (0.05, 0.2, 0.8)  # besides 1/2
LARGEST_LOGIT = 4.0
SEARCHED_TOKENS = 2048  # that the choices of step 3 are compared on


@dataclass(frozen=True)
class LayerStatistics:
    """What was measured of one softmax layer of H heads.

    Attributes:
        distance: `[H]`, mean distance (tokens) of what a head attends to, the sink left out.
        sink_mass: `[H]`, mean attention on the first token.
        moments: of the layer's input.
        fit: maps from queries and inputs (see `QueryFit`).
    """

    distance: torch.Tensor
    sink_mass: torch.Tensor
    moments: InputMoments
    fit: QueryFit


@dataclass(frozen=True)
class Calibration:
    """Statistics of a softmax model, by layer, and the texts that a start is fitted on.

    Attributes:
        layers: by the layer's index.
        texts: `[N, T]` token ids.
        tokens: how many were measured.
    """

    layers: dict[int, LayerStatistics]
    texts: torch.Tensor
    tokens: int

    def check(self, model: nn.Module, indices: Sequence[int]) -> None:
        """Raises `ValueError` unless it is of a model of this shape that has these layers, and of texts that it can read."""
        missing = [index for index in indices if index not in self.layers]
        if missing:
            raise ValueError(
                f"The calibration does not know layers {missing} of this model: calibrate the model that is converted."
            )
        config = model.config
        wanted = (config.num_attention_heads, config.hidden_size, softmax_layers(model)[0].head_dim)
        for index in indices:
            fit = self.layers[index].fit
            found = (*fit.gate.shape, fit.weight.shape[-1])
            if found != wanted:
                raise ValueError(
                    f"The calibration is of a model with {found[0]} heads of {found[2]} and width {found[1]}, and this one "
                    f"has {wanted[0]} of {wanted[2]} and {wanted[1]}: calibrate the model that is converted."
                )
        check_text(self.texts, model, "The calibration's text")


def check_batch(ids: torch.Tensor, model: nn.Module) -> None:
    """Raises `ValueError` unless `ids` are token ids `[B, T]` that `model` can read."""
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        found = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(
            f"A batch must be a tensor of token ids [B, T], got {found}; `batches` is an iterable of them."
        )
    check_text(ids, model, "A batch")


Sums = dict[str, torch.Tensor]


def add(sums: Sums, **values: torch.Tensor) -> None:
    """Add to running sums, in fp64."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0) + value.double()


def ridge(second: torch.Tensor, cross: torch.Tensor, strength: float) -> torch.Tensor:
    """Solve (S + strength mean(diag S) I) W = C for `second` `[..., N, N]` and `cross` `[..., N, M]`, in fp64."""
    second, cross = second.double(), cross.double()
    size = second.shape[-1]
    mean = second.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=1e-12)
    return torch.linalg.solve(second + strength * mean * torch.eye(size, device=second.device), cross)


def _measure(seen: LayerPass, sums: Sums) -> None:
    layer = seen.layer
    q, k = (layer.rotate(x, seen.position_embeddings).float().transpose(1, 2) for x in (seen.q, seen.k))
    k = k.repeat_interleave(layer.groups, dim=1)
    length = q.shape[2]
    scores = (q @ k.mT * layer.scaling).masked_fill(~layer.visible(length, q.device), float("-inf"))
    weights = scores.softmax(-1)  # [B, H, T, T]
    sink = weights[..., 0].clone()  # [B, H, T]
    weights[..., 0] = 0
    mass = weights.sum(-1)
    steps = torch.arange(length, device=q.device)
    lag = (steps[:, None] - steps).float()

    key = seen.k.float()
    bias = layer.attention.k_proj.bias
    if bias is not None and layer.k_norm is None:
        key = key - bias.float().view(-1, layer.head_dim)  # which the converted layer does not have
    key = key.repeat_interleave(layer.groups, dim=2).transpose(1, 2)  # [B, H, T, D]
    mean_key = weights @ key  # times the mass: a query counts as far as it looks off the sink
    query = F.pad(seen.q.float().transpose(1, 2), (0, 1), value=1.0)  # [B, H, T, D + 1]
    weighted = query * mass[..., None]

    hidden = seen.hidden_states.float().flatten(0, 1)  # [N, hidden_size]
    # The first token's own gate stays out: it has nothing else to attend to.
    logit = torch.logit(1 - sink[..., 1:], eps=1e-6).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    later = seen.hidden_states[:, 1:].float()
    add(
        sums,
        tokens=torch.tensor(float(len(hidden))),
        lag=(weights * lag).sum((0, 2, 3)),
        mass=mass.sum((0, 2)),
        sink=sink.sum((0, 2)),
        query_second=torch.einsum("bhti,bhtj->hij", weighted, query),
        query_cross=torch.einsum("bhti,bhto->hio", query, mean_key),
        input_second=hidden.T @ hidden,
        input_sum=hidden.sum(0),
        gate_cross=torch.einsum("bti,bht->ih", later, logit),
    )


def _statistics(sums: Sums) -> LayerStatistics:
    solution = ridge(sums["query_second"], sums["query_cross"], MAP_RIDGE).mT.float()  # [H, D, D + 1]
    constant = ridge(sums["input_second"], sums["input_sum"][:, None], MAP_RIDGE)[:, 0].float()
    gate = ridge(sums["input_second"], sums["gate_cross"], MAP_RIDGE).T.float()
    return LayerStatistics(
        distance=(sums["lag"] / sums["mass"].clamp(min=1e-9)).float().clamp(min=1.0),
        sink_mass=(sums["sink"] / sums["tokens"]).float(),
        moments=InputMoments(
            (sums["input_sum"] / sums["tokens"]).float(), (sums["input_second"] / sums["tokens"]).float()
        ),
        fit=QueryFit(solution[..., :-1].contiguous(), solution[..., -1].contiguous(), gate, constant),
    )


@torch.no_grad()
def calibrate(
    model: nn.Module, batches: Iterable[torch.Tensor | Mapping[str, torch.Tensor]], *, fit_tokens: int = 8192
) -> Calibration:
    """Measure a softmax model on texts, for a calibrated start of `from_softmax`.

    Args:
        model: as for `from_softmax`; left as it is. fp32 weights give the better statistics.
        batches: token ids `[B, T]` without padding, or mappings that hold them as `input_ids`. A few ten thousand tokens of
            the kind of text that matters will do.
        fit_tokens: of the first texts, how many are kept for the fit; it holds a few numbers of `hidden_size` for each.

    Raises:
        TypeError, ValueError: as `from_softmax`; a text longer than the model's positions, or shorter than 2 tokens; ids
            outside the vocabulary; padding; no text at all; activations that are not finite.
    """
    layers = softmax_layers(model)
    if fit_tokens < 1:
        raise ValueError(f"fit_tokens={fit_tokens} must be at least 1: the start is fitted on them.")
    sums: dict[int, Sums] = {layer.index: {} for layer in layers}
    kept: list[torch.Tensor] = []
    tokens = 0
    device = next(model.parameters()).device
    body, was_training = decoder(model), model.training
    model.eval()
    try:
        with watch(layers, lambda seen: _measure(seen, sums[seen.layer.index])):
            for batch in batches:
                ids = batch
                if isinstance(batch, Mapping):
                    if "input_ids" not in batch:
                        raise ValueError(f"A batch has the keys {', '.join(map(str, batch))}, but no input_ids.")
                    ids = batch["input_ids"]
                    if "attention_mask" in batch and not batch["attention_mask"].all():
                        raise ValueError("A batch is padded: give rows without padding, for every token is measured.")
                check_batch(ids, model)
                body(input_ids=ids.to(device), use_cache=False)
                tokens += ids.numel()
                if sum(x.numel() for x in kept) < fit_tokens and (not kept or ids.shape[1] == kept[0].shape[1]):
                    kept.append(ids.cpu())
    finally:
        model.train(was_training)
    if not kept:
        raise ValueError("There was no text to calibrate on: give at least one batch of token ids.")
    for index, of_layer in sums.items():
        if not all(value.isfinite().all() for value in of_layer.values()):
            raise ValueError(
                f"The activations of layer {index} are not finite: its weights may be broken, or fp16 too narrow."
            )
    texts = torch.cat(kept)
    return Calibration(
        {index: _statistics(of_layer) for index, of_layer in sums.items()},
        texts[: max(1, fit_tokens // texts.shape[1])],
        tokens,
    )


def _settings(mixer: RecurrentMixer, statistics: LayerStatistics) -> HeadSettings:
    """Where the search begins: keys as they are, decay by the mean distance, step size 1/2."""
    states, heads = mixer.num_states, len(statistics.distance)
    spans = statistics.distance.view(states, heads // states).mean(1)
    return HeadSettings(
        exponent=torch.zeros(heads, device=spans.device),
        span=spans if hasattr(mixer, "a_proj") else None,
        strength=torch.full_like(spans, DEFAULT_STRENGTH),
    )


def choose_settings(
    mixer: RecurrentMixer, layer: SoftmaxLayer, statistics: LayerStatistics, seen: LayerPass
) -> HeadSettings:
    """Settings by head whose reads explain the teacher's head outputs best, one choice after the other.

    Args:
        seen: the teacher's layer on its own inputs.
    """
    rows = max(1, SEARCHED_TOKENS // seen.hidden_states.shape[1])
    seen = replace(seen, hidden_states=seen.hidden_states[:rows])
    hidden_states = seen.hidden_states.float()
    targets = seen.averages()
    best = _settings(mixer, statistics)
    states = mixer.num_states

    def score(settings: HeadSettings) -> torch.Tensor:
        start_mixer(mixer, layer, statistics.moments, settings, statistics.fit)
        reads, _ = read_memory(mixer, hidden_states, seen.position_embeddings)
        found = explained(reads.unflatten(-1, (layer.num_heads, -1)), targets)
        return torch.nan_to_num(found, nan=-1.0)

    best_score = score(best)
    trials: list[tuple[str, list[torch.Tensor]]] = []
    if mixer.readout is None:
        trials.append(("exponent", [torch.full_like(best.exponent, value) for value in EXPONENTS[1:]]))
    trials.append(("strength", [torch.full_like(best.strength, value) for value in STRENGTHS]))
    if best.span is not None:
        trials.append(("span", [(best.span * factor).clamp(min=1.0) for factor in SPAN_FACTORS]))
    for name, values in trials:
        found, found_score = getattr(best, name), best_score
        for value in values:
            new_score = score(replace(best, **{name: value}))
            better = new_score > found_score
            if len(value) == states < layer.num_heads:  # heads that share a state choose together
                shared = [x.view(states, -1).mean(1) for x in (new_score, found_score)]
                better = shared[0] > shared[1]
                found = torch.where(better, value, found)
                better = better.repeat_interleave(layer.num_heads // states)
            else:
                found = torch.where(better, value, found)
            found_score = torch.where(better, new_score, found_score)
        best, best_score = replace(best, **{name: found}), found_score
    return best


def fit_output(reads: torch.Tensor, targets: torch.Tensor, inherited: torch.Tensor) -> torch.Tensor:
    """The output projection `[hidden_size, R]` that takes `reads` `[B, T, R]` to `targets` `[B, T, hidden_size]`.

    Ridge regression, shrunk towards `inherited`, in units in which all reads have the same size. Its strength is the one
    that does best on the last quarter of the texts, of which the first three alone are fitted.
    """
    size = reads.double().square().mean((0, 1)).sqrt().clamp(min=1e-12)
    reads = reads.double() / size
    inherited = inherited.double() * size
    # What is fitted is the difference to the inherited one, so shrinking it shrinks towards that.
    errors = targets.double() - reads @ inherited.T

    def moments(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = reads[part].flatten(0, 1), errors[part].flatten(0, 1)
        return x.T @ x, x.T @ y

    strength = max(OUTPUT_RIDGES)
    first = len(reads) * 3 // 4
    if first:
        second, cross = moments(slice(0, first))
        held_out, wanted = reads[first:], errors[first:]
        losses = [(wanted - held_out @ ridge(second, cross, value)).square().mean().item() for value in OUTPUT_RIDGES]
        strength = OUTPUT_RIDGES[losses.index(min(losses))]
    correction = ridge(*moments(slice(None)), strength)
    return ((inherited + correction.T) / size).float()


@torch.no_grad()
def fit_start(
    student: AvgPathForCausalLM,
    model: nn.Module,
    converted: Mapping[int, SoftmaxLayer],
    calibration: Calibration,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Settle the `converted` layers of `student`, in place, one after the other over the calibration's texts.

    The teacher's rows and the student's run through the teacher together; each converted layer's output is replaced for
    the student's rows by what its mixer makes of them.

    Args:
        progress: called after each layer with the number of layers that are settled, and of all of them.
    """
    device = next(model.parameters()).device
    dtype = next(model.parameters()).dtype
    count = len(calibration.texts)
    texts = calibration.texts.to(device).repeat(2, 1)
    entered: dict[int, torch.Tensor] = {}

    def enter(index: int):
        def hook(_module, args, kwargs):
            hidden_states = args[0] if args else kwargs["hidden_states"]
            entered.clear()  # of the one layer that runs
            entered[index] = hidden_states

        return hook

    def settle(seen: LayerPass) -> torch.Tensor:
        layer, statistics = seen.layer, calibration.layers[seen.layer.index]
        mixer = student.model.layers[layer.index].mixer
        teacher = replace(seen, hidden_states=seen.hidden_states[:count], output=seen.output[:count])
        read = teacher.hidden_states.float()
        if isinstance(mixer, RecurrentMixer):
            settings = choose_settings(mixer, layer, statistics, teacher)
            start_mixer(mixer, layer, statistics.moments, settings, statistics.fit)
        reads, _ = read_memory(mixer, read, seen.position_embeddings)
        by_head = (layer.num_heads, -1)
        factor = best_factor(reads.unflatten(-1, by_head), teacher.averages())
        inherited = layer.attention.o_proj.weight.float() * factor.repeat_interleave(layer.head_dim)

        own = seen.hidden_states[count:].float()
        reads, _ = read_memory(mixer, own, seen.position_embeddings)
        before = entered[layer.index].float()
        bias = 0 if mixer.o_proj.bias is None else mixer.o_proj.bias
        targets = teacher.output.float() + before[:count] - before[count:] - bias
        mixer.o_proj.weight.copy_(fit_output(reads, targets, inherited))
        output = mixer(own, position_embeddings=seen.position_embeddings)[0]
        if progress is not None:
            progress(list(converted).index(layer.index) + 1, len(converted))
        return torch.cat((seen.output[:count], output.to(dtype)))

    layers = list(converted.values())
    handles = [layer.block.register_forward_pre_hook(enter(layer.index), with_kwargs=True) for layer in layers]
    was_training = model.training
    model.eval()
    try:
        with watch(layers, settle):
            decoder(model)(input_ids=texts, use_cache=False)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()


__all__ = ["Calibration", "LayerStatistics", "calibrate"]
