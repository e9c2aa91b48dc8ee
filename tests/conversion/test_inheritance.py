# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Weights taken over: layers that stay softmax compute what they did, for every family and shape of head."""

import copy

import pytest
import torch
from laws.cases import SPECS, random_ids, relative_error, tiny_model
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from modeling_avgpath import AvgPathForCausalLM
from modeling_avgpath.conversion import calibrate, conversion_config, from_softmax
from modeling_avgpath.conversion_start import LINEAR_RANGE

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama_wide_heads": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16}),
    "llama_biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama_one_key_head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama_yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "llama_llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama_linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR}),
    "llama_longrope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LONG}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral_window": (MistralForCausalLM, MistralConfig, {"sliding_window": 9}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2_window": (
        Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
}  # fmt: skip


def make_source(family: str):
    """A random model whose every weight matters: norms off 1, biases off 0."""
    model_class, config_class, fields = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_all_softmax_gives_the_source(family):
    """Over the trained length of the rotary embedding, padded, and token by token from a cache."""
    source = make_source(family)
    before = copy.deepcopy(source.state_dict())
    model = from_softmax(source)
    ids = random_ids(2, 70)
    expected = source(ids).logits
    assert relative_error(model(ids).logits, expected) < 1e-5
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    padded = [net(ids, attention_mask=mask).logits[1, 20:] for net in (model, source)]
    assert relative_error(*padded) < 1e-5
    prompt = ids[:1, :12]
    generated = [net.generate(prompt, max_new_tokens=12, do_sample=False) for net in (model, source)]
    assert torch.equal(*generated)
    assert model.config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert all(torch.equal(before[name], weight) for name, weight in source.state_dict().items())


@torch.no_grad()
def test_softmax_means_what_the_source_has_there():
    source = make_source("qwen2_window")
    model = from_softmax(source, layer_pattern=["mesa_net", "softmax"])
    assert model.config.mixer_types == ["mesa_net", "softmax", "mesa_net", "sliding_softmax"]
    weights = {name.replace(".self_attn.", ".mixer."): weight for name, weight in source.state_dict().items()}
    for name, weight in model.state_dict().items():
        if ".mixer." not in name or name.split(".")[2] in "13":
            assert torch.equal(weight, weights.get(name, torch.zeros_like(weight))), name


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.endswith("softmax")])
def test_every_mixer_begins_from_a_softmax_model(spec, tmp_path):
    """Built, trained a step, run, saved and loaded, in a hybrid of any depth and all by itself."""
    source = make_source("llama")
    model = from_softmax(source, mixer=spec, hybrid_ratio="3:1")
    assert model.config.mixer_types == [spec] * 3 + ["softmax"]
    ids = random_ids(2, 20)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite()
    mixer = model.model.layers[0].mixer
    assert all(
        bool(p.grad.abs().sum() > 0) for n, p in mixer.named_parameters() if n.endswith("proj.weight") and n[0] in "qo"
    )
    model.save_pretrained(tmp_path)
    again = AvgPathForCausalLM.from_pretrained(tmp_path).eval()
    tokens = [net.generate(ids[:, :5], max_new_tokens=6, do_sample=False) for net in (model, again)]
    assert torch.equal(*tokens) and tokens[0].shape == (2, 11)
    whole = from_softmax(source, mixer=spec, hybrid_ratio="1:0")
    assert whole(ids).logits.isfinite().all()


@torch.no_grad()
def test_key_heads_are_repeated_by_head():
    """Query head h has the key and value projections of head h // 3, in directions, and its own columns of o_proj."""
    source = make_source("llama")
    model = from_softmax(source, mixer="gated_delta_net", hybrid_ratio="1:0")
    attention, mixer = source.model.layers[1].self_attn, model.model.layers[1].mixer
    for name in "kv":
        theirs = getattr(attention, f"{name}_proj").weight.view(2, 8, 48)
        ours = getattr(mixer, f"{name}_proj").weight.view(6, 8, 48)
        for head in range(6):
            ratio = ours[head] / theirs[head // 3]
            torch.testing.assert_close(ratio, ratio.flatten()[:1].expand_as(ratio), rtol=1e-3, atol=1e-6)
    columns = mixer.o_proj.weight.view(48, 6, 8) / attention.o_proj.weight.view(48, 6, 8)
    for head in range(6):
        torch.testing.assert_close(columns[:, head], columns[:1, head, :1].expand(48, 8), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("fields", [{}, {"linear_conv_kernel_dim": None}, {"linear_use_output_gate": False}])
@torch.no_grad()
def test_a_stored_pair_is_read_back(fields):
    """One token: its key is stored and read at the very same query, so the layer returns the source's v, times beta.

    Whatever stands between: convolution with SiLU, L2 norms, the op's scale, the gate.
    """
    source = make_source("llama")
    for layer in source.model.layers:  # queries that are their keys
        layer.self_attn.q_proj.weight.copy_(
            layer.self_attn.k_proj.weight.view(2, 8, 48).repeat_interleave(3, 0).flatten(0, 1)
        )
    model = from_softmax(source, mixer="delta_net", hybrid_ratio="1:0", **fields)
    x = torch.randn(5, 1, 48)
    cos, sin = source.model.rotary_emb(x, torch.zeros(1, 1, dtype=torch.long))
    expected = source.model.layers[0].self_attn(x, position_embeddings=(cos, sin), attention_mask=None)[0]
    found = model.model.layers[0].mixer(x)[0]
    assert relative_error(found, 0.5 * expected) < (
        1e-4 if fields == {"linear_conv_kernel_dim": None} else 2 * LINEAR_RANGE
    )


@torch.no_grad()
def test_attention_readouts_score_as_the_source_does():
    """Keys stay grouped; a convolution before the scores is possible behind QK norms alone."""
    source = make_source("qwen3")
    model = from_softmax(source, mixer="delta_net@mean_field", hybrid_ratio="1:0")
    theirs, ours = source.model.layers[0].self_attn, model.model.layers[0].mixer
    assert model.config.linear_conv_kernel_dim == 4  # QK norms forget how small the convolution's inputs are
    assert torch.equal(ours.q_norm.weight, theirs.q_norm.weight)
    ratio = ours.k_proj.weight / theirs.k_proj.weight  # grouped as they were
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio), rtol=1e-3, atol=1e-6)
    plain = from_softmax(make_source("llama"), mixer="delta_net@mean_field", hybrid_ratio="1:0")
    assert plain.config.linear_conv_kernel_dim is None
    assert torch.equal(
        plain.model.layers[0].mixer.k_proj.weight, make_source("llama").model.layers[0].self_attn.k_proj.weight
    )


@torch.no_grad()
def test_a_source_whose_values_are_its_keys_is_an_identity_memory():
    """Step 2 is exact there: the mean key, rotated for the scores alone, is the mean value."""
    source = make_source("llama_wide_heads")
    for layer in source.model.layers:
        layer.self_attn.v_proj.weight.copy_(layer.self_attn.k_proj.weight)
    model = from_softmax(source, mixer="identity@mean_field", hybrid_ratio="1:0")
    ids = random_ids(2, 40)
    assert relative_error(model(ids).logits, source(ids).logits) < 1e-5


@torch.no_grad()
def test_a_hybrid_is_converted_further():
    """Layers that were converted before stay as they are; the dtype, the generation config and the mode come along."""
    first = from_softmax(make_source("llama"), ["gated_delta_net", "softmax", "softmax", "softmax"])
    first.generation_config.max_new_tokens = 7
    second = from_softmax(first, ["gated_delta_net", "softmax", "mesa_net", "softmax"], dtype=torch.bfloat16)
    assert second.config.mixer_types == ["gated_delta_net", "softmax", "mesa_net", "softmax"]
    assert second.generation_config.max_new_tokens == 7 and not second.training
    assert second.model.layers[2].mixer.lambda_params.dtype == torch.float32
    for index in (0, 1, 3):
        for name, weight in first.model.layers[index].state_dict().items():
            assert torch.equal(
                second.model.layers[index].state_dict()[name],
                weight.to(second.model.layers[index].state_dict()[name].dtype),
            )
    ids = random_ids(1, 30)
    assert relative_error(from_softmax(first)(ids).logits, first(ids).logits) < 1e-6


def test_the_hub_folder_loads_without_the_source(tmp_path):
    model = from_softmax(make_source("qwen3"), mixer="gated_delta_net", hybrid_ratio="1:1")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "modeling_avgpath.py").exists()
    assert not (tmp_path / "conversion.py").exists()  # nothing of the conversion travels with it
    ids = random_ids(1, 9)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def with_scaling(scaling: float) -> LlamaForCausalLM:
    model = make_source("llama")
    for layer in model.model.layers:
        layer.self_attn.scaling = scaling
    return model


def with_head_bias() -> LlamaForCausalLM:
    model = make_source("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.ones(model.config.vocab_size))
    return model


def test_refusals():
    """By name, with the way out."""
    llama = make_source("llama")
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20))
    quantised = make_source("llama")
    quantised.config.quantization_config = {"quant_method": "bitsandbytes"}
    hybrid = tiny_model("softmax_last")
    for call, error, words in (
        (lambda: from_softmax(gpt2), ValueError, "gpt2"),
        (lambda: from_softmax("a/path"), TypeError, "Transformers model"),
        (lambda: from_softmax(LlamaModel(llama.config)), TypeError, "head"),
        (lambda: from_softmax(quantised), ValueError, "quantised"),
        (lambda: from_softmax(llama, ["softmax"] * 3), ValueError, "num_hidden_layers is 4"),
        (lambda: from_softmax(llama, mixer="delta"), ValueError, "delta_net"),
        (lambda: from_softmax(llama, mixer="delta_net", hidden_size=64), ValueError, "hidden_size=48"),
        (
            lambda: from_softmax(hybrid, mixer="delta_net", hybrid_ratio="1:0"),
            ValueError,
            "Layer 0 of the source is linear",
        ),
        (
            lambda: from_softmax(llama, mixer="mesa_net", linear_num_key_heads=2, linear_num_value_heads=6),
            ValueError,
            "2 key heads of 8 and 6 value heads of 8 cannot take over the source's 6 query heads of 8",
        ),
        (lambda: from_softmax(llama, mixer="mesa_net", linear_key_head_dim=16), ValueError, "6 query heads of 8"),
        (
            lambda: from_softmax(llama, mixer="mesa_net@mean_field", linear_conv_kernel_dim=4),
            ValueError,
            "linear_conv_kernel_dim=None",
        ),
        (lambda: from_softmax(llama, linear_conv_kernl_dim=2), TypeError, "did you mean 'linear_conv_kernel_dim'"),
        (lambda: from_softmax(with_scaling(2.0)), ValueError, "scales its scores by 2.0"),
        (lambda: from_softmax(with_head_bias()), ValueError, "lm_head has a bias"),
    ):
        with pytest.raises(error, match=words):
            call()
    other = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 2, "num_attention_heads": 4}))
    calibration = calibrate(other, [random_ids(1, 8)])
    with pytest.raises(ValueError, match=r"does not know layers \[2, 3\]"):
        from_softmax(llama, mixer="delta_net", hybrid_ratio="1:0", calibration=calibration)
    with pytest.raises(ValueError, match="4 heads of 12 and width 48"):
        from_softmax(llama, ["delta_net", "softmax", "softmax", "softmax"], calibration=calibration)
    short = LlamaForCausalLM(LlamaConfig(**SHAPE | {"max_position_embeddings": 8}))
    with pytest.raises(ValueError, match="text has 9 tokens, more than .*max_position_embeddings=8"):
        from_softmax(short, mixer="delta_net", calibration=calibrate(llama, [random_ids(1, 9)]))


def test_what_cannot_be_calibrated_on():
    llama, ids = make_source("llama"), random_ids(2, 9)
    mask = torch.ones(2, 9)
    mask[0, 0] = 0
    for batches, words in (
        ([random_ids(1, 129)], "A batch has 129 tokens, more than .*max_position_embeddings=128"),
        ([ids[:, :1]], "1 tokens, and 2 are the least"),
        ([["a text"]], "token ids .B, T., got list"),
        ([ids.float()], "got torch.float32"),
        ([ids[:0]], r"\(0, 9\)"),
        (ids, r"got torch.int64 \(9,\); `batches` is an iterable"),
        ([ids + 1000], "outside the vocabulary 0"),
        ([{"ids": ids}], "has the keys ids, but no input_ids"),
        ([{"input_ids": ids, "attention_mask": mask}], "is padded"),
        ([], "no text"),
    ):
        with pytest.raises(ValueError, match=words):
            calibrate(llama, batches)
    with pytest.raises(ValueError, match="fit_tokens=0 must be at least 1"):
        calibrate(llama, [ids], fit_tokens=0)
    with torch.no_grad():
        llama.model.layers[1].self_attn.q_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="activations of layer 1 are not finite"):
        calibrate(llama, [ids])


def test_the_config_alone():
    config = conversion_config(make_source("llama"), mixer="ttt_linear", ttt_mini_batch_size=8)
    assert config.mixer_types == ["ttt_linear"] * 3 + ["softmax"]
    assert config.ttt_mini_batch_size == 8 and not config.linear_use_output_gate and config.query_map
