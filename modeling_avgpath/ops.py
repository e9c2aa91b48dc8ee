# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The operators of AvgPath: `[batch, time, heads, dim]` in, outputs and optionally the final state out.

Each comes in three forms: chunk-parallel (the plain name), one token at a time (`*_step`), and the definition spelled
out token by token in float64 (`*_oracle`), which the tests hold the other two against.
"""

from .op_delta import (
    delta_rule,
    delta_rule_oracle,
    delta_rule_step,
    gated_delta_rule,
    gated_delta_rule_oracle,
    gated_delta_rule_step,
)
from .op_linear import linear_attention, linear_attention_oracle, linear_attention_step
from .op_mesa import mesa, mesa_oracle, mesa_step
from .op_ttt import (
    ttt_initial_state,
    ttt_linear,
    ttt_linear_expectation,
    ttt_linear_oracle,
    ttt_linear_step,
    ttt_mlp,
    ttt_mlp_expectation,
    ttt_mlp_oracle,
    ttt_mlp_step,
)

__all__ = [
    "delta_rule",
    "delta_rule_oracle",
    "delta_rule_step",
    "gated_delta_rule",
    "gated_delta_rule_oracle",
    "gated_delta_rule_step",
    "linear_attention",
    "linear_attention_oracle",
    "linear_attention_step",
    "mesa",
    "mesa_oracle",
    "mesa_step",
    "ttt_initial_state",
    "ttt_linear",
    "ttt_linear_expectation",
    "ttt_linear_oracle",
    "ttt_linear_step",
    "ttt_mlp",
    "ttt_mlp_expectation",
    "ttt_mlp_oracle",
    "ttt_mlp_step",
]
