# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Softmax scoring, and the two memories that are nothing but softmax: all pairs, and the last `sliding_window` pairs."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache_avgpath import advance
from .norms import make_qk_norms
from .rotary import rotate


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention written out; q `[B, H, T, D]`, k, v `[B, H_kv, S, D]`, additive or boolean mask `[B, 1, T, S]`.

    Without a mask the T queries are causal and belong to the last T of the S keys.

    Returns:
        output `[B, T, H, D_v]` and the attention weights `[B, H, T, S]`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is None:
        length, size = scores.shape[2:]
        attention_mask = torch.ones(length, size, dtype=torch.bool, device=scores.device).tril(size - length)
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    implementation: str | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Score `query` `[B, T, H, D]` against `key` `[B, S, H_kv, D]` and average `value` `[B, S, H_kv, D_v]`.

    Args:
        attention_mask: in the form that `implementation` wants; `None` is causal (T = S) or unrestricted (T = 1).
        implementation: a name known to Transformers, by default the one the config asks for.

    Returns:
        output `[B, T, H, D_v]` and the weights where the implementation gives them.
    """
    implementation = implementation or module.config._attn_implementation
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    dropout = module.config.attention_dropout if module.training else 0.0
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return interface(
        module, query, key, value, attention_mask, dropout=dropout, scaling=module.head_dim**-0.5, **kwargs
    )


def attend_visible(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """`attend` where what is visible is our own affair: a boolean mask `[B, 1, T, S]`, or `None` for plain causality.

    Flash attention takes no such masks, and flex attention only masks of its own kind: `sdpa` stands in for them.
    """
    configured = module.config._attn_implementation
    keeps = configured == "eager" or (visible is None and configured.startswith("flash"))
    return attend(module, query, key, value, visible, configured if keeps else "sdpa")[0]


class SoftmaxProjections(nn.Module):
    """What softmax and `identity` layers share: grouped q, k, v, o projections, QK norm, output gate, scoring's shape."""

    has_values = True

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.is_causal = True
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        if self.has_values:
            self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.g_proj = None
        if config.attention_output_gate:
            self.g_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.q_norm, self.k_norm = make_qk_norms(config)

    def project_output(self, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the layer returns `[B, T, hidden_size]` for averages `[B, T, H, D]`, gated by its input if configured."""
        output = output.flatten(2)
        if self.g_proj is not None:
            output = output * self.g_proj(hidden_states).sigmoid()
        return self.o_proj(output)

    def project_keys(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q `[B, T, H, D]` and k `[B, T, H_kv, D]`, normalised where configured, un-rotated."""
        query, key = (proj(hidden_states).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj))
        return (query, key) if self.q_norm is None else (self.q_norm(query), self.k_norm(key))

    def project(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[B, T, H, D]` and k, v `[B, T, H_kv, D]`; q and k normalised and rotated where configured."""
        query, key = self.project_keys(hidden_states)
        value = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        if position_embeddings is not None:
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        return query, key, value


class SoftmaxAttention(SoftmaxProjections):
    """Memory `softmax`: every pair is remembered (step 0 of the path)."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        alignment=None,
        layer_cache=None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.project(hidden_states, position_embeddings)
        if layer_cache is not None:
            key, value = (
                tensor.transpose(1, 2) for tensor in layer_cache.update(key.transpose(1, 2), value.transpose(1, 2))
            )
        output, weights = attend(self, query, key, value, attention_mask, **kwargs)
        return self.project_output(output, hidden_states), weights


class SlidingSoftmaxAttention(SoftmaxProjections):
    """Memory `sliding_softmax`: the last `sliding_window` pairs, the current one included, and the first
    `num_sink_tokens` of the text, on which trained softmax layers rest much of their attention (Xiao et al., 2024).

    Its window slides over real tokens, in rows (see alignment.py), and costs time and memory linear in the text.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.past_window = config.sliding_window - 1
        self.num_sinks = config.num_sink_tokens

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        alignment=None,
        layer_cache=None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.project(hidden_states, position_embeddings)
        streams = {"query": query, "key": key, "value": value}
        output = advance(self.run_rows, streams, alignment, layer_cache)
        return self.project_output(output, hidden_states), None

    def run_rows(self, rows: dict[str, torch.Tensor], lengths: torch.Tensor | None, layer_cache):
        """Attention of one group of rows from the cached window on; returns outputs `[R, L, H, D]` and the new window."""
        return self.slide(**rows, lengths=lengths, states=layer_cache.states if layer_cache is not None else {})

    def slide(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor | None,
        states: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Attention of rows `[R, L, H, D]` whose window continues from `states`; returns outputs and new states."""
        rows, length = query.shape[:2]
        past = self.past_window
        keys = append_tail(states.get("keys"), key, past)  # [R, past + L, H_kv, D]
        values = append_tail(states.get("values"), value, past)
        seen = states.get("length")
        if seen is None:
            seen = torch.zeros(rows, dtype=torch.long, device=query.device)

        # Query i of a block sees the places i ... i + past of the block's keys, which start `past` places before it.
        block = min(length, max(past, 64))
        band = torch.ones(block, block + past, dtype=torch.bool, device=query.device).tril(past).triu()
        is_filled = torch.arange(block + past, device=query.device) >= (past - seen)[:, None]  # [R, block + past]
        first = slice(0, block + past)
        visible = (band & is_filled[:, None])[:, None]
        total = seen + (length if lengths is None else lengths)
        sinks = None
        if self.num_sinks:
            sink_keys = keep_first(states.get("sink_keys"), key, seen, total, self.num_sinks)
            sink_values = keep_first(states.get("sink_values"), value, seen, total, self.num_sinks)
            # A query sees as sinks those places that its window has left behind.
            left_behind = seen[:, None] + torch.arange(length, device=query.device) - past  # [R, L]
            is_left = torch.arange(self.num_sinks, device=query.device) < left_behind[..., None]  # [R, L, sinks]
            sinks = sink_keys, sink_values, is_left
        output = self.attend_window(query[:, :block], keys[:, first], values[:, first], visible, sinks)
        if length > block:
            output = torch.cat((output, self.slide_blocks(query, keys, values, band, block, sinks)), dim=1)
        new_states = {
            "keys": take_tail(keys, past, lengths),
            "values": take_tail(values, past, lengths),
            "length": total,
        }
        if sinks is not None:
            new_states |= {"sink_keys": sink_keys, "sink_values": sink_values}
        return output, new_states

    def attend_window(self, query, key, value, visible, sinks) -> torch.Tensor:
        """`attend_visible`, for the first queries of `sinks` (keys, values, `[R, L, sinks]` visible) if there are any."""
        if sinks is not None:
            sink_keys, sink_values, is_left = sinks
            is_left = is_left[:, None, : query.shape[1]]
            key, value = torch.cat((sink_keys, key), dim=1), torch.cat((sink_values, value), dim=1)
            visible = torch.cat((is_left, visible.expand(len(query), 1, *visible.shape[2:])), dim=-1)
        return attend_visible(self, query, key, value, visible)

    def slide_blocks(self, query, keys, values, band, block: int, sinks) -> torch.Tensor:
        """All blocks but the first: their windows lie in the present rows, so they go through one batched call."""
        rows, length = query.shape[:2]
        filler = -length % block
        blocks = (length + filler) // block - 1

        def cut(x: torch.Tensor) -> torch.Tensor:
            x = F.pad(x[:, block:], (*[0, 0] * (x.ndim - 2), 0, filler))
            return x.unflatten(1, (blocks, block)).flatten(0, 1)  # [R * blocks, block, ...]

        def windows(x: torch.Tensor) -> torch.Tensor:
            x = F.pad(x[:, block:], (0, 0, 0, 0, 0, filler)).unfold(1, block + self.past_window, block)
            return x.movedim(-1, 2).flatten(0, 1)  # [R * blocks, block + past, H_kv, D]

        if sinks is not None:
            sink_keys, sink_values, is_left = sinks
            sink_keys, sink_values = (x.repeat_interleave(blocks, dim=0) for x in (sink_keys, sink_values))
            sinks = sink_keys, sink_values, cut(is_left)
        output = self.attend_window(cut(query), windows(keys), windows(values), band[None, None], sinks)
        return output.unflatten(0, (rows, blocks)).flatten(1, 2)[:, : length - block]


def append_tail(tail: torch.Tensor | None, x: torch.Tensor, size: int) -> torch.Tensor:
    """`x` `[R, L, ...]` behind the last `size` places before it (zeros for no past): `[R, size + L, ...]`."""
    if tail is None:
        tail = x.new_zeros(x.shape[0], size, *x.shape[2:])
    return torch.cat((tail.to(x.dtype), x), dim=1)


def take_tail(x: torch.Tensor, size: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """The last `size` places of `x` `[R, size + L, ...]`, up to each row's `lengths` real places beyond the old tail.

    In memory of its own: a view would keep all of `x` alive in the cache.
    """
    if lengths is None:
        return x[:, x.shape[1] - size :].clone(memory_format=torch.contiguous_format)
    index = lengths[:, None] + torch.arange(size, device=x.device)
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def keep_first(
    first: torch.Tensor | None, x: torch.Tensor, seen: torch.Tensor, total: torch.Tensor, size: int
) -> torch.Tensor:
    """The first `size` places of a text, `[R, size, ...]`, zeros where it has none yet.

    Args:
        first: what was kept of the `seen` `[R]` tokens before, `[R, size, ...]`, or `None` at the start.
        x: the present ones, `[R, L, ...]`, up to the `total` `[R]` tokens so far.
    """
    place = torch.arange(size, device=x.device)
    index = (place - seen[:, None]).clamp(0, x.shape[1] - 1)
    fresh = x[torch.arange(len(x), device=x.device)[:, None], index]
    is_past, is_there = ((place < bound[:, None])[..., None, None] for bound in (seen, total))
    kept = fresh if first is None else torch.where(is_past, first.to(x.dtype), fresh)
    return kept.masked_fill(~is_there, 0)
