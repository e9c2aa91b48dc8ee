# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""A training step of whole models: forward, backward and AdamW, fp32, batch 1; time in turn and peak memory.

Peak memory holds weights, gradients, the optimizer's moments and activations, each model in a process of its own. The
ratios are to `softmax`, the AvgPath model whose layers are all softmax: time above 1 is faster, memory below 1 less.
"""

import argparse
from collections.abc import Callable

import torch

from benchmarks import peers
from benchmarks.cases import MODEL_SHAPE, QUICK_MODEL_SHAPE, make_model
from benchmarks.measure import in_fresh_process, interleave, peak_bytes
from benchmarks.options import Option
from benchmarks.report import Column, Report, bars

TWIN = "softmax"
MODELS = [TWIN, "gated_delta_net 3:1", "gated_delta_net 1:0", "mesa_net 3:1", "mesa_net 1:0", "ttt_linear 1:0", "Llama",
          "OLMo-Hybrid"]  # fmt: skip
OPTIONS = {
    "models": Option(MODELS, [TWIN, "gated_delta_net 3:1", "OLMo-Hybrid"], "mixer and ratio, or a peer"),
    "tokens": Option(2048, 64, "of a timed step"),
    "memory_tokens": Option(8192, 64, "of a step whose memory is measured; 0: none", least=0),
    "repeats": Option(3, 1, "timed steps of each model"),
}
COLUMNS = (
    Column("model", "model"),
    Column("parameters", "parameters", "{:,}"),
    Column("seconds", "step (s)", "{:.2f}"),
    Column("tokens_per_second", "tokens/s", "{:,.0f}"),
    Column("ratio", "softmax's time", "{:.2f}"),
    Column("peak_mb", "peak (MB)", "{:,.0f}"),
    Column("memory_ratio", "of softmax's memory", "{:.2f}"),
)


def make_step(name: str, shape: dict[str, int], device: str) -> tuple[torch.nn.Module, Callable[[int], None]]:
    """A model and a function that trains it on one random text of so many tokens."""
    model = make_model(name, shape, device).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: int) -> None:
        ids = torch.randint(shape["vocab_size"], (1, tokens), device=device)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def training_peak(name: str, shape: dict[str, int], tokens: int, device: str, threads: int) -> int:
    """Peak bytes of making a model and training it for two steps, a short one that makes the moments and a long one."""
    torch.set_num_threads(threads)

    def train() -> None:
        _, step = make_step(name, shape, device)
        step(16)
        step(tokens)

    with peers.plain_functions(device):
        return peak_bytes(train)


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    shape = QUICK_MODEL_SHAPE if settings.quick else MODEL_SHAPE
    names, tokens, device = settings.models, settings.tokens, settings.device
    peaks = {}
    if settings.memory_tokens:
        arguments = shape, settings.memory_tokens, device, settings.threads
        peaks = {name: in_fresh_process(training_peak, name, *arguments) for name in names}
    with peers.plain_functions(device):
        sides = {name: make_step(name, shape, device) for name in names}
        timings = interleave(
            {name: lambda step=step: step(tokens) for name, (_, step) in sides.items()}, settings.repeats
        )
    rows = [
        {
            "model": name,
            "parameters": model.num_parameters(),
            "tokens": tokens,
            "seconds": timings[name].median,
            "tokens_per_second": tokens / timings[name].median,
            "ratio": timings[TWIN].median / timings[name].median if TWIN in timings else None,
            "runs": timings[name].runs,
            "memory_tokens": settings.memory_tokens,
            "peak_mb": peaks[name] / 1e6 if peaks else None,
            "memory_ratio": peaks[name] / peaks[TWIN] if TWIN in peaks else None,
        }
        for name, (model, _) in sides.items()
    ]
    title = (
        f"A training step of {tokens:,} tokens (medians of {settings.repeats}) and the peak memory of one of "
        f"{settings.memory_tokens:,}; {shape['num_hidden_layers']} layers of width {shape['hidden_size']}."
    )
    return title, rows, {}


def draw(report: Report):
    rows = [row for row in report.rows if row["peak_mb"] is not None]
    return bars(
        [row["model"] for row in rows], [row["peak_mb"] for row in rows],
        f"peak memory (MB) of a training step of {report.options['memory_tokens']:,} tokens",
    )  # fmt: skip
