# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The cache of AvgPath models: per layer either keys and values, keys alone, or a state of constant size.

A state is a dictionary of named tensors whose first axis is the batch. Layers hand the whole dictionary out and take a
new one back; tensors are replaced, never written in place, so a carried state stays part of the autograd graph.
"""

from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer


class StateCacheLayer(CacheLayerMixin):
    """Cache of a layer whose memory has constant size: named state tensors, batch first.

    Attributes:
        states: name -> `[B, ...]`; empty before the first update.
        cumulative_length: tokens seen, padding included (as the attention layers count them).
    """

    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, **kwargs):
        super().__init__()
        self.states: dict[str, torch.Tensor] = {}
        self.cumulative_length = 0

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={tuple(state.shape)}" for name, state in self.states.items())
        return f"{type(self).__name__}({shapes})"

    @property
    def batch_size(self) -> int:
        """Rows held, or -1 before the first update."""
        return next((len(state) for state in self.states.values()), -1)

    def update_states(self, states: dict[str, torch.Tensor], num_tokens: int) -> None:
        """Replace the named states by those after `num_tokens` more tokens (padding included)."""
        self.states = {**self.states, **states}
        self.cumulative_length += num_tokens
        self.is_initialized = True

    def snapshot(self) -> "StateCacheLayer":
        """A copy that shares the present tensors; updates of one do not reach the other."""
        copy = type(self)()
        copy.__dict__.update(self.__dict__)
        copy.states = dict(self.states)
        return copy

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to allocate: states come into being with the first update."""

    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError(f"{type(self).__name__} keeps a recurrent state, not keys and values: use update_states.")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise RuntimeError(
                f"Cannot remove {-tokens_to_remove} tokens from {type(self).__name__}: a recurrent state does not tell its "
                "past. Keep a copy.deepcopy of the cache from before those tokens instead."
            )

    def reset(self) -> None:
        self.states = {}
        self.cumulative_length = 0
        self.is_initialized = False

    def map_states(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor held by `function` of it."""
        self.states = {name: function(state) for name, state in self.states.items()}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.map_states(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_states(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_states(lambda state: state[indices.to(state.device)])

    def offload(self) -> None:
        if self.states:
            self.device = next(iter(self.states.values())).device
        self.map_states(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self.map_states(lambda state: state.to(self.device, non_blocking=True))


class SlidingCacheLayer(StateCacheLayer):
    """Cache of a `sliding_softmax` layer: the last `sliding_window - 1` real tokens' keys and values, as states."""

    is_sliding = True


class KeyCacheLayer(StateCacheLayer):
    """Cache of a mean-field or expectation layer: un-rotated keys of all tokens, plus the memory's state.

    Beside the states it holds `keys` `[B, S, H, D]` and `positions` `[B, S]` int32: a key's position in its row, counted
    in real tokens, and -1 for padding.
    """

    def append_keys(self, keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `keys` `[B, T, H, D]` at `positions` `[B, T]`; returns all keys and positions, those of the past first."""
        positions = positions.to(torch.int32)
        if "keys" in self.states:
            keys = torch.cat((self.states["keys"], keys), dim=1)
            positions = torch.cat((self.states["positions"], positions), dim=1)
        self.states = {**self.states, "keys": keys, "positions": positions}
        return keys, positions


CACHE_LAYERS = {
    "full_attention": DynamicLayer,
    "sliding_attention": SlidingCacheLayer,
    "linear_attention": StateCacheLayer,
    "hybrid": KeyCacheLayer,
}


# The config fields that decide what the tensors of a cache mean.
CACHE_FIELDS = (
    "mixer_types", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "sliding_window",
    "ttt_conv_kernel_dim", "ttt_mini_batch_size",
)  # fmt: skip


def cache_fields(config) -> dict[str, object]:
    """The fields of a config that a cache made for it depends on."""
    return {name: getattr(config, name) for name in CACHE_FIELDS}


def layer_tensors(layer) -> list[torch.Tensor]:
    """All tensors that a cache layer holds now."""
    if hasattr(layer, "states"):
        return list(layer.states.values())
    return [tensor for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)) if tensor is not None]


class AvgPathCache(DynamicCache):
    """Cache for a model of the given config; what `generate()` and forward passes with `use_cache` build by default.

    Softmax layers grow with the text; `sliding_softmax` and recurrent layers hold the same bytes after 10 tokens and after
    a million; mean-field and expectation layers keep keys without values.

    Args:
        config (`AvgPathConfig`): the model's configuration.

    Example:

    ```python
    >>> cache = AvgPathCache(model.config)
    >>> outputs = model(input_ids, cache=cache)
    >>> cache.nbytes, cache.nbytes_per_layer
    ```
    """

    def __init__(self, config):
        layers = [CACHE_LAYERS[layer_type]() for layer_type in config.layer_types]
        Cache.__init__(self, layers=layers)
        self.fields = cache_fields(config)

    @property
    def nbytes_per_layer(self) -> list[int]:
        """Bytes of the tensors that each layer holds now."""
        return [sum(tensor.nbytes for tensor in layer_tensors(layer)) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held now."""
        return sum(self.nbytes_per_layer)

    def detach_(self) -> "AvgPathCache":
        """Cut all held tensors from the autograd graph, for truncated back-propagation through time; returns `self`."""
        for layer in self.layers:
            if hasattr(layer, "states"):
                layer.map_states(torch.Tensor.detach)
            elif layer.keys is not None:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return self


def adopt_cache(cache: Cache, config, batch_size: int) -> None:
    """Make any `Cache` fit an AvgPath model: empty layers that cannot hold a layer's state are replaced, in place.

    Raises:
        ValueError: the cache holds another model's layers or another batch size; nothing is changed then.
    """
    fields = cache_fields(config)
    made_for = getattr(cache, "fields", fields)
    different = [
        f"{name} is {made_for[name]} there and {value} here"
        for name, value in fields.items()
        if made_for[name] != value
    ]
    if different:
        raise ValueError(
            f"The cache belongs to another model: {'; '.join(different)}. Make one with AvgPathCache(config)."
        )
    lazy = getattr(cache, "layer_class_to_replicate", None) is not None and not cache.layers
    layers = [CACHE_LAYERS[layer_type]() for layer_type in config.layer_types] if lazy else list(cache.layers)
    if len(layers) != len(config.layer_types):
        raise ValueError(
            f"The cache belongs to another model: it has {len(layers)} layers, this model {len(config.layer_types)}. Make "
            "one with AvgPathCache(config)."
        )
    for index, (layer, layer_type) in enumerate(zip(layers, config.layer_types, strict=True)):
        held = [tensor for tensor in layer_tensors(layer) if tensor.numel()]
        expected = CACHE_LAYERS[layer_type]
        # By name: remote code and the installed package define these classes twice.
        fits = (
            type(layer).__name__ == expected.__name__
            if layer_type != "full_attention"
            else not hasattr(layer, "states")
        )
        if not fits:
            if held:
                raise ValueError(
                    f"The cache belongs to another model: its layer {index} is a filled {type(layer).__name__}, this "
                    f"model's is {config.mixer_types[index]!r}. Make one with AvgPathCache(config)."
                )
            layers[index] = expected()
        rows = {len(tensor) for tensor in held}
        if rows and rows != {batch_size}:
            raise ValueError(
                f"The cache holds {rows.pop()} rows but the input has {batch_size}: continue with the same batch, or use "
                "cache.batch_repeat_interleave, cache.batch_select_indices or a new cache."
            )
    if lazy:
        cache.layer_class_to_replicate = None
    cache.layers, cache.fields = layers, fields


__all__ = ["AvgPathCache"]
