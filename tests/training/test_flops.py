# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Counted arithmetic against what PyTorch's counter sees of a whole model, and peaks of machines."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM
from training.flops import count_flops, visible_pairs
from training.machine import gpu_peak_flops, measure_peak_flops

QUERY = ["linear", "delta_net", "gated_delta_net", "mesa_net", "ttt_linear", "ttt_mlp"]
ATTENDED = [
    "softmax",
    "sliding_softmax",
    "identity",
    "linear@mean_field",
    "ttt_linear@mean_field",
    "mesa_net@mean_field",
]
EXPECTED = ["linear@expectation", "ttt_linear@expectation", "ttt_mlp@expectation"]
SHAPES = {
    "tiny": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 48},
    "mid": {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512,
            "linear_num_key_heads": 4, "vocab_size": 1024},
}  # fmt: skip


def make(spec: str, shape: str, **options) -> AvgPathForCausalLM:
    config = AvgPathConfig(
        **SHAPES[shape],
        num_hidden_layers=1,
        mixer_types=[spec],
        sliding_window=24,
        attn_implementation="eager",
        **options,
    )
    return AvgPathForCausalLM(config)


def executed(model: torch.nn.Module, length: int) -> dict[str, float]:
    """Per token, what PyTorch's counter sees of the linear layers, and of all else in the mixer."""
    ids = torch.randint(0, model.config.vocab_size, (1, length))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    counts = {name: sum(parts.values()) / length for name, parts in counter.get_flop_counts().items()}
    linear = sum(value for name, value in counts.items() if name.endswith(("_proj", "lm_head")))
    return {"linear": linear, "rest": counts["Global"] - linear}


@pytest.mark.parametrize("spec", QUERY + ATTENDED + EXPECTED)
@pytest.mark.parametrize(("shape", "length"), [("tiny", 128), ("mid", 192)])
def test_counts_are_what_a_model_executes(spec, shape, length):
    """Linear layers to the last operation; the rest within what our operators are known to do beyond the need."""
    if shape == "mid" and spec in EXPECTED[1:]:
        length = 64  # quadratic, in tokens times mini-batches
    model = make(spec, shape, mesa_max_cg_steps=3, mesa_tolerance=1e-30)  # so that all three steps are taken
    flops = count_flops(model, length, mesa_steps=3)
    seen = executed(model, length)
    linear = sum(flops.forward.get(name, 0) for name in ("projections", "MLP", "head"))
    rest = sum(flops.forward.values()) - linear
    if spec.startswith("ttt"):
        # Counted with the projections: the learning rates, an F.linear of the mixer's own.
        rates = 2 * model.model.layers[0].mixer.num_states * model.config.hidden_size
        linear, rest = linear - rates, rest + rates
    assert seen["linear"] == linear
    low, high = {
        # The eager form scores every pair, below the diagonal or above.
        "softmax": (2, 2), "identity": (2, 2),
        "sliding_softmax": (1, 4),  # blocks of 64 queries see 64 + 23 keys
        # The triangular system is inverted, which the counter does not see, and the inverse multiplied; states are
        # scanned by matrices.
        "delta_net": (1, 1.6), "gated_delta_net": (1, 1.6),
        "mesa_net": (1, 2.1),  # one preconditioner a chunk, which is also multiplied
        "linear": (1, 1),
        "ttt_linear": (0.9, 1), "ttt_mlp": (0.9, 1),  # nobody asks for the weights after the last mini-batch
    }.get(spec, (1, 2.2))  # fmt: skip
    assert low <= seen["rest"] / rest <= high, seen["rest"] / rest


def test_counts_of_another_model_type():
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64, vocab_size=48,
        num_hidden_layers=2, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    flops, seen = count_flops(model, 64), executed(model, 64)
    assert seen["linear"] == sum(flops.forward[name] for name in ("projections", "MLP", "head"))
    assert seen["rest"] == 2 * flops.forward["attention"]


def test_a_backward_pass_costs_two_forward_passes():
    model = make("softmax", "tiny")
    flops = count_flops(model, 64)
    ids = torch.randint(0, 48, (1, 64))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    attention = flops.forward["attention"] + flops.backward["attention"]
    # The embedding's gradient is no product, but the first layer's inputs get one: exactly three times the forward pass.
    assert counter.get_total_flops() / 64 == flops.training + attention


def test_pairs_that_a_window_lets_see():
    seen = [min(place + 1, 24) for place in range(200)]
    assert visible_pairs(200, 24) == pytest.approx(sum(seen) / 200, abs=0.5)
    assert visible_pairs(20, 24) == visible_pairs(20) == 10


def test_mesa_steps_stop_at_the_limit_of_the_config():
    model = make("mesa_net", "tiny", mesa_max_cg_steps=2)
    assert count_flops(model, 64, mesa_steps=9).training == count_flops(model, 64, mesa_steps=2).training


def test_peaks():
    assert gpu_peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert gpu_peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert gpu_peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert gpu_peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert gpu_peak_flops("NVIDIA GeForce RTX 4090", "bf16") == 165.2e12
    assert gpu_peak_flops("NVIDIA L40S", "bf16") == 362e12 and gpu_peak_flops("NVIDIA L4", "bf16") == 121e12
    assert gpu_peak_flops("NVIDIA B200", "bf16") == 2250e12 and gpu_peak_flops("NVIDIA GB200", "bf16") == 2500e12
    assert gpu_peak_flops("NVIDIA A10G", "bf16") == 70e12 and gpu_peak_flops("NVIDIA A10", "bf16") == 125e12
    assert gpu_peak_flops("Some other GPU", "bf16") is None
    assert gpu_peak_flops("Tesla V100-SXM2-16GB", "bf16") is None  # it has none


def test_the_measured_peak_is_that_of_a_product():
    rate = measure_peak_flops(torch.float32, seconds=0.05, size=256)
    assert 1e8 < rate < 1e14
