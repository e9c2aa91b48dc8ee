# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Compare finished runs of training/pretrain.py: a Markdown table, and the README's figure.

    python -m benchmarks.overview runs/compare/softmax runs/compare/hybrid runs/compare/linear \
        --figure docs/figures/overview.png

Left, the loss on the held-out years while training; right, the bytes of each trained model's cache after reading texts
of growing length (batch of one, measured).
"""

import argparse
import json
from pathlib import Path

import matplotlib
import torch
from transformers import AutoModelForCausalLM

from modeling_avgpath import AvgPathCache

LENGTHS = (16, 64, 256, 1024, 4096)
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8f5db7", "#edae49")


def read_run(folder: Path) -> dict:
    """The records of one run and what its model's cache holds, in bytes, after each of `LENGTHS` tokens."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder / "final").eval()
    generator = torch.Generator().manual_seed(0)
    sizes = []
    for length in LENGTHS:
        cache = AvgPathCache(model.config)
        ids = torch.randint(2, model.config.vocab_size, (1, length), generator=generator)
        with torch.no_grad():
            model(ids, cache=cache, logits_to_keep=1)
        sizes.append(cache.nbytes)
    return {
        "name": folder.name,
        "validation": [record for record in records if record["kind"] == "validation"],
        "summary": json.loads((folder / "summary.json").read_text()),
        "sizes": sizes,
    }


def draw(runs: list[dict], path: Path) -> None:
    """Write the two panels as a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for run, colour in zip(runs, COLOURS, strict=False):
        steps = [record["step"] for record in run["validation"] if record["step"]]
        losses = [record["loss"] for record in run["validation"] if record["step"]]
        left.plot(steps, losses, color=colour, marker="o", markersize=3, label=run["name"])
        right.plot(LENGTHS, run["sizes"], color=colour, marker="o", markersize=3, label=run["name"])
    left.set(xlabel="training step", ylabel="held-out loss (nats per token)")
    right.set(xlabel="tokens read", ylabel="cache (bytes)", xscale="log", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of finished runs")
    parser.add_argument("--figure", type=Path, help="where to write the PNG (default: no figure)")
    arguments = parser.parse_args()
    runs = [read_run(folder) for folder in arguments.runs]
    print(
        f"| run | held-out loss | tokens/s | cache bytes at {' / '.join(f'{length:,}' for length in LENGTHS)} tokens |"
    )
    print("|---|---:|---:|---|")
    for run in runs:
        loss = run["validation"][-1]["loss"]
        speed = run["summary"]["tokens_per_second"]
        print(f"| {run['name']} | {loss:.3f} | {speed:,.0f} | {' / '.join(f'{size:,}' for size in run['sizes'])} |")
    if arguments.figure is not None:
        draw(runs, arguments.figure)


if __name__ == "__main__":
    main()
