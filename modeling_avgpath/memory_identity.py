# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Memory `identity`: mu(k) = k, so the mean key itself is the output. This is attention with K = V: half the cache."""

import torch
from torch import nn

from .cache_avgpath import advance
from .norms import AvgPathRMSNorm
from .readout import AttentionReadout


class IdentityMixer(nn.Module):
    """K = V attention, scored with rotated keys and averaging un-rotated ones.

    The shape of multi-head latent attention and of shared-KV multi-query attention; expectation and mean field agree.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = AvgPathRMSNorm(config.head_dim, config.rms_norm_eps) if config.use_qk_norm else None
        self.k_norm = AvgPathRMSNorm(config.head_dim, config.rms_norm_eps) if config.use_qk_norm else None
        self.readout = AttentionReadout(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        alignment=None,
        layer_cache=None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        query, key = (proj(hidden_states).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj))
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)

        output = advance(self.run_rows, {"query": query, "key": key}, alignment, layer_cache)
        return self.o_proj(output.flatten(2)), None

    def run_rows(self, rows: dict[str, torch.Tensor], lengths: torch.Tensor | None, layer_cache):
        """The mean keys `[R, L, H, D]` of one group of rows, and no state."""
        scored = self.readout.collect(rows["key"], lengths, layer_cache)
        return self.readout.mean(rows["query"], scored, scored.keys), {}
