"""Law 2. A row of a padded batch gives what it gives alone, now and in later turns; its state is that of its last token."""

import pytest
import torch
from laws.cases import assert_close, random_ids

from modeling_avgpath import AvgPathCache

LENGTHS = (23, 9, 70)
WIDTH = 75


def pad_rows(rows: list[torch.Tensor], width: int, side: str):
    """Rows of different length in one batch: ids, mask, and each row's slice."""
    ids = torch.full((len(rows), width), 0)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    slices = []
    for index, row in enumerate(rows):
        gap = width - len(row)
        begin = {"left": gap, "right": 0, "both": gap // 2}[side]
        ids[index, begin : begin + len(row)] = row
        mask[index, begin : begin + len(row)] = 1
        slices.append(slice(begin, begin + len(row)))
    return ids, mask, slices


def rows_and_references(model):
    """Three texts of different length, in two turns, and the logits of each text run alone in one pass."""
    firsts = [random_ids(length, seed=length) for length in LENGTHS]
    seconds = [random_ids(length, seed=100 + length) for length in (4, 1, 6)]
    alone = [model(torch.cat(turns)[None], use_cache=False).logits[0] for turns in zip(firsts, seconds, strict=True)]
    return firsts, seconds, alone


@pytest.mark.parametrize("side", ["left", "right", "both"])
@torch.no_grad()
def test_rows_in_a_padded_batch_and_their_next_turn(model, side):
    firsts, seconds, alone = rows_and_references(model)
    ids, mask, slices = pad_rows(firsts, WIDTH, side)
    cache = AvgPathCache(model.config)
    logits = model(ids, attention_mask=mask, cache=cache).logits
    for row, place, reference in zip(logits, slices, alone, strict=True):
        assert_close(row[place], reference[: place.stop - place.start])

    more_ids, more_mask, more_slices = pad_rows(seconds, 7, side)
    logits = model(more_ids, attention_mask=torch.cat((mask, more_mask), dim=1), cache=cache).logits
    for row, place, first, reference in zip(logits, more_slices, firsts, alone, strict=True):
        assert_close(row[place], reference[len(first) :])


@torch.no_grad()
def test_padded_single_tokens_change_nothing(model):
    """One token a time, real for one row and padding for the other."""
    rows = [random_ids(6, seed=5), random_ids(3, seed=6)]
    alone = [model(row[None], use_cache=False).logits[0] for row in rows]
    cache = AvgPathCache(model.config)
    is_real = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 0], [0, 1, 0, 0, 1, 0, 0, 0, 1]])
    seen = [0, 0]
    for step in range(is_real.shape[1]):
        ids = torch.tensor([[row[min(done, len(row) - 1)]] for row, done in zip(rows, seen, strict=True)])
        logits = model(ids, attention_mask=is_real[:, : step + 1], cache=cache).logits
        for index in range(2):
            if is_real[index, step]:
                assert_close(logits[index, 0], alone[index][seen[index]])
                seen[index] += 1
    assert seen == [6, 3]


@pytest.mark.parametrize("side", ["left", "right", "both"])
@torch.no_grad()
def test_batch_of_one(model, side):
    row = random_ids(17)
    ids, mask, (place,) = pad_rows([row], 21, side)
    assert_close(model(ids, attention_mask=mask).logits[0, place], model(row[None]).logits[0])


@torch.no_grad()
def test_state_is_that_after_the_last_real_token(model):
    """Constant-size states of a padded row equal those of the row alone."""
    rows = [random_ids(length, seed=length) for length in LENGTHS]
    ids, mask, _ = pad_rows(rows, WIDTH, "right")
    cache = AvgPathCache(model.config)
    model(ids, attention_mask=mask, cache=cache)
    for index, row in enumerate(rows):
        alone = AvgPathCache(model.config)
        model(row[None], cache=alone)
        for layer, expected in zip(cache.layers, alone.layers, strict=True):
            for name, state in getattr(layer, "states", {}).items():
                if name not in ("keys", "positions") or layer.is_sliding:
                    assert_close(state[index], expected.states[name][0])


def test_padding_has_no_gradient(model):
    """What stands at padding reaches neither the loss nor, through it, any gradient, which stays finite."""
    ids, mask, _ = pad_rows([random_ids(13), random_ids(40, seed=2)], 44, "left")
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, attention_mask=mask).logits
    logits[mask.bool()].square().sum().backward()
    assert embeddings.grad.isfinite().all()
    assert embeddings.grad[~mask.bool()].abs().max() == 0
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
