# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Memory `linear`: gated linear attention, a decayed sum of outer products."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .mixer import RecurrentMixer
from .norms import upcast
from .ops import linear_attention


class LinearMixer(RecurrentMixer):
    """G_t = gamma_t G_{t-1} + beta_t v_t k_t^T, read as G_t q_t (Katharopoulos et al., 2020; gates as in MesaNet).

    gamma = sigmoid(a_proj x) and beta = sigmoid(b_proj x) per head; `linear_use_gates=False` fixes both to 1.
    """

    state_names = ("G",)
    has_unit_keys = True

    def build_memory(self) -> None:
        if self.config.linear_use_gates:
            self.a_proj = nn.Linear(self.config.hidden_size, self.num_states, bias=True)
            self.b_proj = nn.Linear(self.config.hidden_size, self.num_states, bias=True)

    def init_memory(self) -> None:
        if self.config.linear_use_gates:
            # Retentions 1 - 1/n for n from 4 to 256 tokens over the heads, as a bias that the text moves.
            spans = torch.logspace(2, 8, self.num_states, base=2.0, dtype=torch.float32)
            init.copy_(self.a_proj.bias, torch.logit(1 - 1 / spans))

    def gates(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.config.linear_use_gates:
            return {"beta": hidden_states.new_ones(*hidden_states.shape[:2], self.num_states, dtype=torch.float32)}
        return {
            "g": F.logsigmoid(upcast(self.a_proj(hidden_states))),
            "beta": upcast(self.b_proj(hidden_states)).sigmoid(),
        }

    def advance(self, query, key, value, gates, states, lengths, output_states):
        scale = None if self.readout is None else 1.0
        reads, state = linear_attention(
            query, key, value, **gates, scale=scale, initial_state=states.get("G"), output_final_state=output_states
        )
        return reads, {"G": state} if output_states else {}
