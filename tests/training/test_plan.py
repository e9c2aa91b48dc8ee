# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What --dry-run tells, against models that are really built, run and trained."""

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import in_fresh_process, peak_bytes
from modeling_avgpath import AvgPathCache, AvgPathConfig, AvgPathForCausalLM
from modeling_avgpath.configuration_avgpath import MEMORIES
from training import plan
from training.modeling import cache_nbytes, load_model_config
from training.recipe import REPOSITORY, load_recipe

SPECS = [f"{memory}@{readout}" for memory, readouts in MEMORIES.items() for readout in readouts or ("",)]
SPECS = [spec.rstrip("@") for spec in SPECS]
TINY = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 40,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "sliding_window": 6, "num_sink_tokens": 2,
}  # fmt: skip


def tiny(*specs: str, **changes) -> AvgPathConfig:
    return AvgPathConfig(**{**TINY, **changes}, mixer_types=list(specs), num_hidden_layers=len(specs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_cache_bytes_are_exact(spec, dtype):
    config = tiny(spec, spec, ttt_conv_kernel_dim=3)
    model = AvgPathForCausalLM(config).to(dtype).eval()
    for tokens in (3, 21):
        cache = AvgPathCache(config)
        with torch.no_grad():
            model(torch.randint(0, 40, (1, tokens)), cache=cache)
        assert plan.cache_bytes(config, tokens, dtype) == cache.nbytes


def test_cache_bytes_without_convolutions_and_of_another_model_type():
    config = tiny("gated_delta_net", "mesa_net", linear_conv_kernel_dim=None)
    cache = AvgPathCache(config)
    AvgPathForCausalLM(config)(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    assert plan.cache_bytes(config, 5) == cache.nbytes
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, vocab_size=40
    )
    output = LlamaForCausalLM(config)(torch.zeros(1, 5, dtype=torch.long))
    assert plan.cache_bytes(config, 5) == cache_nbytes(output.past_key_values)
    config.layer_types = ["sliding_attention"] * 3
    assert plan.cache_bytes(config, 5) is None


@pytest.mark.parametrize("tied", [True, False])
def test_parts_add_up_to_the_model(tied):
    config = tiny("gated_delta_net", "gated_delta_net", "softmax", tie_word_embeddings=tied)
    model = AvgPathForCausalLM(config)
    parts = plan.count_parts(model)
    total = parts.pop("total")
    assert total == sum(parts.values()) == sum(p.numel() for p in model.parameters())
    assert parts["embeddings"] == 40 * 32 and parts.get("head", 0) == (0 if tied else 40 * 32)
    assert parts["MLP"] == 3 * 3 * 32 * 48
    assert parts["softmax"] == sum(p.numel() for p in model.model.layers[2].mixer.parameters())


@pytest.mark.parametrize("name", ["5m", "30m", "135m", "360m", "1b", "3b", "7b"])
def test_shapes_have_the_size_of_their_name(name):
    config = load_model_config({"config": f"configuration/models/{name}.json"})
    total = plan.count_parts(plan.build_on_meta(config))["total"]
    named = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert abs(total / named - 1) < 0.1
    assert config.mixer_types[:4] == ["gated_delta_net"] * 3 + ["softmax"]


def test_every_shape_is_in_the_list_above():
    names = {file.stem for file in (REPOSITORY / "configuration" / "models").glob("*.json")}
    assert names == {"5m", "30m", "135m", "360m", "1b", "3b", "7b"}


def saved_bytes(model: torch.nn.Module, ids: torch.Tensor, half: bool) -> int:
    """What autograd really saves on this device, weights and their 16-bit copies left out."""
    kept = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    weights = {tuple(p.shape) for p in model.parameters()} if half else set()
    total = 0

    def save(tensor):
        nonlocal total
        pointer = tensor.untyped_storage().data_ptr()
        is_copy = tensor.dtype == torch.bfloat16 and (
            tuple(tensor.shape) in weights or tuple(tensor.T.shape) in weights
        )
        if pointer not in kept and not (tensor.ndim == 2 and is_copy):
            kept[pointer] = tensor
            total += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x), torch.autocast("cpu", torch.bfloat16, half):
        model(input_ids=ids, labels=ids, use_cache=False, skip_logits=True)
    return total


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("spec", ["softmax", "linear", "gated_delta_net", "mesa_net", "ttt_linear", "ttt_mlp"])
def test_activations_are_what_autograd_saves(spec, half):
    config = tiny(spec, spec, spec, hidden_size=48, intermediate_size=100, head_dim=16)
    expected = plan.activation_bytes(config, rows=2, length=96, half=half)
    measured = saved_bytes(AvgPathForCausalLM(config), torch.randint(0, 40, (2, 96)), half)
    assert expected == pytest.approx(measured, rel=0.1)


def test_recomputing_saves_memory():
    config = tiny(*["gated_delta_net"] * 6)
    plain, recomputed = (plan.activation_bytes(config, 2, 64, False, recompute) for recompute in (False, True))
    assert recomputed < plain / 2


def training_peak(config: AvgPathConfig, rows: int, length: int) -> int:
    """The most memory that three training steps hold beyond what was held before; runs in a process of its own."""

    def train():
        model = AvgPathForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            ids = torch.randint(0, config.vocab_size, (rows, length))
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False, skip_logits=True).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return peak_bytes(train)


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set can be reset on Linux only")
@pytest.mark.parametrize("mixer", ["softmax", "gated_delta_net", "ttt_linear"])
def test_memory_is_expected_within_a_third(mixer):
    config = AvgPathConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, mixer=mixer,
        hybrid_ratio="3:1",
    )  # fmt: skip
    expected = plan.expect_memory(plan.build_on_meta(config), 2, 512, half=True, muon=False, recompute=False)
    measured = in_fresh_process(training_peak, config, 2, 512)
    assert 3 / 4 < expected.total / measured < 4 / 3, (expected, measured)


def test_tokens_flops_and_time_agree():
    recipe = load_recipe(
        None,
        [
            "train.steps=10",
            "schedule.warmup_steps=1",
            "train.batch_size=4",
            "data.sequence_length=64",
            "tracking.expected_mfu=0.5",
        ],
    )
    made = plan.make_plan(recipe)
    assert made.tokens == 10 * 4 * 64
    assert made.seconds == pytest.approx(made.tokens * made.flops.training / (made.peak * 0.5))
    text = plan.describe_plan(made)
    assert f"{made.parameters['total']:,}" in text and "10 steps of 256" in text and "TFLOP/s (measured" in text


@pytest.mark.parametrize("arguments", [["--dry-run"], ["dry_run=true"]])
def test_a_dry_run_makes_nothing(arguments, tmp_path, capsys, monkeypatch):
    from training.pretrain import main

    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "model.config=configuration/models/7b.json", "data.path=nowhere"]) == 0
    text = capsys.readouterr().out
    assert "6,684,680,704" in text and "memory expected" in text and "time expected" in text
    assert not list(tmp_path.iterdir())


def test_epochs_are_those_of_local_text(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 4000)
    recipe = load_recipe(
        None, [f"data.path={tmp_path}", "train.steps=40", "train.batch_size=1", "data.sequence_length=100"]
    )
    made = plan.make_plan(recipe)
    assert made.text_bytes == 4000 and made.epochs == pytest.approx(4000 / (4000 / plan.BYTES_PER_TOKEN))
    assert "about 4 epochs" in plan.describe_plan(made)
    recipe.data.path = "somebody/data-set"
    assert plan.make_plan(recipe).epochs is None


def test_numbers_are_readable():
    assert (
        plan.format_count(950) == "950"
        and plan.format_count(36.3e6) == "36.3M"
        and plan.format_count(1.5e18) == "1.5e+18"
    )
    assert plan.format_bytes(512) == "512 B" and plan.format_bytes(1.5 * 2**30) == "1.50 GiB"
