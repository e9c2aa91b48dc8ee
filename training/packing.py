# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""From token ids to rows of one length, and from rows to batches.

Rows are cut from one stream, ``<eos> document <eos> document <eos> ...``. A row holds ``length + 1`` tokens and begins
with the last token of the row before it, so every token of every document is predicted exactly once: its first one from
the ``<eos>`` that begins it, and the ``<eos>`` that ends it from its last one. No target is ever predicted from another
document's last token. What remains to choose is what else a token sees: all of its row, or with boundaries its own document
within the row, by ``position_ids`` that begin again at each ``<eos>``.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

IGNORE = -100  # the label that Transformers' losses leave out


class DocumentTokenizer:
    """Token ids of texts, without special ones; threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self._backend = None
        if getattr(tokenizer, "backend_tokenizer", None) is not None:
            # Calling the tokenizer itself sets truncation and padding anew, which threads may not do side by side.
            self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """An int32 array for each text."""
        if self._backend is not None:
            ids = [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        else:
            with self._lock:
                ids = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(tokens, dtype=np.int32) for tokens in ids]


class Rows(NamedTuple):
    """Rows of tokens, and where documents begin in them.

    tokens: int32 [N, length + 1].
    starts: for each row, the places of its inputs (below length) at which another document begins; 0 is the first.
    """

    tokens: np.ndarray
    starts: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.tokens)


class RowPacker:
    """Cuts the stream of documents into rows, a few documents at a time.

    Each document carries an `origin` of the caller's, which `cursor` gives back: packing that begins anew at the cursor's
    document, without its first `offset` tokens (its ``<eos>`` is the first), goes on with the same rows.
    """

    def __init__(self, eos: int, length: int):
        self._eos, self._length = np.int32(eos), length
        self._pieces: deque[tuple[Any, np.ndarray]] = deque()  # ids of one document, <eos> before it
        self._offset = 0  # tokens of the first piece that are used up
        self._size = 0  # tokens that are not

    @property
    def cursor(self) -> tuple[Any, int]:
        """The origin and the offset of the token that the next row begins with."""
        return self._pieces[0][0], self._offset

    @property
    def ready(self) -> int:
        """Complete rows that `take` can give."""
        return max(self._size - 1, 0) // self._length

    def add(self, tokens: Sequence[int], origin: Any = None, offset: int = 0) -> None:
        """Append a document without its first `offset` tokens, of which ``<eos>`` is one."""
        piece = np.concatenate([[self._eos], tokens]).astype(np.int32)
        self._append(piece, origin, offset)

    def end(self, origin: Any = None) -> None:
        """Append the last document's ``<eos>``."""
        self._append(np.array([self._eos], dtype=np.int32), origin, 0)

    def _append(self, piece: np.ndarray, origin: Any, offset: int) -> None:
        if not self._pieces:
            self._offset = offset
        self._pieces.append((origin, piece))
        self._size += len(piece) - offset

    def take(self, rows: int, fill: bool = False) -> Rows:
        """The next `rows` rows, of which the last is filled up with `IGNORE` if `fill`."""
        length = self._length
        if rows > self.ready and not fill:
            raise ValueError(f"{rows} rows of {length} tokens were asked for, and {self.ready} are ready")
        stream = np.full(rows * length + 1, IGNORE, dtype=np.int32)
        begins = []  # places in the stream
        place = -self._offset
        for _, piece in self._pieces:
            if place >= len(stream):
                break
            begins.append(max(place, 0))
            part = piece[max(-place, 0) : len(stream) - place]
            stream[max(place, 0) : max(place, 0) + len(part)] = part
            place += len(piece)
        starts = self._starts(np.array(begins), rows)
        self._drop(rows * length)
        if not rows:
            return Rows(stream[:0].reshape(0, length + 1), [])
        return Rows(np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length], starts)

    def _starts(self, begins: np.ndarray, rows: int) -> list[np.ndarray]:
        edges = np.arange(rows + 1) * self._length
        bounds = np.searchsorted(begins, edges)
        found = []
        for row, edge in enumerate(edges[:-1]):
            inside = begins[bounds[row] : bounds[row + 1]] - edge
            found.append((inside if len(inside) and inside[0] == 0 else np.append(0, inside)).astype(np.int32))
        return found

    def _drop(self, tokens: int) -> None:
        self._size -= tokens
        self._offset += tokens
        while self._pieces and self._offset >= len(self._pieces[0][1]):
            self._offset -= len(self._pieces.popleft()[1])


def pack(documents: Sequence[Sequence[int]], eos: int, length: int, fill: bool) -> Rows:
    """Concatenate token lists with `eos` before, between and after them, and cut rows of ``length + 1`` tokens.

    Neighbouring rows share one token, so that each token but the first `eos` is a target once. A last incomplete row
    is filled up with `IGNORE` if `fill`, else dropped.
    """
    packer = RowPacker(eos, length)
    for tokens in documents:
        packer.add(tokens)
    packer.end()
    targets = sum(map(len, documents)) + len(documents)
    return packer.take(-(-targets // length) if fill else packer.ready, fill)


def document_positions(starts: Sequence[int], length: int) -> np.ndarray:
    """Positions of a row's inputs [length], which begin again at 0 at each of `starts`."""
    return np.arange(length) - np.repeat(starts, np.diff([*starts, length]))


def collate(rows: Sequence[dict]) -> dict[str, torch.Tensor]:
    """Stack rows into `input_ids`, `labels` and `shift_labels`, all [B, L]; the last holds each place's next token.

    Rows with `starts` give `position_ids` [B, L] too, which begin again at each document.
    """
    tokens = torch.from_numpy(np.stack([row["tokens"] for row in rows])).long()  # [B, L + 1]
    batch = {
        "input_ids": tokens[:, :-1].clamp(min=0),  # filling comes after the last target, so any id will do
        "labels": tokens[:, :-1],
        "shift_labels": tokens[:, 1:].contiguous(),
    }
    if "starts" in rows[0]:
        positions = [document_positions(row["starts"], tokens.shape[1] - 1) for row in rows]
        batch["position_ids"] = torch.from_numpy(np.stack(positions))
    return batch
