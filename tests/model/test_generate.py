"""Generation: greedy, sampling and beams, with the cache and without, padded and alone."""

import pytest
import torch
from laws.cases import CASES, random_ids, tiny_model
from transformers import DynamicCache

from modeling_avgpath import AvgPathCache

NEW = 12


@pytest.fixture(params=list(CASES))
def model(request):
    return tiny_model(request.param)


def left_padded(rows):
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
    return ids, mask


def test_greedy_with_cache_equals_without_and_alone(model):
    """A batch of three with different left padding: with cache, without, and each row alone."""
    rows = [random_ids(length, seed=length) for length in (3, 17, 9)]
    ids, mask = left_padded(rows)
    arguments = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    cached = model.generate(ids, attention_mask=mask, **arguments)
    uncached = model.generate(ids, attention_mask=mask, use_cache=False, **arguments)
    assert torch.equal(cached, uncached)
    for row, continuation in zip(rows, cached[:, ids.shape[1] :], strict=True):
        alone = model.generate(row[None], **arguments)[0, len(row) :]
        assert torch.equal(alone, continuation)


def test_sampling_with_cache_equals_without(model):
    ids = random_ids(2, 6)
    arguments = {"do_sample": True, "top_k": 20, "max_new_tokens": NEW, "min_new_tokens": NEW}
    torch.manual_seed(7)
    cached = model.generate(ids, **arguments)
    torch.manual_seed(7)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **arguments))


def test_beam_search_with_cache_equals_without(model):
    ids, mask = left_padded([random_ids(5), random_ids(8, seed=2)])
    arguments = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": 8}
    cached = model.generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **arguments))


def test_generate_builds_our_cache_and_continues_from_it(model):
    ids = random_ids(1, 7)
    arguments = {"do_sample": False, "return_dict_in_generate": True}
    first = model.generate(ids, max_new_tokens=5, min_new_tokens=5, **arguments)
    assert type(first.cache) is AvgPathCache
    assert first.cache.get_seq_length() == 11  # the last token has not been read yet
    mask = torch.ones_like(first.sequences)  # without it generate() takes generated pad ids for padding
    again = model.generate(
        first.sequences, attention_mask=mask, cache=first.cache, max_new_tokens=6, min_new_tokens=6, **arguments
    )
    straight = model.generate(ids, max_new_tokens=11, min_new_tokens=11, **arguments)
    assert torch.equal(again.sequences, straight.sequences)


@pytest.mark.parametrize("with_config", [True, False])
def test_a_plain_dynamic_cache_works(model, with_config):
    ids = random_ids(2, 9)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    with torch.no_grad():
        expected = model(ids).logits
        first = model(ids[:, :4], cache=cache).logits
        second = model(ids[:, 4:], cache=cache).logits
    torch.testing.assert_close(torch.cat((first, second), dim=1), expected, rtol=1e-3, atol=1e-3)
    generated = model.generate(ids, cache=DynamicCache(config=model.config), max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=4, do_sample=False))


def test_inputs_embeds(model):
    ids = random_ids(2, 6)
    arguments = {"do_sample": False, "max_new_tokens": 5}
    embeddings = model.get_input_embeddings()(ids).detach()
    from_embeddings = model.generate(inputs_embeds=embeddings, **arguments)
    assert torch.equal(from_embeddings, model.generate(ids, **arguments)[:, 6:])
