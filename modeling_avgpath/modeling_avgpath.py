# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The AvgPath model: a pre-norm decoder whose token mixer is chosen layer by layer.

Notable:
- one decoder layer for all mixers; the spec string of the config picks the class from `MIXERS`;
- padding and packing are resolved once per forward into an `Alignment`, which recurrent layers run through, and a causal
  mask, which softmax layers use;
- a cache is per-layer: each mixer gets its own cache layer, so no mixer knows of its neighbours.
"""

import contextlib
import functools
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.generation import GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, TransformersKwargs, auto_docstring, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs
from transformers.utils.quantization_config import QuantizationMethod

from .alignment import Alignment, align_documents, align_padding, document_positions, find_document_starts
from .attention import SlidingSoftmaxAttention, SoftmaxAttention
from .cache_avgpath import (
    AvgPathCache,
    adopt_cache,
    check_room,
    enter_turn,
    leave_turn,
    record_at_least,
    snapshot_layer,
)
from .configuration_avgpath import AvgPathConfig
from .head_loss import head_cross_entropy, needs_logits
from .memory_delta import DeltaNetMixer, GatedDeltaNetMixer
from .memory_identity import IdentityMixer
from .memory_linear import LinearMixer
from .memory_mesa import MesaNetMixer
from .memory_ttt import TTTLinearMixer, TTTMLPMixer
from .mixer import QueryMap, RecurrentMixer, ShortConv
from .norms import AvgPathRMSNorm
from .rotary import AvgPathRotaryEmbedding

MIXERS: dict[str, type[nn.Module]] = {
    "softmax": SoftmaxAttention,
    "sliding_softmax": SlidingSoftmaxAttention,
    "identity": IdentityMixer,
    "linear": LinearMixer,
    "delta_net": DeltaNetMixer,
    "gated_delta_net": GatedDeltaNetMixer,
    "mesa_net": MesaNetMixer,
    "ttt_linear": TTTLinearMixer,
    "ttt_mlp": TTTMLPMixer,
}


class AvgPathMLP(nn.Module):
    """Gated MLP, down(act(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: AvgPathConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        if config.hidden_act not in ACT2FN:
            raise ValueError(f"Unknown hidden_act {config.hidden_act!r}. Known: {', '.join(sorted(ACT2FN))}.")
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class AvgPathDecoderLayer(GradientCheckpointingLayer):
    """Token mixer and MLP, each with an RMSNorm before it (`softmax_post_norm`: behind it) and a residual connection."""

    def __init__(self, config: AvgPathConfig, layer_idx: int):
        super().__init__()
        self.mixer = MIXERS[config.mixer_specs[layer_idx].memory](config, layer_idx)
        self.mlp = AvgPathMLP(config)
        self.has_post_norm = config.softmax_post_norm and config.mixer_specs[layer_idx].readout is None
        if not self.has_post_norm:
            self.input_layernorm = AvgPathRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AvgPathRMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.has_post_norm:
            self.post_feedforward_layernorm = AvgPathRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        alignment: Alignment | None = None,
        layer_cache=None,
        advanced: list | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """One layer on `hidden_states` `[B, T, hidden_size]`.

        Args:
            layer_cache: this layer's entry of the cache, read and advanced.
            advanced: if a list, the entry is left alone and an advanced copy is appended instead. Activation checkpointing
                runs this function twice; the caller keeps the first copy, so the state advances once.
        """
        if advanced is not None:
            layer_cache = snapshot_layer(layer_cache)
            advanced.append(layer_cache)
        if alignment is not None:
            alignment = alignment.to(hidden_states.device)  # the layers of a model may stand on several devices
        mixed, _ = self.mixer(
            hidden_states if self.has_post_norm else self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            alignment=alignment,
            layer_cache=layer_cache,
            **kwargs,
        )
        if self.has_post_norm:
            hidden_states = hidden_states + self.post_attention_layernorm(mixed)
            return hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states))
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def softmax_mask(config: AvgPathConfig, inputs_embeds, attention_mask, cache: Cache | None, position_ids):
    """The causal mask of softmax layers, in the form of the attention implementation; `None` where there are none."""
    if "full_attention" not in config.layer_types:
        return None
    return create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        cache=cache,
        position_ids=position_ids,
        layer_idx=config.layer_types.index("full_attention"),
        # A static cache has room that one query must not see, whether or not the step is compiled.
        allow_is_causal_skip=not (isinstance(cache, StaticCache) and inputs_embeds.shape[1] == 1),
    )


def faulty_files(folder: str | os.PathLike) -> dict[str, list[str]]:
    """The files of a checkpoint's folder that are `"damaged"`, no whole safetensors or index, and the `"missing"` shards."""
    faults = {"damaged": [], "missing": []}
    for file in sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob(SAFE_WEIGHTS_INDEX_NAME)]):
        try:
            if file.name == SAFE_WEIGHTS_INDEX_NAME:
                shards = sorted(set(json.loads(file.read_bytes())["weight_map"].values()))
                faults["missing"] = [shard for shard in shards if not file.with_name(shard).exists()]
            else:
                with safe_open(file, framework="pt"):
                    pass
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError):
            faults["damaged"].append(file.name)
    return faults


@contextlib.contextmanager
def explain_faults(checkpoint: str | os.PathLike | None):
    """Turns an error of reading a checkpoint into one that names the files at fault, if files are.

    Raises:
        ValueError: a file of the checkpoint is damaged.
        FileNotFoundError: a shard is missing.
    """
    try:
        yield
    except (SafetensorError, json.JSONDecodeError, LookupError, TypeError, AttributeError, OSError) as error:
        faults = {} if checkpoint is None else faulty_files(checkpoint)
        if isinstance(error, SafetensorError) and not any(faults.values()):
            faults = {"damaged": ["a weights file"]}
        for kind, files in faults.items():
            if files:
                raise (ValueError if kind == "damaged" else FileNotFoundError)(
                    f"{', '.join(files)} of the checkpoint {checkpoint} is {kind} ({error}): it may not have been copied "
                    "whole. Fetch it anew from where the checkpoint came from."
                ) from error
        raise


@auto_docstring
class AvgPathPreTrainedModel(PreTrainedModel):
    config: AvgPathConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AvgPathDecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": AvgPathDecoderLayer, "attentions": SoftmaxAttention}
    _keep_in_fp32_modules_strict = [
        "A_log",
        "dt_bias",
        "lambda_params",
        "W1",
        "b1",
        "W2",
        "b2",
        "learnable_ttt_lr_weight",
        "learnable_ttt_lr_bias",
        "learnable_token_idx",
        "ttt_norm_weight",
        "ttt_norm_bias",
    ]
    # For the `modules_to_not_convert` of a quantisation config, as patterns over full names: the heads, and the projections
    # of a few rows that make decay and step size of the recurrent memories. Decay parameters and inner weights are no
    # linear layers and stay in fp32 by themselves.
    modules_to_not_convert = ["lm_head", "score", r".*\.a_proj", r".*\.b_proj"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """`PreTrainedModel.from_pretrained`, which names the files and the sizes that are at fault.

        Raises:
            ValueError: a file of the checkpoint is damaged.
            FileNotFoundError: a shard of the weights is missing.
            RuntimeError: sizes of weights and config disagree, without `ignore_mismatched_sizes`.
        """
        with explain_faults(pretrained_model_name_or_path):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        mismatched = sorted(loading_info.mismatched_keys)
        if mismatched and not load_config.ignore_mismatched_sizes:
            sizes = "; ".join(f"{name} is {tuple(had)} instead of {tuple(want)}" for name, had, want in mismatched[:4])
            more = f"; and {len(mismatched) - 4} more" if len(mismatched) > 4 else ""
            raise RuntimeError(
                f"The weights of {load_config.pretrained_model_name_or_path} have other sizes than the config asks for: "
                f"{sizes}{more}. Correct config.json, or what from_pretrained was given on top of it; or pass "
                "ignore_mismatched_sizes=True, and these weights are initialised anew."
            )
        return PreTrainedModel._finalize_model_loading(model, load_config, loading_info)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """`PreTrainedModel.save_pretrained`, of weights in torchao's int8 too, loaded ones included.

        Raises:
            ValueError: the weights were quantized otherwise than by a `quantization_config`, or lie beneath PEFT's adapters.
                Nothing is written then.
        """
        quantizer = getattr(self, "hf_quantizer", None)
        if quantizer is not None and quantizer.quantization_config.quant_method == QuantizationMethod.TORCHAO:
            # It takes its weights apart by itself; what put them together on loading has no inverse in Transformers.
            kwargs.setdefault("save_original_format", False)
        elif quantizer is None and kwargs.get("state_dict") is None and not self._hf_peft_config_loaded:
            for name, parameter in self.named_parameters():
                if ".base_layer." in name:
                    raise ValueError(
                        f"{name} lies beneath one of PEFT's adapters, under a name that no model loads: save the adapter by "
                        "the PeftModel's save_pretrained, or what its merge_and_unload() returns."
                    )
                if type(parameter.data).__module__.startswith("torchao."):
                    raise ValueError(
                        f"{name} is torchao's {type(parameter.data).__name__}, which save_pretrained can only write for "
                        "models quantized as they are loaded: save the plain model, and load it by from_pretrained(..., "
                        "quantization_config=TorchAoConfig(...))."
                    )
        return super().save_pretrained(save_directory, *args, **kwargs)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """`PreTrainedModel.resize_token_embeddings`.

        Raises:
            ValueError: a special token would fall out of the vocabulary. Nothing is changed then.
        """
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        size += -size % (pad_to_multiple_of or 1)
        if size < self.config.vocab_size:
            for owner in ("config", "generation_config"):
                for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
                    value = getattr(getattr(self, owner, None), name, None)
                    ids = value if isinstance(value, list) else [value]
                    if any(token is not None and token >= size for token in ids):
                        raise ValueError(
                            f"{owner}.{name} is {value}, beyond the last of {size} tokens, {size - 1}: set "
                            f"model.{owner}.{name} to a token that stays, or to None, before the vocabulary shrinks."
                        )
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, QueryMap):
            size = module.weight.shape[-1]
            init.copy_(module.weight, torch.eye(size).expand_as(module.weight))
            init.zeros_(module.bias)
        elif isinstance(module, RecurrentMixer):
            module.init_memory()
        elif isinstance(module, ShortConv):
            bound = module.kernel_size[0] ** -0.5
            init.uniform_(module.weight, -bound, bound)


@auto_docstring
class AvgPathModel(AvgPathPreTrainedModel):
    def __init__(self, config: AvgPathConfig):
        super().__init__(config)
        config.validate_architecture()  # fields may have been assigned since its construction
        if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
            raise ValueError(
                f"pad_token_id {config.pad_token_id} is outside the vocabulary, 0 ... {config.vocab_size - 1}."
            )
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(AvgPathDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = AvgPathRMSNorm(config.hidden_size, config.rms_norm_eps)
        scores = {"full_attention", "sliding_attention"} & set(config.layer_types)
        self.rotary_emb = AvgPathRotaryEmbedding(config) if config.use_rope and scores else None
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        r"""
        cu_seq_lens_q (`torch.Tensor` of shape `(num_documents + 1,)`, *optional*):
            Cumulative lengths of documents packed into the batch, over its flattened tokens. They do not see each other.
        seq_idx (`torch.Tensor` of shape `(batch_size, sequence_length)`, *optional*):
            Document number of each packed token; used when `cu_seq_lens_q` is not given. Without either, and without cache
            and padding, documents are taken to begin where `position_ids` does not go up by one.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        is_compiling = torch.compiler.is_compiling()  # checks that look at values would break the graph
        if not is_compiling:
            self._check_inputs(input_ids, inputs_embeds, cache)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        batch_size, length = inputs_embeds.shape[:2]
        if cache is not None and not is_compiling:
            adopt_cache(cache, self.config, batch_size)
            check_room(cache, length)
            if hasattr(cache, "bind"):
                cache.bind(self)
        past_length = cache.get_seq_length() if cache is not None else 0

        mask, is_real = self._split_mask(
            attention_mask, batch_size, past_length, length, may_be_longer=isinstance(cache, StaticCache)
        )
        has_own_mask = isinstance(mask, torch.Tensor) and mask.ndim == 4 and not isinstance(attention_mask, dict)
        starts = self._find_documents(
            cu_seq_lens_q, seq_idx, position_ids, cache, is_real, has_own_mask, (batch_size, length)
        )
        if starts is not None:
            if cache is not None:
                raise ValueError(
                    "Packed documents cannot go into a cache, which holds one text per row: unpack them into rows, or leave "
                    "the cache out."
                )
            use_cache, mask = False, None
            alignment = align_documents(starts, is_real)
            if is_real is not None:
                # Padding belongs to no document: as one-token documents of their own, pads are seen by nothing real.
                starts = starts | ~is_real | nn.functional.pad(~is_real[:, :-1], (1, 0), value=False)
            position_ids = document_positions(starts)
        else:
            alignment = align_padding(is_real) if is_real is not None else None
        if use_cache and cache is None:
            cache = AvgPathCache(self.config)
            if not is_compiling:
                cache.bind(self)

        if position_ids is None:
            position_ids = self._count_positions(attention_mask, past_length, length, inputs_embeds.device)
        causal_mask = softmax_mask(self.config, inputs_embeds, mask, cache, position_ids)
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids) if self.rotary_emb is not None else None
        if cu_seq_lens_q is not None:
            kwargs["cu_seq_lens_q"] = cu_seq_lens_q

        hidden_states = inputs_embeds
        for index, layer in enumerate(self.layers):
            replays = layer.gradient_checkpointing and self.training and torch.is_grad_enabled()
            advanced = [] if replays and cache is not None else None
            is_reentrant = replays and getattr(layer._gradient_checkpointing_func, "keywords", {}).get("use_reentrant")
            if is_reentrant and cache is not None and int(past_length) > 0:
                raise ValueError(
                    "Reentrant activation checkpointing runs layers without a graph first, which cuts gradients through the "
                    "cache: use model.gradient_checkpointing_enable({'use_reentrant': False})."
                )
            enter_turn(cache, index)
            hidden_states = layer(
                hidden_states,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                alignment=alignment,
                layer_cache=cache.layers[index] if cache is not None else None,
                advanced=advanced,
                **kwargs,
            )
            if advanced:
                cache.layers[index] = advanced[0]
            leave_turn(cache, index)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _check_inputs(self, input_ids, inputs_embeds, cache) -> None:
        name, given = ("input_ids", input_ids) if input_ids is not None else ("inputs_embeds", inputs_embeds)
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(given).__name__}.")
        if (input_ids is None) != given.is_floating_point() or given.dtype == torch.bool:
            wanted = "integer" if input_ids is not None else "floating-point"
            raise TypeError(f"{name} must be a {wanted} tensor, got {given.dtype}.")
        shape = given.shape if input_ids is not None else given.shape[:-1]
        if len(shape) != 2:
            raise ValueError(f"{name} must have a batch and a time axis, got shape {tuple(given.shape)}.")
        if 0 in shape:
            raise ValueError(f"{name} is empty (shape {tuple(shape)}): give at least one row of at least one token.")
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"cache must be a Cache such as AvgPathCache(model.config), got {type(cache).__name__}.")
        # On an accelerator the look-up itself reports a bad id; reading it back here would stall the device.
        if input_ids is not None and input_ids.device.type == "cpu":
            low, high = input_ids.aminmax()
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"input_ids must lie in 0 ... {self.config.vocab_size - 1} (vocab_size - 1), got values from "
                    f"{int(low)} to {int(high)}: the tokenizer may not belong to this model, or labels (-100) were given."
                )

    def _split_mask(
        self, attention_mask, batch_size: int, past_length: int | torch.Tensor, length: int, may_be_longer: bool
    ):
        """The mask for softmax layers, and `[B, T]` bool of what is real among the present tokens (`None`: all).

        Args:
            may_be_longer: whether a mask may also cover tokens to come, as far as a static cache has room.
        """
        if isinstance(attention_mask, dict):
            mask, padding = attention_mask.get("full_attention"), attention_mask.get("linear_attention")
        else:
            mask = padding = attention_mask
        if mask is not None and mask.ndim == 4 and padding is mask:
            if any(layer_type != "full_attention" for layer_type in self.config.layer_types):
                raise ValueError(
                    "A 4-dimensional attention_mask can only be honoured by softmax layers, and this model has others "
                    f"({', '.join(sorted(set(self.config.mixer_types) - {'softmax'}))}): give a 2-dimensional padding mask."
                )
            padding = None
        if padding is None:
            return mask, None
        if torch.compiler.is_compiling() and length == 1:  # a token that was just generated is no padding
            return mask, None
        # A mask prepared per layer type covers the present tokens only.
        past_length = 0 if isinstance(attention_mask, dict) else int(past_length)
        expected = (batch_size, past_length + length)
        if tuple(padding.shape) != expected and not (
            may_be_longer and padding.shape[0] == batch_size and padding.shape[1] > expected[1]
        ):
            past = f" ({expected[1] - length} cached + {length} new)" if expected[1] > length else ""
            raise ValueError(
                f"attention_mask must have shape (batch, tokens) = {expected}{past}, got {tuple(padding.shape)}."
            )
        if padding.is_floating_point() and padding.device.type == "cpu" and bool((padding < 0).any()):
            raise ValueError(
                "A 2-dimensional attention_mask is 1 at real tokens and 0 at padding; negative values look like an additive "
                "mask, in which 0 means real."
            )
        is_real = padding[:, past_length : past_length + length].bool()
        return mask, None if bool(is_real.all()) else is_real

    def _find_documents(
        self, cu_seq_lens_q, seq_idx, position_ids, cache, is_real, has_own_mask: bool, shape: tuple[int, int]
    ) -> torch.Tensor | None:
        if position_ids is not None and tuple(position_ids.shape) not in {shape, (1, shape[1])}:
            raise ValueError(
                f"position_ids must have shape {shape} or (1, {shape[1]}), got {tuple(position_ids.shape)}."
            )
        if has_own_mask and (cu_seq_lens_q is not None or seq_idx is not None):
            raise ValueError(
                "Give either a 4-dimensional attention_mask or a description of packed documents, not both."
            )
        # Positions repeat for innocent reasons under padding, a cache or a mask of one's own (a tree of drafts, say):
        # there only explicit descriptions count.
        resets = position_ids if cache is None and is_real is None and not has_own_mask else None
        return find_document_starts(shape, cu_seq_lens_q, seq_idx, resets)

    @staticmethod
    def _count_positions(attention_mask, past_length: int | torch.Tensor, length: int, device) -> torch.Tensor:
        """Position of each token, `[B or 1, T]`, counted in real tokens."""
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0).to(device)
            return positions[:, torch.arange(length, device=device) + past_length]
        # Added, not a bound of the range: a static cache counts in a tensor.
        return (torch.arange(length, device=device) + past_length)[None]


@auto_docstring
class AvgPathForCausalLM(AvgPathPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: AvgPathConfig):
        super().__init__(config)
        self.model = AvgPathModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, cache, position_ids=None, **kwargs):
        """The masks of a compiled decode step, keyed as `forward` reads them: causal for softmax layers, and padding."""
        return {
            "full_attention": softmax_mask(config, inputs_embeds, attention_mask, cache, position_ids),
            "linear_attention": create_recurrent_attention_mask(config, inputs_embeds, attention_mask, cache),
        }

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        r"""
        skip_logits (`bool`, *optional*, defaults to `False`):
            Return the loss of `labels` (or `shift_labels`) without the logits, which are made for some tokens at a time
            and never held: less memory, and faster on CPUs. `logits` is `None` then. With a `loss_function` of its own or
            a head that is more than a linear layer the model makes the logits, and returns them as little.

        Example:

        ```python
        >>> import modeling_avgpath
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer

        >>> model = AutoModelForCausalLM.from_pretrained("runs/pretrain/final")
        >>> tokenizer = AutoTokenizer.from_pretrained("runs/pretrain/final")
        >>> inputs = tokenizer("My fellow citizens", return_tensors="pt")
        >>> tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=40))
        ```"""
        if skip_logits and labels is None and kwargs.get("shift_labels") is None:
            raise ValueError(
                "skip_logits=True returns the loss alone, which needs labels or shift_labels: give them to the model (a "
                "Trainer with label_smoothing_factor takes them away), or leave skip_logits out."
            )
        if skip_logits and (isinstance(logits_to_keep, torch.Tensor) or logits_to_keep):
            raise ValueError(
                f"skip_logits=True keeps no logits, and logits_to_keep={logits_to_keep} asks for some: give one of them."
            )
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = loss = None
        hidden_states = outputs.last_hidden_state
        if (
            skip_logits
            and self.loss_function is ForCausalLMLoss
            and not needs_logits(self.lm_head, hidden_states.device)
        ):
            loss = head_cross_entropy(hidden_states, self.lm_head, labels, **kwargs)
        else:
            logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
            if labels is not None or skip_logits:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if skip_logits:
                logits = None
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def init_continuous_batching(self, *args, **kwargs):
        """Refused: Transformers' paged cache knows keys and values only.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "Continuous batching (generate_batch, cache_implementation='paged') keeps keys and values in pages, which have "
            "no place for recurrent states: pad the prompts on the left and call generate() on the batch."
        )

    def _get_candidate_generator(self, generation_config, input_ids, *args, model_kwargs, **kwargs):
        if generation_config.assistant_early_exit is not None:
            raise ValueError(
                f"assistant_early_exit={generation_config.assistant_early_exit} drafts by lowering num_hidden_layers of the "
                "model's config for a while, which here also says what each layer mixes by: give a draft as "
                "assistant_model, or prompt_lookup_num_tokens."
            )
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError("Assisted decoding and prompt lookup draft from input_ids: leave inputs_embeds out.")
        positions = model_kwargs.get("position_ids")
        if positions is not None and positions.shape[-1] > input_ids.shape[1]:
            raise ValueError(
                "Assisted decoding and prompt lookup look at the text that the cache has read, too: of "
                f"{positions.shape[-1]} tokens input_ids has {input_ids.shape[1]}. Give all of them."
            )
        generator = super()._get_candidate_generator(
            generation_config, input_ids, *args, model_kwargs=model_kwargs, **kwargs
        )
        draft = generator.get_candidates

        @functools.wraps(draft)
        def get_candidates(input_ids, **kwargs):
            candidates, logits = draft(input_ids, **kwargs)
            # One token follows the last drafted one; further ones would go beyond the end, and beyond a static cache.
            length = min(
                candidates.shape[1] - input_ids.shape[1], generation_config.max_length - input_ids.shape[1] - 1
            )
            record_at_least(model_kwargs["cache"], length)
            return candidates[:, : input_ids.shape[1] + length], logits if logits is None else logits[:, :length]

        generator.get_candidates = get_candidates
        return generator

    @property
    def _has_virtual_tokens(self) -> bool:
        """Whether PEFT's prompt learning stands in for `prepare_inputs_for_generation`, as it does while it generates."""
        caller = getattr(self.prepare_inputs_for_generation, "__self__", self)
        return getattr(getattr(caller, "active_peft_config", None), "is_prompt_learning", False)

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # generate() reads the signature
    def prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=None, cache=None, attention_mask=None, inputs_embeds=None, **kwargs
    ):
        positions = kwargs.get("position_ids")
        if kwargs.get("is_first_iteration") and positions is not None and cache is not None:
            given = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
            if positions.shape[-1] > given:  # what the cache has read is left out
                next_sequence_length = None
            elif next_sequence_length is None and not positions[..., 0].any():
                # The text from its start, as assisted decoding gives it, whatever the cache has read of it.
                next_sequence_length = given - int(cache.get_seq_length())
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        if self._has_virtual_tokens and "cache" in inputs:
            # PEFT looks for the cache under its former name; not finding it, it would put the virtual tokens before every
            # new token.
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        if self._has_virtual_tokens and (
            generation_mode == "assisted_generation"
            or generation_config.prefill_chunk_size is not None
            or (model_kwargs.get("cache") is not None and model_kwargs["cache"].get_seq_length() > 0)
        ):
            raise ValueError(
                "PEFT's prompt learning (prompt tuning, p-tuning, prefix tuning) reads the prompt at once, then one token "
                "at a time: leave out prompt_lookup_num_tokens, assistant_model, prefill_chunk_size and filled caches, or "
                "use LoRA."
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
        cache, positions = model_kwargs.get("cache"), model_kwargs.get("position_ids")
        if type(cache) in (DynamicCache, StaticCache):
            adopt_cache(cache, self.config, batch_size=None)
        past_length = int(cache.get_seq_length()) if cache is not None else 0
        if past_length and positions is not None and positions.shape[-1] <= past_length:
            raise ValueError(
                f"The cache has read {past_length} tokens and the text given has {positions.shape[-1]}: it must begin with "
                "those and go on beyond them. Add tokens; or let the cache forget its last ones, by cache.crop after "
                "cache.activate_past_recording."
            )
        if generation_config.is_assistant and cache is not None:
            record_at_least(cache, generation_config.max_new_tokens or 0)  # all of a draft may be taken back


# The mixins of the heads below build their base model through AutoModel, which remote code cannot reach: each builds it
# directly instead.


class AvgPathForSequenceClassification(GenericForSequenceClassification, AvgPathPreTrainedModel):
    def __init__(self, config: AvgPathConfig):
        AvgPathPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = AvgPathModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


class AvgPathForTokenClassification(GenericForTokenClassification, AvgPathPreTrainedModel):
    def __init__(self, config: AvgPathConfig):
        AvgPathPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = AvgPathModel(config)
        self.dropout = nn.Dropout(getattr(config, "classifier_dropout", 0.1))
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class AvgPathForQuestionAnswering(GenericForQuestionAnswering, AvgPathPreTrainedModel):
    def __init__(self, config: AvgPathConfig):
        AvgPathPreTrainedModel.__init__(self, config)
        self.model = AvgPathModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


__all__ = [
    "AvgPathForCausalLM",
    "AvgPathForQuestionAnswering",
    "AvgPathForSequenceClassification",
    "AvgPathForTokenClassification",
    "AvgPathModel",
    "AvgPathPreTrainedModel",
]
