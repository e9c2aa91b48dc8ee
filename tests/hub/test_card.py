# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The model card: its numbers are the model's, and the Hub accepts it."""

import re

import pytest
import torch
import yaml
from hub.server import metadata_errors
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from laws.cases import SPECS, random_ids, tiny_config, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_avgpath import AvgPathCache, AvgPathForCausalLM
from training.card import (
    LayerCache,
    build_card,
    format_bytes,
    held_out_results,
    layer_diagram,
    measure_cache,
    name_source,
    softmax_cache,
)

RESULTS = [EvalResult("text-generation", "speeches", "speeches, held out", metric, value)
           for metric, value in (("perplexity", 12.34567), ("accuracy", "0.5 ± 0.1"))]  # fmt: skip


def fill(model, **fields) -> ModelCard:
    facts = {
        "load_from": "someone/small-hybrid",
        "data": "Speeches.",
        "training": {"steps": "7"},
        "limits": "Small.",
        "license": "apache-2.0",
    }
    return build_card(model, **{**facts, **fields})


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_two_short_passes_tell_the_cache_of_any_length(spec):
    """Against the bytes of a real cache, in fp32 and bf16, longer than window, mini-batch and chunk."""
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(spec).to(dtype)
        measured = measure_cache(model)
        for length in (3, 150):
            cache = AvgPathCache(model.config)
            model(random_ids(1, length), cache=cache)
            assert [layer.after(length) for layer in measured] == cache.nbytes_per_layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_softmax_twin(dtype):
    model = tiny_model("all_softmax").to(dtype)
    cache = AvgPathCache(model.config)
    model(random_ids(1, 40), cache=cache)
    twin = softmax_cache(tiny_model("all_recurrent").config, dtype)  # of the same shape
    assert [layer.after(40) for layer in twin] == cache.nbytes_per_layer
    assert twin == measure_cache(model)


def test_measuring_leaves_the_model_as_it_was():
    model = tiny_model("softmax_last").train()
    measure_cache(model)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_the_card_states_the_cache_at_long_lengths():
    model = AvgPathForCausalLM(tiny_config(["linear", "linear", "linear", "softmax"], num_hidden_layers=8))
    text = fill(model).text
    rows = dict(re.findall(r"^\| (1k|32k|1M) \| (.*) \|$", text, flags=re.MULTILINE))
    measured = measure_cache(model)
    for label, tokens in (("1k", 2**10), ("32k", 2**15), ("1M", 2**20)):
        here, softmax, share = rows[label].split(" | ")
        assert here == format_bytes(sum(layer.after(tokens) for layer in measured))
        assert softmax == format_bytes(8 * tokens * 2 * 2 * 8 * 4)  # layers, tokens, K and V, 2 heads of 8, fp32
        assert 25 <= float(share.rstrip("%")) < 100
    assert "2 of 8 layers grow with the text, by 256 B a token together" in text
    assert "8 layers of width 24, 6 of them recurrent (3:1)" in text
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in text


def test_diagram():
    config = tiny_config(["delta_net", "delta_net", "identity", "softmax"], num_hidden_layers=8)
    caches = [LayerCache(2048, 0), LayerCache(2048, 0), LayerCache(0, 64), LayerCache(0, 128)] * 2
    assert layer_diagram(config, caches).splitlines() == [
        "2 × ┌  2 delta_net            a state: 2.0 kB each",
        "    │  1 identity@mean_field  keys: 64 B a token",
        "    └  1 softmax              keys and values: 128 B a token",
    ]
    config = tiny_config(["mesa_net@expectation", "sliding_softmax", "sliding_softmax"])
    caches = [LayerCache(3_500_000, 64), LayerCache(512, 0), LayerCache(512, 0)]
    assert layer_diagram(config, caches).splitlines() == [
        "┌  1 mesa_net@expectation  keys and a state: 3.5 MB + 64 B a token",
        "└  2 sliding_softmax       a window of keys and values: 512 B each",
    ]


@pytest.mark.parametrize("case", ["softmax_last", "all_recurrent", "all_softmax", "three_cache_kinds"])
def test_the_hub_accepts_the_card(case, tmp_path):
    """And reads back from the file what went in; results come back as results."""
    card = fill(
        tiny_model(case),
        results=RESULTS,
        language=["en", "de"],
        base_model="someone/base",
        datasets=["someone/speeches"],
    )
    card.save(tmp_path / "README.md")
    assert metadata_errors((tmp_path / "README.md").read_text(encoding="utf-8")) == []
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.to_dict() == card.data.to_dict()
    assert [(r.metric_type, r.metric_value, r.dataset_name) for r in data.eval_results] == [
        ("perplexity", 12.34567, "speeches, held out"),
        ("accuracy", "0.5 ± 0.1", "speeches, held out"),
    ]
    assert data.model_name == "small-hybrid" and data.license == "apache-2.0" and data.base_model == "someone/base"
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    # Only what ModelCardData has a field for, so that nothing is a misspelling.
    block = yaml.safe_load(card.data.to_yaml())
    assert set(block) - {"model-index"} <= set(ModelCardData().__dict__)


def test_the_card_says_everything():
    text = fill(tiny_model("softmax_first"), results=RESULTS, limits="Only for tests.", license="mit").text
    for words in (
        "# small-hybrid", "1 softmax + 1 gated_delta_net + 1 mesa_net", "Speeches.", "| steps | 7 |",
        "| speeches, held out | perplexity | 12.35 |", "| accuracy | 0.5 ± 0.1 |", "Only for tests.", "`mit`",
        "@software{avgpath,", 'name = "someone/small-hybrid"', "trust_remote_code=True",
        "arXiv:2412.06464", "arXiv:2506.05233",
    ):  # fmt: skip
        assert words in text
    assert "{{" not in text.replace("= {{AvgPath}", "") and "{%" not in text
    assert "Not evaluated yet." in fill(tiny_model("softmax_first")).text


def test_a_card_without_a_licence_states_none():
    card = fill(tiny_model("softmax_first"), license=None)
    assert card.data.license is None and "license" not in card.data.to_dict()
    assert "Weights: not stated. Code: `apache-2.0`." in card.text


@pytest.mark.parametrize(
    "path", ["sotu", ".", "..", "/", "日本語.jsonl", "a|b.jsonl", "---.jsonl", "some/chats v2.jsonl/"]
)
def test_results_name_their_data_whatever_its_path(path, tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path / "texts")
    source = name_source(path)
    assert source == {
        "sotu": "State of the Union", ".": "texts", "..": tmp_path.name, "/": "local files", "some/chats v2.jsonl/":
        "chats v2.jsonl",
    }.get(path, path)  # fmt: skip
    card = fill(tiny_model("softmax_first"), results=held_out_results(source, {"loss": "loss"}, {"loss": 1.5}))
    assert metadata_errors(card.content) == []
    (result,) = card.data.eval_results
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", result.dataset_type)
    (row,) = [line for line in card.text.splitlines() if ", held out |" in line]
    assert len(re.split(r"(?<!\\)\|", row)) == 5  # three cells


def test_chats_and_adapters_load_their_own_way():
    model = tiny_model("softmax_first")
    chat = fill(model, is_chat=True, prompt="Who's there?").text
    assert 'messages = [{"role": "user", "content": "Who\'s there?"}]' in chat
    assert "tokenizer.apply_chat_template(messages, add_generation_prompt=True" in chat and "tokenizer(" not in chat
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    card = fill(LlamaForCausalLM(config), adapter_of="someone/base", base_model="someone/base")
    assert card.data.library_name == "peft" and card.data.base_model == "someone/base"
    assert metadata_errors(card.content) == []
    assert 'AutoModelForCausalLM.from_pretrained("someone/base"' in card.text and "PeftModel" in card.text
    assert "## Cache" not in card.text and "Its layers come from" not in card.text and "\n\n\n" not in card.text


def test_other_models_have_no_such_card():
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(TypeError, match="a llama model"):
        fill(LlamaForCausalLM(config))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ("license: mine", "license 'mine'"),
        ("language: english", "language 'english'"),
        ("tags: [1]", "tags"),
        ("base_model: runs/pretrain/final", "base_model"),
        ("pipeline_tag: chatting", "pipeline_tag"),
        (
            "model-index: [{name: x, results: [{task: {type: a}, dataset: {type: b}, metrics: [{type: c}]}]}]",
            "dataset.name",
        ),
    ],
)
def test_the_check_itself_finds_mistakes(metadata, words):
    assert any(words in error for error in metadata_errors(f"---\n{metadata}\n---\n# Title\n"))
