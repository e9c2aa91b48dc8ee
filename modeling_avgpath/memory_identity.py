# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Memory `identity`: mu(k) = k, so the mean key itself is the output. This is attention with K = V: half the cache."""

import torch

from .attention import SoftmaxProjections
from .cache_avgpath import advance
from .readout import AttentionReadout


class IdentityMixer(SoftmaxProjections):
    """K = V attention, scored with rotated keys and averaging un-rotated ones.

    The shape of multi-head latent attention and of shared-KV multi-query attention; expectation and mean field agree.
    """

    has_values = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
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
        query, key = self.project_keys(hidden_states)
        output = advance(self.run_rows, {"query": query, "key": key}, alignment, layer_cache)
        return self.project_output(output, hidden_states), None

    def run_rows(self, rows: dict[str, torch.Tensor], lengths: torch.Tensor | None, layer_cache):
        """The mean keys `[R, L, H, D]` of one group of rows, and no state."""
        scored = self.readout.collect(rows["key"], lengths, layer_cache)
        return self.readout.mean(rows["query"], scored, scored.keys), {}
