# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""One optimiser step: micro-batches on all processes, and one gradient that weighs every target token alike."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from training.data import IGNORE
from training.guard import NonFiniteGuard


class StepResult(NamedTuple):
    """What a step found; the same on all processes.

    Attributes:
        loss: mean cross-entropy (nats) over the targets of all processes and micro-batches.
        grad_norm: of the whole gradient, before clipping.
        targets: tokens that were predicted.
        is_admitted: False if the guard left the step out.
    """

    loss: float
    grad_norm: float
    targets: int
    is_admitted: bool


class TrainingStep:
    """Takes the steps of a run.

    The loss is the mean over all targets of the global batch. A mean of the micro-batches' means would weigh a token more
    where its neighbours are padding or follow a document's end, and depend on how the batch is cut.

    Args:
        model, optimizer: as `accelerator.prepare` gave them.
        max_grad_norm: the gradient is clipped to this global norm.
        forward_options: what the model's forward pass is given beside the batch.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        guard: NonFiniteGuard,
        max_grad_norm: float,
        forward_options: Mapping[str, bool] | None = None,
    ):
        self.accelerator, self.model, self.optimizer, self.guard = accelerator, model, optimizer, guard
        self.max_grad_norm = max_grad_norm
        self.forward_options = {"use_cache": False, **(forward_options or {})}

    def __call__(self, step: int, micro_batches: Sequence[dict[str, torch.Tensor]]) -> StepResult:
        """Take `step` on this process's `micro_batches` (from `collate`, on the CPU).

        Raises:
            RunError: the guard ends the run.
        """
        accelerator, processes = self.accelerator, self.accelerator.num_processes
        targets = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in micro_batches)
        if processes > 1:
            targets = int(accelerator.reduce(torch.tensor(targets, device=accelerator.device), "sum"))
        # Gradients are averaged over the processes, whose sum is wanted.
        divisor = torch.tensor(max(targets, 1) / processes, device=accelerator.device)
        total = torch.zeros((), device=accelerator.device)
        for index, batch in enumerate(micro_batches):
            batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
            is_last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else accelerator.no_sync(self.model):
                with accelerator.autocast():  # FSDP2's model has none of its own
                    loss = self.model(**batch, **self.forward_options, num_items_in_batch=divisor).loss
                accelerator.backward(loss)
            total += loss.detach()
        norm = accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if processes > 1:
            total = accelerator.reduce(total, "mean")
        loss, norm = torch.stack([total, norm.to(total)]).tolist()
        is_admitted = self.guard.admits(step, loss, norm, is_scaled=accelerator.scaler is not None)
        if is_admitted:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(loss, norm, targets, is_admitted)


class LossWindow:
    """The mean loss per target token since the last training record."""

    def __init__(self) -> None:
        self.nats, self.targets = 0.0, 0

    def add(self, result: StepResult) -> None:
        """Count a step, unless it was left out."""
        if result.is_admitted:
            self.nats += result.loss * result.targets
            self.targets += result.targets

    @property
    def mean(self) -> float | None:
        """`None` if no step was admitted."""
        return self.nats / self.targets if self.targets else None

    def state_dict(self) -> dict[str, float]:
        return {"nats": self.nats, "targets": self.targets}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.nats, self.targets = state["nats"], state["targets"]
