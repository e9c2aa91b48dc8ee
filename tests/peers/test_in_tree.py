"""OLMo-Hybrid and dense Qwen3-Next: the converted model computes what Transformers' own does."""

import json

import pytest
import torch
from laws.cases import assert_close, relative_error
from peers.peers_common import SHAPE, make_peer, random_ids
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from modeling_avgpath import AvgPathCache
from modeling_avgpath.peers import from_peer, peer_config, peer_state_dict

HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
CLASSES = {"olmo": (OlmoHybridConfig, OlmoHybridForCausalLM), "qwen": (Qwen3NextConfig, Qwen3NextForCausalLM)}
CASES = {
    "olmo": ("olmo", {}),
    "olmo_nope": (
        "olmo",
        {
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},  # as in the released checkpoints
            "linear_num_value_heads": 4,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "olmo_softmax_first": (
        "olmo",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0},
        },
    ),
    "qwen": ("qwen", {"num_experts": 0, "head_dim": 20, "linear_num_value_heads": 4}),  # an odd quarter is rotated
    "qwen_listed_as_dense": (
        "qwen",
        {
            "num_experts": 4,
            "mlp_only_layers": [0, 1, 2, 3],
            "head_dim": 20,
            "linear_num_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen_all_rotated": (
        "qwen",
        {
            "num_experts": 0,
            "head_dim": 8,
            "linear_num_value_heads": 6,
            "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default", "partial_rotary_factor": 1.0},
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
        },
    ),
}


def build(case: str):
    name, fields = CASES[case]
    config_class, model_class = CLASSES[name]
    return make_peer(model_class, config_class(**{**SHAPE, **HEADS, **fields}))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits(case, plain_kernels):
    """One pass of odd lengths, left padding, and the same text token by token from a cache."""
    theirs = build(case)
    ours = from_peer(theirs)
    assert ours.config.dtype == torch.float32 and not ours.training
    for length in (1, 2, 63, 131):
        ids = random_ids(2, length)
        assert_close(ours(ids).logits, theirs(ids).logits, 2e-5)

    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert_close(
        ours(ids, attention_mask=mask).logits[mask.bool()], theirs(ids, attention_mask=mask).logits[mask.bool()], 2e-5
    )

    cache, their_cache, begin = AvgPathCache(ours.config), DynamicCache(config=theirs.config), 0
    for piece in (67, 1, 1, 1, 3, 1):
        part = ids[:, begin : begin + piece]
        assert_close(ours(part, cache=cache).logits, theirs(part, cache=their_cache).logits, 2e-5)
        begin += piece


@pytest.mark.parametrize("case", ["olmo", "qwen_listed_as_dense"])
def test_gradients(case, plain_kernels):
    """Equal as functions, not only at one point: the gradient of the input embeddings agrees too."""
    theirs = build(case)
    ids = random_ids(2, 66)
    grads = []
    for model in (from_peer(theirs), theirs):
        inputs = theirs.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=inputs).logits.square().mean().backward()
        grads.append(inputs.grad)
    assert_close(*grads, 1e-4)


@pytest.mark.parametrize("case", ["olmo", "qwen"])
def test_generation(case, plain_kernels):
    theirs = build(case)
    theirs.generation_config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    ids = random_ids(2, 9)
    assert torch.equal(from_peer(theirs).generate(ids), theirs.generate(ids))


@pytest.mark.parametrize("case", CASES)
def test_back_to_their_names(case):
    theirs = build(case)
    config = theirs.config
    weights = peer_state_dict(from_peer(theirs), config)
    expected = theirs.state_dict()
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert_close(tensor, expected[name], 1e-6)


@pytest.mark.parametrize("case", ["olmo_nope", "qwen"])
@torch.no_grad()
def test_checkpoint_in_shards(case, tmp_path):
    """A folder gives what the model gives, in its dtype, decay in fp32; and can be saved and loaded as AvgPath."""
    theirs = build(case).to(torch.bfloat16)
    theirs.generation_config.max_new_tokens = 7
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    ours = from_peer(tmp_path / "theirs")
    assert ours.dtype == torch.bfloat16 and ours.generation_config.max_new_tokens == 7
    expected = from_peer(theirs).state_dict()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == (torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16), name
        assert torch.equal(tensor, expected[name]), name

    ours.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids = random_ids(1, 17)
    assert torch.equal(again(ids).logits, ours(ids).logits)


@torch.no_grad()
def test_half_precision(tmp_path, plain_kernels):
    """In bf16 both are off by roundings of the same order, Qwen3-Next's 1 + w included; `dtype` converts without them."""
    build("qwen").save_pretrained(tmp_path)
    theirs = Qwen3NextForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = random_ids(4, 80)
    logits, their_logits = from_peer(theirs)(ids).logits, theirs(ids).logits
    exact = from_peer(theirs, dtype=torch.float32)(ids).logits
    assert logits.dtype == torch.bfloat16 and exact.dtype == torch.float32
    assert relative_error(logits, exact) < 2 * relative_error(their_logits, exact)
    assert_close(from_peer(tmp_path, dtype=torch.float32)(ids).logits, build("qwen")(ids).logits, 2e-5)


def test_back_to_disk(tmp_path):
    """Transformers loads what goes back, although its own checkpoints of OLMo-Hybrid are laid out otherwise."""
    theirs = build("olmo")
    theirs.config.save_pretrained(tmp_path)
    save_file(peer_state_dict(from_peer(theirs), theirs.config), tmp_path / "model.safetensors", {"format": "pt"})
    again, info = OlmoHybridForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name


def test_the_source_is_left_alone():
    theirs = build("olmo")
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    ours = from_peer(theirs, attn_implementation="eager")
    assert ours.config._attn_implementation == "eager"
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("case", CASES)
def test_a_config_is_read_from_json_too(case, tmp_path):
    name, fields = CASES[case]
    config = CLASSES[name][0](**{**SHAPE, **HEADS, **fields})
    config.save_pretrained(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    assert peer_config(contents).to_dict() == peer_config(config).to_dict()
