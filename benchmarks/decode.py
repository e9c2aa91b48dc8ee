# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Decoding token by token after contexts of growing length, eager and compiled, against Llama and OLMo-Hybrid.

All models of a context step in turn, batch 1, fp32. Eager steps write into the cache that `generate` builds; compiled ones
(inductor) into a `StaticCache`. `llama_ratio` and `olmo_ratio` are the peer's time over ours, each in the same mode
(OLMo-Hybrid runs eagerly only). The all-recurrent models' contexts are timed in turn as well, against the first.
"""

import argparse
import warnings
from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from benchmarks import peers
from benchmarks.cases import MODEL_SHAPE, QUICK_MODEL_SHAPE, make_model
from benchmarks.measure import interleave
from benchmarks.options import Option
from benchmarks.report import Column, Report, axes_of, lines
from modeling_avgpath import AvgPathCache

PIECE = 2048  # tokens of the context that are read at once
OPTIONS = {
    "contexts": Option([512, 4096, 16384], [16, 48], "tokens before the decoded ones"),
    "recurrent_contexts": Option([1024, 65536], [16, 64], "those of the all-recurrent models"),
    "models": Option(
        ["gated_delta_net 3:1", "mesa_net 3:1", "Llama", "OLMo-Hybrid"],
        ["gated_delta_net 3:1", "Llama", "OLMo-Hybrid"],
        "mixer and ratio, or a peer",
    ),
    "recurrent": Option(["gated_delta_net", "mesa_net"], ["gated_delta_net"], "all-recurrent models"),
    "compiled": Option(["gated_delta_net 3:1", "Llama"], ["none"], "models that are also compiled"),
    "tokens": Option(48, 2, "decoded and timed"),
}
COLUMNS = (
    Column("context", "context", "{:,}"),
    Column("model", "model"),
    Column("mode", "mode"),
    Column("ms", "ms a token", "{:.1f}"),
    Column("llama_ratio", "Llama's time", "{:.2f}"),
    Column("olmo_ratio", "OLMo-Hybrid's time", "{:.2f}"),
    Column("growth", "of the first context's time", "{:.2f}"),
)


@torch.no_grad()
def make_decoder(model: PreTrainedModel, mode: str, context: int, tokens: int, device: str) -> Callable[[], None]:
    """Reads a random context; each call of the result then decodes one more token, at most `tokens` of them."""
    ids = torch.randint(model.config.vocab_size, (1, context), device=device)
    if mode == "compiled":
        cache = StaticCache(config=model.config, max_cache_len=context + tokens)
    else:
        cache = (
            AvgPathCache(model.config) if model.config.model_type == "avgpath" else DynamicCache(config=model.config)
        )
    for part in ids.split(PIECE, dim=1):
        model(input_ids=part, cache=cache, logits_to_keep=1)
    forward = torch.compile(model.forward, dynamic=False) if mode == "compiled" else model.forward
    token = ids[:, -1:]

    @torch.no_grad()
    def step() -> None:
        forward(input_ids=token, cache=cache)

    return step


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch._inductor")
    shape, device = QUICK_MODEL_SHAPE if settings.quick else MODEL_SHAPE, settings.device
    rows = []
    with peers.plain_functions(device):
        made = {name: make_model(name, shape, device) for name in [*settings.models, *settings.recurrent]}
        for context in settings.contexts:
            rows += compare(settings, made, [(name, context) for name in settings.models])
        for name in settings.recurrent:
            rows += compare(settings, made, [(name, context) for context in settings.recurrent_contexts])
    title = (
        f"Decoding {settings.tokens} tokens, batch 1, fp32, medians; {shape['num_hidden_layers']} layers of width "
        f"{shape['hidden_size']}, {made[settings.models[0]].num_parameters() / 1e6:.0f}M parameters."
    )
    return title, rows, {}


def compare(settings: argparse.Namespace, made: dict, cases: list[tuple[str, int]]) -> list[dict]:
    """Decode with all (model, context) in turn, in every mode."""
    torch._dynamo.reset()  # a compiled step belongs to one context: its graphs would count as recompilations
    warm_up = 3  # steps: graphs are traced in the first, and again where the second's guards fail
    sides = {}
    for name, context in cases:
        for mode in ("eager", "compiled") if name in settings.compiled else ("eager",):
            step = make_decoder(made[name], mode, context, warm_up + settings.tokens + 1, settings.device)
            for _ in range(warm_up):
                step()
            sides[name, context, mode] = step
    timings = interleave(sides, settings.tokens, seconds=60)
    rows = []
    for (name, context, mode), timing in timings.items():
        olmo, llama = (timings.get(key) for key in (("OLMo-Hybrid", context, "eager"), ("Llama", context, mode)))
        first = timings[name, cases[0][1], mode] if cases[0][0] == cases[-1][0] else None
        is_peer = name in peers.MODELS
        rows.append(
            {
                "context": context,
                "model": name,
                "mode": mode,
                "ms": 1e3 * timing.median,
                "llama_ratio": None if llama is None or name == "Llama" else llama.median / timing.median,
                "olmo_ratio": None if olmo is None or is_peer or mode != "eager" else olmo.median / timing.median,
                "growth": None if first is None else timing.median / first.median,
                "runs": timing.runs,
            }
        )
    return rows


def draw(report: Report):
    figure, (axes,) = axes_of(
        [{"xlabel": "tokens of context", "ylabel": "ms a token", "xscale": "log", "yscale": "log"}]
    )
    rows = [{**row, "side": row["model"] + (", compiled" if row["mode"] == "compiled" else "")} for row in report.rows]
    lines(axes, rows, "side", "context", "ms")
    return figure
