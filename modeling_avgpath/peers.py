# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of other hybrids as AvgPath models.

flash-linear-attention's DeltaNet, GatedDeltaNet and MesaNet, and Transformers' OLMo-Hybrid and dense Qwen3-Next, hold the
same functions as AvgPath under other names and layouts. `from_peer` takes their weights over as they are: a tensor is
renamed, cut into its parts, or (norms that store w - 1) shifted by one, and nothing is fitted. `peer_state_dict` goes back.

A peer is described by two things: the config fields that it amounts to, and the place of every AvgPath parameter in it.
"""

import copy
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

import torch
from safetensors import safe_open
from transformers import GenerationConfig, OlmoHybridConfig, PreTrainedConfig, PreTrainedModel, Qwen3NextConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from .configuration_avgpath import AvgPathConfig
from .modeling_avgpath import AvgPathForCausalLM, explain_faults

Shape = tuple[int, ...]


class Place(NamedTuple):
    """Where a peer keeps a parameter.

    Attributes:
        name: of the peer's tensor.
        groups: blocks along its first axis; each holds in turn the rows of all parameters placed in this tensor.
        offset: what the peer leaves out of the values it stores.
    """

    name: str
    groups: int = 1
    offset: float = 0.0


class Entry(NamedTuple):
    """A tensor of the peer and the parameters in it, in order; `groups` and `offset` as in `Place`."""

    theirs: str
    ours: tuple[str, ...]
    groups: int
    offset: float

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Shape of the peer's tensor, from those of our parameters."""
        return (sum(shapes[name][0] for name in self.ours), *shapes[self.ours[0]][1:])

    def split(self, tensor: torch.Tensor, shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
        """The peer's tensor cut into our parameters, which share no memory with it."""
        rows = [shapes[name][0] // self.groups for name in self.ours]
        parts = tensor.unflatten(0, (self.groups, -1)).split(rows, dim=1)
        parts = (part.flatten(0, 1) for part in parts)
        parts = (part + self.offset if self.offset else part.clone() for part in parts)
        return dict(zip(self.ours, parts, strict=True))

    def join(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `split`."""
        parts = [weights[name].unflatten(0, (self.groups, -1)) for name in self.ours]
        return torch.cat(parts, dim=1).flatten(0, 1) - self.offset


class KeyMap(NamedTuple):
    """How the parameters of an AvgPath model correspond to the tensors of a peer's checkpoint.

    Attributes:
        entries: one per tensor of the peer.
        constants: our parameters that the peer does not have, and the value they take.
        shapes: the shape of each of our parameters.
    """

    entries: list[Entry]
    constants: dict[str, float]
    shapes: dict[str, Shape]


class PeerWeights(NamedTuple):
    """Weights of a peer, not read before they are asked for.

    Attributes:
        shapes: of each tensor, by name.
        read: returns the tensor of a name.
    """

    shapes: dict[str, Shape]
    read: Callable[[str], torch.Tensor]


class Peer:
    """What a peer's config amounts to, and where the peer keeps each parameter.

    Args:
        options: the peer's config, read by attribute.
    """

    def __init__(self, options):
        self.options = options

    def fields(self) -> dict:
        """Fields of the `AvgPathConfig`; raises `ValueError` for options that it has no counterpart for."""
        raise NotImplementedError

    def place(self, name: str, memory: str | None) -> Place | float:
        """Where the peer keeps a parameter, or the value that stands in for what it lacks.

        Args:
            name: of our parameter.
            memory: of the layer it belongs to, `None` outside the layers.
        """
        raise NotImplementedError

    def adapt(self, weights: PeerWeights) -> PeerWeights:
        """The weights under the names that the model in memory has, where checkpoints may have others."""
        return weights

    def refuse(self, option: str, supported: str) -> ValueError:
        """The error for a config whose `option` cannot be converted."""
        value = getattr(self.options, option)
        return ValueError(
            f"This {self.options.model_type} config has {option}={value!r}, which AvgPath cannot represent. Supported: "
            f"{supported}."
        )


def shared_fields(options) -> dict:
    """The fields that every config calls the same."""
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "initializer_range", "use_cache",
        "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings",
    )  # fmt: skip
    return {name: getattr(options, name) for name in names}


# flash-linear-attention. Its config classes may be out of reach, so their defaults stand here.

FLA_DEFAULTS = {
    "hidden_size": 2048,
    "num_heads": 16,
    "use_short_conv": True,
    "conv_size": 4,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "num_hidden_layers": 24,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-6,
    "attn": None,
    "attnres_block_size": None,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


class FlaPeer(Peer):
    """What flash-linear-attention's models share: a pre-norm decoder with softmax layers where `attn` says so."""

    memory: str
    defaults: dict[str, object]

    def __init__(self, options):
        given = options if isinstance(options, Mapping) else options.to_dict()
        defaults = {**FLA_DEFAULTS, **self.defaults}
        super().__init__(SimpleNamespace(**{**defaults, **given}))
        for name, default in defaults.items():
            if isinstance(default, int | float) and isinstance(given.get(name), str | list | dict):
                raise self.refuse(name, f"{type(default).__name__}, like {default}")
        specs = self.options.attn or []
        self.attention = {
            layer: spec for spec in ([specs] if isinstance(specs, Mapping) else specs) for layer in spec["layers"]
        }

    def mixer_fields(self) -> dict:
        """Fields of the recurrent layers."""
        raise NotImplementedError

    def fields(self) -> dict:
        options = self.options
        if options.hidden_act not in ("swish", "silu"):
            raise self.refuse("hidden_act", "'swish', the gated MLP with SiLU")
        if options.attnres_block_size is not None:
            raise self.refuse("attnres_block_size", "None, the plain residual stream")
        width = options.intermediate_size
        if width is None:  # two thirds of the ratio, as the MLP is gated, in units of 256
            ratio = 4 if options.hidden_ratio is None else options.hidden_ratio
            width = 256 * math.ceil(int(options.hidden_size * ratio * 2 / 3) / 256)
        return {
            **shared_fields(options),
            "intermediate_size": width,
            "rms_norm_eps": options.norm_eps,
            "mixer": self.memory,
            **self.mixer_fields(),
            **self.attention_fields(),
        }

    def attention_fields(self) -> dict:
        """Fields of the softmax layers, whose shape must be one for all."""
        options = self.options
        fields = {"mixer_types": [self.memory] * options.num_hidden_layers}
        outside = [layer for layer in self.attention if not 0 <= layer < options.num_hidden_layers]
        if outside:
            raise self.refuse("attn", f"layers 0 ... {options.num_hidden_layers - 1}")
        if not self.attention:
            return fields | {
                "num_attention_heads": options.num_heads,
                "head_dim": self.mixer_fields()["linear_key_head_dim"],
            }
        shapes, windows = set(), set()
        for layer, spec in self.attention.items():
            window = spec.get("window_size")
            fields["mixer_types"][layer] = "softmax" if window is None else "sliding_softmax"
            windows |= {window} - {None}
            heads, key_heads = spec["num_heads"], spec.get("num_kv_heads")
            shapes.add((heads, heads if key_heads is None else key_heads, float(spec.get("rope_theta", 10000.0))))
        if len(shapes) > 1 or len(windows) > 1:
            raise self.refuse("attn", "one num_heads, num_kv_heads, rope_theta and window_size for all softmax layers")
        heads, key_heads, theta = shapes.pop()
        return fields | {
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
            "head_dim": options.hidden_size // heads,
            "attention_bias": any(spec.get("qkv_bias", False) for spec in self.attention.values()),
            "sliding_window": windows.pop() if windows else None,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }

    def place(self, name: str, memory: str | None) -> Place | float:
        if memory in ("softmax", "sliding_softmax") and ".mixer." in name and name.endswith(".bias"):
            has_bias = self.attention[int(name.split(".")[2])].get("qkv_bias", False)
            if not has_bias or name.endswith("o_proj.bias"):
                return 0.0
        if "_conv1d." in name and not self.has_conv:
            return 1.0  # a kernel of one token: what is left is the SiLU
        for ours, theirs in (
            ("model.embed_tokens.", "model.embeddings."),
            (".mixer.", ".attn."),
            (".input_layernorm.", ".attn_norm."),
            (".post_attention_layernorm.", ".mlp_norm."),
        ):
            name = name.replace(ours, theirs)
        return Place(name)

    @property
    def has_conv(self) -> bool:
        return self.options.use_short_conv

    @property
    def conv_kernel_dim(self) -> int:
        return self.options.conv_size if self.has_conv else 1


class DeltaNetPeer(FlaPeer):
    """`fla.models.DeltaNetForCausalLM` (Yang et al., 2024)."""

    memory = "delta_net"
    defaults = {
        "expand_k": 1.0,
        "expand_v": 1.0,
        "use_gate": False,
        "use_beta": True,
        "allow_neg_eigval": False,
        "qk_norm": "l2",
        "qk_activation": "silu",
    }

    def mixer_fields(self) -> dict:
        options = self.options
        for name, supported in (("qk_norm", "l2"), ("qk_activation", "silu"), ("use_beta", True)):
            if getattr(options, name) != supported:
                raise self.refuse(name, repr(supported))
        return {
            "linear_num_key_heads": options.num_heads,
            "linear_key_head_dim": round(options.hidden_size * options.expand_k) // options.num_heads,
            "linear_value_head_dim": round(options.hidden_size * options.expand_v) // options.num_heads,
            "linear_conv_kernel_dim": self.conv_kernel_dim,
            "linear_allow_neg_eigval": options.allow_neg_eigval,
            "linear_use_output_gate": options.use_gate,
        }


class GatedDeltaNetPeer(FlaPeer):
    """`fla.models.GatedDeltaNetForCausalLM` (Yang, Kautz & Hatamizadeh, 2025)."""

    memory = "gated_delta_net"
    defaults = {
        "num_hidden_layers": 21,
        "num_heads": 6,
        "num_v_heads": None,
        "head_dim": 256,
        "expand_v": 2.0,
        "use_gate": True,
        "allow_neg_eigval": False,
        "output_gate_activation": "swish",
    }

    def mixer_fields(self) -> dict:
        options = self.options
        if options.output_gate_activation not in ("swish", "silu", "sigmoid"):
            raise self.refuse("output_gate_activation", "'swish', 'silu', 'sigmoid'")
        return {
            "linear_num_key_heads": options.num_heads,
            "linear_num_value_heads": options.num_heads if options.num_v_heads is None else options.num_v_heads,
            "linear_key_head_dim": options.head_dim,
            "linear_value_head_dim": int(options.head_dim * options.expand_v),
            "linear_conv_kernel_dim": self.conv_kernel_dim,
            "linear_allow_neg_eigval": options.allow_neg_eigval,
            "linear_use_output_gate": options.use_gate,
            "linear_output_gate_activation": "sigmoid" if options.output_gate_activation == "sigmoid" else "silu",
        }


class MesaNetPeer(FlaPeer):
    """`fla.models.MesaNetForCausalLM` (von Oswald et al., 2025). Its layer convolves whatever `use_short_conv` says."""

    memory = "mesa_net"
    defaults = {
        "head_dim": 128,
        "use_output_gate": False,
        "lambda_lower_bound": 0.25,
        "max_cg_step_training": 30,
        "max_cg_step_decoding": 30,
    }
    has_conv = True

    def mixer_fields(self) -> dict:
        options = self.options
        bound = options.lambda_lower_bound
        if bound <= 0:
            raise self.refuse("lambda_lower_bound", "positive bounds")
        return {
            "linear_num_key_heads": options.num_heads,
            "linear_key_head_dim": options.head_dim,
            "linear_conv_kernel_dim": self.conv_kernel_dim,
            "linear_use_output_gate": options.use_output_gate,
            "mesa_lambda_min": bound,
            "mesa_lambda_init": max(1.0, 2 * bound),
            "mesa_max_cg_steps": max(options.max_cg_step_training, options.max_cg_step_decoding),
        }


# Transformers.

CONV = re.compile(r"\.([qkv])_conv1d\.")
MEMORY_OF_LAYER_TYPE = {"linear_attention": "gated_delta_net", "full_attention": "softmax"}


class InTreePeer(Peer):
    """What Transformers' hybrids of gated delta rule and softmax attention share."""

    config_class: type[PreTrainedConfig]

    def __init__(self, options):
        super().__init__(self.config_class.from_dict(dict(options)) if isinstance(options, Mapping) else options)

    def fields(self) -> dict:
        options = self.options
        if options.hidden_act not in ("silu", "swish"):
            raise self.refuse("hidden_act", "'silu', which also follows the short convolution")
        if not set(options.layer_types) <= MEMORY_OF_LAYER_TYPE.keys():
            raise self.refuse("layer_types", ", ".join(MEMORY_OF_LAYER_TYPE))
        names = (
            "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "attention_bias",
            "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
            "linear_conv_kernel_dim",
        )  # fmt: skip
        rope = options.rope_parameters or {}
        has_rope = rope.get("rope_theta") is not None
        return {
            **shared_fields(options),
            **{name: getattr(options, name) for name in names},
            "head_dim": getattr(options, "head_dim", None) or options.hidden_size // options.num_attention_heads,
            "attention_dropout": options.attention_dropout or 0.0,
            "use_rope": has_rope,
            "rope_parameters": dict(rope) if has_rope else None,
            "use_qk_norm": True,
            "mixer": "gated_delta_net",
            "mixer_types": [MEMORY_OF_LAYER_TYPE[layer_type] for layer_type in options.layer_types],
        }

    def place(self, name: str, memory: str | None) -> Place | float:
        mixer = "linear_attn" if memory == "gated_delta_net" else "self_attn"
        return Place(CONV.sub(".conv1d.", name.replace(".mixer.", f".{mixer}.")))


class OlmoHybridPeer(InTreePeer):
    """`transformers.OlmoHybridForCausalLM`: pre-norm gated delta rule layers, post-norm NoPE or rotary softmax layers."""

    config_class = OlmoHybridConfig

    def fields(self) -> dict:
        return {
            **super().fields(),
            "qk_norm_type": "per_layer",
            "softmax_post_norm": True,
            "linear_norm_eps": 1e-5,  # fixed in their layer
            "linear_allow_neg_eigval": self.options.linear_allow_neg_eigval,
        }

    def adapt(self, weights: PeerWeights) -> PeerWeights:
        """Checkpoints keep the convolution in three, and call two norms otherwise."""
        names, convs = {}, {}
        for name in weights.shapes:
            if match := CONV.search(name):
                convs.setdefault(CONV.sub(".conv1d.", name), {})[match[1]] = name
            else:
                theirs = name.replace(".attention_layer_norm.", ".input_layernorm.")
                names[theirs.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")] = name
        shapes = {theirs: weights.shapes[name] for theirs, name in names.items()}
        for theirs, parts in convs.items():
            shapes[theirs] = (
                sum(weights.shapes[name][0] for name in parts.values()),
                *weights.shapes[min(parts.values())][1:],
            )

        def read(theirs: str) -> torch.Tensor:
            if theirs in names:
                return weights.read(names[theirs])
            return torch.cat([weights.read(convs[theirs][stream]) for stream in "qkv"])

        return PeerWeights(shapes, read)


class Qwen3NextPeer(InTreePeer):
    """`transformers.Qwen3NextForCausalLM` without experts: fused projections, gated attention, norms that store w - 1."""

    config_class = Qwen3NextConfig

    def fields(self) -> dict:
        options = self.options
        sparse = [
            layer
            for layer in range(options.num_hidden_layers)
            if layer not in options.mlp_only_layers
            and options.num_experts > 0
            and (layer + 1) % options.decoder_sparse_step == 0
        ]
        if sparse:
            raise ValueError(
                f"AvgPath has no mixture of experts, and {len(sparse)} layers of this qwen3_next config are one (first "
                f"{sparse[0]}). Supported: dense models, with num_experts=0 or every layer in mlp_only_layers."
            )
        return {**super().fields(), "attention_output_gate": True}

    def place(self, name: str, memory: str | None) -> Place | float:
        options = self.options
        place = super().place(name, memory)
        parent, _, leaf = place.name.rpartition(".")
        parent, _, module = parent.rpartition(".")
        if memory == "softmax" and module in ("q_proj", "g_proj"):
            return Place(f"{parent}.q_proj.{leaf}", groups=options.num_attention_heads)
        if memory == "gated_delta_net":
            if module in ("q_proj", "k_proj", "v_proj", "g_proj"):
                return Place(f"{parent}.in_proj_qkvz.{leaf}", groups=options.linear_num_key_heads)
            if module in ("b_proj", "a_proj"):
                return Place(f"{parent}.in_proj_ba.{leaf}", groups=options.linear_num_key_heads)
            if module in ("o_norm", "o_proj"):
                return Place(f"{parent}.{'norm' if module == 'o_norm' else 'out_proj'}.{leaf}")
        return place._replace(offset=1.0) if "norm" in module else place


PEERS: dict[str, type[Peer]] = {
    "delta_net": DeltaNetPeer,
    "gated_deltanet": GatedDeltaNetPeer,
    "mesa_net": MesaNetPeer,
    "olmo_hybrid": OlmoHybridPeer,
    "qwen3_next": Qwen3NextPeer,
}


def find_peer(config: PreTrainedConfig | Mapping) -> Peer:
    """The peer that a config (or the contents of a config.json) describes.

    Raises:
        ValueError: its `model_type` is not in `PEERS`, or its weights are quantized.
    """
    get = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    model_type = get("model_type")
    if model_type not in PEERS:
        hint = " It is AvgPath already: use AutoModelForCausalLM.from_pretrained." if model_type == "avgpath" else ""
        raise ValueError(f"No conversion for model_type {model_type!r}. Supported: {', '.join(PEERS)}.{hint}")
    if get("quantization_config") is not None:
        raise ValueError(
            "The checkpoint is quantized (quantization_config): convert its unquantized form, then quantize."
        )
    return PEERS[model_type](config)


def peer_config(config: PreTrainedConfig | Mapping) -> AvgPathConfig:
    """The `AvgPathConfig` of a peer's config.

    Args:
        config: a config object, or the contents of a config.json, of one of the model types in `PEERS`.

    Raises:
        ValueError: an architecture or an option that has no counterpart; the message says what is supported.
    """
    return AvgPathConfig(**find_peer(config).fields())


def peer_key_map(config: PreTrainedConfig | Mapping) -> KeyMap:
    """How the parameters of `peer_config(config)`'s model correspond to the peer's tensors; raises as `peer_config`."""
    peer = find_peer(config)
    ours = AvgPathConfig(**peer.fields())
    with torch.device("meta"):
        model = AvgPathForCausalLM(ours)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if ours.tie_word_embeddings:
        del shapes["lm_head.weight"]
    places, constants = {}, {}
    for name in shapes:
        parts = name.split(".")
        memory = ours.mixer_specs[int(parts[2])].memory if parts[1] == "layers" else None
        place = peer.place(name, memory)
        if isinstance(place, Place):
            places.setdefault(place, []).append(
                name
            )  # parts of one tensor: theirs stand in the order of our parameters
        else:
            constants[name] = place
    entries = [Entry(place.name, tuple(names), place.groups, place.offset) for place, names in places.items()]
    return KeyMap(entries, constants, shapes)


def weights_of_model(model: PreTrainedModel) -> PeerWeights:
    """The weights of a model in memory.

    Raises:
        ValueError: some are not in memory (offloaded, or never loaded).
    """
    state = model.state_dict()
    absent = [name for name, tensor in state.items() if tensor.is_meta]
    if absent:
        raise ValueError(f"{len(absent)} weights of the model are not in memory (meta device): {list_names(absent)}.")
    return PeerWeights({name: tuple(tensor.shape) for name, tensor in state.items()}, state.__getitem__)


def config_of_checkpoint(checkpoint: str) -> dict:
    """The contents of the config.json of a folder or Hub repository.

    Raises:
        ValueError: it is no whole JSON file.
        OSError: it, or the checkpoint, is not there.
    """
    path = cached_file(checkpoint, CONFIG_NAME)
    if path is None:
        raise FileNotFoundError(
            f"{checkpoint} has no {CONFIG_NAME}, which says what its weights are: copy it from where they came from."
        )
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"The {CONFIG_NAME} of {checkpoint} is damaged ({error}): fetch it anew from where it came from."
        ) from error


def weights_of_checkpoint(checkpoint: str) -> PeerWeights:
    """The weights of a folder or Hub repository, in one safetensors file or several.

    Raises:
        ValueError: there are none in safetensors format.
    """
    if path := cached_file(checkpoint, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False):
        paths = [path]
    elif path := cached_file(checkpoint, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False):
        paths, _ = get_checkpoint_shard_files(checkpoint, path)
    else:
        raise ValueError(
            f"{checkpoint} has no {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}: save the model with save_pretrained."
        )
    files = [safe_open(path, "pt") for path in paths]
    holders = {name: file for file in files for name in file.keys()}
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in holders.items()}
    return PeerWeights(shapes, lambda name: holders[name].get_tensor(name))


def list_names(names: list[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")


def check_weights(weights: PeerWeights, key_map: KeyMap) -> None:
    """Refuse weights that are not exactly those of the peer.

    Left aside, as the peers themselves do: multi-token prediction heads, and the rotary frequencies of old checkpoints.

    Raises:
        ValueError: missing, unexpected or mis-shaped tensors, listed by name.
    """
    expected = {entry.theirs: entry.shape(key_map.shapes) for entry in key_map.entries}
    given = {
        name: shape
        for name, shape in weights.shapes.items()
        if not name.startswith("mtp.") and not name.endswith((".rotary.inv_freq", ".rotary_emb.inv_freq"))
    }
    if "lm_head.weight" not in expected and "lm_head.weight" in given:  # tied, and stored all the same
        embedding = next(entry.theirs for entry in key_map.entries if "model.embed_tokens.weight" in entry.ours)
        del given["lm_head.weight"]
        if embedding in given and not torch.equal(weights.read("lm_head.weight"), weights.read(embedding)):
            raise ValueError(
                f"The config ties the embeddings (tie_word_embeddings), but lm_head.weight is not {embedding}."
            )
    misshaped = [
        f"{name} is {given[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    problems = {
        "missing": [name for name in expected if name not in given],
        "unexpected": [name for name in given if name not in expected],
        "mis-shaped": misshaped,
    }
    found = [f"{len(names)} {kind}: {list_names(names)}" for kind, names in problems.items() if names]
    if found:
        raise ValueError(f"The weights are not those of the config. {'; '.join(found)}.")


def from_peer(
    source: PreTrainedModel | str | os.PathLike, dtype: torch.dtype | None = None, **kwargs
) -> AvgPathForCausalLM:
    """An AvgPath model with the weights of a peer, which computes what the peer computes.

    Converted are flash-linear-attention's `DeltaNetForCausalLM`, `GatedDeltaNetForCausalLM` and `MesaNetForCausalLM`
    (softmax and sliding layers included) and Transformers' `OlmoHybridForCausalLM` and dense `Qwen3NextForCausalLM`. From a
    folder nothing but config.json and the safetensors files is read; flash-linear-attention need not be installed.

    Args:
        source: the peer's model, which is left as it is, or a folder or Hub repository with its checkpoint.
        dtype: of the weights, by default the peer's. Decay parameters and the ridge become fp32 in any case.
        kwargs: for `AvgPathForCausalLM.from_pretrained`, such as `device_map` or `attn_implementation`.

    Returns:
        The model, in evaluation mode.

    Raises:
        TypeError: `source` is neither a model nor a path.
        ValueError: an architecture or option without a counterpart, a quantized checkpoint, a damaged file, or weights that
            do not fit the config (missing, unexpected and mis-shaped ones are listed). Nothing is built then.
        OSError: there is no such checkpoint, or a file of it is missing.
    """
    if isinstance(source, PreTrainedModel):
        config, generation_config = source.config, copy.deepcopy(getattr(source, "generation_config", None))
        key_map = peer_key_map(config)
        weights = weights_of_model(source)
    elif isinstance(source, str | os.PathLike):
        source = os.fspath(source)
        config = config_of_checkpoint(source)
        key_map = peer_key_map(config)
        with explain_faults(source):
            weights = weights_of_checkpoint(source)
        try:
            generation_config = GenerationConfig.from_pretrained(source)
        except OSError:  # it is optional
            generation_config = None
    else:
        raise TypeError(f"source must be a model or the path of a checkpoint, got {type(source).__name__}.")
    weights = find_peer(config).adapt(weights)
    check_weights(weights, key_map)

    state = {}
    for entry in key_map.entries:
        state |= entry.split(weights.read(entry.theirs), key_map.shapes)
    embedding = state["model.embed_tokens.weight"]
    for name, value in key_map.constants.items():
        state[name] = embedding.new_full(key_map.shapes[name], value)
    model = AvgPathForCausalLM.from_pretrained(
        None, config=peer_config(config), state_dict=state, dtype=embedding.dtype if dtype is None else dtype, **kwargs
    )
    if generation_config is not None:
        model.generation_config = generation_config
    return model


def peer_state_dict(model: AvgPathForCausalLM, config: PreTrainedConfig | Mapping) -> dict[str, torch.Tensor]:
    """The weights of an AvgPath model under a peer's names and in its layout: the inverse of `from_peer`.

    Args:
        model: of the architecture that `peer_config(config)` describes.
        config: the peer's config (or the contents of its config.json).

    Raises:
        ValueError: the model has another architecture, or has trained a parameter that the peer does not have.
    """
    key_map = peer_key_map(config)
    kept = {"use_cache", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "attention_dropout"}
    expected = peer_config(config)
    different = [
        f"{name} is {getattr(model.config, name)!r} instead of {getattr(expected, name)!r}"
        for name in find_peer(config).fields()
        if name not in kept and getattr(model.config, name) != getattr(expected, name)
    ]
    weights = dict(model.state_dict())
    if expected.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    different += [f"{name} is {tuple(weights[name].shape)}" for name in weights if name not in key_map.shapes]
    if different:
        raise ValueError(f"The model is not the one that the peer's config describes: {list_names(different)}.")
    trained = [name for name, value in key_map.constants.items() if bool((weights[name] != value).any())]
    if trained:
        raise ValueError(f"The peer has no place for these parameters, which have been trained: {list_names(trained)}.")
    return {entry.theirs: entry.join(weights) for entry in key_map.entries}


__all__ = ["KeyMap", "PEERS", "from_peer", "peer_config", "peer_key_map", "peer_state_dict"]
