# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The recurrent token mixer: projections, short convolution, norm and gate around one memory and one readout.

A memory subclasses `RecurrentMixer` in a file of its own, where it says how its gates are made from the layer's input,
how keys and queries are prepared, and which op advances its state. It never sees padding, packing, the cache's layout or
the readout: it gets rows and a state, and returns reads and the next state.
"""

import torch
from torch import nn

from .attention import append_tail, take_tail
from .cache_avgpath import advance
from .norms import GATE_ACTIVATIONS, GatedRMSNorm, l2_norm, make_qk_norms
from .op_conv import causal_conv_silu
from .readout import AttentionReadout


class ShortConv(nn.Conv1d):
    """Causal depthwise convolution over time followed by SiLU; its state is the last `kernel - 1` inputs.

    The weight `[channels, 1, kernel]` is that of flash-linear-attention's `ShortConvolution`.
    """

    def __init__(self, channels: int, kernel_size: int):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=False)

    def extend(
        self, x: torch.Tensor, tail: torch.Tensor | None, lengths: torch.Tensor | None, unit_size: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve rows `x` `[R, L, C]` that follow the inputs `tail` `[R, kernel - 1, C]`; returns outputs and new tail."""
        size = self.kernel_size[0] - 1
        x = append_tail(tail, x, size)
        return self(x, unit_size), take_tail(x, size, lengths)

    def forward(self, x: torch.Tensor, unit_size: int | None = None) -> torch.Tensor:
        """`x` `[R, kernel - 1 + L, C]`, the inputs before the row first; returns `[R, L, C]`.

        With `unit_size` each run of so many channels, a head, comes out at unit length.
        """
        return causal_conv_silu(x, self.weight, unit_size)


class QueryMap(nn.Module):
    """Affine map of each head's query, the identity at the start: k_bar is close to m + Sigma q, seldom to lambda q."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))  # [H, out, in]
        self.bias = nn.Parameter(torch.zeros(num_heads, head_dim))

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """`query` `[B, T, H, D]`, mapped head by head."""
        return torch.einsum("bthi,hoi->btho", query, self.weight) + self.bias


class RecurrentMixer(nn.Module):
    """Template of all recurrent memories.

    With readout `query` the layer has the `linear_*` head shapes of the config and reads the memory at the query. With
    `mean_field` and `expectation` it is an attention layer without values: `num_attention_heads` queries score
    `num_key_value_heads` cached keys, and the memory, one state per key head, is read at the attention's average.

    Subclasses provide `gates`, `advance`, and where needed the class attributes and the other hooks below.
    """

    # Names of the states of `advance`: `[R, H, ...]`, or `[R]` for what all heads share.
    state_names: tuple[str, ...] = ()
    conv_streams: tuple[str, ...] = ("q", "k", "v")
    # Whether keys are stored, and queries read, at unit length.
    has_unit_keys: bool = False
    # Whether reading is linear (affine) in the point, so that the expectation over keys is the read at their mean.
    reads_linearly: bool = True

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.readout_name = config.mixer_specs[layer_idx].readout
        if self.readout_name == "query":
            query_heads = key_heads = config.linear_num_key_heads
            self.num_states, self.num_reads = config.linear_num_value_heads, config.linear_num_value_heads
            self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
            bias = False
        else:
            query_heads, key_heads = config.num_attention_heads, config.num_key_value_heads
            self.num_states, self.num_reads = key_heads, query_heads
            self.key_dim = self.value_dim = config.head_dim
            bias = config.attention_bias
        hidden_size = config.hidden_size
        sizes = {
            "q": query_heads * self.key_dim,
            "k": key_heads * self.key_dim,
            "v": self.num_states * self.value_dim,
        }
        self.q_proj = nn.Linear(hidden_size, sizes["q"], bias=bias)
        self.k_proj = nn.Linear(hidden_size, sizes["k"], bias=bias)
        self.v_proj = nn.Linear(hidden_size, sizes["v"], bias=bias)
        kernel_size = self.conv_kernel_dim(config)
        self.has_conv = kernel_size is not None
        # Attention scores keys as they are; without it the convolution can norm them on its way.
        self.norms_in_conv = self.has_conv and self.has_unit_keys and self.readout_name == "query"
        for name in self.conv_streams if self.has_conv else ():
            self.add_module(f"{name}_conv1d", ShortConv(sizes[name], kernel_size))
        if self.readout_name == "query":
            self.readout = None
            self.query_map = QueryMap(query_heads, self.key_dim) if config.query_map else None
        else:
            self.readout = AttentionReadout(config)
            self.q_norm, self.k_norm = make_qk_norms(config)
        read_size = self.num_reads * self.value_dim
        self.g_proj = nn.Linear(hidden_size, read_size, bias=False) if config.linear_use_output_gate else None
        self.o_norm = self.make_output_norm() if config.linear_use_output_norm else None
        self.o_proj = nn.Linear(read_size, hidden_size, bias=bias)
        self.build_memory()

    # Hooks of the memory.

    def conv_kernel_dim(self, config) -> int | None:
        """Kernel of the short convolution, `None` for none."""
        return config.linear_conv_kernel_dim

    @property
    def gate_activation(self) -> str:
        """Activation of the output gate, one of `GATE_ACTIVATIONS`."""
        return self.config.linear_output_gate_activation

    def make_output_norm(self) -> nn.Module:
        """Norm of the reads `[B, T, H, D_v]`, called with them and their gate (or `None`), which it applies as well."""
        eps = self.config.linear_norm_eps
        return GatedRMSNorm(self.value_dim, self.config.rms_norm_eps if eps is None else eps, self.gate_activation)

    def build_memory(self) -> None:
        """Create the memory's own parameters (`self.num_states` heads)."""

    def init_memory(self) -> None:
        """Initialise them, through `transformers.initialization`."""

    def gates(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Per-token gates `[B, T, num_states]`, fp32, such that zeros leave the state as it was."""
        raise NotImplementedError

    def memory_key(self, key: torch.Tensor) -> torch.Tensor:
        """Keys `[R, L, H, D_k]` as the memory stores them."""
        return l2_norm(key) if self.has_unit_keys else key

    def memory_query(self, query: torch.Tensor) -> torch.Tensor:
        """Queries as the memory is read with, readout `query` only."""
        return self.memory_key(query)

    def advance(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gates: dict[str, torch.Tensor],
        states: dict[str, torch.Tensor],
        lengths: torch.Tensor | None,
        output_states: bool,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Write the pairs and read at the queries, token by token in order.

        Args:
            query, key: `[R, L, H, D_k]`; value: `[R, L, H, D_v]`; H reads, one state each.
            gates: what `gates` returned, `[R, L, H]`, zero at filler.
            states: the memory's states `[R, H, ...]`, empty at the start.
            lengths: `[R]` real places, or `None`; only memories whose tokens have a phase need it.
            output_states: whether the states after the row are wanted.

        Returns:
            reads `[R, L, H, D_v]`, and the new states (empty unless wanted).
        """
        raise NotImplementedError

    def advance_expectation(
        self, query, scored, memory_keys, key, value, gates, states, lengths, output_states
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`advance` for readout `expectation` of a memory that reads non-linearly (`reads_linearly` False).

        Args:
            query: `[R, L, H, D_k]`, un-rotated, scored against `scored` (a `readout.Keys`) by `self.readout`.
            memory_keys: `[R, S, H_kv, D_k]`, all keys as the memory stores them.
            key, value, gates, states, lengths, output_states: as in `advance`.
        """
        raise NotImplementedError

    # The template.

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        alignment=None,
        layer_cache=None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        query = self.q_proj(hidden_states)
        if self.readout is None and self.query_map is not None:
            query = self.query_map(query.unflatten(-1, (-1, self.key_dim))).flatten(2)
        streams = {"q": query, "k": self.k_proj(hidden_states), "v": self.v_proj(hidden_states)}
        streams |= self.gates(hidden_states)
        reads = advance(self.run_rows, streams, alignment, layer_cache)
        gate = None if self.g_proj is None else self.g_proj(hidden_states).unflatten(-1, reads.shape[2:])
        if self.o_norm is not None:
            reads = self.o_norm(reads, gate)
        elif gate is not None:
            reads = reads * GATE_ACTIVATIONS[self.gate_activation](gate)
        return self.o_proj(reads.flatten(2)), None

    def run_rows(self, rows: dict[str, torch.Tensor], lengths: torch.Tensor | None, layer_cache):
        """One group of rows: convolution, readout and memory; returns reads `[R, L, H, D_v]` and all new states."""
        past = layer_cache.states if layer_cache is not None else {}
        states = {}
        for name in self.conv_streams if self.has_conv else ():
            conv, tail = getattr(self, f"{name}_conv1d"), past.get(f"conv_{name}")
            unit_size = self.key_dim if self.norms_in_conv and name != "v" else None
            rows[name], states[f"conv_{name}"] = conv.extend(rows[name], tail, lengths, unit_size)
        gates = {name: stream for name, stream in rows.items() if name not in ("q", "k", "v")}
        if lengths is not None:
            is_filler = torch.arange(rows["k"].shape[1], device=lengths.device) >= lengths[:, None]
            gates = {name: gate.masked_fill(is_filler[..., None], 0) for name, gate in gates.items()}
        query, key = (rows[name].unflatten(-1, (-1, self.key_dim)) for name in ("q", "k"))
        value = rows["v"].unflatten(-1, (-1, self.value_dim))
        memory_states = {name: past[name] for name in self.state_names if name in past}
        if self.readout is None:
            output_states = layer_cache is not None
            reads, memory_states = self.read_at_query(query, key, value, gates, memory_states, lengths, output_states)
        else:
            reads, memory_states = self.read_by_attention(query, key, value, gates, memory_states, lengths, layer_cache)
        return reads, {**states, **memory_states}

    def read_at_query(self, query, key, value, gates, states, lengths, output_states: bool):
        """Step 3: the memory is read at the query; each key head serves `num_states / key heads` value heads."""
        groups = self.num_states // key.shape[2]
        if not self.norms_in_conv:
            key, query = self.memory_key(key), self.memory_query(query)
        key, query = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (key, query))
        return self.advance(query, key, value, gates, states, lengths, output_states)

    def read_by_attention(self, query, key, value, gates, states, lengths, layer_cache):
        """Steps 2 and 1: the memory is read at the mean key, or at every key and averaged."""
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        scored = self.readout.collect(key, lengths, layer_cache)
        memory_keys = self.memory_key(scored.keys)
        key = memory_keys if scored.is_causal else self.memory_key(key)

        # All reads of a group share one state: it is repeated for the op and stored once.
        groups = self.num_reads // self.num_states
        key, value, gates, states = self.repeat_heads((key, value, gates, states), groups)
        output_states = layer_cache is not None
        if self.readout_name == "expectation" and not self.reads_linearly:
            reads, states = self.advance_expectation(
                query, scored, memory_keys, key, value, gates, states, lengths, output_states
            )
        else:
            mean_key = self.readout.mean(query, scored, memory_keys)
            reads, states = self.advance(mean_key, key, value, gates, states, lengths, output_states)
        if groups > 1:
            states = {
                name: state[:, ::groups].contiguous() if state.ndim > 1 else state for name, state in states.items()
            }
        return reads, states

    @staticmethod
    def repeat_heads(inputs, groups: int):
        """Repeat the heads of key and value `[R, L, H, D]`, gates `[R, L, H]` and states `[R, H, ...]` `groups` times."""
        if groups == 1:
            return inputs
        key, value, gates, states = inputs
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
        gates = {name: gate.repeat_interleave(groups, dim=2) for name, gate in gates.items()}
        states = {
            name: state.repeat_interleave(groups, dim=1) if state.ndim > 1 else state for name, state in states.items()
        }
        return key, value, gates, states
