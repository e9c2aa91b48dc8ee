# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Losses of a language model's head without its logits, which are the largest tensors of a training step.

Logits of some tokens are made, turned into the gradients of hidden states and head, and dropped before the next ones; the
forward pass thus does the work of the backward pass too. PyTorch's `linear_cross_entropy` does the same; on a CPU, in
2.13, its chunks are slower than plain logits, and with bf16 inputs its sum is in bf16.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .op_common import no_autocast

CHUNK_LOGITS = 1 << 25  # held at a time, in the products' precision and in fp32

# (logits [C, V] of the tokens in a slice, the slice, whether their gradient is wanted) -> (sum of the losses, gradient with
# respect to the logits, in fp32 or better, or None). May write into the logits.
LogitLoss = Callable[[torch.Tensor, slice, bool], tuple[torch.Tensor, torch.Tensor | None]]


class _HeadLoss(torch.autograd.Function):
    """Sum of `loss` over the logits x W^T, x [N, D], W [V, D], whose products are in `dtype`."""

    @staticmethod
    def forward(ctx, hidden_states, weight, loss, dtype):
        wanted = ctx.needs_input_grad[:2]
        precise = torch.promote_types(dtype, torch.float32)
        d_hidden = torch.empty_like(hidden_states, dtype=dtype) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=precise) if wanted[1] else None
        total = torch.zeros((), dtype=precise, device=weight.device)
        size = max(1, CHUNK_LOGITS // weight.shape[0])
        with no_autocast(hidden_states):
            head = weight.to(dtype)
            for start in range(0, len(hidden_states), size):
                part = slice(start, start + size)
                x = hidden_states[part].to(dtype)
                part_loss, d_logits = loss(x @ head.mT, part, any(wanted))
                total += part_loss
                if any(wanted):
                    d_logits = d_logits.to(dtype)
                if wanted[0]:
                    torch.mm(d_logits, head, out=d_hidden[part])
                if wanted[1]:
                    d_weight += d_logits.mT @ x
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden_states.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total):
        grads = (
            None if grad is None else (grad * d_total).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *grads, None, None


def needs_logits(head: nn.Module, device: torch.device) -> bool:
    """Whether `head` is more than a weight beside hidden states on `device`.

    An adapter is, and a head that is quantised, offloaded, split over devices, patched or hooked.
    """
    is_plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.bias is None
    if not is_plain or head.weight.device != device or "forward" in vars(head):
        return True
    return bool(head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks)


def head_loss(hidden_states: torch.Tensor, head: nn.Linear, loss: LogitLoss) -> torch.Tensor:
    """The sum of `loss` over the logits `head(hidden_states)`, hidden states `[N, D]`; a scalar in fp32 or better.

    Products are in autocast's precision where it is on.
    """
    device_type, dtype = hidden_states.device.type, hidden_states.dtype
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    weight = head.weight
    if not torch.is_grad_enabled():  # which a Function is not told
        hidden_states, weight = hidden_states.detach(), weight.detach()
    return _HeadLoss.apply(hidden_states, weight, loss, dtype)


def head_cross_entropy(
    hidden_states: torch.Tensor,
    head: nn.Linear,
    labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """What Transformers' `ForCausalLMLoss` makes of the logits `head(hidden_states)`, without holding them.

    Args:
        hidden_states: `[B, T, D]`; head: of weight `[V, D]`, without bias.
        labels: `[B, T]`, each the token of its place; shift_labels: `[B, T]`, each the token after, instead of them.
        num_items_in_batch: what the sum is divided by; `None` divides by the labels that are not `ignore_index`.

    Returns:
        a scalar, nats.

    Raises:
        ValueError: labels of another shape than the text.
    """
    given = labels if shift_labels is None else shift_labels
    if given.shape != hidden_states.shape[:-1]:
        raise ValueError(
            f"{'labels' if shift_labels is None else 'shift_labels'} must have the text's shape "
            f"{list(hidden_states.shape[:-1])}, one for each token, got {list(given.shape)}"
        )
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    labels = shift_labels.reshape(-1).to(hidden_states.device, torch.long)

    def cross_entropy(logits: torch.Tensor, part: slice, with_gradient: bool):
        target = labels[part, None]
        is_target = target != ignore_index
        target = target.where(is_target, 0)
        log_p = F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        loss = -log_p.gather(1, target).where(is_target, 0).sum()
        if not with_gradient:
            return loss, None
        gradient = log_p.exp_()  # p - 1 at the target, p elsewhere
        gradient.scatter_add_(1, target, gradient.new_full((), -1).expand_as(target))
        return loss, gradient.mul_(is_target)

    total = head_loss(hidden_states.flatten(0, -2), head, cross_entropy)
    if num_items_in_batch is None:
        num_items_in_batch = (labels != ignore_index).sum()
    elif torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
