# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Row alignment: the one place that knows of padding and packing.

A recurrence wants each document in a row of its own that starts at the document's first real token. `Alignment` takes
the real tokens of a padded or packed batch to such rows, runs a function on them, and puts its outputs back where the
tokens came from. Rows end in filler where documents differ in length; `lengths` tells the function where each row stops.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Rows:
    """Documents of similar length, one per row.

    Attributes:
        index: `[R, L]` int64, flat position in the `[B * T]` batch of each place; filler repeats some real token.
        lengths: `[R]` int64, number of real tokens of each row; places from there on are filler.
    """

    index: torch.Tensor
    lengths: torch.Tensor


@dataclass
class Alignment:
    """How the real tokens of a `[B, T]` batch lie in rows.

    Attributes:
        rows: the documents, in one group (padding: one row per batch row, in order) or several of similar length (packing).
        place: `[B * T]` int64, where each token went in the concatenated, flattened rows (0 for padding).
        is_real: `[B, T]` bool, False at padding.
    """

    rows: list[Rows]
    place: torch.Tensor
    is_real: torch.Tensor

    def to(self, device: torch.device) -> "Alignment":
        """The same alignment with its index tensors on `device`."""
        if self.place.device == device:
            return self
        rows = [Rows(group.index.to(device), group.lengths.to(device)) for group in self.rows]
        return Alignment(rows, self.place.to(device), self.is_real.to(device))

    def run(
        self, function: Callable[..., tuple[torch.Tensor, Any]], streams: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Any]:
        """Run `function(row_streams, lengths) -> (outputs, extra)` on the rows and put the outputs back.

        Args:
            function: takes the streams as `[R, L, ...]` and `lengths` `[R]`; returns outputs `[R, L, ...]` and anything.
            streams: tensors `[B, T, ...]`, one per name.

        Returns:
            outputs `[B, T, ...]`, zero at padding, and the `extra` of the last group of rows (padding has just one).
        """
        flat = {name: stream.flatten(0, 1) for name, stream in streams.items()}
        outputs = []
        for group in self.rows:
            gathered = {name: stream[group.index] for name, stream in flat.items()}
            output, extra = function(gathered, group.lengths)
            outputs.append(output.flatten(0, 1))
        output = torch.cat(outputs)[self.place].unflatten(0, self.is_real.shape)
        keep = self.is_real.view(*self.is_real.shape, *[1] * (output.ndim - 2))
        return output.masked_fill(~keep, 0), extra


def align_padding(is_real: torch.Tensor) -> Alignment | None:
    """Alignment of a padded batch (left, right, both, or in between): one row per batch row, in order.

    Args:
        is_real: `[B, T]` bool, False at padding.

    Returns:
        `None` when nothing is padded.
    """
    if bool(is_real.all()):
        return None
    lengths = is_real.sum(dim=1)
    return _align(is_real, lengths, groups=[torch.arange(len(lengths))])


def align_documents(is_start: torch.Tensor, is_real: torch.Tensor | None = None) -> Alignment:
    """Alignment of packed documents.

    Rows of one group share their longest document's length, so documents are grouped by the power of two above their
    length: rows are at least half full (but for the shortest), and there are at most log2(T) groups.

    Args:
        is_start: `[B, T]` bool, True at the first token of each document; every batch row starts one.
        is_real: `[B, T]` bool, False at padding, or `None`.

    Raises:
        ValueError: padding inside a document.
    """
    is_real = torch.ones_like(is_start) if is_real is None else is_real
    is_start = is_start.clone()
    is_start[:, 0] = True
    document = is_start.flatten().cumsum(0) - 1  # [B * T]
    tokens = is_real.flatten().nonzero().squeeze(1)
    inside = document[tokens][1:] == document[tokens][:-1]
    if bool((tokens.diff()[inside] != 1).any()):
        raise ValueError(
            "attention_mask has padding inside a packed document: put padding between or after documents, or leave the "
            "mask out."
        )
    lengths = torch.bincount(document[tokens], minlength=int(document[-1]) + 1)
    sizes = lengths.clamp(min=32).log2().ceil().int().cpu()
    sizes[(lengths == 0).cpu()] = -1  # documents that are all padding run nowhere
    groups = [(sizes == size).nonzero().squeeze(1) for size in sizes.unique().tolist() if size >= 0]
    return _align(is_real, lengths, groups)


def _align(is_real: torch.Tensor, lengths: torch.Tensor, groups: list[torch.Tensor]) -> Alignment:
    device = is_real.device
    tokens = is_real.flatten().nonzero().squeeze(1)  # flat positions of real tokens, document after document
    first = lengths.cumsum(0) - lengths  # where each document begins in `tokens`
    place = torch.zeros(is_real.numel(), dtype=torch.long, device=device)
    rows, base = [], 0
    for members in groups:
        members = members.to(device)
        group_lengths = lengths[members]
        width = max(int(group_lengths.max()), 1)
        steps = torch.arange(width, device=device)
        source = (first[members, None] + steps).clamp(max=max(len(tokens) - 1, 0))
        index = tokens[source] if len(tokens) else source
        real = steps < group_lengths[:, None]
        places = base + torch.arange(real.numel(), device=device).view_as(index)
        place[index[real]] = places[real]
        rows.append(Rows(index, group_lengths))
        base += real.numel()
    return Alignment(rows, place, is_real)


def find_document_starts(
    shape: tuple[int, int],
    cu_seq_lens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """First tokens of packed documents, from the most explicit description given.

    Args:
        shape: `(B, T)`.
        cu_seq_lens: `[n + 1]` cumulative lengths over the flattened `B * T` tokens, from 0 to `B * T`.
        seq_idx: `[B, T]` document number of each token.
        position_ids: `[B or 1, T]`; a document starts where the position does not go up by one.

    Returns:
        `[B, T]` bool, or `None` when every row is a single document.

    Raises:
        ValueError: a description that does not fit `shape`.
    """
    batch_size, length = shape
    if cu_seq_lens is not None:
        bounds = cu_seq_lens.long()
        if bounds.ndim != 1 or len(bounds) < 2:
            raise ValueError(
                f"cu_seq_lens_q must be one-dimensional, [0, ..., total], got shape {tuple(bounds.shape)}."
            )
        if int(bounds[0]) != 0 or int(bounds[-1]) != batch_size * length or bool((bounds.diff() < 0).any()):
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the number of tokens, {batch_size} x {length} = "
                f"{batch_size * length}; got {bounds.tolist()}."
            )
        starts = torch.zeros(batch_size * length, dtype=torch.bool, device=bounds.device)
        starts[bounds[:-1][bounds.diff() > 0]] = True
        starts = starts.view(shape)
    elif seq_idx is not None:
        if tuple(seq_idx.shape) != tuple(shape):
            raise ValueError(f"seq_idx must have the shape of the tokens, {tuple(shape)}; got {tuple(seq_idx.shape)}.")
        starts = torch.nn.functional.pad(seq_idx.diff(dim=1) != 0, (1, 0), value=False)
    elif position_ids is not None:
        starts = torch.nn.functional.pad(position_ids.diff(dim=1) != 1, (1, 0), value=False).expand(shape)
    else:
        return None
    if not bool(starts[:, 1:].any()):
        return None
    return starts


def document_positions(is_start: torch.Tensor) -> torch.Tensor:
    """Position of each token in its document, `[B, T]` int64, from the documents' first tokens `[B, T]` bool."""
    steps = torch.arange(is_start.shape[1], device=is_start.device).expand(is_start.shape)
    is_start = is_start.clone()
    is_start[:, 0] = True
    return steps - torch.where(is_start, steps, 0).cummax(dim=1).values
