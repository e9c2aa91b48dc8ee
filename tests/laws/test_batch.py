"""Law 4. Reordering, repeating and selecting rows of the cache commute with running."""

import pytest
import torch
from laws.cases import assert_close, random_ids, state_of
from transformers import StaticCache

from modeling_avgpath import AvgPathCache

VERBS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
}


@pytest.mark.parametrize("verb", VERBS)
@torch.no_grad()
def test_verbs_commute_with_running(model, verb):
    apply, rows = VERBS[verb]
    prompts, continuations = random_ids(3, 19), random_ids(len(rows), 6, seed=3)
    cache = AvgPathCache(model.config)
    model(prompts, cache=cache)
    apply(cache)
    logits = model(continuations, cache=cache).logits

    expected_cache = AvgPathCache(model.config)
    model(prompts[rows], cache=expected_cache)
    assert_close(logits, model(continuations, cache=expected_cache).logits)
    for name, state in state_of(cache).items():
        assert_close(state, state_of(expected_cache)[name])


@torch.no_grad()
def test_rows_at_different_phases(model):
    """Rows of one batch at different places of their mini-batch, then shuffled: each goes on from its own place."""
    texts = [random_ids(length, seed=length) for length in (8, 3, 5)]
    ids, mask = torch.zeros(3, 8, dtype=torch.long), torch.zeros(3, 8, dtype=torch.long)
    for index, text in enumerate(texts):
        ids[index, 8 - len(text) :], mask[index, 8 - len(text) :] = text, 1
    cache = AvgPathCache(model.config)
    model(ids, attention_mask=mask, cache=cache)
    order = torch.tensor([1, 2, 0])
    cache.reorder_cache(order)
    more = random_ids(3, 9, seed=4)
    mask = torch.cat((mask[order], torch.ones(3, 9, dtype=torch.long)), dim=1)
    logits = model(more, attention_mask=mask, cache=cache).logits
    for row, source in enumerate(order.tolist()):
        alone = model(torch.cat((texts[source], more[row]))[None]).logits[0]
        assert_close(logits[row], alone[len(texts[source]) :])


@torch.no_grad()
def test_another_batch_size_is_refused(model):
    cache = AvgPathCache(model.config)
    model(random_ids(2, 5), cache=cache)
    before = {name: state.clone() for name, state in state_of(cache).items()}
    with pytest.raises(ValueError, match="holds 2 rows but the input has 3"):
        model(random_ids(3, 1), cache=cache)
    for name, state in state_of(cache).items():
        assert torch.equal(state, before[name])


@pytest.mark.parametrize("verb", VERBS)
@torch.no_grad()
def test_verbs_on_static_caches(model, verb):
    apply, rows = VERBS[verb]
    ids = random_ids(3, 12)
    cache = StaticCache(config=model.config, max_cache_len=20)
    model(ids[:, :9], cache=cache)
    apply(cache)
    assert_close(model(ids[rows, 9:], cache=cache).logits, model(ids[rows]).logits[:, 9:])
    with pytest.raises(ValueError, match=f"holds {len(rows)} rows but the input has 5"):
        model(random_ids(5, 1), cache=cache)


@torch.no_grad()
def test_rows_that_make_no_sense(model):
    cache = AvgPathCache(model.config)
    model(random_ids(3, 5), cache=cache)
    before = {name: state.clone() for name, state in state_of(cache).items()}
    for verb in (cache.batch_select_indices, cache.reorder_cache):
        for rows in (torch.tensor(1), torch.tensor([], dtype=torch.long), [], torch.tensor([[0]]), torch.tensor([0.0])):
            with pytest.raises(ValueError, match="one-dimensional tensor of at least one integer"):
                verb(rows)
        for rows in (torch.tensor([0, 3]), [-4]):
            with pytest.raises(IndexError, match="holds 3 rows"):
                verb(rows)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        cache.batch_repeat_interleave(0)
    for name, state in state_of(cache).items():
        assert torch.equal(state, before[name])
    cache.batch_select_indices([2, 0])
    cache.batch_select_indices(torch.tensor([False, True]))
    for name, state in state_of(cache).items():
        assert torch.equal(state, before[name][:1])
