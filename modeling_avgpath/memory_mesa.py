# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Memory `mesa_net`: the least-squares optimal linear model of all pairs so far, solved anew at every token."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .mixer import RecurrentMixer
from .norms import upcast
from .ops import mesa


class MesaNetMixer(RecurrentMixer):
    """G_t and H_t are decayed sums of v k^T and k k^T; the read is G_t (H_t + Lambda)^-1 q_t (von Oswald et al., 2025).

    Parameters are those of flash-linear-attention's `MesaNet`. H is symmetric: the cache keeps its triangle.
    """

    state_names = ("G", "H")
    conv_streams = ("q", "k")
    has_unit_keys = True

    def build_memory(self) -> None:
        self.a_proj = nn.Linear(self.config.hidden_size, self.num_states, bias=True)
        self.b_proj = nn.Linear(self.config.hidden_size, self.num_states, bias=True)
        self.lambda_params = nn.Parameter(torch.zeros(self.num_states * self.key_dim, dtype=torch.float32))

    def init_memory(self) -> None:
        excess = self.config.mesa_lambda_init - self.config.mesa_lambda_min
        init.constant_(self.lambda_params, math.log(math.expm1(excess)))

    def gates(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "g": F.logsigmoid(upcast(self.a_proj(hidden_states))),
            "beta": upcast(self.b_proj(hidden_states)).sigmoid(),
        }

    def ridge(self) -> torch.Tensor:
        """Lambda, `[num_states, D_k]`, at least `mesa_lambda_min`."""
        ridge = F.softplus(upcast(self.lambda_params)) + self.config.mesa_lambda_min
        return ridge.view(self.num_states, self.key_dim)

    def advance(self, query, key, value, gates, states, lengths, output_states):
        initial = (unpack_triangle(states["H"], self.key_dim), states["G"]) if states else None
        ridge = self.ridge()
        reads, final = mesa(
            query,
            key,
            value,
            **gates,
            lamb=ridge.repeat_interleave(query.shape[2] // len(ridge), dim=0),
            max_cg_steps=self.config.mesa_max_cg_steps,
            tolerance=self.config.mesa_tolerance,
            initial_state=initial,
            output_final_state=output_states,
        )
        return reads, {"H": pack_triangle(final[0]), "G": final[1]} if output_states else {}


def pack_triangle(matrix: torch.Tensor) -> torch.Tensor:
    """The lower triangle of symmetric `[..., D, D]` as `[..., D (D + 1) / 2]`, row by row."""
    row, column = torch.tril_indices(*matrix.shape[-2:], device=matrix.device)
    return matrix[..., row, column]


def unpack_triangle(triangle: torch.Tensor, size: int) -> torch.Tensor:
    """The symmetric `[..., size, size]` matrix of a packed lower triangle."""
    steps = torch.arange(size, device=triangle.device)
    low, high = torch.minimum(steps[:, None], steps), torch.maximum(steps[:, None], steps)
    return triangle[..., high * (high + 1) // 2 + low]
