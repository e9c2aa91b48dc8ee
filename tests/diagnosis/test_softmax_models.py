# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Softmax checkpoints read layer by layer: what is seen gives the layer's own output, and models that cannot be read."""

import pytest
import torch
from diagnosis.softmax_cases import CASES, make_model
from laws.cases import assert_close, random_ids, tiny_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_avgpath.softmax_models import softmax_layers, watch


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_what_is_seen_of_a_layer_gives_its_output(case):
    model, ids = make_model(case), random_ids(2, 23)
    layers = softmax_layers(model)
    rebuilt = []

    def visit(seen):
        assert seen.q.shape == (2, 23, seen.layer.num_heads, seen.layer.head_dim)
        assert seen.k.shape == seen.v.shape == (2, 23, seen.layer.num_key_value_heads, seen.layer.head_dim)
        rebuilt.append(seen.layer.index)
        assert_close(seen.layer.project_output(seen.averages(), seen.hidden_states), seen.output, 1e-5)

    with watch(layers, visit):
        model(input_ids=ids, use_cache=False)
    assert rebuilt == [layer.index for layer in layers]


@torch.no_grad()
def test_a_visit_may_replace_the_output_and_leaves_nothing_behind():
    model, ids = make_model("llama"), random_ids(1, 9)
    layers = softmax_layers(model)
    exact = model(input_ids=ids).logits
    with watch(layers[1:], lambda seen: torch.zeros_like(seen.output)):
        replaced = model(input_ids=ids).logits
    with pytest.raises(RuntimeError, match="stop"), watch(layers, fail):
        model(input_ids=ids)
    assert torch.equal(model(input_ids=ids).logits, exact)
    model.model.layers[1].self_attn.o_proj.weight.zero_()
    model.model.layers[1].self_attn.o_proj.bias.zero_()
    assert_close(replaced, model(input_ids=ids).logits, 1e-6)


def fail(seen):
    raise RuntimeError("stop")


def test_hybrids_show_their_softmax_layers_alone():
    assert [layer.index for layer in softmax_layers(make_model("avgpath_post_norm"))] == [1]
    assert [layer.sliding_window for layer in softmax_layers(make_model("avgpath_sliding"))] == [7, None]
    assert [layer.sliding_window for layer in softmax_layers(make_model("qwen2"))] == [None, 5]
    assert [layer.sliding_window for layer in softmax_layers(make_model("mistral"))] == [7, 7]


def test_other_models_are_refused():
    gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10, n_positions=8))
    with pytest.raises(ValueError, match="'gpt2' .*not supported. Known: llama, mistral, qwen2, qwen3, avgpath"):
        softmax_layers(gpt)
    with pytest.raises(TypeError, match="got Linear"):
        softmax_layers(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no softmax layer, only delta_net, mesa_net, ttt_linear"):
        softmax_layers(tiny_model("all_recurrent"))
    model = make_model("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError, match="quantised"):
        softmax_layers(model)
    model = make_model("llama")
    model.lm_head.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="quantised"):
        softmax_layers(model)
    model = make_model("llama")
    model.peft_config = {"default": object()}
    with pytest.raises(ValueError, match="merge_and_unload"):
        softmax_layers(model)
