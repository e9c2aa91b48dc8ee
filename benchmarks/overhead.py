# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What training/pretrain.py adds to a bare training loop, and what bf16 gains over fp32, in tokens per second.

The script's own steps, with data, guard, schedule and records, train an all-softmax AvgPath of Llama's shape. Beside it
stands a plain loop (forward, backward, clipping, fused AdamW) on Transformers' Llama of the same shape, on the same rows.
Both are in one process and take turns. The precisions have a process each, since Accelerate has one a process; they take
turns too. Ratios above 1 say that the left side is faster.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import clock, in_fresh_process, interleave
from benchmarks.options import Option
from benchmarks.report import Column, Report, bars
from training.checkpoint import Interruption
from training.machine import keep_freed_memory
from training.pretrain import Pretraining, build_run
from training.recipe import load_recipe

OPTIONS = {
    "steps": Option(4, 1, "of a timed turn of script and bare loop"),
    "repeats": Option(15, 2, "turns"),
    "rows": Option(2, 2, "of a step"),
    "tokens": Option(512, 32, "of a row"),
    "large": Option("configuration/models/135m.json", "", "shape of the precisions' comparison; empty: the small one"),
    "large_rows": Option(8, 2, "of a step of the precisions' comparison"),
    "large_steps": Option(3, 1, "timed steps of each precision and turn, after one that is not timed"),
    "large_repeats": Option(3, 1, "turns of the precisions"),
}
COLUMNS = (
    Column("case", "case"),
    Column("parameters", "parameters", "{:,}"),
    Column("side", "left"),
    Column("tokens_per_second", "tokens/s", "{:,.0f}"),
    Column("peer", "right"),
    Column("peer_tokens_per_second", "tokens/s", "{:,.0f}"),
    Column("ratio", "ratio", "{:.3f}"),
)
QUICK_SHAPE = (
    "model.vocab_size=320", "model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=2",
    "model.num_attention_heads=1", "data.path=''",
)  # fmt: skip


def start_run(folder: str, rows: int, tokens: int, *overrides: str) -> Pretraining:
    """The script, ready for its first step, as it would stand after its command line."""
    recipe = load_recipe(
        None,
        [
            f"output_dir={folder}/run", f"train.batch_size={rows}", f"data.sequence_length={tokens}",
            "model.hybrid_ratio=0:1", "train.steps=100000", "validation.every_steps=0", "checkpoint.every_steps=0",
            "train.log_every=10", *overrides,
        ],
    )  # fmt: skip
    if not recipe.data.path:
        recipe.data.path, recipe.data.cache_dir = f"{folder}/text.txt", f"{folder}/cache"
        words = " ".join(f"{number:b}" for number in range(2000))
        Path(recipe.data.path).write_text(words.replace("1000 ", "1000\n<|endoftext|>\n"), encoding="utf-8")
    keep_freed_memory()
    run = build_run(recipe, Interruption())
    run.model.train()
    return run


def bare_loop(run: Pretraining) -> Callable[[], None]:
    """A function that takes one step of a plain loop on Llama, with the shape, precision, batch and optimiser of `run`."""
    config, recipe = run.plain_model.config, run.recipe.optimizer
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "tie_word_embeddings", "max_position_embeddings")  # fmt: skip
    device, precision = run.accelerator.device, run.accelerator.mixed_precision
    model = LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in names})).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), fused=True
    )
    batches = run.data.batches(run.recipe.train.batch_size, 0, 1, run.recipe.seed)

    def step() -> None:
        batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.recipe.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_of_precision(
    precision: str, overrides: list[str], rows: int, tokens: int, steps: int, threads: int
) -> dict:
    """Median seconds of a step of the script, and the model's parameters."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        run = start_run(folder, rows, tokens, f"train.mixed_precision={precision}", *overrides)
        run.advance()
        return {
            "seconds": statistics.median(clock(run.advance) for _ in range(steps)),
            "parameters": run.parameters,
        }


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    quick = QUICK_SHAPE if settings.quick else ()
    per_step = settings.rows * settings.tokens
    with tempfile.TemporaryDirectory() as folder:
        run = start_run(folder, settings.rows, settings.tokens, *quick)
        step = bare_loop(run)
        sides = {
            "script": lambda: [run.advance() for _ in range(settings.steps)],
            "bare": lambda: [step() for _ in range(settings.steps)],
        }
        times = interleave(sides, settings.repeats, seconds=600)
        parameters, precision = run.parameters, run.accelerator.mixed_precision
    script, bare = (settings.steps * per_step / times[name].median for name in ("script", "bare"))
    rows = [
        {
            "case": f"a step, {'bf16' if precision == 'bf16' else 'fp32'}", "parameters": parameters,
            "side": "pretrain.py, AvgPath, all softmax", "tokens_per_second": script, "peer": "bare loop, Llama",
            "peer_tokens_per_second": bare, "ratio": script / bare,
        }
    ]  # fmt: skip
    overrides = [*quick, *([f"model.config={settings.large}"] if settings.large else [])]
    found: dict[str, list[dict]] = {"bf16": [], "no": []}
    for _ in range(settings.large_repeats):
        for name, results in found.items():
            results.append(
                in_fresh_process(
                    seconds_of_precision, name, overrides, settings.large_rows, settings.tokens,
                    settings.large_steps, settings.threads,
                )
            )  # fmt: skip
    per_step = settings.large_rows * settings.tokens
    bf16, fp32 = (per_step / statistics.median(r["seconds"] for r in found[name]) for name in ("bf16", "no"))
    rows.append(
        {
            "case": f"precision, {Path(settings.large).stem or 'small'}", "parameters": found["no"][0]["parameters"],
            "side": "bf16", "tokens_per_second": bf16, "peer": "fp32", "peer_tokens_per_second": fp32,
            "ratio": bf16 / fp32,
        }
    )  # fmt: skip
    title = (
        f"Steps of {settings.rows} x {settings.tokens} tokens: medians of {settings.repeats} turns of {settings.steps} "
        f"steps; precisions with {settings.large_rows} x {settings.tokens}, {settings.large_repeats} processes of "
        f"{settings.large_steps} each."
    )
    return title, rows, {}


def draw(report: Report):
    return bars(
        [f"{row['side']} / {row['peer']}" for row in report.rows], [row["ratio"] for row in report.rows],
        "ratio of tokens per second", mark=1.0,
    )  # fmt: skip
