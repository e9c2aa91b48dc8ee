# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The optimiser and its schedule."""

import re

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
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


def hidden_matrices(model: nn.Module) -> set[int]:
    """The ids of the weights that Muon is for: of linear layers, the head excepted."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return {id(module.weight) for module in layers} - tables


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for some parameter groups and AdamW for the others, as one optimiser.

    Muon replaces the averaged gradient of a matrix by the nearest orthogonal one (Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon/). Its steps are scaled to the root mean square of AdamW's (Liu et al., 2025,
    arXiv:2502.16982), so that both take one learning rate.

    Args:
        matrices: parameter groups of two-dimensional parameters.
        others: parameter groups of the rest.
        momentum: of Muon, with Nesterov's correction.
        adamw: further arguments of AdamW; ``lr`` goes to both.
    """

    def __init__(self, matrices: list[dict], others: list[dict], momentum: float, **adamw):
        self._muon = torch.optim.Muon(matrices, lr=adamw["lr"], momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, **adamw)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both work on the groups and the state of this optimiser, which are all that others see and change."""
        count = len(self._muon.param_groups)
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        self._muon.state = self._adamw.state = self.state

    def __setstate__(self, state: dict) -> None:  # also called by `load_state_dict`, which makes new groups
        super().__setstate__(state)
        self._share()

    def step(self, closure=None):
        """One step of both."""
        loss = self._muon.step(closure)
        self._adamw.step()
        return loss


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe) -> torch.optim.Optimizer:
    """AdamW over `parameter_groups`, fused where PyTorch has a fused kernel, or `MuonAdamW`."""
    groups = parameter_groups(model, recipe.weight_decay)
    options = {
        "lr": recipe.learning_rate,
        "betas": (recipe.beta1, recipe.beta2),
        "eps": recipe.epsilon,
        "fused": next(model.parameters()).device.type in FUSED_DEVICES,
    }
    if recipe.name == "adamw":
        return torch.optim.AdamW(groups, **options)
    chosen = hidden_matrices(model)
    parts = [
        [group | {"params": [p for p in group["params"] if (id(p) in chosen) == is_matrix]} for group in groups]
        for is_matrix in (True, False)
    ]
    matrices, others = ([group for group in part if group["params"]] for part in parts)
    return MuonAdamW(matrices, others, recipe.momentum, **options)


def decay_length(recipe: ScheduleRecipe, steps: int, branched_at: int | None = None) -> int:
    """Steps of wsd's decay in a run of `steps`, which may have branched from another one after `branched_at`."""
    if recipe.decay_steps is not None:
        length = recipe.decay_steps
    elif branched_at is not None:
        length = steps - branched_at
    else:
        length = round(steps * recipe.decay_ratio)
    return min(length, steps - recipe.warmup_steps)


def build_schedule(
    optimizer: torch.optim.Optimizer, recipe: ScheduleRecipe, steps: int, branched_at: int | None = None
) -> LRScheduler:
    """Linear warm-up, then cosine or stable-and-decay down to ``min_lr_ratio`` of the peak at the last step."""
    if recipe.name == "cosine":
        name, options = "cosine_with_min_lr", {"min_lr_rate": recipe.min_lr_ratio}
    else:
        decay = decay_length(recipe, steps, branched_at)
        name, options = "warmup_stable_decay", {"num_decay_steps": decay, "min_lr_ratio": recipe.min_lr_ratio}
    return get_scheduler(name, optimizer, recipe.warmup_steps, steps, scheduler_specific_kwargs=options)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """The optimiser's state by the parameters' names, whole and on the CPU; empty before its first step.

    All processes must call it. If `model` is sharded, only the main process gets the state.
    """
    if not optimizer.state:
        return {}
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Put back what `optimizer_state` gave, whatever the number of processes now."""
    if state:
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
