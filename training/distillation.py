# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""A student learns from its softmax teacher: its mixers layer by layer, then the whole of it from the teacher's logits."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM
from modeling_avgpath.conversion import softmax_config
from modeling_avgpath.head_loss import head_loss
from modeling_avgpath.softmax_models import LayerPass, decoder, softmax_layers, watch
from training import optimization
from training.data import IGNORE
from training.recipe import ConversionRecipe, PhaseRecipe, ScheduleRecipe

PHASES = ("align", "distil")
SMALLEST_SIZE = 0.02  # of a parameter that starts at zero, for its learning rate: what a matrix is initialised with


def row_length(recipe: ConversionRecipe, phase: str) -> int:
    """Tokens of a row that the phase trains on."""
    return getattr(recipe, phase).sequence_length or recipe.data.sequence_length


def step_tokens(recipe: ConversionRecipe, phase: str) -> int:
    """Tokens of an optimiser step of a phase."""
    return getattr(recipe, phase).batch_size * row_length(recipe, phase)


def converted_layers(teacher: nn.Module, config: AvgPathConfig) -> list[int]:
    """The layers in which a student of `config` has another mixer, or window, than its softmax teacher."""
    source = softmax_config(teacher)
    has_other_window = any(
        getattr(config, name) != source.get(name, 0) for name in ("sliding_window", "num_sink_tokens")
    )
    pairs = enumerate(zip(config.mixer_types, source["mixer_types"], strict=True))
    return [i for i, (now, before) in pairs if now != before or (now == "sliding_softmax" and has_other_window)]


def trained_parameters(student: AvgPathForCausalLM, layers: Sequence[int], which: str) -> list[nn.Parameter]:
    """The parameters that a phase trains, the others are frozen: `mixers` and `layers` are those of the given layers."""
    parts = {
        "all": [student],
        "layers": [student.model.layers[index] for index in layers],
        "mixers": [student.model.layers[index].mixer for index in layers],
    }[which]
    student.requires_grad_(False)
    for part in parts:
        part.requires_grad_(True)
    return [parameter for parameter in student.parameters() if parameter.requires_grad]


def build_optimizer(parameters: Sequence[nn.Parameter], recipe: PhaseRecipe) -> torch.optim.Optimizer:
    """AdamW whose learning rate is relative to the size of each parameter (root mean square), for matrices and kernels.

    Converted layers hold weights of very different size: what enters a short convolution is small, and the output
    projection makes up for it. One absolute rate would be too much for one or nothing for the other. Vectors, such as norms
    and decay rates, take the rate as it is.
    """
    groups = []
    for parameter in parameters:
        size = 1.0
        if parameter.ndim > 1:
            size = max(parameter.detach().float().square().mean().sqrt().item(), SMALLEST_SIZE)
        groups.append({"params": [parameter], "lr": recipe.learning_rate * size})
    fused = parameters[0].device.type in optimization.FUSED_DEVICES
    return torch.optim.AdamW(groups, betas=(0.9, recipe.beta2), weight_decay=0.0, fused=fused)


def build_schedule(optimizer: torch.optim.Optimizer, recipe: PhaseRecipe, steps: int) -> LRScheduler:
    """Linear warm-up, then a cosine down to `min_lr_ratio` of the peak."""
    warmup = math.ceil(recipe.warmup_ratio * steps)
    schedule = ScheduleRecipe("cosine", warmup_steps=warmup, min_lr_ratio=recipe.min_lr_ratio)
    return optimization.build_schedule(optimizer, schedule, steps)


def relative_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error of `[B, T, hidden_size]` over the variance of the target: 1 is as bad as its mean."""
    output, target = output.float(), target.float()
    variance = (target - target.mean((0, 1))).square().mean()
    return (output - target).square().mean() / variance.clamp(min=1e-12)


class LayerAlignment:
    """Teaches each converted layer what its teacher layer returns for the teacher's input.

    One forward pass of the teacher serves all layers. Each one's gradient is taken as soon as the teacher has passed it,
    so that no more than one layer's activations are held.
    """

    def __init__(self, teacher: nn.Module, student: AvgPathForCausalLM, layers: Sequence[int]):
        self.body = decoder(teacher)
        self.watched = [layer for layer in softmax_layers(teacher) if layer.index in set(layers)]
        self.mixers = {index: student.model.layers[index].mixer for index in layers}

    def __call__(self, input_ids: torch.Tensor, autocast, scale: float = 1.0) -> dict[int, float]:
        """Add the gradients on `input_ids` `[B, T]`, times `scale`; returns the relative error of each layer.

        Args:
            autocast: makes the context manager that student layers run in.
        """
        errors = {}

        def visit(seen: LayerPass) -> None:
            with torch.enable_grad(), autocast():
                output = self.mixers[seen.layer.index](
                    seen.hidden_states.float(), position_embeddings=seen.position_embeddings
                )[0]
                error = relative_error(output, seen.output)
                share = error * scale
            share.backward()
            errors[seen.layer.index] = error.item()

        with torch.no_grad(), watch(self.watched, visit):
            self.body(input_ids=input_ids, use_cache=False)
        return errors


def stream_error(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> torch.Tensor:
    """|student - teacher|^2 / |teacher|^2 of a token's residual stream `[B, T, hidden_size]`, mean over tokens and layers.

    Each token counts by its own size: the first of a text is often a hundred times larger than the others.
    """
    errors = []
    for x, y in zip(student, teacher, strict=True):
        y = y.float()
        errors.append(((x.float() - y).square().sum(-1) / y.square().sum(-1).clamp(min=1e-12)).mean())
    return torch.stack(errors).mean()


class LogitDistillation:
    """Teaches the student the teacher's distribution over the next token, by KL(teacher || student), and beside it, if they
    have weights, by the text's cross-entropy and by `stream_error` after each layer but the last.

    Logits are made for some tokens at a time, of both models, and never held for all.
    """

    def __init__(
        self, teacher: nn.Module, student: AvgPathForCausalLM, ce_weight: float = 0.0, stream_weight: float = 0.0
    ):
        self.teacher, self.student = teacher, student
        self.ce_weight, self.stream_weight = ce_weight, stream_weight

    def __call__(self, batch: Mapping[str, torch.Tensor], autocast, targets: int) -> dict[str, float]:
        """Add the gradients of a batch from `collate`, as its share of `targets` tokens.

        Returns:
            `kl` and `ce`, sums in nats over the batch's targets divided by `targets`, and `stream`, the stream's error times
            the batch's share of the targets; without a weight 0.
        """
        labels = batch["shift_labels"].flatten()
        inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
        inputs |= {"use_cache": False, "output_hidden_states": self.stream_weight > 0}
        with torch.no_grad():
            teacher_output = decoder(self.teacher)(**inputs)
        with autocast():
            output = self.student.model(**inputs)
        wanted, hidden = (x.last_hidden_state.flatten(0, 1) for x in (teacher_output, output))
        share = int((labels != IGNORE).sum()) / targets
        stream = hidden.new_zeros(())
        if self.stream_weight:  # the first is the embeddings', the last has passed the final norm
            stream = share * stream_error(output.hidden_states[1:-1], teacher_output.hidden_states[1:-1])
        totals = {"kl": 0.0, "ce": 0.0, "stream": stream.item()}

        def divergence(logits: torch.Tensor, part: slice, with_gradient: bool):
            target = labels[part, None]
            is_target = target != IGNORE
            target = target.where(is_target, 0)
            with torch.no_grad():
                log_p = self.teacher.lm_head(wanted[part]).log_softmax(-1, dtype=torch.float32)
            log_q = logits.log_softmax(-1, dtype=torch.float32)
            p = log_p.exp()
            kl = (torch.linalg.vecdot(p, log_p) - torch.linalg.vecdot(p, log_q)).where(is_target[:, 0], 0).sum()
            ce = -log_q.gather(1, target).where(is_target, 0).sum()
            totals["kl"] += kl.item() / targets
            totals["ce"] += ce.item() / targets
            # By the logits: q - p of the divergence, q - 1 at the label of the cross-entropy.
            gradient = log_q.exp_().mul_(1 + self.ce_weight).sub_(p)
            gradient.scatter_add_(1, target, gradient.new_full((), -self.ce_weight).expand_as(target))
            return kl + self.ce_weight * ce, gradient.mul_(is_target)

        with autocast():
            loss = head_loss(hidden, self.student.lm_head, divergence) / targets
        (loss + self.stream_weight * stream).backward()
        return totals


@contextlib.contextmanager
def swapped_layers(teacher: nn.Module, mixers: Mapping[int, nn.Module], autocast) -> Iterator[None]:
    """Inside, the attention of the teacher's layers in `mixers` returns what the mixer given for it makes of its input.

    Args:
        autocast: makes the context manager that the mixers run in.
    """

    def visit(seen: LayerPass) -> torch.Tensor:
        mixer = mixers[seen.layer.index]
        with autocast():
            output, _ = mixer(seen.hidden_states.float(), position_embeddings=seen.position_embeddings)
        return output.to(seen.output.dtype)

    with watch([layer for layer in softmax_layers(teacher) if layer.index in mixers], visit):
        yield


@contextlib.contextmanager
def without_recurrence(model: AvgPathForCausalLM) -> Iterator[None]:
    """Inside, the recurrent mixers of `model` return zeros: what is left is what its softmax layers alone can do."""
    handles = [
        layer.mixer.register_forward_hook(lambda _, __, result: (torch.zeros_like(result[0]), *result[1:]))
        for spec, layer in zip(model.config.mixer_specs, model.model.layers, strict=True)
        if spec.is_recurrent
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
