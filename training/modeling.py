# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Building the model that a recipe names."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import modeling_avgpath  # noqa: F401  (registers model_type avgpath)
from training.probes import evaluation_mode
from training.recipe import SetupError, find_file, nearest


def _merge(base: dict, changes: dict) -> dict:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def load_model_config(model: dict[str, Any]) -> PreTrainedConfig:
    """Build the config from the JSON file ``model["config"]``, with the other keys of `model` put over it.

    Any ``model_type`` that Transformers knows will do, so a Llama of the same shape is a baseline. Raises `SetupError`
    for a missing or malformed file, an unknown field (a config class would take it silently) and a refused value.
    """
    file = find_file(model["config"])
    try:
        shape = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SetupError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(shape, dict) or "model_type" not in shape:
        raise SetupError(f"{file} must be a JSON object with a model_type, for example avgpath or llama")
    overrides = {key: value for key, value in model.items() if key != "config"}
    model_type = overrides.pop("model_type", shape.pop("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise SetupError(f"unknown model_type '{model_type}'{nearest(model_type, CONFIG_MAPPING.keys())}")
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    for source, keys in ((file, shape), ("recipe", overrides)):
        for key in keys:
            if key not in known:
                raise SetupError(f"{source}: model_type {model_type} has no field '{key}'{nearest(key, known)}")
    try:
        return config_class(**_merge(shape, overrides))
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise SetupError(f"{file} with {overrides or 'no overrides'}: {error}") from None


def check_causal(config: PreTrainedConfig) -> None:
    """Raises `SetupError` if Transformers has no causal language model of this kind."""
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise SetupError(
            f"model_type {config.model_type} has no causal language model in Transformers: take another one, such as "
            "avgpath or llama"
        )


def build_model(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A causal language model with fresh fp32 weights that knows the tokenizer's special tokens."""
    check_causal(config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def check_boundaries(model: PreTrainedModel) -> None:
    """Raises `SetupError` unless the model keeps apart what `position_ids` that begin again say are two documents."""
    ids = torch.arange(1, 9).remainder(model.config.vocab_size)[None]
    other = ids.clone()
    other[:, :4] = 0
    positions = torch.arange(4).repeat(2)[None]
    try:
        with evaluation_mode(model):
            first, second = (
                model(input_ids=x, position_ids=positions, use_cache=False).logits[:, 4:] for x in (ids, other)
            )
        leaks = not torch.allclose(first, second, rtol=1e-3, atol=1e-3 * first.std().item())
    except TypeError:  # no position_ids at all
        leaks = True
    if leaks:
        raise SetupError(
            f"data.boundaries=true: {model.config.model_type} models do not keep documents in one row apart (they pass over "
            "position_ids that begin again): leave data.boundaries out, or take avgpath"
        )


def refuse_adapter(path: str) -> None:
    """Raises `SetupError` if `model.path` is the folder of an adapter, which is no model."""
    if (Path(path).expanduser() / "adapter_config.json").exists():
        raise SetupError(
            f"model.path={path} is an adapter, not a model: write one with lora.merge=true and start from that"
        )


def load_causal_lm(source: str, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained`, which would fill weights that are missing with random ones.

    Raises:
        SetupError: the checkpoint lacks weights.
        OSError, ValueError: it cannot be read, as `from_pretrained` tells.
    """
    model, info = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise SetupError(
            f"model.path={source} has no weights for {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}"
        )
    return model


def can_skip_logits(model: torch.nn.Module) -> bool:
    """Whether the model's forward pass knows how to take the loss of its labels without holding the logits."""
    return "skip_logits" in inspect.signature(model.forward).parameters


def count_parameters(model: torch.nn.Module, trained_only: bool = False) -> int:
    """Number of parameters, tied ones counted once; all, or those that are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad or not trained_only)


def cache_nbytes(cache: Any) -> int:
    """Bytes of all tensors that a generation cache holds, of `AvgPathCache` or any other kind."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes

    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, dict):
            value = list(value.values())
        return [tensor for item in value for tensor in tensors(item)] if isinstance(value, list | tuple) else []

    return sum(tensor.nbytes for layer in cache.layers for tensor in tensors(vars(layer)))
