"""The models that every law is held against, and how results are compared."""

import torch

from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM
from modeling_avgpath.configuration_avgpath import MEMORIES, MixerSpec

VOCAB = 97
CHUNK = 64  # of the linear-family ops
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)

# Every mixer spec there is, from the registry: a new memory is held to the laws as soon as it is registered.
SPECS = [str(MixerSpec(memory, readout)) for memory, readouts in MEMORIES.items() for readout in (readouts or (None,))]
LAYOUTS = {
    "softmax_first": ["softmax", "gated_delta_net", "mesa_net"],
    "softmax_middle": ["delta_net", "softmax", "ttt_mlp"],
    "softmax_last": ["linear", "ttt_linear", "softmax"],
    "all_recurrent": ["delta_net", "mesa_net", "ttt_linear"],
    "all_softmax": ["softmax", "softmax", "softmax"],
    "three_cache_kinds": ["sliding_softmax", "mesa_net@mean_field", "ttt_mlp@expectation"],
}
VARIANTS = {
    "no_conv": (
        {"linear_conv_kernel_dim": None, "ttt_conv_kernel_dim": None},
        ["gated_delta_net", "mesa_net", "ttt_mlp"],
    ),
    "bare_reads": (
        {"linear_use_output_norm": False, "linear_use_output_gate": False},
        ["delta_net@mean_field", "linear", "mesa_net"],
    ),
    "plain_linear": ({"linear_use_gates": False}, ["linear", "softmax"]),
    "negative_eigenvalues": ({"linear_allow_neg_eigval": True}, ["delta_net", "gated_delta_net"]),
    "query_map": ({"query_map": True}, ["gated_delta_net", "mesa_net", "ttt_linear"]),
    "no_rope": ({"use_rope": False}, ["softmax", "sliding_softmax", "delta_net@mean_field"]),
    "qk_norm": ({"use_qk_norm": True}, ["softmax", "sliding_softmax", "identity", "ttt_linear@expectation"]),
    "no_inner_norm": ({"ttt_inner_norm": False, "ttt_base_lr": 0.1}, ["ttt_linear", "ttt_mlp@expectation", "softmax"]),
    "joint_and_post_norms": (
        {"use_qk_norm": True, "qk_norm_type": "per_layer", "softmax_post_norm": True, "linear_norm_eps": 0.01},
        ["softmax", "sliding_softmax", "delta_net@mean_field"],
    ),
    "gated_partial_rotary": (
        {
            "attention_output_gate": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
        ["softmax", "sliding_softmax", "identity"],
    ),
    "kernel_of_one": (
        {"linear_conv_kernel_dim": 1, "linear_output_gate_activation": "sigmoid"},
        ["mesa_net", "delta_net"],
    ),
    "sinks": ({"num_sink_tokens": 3}, ["sliding_softmax", "gated_delta_net"]),
    "wide_values": ({"linear_value_head_dim": 12}, ["delta_net", "mesa_net", "linear"]),
    "eager_attention": ({"attn_implementation": "eager"}, ["softmax", "sliding_softmax", "mesa_net@mean_field"]),
}
CASES = {
    **{spec: ({}, [spec]) for spec in SPECS},
    **{name: ({}, pattern) for name, pattern in LAYOUTS.items()},
    **VARIANTS,
}


def tiny_config(pattern: list[str], **overrides) -> AvgPathConfig:
    """Grouped heads, short convolutions and odd sizes, so that nothing agrees by accident."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": max(2, len(pattern)),
        "layer_pattern": pattern,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "sliding_window": 7,
        "ttt_mini_batch_size": 5,
        "ttt_conv_kernel_dim": 3,
        "initializer_range": 0.25,  # large enough for every branch to matter in the output
        "mesa_tolerance": 1e-6,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AvgPathConfig(**{**fields, **overrides})


def tiny_model(case: str, seed: int = 0, **overrides) -> AvgPathForCausalLM:
    """The model of a case, in evaluation mode, the same for every call with the same seed."""
    case_overrides, pattern = CASES[case]
    torch.manual_seed(seed)
    return AvgPathForCausalLM(tiny_config(pattern, **{**case_overrides, **overrides})).eval()


def random_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Token ids without the special ones."""
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp(min=1e-12)).item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Relative error within the laws' tolerance."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.2e} above {tolerance:.0e}"


def state_of(cache) -> dict[str, torch.Tensor]:
    """All tensors of a cache by name, whose meaning does not depend on how the text was split or padded."""
    tensors = {}
    for index, layer in enumerate(cache.layers):
        named = layer.states if hasattr(layer, "states") else {"keys": layer.keys, "values": layer.values}
        tensors |= {f"{index}.{name}": tensor for name, tensor in named.items()}
    return tensors


def assert_same_state(actual, expected, tolerance: float = 1e-4) -> None:
    """Two caches hold the same tensors."""
    actual, expected = state_of(actual), state_of(expected)
    assert actual.keys() == expected.keys()
    for name in actual:
        if actual[name].is_floating_point():
            assert_close(actual[name], expected[name], tolerance)
        else:
            assert torch.equal(actual[name], expected[name]), name
