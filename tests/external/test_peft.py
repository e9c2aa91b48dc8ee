# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""PEFT: adapters on every linear layer of every mixer, prompt learning, and generation with both."""

import re
import warnings

import pytest
import torch
from laws.cases import CASES, SPECS, VOCAB, assert_close, random_ids, relative_error, tiny_model
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM

from modeling_avgpath.configuration_avgpath import MEMORIES
from training.recipe import REPOSITORY

# PEFT passes names of arguments that Transformers will drop, and says that it leaves position ids to the model.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore:Position ids")]
PROMPTS = {
    "prompt_tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "p_tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16),
}


def lora(case: str, **settings):
    """A tiny model with adapters that already do something, in evaluation mode."""
    settings = {"r": 3, "target_modules": "all-linear", "init_lora_weights": False, **settings}
    torch.manual_seed(1)
    return get_peft_model(endless_model(case), LoraConfig(task_type="CAUSAL_LM", **settings)).eval()


def endless_model(case: str):
    """A tiny model that generates as much as it may."""
    model = tiny_model(case)
    model.generation_config.eos_token_id = None
    return model


def linear_names(model) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}


def greedy(model, ids: torch.Tensor, mask: torch.Tensor, steps: int) -> torch.Tensor:
    """Generation by whole forward passes, without a cache."""
    for _ in range(steps):
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    return ids


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("case", [*SPECS, "query_map"])
def test_adapters_on_every_linear_layer(case, dora):
    """All run, all learn, and merging them keeps the logits."""
    plain, ids = tiny_model(case), random_ids(2, 13)
    model = get_peft_model(
        tiny_model(case), LoraConfig(r=3, target_modules="all-linear", use_dora=dora, task_type="CAUSAL_LM")
    ).train()
    layers = {name: m for name, m in model.base_model.model.named_modules() if isinstance(m, LoraLayer)}
    assert set(layers) == linear_names(plain)
    ran = set()
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *_, name=name: ran.add(name))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    for step in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (
                step or "lora_A" not in name
            ):  # lora_B, a factor of A's gradient, begins at 0
                assert parameter.grad.abs().max() > 0, name
        optimizer.step()
    assert ran == set(layers)
    model.eval()
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        assert (adapted - plain(input_ids=ids).logits).norm() > 0.01 * adapted.norm()
        assert_close(model.merge_and_unload()(input_ids=ids).logits, adapted, 1e-5)


@pytest.mark.parametrize("memory", MEMORIES)
def test_merging_in_bf16(memory, tmp_path):
    """A merged weight is W + s B A, rounded to bf16's 8 bits; what that does to the logits follows from their gradient."""
    spec = next(spec for spec in SPECS if spec.partition("@")[0] == memory)
    u, ids = 2.0**-8, random_ids(2, 13)
    tiny_model(spec).save_pretrained(tmp_path)
    torch.manual_seed(1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
        LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"),
    ).eval()
    exact, limits = {}, {}
    for name, layer in model.base_model.model.named_modules():
        if isinstance(layer, LoraLayer):
            update = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
            update = layer.scaling["default"] * update.detach()
            exact[f"{name}.weight"] = layer.base_layer.weight.detach().double() + update
            limits[f"{name}.weight"] = u * (exact[f"{name}.weight"].abs() + update.abs())  # both are rounded
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        with model.disable_adapter():
            assert relative_error(model(input_ids=ids).logits, adapted) > 64 * u
        merged = model.merge_and_unload()
        # Some 30 roundings of activations, each within u, stand behind one another in two layers.
        assert_close(merged(input_ids=ids).logits, adapted, 32 * u)
    rounded = {name: tensor.double() for name, tensor in merged.state_dict().items()}
    for name, weight in exact.items():
        assert ((rounded[name] - weight).abs() <= limits[name]).all(), name

    # In fp64, any fixed combination of the logits: errors spread evenly within their limits add up to this deviation.
    double, combination = tiny_model(spec).double(), torch.randn(2, 13, VOCAB, dtype=torch.float64)
    double.load_state_dict(rounded)
    found = (double(ids).logits * combination).sum().item()
    double.load_state_dict(rounded | exact)
    expected = (double(ids).logits * combination).sum()
    expected.backward()
    variance = sum((double.get_parameter(name).grad * limit).square().sum() / 3 for name, limit in limits.items())
    assert abs(found - expected.item()) <= 4 * variance.sqrt()


def test_the_table_of_targets():
    """docs/finetuning.md lists each memory's linear layers, raw parameters and convolutions; so do the models."""
    text = (REPOSITORY / "docs" / "finetuning.md").read_text(encoding="utf-8")
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            for memory in re.findall(r"`([\w@]+)`", cells[0]):
                rows[memory] = [set(re.findall(r"`(\w+)`", cell)) for cell in cells[1:]]
    assert set(rows) == {spec.partition("@")[0] for spec in SPECS}
    found = {memory: [set(), set()] for memory in rows}
    for spec in SPECS:
        layer = tiny_model(spec, query_map="@" not in spec, use_qk_norm=True).model.layers[0]
        linear = {name for name, module in layer.mixer.named_modules() if isinstance(module, nn.Linear)}
        memory = spec.partition("@")[0]
        assert not found[memory][0] or found[memory][0] == linear  # all readouts have the same ones
        parameters = {name.partition(".")[0] for name, _ in layer.mixer.named_parameters()}
        found[memory] = [linear, found[memory][1] | parameters - linear]
    assert found == rows
    assert {name for name, module in layer.mlp.named_modules() if isinstance(module, nn.Linear)} == {
        "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_short_convolutions_take_no_adapters_but_can_be_trained_whole():
    for rank in (2, 16):  # one of each reason that PEFT finds, before any forward pass
        with pytest.raises((ValueError, TypeError), match="ShortConv"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on merging
            lora("gated_delta_net", r=rank, target_modules=["q_conv1d"])
    model = lora("gated_delta_net", target_modules=["q_proj"], modules_to_save=["q_conv1d", "o_norm"]).train()
    ids = random_ids(2, 9)
    before = model(input_ids=ids).logits.detach()
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [(n, p) for n, p in model.named_parameters() if "modules_to_save" in n]
    assert len(trained) == 4 and all(p.grad.abs().max() > 0 for _, p in trained)
    with torch.no_grad():
        for _, parameter in trained:
            parameter.add_(0.1)
    assert (model(input_ids=ids).logits - before).abs().max() > 1e-3


@pytest.mark.parametrize("case", ["softmax_last", "three_cache_kinds", "all_recurrent"])
def test_generation_prompt_lookup_and_a_saved_adapter(case, tmp_path):
    model, ids = lora(case), random_ids(1, 7).repeat(1, 3)
    mask = torch.ones_like(ids)
    settings = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = greedy(model, ids, mask, 8)
    assert torch.equal(model.generate(**settings), expected)
    assert torch.equal(model.generate(**settings, prompt_lookup_num_tokens=3), expected)
    assert torch.equal(model.generate(**settings, num_beams=2)[:, :21], ids)

    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(case), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
        with loaded.disable_adapter():
            assert torch.equal(loaded(input_ids=ids).logits, tiny_model(case)(input_ids=ids).logits)


@pytest.mark.parametrize("case", ["softmax_middle", "three_cache_kinds"])
def test_activation_checkpointing_changes_no_gradient(case):
    found = []
    for checkpointing in (False, True):
        model, ids = lora(case).train(), random_ids(2, 17)
        if checkpointing:
            model.base_model.model.activation_checkpointing_enable()
            model.enable_input_require_grads()
        model(input_ids=ids, labels=ids).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", PROMPTS)
@pytest.mark.parametrize("case", ["softmax_first", "three_cache_kinds", "all_recurrent", "all_softmax"])
def test_virtual_tokens(case, method):
    """They learn, stand before the text once, and a row padded on the left goes on as it does alone."""
    torch.manual_seed(1)
    model = get_peft_model(endless_model(case), PROMPTS[method])
    ids = random_ids(2, 11)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)
    model.eval()
    with torch.no_grad():
        embeds = torch.cat((model.get_prompt(2), model.word_embeddings(ids)), dim=1)
        logits = tiny_model(case)(inputs_embeds=embeds).logits
        torch.testing.assert_close(model(input_ids=ids).logits, logits)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    settings = {"max_new_tokens": 6, "do_sample": False}
    together = model.generate(input_ids=ids, attention_mask=mask, **settings)
    assert torch.equal(together, greedy(model, ids, mask, 6))
    alone = ids[:1, 4:]
    assert torch.equal(together[:1, 4:], greedy(model, alone, torch.ones_like(alone), 6))
    for beyond in ({"prompt_lookup_num_tokens": 2}, {"prefill_chunk_size": 4}):
        with pytest.raises(ValueError, match="one token at a time.*or use LoRA"):
            model.generate(input_ids=alone, **beyond, **settings)


@pytest.mark.parametrize("case", [*CASES])
def test_prefixes_of_keys_and_values(case):
    """They suit softmax layers; any other layer has no place for them, and says what to do."""
    torch.manual_seed(1)
    model = get_peft_model(endless_model(case), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    ids = random_ids(2, 5)
    if set(model.config.mixer_types) == {"softmax"}:
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)
        settings = {"max_new_tokens": 4, "do_sample": False}
        mask = torch.ones_like(ids)
        found = model.eval().generate(input_ids=ids, attention_mask=mask, **settings)
        assert torch.equal(found, greedy(model, ids, mask, 4))
        return
    for run in (model, lambda **inputs: model.eval().generate(**inputs, max_new_tokens=2)):
        with pytest.raises(ValueError, match="(?s)prefix tuning.*use prompt tuning, LoRA or DoRA"):
            run(input_ids=ids)


def test_what_lies_beneath_adapters_is_not_saved(tmp_path):
    model = tiny_model("softmax_middle")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(ValueError, match="base_layer.* beneath one of PEFT's adapters.*merge_and_unload"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    wrapped.save_pretrained(tmp_path / "adapter")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "model")
