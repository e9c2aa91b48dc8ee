"""Law 7 at the level of the model (tests/ops holds the operators against their float64 oracles)."""

import pytest
import torch
from laws.cases import assert_close, random_ids, relative_error, state_of, tiny_model

from modeling_avgpath import AvgPathCache, AvgPathForCausalLM

MEMORY_STATES = ("G", "H", "W", "W1", "b1", "W2", "b2", "dW1", "db1", "dW2", "db2")


def memory_states(cache) -> dict[str, torch.Tensor]:
    return {name: state for name, state in state_of(cache).items() if name.split(".")[1] in MEMORY_STATES}


@torch.no_grad()
def test_chunked_fp32_equals_the_float64_recurrence(model):
    ids = random_ids(2, 131)
    logits = model(ids).logits
    model.double()
    cache = AvgPathCache(model.config)
    steps = [model(ids[:, step : step + 1], cache=cache).logits for step in range(ids.shape[1])]
    assert_close(logits, torch.cat(steps, dim=1), 1e-4)


@pytest.mark.parametrize("regime", ["bf16", "fp16", "autocast"])
@torch.no_grad()
def test_states_are_fp32_under_any_dtype(case, regime):
    """Under any dtype: fp32 states, fp32 decay parameters, finite logits near the fp32 ones."""
    model = tiny_model(case, initializer_range=0.05)
    ids = random_ids(2, 40)
    expected = model(ids).logits
    if regime != "autocast":
        model = model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[regime])
        for name, parameter in model.named_parameters():  # what from_pretrained(dtype=...) does by itself
            if name.rsplit(".", 1)[-1] in model._keep_in_fp32_modules_strict:
                parameter.data = parameter.data.float()
    cache = AvgPathCache(model.config)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=regime == "autocast"):
        logits = model(ids[:, :33], cache=cache).logits
        logits = torch.cat((logits, model(ids[:, 33:], cache=cache).logits), dim=1)
    assert logits.isfinite().all()
    assert relative_error(logits, expected) <= 0.1  # bf16 has 8 bits; a wrong path would be off by its whole size
    for name, state in memory_states(cache).items():
        assert state.dtype == torch.float32, name


def test_loading_in_bf16_keeps_decay_parameters_in_fp32(case, tmp_path):
    model = tiny_model(case)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    strict = set(model._keep_in_fp32_modules_strict)
    for name, parameter in loaded.named_parameters():
        expected = torch.float32 if name.rsplit(".", 1)[-1] in strict else torch.bfloat16
        assert parameter.dtype == expected, name
    assert loaded(random_ids(1, 9)).logits.isfinite().all()


@pytest.mark.parametrize("seed", range(5))
def test_bf16_construction_is_finite(case, seed):
    torch.manual_seed(seed)
    config = tiny_model(case).config
    config.initializer_range = 0.02
    model = AvgPathForCausalLM._from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
    loss = model(random_ids(1, 20), labels=random_ids(1, 20)).loss
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
