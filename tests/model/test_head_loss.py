# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""`skip_logits`: the loss that the logits would have given, and its gradients, without them."""

import pytest
import torch
from accelerate import cpu_offload
from laws.cases import VOCAB, assert_close, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_avgpath import AvgPathForCausalLM, head_loss

BATCH, LENGTH = 2, 13


def make_model(pattern: list[str], **fields) -> AvgPathForCausalLM:
    torch.manual_seed(0)
    return AvgPathForCausalLM(tiny_config(pattern, **fields)).train()


@pytest.fixture
def model():
    return make_model(["gated_delta_net", "softmax"])


@pytest.fixture
def batch(monkeypatch):
    """Labels of which some do not count, in chunks of seven tokens."""
    monkeypatch.setattr(head_loss, "CHUNK_LOGITS", 7 * VOCAB)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:6] = labels[1, -2:] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", ["mean", "num_items", "shift_labels", "ignore_index", "tied", "frozen head"])
def test_loss_and_gradients_are_those_of_the_logits(model, batch, case):
    if case == "num_items":
        batch["num_items_in_batch"] = torch.tensor(5)
    elif case == "shift_labels":
        batch["shift_labels"] = batch["labels"].roll(3, 1)
    elif case == "ignore_index":
        batch["labels"] = batch["labels"].where(batch["labels"] != -100, 7)
        batch["ignore_index"] = 7
    elif case == "tied":
        model = make_model(["gated_delta_net", "softmax"], tie_word_embeddings=True)
    elif case == "frozen head":
        model.lm_head.requires_grad_(False)
    expected, wanted = loss_and_gradients(model, **batch)
    loss, grads = loss_and_gradients(model, **batch, skip_logits=True)
    assert_close(loss, expected, 1e-6)
    assert grads.keys() == wanted.keys() and ("lm_head.weight" in grads) == (case not in ("tied", "frozen head"))
    for name, grad in grads.items():
        assert_close(grad, wanted[name], 1e-5)


def test_numerical_gradients(monkeypatch):
    monkeypatch.setattr(head_loss, "CHUNK_LOGITS", 12)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(5, 4, dtype=torch.float64)

    def cubes(logits, part, with_gradient):
        return (scale[part] * logits**3).sum(), 3 * scale[part] * logits**2

    def loss(hidden, weight):
        return 0.3 * head_loss._HeadLoss.apply(hidden, weight, cubes, torch.float64)

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_under_autocast_it_is_as_precise_as_the_logits(model, batch):
    """Beside fp32: the products' rounding is the same, the sums are in fp32 for both."""
    exact, wanted = loss_and_gradients(model, **batch)
    with torch.autocast("cpu", torch.bfloat16):
        plain, plain_grads = loss_and_gradients(model, **batch)
        loss, grads = loss_and_gradients(model, **batch, skip_logits=True)
    assert loss.dtype == torch.float32
    assert abs(loss - exact) <= 2 * abs(plain - exact) + 1e-4
    for name, grad in grads.items():
        error, plain_error = (torch.linalg.vector_norm(x - wanted[name]) for x in (grad, plain_grads[name]))
        assert error <= 1.5 * plain_error + 1e-4 * torch.linalg.vector_norm(wanted[name]), name


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("skip_logits", [False, True])
def test_the_logits_are_never_held(model, batch, skip_logits):
    wide = make_model(["softmax"], vocab_size=5000, hidden_size=8, intermediate_size=8)
    with Largest() as largest:
        output = wide(**batch, use_cache=False, skip_logits=skip_logits)
        output.loss.backward()
    assert (output.logits is None) == skip_logits
    assert (largest.elements >= BATCH * LENGTH * 5000) != skip_logits


def test_without_gradients_none_are_made(model, batch):
    expected = model(**batch).loss
    with torch.no_grad():
        with Largest() as largest:
            loss = model(**batch, use_cache=False, skip_logits=True).loss
        assert_close(loss, expected.detach(), 1e-6)
    assert not loss.requires_grad and largest.elements < VOCAB * model.config.hidden_size * 2


def halve(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: forward(hidden) / 2


def watch(model):
    model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)


def penalise(model):
    plain = model.loss_function
    model.loss_function = lambda logits, **inputs: plain(logits=logits, **inputs) + logits.square().mean()


@pytest.mark.parametrize("change", [halve, watch, penalise])
def test_a_head_or_loss_that_is_more_makes_logits(model, batch, change):
    """Patched, watched (as adapters and offloading do), or with a loss of the user's: its part is not lost."""
    plain, _ = loss_and_gradients(model, **batch, skip_logits=True)
    change(model)
    expected, wanted = loss_and_gradients(model, **batch)
    loss, grads = loss_and_gradients(model, **batch, skip_logits=True)
    assert torch.equal(loss, expected) and all(torch.equal(grads[name], wanted[name]) for name in wanted)
    assert not torch.allclose(loss, plain)


def test_an_offloaded_head(model, batch):
    expected = model.eval()(**batch, use_cache=False).loss.detach()
    cpu_offload(model, execution_device="cpu")
    with torch.no_grad():
        output = model(**batch, use_cache=False, skip_logits=True)
    assert output.logits is None
    assert_close(output.loss, expected, 1e-6)


@pytest.mark.parametrize("shape", [(2, 5), (1, LENGTH), (2, LENGTH - 1), (2, 2 * LENGTH), (1, 1)])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_another_shape_are_refused(model, batch, name, shape):
    batch[name] = torch.ones(shape, dtype=torch.long)
    with torch.no_grad(), pytest.raises(ValueError, match=rf"{name} must have the text's shape \[2, 13\]"):
        model(**batch, use_cache=False, skip_logits=True)


def test_shift_labels_alone(model, batch):
    batch["shift_labels"] = batch["labels"].roll(3, 1)
    expected = model(**batch).loss
    del batch["labels"]
    assert_close(model(**batch, skip_logits=True).loss, expected, 1e-6)


def test_what_is_asked_for_must_agree(model, batch):
    with pytest.raises(ValueError, match="skip_logits=True returns the loss alone, which needs labels or shift_labels"):
        model(input_ids=batch["input_ids"], skip_logits=True)
    with pytest.raises(ValueError, match="skip_logits=True keeps no logits, and logits_to_keep=3 asks for some"):
        model(**batch, skip_logits=True, logits_to_keep=3)
