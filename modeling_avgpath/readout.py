# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Reading a memory through attention: steps 1 and 2 of the path.

Keys are kept un-rotated, because the memory sees them so, and are rotated when they are scored. Positions are counted
in real tokens of the row; the scores depend on their differences alone.
"""

from typing import NamedTuple

import torch
from torch import nn

from .attention import attend_visible
from .rotary import AvgPathRotaryEmbedding, rotate


class Keys(NamedTuple):
    """All keys that the L present queries of each row may score.

    Attributes:
        keys: `[R, S, H_kv, D]`, un-rotated.
        positions: `[R, S]`, -1 at filler and in room that is not used yet.
        query_positions: `[R, L]`, -1 at filler.
        is_causal: whether plain causality over S = L keys says all about what is visible.
    """

    keys: torch.Tensor
    positions: torch.Tensor
    query_positions: torch.Tensor
    is_causal: bool

    def visible(self) -> torch.Tensor | None:
        """Boolean mask `[R, 1, L, S]` of what each query may see, `None` if `is_causal`."""
        if self.is_causal:
            return None
        keys, queries = self.positions[:, None, None, :], self.query_positions[:, None, :, None]
        # A query at filler has nothing to see; it sees everything, which keeps its softmax and gradient finite.
        return ((keys >= 0) & (keys <= queries)) | (queries < 0)


class AttentionReadout(nn.Module):
    """Scores queries against all keys of their row, past and present, in the shape of the config's softmax layers."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.is_causal = True
        self.rotary_emb = AvgPathRotaryEmbedding(config) if config.use_rope else None

    def collect(self, key: torch.Tensor, lengths: torch.Tensor | None, layer_cache) -> Keys:
        """Put the present keys behind those of the past.

        Args:
            key: `[R, L, H_kv, D]`, un-rotated.
            lengths: `[R]` real places of each row, or `None` for all.
            layer_cache: a `KeyCacheLayer` to read and append to, or `None`.
        """
        rows, length = key.shape[:2]
        steps = torch.arange(length, device=key.device).expand(rows, length)
        past = layer_cache.states.get("positions") if layer_cache is not None else None
        positions = steps if past is None else steps + past.max(dim=1, keepdim=True).values + 1
        if lengths is not None:
            positions = positions.masked_fill(steps >= lengths[:, None], -1)
        keys, key_positions = (key, positions) if layer_cache is None else layer_cache.append_keys(key, positions)
        is_causal = past is None and lengths is None and keys.shape[1] == length
        return Keys(keys, key_positions, positions, is_causal)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x` `[R, T, H, D]` rotated to `positions` `[R, T]`; unchanged without rotary embedding."""
        if self.rotary_emb is None:
            return x
        return rotate(x, *self.rotary_emb(x, positions.clamp(min=0)))

    def mean(self, query: torch.Tensor, scored: Keys, values: torch.Tensor) -> torch.Tensor:
        """Attention-weighted mean of `values` `[R, S, H_kv, D]` for `query` `[R, L, H, D]`: `[R, L, H, D]`."""
        query, keys = self.rotate(query, scored.query_positions), self.rotate(scored.keys, scored.positions)
        return attend_visible(self, query, keys, values, scored.visible())
