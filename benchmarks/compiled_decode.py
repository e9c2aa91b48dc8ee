# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Decoding token by token, eager against `torch.compile` (inductor), with graph breaks and recompilations.

Both sides read the same prompt and then the same tokens, one at a time and in turn, eager into an `AvgPathCache` and
compiled into a `StaticCache`. The largest difference between their logits stands beside the times.
"""

import argparse
import statistics
import warnings

import torch
from torch._dynamo.utils import counters
from transformers import StaticCache

from benchmarks.cases import MODEL_SHAPE, QUICK_MODEL_SHAPE, make_model
from benchmarks.measure import clock, relative_error
from benchmarks.options import Option
from benchmarks.report import Column, Report, bars
from modeling_avgpath import AvgPathCache, AvgPathForCausalLM

PROMPT = 64
OPTIONS = {
    "mixers": Option(["softmax", "gated_delta_net", "mesa_net", "ttt_linear"], ["gated_delta_net"], "mixers"),
    "hybrid_ratio": Option("3:1", "3:1", "recurrent : softmax layers"),
    "tokens": Option(256, 4, "decoded one at a time; the first, which compiles, is not in the median", least=2),
    "backend": Option("inductor", "eager", "of torch.compile; `eager` traces the graph and does not compile it"),
}
COLUMNS = (
    Column("mixer", "mixer"),
    Column("parameters", "parameters", "{:,}"),
    Column("eager_ms", "eager (ms)", "{:.1f}"),
    Column("compiled_ms", "compiled (ms)", "{:.1f}"),
    Column("ratio", "ratio", "{:.2f}"),
    Column("graph_breaks", "graph breaks"),
    Column("recompilations", "recompilations"),
    Column("difference", "difference", "{:.0e}"),
    Column("first_seconds", "first step (s)", "{:.0f}"),
)


@torch.no_grad()
def compare(model: AvgPathForCausalLM, tokens: int, backend: str) -> dict[str, float]:
    """Median milliseconds a token of both sides, the first compiled step's seconds, and what Dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    compiled_forward = torch.compile(model.forward, fullgraph=False, dynamic=False, backend=backend)
    ids = torch.randint(model.config.vocab_size, (1, PROMPT + tokens), device=model.device)
    caches = AvgPathCache(model.config), StaticCache(config=model.config, max_cache_len=PROMPT + tokens)
    for cache in caches:
        model(ids[:, :PROMPT], cache=cache, logits_to_keep=1)
    eager, compiled, difference = [], [], 0.0
    for place in range(PROMPT, PROMPT + tokens):
        token, logits = ids[:, place : place + 1], []
        for forward, cache, times in zip((model.forward, compiled_forward), caches, (eager, compiled), strict=True):
            times.append(
                clock(lambda f=forward, c=cache, t=token, found=logits: found.append(f(input_ids=t, cache=c).logits))
            )
        difference = max(difference, relative_error(logits[1], logits[0]))
    eager_ms, compiled_ms = (1e3 * statistics.median(times[1:]) for times in (eager, compiled))
    return {
        "eager_ms": eager_ms,
        "compiled_ms": compiled_ms,
        "ratio": compiled_ms / eager_ms,
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompilations": counters["stats"]["unique_graphs"] - 1,
        "difference": difference,
        "first_seconds": compiled[0],
    }


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch._inductor")
    shape = QUICK_MODEL_SHAPE if settings.quick else MODEL_SHAPE
    rows = []
    for mixer in settings.mixers:
        model = make_model(f"{mixer} {settings.hybrid_ratio}", shape, settings.device)
        found = compare(model, settings.tokens, settings.backend)
        rows.append({"mixer": mixer, "parameters": model.num_parameters(), **found})
    title = (
        f"Decoding {settings.tokens} tokens after {PROMPT}, fp32, batch 1, {settings.hybrid_ratio} hybrids with softmax; "
        "medians."
    )
    return title, rows, {}


def draw(report: Report):
    labels = [f"{row['mixer']}, {mode}" for row in report.rows for mode in ("eager", "compiled")]
    values = [row[f"{mode}_ms"] for row in report.rows for mode in ("eager", "compiled")]
    return bars(labels, values, "ms a token")
