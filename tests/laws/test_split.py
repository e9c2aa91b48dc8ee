"""Law 1. Any split of a sequence into cached forwards gives the logits and the final state of one pass."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws.cases import LAYOUTS, LENGTHS, assert_close, assert_same_state, random_ids, tiny_model

from modeling_avgpath import AvgPathCache


def run_in_pieces(model, ids, pieces):
    cache, logits, begin = AvgPathCache(model.config), [], 0
    for piece in pieces:
        logits.append(model(ids[:, begin : begin + piece], cache=cache).logits)
        begin += piece
    assert begin == ids.shape[1]
    return torch.cat(logits, dim=1), cache


@torch.no_grad()
def test_any_split_equals_one_pass(model):
    length = LENGTHS[-1]
    ids = random_ids(2, length)
    expected, expected_cache = run_in_pieces(model, ids, [length])
    assert_close(expected, model(ids, use_cache=False).logits)
    for pieces in (
        [1] * length,
        [2, 3, 1, 4, 1, 63, 57],  # shorter than the convolution's kernel, the mini-batch and the chunk, and around them
        [64, 1, 64, 2],
        [128, 3],
    ):
        logits, cache = run_in_pieces(model, ids, pieces)
        assert_close(logits, expected)
        assert_same_state(cache, expected_cache)
        assert cache.get_seq_length() == length


@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_every_length_continues(model, length):
    """A prompt of each odd length, then one token, then a few more."""
    ids = random_ids(1, length + 7, seed=length)
    expected = model(ids, use_cache=False).logits
    logits, _ = run_in_pieces(model, ids, [length, 1, 6])
    assert_close(logits, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@torch.no_grad()
def test_random_splits(layout, pieces):
    model = tiny_model(layout)
    ids = random_ids(1, sum(pieces))
    logits, cache = run_in_pieces(model, ids, pieces)
    expected, expected_cache = run_in_pieces(model, ids, [sum(pieces)])
    assert_close(logits, expected)
    assert_same_state(cache, expected_cache)
