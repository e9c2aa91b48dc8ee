"""Law 3. Documents packed in one row give what they give alone: outputs and gradients."""

import pytest
import torch
from laws.cases import assert_close, random_ids, tiny_model

from modeling_avgpath import AvgPathCache

SIZES = (5, 1, 70, 2, 33, 64)


def packed_documents():
    documents = [random_ids(size, seed=10 + size) for size in SIZES]
    ids = torch.cat(documents)[None]
    bounds = torch.tensor([0, *SIZES]).cumsum(0)
    descriptions = {
        "cu_seq_lens_q": bounds.int(),
        "seq_idx": torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))[None],
        "position_ids": torch.cat([torch.arange(size) for size in SIZES])[None],
    }
    return documents, ids, descriptions


@pytest.mark.parametrize("description", ["cu_seq_lens_q", "seq_idx", "position_ids"])
@pytest.mark.parametrize("mask", [None, "ones"])
@torch.no_grad()
def test_packed_documents_equal_single_ones(model, description, mask):
    documents, ids, descriptions = packed_documents()
    expected = torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])
    arguments = {description: descriptions[description]}
    if mask is not None:
        arguments["attention_mask"] = torch.ones_like(ids)
    outputs = model(ids, **arguments)
    assert_close(outputs.logits[0], expected)
    assert outputs.cache is None  # one row of several texts has no single state to continue from


@torch.no_grad()
def test_two_rows_and_trailing_padding(model):
    documents = [random_ids(size, seed=size) for size in (6, 9, 4, 8)]
    ids = torch.stack((torch.cat(documents[:2]), torch.cat((*documents[2:], torch.zeros(3, dtype=torch.long)))))
    seq_idx = torch.tensor([[0] * 6 + [1] * 9, [0] * 4 + [1] * 8 + [2] * 3])
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    logits = model(ids, seq_idx=seq_idx, attention_mask=mask).logits
    packed = [logits[0, :6], logits[0, 6:], logits[1, :4], logits[1, 4:12]]
    for document, row in zip(documents, packed, strict=True):
        assert_close(row, model(document[None]).logits[0])


def test_packed_gradients_equal_single_ones(model):
    documents, ids, descriptions = packed_documents()
    labels = ids.clone()
    # The loss shifts labels: a document's first token is nobody's target.
    labels[0, descriptions["cu_seq_lens_q"][:-1].long()] = -100
    total = sum(size - 1 for size in SIZES)
    model(ids, labels=labels, cu_seq_lens_q=descriptions["cu_seq_lens_q"], num_items_in_batch=total).loss.backward()
    packed = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    for document in documents:
        if len(document) > 1:
            model(document[None], labels=document[None], num_items_in_batch=total).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 1e-6:
            assert_close(packed[name], parameter.grad, 1e-3)
    scale = max(gradient.norm() for gradient in packed.values())
    for name, parameter in model.named_parameters():
        single = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        assert (packed.get(name, torch.zeros_like(parameter)) - single).norm() <= 1e-4 * scale, name


@pytest.mark.parametrize("length", [0, 4])
def test_packing_into_a_cache_is_refused(length):
    model = tiny_model("softmax_last")
    cache = AvgPathCache(model.config)
    if length:
        model(random_ids(1, length), cache=cache)
    with pytest.raises(ValueError, match="Packed documents cannot go into a cache"):
        model(random_ids(1, 6), cache=cache, cu_seq_lens_q=torch.tensor([0, 2, 6]))
    assert cache.get_seq_length() == length


@torch.no_grad()
def test_a_mask_of_ones_own_is_no_packing():
    """Positions that repeat under a 4-dimensional mask, as in a tree of drafts, leave the mask in force."""
    model = tiny_model("all_softmax")
    ids, mask = random_ids(1, 6), torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    mask[..., 4, 3] = mask[..., 5, 3] = False  # tokens 3 and 4 are alternatives for one place
    positions = torch.tensor([[0, 1, 2, 3, 3, 4]])
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    branch = model(ids[:, [0, 1, 2, 4, 5]]).logits
    assert_close(logits[:, [0, 1, 2, 4, 5]], branch)
    with pytest.raises(ValueError, match="not both"):
        model(ids, attention_mask=mask, seq_idx=torch.zeros(1, 6, dtype=torch.long))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 3, 5])}, "rise from 0 to the number of tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 2, 6])}, "rise from 0"),
        ({"cu_seq_lens_q": torch.tensor([[0, 6]])}, "one-dimensional"),
        ({"seq_idx": torch.tensor([[0, 0, 1]])}, "shape of the tokens"),
        (
            {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]]), "attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1]])},
            "padding inside a packed document",
        ),
    ],
)
def test_wrong_descriptions_are_named(arguments, message):
    model = tiny_model("all_recurrent")
    with pytest.raises(ValueError, match=message):
        model(random_ids(1, 6), **arguments)
