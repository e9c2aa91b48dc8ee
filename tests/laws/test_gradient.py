"""Law 8. Chunked gradients are those of the float64 recurrence; states carry gradients; checkpointing changes nothing."""

import pytest
import torch
from laws.cases import assert_close, random_ids

from modeling_avgpath import AvgPathCache

LENGTH = 67


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(actual: dict, expected: dict, tolerance: float) -> None:
    scale = max(gradient.double().norm() for gradient in expected.values())
    assert scale > 0 and actual.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (actual[name].double() - gradient.double()).norm()
        # Against the gradient itself, and for parameters with next to none against the largest.
        assert error <= tolerance * gradient.double().norm() + 1e-2 * tolerance * scale, f"{name}: {error:.2e}"


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_one_pass_equals_the_float64_recurrence(model):
    """fp32 in one chunked pass, against float64 one token at a time through the differentiable cache."""
    ids = random_ids(2, LENGTH)
    loss_of(model(ids, use_cache=False).logits, ids).backward()
    chunked = {name: gradient.clone() for name, gradient in gradients(model).items()}

    model.zero_grad()
    model.double()
    cache = AvgPathCache(model.config)
    logits = torch.cat([model(ids[:, step : step + 1], cache=cache).logits for step in range(LENGTH)], dim=1)
    loss_of(logits, ids).backward()
    assert_same_gradients(chunked, gradients(model), 1e-3)


def test_truncated_backpropagation_through_time(model):
    """Two segments joined by the cache train as one; with the cache detached, as the second alone on a constant state."""
    ids = random_ids(1, 40)
    loss_of(model(ids, use_cache=False).logits, ids).backward()
    whole = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    cache = AvgPathCache(model.config)
    logits = torch.cat((model(ids[:, :17], cache=cache).logits, model(ids[:, 17:], cache=cache).logits), dim=1)
    loss_of(logits, ids).backward()
    assert_same_gradients(gradients(model), whole, 1e-4)

    model.zero_grad()
    embeddings = model.get_input_embeddings()(ids[:, :17]).detach().requires_grad_()
    cache = AvgPathCache(model.config)
    model(inputs_embeds=embeddings, cache=cache)
    model(ids[:, 17:], cache=cache.detach_()).logits.square().sum().backward()
    assert embeddings.grad is None
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(model, use_reentrant):
    ids = random_ids(2, 21)
    model.train()
    loss_of(model(ids).logits, ids).backward()
    plain = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    loss_of(model(ids).logits, ids).backward()
    assert_same_gradients(gradients(model), plain, 1e-5)


def test_checkpointed_states_advance_once(model):
    """Back-propagation through a carried cache, with the layers replayed: same gradients, same state."""
    ids = random_ids(1, 30)

    def run():
        model.zero_grad()
        cache = AvgPathCache(model.config)
        first = model(ids[:, :13], cache=cache).logits
        second = model(ids[:, 13:], cache=cache).logits
        loss_of(torch.cat((first, second), dim=1), ids).backward()
        return cache, {name: gradient.clone() for name, gradient in gradients(model).items()}

    model.train()
    plain_cache, plain = run()
    model.activation_checkpointing_enable({"use_reentrant": False})
    cache, checkpointed = run()
    assert_same_gradients(checkpointed, plain, 1e-5)
    assert cache.get_seq_length() == plain_cache.get_seq_length() == 30
    model.eval()
    more = random_ids(1, 3, seed=9)
    with torch.no_grad():
        assert_close(model(more, cache=cache).logits, model(more, cache=plain_cache).logits, 1e-5)


def test_reentrant_checkpoints_cannot_go_through_a_cache(model):
    ids = random_ids(1, 9)
    model.train().activation_checkpointing_enable({"use_reentrant": True})
    cache = AvgPathCache(model.config)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="use_reentrant': False"):
        model(ids, cache=cache)
    assert cache.get_seq_length() == 9
