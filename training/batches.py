# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Endless batches of rows from one source or a mixture, epoch after epoch, whose state is small and exact.

Nothing here is read ahead of what is returned, so a state needs no care for batches under way: the order of mapped rows
follows from the seed and from how many were taken, and a stream (`stream.py`) is read again from a place that it names.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Protocol

import numpy as np
import torch
from datasets import Dataset

from training.packing import collate
from training.recipe import SetupError


class RowSource(Protocol):
    """An endless sequence of rows (see `collate`), each pass over the data in an order of its own."""

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""

    def take(self) -> dict:
        """The next row."""

    def skip(self) -> None:
        """Leave out the next row, which another process takes."""

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict) -> None: ...

    def close(self) -> None: ...


class MappedRows:
    """The rows of a data set on disk. The order of epoch e is a permutation of them all, seeded by `seed` and e."""

    def __init__(self, rows: Dataset, seed: Sequence[int]):
        self._rows, self._seed = rows, tuple(seed)
        self._taken = 0
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))

    @property
    def epoch(self) -> float:
        return self._taken / len(self._rows)

    def take(self) -> dict:
        epoch, place = divmod(self._taken, len(self._rows))
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((*self._seed, epoch)).permutation(len(self._rows))
        self._taken += 1
        return self._rows[int(self._order[1][place])]

    def skip(self) -> None:
        self._taken += 1

    def state_dict(self) -> dict:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict) -> None:
        self._taken = state["taken"]

    def close(self) -> None:
        """Nothing is open."""


class Mixture:
    """Says which source gives the next row: always the one that is furthest behind its share.

    After n rows a source has given its share of n to within a few rows. All rows hold the same number of tokens, so the
    shares are shares of tokens. With one source there is nothing to choose.
    """

    def __init__(self, weights: Sequence[float]):
        total = sum(weights)
        self.shares = [weight / total for weight in weights]
        self.drawn = [0] * len(weights)

    def draw(self) -> int:
        """The number of the next row's source."""
        count = sum(self.drawn) + 1
        behind = [share * count - drawn for share, drawn in zip(self.shares, self.drawn, strict=True)]
        source = behind.index(max(behind))
        self.drawn[source] += 1
        return source


def rows_per_epoch(rows: Sequence[int], weights: Sequence[float]) -> int:
    """Rows of a mixture after which each source, of `rows` rows, has been read once at least."""
    return max(ceil(count * sum(weights) / weight) for count, weight in zip(rows, weights, strict=True))


class TrainingBatches(Iterator[dict[str, torch.Tensor]]):
    """Batches of `micro_batch_size` rows from `collate`, without end. An epoch ends within a batch where it must.

    Args:
        sources, weights: what is mixed, and each one's share of the tokens.
        share: (first, together): of each `together` rows that the mixture draws, this process takes those from `first`
            on, and leaves the others to other processes.
        identity: what a state must have in common with the batches that load it, in words: name -> value.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        weights: Sequence[float],
        micro_batch_size: int,
        share: tuple[int, int],
        identity: dict[str, str | int],
    ):
        self._sources, self._weights = list(sources), list(weights)
        self._mixture = Mixture(weights)
        self._first, self._together = share
        self._micro_batch_size = micro_batch_size
        self._identity = identity

    @property
    def source_epochs(self) -> list[float]:
        """Passes over each source so far."""
        return [source.epoch for source in self._sources]

    @property
    def epoch(self) -> float:
        """Passes over the data so far; of a mixture, over the source that has been read the least."""
        return min(self.source_epochs)

    def __next__(self) -> dict[str, torch.Tensor]:
        rows = []
        for place in range(self._together):
            source = self._sources[self._mixture.draw()]
            if self._first <= place < self._first + self._micro_batch_size:
                rows.append(source.take())
            else:
                source.skip()
        return collate(rows)

    def state_dict(self) -> dict:
        """Where the batch after the last returned one begins: numbers and words alone, for JSON or `torch.save`."""
        return {
            "identity": dict(self._identity),
            "drawn": list(self._mixture.drawn),
            "sources": [source.state_dict() for source in self._sources],
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on with the batch after the one that `state` was taken behind.

        Raises:
            SetupError: the state is of other data, another seed, or, for a stream, another number of processes.
        """
        for name, value in self._identity.items():
            if (saved := state["identity"].get(name)) != value:
                raise SetupError(
                    f"the checkpoint's place in the data is for {name}={saved}, and this run has {name}={value}, "
                    "which gives other batches: set it back, or start anew"
                )
        self._mixture.drawn = list(state["drawn"])
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(saved)

    def close(self) -> None:
        """Stop reading ahead."""
        for source in self._sources:
            source.close()
