# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Softmax checkpoints as AvgPath hybrids.

`from_softmax` takes all weights of a Llama, Mistral, Qwen2, Qwen3 or AvgPath model over. Layers that stay softmax compute
what they did; the others begin as near to it as their mixer can, the nearer if `calibrate` has looked at the model first.
"""

import copy
import dataclasses
import difflib
from collections.abc import Callable

import torch
from torch import nn

from .configuration_avgpath import AvgPathConfig, parse_mixer_spec
from .conversion_calibration import Calibration, calibrate, fit_start
from .conversion_start import start_mixer
from .modeling_avgpath import AvgPathForCausalLM
from .softmax_models import SOFTMAX_FAMILIES, check_plain, softmax_layers

SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "pad_token_id",
    "bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters",
)  # fmt: skip
LAYER_FIELDS = ("mixer", "hybrid_ratio", "layer_pattern", "mixer_types", "layer_types")
# Fields that say what a source computes: they cannot be overridden and the weights still fit.
FIXED_FIELDS = (
    *SHARED_FIELDS[:7], "head_dim", "tie_word_embeddings", "use_qk_norm", "qk_norm_type", "attention_bias", "mlp_bias",
    "softmax_post_norm", "attention_output_gate", "use_rope", "rms_norm_eps",
)  # fmt: skip


def softmax_config(model: nn.Module) -> dict:
    """The fields of an `AvgPathConfig` whose layers are all those of a softmax model, `mixer_types` among them.

    Raises:
        TypeError, ValueError: as `softmax_models.check_plain`.
    """
    check_plain(model)
    config = model.config
    if config.model_type == "avgpath":
        fields = {name: getattr(config, name) for name in AvgPathConfig.__annotations__}
        return {name: value for name, value in fields.items() if name not in LAYER_FIELDS} | {
            "mixer_types": list(config.mixer_types)
        }
    layers = softmax_layers(model)
    first = layers[0]
    if any(layer.scaling != layer.head_dim**-0.5 for layer in layers):
        raise ValueError(
            f"The source scales its scores by {first.scaling}, and softmax layers here by 1/sqrt(head_dim): multiply the "
            "weights and bias of q_proj (or q_norm) by the quotient, and set the source's scaling back."
        )
    windows = {layer.sliding_window for layer in layers} - {None}
    projections = [getattr(first.attention, f"{name}_proj") for name in "qkvo"]
    return {
        **{name: getattr(config, name) for name in SHARED_FIELDS},
        "rope_parameters": dict(config.rope_parameters),
        "head_dim": first.head_dim,
        "use_qk_norm": first.q_norm is not None,
        "attention_bias": any(projection.bias is not None for projection in projections),
        "attention_dropout": config.attention_dropout or 0.0,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "sliding_window": windows.pop() if windows else None,
        "mixer_types": ["softmax" if layer.sliding_window is None else "sliding_softmax" for layer in layers],
    }


def conversion_config(
    model: nn.Module,
    mixer_types: list[str] | None = None,
    *,
    mixer: str | None = None,
    hybrid_ratio: str | None = None,
    layer_pattern: list[str] | None = None,
    **overrides,
) -> AvgPathConfig:
    """The config of what `from_softmax` makes, with its arguments and errors."""
    fields = softmax_config(model)
    source_types = fields.pop("mixer_types")
    known = {field.name for field in dataclasses.fields(AvgPathConfig)} - {"mixer_types"}
    for name in overrides.keys() - known:  # which a config would keep without a word
        near = difflib.get_close_matches(name, known, n=1)
        raise TypeError(f"AvgPathConfig has no field {name!r}" + (f"; did you mean {near[0]!r}?" if near else "."))
    fixed = [
        name for name in overrides if name in FIXED_FIELDS and overrides[name] != fields.get(name, overrides[name])
    ]
    if fixed:
        raise ValueError(
            f"{', '.join(fixed)} cannot be changed in a conversion, for the source's weights are made for "
            f"{', '.join(f'{name}={fields[name]!r}' for name in fixed)}: leave it out."
        )
    chosen = {"mixer": mixer, "hybrid_ratio": hybrid_ratio, "layer_pattern": layer_pattern, "mixer_types": mixer_types}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    specs = source_types
    if chosen:
        window = overrides.get("sliding_window", fields["sliding_window"])
        depth = {"num_hidden_layers": fields["num_hidden_layers"], "sliding_window": window}
        specs = AvgPathConfig(**depth, **chosen).mixer_types
    specs = [source if spec == "softmax" else spec for spec, source in zip(specs, source_types, strict=True)]
    _check_sources(source_types, specs, fields)
    changed = [spec for spec, source in zip(specs, source_types, strict=True) if spec != source]
    converted = [spec for spec in map(parse_mixer_spec, changed) if spec.readout is not None]
    # Recurrent layers that the source has already keep their shape, which the new ones then share.
    if converted and not any(parse_mixer_spec(spec).is_recurrent for spec in source_types):
        fields |= _converted_fields(fields, converted)
    config = AvgPathConfig(**(fields | overrides | {"mixer_types": specs}))
    if converted:
        _check_converted(config, converted)
    return config


def _check_sources(source_types: list[str], specs: list[str], fields: dict) -> None:
    for index, (source, spec) in enumerate(zip(source_types, specs, strict=True)):
        if source != spec and not source.endswith("softmax"):
            raise ValueError(
                f"Layer {index} of the source is {source}, and {spec} was asked for: softmax layers alone are converted. "
                f"Keep {source} there."
            )
        if source != spec and fields.get("softmax_post_norm"):
            raise ValueError(
                "softmax_post_norm puts norms behind the source's softmax layers, and layers of other mixers have them "
                f"before: layer {index} cannot become {spec}."
            )


def _converted_fields(fields: dict, converted: list) -> dict:
    """What the converted layers begin nearest to their teacher with; see `from_softmax`."""
    heads, size = fields["num_attention_heads"], fields["head_dim"]
    scores_plain_keys = any(spec.readout != "query" for spec in converted) and not fields["use_qk_norm"]
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": None if scores_plain_keys else 4,
        "linear_use_output_norm": False,
        "linear_use_output_gate": not any(spec.memory.startswith("ttt") for spec in converted),
        "linear_output_gate_activation": "sigmoid",
        "query_map": True,
    }


def _check_converted(config: AvgPathConfig, converted: list) -> None:
    """Raises `ValueError` for head shapes that the source's weights cannot have, and for keys scored behind a SiLU."""
    query_read = [spec for spec in converted if spec.readout == "query"]
    heads, size = config.num_attention_heads, config.head_dim
    wanted = (heads, heads, size, size)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    given = tuple(getattr(config, name) for name in names)
    if query_read and given != wanted:
        raise ValueError(
            f"{query_read[0]} of {given[0]} key heads of {given[2]} and {given[1]} value heads of {given[3]} cannot take "
            f"over the source's {heads} query heads of {size} ({config.num_key_value_heads} key heads, repeated): leave "
            f"{', '.join(names)} out, or read the memory through attention ('{query_read[0].memory}@mean_field'), whose "
            "heads are the source's."
        )
    scored = [spec for spec in converted if spec.readout in ("mean_field", "expectation") and spec.is_recurrent]
    convolves = any(
        (config.ttt_conv_kernel_dim if spec.memory.startswith("ttt") else config.linear_conv_kernel_dim) is not None
        for spec in scored
    )
    if convolves and not config.use_qk_norm:
        raise ValueError(
            f"{scored[0]} would score keys behind the SiLU of a short convolution, which the source's scores do not "
            "survive: set linear_conv_kernel_dim=None (and ttt_conv_kernel_dim=None)."
        )


@torch.no_grad()
def from_softmax(
    model: nn.Module,
    mixer_types: list[str] | None = None,
    *,
    mixer: str | None = None,
    hybrid_ratio: str | None = None,
    layer_pattern: list[str] | None = None,
    calibration: Calibration | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
    **overrides,
) -> AvgPathForCausalLM:
    """An AvgPath model with the weights of a softmax model.

    Embeddings, MLPs, norms and head are taken over as they are, and so is the attention of layers that stay softmax: a
    conversion that names no mixers gives the source's logits. `softmax` in a spec stands for what the source has in that
    layer, a sliding window included.

    The other layers begin with the source's projections. Memories read at the query have one key and value head for each
    query head, repeated by head, and no rotary embedding; memories read through attention keep grouped keys, norms and
    rotary embedding. By default (any field may be given instead):

    - a short convolution of 4 tokens, for a recurrence without positions cannot tell neighbours apart otherwise. It begins
      as the identity: SiLU is x/2 near 0, so streams enter it small, unit keys forget their size, and the output projection
      takes the factor of the values. There is none where attention scores the keys (but behind QK norms, which forget sizes
      too), nor in TTT;
    - no output norm: how large a read is tells how well the memory knows its query, and the source's averages say so too;
    - a sigmoid output gate, one half at the start, which is undone in the output projection, or calibrated to the
      attention that does not rest on the sink; none with TTT, whose gate is closed at weight 0;
    - a query map, the identity or calibrated.

    Key biases go (softmax without positions does not see them), query biases go into the query map, and value biases of
    layers read at the query are lost, for such layers have none.

    Args:
        model: `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM`, `Qwen3ForCausalLM` or `AvgPathForCausalLM`, with
            plain weights; left as it is.
        mixer_types, mixer, hybrid_ratio, layer_pattern: which layer becomes what, as in `AvgPathConfig`; by default none.
        calibration: what `calibrate` found in this model: decay, step size, query map, gate and output projection of each
            converted layer begin there.
        dtype: of the weights, by default the source's. Decay parameters and inner weights are fp32 in any case.
        progress: with a calibration: called after each layer with the number of layers that are settled, and of all.
        overrides: other fields of the `AvgPathConfig`.

    Returns:
        the model, in evaluation mode, on the source's device.

    Raises:
        TypeError: `model` is no Transformers model, or an override is no field of the config or of a wrong type.
        ValueError: another architecture, a quantised model, adapters, unknown mixers, heads of another shape than the
            source's, a field that the weights do not allow, or a calibration of another model.
    """
    config = conversion_config(
        model, mixer_types, mixer=mixer, hybrid_ratio=hybrid_ratio, layer_pattern=layer_pattern, **overrides
    )
    if not hasattr(model, "lm_head"):
        raise TypeError(
            f"{type(model).__name__} has no language-model head: give the ForCausalLM model, whose logits are inherited."
        )
    source = {layer.index: layer for layer in softmax_layers(model)}
    converted = {
        index: source[index]
        for index, spec in enumerate(config.mixer_specs)
        if index in source and spec.readout is not None
    }
    if calibration is not None:
        calibration.check(model, list(converted))
    device = next(model.parameters()).device
    student = AvgPathForCausalLM(config).to(device).eval()
    load_inherited(student, model, set(converted))
    for index, layer in converted.items():
        start_mixer(student.model.layers[index].mixer, layer)
    if calibration is not None and converted:
        fit_start(student, model, converted, calibration, progress)
    dtype = next(model.parameters()).dtype if dtype is None else dtype
    if dtype != torch.float32:
        attention = config._attn_implementation
        student = AvgPathForCausalLM.from_pretrained(
            None, config=config, state_dict=student.state_dict(), dtype=dtype, attn_implementation=attention
        ).to(device)
    student.generation_config = copy.deepcopy(model.generation_config)
    return student


def load_inherited(student: AvgPathForCausalLM, model: nn.Module, converted: set[int]) -> None:
    """Copy all weights that both models have, but for the mixers of the `converted` layers.

    Raises:
        ValueError: the models do not have the same parameters otherwise.
    """
    attention = f".{SOFTMAX_FAMILIES[model.config.model_type]}."
    weights = {name.replace(attention, ".mixer."): weight for name, weight in model.state_dict().items()}
    own = student.state_dict()
    if "lm_head.bias" in weights:
        raise ValueError("The source's lm_head has a bias, and the head of an AvgPath model has none: take it off.")

    def is_converted(name: str) -> bool:
        parts = name.split(".")
        return parts[1] == "layers" and parts[3] == "mixer" and int(parts[2]) in converted

    for name, parameter in own.items():
        if is_converted(name):
            continue
        weight = weights.get(name)
        if weight is None and name.endswith("_proj.bias"):
            parameter.zero_()  # one flag is for the biases of all four projections here
        elif weight is None or weight.shape != parameter.shape:
            found = "missing" if weight is None else f"{tuple(weight.shape)} instead of {tuple(parameter.shape)}"
            raise ValueError(f"{name} of the source is {found}: its weights are not those of its config.")
        else:
            parameter.copy_(weight)
    student.tie_weights()


__all__ = ["Calibration", "calibrate", "conversion_config", "from_softmax", "softmax_config"]
