# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Tiny random models of every family that is read layer by layer."""

import torch
from laws.cases import VOCAB, tiny_config
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from modeling_avgpath import AvgPathForCausalLM

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "llama_eager": (LlamaForCausalLM, LlamaConfig, {"attn_implementation": "eager", "head_dim": 12}),
    "llama_yarn": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
                             "original_max_position_embeddings": 32}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12}),
}  # fmt: skip
AVGPATH = {
    "avgpath": (["softmax"], {"use_qk_norm": True}),
    "avgpath_gated": (
        ["softmax", "gated_delta_net"],
        {
            "attention_output_gate": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    ),
    "avgpath_sliding": (["sliding_softmax", "softmax"], {"num_sink_tokens": 2}),
    "avgpath_post_norm": (
        ["mesa_net", "softmax"],
        {"use_qk_norm": True, "qk_norm_type": "per_layer", "softmax_post_norm": True, "use_rope": False},
    ),
}
CASES = [*FAMILIES, *AVGPATH]


def make_model(case: str) -> PreTrainedModel:
    """The model of a case in evaluation mode, always the same, its biases and norms not at their trivial start."""
    torch.manual_seed(0)
    if case in AVGPATH:
        pattern, overrides = AVGPATH[case]
        model = AvgPathForCausalLM(tiny_config(pattern, max_position_embeddings=128, **overrides))
    else:
        model_class, config_class, overrides = FAMILIES[case]
        model = model_class(config_class(**SHAPE, **overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and ("norm" in name or name.endswith("bias")):
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()
