# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The optimiser and its schedule."""

import re

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from training.recipe import OptimizerRecipe, ScheduleRecipe

FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split the trainable parameters into those with and those without weight decay.

    Weight decay pulls towards zero, which is a sensible prior for a matrix only. Without it: norms and biases (also
    per-head ones with two dimensions or more, such as TTT's), all parameters with fewer than two dimensions (decay
    rates, ridges, step sizes), and those marked ``_no_weight_decay``, as Mamba and flash-linear-attention mark theirs.
    """
    exempt = set()
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            exempt.update(id(parameter) for parameter in module.parameters(recurse=False))
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_plain = (
            parameter.ndim < 2
            or id(parameter) in exempt
            or re.search(r"(bias|\bb\d?|norm_weight)$", name) is not None
            or getattr(parameter, "_no_weight_decay", False)
        )
        (plain if is_plain else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, fused where PyTorch has a fused kernel."""
    return torch.optim.AdamW(
        parameter_groups(model, recipe.weight_decay),
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        fused=next(model.parameters()).device.type in FUSED_DEVICES,
    )


def build_schedule(optimizer: torch.optim.Optimizer, recipe: ScheduleRecipe, steps: int) -> LRScheduler:
    """Linear warm-up, then cosine or stable-and-decay down to ``min_lr_ratio`` of the peak at the last step."""
    if recipe.name == "cosine":
        name, options = "cosine_with_min_lr", {"min_lr_rate": recipe.min_lr_ratio}
    else:
        decay = min(round(steps * recipe.decay_ratio), steps - recipe.warmup_steps)
        name, options = "warmup_stable_decay", {"num_decay_steps": decay, "min_lr_ratio": recipe.min_lr_ratio}
    return get_scheduler(name, optimizer, recipe.warmup_steps, steps, scheduler_specific_kwargs=options)
