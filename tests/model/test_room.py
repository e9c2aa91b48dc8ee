"""Keys and values grow in place, and nobody who holds an older tensor or a copy of the cache can tell."""

import copy

import pytest
import torch
from laws.cases import random_ids, tiny_model

from modeling_avgpath import AvgPathCache
from modeling_avgpath.cache_room import ROOM, GrowingTensors

GROWING = ("softmax", "identity@mean_field")


def chunk(length):
    return torch.randn(2, 3, length, 4)


@torch.no_grad()
def test_appends_as_cat_does_without_copying():
    growing, held = GrowingTensors(), chunk(5)
    expected, addresses, earlier = held, [], []
    for length in [1] * (2 * ROOM) + [ROOM + 9, 1, 3]:
        new = chunk(length)
        held = growing.append("keys", held, new, dim=-2)
        expected = torch.cat((expected, new), dim=-2)
        earlier.append((held, held.clone()))
        addresses.append(held.data_ptr())
    torch.testing.assert_close(held, expected, rtol=0, atol=0)
    assert all(torch.equal(tensor, copied) for tensor, copied in earlier)
    assert len(dict.fromkeys(addresses)) == 3


@torch.no_grad()
@pytest.mark.parametrize("change", [torch.clone, lambda held: held[:, :, :-2], lambda held: held[[1, 0]]])
def test_only_the_last_result_owns_the_room(change):
    """Whatever else is appended to, even if it shares memory, is copied first."""
    growing, held = GrowingTensors(), chunk(5)
    held = growing.append("keys", held, chunk(1), dim=-2)
    other = change(held)
    before = held.clone(), other.clone()
    new = chunk(2)
    grown = growing.append("keys", other, new, dim=-2)
    torch.testing.assert_close(grown, torch.cat((before[1], new), dim=-2), rtol=0, atol=0)
    torch.testing.assert_close(held, before[0], rtol=0, atol=0)


@torch.no_grad()
def test_a_shortened_tensor_keeps_the_room():
    growing = GrowingTensors()
    held = growing.append("keys", chunk(5), chunk(3), dim=-2)
    start, address = held[:, :, :4].clone(), held.data_ptr()
    short, new = growing.shorten("keys", held, 4, dim=-2), chunk(2)
    grown = growing.append("keys", short, new, dim=-2)
    assert grown.data_ptr() == address
    torch.testing.assert_close(grown, torch.cat((start, new), dim=-2), rtol=0, atol=0)


def test_graphs_and_inference_mode():
    growing, held, query = GrowingTensors(), chunk(5), torch.randn(2, 3, 1, 4, requires_grad=True)
    held = growing.append("keys", held, chunk(1), dim=-2)
    score = (query @ held.mT).sum()
    with torch.no_grad():
        held = growing.append("keys", growing.append("keys", held, chunk(1), dim=-2), chunk(1), dim=-2)
    with torch.inference_mode():
        held = growing.append("keys", growing.append("keys", held, chunk(1), dim=-2), chunk(1), dim=-2)
    with torch.no_grad():
        held = growing.append("keys", held, chunk(1), dim=-2)
    held = growing.append("keys", held, chunk(1), dim=-2)
    assert held.shape[-2] == 12
    score.backward()  # a saved tensor that was written to since would raise


@torch.no_grad()
@pytest.mark.parametrize("spec", GROWING)
@pytest.mark.parametrize("copied", [AvgPathCache.fork, copy.copy, copy.deepcopy], ids=["fork", "copy", "deepcopy"])
def test_a_copy_and_its_original_do_not_meet_in_one_buffer(spec, copied):
    """Both go back and on by different tokens; each continues as a cache of its own text does."""
    model, ids = tiny_model(spec), random_ids(1, 30)
    cache = AvgPathCache(model.config)
    cache.activate_past_recording(8)
    for token in ids[:, :20].split(1, dim=1):
        model(token, cache=cache)
    twin = copied(cache)
    if copied is copy.copy:  # a shallow copy shares the layers: these are copied as the model copies them
        twin.layers = [copy.copy(layer) if spec == "softmax" else layer.snapshot() for layer in cache.layers]
    for each, text in ((cache, ids[:, 20:25]), (twin, ids[:, 25:30])):
        each.crop(-3)
        for token in text.split(1, dim=1):
            model(token, cache=each)
    for each, text in ((cache, ids[:, 20:25]), (twin, ids[:, 25:30])):
        logits = model(ids[:, :1], cache=each).logits
        whole = model(torch.cat((ids[:, :17], text, ids[:, :1]), dim=1), use_cache=False).logits[:, -1:]
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("spec", GROWING)
def test_decoding_copies_keys_seldom(spec):
    model, ids = tiny_model(spec), random_ids(1, 80)
    cache, addresses = AvgPathCache(model.config), set()
    for token in ids.split(1, dim=1):
        model(token, cache=cache)
        layer = cache.layers[0]
        addresses.add((layer.keys if spec == "softmax" else layer.states["keys"]).data_ptr())
    assert len(addresses) == 2  # the first token's, and one buffer from there on
