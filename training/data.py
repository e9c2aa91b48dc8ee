# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""From a recipe to batches: corpora (`corpus.py`), the tokenizer, rows (`packing.py`), stored or streamed (`stream.py`).

Mapped data is tokenised once: its rows are kept in `data.cache_dir` by a hash of the text, the tokenizer and the packing,
and read from there as they are needed. A stream is tokenised while it is read, and stores nothing.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from training.batches import MappedRows, RowSource, TrainingBatches, rows_per_epoch
from training.corpus import (
    EOS,
    Corpus,
    Document,
    Loaded,
    clean_text,
    data_files,
    held_out_groups,
    list_sources,
    load_documents,
    open_corpus,
    read_jsonl,
    read_text,
    sotu_files,
    split_corpus,
    split_documents,
)
from training.packing import IGNORE, DocumentTokenizer, RowPacker, Rows, collate, pack
from training.recipe import DataRecipe, SetupError, SourceRecipe, TokenizerRecipe
from training.script import warn
from training.stream import RowStream

__all__ = [
    "EOS",
    "IGNORE",
    "Document",
    "TrainingBatches",
    "TrainingData",
    "clean_text",
    "collate",
    "data_files",
    "held_out_groups",
    "load_documents",
    "pack",
    "prepare_data",
    "read_jsonl",
    "read_text",
    "sotu_files",
    "split_documents",
    "train_tokenizer",
]

PAD = "<|pad|>"
FORMAT = 2  # part of every cache key: raise it when cleaning, tokenising or packing changes
TOKENISED_TOGETHER = 256  # documents
STREAM_TOKENIZER_DOCUMENTS = 10_000  # of each source, where the recipe does not say


@dataclass(frozen=True)
class HeldOut:
    """The held-out rows of one source; the last one is filled up with IGNORE."""

    name: str  # the source's path
    rows: Dataset
    tokens: int
    bytes: int  # of its text in UTF-8


@dataclass(frozen=True)
class TrainingData:
    """Rows of token ids ready for training, and what perplexity and bits per byte are counted in.

    Rows have a column `tokens`, [sequence_length + 1] int32, and with boundaries `starts`, the places of the inputs where
    documents begin.
    """

    tokenizer: PreTrainedTokenizerBase
    train: tuple[Dataset, ...]  # of each source of a mixture, else of all sources together; none for a stream
    held_out: tuple[HeldOut, ...]  # of each source, or of data.validation_path
    fingerprint: str  # of all that decides on the rows: text, what is held out, tokenizer, packing and mixture
    train_tokens: int | None  # None for a stream, whose length is not known
    rows_per_epoch: int | None  # the same; of a mixture: until each source has been read once at least
    weights: tuple[float, ...]  # shares of the training tokens, one for each source that `_open` opens
    streaming: bool
    # (seed of the source, process_index, num_processes) -> the rows of each source
    _open: Callable[[int, int, int], list[RowSource]] = field(repr=False)

    @cached_property
    def validation(self) -> Dataset:
        """All held-out rows."""
        return concatenate_datasets([part.rows for part in self.held_out])

    @property
    def validation_tokens(self) -> int:
        return sum(part.tokens for part in self.held_out)

    @property
    def validation_bytes(self) -> int:
        """UTF-8 bytes of the held-out text."""
        return sum(part.bytes for part in self.held_out)

    def batches(
        self, micro_batch_size: int, process_index: int = 0, num_processes: int = 1, seed: int = 0
    ) -> TrainingBatches:
        """Endless batches of `micro_batch_size` rows for one of `num_processes` processes.

        Mapped: the rows of all epochs, joined, are dealt out, so that micro-batch m of process p takes those from
        ``(m * num_processes + p) * micro_batch_size`` on; a state may be loaded with other numbers of processes and rows.
        Streaming: each process reads its own part, and a state is for that process of as many.
        """
        identity: dict[str, str | int] = {"data": self.fingerprint, "seed": seed}
        share = (process_index * micro_batch_size, num_processes * micro_batch_size)
        if self.streaming:
            identity |= {"processes": num_processes, "process": process_index}
            share = (0, micro_batch_size)
        sources = self._open(seed, process_index, num_processes)
        return TrainingBatches(sources, self.weights, micro_batch_size, share, identity)


@dataclass(frozen=True)
class Source:
    """An open corpus, and how much of it is held out: every n-th document, or `None` for nothing."""

    corpus: Corpus
    every: int | None


def _open_sources(data: DataRecipe) -> tuple[list[Source], Corpus | None, tuple[float, ...] | None]:
    """The sources to train on, the corpus of held-out texts where it is one of its own, and the weights if any."""
    listed = list_sources(data)
    validation = None
    if data.validation_path is not None or data.validation_split is not None:
        if data.validation_path is None and len(listed) > 1:
            raise SetupError("data.validation_split needs data.validation_path, for there are several data.sources")
        first = listed[0][1]
        own = data.validation_path is None  # another split of the training data
        described = SourceRecipe(
            path=first.path if own else data.validation_path,
            name=first.name if own else None,
            revision=first.revision if own else None,
            split=data.validation_split or "train",
            text_field=first.text_field,
        )
        if own and data.validation_split == first.split:
            raise SetupError(
                f"data.validation_split={data.validation_split} is the split that is trained on: name another one"
            )
        validation = open_corpus(described, "data.validation_", data.streaming)
        if own and not isinstance(validation, Loaded):
            raise SetupError(
                f"data.validation_split={data.validation_split} is for data sets, and data.path={first.path} has no "
                "splits: give data.validation_path, or hold out a part by data.validation_every"
            )
    every = None if validation is not None else data.validation_every
    sources = [Source(open_corpus(source, key, data.streaming), every) for key, source in listed]
    weights = [source.weight for _, source in listed]
    return sources, validation, None if weights[0] is None else tuple(weights)


# The tokenizer.


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with two special tokens: end of text, which also begins a text, and padding.

    A small corpus may give fewer than `vocab_size` tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, given: str | None) -> None:
    """Raises `SetupError` if the model has no embedding for a token; warns if most of its embeddings have no token."""
    needed = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1)
    if needed > vocab_size:
        raise SetupError(
            f"the tokenizer has {needed} tokens but the model's vocab_size is {vocab_size}; "
            f"set model.vocab_size={needed} or use a smaller tokenizer"
        )
    if given is not None and vocab_size > 2 * needed:
        warn(
            "data",
            f"the model's vocab_size is {vocab_size} and tokenizer.path={given} has {needed} tokens: most embeddings will "
            f"never be used; set model.vocab_size={needed}",
        )


def load_tokenizer(
    recipe: TokenizerRecipe, texts: Callable[[], Iterator[str]], key: Sequence[object], vocab_size: int, cache: Path
) -> PreTrainedTokenizerBase:
    """The tokenizer named by the recipe, or one trained on `texts()`, which `key` stands for, and kept in `cache`."""
    if recipe.path is None:
        size = recipe.vocab_size or vocab_size
        folder = cache / f"tokenizer-{_key(size, *key)}"
        _cached(folder, lambda target: train_tokenizer(texts(), size).save_pretrained(target))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(recipe.path)
        except (OSError, ValueError) as error:
            raise SetupError(f"tokenizer.path={recipe.path} cannot be loaded: {error}") from None
        if tokenizer.eos_token_id is None:
            raise SetupError(f"tokenizer.path={recipe.path} has no eos_token, which separates documents")
    check_vocabulary(tokenizer, vocab_size, recipe.path)
    return tokenizer


# What is kept.


def _key(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in (FORMAT, *parts):
        encoded = part.encode() if isinstance(part, str) else json.dumps(part).encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:16]


def _cached(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, letting `build` fill a temporary sibling first and renaming that, so no half-made cache stays."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            build(temporary)
            os.chmod(temporary, 0o755)
            os.rename(temporary, folder)
        except OSError:
            if not folder.exists():  # else another process was first with the same content
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def row_features(data: DataRecipe) -> Features:
    """The columns of the recipe's rows."""
    columns = {"tokens": List(Value("int32"), length=data.sequence_length + 1)}
    return Features(columns | ({"starts": List(Value("int32"))} if data.boundaries else {}))


class RowWriter:
    """Writes rows to an Arrow file that `Dataset.from_file` maps into memory."""

    def __init__(self, file: Path, data: DataRecipe):
        self._features, self._length = row_features(data), data.sequence_length
        self._writer = ArrowWriter(path=str(file), features=self._features)

    def write(self, rows: Rows) -> None:
        """Append rows."""
        if not len(rows):
            return
        columns = {"tokens": pa.FixedSizeListArray.from_arrays(pa.array(rows.tokens.ravel()), self._length + 1)}
        if "starts" in self._features:
            offsets = np.cumsum([0, *map(len, rows.starts)], dtype=np.int32)
            columns["starts"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows.starts)))
        self._writer.write_table(pa.table(columns, schema=self._features.arrow_schema))

    def close(self) -> None:
        self._writer.finalize()


def _batched(documents: Iterable, size: int) -> Iterator[list]:
    documents = iter(documents)
    while batch := list(islice(documents, size)):
        yield batch


class StoredRows(NamedTuple):
    """One corpus's rows in the cache."""

    key: str
    train: Dataset
    train_tokens: int
    held_out: HeldOut


class Preparation:
    """What the corpora of one recipe are prepared with."""

    def __init__(self, data: DataRecipe, tokenizer: PreTrainedTokenizerBase, cache: Path):
        self.data, self.cache = data, cache
        self.eos = tokenizer.eos_token_id
        self.tokenise = DocumentTokenizer(tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True) + (backend.to_str() if backend else "")
        self.key = _key(vocabulary, self.eos, data.sequence_length, data.boundaries)

    def store(
        self, corpus: Corpus, documents: Callable[[], Iterable[tuple[bool, Document]]], split: object
    ) -> StoredRows:
        """The rows of `documents()`, pairs of (is held out, document), from the cache or new; `split` names that choice."""
        length = self.data.sequence_length

        def build(target: Path) -> None:
            packer = RowPacker(self.eos, length)
            writer = RowWriter(target / "train.arrow", self.data)
            sizes = {"train_tokens": 0, "validation_tokens": 0, "validation_bytes": 0}
            held_out: list[np.ndarray] = []
            for batch in _batched(documents(), TOKENISED_TOGETHER):
                for (is_held_out, document), tokens in zip(
                    batch, self.tokenise([document.text for _, document in batch]), strict=True
                ):
                    sizes["validation_tokens" if is_held_out else "train_tokens"] += len(tokens) + 1
                    if is_held_out:
                        held_out.append(tokens)
                        sizes["validation_bytes"] += len(document.text.encode())
                    else:
                        packer.add(tokens)
                writer.write(packer.take(packer.ready))
            packer.end()
            writer.write(packer.take(packer.ready))
            writer.close()
            writer = RowWriter(target / "validation.arrow", self.data)
            if held_out:
                writer.write(pack(held_out, self.eos, length, fill=True))
            writer.close()
            (target / "sizes.json").write_text(json.dumps(sizes))

        key = _key(self.key, corpus.fingerprint, split)
        folder = _cached(self.cache / f"rows-{key}", build)
        sizes = json.loads((folder / "sizes.json").read_text())
        train, validation = (
            Dataset.from_file(str(folder / f"{part}.arrow")).with_format("numpy") for part in ("train", "validation")
        )
        held_out = HeldOut(corpus.source.path, validation, sizes["validation_tokens"], sizes["validation_bytes"])
        return StoredRows(key, train, sizes["train_tokens"], held_out)

    def store_held_out(self, corpus: Corpus) -> HeldOut:
        """The rows of a corpus that is all held out."""
        return self.store(corpus, lambda: ((True, document) for _, document in corpus.documents()), "all").held_out

    def hold(self, name: str, texts: Sequence[str]) -> HeldOut:
        """Rows of held-out texts, in memory."""
        documents = self.tokenise(texts)
        rows = pack(documents, self.eos, self.data.sequence_length, fill=True)
        columns = {"tokens": rows.tokens} | ({"starts": rows.starts} if self.data.boundaries else {})
        dataset = Dataset.from_dict(columns, features=row_features(self.data)).with_format("numpy")
        return HeldOut(name, dataset, sum(len(ids) + 1 for ids in documents), sum(len(text.encode()) for text in texts))


def prepare_data(data: DataRecipe, tokenizer: TokenizerRecipe, vocab_size: int) -> TrainingData:
    """Read, split, tokenise and pack the corpora; what has been done before with the same content is reused.

    Raises `SetupError` when a corpus is missing, unreadable or empty, or shorter than one row, or when the vocabularies of
    tokenizer and model do not go together.
    """
    if tokenizer.path is not None and tokenizer.vocab_size is not None:
        raise SetupError(
            f"tokenizer.vocab_size={tokenizer.vocab_size} is for a tokenizer to be trained, and tokenizer.path="
            f"{tokenizer.path} is one: leave one of them out"
        )
    prepare = _prepare_stream if data.streaming else _prepare_mapped
    return prepare(data, tokenizer, vocab_size, Path(data.cache_dir).expanduser())


def _prepare_mapped(data: DataRecipe, tokenizer: TokenizerRecipe, vocab_size: int, cache: Path) -> TrainingData:
    sources, separate, weights = _open_sources(data)

    def texts() -> Iterator[str]:
        for source in sources:
            train = (
                document.text for is_held_out, document in split_corpus(source.corpus, source.every) if not is_held_out
            )
            yield from islice(train, tokenizer.documents)

    texts_key = [(source.corpus.fingerprint, source.every, tokenizer.documents) for source in sources]
    loaded = load_tokenizer(tokenizer, texts, texts_key, vocab_size, cache)
    preparation = Preparation(data, loaded, cache)
    stored = []
    for source in sources:
        corpus, every = source.corpus, source.every
        rows = preparation.store(corpus, lambda corpus=corpus, every=every: split_corpus(corpus, every), every)
        if not len(rows.train):
            raise SetupError(
                f"{corpus.name} has {rows.train_tokens} training tokens, fewer than one row of "
                f"data.sequence_length={data.sequence_length}; shorten the rows or give more text"
            )
        stored.append(rows)
    if weights is None:  # every source is read once an epoch: one source to the batches
        train = [concatenate_datasets([rows.train for rows in stored])]
        weights = (1.0,)
    else:
        train = [rows.train for rows in stored]

    def open_rows(seed: int, _process_index: int, _num_processes: int) -> list[RowSource]:
        return [MappedRows(rows, (seed, index)) for index, rows in enumerate(train)]

    return TrainingData(
        tokenizer=loaded,
        train=tuple(train),
        held_out=(preparation.store_held_out(separate),) if separate else tuple(rows.held_out for rows in stored),
        fingerprint=_key([rows.key for rows in stored], weights),
        train_tokens=sum(rows.train_tokens for rows in stored),
        rows_per_epoch=rows_per_epoch([len(rows) for rows in train], weights),
        weights=weights,
        streaming=False,
        _open=open_rows,
    )


def _read_ahead_of_stream(
    source: Source, limit: int, sample: int
) -> tuple[frozenset[tuple[int, int]], list[str], list[str]]:
    """Read the beginning of a stream for what must be known before it is trained on.

    Returns the places (shard, number) of the held-out documents: all of every `source.every`-th group, until there are
    `limit`; their texts; and the texts of the first `sample` documents that are trained on.
    """
    places, held_out, texts = [], [], []
    groups, last = 0, None
    for record, document in source.corpus.documents():
        begins, last = document.group != last, document.group
        groups += begins
        is_held_out = source.every is not None and groups % source.every == 0 and (len(places) < limit or not begins)
        if is_held_out:
            places.append((record.shard, record.number))
            held_out.append(document.text)
        elif len(texts) < sample:
            texts.append(document.text)
        if len(texts) >= sample and (source.every is None or len(places) >= limit):
            break
    if source.every is not None and not places:
        raise SetupError(
            f"data.validation_every={source.every} holds out nothing of the stream {source.corpus.name}, which has "
            f"{groups} documents; lower it, or give data.validation_path"
        )
    return frozenset(places), held_out, texts


def _prepare_stream(data: DataRecipe, tokenizer: TokenizerRecipe, vocab_size: int, cache: Path) -> TrainingData:
    sources, separate, weights = _open_sources(data)
    weights = weights or (1.0,)  # `list_sources` allows none for a single source only
    sample = (tokenizer.documents or STREAM_TOKENIZER_DOCUMENTS) if tokenizer.path is None else 0
    begun = [_read_ahead_of_stream(source, data.validation_documents, sample) for source in sources]
    texts = [text for _, _, sampled in begun for text in sampled]
    loaded = load_tokenizer(tokenizer, lambda: iter(texts), texts, vocab_size, cache)
    preparation = Preparation(data, loaded, cache)
    if separate is not None:
        first = islice(separate.documents(), data.validation_documents)
        held_out = (preparation.hold(separate.source.path, [document.text for _, document in first]),)
    else:
        held_out = tuple(
            preparation.hold(source.corpus.source.path, texts_of_source)
            for source, (_, texts_of_source, _) in zip(sources, begun, strict=True)
        )

    def open_rows(seed: int, process_index: int, num_processes: int) -> list[RowSource]:
        return [
            RowStream(
                source.corpus,
                preparation.tokenise,
                preparation.eos,
                data.sequence_length,
                data.boundaries,
                places,
                data.shuffle_rows,
                (seed, index),
                process_index,
                num_processes,
                data.workers,
            )
            for index, (source, (places, _, _)) in enumerate(zip(sources, begun, strict=True))
        ]

    outlines = [source.corpus.outline for source in sources]
    places = [sorted(found) for found, _, _ in begun]
    return TrainingData(
        tokenizer=loaded,
        train=(),
        held_out=held_out,
        fingerprint=_key("stream", preparation.key, outlines, places, weights, data.shuffle_rows),
        train_tokens=None,
        rows_per_epoch=None,
        weights=weights,
        streaming=True,
        _open=open_rows,
    )
