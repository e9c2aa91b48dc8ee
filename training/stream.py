# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Rows from a corpus that is tokenised while it is read, shuffled, and resumed exactly.

Rows are cut in the corpus's order (its shards shuffled anew for each pass) and shuffled within blocks of a fixed number of
rows. A block is a function of the document and token that it begins with, so a state is five numbers: a resumed stream
opens the block's shard, passes over the documents before, tokenises that one block again and goes on in its midst. No state
of `datasets` is used: it does not hold a shuffle buffer, and some releases lose their place when resumed twice.
"""

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np

from training.corpus import Corpus, clean_text
from training.packing import DocumentTokenizer, RowPacker, Rows
from training.recipe import SetupError

CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 64, 1 << 18  # tokenised in one call


class ReadAhead(Iterator):
    """Takes items from an iterator in a thread, `depth` of them ahead. What it raises, `next` raises."""

    def __init__(self, items: Iterator, depth: int = 1):
        self._items, self._stop = items, threading.Event()
        self._queue: queue.Queue = queue.Queue(depth)
        self._thread = threading.Thread(target=self._fill, name="ReadAhead", daemon=True)
        self._thread.start()

    def _put(self, entry: tuple) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _fill(self) -> None:
        try:
            for item in self._items:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:  # for `next` to raise, in the thread that asked
            self._put((None, error))

    def __next__(self):
        item, error = self._queue.get()
        if error is not None:
            self._queue.put((None, error))  # for the next `next`
            raise error
        return item

    def close(self) -> None:
        """Stop after the item in hand."""
        self._stop.set()
        self._thread.join()


@dataclass(frozen=True)
class Place:
    """Where a block of rows begins: `offset` tokens into a document, whose shard is the `shard`-th of the pass."""

    epoch: int = 0
    shard: int = 0
    document: int = 0
    offset: int = 0
    block: int = 0  # in this pass


class Block(NamedTuple):
    place: Place
    rows: Rows
    order: np.ndarray


class RowStream:
    """The rows of a corpus, pass after pass, for one of `num_processes` processes.

    Each process reads its own part again and again: whole shards where they can be dealt out evenly, else every
    `num_processes`-th document. A last incomplete row of a pass is dropped.

    Args:
        length: tokens of a row, without the one that it shares with its neighbour.
        boundaries: rows tell where documents begin.
        held_out: (shard, number) of the documents that are never trained on.
        block_rows: rows are shuffled within blocks of so many.
        workers: threads that tokenise ahead, 0 for none; the rows are the same.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: DocumentTokenizer,
        eos: int,
        length: int,
        boundaries: bool,
        held_out: frozenset[tuple[int, int]],
        block_rows: int,
        seed: Iterable[int],
        process_index: int = 0,
        num_processes: int = 1,
        workers: int = 0,
    ):
        self._corpus, self._tokenizer, self._eos, self._length = corpus, tokenizer, eos, length
        self._boundaries, self._held_out, self._block_rows = boundaries, held_out, block_rows
        self._seed, self._workers = tuple(seed), workers
        self._process_index, self._num_processes = process_index, num_processes
        self._whole_shards = corpus.shards % num_processes == 0
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenise") if workers else None
        self._blocks: Iterator[Block] | None = None
        self._begin(Place(), row=0, given=0, last_pass=0)

    def _begin(self, place: Place, row: int, given: int, last_pass: int) -> None:
        self._stop_reading()
        self._place, self._row = place, row  # `row` rows of the block that begins at `place` are taken
        self._given, self._last_pass = given, last_pass  # rows of this pass, and of the one before
        self._block: Block | None = None

    # What is taken.

    @property
    def epoch(self) -> float:
        """Passes so far. Within the first one the shards that are done stand for it, for its length is not known."""
        shards = self._corpus.shards // (self._num_processes if self._whole_shards else 1)
        within = self._given / self._last_pass if self._last_pass else self._place.shard / shards
        return self._place.epoch + min(within, 1.0)

    def take(self) -> dict:
        """The next row: `tokens`, and `starts` with boundaries."""
        if self._block is None:
            if self._blocks is None:
                blocks = self._read_blocks(self._place)
                self._blocks = ReadAhead(blocks) if self._workers else blocks
            self._block = next(self._blocks)
        if self._row == len(self._block.rows):
            self._block, self._row = next(self._blocks), 0
            if self._block.place.epoch != self._place.epoch:
                self._given, self._last_pass = 0, self._given
            self._place = self._block.place
        index = self._block.order[self._row]
        row = {"tokens": self._block.rows.tokens[index]}
        if self._boundaries:
            row["starts"] = self._block.rows.starts[index]
        self._row += 1
        self._given += 1
        return row

    def skip(self) -> None:
        self.take()

    def state_dict(self) -> dict:
        return {
            "place": asdict(self._place),
            "row": self._row,
            "given": self._given,
            "last_pass": self._last_pass,
        }

    def load_state_dict(self, state: dict) -> None:
        self._begin(Place(**state["place"]), state["row"], state["given"], state["last_pass"])

    def _stop_reading(self) -> None:
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None

    def close(self) -> None:
        """End the threads."""
        self._stop_reading()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    # What is read.

    def _read_blocks(self, place: Place) -> Iterator[Block]:
        """Blocks from `place` on, without end."""
        while True:
            packer = RowPacker(self._eos, self._length)
            blocks, offset = place.block, place.offset
            for origin, tokens in self._tokenised(place):
                packer.add(tokens, origin, offset)
                offset = 0
                while packer.ready >= self._block_rows:
                    yield self._shuffled(place, packer.take(self._block_rows))
                    (shard, document), offset_of_next = packer.cursor
                    place = replace(place, shard=shard, document=document, offset=offset_of_next, block=place.block + 1)
                    blocks += 1
            packer.end()
            if packer.ready:
                yield self._shuffled(place, packer.take(packer.ready))
            elif not blocks:
                whose = (
                    f" for process {self._process_index} of {self._num_processes}" if self._num_processes > 1 else ""
                )
                raise SetupError(
                    f"{self._corpus.name} has fewer than one training row of data.sequence_length={self._length} "
                    f"tokens{whose}: shorten the rows or give more text"
                )
            place = Place(epoch=place.epoch + 1)

    def _shuffled(self, place: Place, rows: Rows) -> Block:
        order = np.random.default_rng((*self._seed, place.epoch, place.block)).permutation(len(rows))
        return Block(place, rows, order)

    def _tokenised(self, place: Place) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Yield ((shard of the pass, number), ids) of this process's documents from `place` to the end of the pass."""
        chunks = self._chunks(place)
        if self._pool is None:
            done = ((origins, self._tokenizer(texts)) for origins, texts in chunks)
        else:
            done = self._tokenised_ahead(chunks)
        for origins, ids in done:
            yield from zip(origins, ids, strict=True)

    def _tokenised_ahead(self, chunks: Iterator[tuple[list, list[str]]]) -> Iterator[tuple[list, list[np.ndarray]]]:
        pending: deque = deque()
        for origins, texts in chunks:
            pending.append((origins, self._pool.submit(self._tokenizer, texts)))
            if len(pending) > 2 * self._workers:
                origins, future = pending.popleft()
                yield origins, future.result()
        for origins, future in pending:
            yield origins, future.result()

    def _chunks(self, place: Place) -> Iterator[tuple[list[tuple[int, int]], list[str]]]:
        origins, texts, size = [], [], 0
        for origin, text in self._documents(place):
            origins.append(origin)
            texts.append(text)
            size += len(text)
            if len(texts) == CHUNK_DOCUMENTS or size >= CHUNK_CHARACTERS:
                yield origins, texts
                origins, texts, size = [], [], 0
        if texts:
            yield origins, texts

    def _documents(self, place: Place) -> Iterator[tuple[tuple[int, int], str]]:
        order = np.random.default_rng((*self._seed, place.epoch)).permutation(self._corpus.shards)
        if self._whole_shards:
            order = order[self._process_index :: self._num_processes]
        start = place.document
        for index in range(place.shard, len(order)):
            shard = int(order[index])
            for record in self._corpus.read(shard, start):
                if (shard, record.number) in self._held_out:
                    continue
                if not self._whole_shards and (shard + record.number) % self._num_processes != self._process_index:
                    continue
                if text := clean_text(record.text):
                    yield (index, record.number), text
            start = 0
