# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What a validation looks at beside the mean loss: the loss by position in the row, and the states of recurrent layers."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from modeling_avgpath.memory_mesa import unpack_triangle
from training.data import IGNORE

STATE_ROWS = 2  # rows whose states are measured: the norms hardly differ from row to row


class PositionLosses:
    """Sums of nats and counts of targets by source and position, from which the loss follows as a whole and in parts.

    Args:
        length: positions of a row. Position 0 is the first token's, which predicts the second.
        sources: how many sources the rows are of.
    """

    def __init__(self, length: int, sources: int = 1):
        self.sums = torch.zeros(2, sources, length, dtype=torch.float64)  # nats, targets

    @torch.no_grad()
    def add(self, model: nn.Module, batch: Mapping[str, torch.Tensor], sources: Sequence[int] | None = None) -> None:
        """Run `model` on a batch from `collate`, on its device, and count all targets that are not `IGNORE`.

        `sources` says of which source each row is, by default the first. Where the batch has `position_ids`, positions are
        those in the document, otherwise those in the row.
        """
        inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
        targets = batch["shift_labels"]
        logits = model(**inputs, use_cache=False).logits
        # Row by row, since fp32 logits of a large vocabulary need not fit into memory twice.
        nll = [F.cross_entropy(x.float(), y, reduction="none") for x, y in zip(logits, targets, strict=True)]
        nll = torch.stack(nll).double().cpu()
        counted = (targets != IGNORE).cpu()
        places = inputs.get("position_ids")
        places = torch.arange(targets.shape[1]).expand_as(targets) if places is None else places.cpu()
        source = torch.tensor([0] * len(targets) if sources is None else list(sources))[:, None].expand_as(targets)
        index = source[counted], places[counted]
        self.sums[0].index_put_(index, nll[counted], accumulate=True)
        self.sums[1].index_put_(index, torch.ones_like(nll[counted]), accumulate=True)

    def targets(self, source: int | None = None) -> int:
        """Targets counted, in all or of one source."""
        return int(self._of(source)[1].sum())

    def loss(self, source: int | None = None) -> float:
        """Mean nats per target; not a number without targets."""
        nats, targets = self._of(source).sum(1).tolist()
        return nats / targets if targets else float("nan")

    def _of(self, source: int | None) -> torch.Tensor:
        """Nats and targets `[2, L]`."""
        return self.sums.sum(1) if source is None else self.sums[:, source]

    def buckets(self, source: int | None = None) -> list[dict[str, float]]:
        """The loss at positions 0, 1, 2-3, 4-7, ...: records of `from`, `to` (exclusive), `tokens`, `loss`.

        Weighted by their tokens, the buckets' losses add up to the whole. A bucket without targets is left out.
        """
        sums, records, start = self._of(source), [], 0
        length = sums.shape[1]
        while start < length:
            end = min(max(1, 2 * start), length)
            nats, targets = sums[:, start:end].sum(1).tolist()
            if targets:
                records.append({"from": start, "to": end, "tokens": int(targets), "loss": nats / targets})
            start = end
        return records


@torch.no_grad()
def state_norms(model: nn.Module, plain_model: PreTrainedModel, input_ids: torch.Tensor) -> list[dict]:
    """How large the states of an AvgPath model's recurrent layers are after rows of text.

    Of the weights that TTT layers fit it is the difference to those that they begin with. Norms are Frobenius norms per
    row and head, in the mean over both.

    Args:
        model: what to call; `plain_model`: the same without wrappers.
        input_ids: `[B, L]`.

    Returns:
        for each recurrent layer, `layer` (its number), `mixer` (its spec), `norms` (state -> norm); empty for models of
        other types.
    """
    config = plain_model.config
    if config.model_type != "avgpath" or not any(spec.is_recurrent for spec in config.mixer_specs):
        return []
    cache = model(input_ids=input_ids[:STATE_ROWS], use_cache=True, logits_to_keep=1).cache
    records = []
    for index, (spec, layer) in enumerate(zip(config.mixer_specs, plain_model.model.layers, strict=True)):
        if not spec.is_recurrent:
            continue
        norms = {}
        for name in layer.mixer.state_names:
            state = cache.layers[index].states[name]
            if state.is_floating_point():
                norms[name] = _norm(layer.mixer, spec.memory, name, state.float())
        records.append({"layer": index, "mixer": str(spec), "norms": norms})
    return records


def _norm(mixer: nn.Module, memory: str, name: str, state: torch.Tensor) -> float:
    """Of one named state `[B, H, ...]`."""
    if memory == "mesa_net" and name == "H":
        state = unpack_triangle(state, mixer.key_dim)
    elif memory.startswith("ttt") and not name.startswith("d"):
        initial = getattr(mixer, name)
        initial = initial.full_tensor() if hasattr(initial, "full_tensor") else initial  # sharded by FSDP
        state = state - initial.float().view(state.shape[1:])
    return state.flatten(2).norm(dim=-1).mean().item()
