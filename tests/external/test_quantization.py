# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Weight-only int8 by torchao, through Transformers' `quantization_config`, on the CPU, for every mixer."""

import pytest
import torch
from laws.cases import SPECS, assert_close, random_ids, state_of, tiny_config, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from modeling_avgpath import AvgPathCache, AvgPathForCausalLM, AvgPathForSequenceClassification

pytest.importorskip("torchao", reason="the extra `evaluate` is not installed")

from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: E402
from transformers import TorchAoConfig  # noqa: E402

KEPT = AvgPathForCausalLM.modules_to_not_convert


def int8(modules_to_not_convert: list[str] | None = KEPT) -> TorchAoConfig:
    return TorchAoConfig(Int8WeightOnlyConfig(version=2), modules_to_not_convert=modules_to_not_convert)


def is_int8(parameter: torch.Tensor) -> bool:
    return type(parameter.data).__name__.startswith("Int8")


def quantized_modules(model: nn.Module) -> set[str]:
    """Last names of the modules with an int8 weight."""
    return {name.split(".")[-2] for name, parameter in model.named_parameters() if is_int8(parameter)}


def dequantized(quantized: nn.Module, plain: nn.Module) -> nn.Module:
    """`plain` with the weights that `quantized` stands for, as ordinary fp32 tensors."""
    weights = {name: value.dequantize() if is_int8(value) else value for name, value in quantized.state_dict().items()}
    plain.load_state_dict(weights)
    return plain


@pytest.fixture(params=[*SPECS, "softmax_middle", "query_map", "no_conv"])
def folder(request, tmp_path):
    """A saved model of each mixer, and of some hybrids."""
    tiny_model(request.param).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@torch.no_grad()
def test_every_mixer_runs_saves_and_loads_in_int8(folder, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=int8())
    ids = random_ids(2, 37)
    logits = model(ids).logits

    # All linear layers but the kept ones are int8, and nothing else is.
    linear = {name.split(".")[-1] for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert quantized_modules(model) == linear - {"lm_head", "a_proj", "b_proj"}
    for name, parameter in model.named_parameters():
        assert is_int8(parameter) or parameter.dtype == torch.float32, name

    # The model computes what its weights, written out, compute; they are near the original's.
    assert_close(logits, dequantized(model, AutoModelForCausalLM.from_pretrained(folder))(ids).logits)
    assert_close(logits, plain(ids).logits, tolerance=0.15)
    assert not torch.equal(logits, plain(ids).logits)

    # Generation from a cache agrees with one pass; states stay fp32.
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
                            return_dict_in_generate=True, output_logits=True)  # fmt: skip
    assert_close(torch.stack(output.logits, dim=1), model(output.sequences[:, :-1]).logits[:, -len(output.logits) :])
    for name, state in state_of(output.cache).items():
        assert state.dtype == torch.float32 or not state.is_floating_point(), name

    model.save_pretrained(tmp_path / "int8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    assert quantized_modules(loaded) == quantized_modules(model)
    assert torch.equal(loaded(ids).logits, logits)


@torch.no_grad()
@pytest.mark.parametrize("head", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_a_loaded_int8_model_is_saved_again(head, tmp_path):
    """Through two more rounds, the second in shards, and with another head."""
    tiny_model("softmax_middle").save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=int8())
    model.save_pretrained(tmp_path / "0")
    ids = random_ids(2, 9)
    first = head.from_pretrained(tmp_path / "0").eval()
    first.save_pretrained(tmp_path / "1")
    head.from_pretrained(tmp_path / "1").save_pretrained(tmp_path / "2", max_shard_size="8KB")
    assert len(list((tmp_path / "2").glob("*.safetensors"))) > 1
    again = head.from_pretrained(tmp_path / "2").eval()
    assert quantized_modules(again) == quantized_modules(model)
    assert torch.equal(again(ids).logits, first(ids).logits)
    assert torch.equal(again.model(ids)[0], model.model(ids)[0])


def test_weights_quantized_behind_the_back_are_refused_before_anything_is_written(tmp_path):
    model = tiny_model("delta_net")
    quantize_(model, Int8WeightOnlyConfig(version=2))
    with pytest.raises(ValueError, match="q_proj.weight is torchao's Int8Tensor.*quantization_config=TorchAoConfig"):
        model.save_pretrained(tmp_path / "int8")
    assert not (tmp_path / "int8").exists()
    model.save_pretrained(tmp_path / "plain", state_dict=tiny_model("delta_net").state_dict())  # one's own weights
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")) is AvgPathForCausalLM


def test_adapters_train_on_int8_under_autocast(folder):
    """As LoRA on a quantised checkpoint does: gradients near those without autocast, on the CPU."""
    peft = pytest.importorskip("peft", reason="the extra `finetune` is not installed")
    ids, gradients = random_ids(2, 37), []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=int8())
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(ids, labels=ids).loss
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    assert gradients[0].abs().sum() > 0
    assert torch.cosine_similarity(*gradients, dim=0) > 0.8  # bf16 moves those of mesa_net most, int8 or not


@torch.no_grad()
def test_precision_below_fp32_keeps_decay_and_inner_weights(tmp_path):
    tiny_model("all_recurrent").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=int8())
    kept = set(AvgPathForCausalLM._keep_in_fp32_modules_strict)
    dtypes = {name.split(".")[-1]: parameter.dtype for name, parameter in model.named_parameters()}
    assert "lambda_params" in dtypes and "W1" in dtypes
    assert all(dtype == torch.float32 for name, dtype in dtypes.items() if name in kept)
    ids = random_ids(2, 37)
    cache = AvgPathCache(model.config)
    logits = model(ids, cache=cache).logits
    assert logits.dtype == torch.bfloat16
    assert_close(logits, AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, tolerance=0.15)
    states = {
        name: state for name, state in state_of(cache).items() if "conv" not in name and state.is_floating_point()
    }
    assert states and all(state.dtype == torch.float32 for state in states.values())


@torch.no_grad()
def test_what_is_converted_without_the_list(tmp_path):
    """Transformers' own default leaves out the head alone; a list of one's own replaces that default."""
    tiny_model("gated_delta_net").save_pretrained(tmp_path)
    default = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=int8(None))
    assert {"a_proj", "b_proj"} <= quantized_modules(default) and "lm_head" not in quantized_modules(default)
    everything = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=int8(["nothing"]))
    assert "lm_head" in quantized_modules(everything)
    ids = random_ids(1, 20)
    for model in (default, everything):
        assert_close(model(ids).logits, dequantized(model, AutoModelForCausalLM.from_pretrained(tmp_path))(ids).logits)


@torch.no_grad()
def test_tied_embeddings_stay_as_they_are(tmp_path):
    tiny_model("delta_net", tie_word_embeddings=True).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=int8())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "int8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(random_ids(1, 9)).logits, model(random_ids(1, 9)).logits)


@torch.no_grad()
def test_the_classifier_keeps_its_head(tmp_path):
    torch.manual_seed(0)
    AvgPathForSequenceClassification(tiny_config(["mesa_net"], num_labels=3)).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, quantization_config=int8())
    assert "score" not in quantized_modules(model) and "q_proj" in quantized_modules(model)
    assert model(random_ids(1, 9)).logits.isfinite().all()


@torch.no_grad()
def test_a_saved_cache_goes_back_into_the_quantized_model(tmp_path):
    tiny_model("gated_delta_net").save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=int8())
    ids = random_ids(1, 20)
    cache = AvgPathCache(model.config)
    model(ids[:, :12], cache=cache)
    cache.save_pretrained(tmp_path / "cache")
    going_on = model(ids[:, 12:], cache=cache).logits
    assert torch.equal(model(ids[:, 12:], cache=AvgPathCache.from_pretrained(tmp_path / "cache")).logits, going_on)
    with pytest.raises(ValueError, match="other weights or another dtype"):
        plain(ids[:, 12:], cache=AvgPathCache.from_pretrained(tmp_path / "cache"))
