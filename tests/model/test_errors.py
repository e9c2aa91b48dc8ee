"""Wrong input, as a new user would give it: the message names the value, the limit and the way out."""

import pytest
import torch
from laws.cases import VOCAB, random_ids, tiny_model
from transformers import LlamaConfig

from modeling_avgpath import AvgPathCache


@pytest.fixture(params=["softmax_last", "all_recurrent", "three_cache_kinds"])
def model(request):
    return tiny_model(request.param)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["exactly one of input_ids and inputs_embeds"]),
        ({"input_ids": random_ids(1, 2), "inputs_embeds": torch.zeros(1, 2, 24)}, ["exactly one"]),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, ["empty", "(1, 0)", "at least one token"]),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, ["empty", "(0, 4)"]),
        ({"inputs_embeds": torch.zeros(1, 0, 24)}, ["inputs_embeds is empty"]),
        ({"input_ids": torch.tensor([1, 2, 3])}, ["batch and a time axis", "(3,)"]),
        ({"input_ids": torch.tensor([[1, VOCAB]])}, [f"{VOCAB - 1}", f"to {VOCAB}", "tokenizer"]),
        ({"input_ids": torch.tensor([[1, -100]])}, ["-100", "labels"]),
        (
            {"input_ids": random_ids(2, 5), "attention_mask": torch.ones(2, 4)},
            ["attention_mask", "(2, 5)", "(2, 4)"],
        ),
        ({"input_ids": random_ids(2, 5), "attention_mask": torch.ones(1, 5)}, ["(2, 5)", "(1, 5)"]),
        ({"input_ids": random_ids(2, 5), "attention_mask": torch.ones(2, 1, 5, 5)}, ["4-dimensional", "2-dimensional"]),
        ({"input_ids": random_ids(2, 5), "position_ids": torch.arange(4)[None]}, ["position_ids", "(2, 5)", "(1, 4)"]),
        ({"input_ids": [[1, 2]]}, ["input_ids must be a tensor", "list"]),
        ({"input_ids": torch.ones(1, 3)}, ["integer tensor", "torch.float32"]),
        ({"inputs_embeds": torch.ones(1, 3, 24, dtype=torch.long)}, ["floating-point tensor", "torch.int64"]),
        (
            {"input_ids": random_ids(1, 2), "attention_mask": torch.tensor([[0.0, -1e9]])},
            ["additive", "1 at real tokens"],
        ),
        ({"input_ids": random_ids(1, 2), "cache": ()}, ["AvgPathCache(model.config)", "tuple"]),
    ],
)
def test_inputs(model, arguments, words):
    with pytest.raises((ValueError, TypeError)) as error:
        model(**arguments)
    for word in words:
        assert word in str(error.value)


def test_mask_must_cover_the_cached_tokens(model):
    cache = AvgPathCache(model.config)
    model(random_ids(2, 5), cache=cache)
    with pytest.raises(ValueError, match=r"\(2, 8\) \(5 cached \+ 3 new\), got \(2, 3\)"):
        model(random_ids(2, 3), cache=cache, attention_mask=torch.ones(2, 3))
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("other", ["all_softmax", "softmax_first", "delta_net"])
def test_a_cache_of_another_model_is_refused(model, other):
    stranger = tiny_model(other)
    cache = AvgPathCache(stranger.config)
    stranger(random_ids(2, 5), cache=cache)
    before = cache.nbytes
    with pytest.raises(ValueError, match="belongs to another model"):
        model(random_ids(2, 3), cache=cache)
    assert cache.nbytes == before and cache.get_seq_length() == 5


def test_a_cache_of_other_shapes_is_refused():
    """The same mixers with another head width."""
    stranger, model = tiny_model("all_recurrent"), tiny_model("all_recurrent", linear_key_head_dim=4)
    cache = AvgPathCache(stranger.config)
    stranger(random_ids(1, 5), cache=cache)
    with pytest.raises(ValueError, match="another model"):
        model(random_ids(1, 3), cache=cache)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "swishh"}, ["'swishh'", "silu"]),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, ["'foo'", "yarn"]),
        ({"pad_token_id": VOCAB}, [f"pad_token_id {VOCAB}", f"{VOCAB - 1}"]),
    ],
)
def test_fields_that_the_model_cannot_use(fields, words):
    with pytest.raises((ValueError, KeyError)) as error:
        tiny_model("softmax_last", **fields)
    for word in words:
        assert word in str(error.value)


def test_a_cache_needs_our_config():
    with pytest.raises(TypeError, match="AvgPathConfig"):
        AvgPathCache(LlamaConfig())


@torch.no_grad()
def test_fp16_on_a_cpu_works(model):
    logits = model.half()(random_ids(1, 70)).logits
    assert logits.dtype == torch.float16 and logits.isfinite().all()


def test_a_state_cannot_forget(model):
    """Until a cache records its past, removing tokens is refused with the way out, and nothing changes."""
    cache = AvgPathCache(model.config)
    model(random_ids(1, 5), cache=cache)
    with pytest.raises(RuntimeError, match="Cannot remove 2 tokens"):
        cache.crop(-2)
    assert not cache.is_croppable
