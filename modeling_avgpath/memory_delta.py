# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Memories `delta_net` and `gated_delta_net`: one step of stochastic gradient descent on a linear model per token."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .mixer import RecurrentMixer
from .norms import upcast
from .ops import delta_rule, gated_delta_rule


class DeltaNetMixer(RecurrentMixer):
    """W_t = W_{t-1} - beta_t (W_{t-1} k_t - v_t) k_t^T, read as W_t q_t (Schlag et al., 2021; Yang et al., 2024)."""

    state_names = ("W",)
    has_unit_keys = True

    def build_memory(self) -> None:
        self.b_proj = nn.Linear(self.config.hidden_size, self.num_states, bias=False)

    def gates(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        beta = upcast(self.b_proj(hidden_states)).sigmoid()
        return {"beta": 2 * beta if self.config.linear_allow_neg_eigval else beta}

    def advance(self, query, key, value, gates, states, lengths, output_states):
        rule = gated_delta_rule if "g" in gates else delta_rule
        scale = None if self.readout is None else 1.0
        reads, state = rule(
            query, key, value, **gates, scale=scale, initial_state=states.get("W"), output_final_state=output_states
        )
        return reads, {"W": state} if output_states else {}


class GatedDeltaNetMixer(DeltaNetMixer):
    """The delta rule after a decay of the state, alpha_t = exp(-exp(A_log) softplus(a_proj x + dt_bias)).

    Parameters are those of flash-linear-attention's `GatedDeltaNet` (Yang, Kautz & Hatamizadeh, 2025).
    """

    def build_memory(self) -> None:
        super().build_memory()
        self.a_proj = nn.Linear(self.config.hidden_size, self.num_states, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.num_states, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(self.num_states, dtype=torch.float32))

    def init_memory(self) -> None:
        config = self.config
        rate = torch.empty_like(self.A_log).uniform_(config.linear_a_log_min, config.linear_a_log_max)
        init.copy_(self.A_log, rate.clamp(min=1e-4).log())  # a draw of 0 would be a decay rate of log 0
        low, high = math.log(config.linear_dt_min), math.log(config.linear_dt_max)
        step = torch.empty_like(self.dt_bias).uniform_(low, high).exp().clamp(min=config.linear_dt_init_floor)
        init.copy_(self.dt_bias, step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def gates(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        step = F.softplus(upcast(self.a_proj(hidden_states)) + self.dt_bias)
        return {"g": -upcast(self.A_log).exp() * step, **super().gates(hidden_states)}
