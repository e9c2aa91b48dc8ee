"""Law 5. After crop(-n) the continuation equals one that never saw the n tokens; deeper crops change nothing."""

import pytest
import torch
from laws.cases import assert_close, assert_same_state, random_ids, state_of, tiny_model
from transformers import DynamicCache, StaticCache

from modeling_avgpath import AvgPathCache


def cache_of(model, *pieces, record: int | None = None):
    cache = AvgPathCache(model.config)
    if record is not None:
        cache.activate_past_recording(record)
    for piece in pieces:
        model(piece, cache=cache)
    return cache


@pytest.mark.parametrize("removed", [1, 4, 5, 6, 11, 17, 30])
@torch.no_grad()
def test_continuation_never_saw_the_removed_tokens(model, removed):
    """Several forwards, then back into the last, to between two, and into the middle of an earlier one."""
    pieces = [random_ids(2, length, seed=length) for length in (20, 12, 1, 5)]
    more = random_ids(2, 7, seed=50)
    cache = cache_of(model, *pieces, record=40)
    assert cache.is_croppable
    cache.crop(-removed)
    kept = torch.cat(pieces, dim=1)[:, : 38 - removed]
    expected = cache_of(model, kept)
    assert cache.get_seq_length() == 38 - removed
    assert_same_state(cache, expected)
    assert_close(model(more, cache=cache).logits, model(more, cache=expected).logits)


@torch.no_grad()
def test_crops_in_a_row_and_in_turn_with_reading(model):
    ids = random_ids(1, 30)
    cache = cache_of(model, ids, record=30)
    cache.crop(-3)
    cache.crop(-5)
    model(random_ids(1, 9, seed=2), cache=cache)
    cache.crop(-10)  # the nine, and one more
    assert_same_state(cache, cache_of(model, ids[:, :21]))
    cache.crop(-21)
    assert cache.get_seq_length() == 0
    assert_close(model(ids, cache=cache).logits, model(ids).logits)


@torch.no_grad()
def test_padded_rows_roll_back(model):
    ids, mask = random_ids(2, 16), torch.ones(2, 16, dtype=torch.long)
    mask[0, :5], mask[1, 13:15] = 0, 0
    cache = AvgPathCache(model.config)
    cache.activate_past_recording()
    model(ids, attention_mask=mask, cache=cache)
    cache.crop(-6)
    expected = AvgPathCache(model.config)
    model(ids[:, :10], attention_mask=mask[:, :10], cache=expected)
    more, more_mask = random_ids(2, 4, seed=3), torch.ones(2, 4, dtype=torch.long)
    mask = torch.cat((mask[:, :10], more_mask), dim=1)
    actual = model(more, attention_mask=mask, cache=cache).logits
    assert_close(actual, model(more, attention_mask=mask, cache=expected).logits)


@pytest.mark.parametrize("pieces", [(16,), (9, 7), (3, 3, 10)])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_padding_that_all_rows_share_rolls_back(model, pieces, static):
    """Padding in the same place of every row, before and in between: layers that keep keys store none for it."""
    ids, mask = random_ids(2, 16), torch.ones(2, 20, dtype=torch.long)
    mask[:, :5], mask[:, 8:10] = 0, 0
    make = (lambda: StaticCache(model.config, max_cache_len=24)) if static else (lambda: AvgPathCache(model.config))
    for removed in (1, 6, 12):
        cache, start = make(), 0
        for index, length in enumerate(pieces):
            if index == 0 and not static:
                cache.activate_past_recording()
            model(ids[:, start : start + length], attention_mask=mask[:, : start + length], cache=cache)
            start += length
            if index == 0 and static:  # it records from its second forward pass on
                cache.activate_past_recording()
        if static and removed > 16 - pieces[0]:
            continue
        cache.crop(-removed)
        kept = 16 - removed
        more, continued = random_ids(2, 4, seed=3), mask[:, : kept + 4]
        actual = model(more, attention_mask=continued, cache=cache).logits
        whole = model(torch.cat((ids[:, :kept], more), dim=1), attention_mask=continued).logits[:, kept:]
        is_real = continued[:, kept:].bool()
        assert_close(actual[is_real], whole[is_real])


@torch.no_grad()
def test_rollback_after_rows_were_selected(model):
    ids = random_ids(3, 14)
    cache = cache_of(model, ids, record=8)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.crop(-6)
    assert_same_state(cache, cache_of(model, ids[[2, 2, 0], :8]))


@torch.no_grad()
def test_beyond_the_recorded_depth_nothing_changes(model):
    cache = cache_of(model, random_ids(1, 20), record=6)
    holds_its_past = all(not hasattr(layer, "states") for layer in cache.layers)
    before = {name: state.clone() for name, state in state_of(cache).items()}
    for count, error in ((7, RuntimeError), (21, ValueError)):
        if holds_its_past and count == 7:
            continue
        with pytest.raises(error, match=f"Cannot remove {count} tokens"):
            cache.crop(-count)
    with pytest.raises(ValueError, match="got 2"):
        cache.crop(2)
    for count in (-1.5, "3", None):
        with pytest.raises(TypeError, match=f"an integer such as -2; got {count!r}"):
            cache.crop(count)
    assert cache.get_seq_length() == 20
    for name, state in state_of(cache).items():
        assert torch.equal(state, before[name])


@torch.no_grad()
def test_crop_zero_forgets_and_keeps_the_state(model):
    cache = cache_of(model, random_ids(1, 9), record=9)
    before = {name: state.clone() for name, state in state_of(cache).items()}
    cache.crop(0)
    for name, state in state_of(cache).items():
        assert torch.equal(state, before[name])
    plain = cache_of(model, random_ids(1, 9))
    assert cache.nbytes == plain.nbytes


@torch.no_grad()
def test_what_is_recorded_does_not_grow_with_the_text(model):
    """The bytes beyond those of an unrecorded cache are the same after 50 and after 500 tokens, in one piece or many."""

    def extra(*pieces) -> int:
        return cache_of(model, *pieces, record=10).nbytes - cache_of(model, *pieces).nbytes

    assert extra(random_ids(1, 500)) == extra(random_ids(1, 50))
    single = [random_ids(1, 1, seed=step) for step in range(60)]
    assert extra(*single) == extra(*single[:40])


def test_depth_must_be_positive(model):
    with pytest.raises(ValueError, match="at least 1, got 0"):
        AvgPathCache(model.config).activate_past_recording(0)
    with pytest.raises(TypeError, match="must be an integer, got 2.5"):
        AvgPathCache(model.config).activate_past_recording(2.5)


@torch.no_grad()
def test_a_plain_dynamic_cache_records_too(model):
    """Recording asked of a DynamicCache before its layers became ours."""
    ids = random_ids(1, 12)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(ids, cache=cache)
    cache.crop(-4)
    more = random_ids(1, 3, seed=2)
    assert_close(model(more, cache=cache).logits, model(torch.cat((ids[:, :8], more), dim=1)).logits[:, 8:])


@pytest.mark.parametrize(
    "make",
    [
        lambda config: DynamicCache(config=config),
        lambda config: DynamicCache(config=config, offloading=True),
        lambda config: StaticCache(config=config, max_cache_len=20),
        lambda config: StaticCache(config=config, max_cache_len=20, offloading=True),
    ],
    ids=["dynamic", "offloaded", "static", "offloaded_static"],
)
@torch.no_grad()
def test_caches_of_transformers_are_not_cropped_in_part(make):
    """They become ours, whose crop checks all layers first."""
    model = tiny_model("softmax_first")
    cache = make(model.config)
    ids, more = random_ids(1, 9), random_ids(1, 3, seed=2)
    model(ids, cache=cache)
    nbytes = cache.nbytes
    for count, error in ((-2, RuntimeError), (-10, ValueError), (2, ValueError), (-1.0, TypeError)):
        with pytest.raises(error):
            cache.crop(count)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [9, 9, 9] and cache.nbytes == nbytes
    cache.activate_past_recording()
    model(more, cache=cache)
    cache.crop(-2)
    expected = model(torch.cat((ids, more[:, :1], more), dim=1)).logits[:, 10:]
    assert_close(model(more, cache=cache).logits, expected)


@torch.no_grad()
def test_a_cache_cropped_to_nothing_takes_any_number_of_rows(model):
    cache = cache_of(model, random_ids(2, 9), record=9)
    cache.crop(-9)
    assert cache.nbytes == 0
    assert_close(model(random_ids(3, 5), cache=cache).logits, model(random_ids(3, 5)).logits)


@torch.no_grad()
def test_bytes_after_a_crop_are_those_still_occupied(model):
    cache = cache_of(model, random_ids(1, 40), record=30)
    before = cache.nbytes_per_layer
    cache.crop(-30)
    for layer, old, new in zip(cache.layers, before, cache.nbytes_per_layer, strict=True):
        keeps_views = not hasattr(layer, "states") or "keys" in layer.states and "positions" in layer.states
        assert new <= old and (new > old // 4 or not keeps_views)
    unrecorded = cache_of(model, random_ids(1, 10))
    for each in (cache, unrecorded):
        model(random_ids(1, 1), cache=each)
    for layer, new, plain in zip(cache.layers, cache.nbytes_per_layer, unrecorded.nbytes_per_layer, strict=True):
        assert hasattr(layer, "states") or new == plain


@torch.no_grad()
def test_rollback_under_another_autocast(model):
    """What stays runs again as it ran first."""
    ids = random_ids(2, 12)
    cache, expected = AvgPathCache(model.config), AvgPathCache(model.config)
    cache.activate_past_recording()
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, cache=cache)
        model(ids[:, :8], cache=expected)
    cache.crop(-4)
    assert_same_state(cache, expected, 2e-2)
    for name, state in state_of(cache).items():
        assert state.dtype == state_of(expected)[name].dtype, name


def test_asking_again_keeps_the_depth(model):
    """As generate() does, which records with the default."""
    cache = AvgPathCache(model.config)
    for asked, depth in ((None, 128), (300, 300), (None, 300), (20, 20), (None, 20)):
        cache.activate_past_recording() if asked is None else cache.activate_past_recording(asked)
        assert {layer.recorded_depth for layer in cache.layers if hasattr(layer, "states")} <= {depth}
