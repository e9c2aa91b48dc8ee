# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Every mixer module against the layers it stands in for: forward (no gradients) and forward + backward.

Projections, short convolutions, norms and gates are part of it. Peers: Llama's attention, OLMo-Hybrid's gated delta net,
the TTT reference layer (our TTT layer with its operator replaced by the paper's form), and on a GPU the layers of
flash-linear-attention. The ratio is the peer's time over ours: above 1 ours is faster.
"""

import argparse

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

from benchmarks import peers
from benchmarks.cases import DTYPES, MODEL_SHAPE, PASSES, QUICK_MODEL_SHAPE
from benchmarks.measure import interleave
from benchmarks.options import Option
from benchmarks.report import SIDE_BY_SIDE, Column, Report, bars
from modeling_avgpath import AvgPathConfig
from modeling_avgpath.modeling_avgpath import MIXERS

OPTIONS = {
    "lengths": Option([4096], [64], "tokens"),
    "dtypes": Option(["fp32"], ["fp32"], "of weights and inputs", known=DTYPES),
    "repeats": Option(5, 1, "timed runs of each side at most"),
    "seconds": Option(10.0, 1.0, "a side is not run again once its runs add up to this, three runs excepted"),
}
COLUMNS = (
    Column("mixer", "mixer"),
    Column("tokens", "tokens", "{:,}"),
    Column("inputs", "dtype"),
    *SIDE_BY_SIDE,
)
RECURRENT = ("linear", "delta_net", "gated_delta_net", "mesa_net", "ttt_linear", "ttt_mlp")
ATTENTION = "Llama attention"


class Attention(nn.Module):
    """Llama's attention with the rotary embedding that its model computes."""

    def __init__(self, shape: dict[str, int]):
        super().__init__()
        config = peers.llama_config(shape)
        self.rotary, self.attention = LlamaRotaryEmbedding(config), LlamaAttention(config, 0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return self.attention(x, position_embeddings=self.rotary(x, positions), attention_mask=None)


def make_mixer(memory: str, shape: dict[str, int]) -> nn.Module:
    config = AvgPathConfig(**shape, mixer_types=[memory] * shape["num_hidden_layers"])
    return initialised(MIXERS[memory](config, 0))


def make_ttt_reference(memory: str, shape: dict[str, int]) -> nn.Module:
    """Our layer, so that both sides project, rotate and normalise alike, with the reference form inside."""
    mixer = make_mixer(memory, shape)

    def operator(q, k, v, eta, weights, mini_batch_size, token_scale, **unused):
        return peers.ttt_reference(q, k, v, eta, weights, mini_batch_size, token_scale), None

    mixer.operator = operator
    return mixer


def initialised(module: nn.Module) -> nn.Module:
    """Small random weights where a module alone would hold zeros or whatever memory held."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return module


def make_sides(shape: dict[str, int], device: str) -> tuple[dict[str, nn.Module], list[tuple[str, str]]]:
    """All modules by name, and which is compared with which."""
    sides, pairs = {ATTENTION: Attention(shape)}, []
    for memory in RECURRENT:
        sides[memory] = make_mixer(memory, shape)
        pairs.append((memory, ATTENTION))
    olmo = peers.olmo_hybrid_config(shape)
    sides["OLMo-Hybrid"] = initialised(OlmoHybridGatedDeltaNet(olmo, olmo.layer_types.index("linear_attention")))
    pairs.append(("gated_delta_net", "OLMo-Hybrid"))
    for memory in ("ttt_linear", "ttt_mlp"):
        sides[f"{memory} reference"] = make_ttt_reference(memory, shape)
        pairs.append((memory, f"{memory} reference"))
    if device == "cuda" and peers.has_fla():
        from fla import layers

        heads, width = shape["num_attention_heads"], shape["hidden_size"]
        for memory, name, fields in (
            ("delta_net", "DeltaNet", {"use_gate": True}),
            ("gated_delta_net", "GatedDeltaNet", {"head_dim": width // heads, "expand_v": 1}),
            ("mesa_net", "MesaNet", {"head_dim": width // heads, "use_output_gate": True}),
        ):
            sides[f"fla {name}"] = getattr(layers, name)(hidden_size=width, num_heads=heads, layer_idx=0, **fields)
            pairs.append((memory, f"fla {name}"))
    return sides, pairs


def make_pass(module: nn.Module, x: torch.Tensor, backward: bool):
    """A call without arguments: the output, and with `backward` also the gradients of input and parameters."""

    def run() -> torch.Tensor:
        output = module(x)
        return output[0] if isinstance(output, tuple) else output

    wanted, do = [x, *module.parameters()], torch.randn_like(x)
    if backward:
        return lambda: torch.autograd.grad(run(), wanted, do, allow_unused=True)
    return torch.no_grad()(run)


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    shape = QUICK_MODEL_SHAPE if settings.quick else MODEL_SHAPE
    rows = []
    with peers.plain_functions(settings.device):
        for dtype in settings.dtypes:
            modules, pairs = make_sides(shape, settings.device)
            modules = {name: module.to(settings.device, DTYPES[dtype]) for name, module in modules.items()}
            for length in settings.lengths:
                x = torch.randn(1, length, shape["hidden_size"], device=settings.device, dtype=DTYPES[dtype])
                x.requires_grad_()
                for backward, pass_name in enumerate(PASSES):
                    sides = {name: make_pass(module, x, bool(backward)) for name, module in modules.items()}
                    timings = interleave(sides, settings.repeats, settings.seconds)
                    rows += [
                        {
                            "mixer": ours,
                            "tokens": length,
                            "inputs": dtype,
                            "pass": pass_name,
                            "seconds": timings[ours].median,
                            "peer": peer,
                            "peer_seconds": timings[peer].median,
                            "ratio": timings[peer].median / timings[ours].median,
                            "runs": timings[ours].runs,
                        }
                        for ours, peer in pairs
                    ]
    heads = shape["num_attention_heads"]
    title = f"Mixer modules, width {shape['hidden_size']}, {heads} heads, batch 1; medians of {settings.repeats}."
    return title, rows, {}


def draw(report: Report):
    rows = [row for row in report.rows if row["pass"] == PASSES[1]]
    labels = [f"{row['mixer']} against {row['peer']}, {row['tokens']:,}, {row['inputs']}" for row in rows]
    return bars(labels, [row["ratio"] for row in rows], "peer's time over ours, forward + backward", 1)
