# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The evaluation script, perplexity and the recall probes, against models whose answers are known."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from laws.cases import tiny_model
from matplotlib import image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from modeling_avgpath import AvgPathForCausalLM
from training.data import IGNORE, load_documents, split_documents, train_tokenizer
from training.evaluate import load_model, main, quantization_config
from training.perplexity import cut_windows, score_carried, score_windows, summarise
from training.probes import (
    Alphabet,
    MeasurementError,
    bootstrap_interval,
    copying,
    key_value_lookup,
    make_alphabet,
    position_limit,
    repeated_phrases,
    token_nll,
)
from training.recipe import REPOSITORY, EvaluatedModelRecipe, EvaluationRecipe, load_recipe, recipe_fields

VOCABULARY = 5000
ALPHABET = Alphabet(torch.arange(10, VOCABULARY), prefix=(1,))
SURE = 50.0  # a logit above all others


class Stub(nn.Module):
    """A model that gives no token a chance over another; keeps what it was asked to read."""

    device = torch.device("cpu")
    config = SimpleNamespace(max_position_embeddings=1000, vocab_size=VOCABULARY)

    def __init__(self):
        super().__init__()
        self.read: list[torch.Tensor] = []

    def forward(self, input_ids, use_cache):
        assert not self.training and not torch.is_grad_enabled() and not use_cache
        self.read.append(input_ids)
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, ids in enumerate(input_ids.tolist()):
            for place, answer in self.answers(ids):
                logits[row, place, answer] = SURE
        return SimpleNamespace(logits=logits)

    def answers(self, ids: list[int]):
        return []


class Copier(Stub):
    """Foretells what followed the last two tokens, or else the last one, when they came before."""

    def answers(self, ids):
        seen: dict[tuple, int] = {}
        for place, token in enumerate(ids):
            suffixes = [(ids[place - 1], token), (token,)] if place else [(token,)]
            for suffix in suffixes:
                if suffix in seen:
                    yield place, ids[seen[suffix] + 1]
                    break
            for suffix in suffixes:
                seen[suffix] = place


class LastValue(Stub):
    """Answers every key with the value of the last pair told."""

    def answers(self, ids):
        last = ids[1 + 2 * ((len(ids) - 1) // 4) - 1]
        return [(place, last) for place in range(len(ids))]


def mean(record: dict, name: str) -> float:
    assert record[name]["low"] <= record[name]["mean"] <= record[name]["high"]
    return record[name]["mean"]


PROBES = [
    (repeated_phrases, {"distances": (8, 16, 100), "phrase_length": 6}, "distance"),
    (key_value_lookup, {"pairs": (4, 16)}, "pairs"),
    (copying, {"lengths": (8, 30)}, "length"),
]


@pytest.mark.parametrize(("probe", "settings", "key"), PROBES)
def test_a_model_that_copies_recalls_everything(probe, settings, key):
    records = probe(Copier(), ALPHABET, **settings, samples=5, batch_tokens=300)
    assert [record[key] for record in records] == list(next(iter(settings.values())))
    for record in records:
        assert mean(record, "nll") < 1e-3
        assert mean(record, "accuracy") == mean(record, "exact") == 1
        assert mean(record, "unseen_nll") == pytest.approx(math.log(VOCABULARY), rel=1e-3)
        assert mean(record, "gain") == pytest.approx(math.log(VOCABULARY), rel=1e-3)
        assert record.get("choice", {"mean": 1})["mean"] == 1


@pytest.mark.parametrize(("probe", "settings", "key"), PROBES)
def test_a_model_that_knows_nothing_recalls_nothing(probe, settings, key):
    for record in probe(Stub(), ALPHABET, **settings, samples=5):
        assert mean(record, "nll") == pytest.approx(math.log(VOCABULARY), rel=1e-6)
        assert mean(record, "gain") == pytest.approx(0, abs=1e-6)
        assert mean(record, "accuracy") == mean(record, "exact") == 0


def test_lookup_tells_recall_from_knowing_that_a_value_is_wanted():
    for record in key_value_lookup(LastValue(), ALPHABET, (4, 8), samples=6):
        assert record["chance"] == 1 / record["pairs"]
        # One of the n questions asks for the last pair: right once, every time.
        assert record["choice"] == {name: record["chance"] for name in ("mean", "low", "high")}
        assert mean(record, "accuracy") == record["chance"] and mean(record, "exact") == 0


def test_sequences_are_what_they_are_said_to_be():
    model = Stub().train()
    repeated_phrases(model, ALPHABET, (20,), phrase_length=5, samples=3, seed=1)
    key_value_lookup(model, ALPHABET, (4,), samples=3, seed=1)
    copying(model, ALPHABET, (9,), samples=3, seed=1)
    assert model.training  # its mode came back
    (phrases, unseen_phrase), (pairs, unseen_pairs), (copies, unseen_string) = zip(
        model.read[::2], model.read[1::2], strict=True
    )
    # The twins differ in what was told, all of it, and nowhere else.
    for sequences, twins, told in (
        (phrases, unseen_phrase, 5), (pairs, unseen_pairs, 8), (copies, unseen_string, 9)
    ):  # fmt: skip
        assert (twins[:, 1 : 1 + told] != sequences[:, 1 : 1 + told]).all()
        assert torch.equal(twins[:, 1 + told :], sequences[:, 1 + told :])
    for sequences in model.read:
        assert (sequences[:, 0] == 1).all() and (sequences[:, 1:] >= 10).all()
        assert len(set(map(tuple, sequences.tolist()))) == 3
    assert phrases.shape == (3, 1 + 20 + 5) and torch.equal(phrases[:, 1:6], phrases[:, 21:])
    for phrase, filler in zip(phrases[:, 1:6].tolist(), phrases[:, 6:21].tolist(), strict=True):
        assert len(set(phrase)) == 5 and not set(phrase) & set(filler)
    assert pairs.shape == (3, 1 + 16) and copies.shape == (3, 1 + 18)
    for row in pairs[:, 1:].view(3, 8, 2).tolist():
        assert len({token for pair in row[:4] for token in pair}) == 8
        assert sorted(row[:4]) == sorted(row[4:])
    assert torch.equal(copies[:, 1:10], copies[:, 10:])

    again, other = Stub(), Stub()
    repeated_phrases(again, ALPHABET, (20,), phrase_length=5, samples=3, seed=1)
    repeated_phrases(other, ALPHABET, (20,), phrase_length=5, samples=3, seed=2)
    assert torch.equal(again.read[0], phrases) and not torch.equal(other.read[0], phrases)


def test_batches_change_nothing_and_stay_small():
    small, large = Copier(), Copier()
    first = copying(small, ALPHABET, (30,), samples=7, batch_tokens=130)
    second = copying(large, ALPHABET, (30,), samples=7, batch_tokens=10_000)
    assert first == second
    assert [len(ids) for ids in small.read] == [2, 2, 2, 1] * 2 and len(large.read) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: repeated_phrases(Stub(), ALPHABET, (995,)),
            "1004 tokens is longer than .*max_position_embeddings=1000",
        ),
        (lambda: repeated_phrases(Stub(), ALPHABET, (4,), phrase_length=8), "distance of 4 is shorter than the phrase"),
        (lambda: repeated_phrases(Stub(), ALPHABET, (4,), phrase_length=1), "phrase_length must be at least 2"),
        (lambda: key_value_lookup(Stub(), Alphabet(torch.arange(9)), (5,)), "needs 20 different tokens, .* has 9"),
        (lambda: key_value_lookup(Stub(), ALPHABET, (1,)), "pairs must be at least 2"),
        (lambda: copying(Stub(), ALPHABET, (1,)), "at least 2 tokens, got 1"),
        (lambda: copying(Stub(), ALPHABET, (4,), samples=0), "samples must be at least 1"),
        (lambda: Alphabet(torch.tensor([3, 3])), "must be distinct"),
        (lambda: token_nll(torch.full((1, 2, 5), math.nan), torch.zeros(1, 2, dtype=torch.long)), "not numbers"),
    ],
)
def test_what_cannot_be_measured_is_said(call, words):
    with pytest.raises(MeasurementError, match=words):
        call()


def test_position_limit():
    assert position_limit(tiny_model("softmax_last", max_position_embeddings=77).config) == 77
    assert position_limit(tiny_model("mesa_net@mean_field", max_position_embeddings=77).config) == 77
    assert position_limit(tiny_model("all_recurrent", max_position_embeddings=77).config) is None
    assert position_limit(LlamaConfig(max_position_embeddings=77)) == 77


def test_alphabets_hold_no_special_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    alphabet = make_alphabet(tokenizer, 400)
    assert alphabet.prefix == (tokenizer.bos_token_id,)
    assert set(alphabet.ids.tolist()) == set(range(len(tokenizer))) - set(tokenizer.all_special_ids)
    assert int(make_alphabet(tokenizer, 300).ids.max()) == 299  # the model knows fewer
    with pytest.raises(MeasurementError, match="usable words"):
        make_alphabet(tokenizer, 400, "words")
    words = SimpleNamespace(
        get_vocab=lambda: (
            {f"\u0120{a}{b}c": 26 * i + j for i, a in enumerate(LETTERS) for j, b in enumerate(LETTERS)}
            | {"\u0120ab": 900, "abc": 901, "\u0120Abc": 902, "\u2581abc": 903}
        ),
        all_special_ids=[0],
        added_tokens_decoder={1: "x"},
        bos_token_id=None,
        eos_token_id=None,
    )
    alphabet = make_alphabet(words, 1000, "words")
    assert set(alphabet.ids.tolist()) == set(range(2, 676)) | {903} and alphabet.prefix == ()


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def test_bootstrap_interval():
    generator = np.random.default_rng(3)
    values = generator.normal(5, 2, 400)
    low, high = bootstrap_interval(values, np.ones(400))
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    narrow = bootstrap_interval(values, np.ones(400), confidence=0.5)
    assert narrow[1] - narrow[0] == pytest.approx(2 * 0.6745 * values.std() / 20, rel=0.15)
    # Units weigh by their count: the ratio of equal rates has no spread, however unequal the units.
    assert bootstrap_interval([2.0, 20.0, 6.0], [1, 10, 3]) == (2, 2)
    assert bootstrap_interval([1.0], [1]) is None
    assert bootstrap_interval(values, np.ones(400)) == (low, high) != bootstrap_interval(values, np.ones(400), seed=1)


@given(st.data())
def test_windows_score_each_token_once(data):
    length, window = data.draw(st.integers(2, 60)), data.draw(st.integers(2, 20))
    bos = data.draw(st.sampled_from([None, 999]))
    stride = data.draw(st.integers(1, window - (bos is not None)))
    stream = list(range(length)) if bos is None else [999, *range(1, length)]
    scored = []
    for number, (inputs, targets, start) in enumerate(cut_windows(stream, window, stride, bos)):
        assert len(inputs) == len(targets) <= window
        assert bos is None or inputs[0] == bos
        for index, target in enumerate(targets):
            if target != IGNORE:
                place = start + index
                assert stream[place] == target
                assert inputs[index] == stream[place - 1] or (number and index == 0)
                past = inputs[1 : index + 1] if bos is not None else inputs[: index + 1]
                assert past == stream[place - len(past) : place]
                assert number == 0 or index + 1 >= window - stride + (bos is None)
                scored.append(place)
    assert scored == list(range(1, length))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    ).eval()


DOCUMENTS = [torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
             for length in (33, 5, 1, 70, 34)]  # fmt: skip


@torch.no_grad()
def nll_in_one_pass(model, tokens: list[int], bos: int | None) -> np.ndarray:
    stream = torch.tensor(tokens if bos is None else [bos, *tokens])
    return F.cross_entropy(model(stream[None, :-1]).logits[0], stream[1:], reduction="none").double().numpy()


@pytest.mark.parametrize("make", [lambda: tiny_model("softmax_middle"), lambda: tiny_model("three_cache_kinds"), llama])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_carried_state_equals_one_long_pass(make, chunk):
    model = make()
    results = score_carried(model, DOCUMENTS, bos=1, chunk=chunk, batch_tokens=4 * chunk)
    for tokens, scores in zip(DOCUMENTS, results, strict=True):
        assert scores.nll == pytest.approx(nll_in_one_pass(model, tokens, 1), rel=1e-4, abs=1e-5)
        assert list(scores.place) == list(scores.context) == list(range(1, len(tokens) + 1))


def test_windows_forget_what_carried_state_keeps():
    model = tiny_model("gated_delta_net")
    carried, cut = (function(model, DOCUMENTS[3:4], 1, 16)[0] for function in (score_carried, score_windows))
    assert cut.nll[:16] == pytest.approx(carried.nll[:16], rel=1e-4)
    assert np.abs(cut.nll[16:] - carried.nll[16:]).max() > 1e-2
    assert list(cut.place) == list(carried.place)
    assert list(cut.context) == [1 + index % 16 for index in range(70)]


@pytest.mark.parametrize(("stride", "bos_in_each"), [(None, False), (5, False), (None, True), (5, True)])
def test_each_token_is_scored_with_the_window_before_it(stride, bos_in_each):
    """Against every window run alone."""
    model = llama()
    results = score_windows(model, DOCUMENTS, 1, 12, stride, bos_in_each, batch_tokens=30)
    for tokens, scores in zip(DOCUMENTS, results, strict=True):
        assert list(scores.place) == list(range(1, len(tokens) + 1))
        expected = []
        stream = [1, *tokens]
        for place, context in zip(scores.place, scores.context, strict=True):
            past = stream[place - context : place]
            if bos_in_each and place - context >= 0 and place > 12:
                past = [1, *stream[place - context + 1 : place]]
            expected.append(nll_in_one_pass(model, [*past, stream[place]], None)[-1])
        assert scores.nll == pytest.approx(np.array(expected), rel=1e-4, abs=1e-5)
        assert scores.context[scores.place > 12].min(initial=99) >= (12 - 5 + 1 if stride else 1)


def test_a_document_without_bos_is_scored_from_the_second_token():
    model = llama()
    (scores,) = score_windows(model, DOCUMENTS[:1], None, 64)
    assert scores.nll == pytest.approx(nll_in_one_pass(model, DOCUMENTS[0], None), rel=1e-4)
    with pytest.raises(MeasurementError, match="no token to score"):
        score_windows(model, [[5]], None, 64)


def test_mistaken_windows_and_models_without_a_cache():
    with pytest.raises(MeasurementError, match="stride must be between 1 and 8"):
        score_windows(llama(), DOCUMENTS, 1, 8, stride=9)
    with pytest.raises(MeasurementError, match="stride must be between 1 and 7"):
        score_windows(llama(), DOCUMENTS, 1, 8, stride=8, bos_in_each=True)

    class NoCache(Stub):
        def forward(self, input_ids, use_cache):
            return super().forward(input_ids, use_cache=False)

    with pytest.raises(MeasurementError, match="NoCache returns no cache"):
        score_carried(NoCache(), DOCUMENTS, 1, 8)


def test_summary_adds_up():
    model = llama()
    scores = score_windows(model, DOCUMENTS, 1, 16)
    sizes = [4.0 * len(tokens) for tokens in DOCUMENTS]
    summary = summarise(scores, sizes)
    nats = sum(document.nll.sum() for document in scores)
    assert summary["tokens"] == 143 and summary["bytes"] == 572
    assert summary["loss"]["mean"] == pytest.approx(nats / 143)
    assert summary["perplexity"]["mean"] == pytest.approx(math.exp(nats / 143))
    assert summary["bits_per_byte"]["mean"] == pytest.approx(nats / math.log(2) / 572)
    for name, highest in (("by_place", 70), ("by_context", 16)):
        records = summary[name]
        assert sum(record["tokens"] for record in records) == 143
        assert sum(record["tokens"] * record["loss"]["mean"] for record in records) == pytest.approx(nats)
        assert [record["from"] for record in records] == [2**exponent for exponent in range(highest.bit_length())]
        assert records[-1]["to"] == highest
    assert summary["by_place"][0]["loss"]["mean"] == pytest.approx(np.mean([document.nll[0] for document in scores]))
    assert [record["documents"] for record in summary["by_place"]] == [5, 4, 4, 3, 3, 3, 1]


# The script.


@pytest.fixture(scope="module")
def folder(workplace):
    """A model with a tokenizer, saved in the workplace."""
    texts = [document.text for document in load_documents(str(workplace.folder / "texts"))]
    tokenizer = train_tokenizer(texts, 400)
    assert len(tokenizer) < 400
    tokenizer.save_pretrained(workplace.folder / "model")
    tiny_model("softmax_last", vocab_size=400, max_position_embeddings=300).save_pretrained(workplace.folder / "model")
    return workplace.folder / "model"


SMALL = ["model.path=model", "data.path=texts", "data.validation_every=5", "perplexity.window=32", "probes.samples=3",
         "phrases.distances=[8,32]", "lookup.pairs=[4,8]", "copying.lengths=[4,16]", "bootstrap.resamples=50"]  # fmt: skip


@pytest.fixture(scope="module")
def evaluated(folder, workplace):
    """The result of the script started as a file, and its folder."""
    workplace.script = REPOSITORY / "training" / "evaluate.py"
    (workplace.folder / "tiny.yaml").rename(workplace.folder / "pretrain-tiny.yaml")
    (workplace.folder / "tiny.yaml").write_text("output_dir: evaluated\n", encoding="utf-8")
    result = workplace.run(*SMALL)
    assert result.returncode == 0, result.stderr
    return json.loads((workplace.folder / "evaluated" / "evaluation.json").read_text()), workplace.folder / "evaluated"


@pytest.fixture
def run(workplace, folder, monkeypatch):
    """`run(*arguments)` starts the script here and returns its status."""
    monkeypatch.chdir(workplace.folder)
    return lambda *arguments: main([*SMALL, *arguments])


def test_perplexity_is_that_of_the_texts(evaluated, workplace):
    result = evaluated[0]["perplexity"]
    model, tokenizer = (
        kind.from_pretrained(workplace.folder / "model") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    _, documents = split_documents(load_documents(str(workplace.folder / "texts")), 5)
    assert len(documents) == len(result["documents"]) == 8
    total = 0.0
    for document, record in zip(documents, result["documents"], strict=True):
        stream = [tokenizer.bos_token_id, *tokenizer(document.text, add_special_tokens=False)["input_ids"]]
        nats = sum(
            nll_in_one_pass(model, stream[start : start + 33], None).sum() for start in range(0, len(stream) - 1, 32)
        )
        assert record["tokens"] == len(stream) - 1
        assert record["loss"] == pytest.approx(nats / record["tokens"], rel=1e-4)
        assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(document.text.encode()), rel=1e-4)
        total += nats
    assert result["loss"]["mean"] == pytest.approx(total / result["tokens"], rel=1e-4)
    assert result["loss"]["low"] < result["loss"]["mean"] < result["loss"]["high"]


def test_all_of_it_is_reported(evaluated):
    result, folder = evaluated
    assert result["mixer_types"] == ["linear", "ttt_linear", "softmax"] and result["dtype"] == "float32"
    text = (folder / "evaluation.md").read_text()
    for title in ("Perplexity", "Repeated phrases", "Key-value lookup", "Copying"):
        assert f"## {title}" in text
    assert f"{result['perplexity']['bits_per_byte']['mean']:.4f} (" in text
    for task, key, values in (
        ("phrases", "distance", [8, 32]),
        ("lookup", "pairs", [4, 8]),
        ("copying", "length", [4, 16]),
    ):
        assert [record[key] for record in result[task]] == values
        for record in result[task]:
            assert f"| {record[key]} | {record['nll']['mean']:.2f} (" in text
    pixels = image.imread(folder / "evaluation.png")
    assert pixels.shape[1] > 3 * pixels.shape[0] and pixels.std() > 0.01
    assert load_recipe(str(folder / "recipe.yaml"), (), EvaluationRecipe).model.path == "model"


def test_two_processes_find_the_same(evaluated, workplace):
    result = workplace.run(
        *SMALL, "output_dir=two",
        launcher=("-m", "torch.distributed.run", "--nproc_per_node", "2", str(workplace.script)),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("two/evaluation.md") == 1  # they know of each other
    found = json.loads((workplace.folder / "two" / "evaluation.json").read_text())
    for task in ("phrases", "lookup", "copying"):
        for record, expected in zip(found[task], evaluated[0][task], strict=True):
            assert record["nll"] == pytest.approx(expected["nll"], rel=1e-5)
    assert found["perplexity"]["loss"]["mean"] == pytest.approx(evaluated[0]["perplexity"]["loss"]["mean"], rel=1e-5)
    assert [d["group"] for d in found["perplexity"]["documents"]] == [
        d["group"] for d in evaluated[0]["perplexity"]["documents"]
    ]


def test_quantization_reports_the_change(run, workplace, capsys):
    pytest.importorskip("torchao", reason="the extra `evaluate` is not installed")
    assert run("output_dir=int8", "tasks=perplexity", "model.quantization=int8") == 0
    found = json.loads((workplace.folder / "int8" / "evaluation.json").read_text())
    result = found["perplexity"]
    change = result["loss"]["mean"] - result["unquantized"]["loss"]["mean"]
    assert 0 < abs(change) < 0.2
    assert result["change"]["loss"]["mean"] == pytest.approx(change, rel=1e-6)
    assert result["change"]["perplexity_ratio"]["mean"] == pytest.approx(math.exp(change), rel=1e-6)
    assert found["nbytes"] < result["unquantized"]["nbytes"]
    assert "phrases" not in found
    assert "the change in loss is" in capsys.readouterr().out

    recipe = load_recipe(
        None, [f"model.path={workplace.folder / 'model'}", "model.quantization=int8"], EvaluationRecipe
    )
    load_model(recipe, True, torch.device("cpu")).save_pretrained(workplace.folder / "model-int8")
    assert run("output_dir=again", "model.path=model-int8", "model.tokenizer=model", "model.quantization=int8") == 2
    assert "quantised already" in capsys.readouterr().err
    assert run("output_dir=again", "model.path=model-int8", "model.tokenizer=model", "tasks=perplexity") == 0
    again = json.loads((workplace.folder / "again" / "evaluation.json").read_text())["perplexity"]
    assert again["loss"] == result["loss"]


def test_carried_state_and_bits_of_a_part(run, workplace):
    assert run("output_dir=carried", "tasks=perplexity", "perplexity.carry_state=true", "perplexity.max_tokens=60") == 0
    carried = json.loads((workplace.folder / "carried" / "evaluation.json").read_text())["perplexity"]
    assert carried["by_place"] == carried["by_context"] and carried["by_place"][-1]["to"] == 60
    assert run("output_dir=none", "tasks=perplexity", "perplexity.bos=none", "perplexity.window=200") == 0
    none = json.loads((workplace.folder / "none" / "evaluation.json").read_text())["perplexity"]
    _, documents = split_documents(load_documents("texts"), 5)
    assert none["bytes"] < sum(len(document.text.encode()) for document in documents)
    assert none["documents"][0]["tokens"] + 1 == len(
        AutoTokenizer.from_pretrained("model")(documents[0].text, add_special_tokens=False)["input_ids"]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.path=runs/no/such"], ["model.path=runs/no/such", "no such folder"]),
        (["model.path=texts"], ["no tokenizer in texts"]),
        (["model.path=texts", "model.tokenizer=model"], ["model.path=texts cannot be loaded"]),
        (["data.path=nowhere"], ["data.path=nowhere", "no such file or folder"]),
        (["data.path=empty.txt"], ["data.path=empty.txt holds no text"]),
        (["perplexity.window=400"], ["perplexity.window=400", "max_position_embeddings=300", "extrapolate=true"]),
        (["perplexity.carry_state=true", "data.path=long.txt", "data.split=all"], ["embeddings=300", "max_tokens=300"]),
        (["perplexity.stride=33"], ["perplexity: stride must be between 1 and 32"]),
        (["copying.lengths=[4,200]"], ["copying: a probe of 401 tokens", "max_position_embeddings=300"]),
        (["probes.alphabet=words"], ["usable words"]),
        (["tasks=[perplexity,speed]"], ["'tasks' must be one or more of perplexity"]),
        (["model.quantization=int3"], ["'model.quantization' must be one of int8"]),
        (["quantization=int8"], ["did you mean 'model.quantization'?"]),
        (["lookup.pairs=[8,4]"], ["'lookup.pairs' must be rising counts"]),
        (["output_dir=full"], ["full holds an evaluation", "overwrite=true"]),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(arguments, words, run, workplace, capsys):
    (workplace.folder / "empty.txt").write_text(" \n")
    (workplace.folder / "long.txt").write_text("one two three " * 400)
    (workplace.folder / "full").mkdir(exist_ok=True)
    (workplace.folder / "full" / "evaluation.json").write_text("{}")
    given = (
        arguments
        if any(argument.startswith("output_dir") for argument in arguments)
        else ["output_dir=bad", *arguments]
    )
    assert run(*given) == 2
    message = capsys.readouterr().err
    for word in words:
        assert word.lower() in message.lower()
    assert "Traceback" not in message and not (workplace.folder / "bad" / "evaluation.json").exists()


def test_a_checkpoint_that_lacks_weights_is_refused(run, workplace, capsys):
    """Transformers would fill them with random ones, and the figures would be of nobody's model."""
    AutoModelForCausalLM.from_pretrained(workplace.folder / "model").save_pretrained(workplace.folder / "holed")
    file = workplace.folder / "holed" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    assert run("output_dir=bad", "model.path=holed", "model.tokenizer=model", "tasks=perplexity") == 2
    assert "model.path=holed has no weights for model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for key, _, _, meaning in recipe_fields(EvaluationRecipe):
        assert key in text and meaning in text


def test_the_help_comes_without_the_noise_of_libraries():
    script = str(REPOSITORY / "training" / "evaluate.py")
    result = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0 and result.stdout.startswith("usage") and result.stderr == ""


def test_the_default_recipe_is_sound():
    recipe = load_recipe(str(REPOSITORY / "configuration" / "evaluate.yaml"), (), EvaluationRecipe)
    assert recipe.model.path == "runs/pretrain/final" and recipe == EvaluationRecipe()


def test_what_stays_unquantized():
    pytest.importorskip("torchao", reason="the extra `evaluate` is not installed")
    ours, theirs = tiny_model("linear").config, LlamaConfig()
    by_default, chosen = EvaluatedModelRecipe(quantization="int8"), EvaluatedModelRecipe(unquantized=["lm_head"])
    assert quantization_config(by_default, ours).modules_to_not_convert == AvgPathForCausalLM.modules_to_not_convert
    assert quantization_config(by_default, theirs).modules_to_not_convert is None  # Transformers leaves out the head
    for config in (ours, theirs):
        assert quantization_config(chosen, config).modules_to_not_convert == ["lm_head"]
