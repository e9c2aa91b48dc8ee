# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Batches that resume exactly, mapped and streaming: any point, several times in a row, any epoch, workers, processes."""

import json
import random
from collections import Counter
from itertools import islice

import pytest
import torch
from datasets import Dataset, disable_progress_bars, enable_progress_bars

from training.corpus import open_corpus, split_corpus
from training.data import prepare_data, train_tokenizer
from training.recipe import DataRecipe, SetupError, SourceRecipe, TokenizerRecipe
from training.stream import ReadAhead

EPOCHS = 3.2


def write_shards(folder, shards: int, suffix: str = ".jsonl", documents: int = 60):
    """Numbered texts of 1 to 9 words, one of them as long as ten rows, in `shards` files; one text is empty."""
    folder.mkdir()
    words = random.Random(0)
    texts = [f"{index} " + " ".join(words.choices("abcdefghij", k=words.randint(1, 9))) for index in range(documents)]
    texts[documents // 2] += " long" * 60
    texts[7] = " "
    for shard in range(shards):
        rows, file = Dataset.from_dict({"text": texts[shard::shards]}), folder / f"{shard}{suffix}"
        {".jsonl": rows.to_json, ".parquet": rows.to_parquet, ".csv": rows.to_csv}[suffix](file)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    disable_progress_bars()
    for shards in (1, 3, 4):
        write_shards(folder / f"shards{shards}", shards)
    write_shards(folder / "shards-csv", 3, ".csv")  # datasets reads it
    write_shards(folder / "shards-parquet", 2, ".parquet")
    enable_progress_bars()
    train_tokenizer(["0 1 2 3 4 5 6 7 8 9 a b c d e f g h i j long"], 300).save_pretrained(folder / "tokenizer")
    return folder


def prepare(place, shards: int | str = 3, **fields):
    fields = {"path": str(place / f"shards{shards}"), "shuffle_rows": 8, "validation_every": 6} | fields
    recipe = DataRecipe(sequence_length=16, cache_dir=str(place / "cache"), **fields)
    return prepare_data(recipe, TokenizerRecipe(path=str(place / "tokenizer")), 300)


def take(batches, count: int) -> list[dict[str, torch.Tensor]]:
    return list(islice(batches, count))


def same(first, second) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def texts_of(data, batches) -> list[str]:
    """The documents of neighbouring rows, in order: their targets are the stream."""
    stream = torch.cat([batch["shift_labels"].flatten() for batch in batches]).tolist()
    return data.tokenizer.decode(stream).split(data.tokenizer.eos_token)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"streaming": False},
        {"streaming": False, "boundaries": True, "workers": 2},
        {"streaming": True, "workers": 0},
        {"streaming": True, "workers": 2, "boundaries": True},
        {"streaming": True, "workers": 0, "shards": 4},
        {"streaming": True, "workers": 2, "shards": 1, "shuffle_rows": 1000},
        {"streaming": True, "workers": 0, "shards": "-parquet"},
        {"streaming": True, "workers": 2, "shards": "-csv"},
    ],
    ids=str,
)
def test_resumed_anywhere_three_times_in_a_row(place, fields, processes):
    data = prepare(place, **fields)
    process = processes - 1

    def open_batches(state=None):
        batches = data.batches(2, process, processes, seed=3)
        if state is not None:
            batches.load_state_dict(json.loads(json.dumps(state)))
        return batches

    whole, batches, epochs = [], open_batches(), []
    while batches.epoch < EPOCHS:
        whole.append(next(batches))
        epochs.append(batches.epoch)
    batches.close()
    assert epochs == sorted(epochs) and len(whole) >= 14
    ends = [next(index for index, epoch in enumerate(epochs) if epoch >= number) for number in (1, 2)]
    for start in {0, 1, 4, *ends, *(end + 1 for end in ends), *(end - 1 for end in ends), len(whole) - 7}:
        batches = open_batches()
        seen, state = take(batches, start), batches.state_dict()
        for pieces in (1, 3, 2):  # each resumed in new batches, from the state of the ones before
            batches.close()
            batches = open_batches(state)
            assert batches.epoch == (epochs[len(seen) - 1] if seen else 0)
            assert batches.state_dict() == state  # loading and saving changes nothing
            seen, state = seen + take(batches, pieces), batches.state_dict()
        batches.close()
        assert same(seen, whole[: start + 6]), f"resumed after {start} of {len(whole)} batches"


def test_a_state_goes_back_in_the_same_batches(place):
    for fields in ({"streaming": False}, {"streaming": True, "workers": 2}):
        batches = prepare(place, **fields).batches(2)
        take(batches, 5)
        state, first = batches.state_dict(), take(batches, 20)
        for _ in range(2):
            batches.load_state_dict(state)
            assert same(take(batches, 20), first)
        batches.close()


def test_workers_do_not_change_the_batches(place):
    found = []
    for workers in (0, 1, 3):
        batches = prepare(place, streaming=True, workers=workers).batches(3)
        found.append(take(batches, 30))
        batches.close()
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_two_processes_see_the_batches_of_one(place):
    """Mapped, the global batches do not depend on how many processes share them, and a state may change hands."""
    data = prepare(place)
    one = take(data.batches(4), 40)
    two = [data.batches(2, process, 2) for process in (0, 1)]
    joined = [
        {name: torch.cat([first[name], second[name]]) for name in first}
        for first, second in zip(take(two[0], 40), take(two[1], 40), strict=True)
    ]
    assert same(joined, one) and two[0].epoch == two[1].epoch > 1
    later = data.batches(8)
    later.load_state_dict(two[1].state_dict())
    assert torch.equal(next(later)["input_ids"], torch.cat([b["input_ids"] for b in take(data.batches(4), 42)[40:]]))


def passes(data, batches, count: int) -> list[list[dict[str, torch.Tensor]]]:
    """The batches of one row of the first `count` passes."""
    found: list[list] = [[] for _ in range(count + 1)]
    while not found[count]:
        batch = next(batches)
        if data.streaming:
            number = batches.state_dict()["sources"][0]["place"]["epoch"]
        else:
            number = sum(map(len, found)) // data.rows_per_epoch
        found[number].append(batch)
    return found[:count]


@pytest.mark.parametrize("streaming", [False, True])
def test_every_epoch_sees_all_rows_in_a_new_order(place, streaming):
    data = prepare(place, shards=1, streaming=streaming, workers=0, boundaries=True)

    def orders(seed):
        columns = ("input_ids", "shift_labels", "position_ids")
        return [
            [tuple(torch.cat([batch[name][0] for name in columns]).tolist()) for batch in found]
            for found in passes(data, data.batches(1, seed=seed), 3)
        ]

    first, second, third = orders(5)
    assert Counter(first) == Counter(second) == Counter(third) and len(first) > 20
    assert first != second and second != third and first != third
    assert orders(5) == [first, second, third] and orders(6)[0] != first


@pytest.mark.parametrize(("shards", "processes"), [(1, 1), (3, 1), (1, 2), (3, 2), (4, 2), (3, 3)])
def test_a_pass_reads_each_training_document_once(place, shards, processes):
    """Rows that are not shuffled spell out the stream: all documents but the held-out ones, over all processes once."""
    data = prepare(place, shards=shards, streaming=True, workers=0, shuffle_rows=1)
    mapped = prepare(place, shards=shards)
    assert data.validation_tokens == mapped.validation_tokens and data.validation_bytes == mapped.validation_bytes
    corpus = open_corpus(SourceRecipe(path=str(place / f"shards{shards}")))
    expected = Counter(document.text for held_out, document in split_corpus(corpus, 6) if not held_out)
    for number in (0, 1):
        found: Counter[str] = Counter()
        for process in range(processes):
            *complete, _ = texts_of(data, passes(data, data.batches(1, process, processes), 2)[number])
            found.update(complete)
        assert not found - expected  # nothing twice, nothing that was held out
        # The last incomplete row of each process is dropped, and with it the end of a document that began before.
        assert sum(len(text) for text in (expected - found).elements()) < processes * 80
        assert found.total() > expected.total() * 0.75


def test_weights_are_shares_of_tokens(tmp_path, place):
    """Counted in tokens, though the sources' documents and sizes differ; the small one begins again in a new order."""
    for name, length, documents in (("a", 3, 900), ("b", 40, 12), ("c", 9, 100)):
        lines = [json.dumps({"body": " ".join([name] * length)}) + "\n" for _ in range(documents)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    weights = {"a": 5.0, "b": 2.0, "c": 1.0}
    sources = [
        SourceRecipe(path=str(tmp_path / f"{name}.jsonl"), text_field="body", weight=weight)
        for name, weight in weights.items()
    ]
    for streaming in (False, True):
        data = prepare(place, path="sotu", sources=sources, streaming=streaming, workers=0)
        assert [part.name for part in data.held_out] == [source.path for source in sources]
        assert len(data.validation) == sum(len(part.rows) for part in data.held_out)
        for count, tolerance in ((8, 0.15), (80, 0.015)):
            batches = data.batches(2)
            targets = torch.cat([batch["shift_labels"].flatten() for batch in take(batches, count)])
            # Each source has a letter of its own, and a row comes from one source.
            texts = data.tokenizer.batch_decode(targets.view(-1, 16), skip_special_tokens=True)
            counted = {name: 16 * sum(name in text for text in texts) for name in weights}
            assert sum(counted.values()) == targets.numel()
            for name, weight in weights.items():
                assert counted[name] / targets.numel() == pytest.approx(weight / 8, abs=tolerance)
        assert batches.source_epochs[1] > 1 and batches.epoch == min(batches.source_epochs)
        if not streaming:
            assert data.rows_per_epoch == max(
                -(-len(rows) * 8 // int(weight)) for rows, weight in zip(data.train, weights.values(), strict=True)
            )
        state = json.loads(json.dumps(batches.state_dict()))
        after, again = take(batches, 9), data.batches(2)
        again.load_state_dict(state)
        assert same(take(again, 9), after)


def test_sources_without_weights_are_read_once_an_epoch(place, tmp_path):
    sources = [SourceRecipe(path=str(place / "shards1")), SourceRecipe(path=str(place / "shards3"))]
    data = prepare(place, path="sotu", sources=sources)
    parts = [prepare(place, shards=shards) for shards in (1, 3)]
    assert data.rows_per_epoch == sum(part.rows_per_epoch for part in parts)
    assert data.train_tokens == sum(part.train_tokens for part in parts)
    rows = Counter(tuple(batch["input_ids"][0].tolist()) for batch in take(data.batches(1), data.rows_per_epoch))
    assert rows == Counter(tuple(row["tokens"][:-1].tolist()) for part in parts for row in part.train[0])


def test_a_state_of_other_batches_is_refused(place):
    state = prepare(place, streaming=True, workers=0).batches(2, 0, 2).state_dict()
    for fields, arguments, words in (
        ({"streaming": True}, (2, 0, 1), ["processes=2", "processes=1"]),
        ({"streaming": True}, (2, 1, 2), ["process=0", "process=1"]),
        ({"streaming": True}, (2, 0, 2, 1), ["seed=0", "seed=1"]),
        ({"streaming": True, "shuffle_rows": 9}, (2, 0, 2), ["data="]),
        ({"streaming": True, "boundaries": True}, (2, 0, 2), ["data="]),
        ({"streaming": True, "shards": 1}, (2, 0, 2), ["data="]),
        ({"streaming": False}, (2, 0, 2), ["data="]),
    ):
        batches = prepare(place, **({"workers": 0} | fields)).batches(*arguments)
        with pytest.raises(SetupError) as error:
            batches.load_state_dict(state)
        for word in words:
            assert word in str(error.value)


def test_a_stream_without_a_row_for_a_process_is_told(place, tmp_path):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"text": f"{n} " * 8}) + "\n" for n in range(7)))
    batches = prepare(place, path=str(tmp_path / "few.jsonl"), streaming=True, workers=2).batches(1, 6, 7)
    with pytest.raises(SetupError, match="fewer than one training row.*process 6 of 7"):
        next(batches)
    with pytest.raises(SetupError, match="fewer than one training row"):  # and the threads have not gone astray
        next(batches)
    batches.close()


def test_a_stream_that_holds_nothing_out_is_told(place):
    with pytest.raises(SetupError, match="data.validation_every=100 holds out nothing of the stream.*59 documents"):
        prepare(place, streaming=True, validation_every=100)


def test_few_documents_of_a_stream_are_held_out(place):
    data = prepare(place, shards=1, streaming=True, workers=0, validation_documents=2, shuffle_rows=1)
    whole = prepare(place, shards=1, streaming=True, workers=0)
    assert 0 < data.validation_tokens < whole.validation_tokens
    tokens = data.validation[0]["tokens"]
    assert tokens[0] == data.tokenizer.eos_token_id
    rows = [row["input_ids"][0] for row in take(data.batches(1), 60)]
    held_out = data.tokenizer.decode(tokens[1:6])
    assert held_out not in data.tokenizer.decode(torch.cat([row[1:] for row in rows]))


def test_reading_ahead_passes_on_what_is_raised():
    def items():
        yield 1
        raise ValueError("broken")

    ahead = ReadAhead(items())
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            next(ahead)
    ahead.close()
    endless = ReadAhead(iter(int, 1), depth=2)
    assert next(endless) == 0
    endless.close()
    assert not endless._thread.is_alive()
