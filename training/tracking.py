# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What a run shows and keeps: JSONL records, a progress bar, a plot of the losses."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
from tqdm import tqdm

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402


class MetricsLog:
    """Appends one JSON object a line; every line is flushed, so a killed run keeps what it has measured."""

    def __init__(self, file: Path | None):
        self._stream = file.open("a", encoding="utf-8") if file else None  # None: a process that does not write

    def write(self, kind: str, **values: Any) -> None:
        """Write ``{"kind": kind, **values}``."""
        if self._stream:
            self._stream.write(json.dumps({"kind": kind, **values}) + "\n")
            self._stream.flush()


def read_metrics(file: Path, kind: str) -> list[dict]:
    """The records of one kind, in order."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["kind"] == kind]


def cut_metrics(file: Path, step: int) -> None:
    """Drop the records after `step`, which a run that goes on from there will write again."""
    if file.exists():
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        kept = [json.dumps(record) + "\n" for record in records if record.get("step", 0) <= step]
        file.write_text("".join(kept), encoding="utf-8")


class Progress:
    """A bar with loss, tokens/s and time left on a terminal; plain lines where the output is a file or a pipe."""

    def __init__(self, steps: int, enabled: bool = True, done: int = 0):
        self.steps, self.enabled, self.done = steps, enabled, done  # `done` of the steps were taken by an earlier run
        self.started = time.perf_counter()
        self.on_terminal = enabled and sys.stderr.isatty()
        self.bar = tqdm(
            total=steps,
            initial=done,
            disable=not self.on_terminal,
            dynamic_ncols=True,
            unit="step",
            bar_format="{percentage:3.0f}% {bar} {n}/{total} steps{postfix}, {remaining} left",
        )
        self.bar.set_postfix_str("starting")

    def advance(self) -> None:
        """Count one step."""
        self.bar.update()

    def show(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show the training loss and speed at `step`."""
        text = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
        self.bar.set_postfix_str(text.replace("  ", " · "), refresh=False)
        if not self.on_terminal:
            left = (time.perf_counter() - self.started) * (self.steps - step) / (step - self.done)
            self.say(f"step {step:>5}/{self.steps}  {text}  {tqdm.format_interval(left)} left")

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self.enabled:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()


def plot_losses(metrics: Path, image: Path, title: str) -> None:
    """Draw training and validation loss (nats per token) over training tokens, with perplexity on the right."""
    train, validation = read_metrics(metrics, "train"), read_metrics(metrics, "validation")
    figure, axes = plt.subplots(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    axes.plot([r["tokens"] for r in train], [r["loss"] for r in train], color="#4c78a8", lw=1.6, label="training")
    axes.plot(
        [r["tokens"] for r in validation],
        [r["loss"] for r in validation],
        color="#e4572e",
        lw=1.6,
        marker="o",
        ms=4.5,
        markeredgecolor="white",
        label="held out",
    )
    if validation:
        last = validation[-1]
        axes.annotate(
            f"{last['loss']:.3f}",
            (last["tokens"], last["loss"]),
            xytext=(0, -8),
            textcoords="offset points",
            ha="right",
            va="top",
            color="#e4572e",
            fontweight="bold",
        )
    axes.set_xlabel("training tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.margins(y=0.1)
    axes.set_xlim(left=0)
    axes.grid(color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    right = axes.secondary_yaxis("right", functions=(lambda nats: nats, lambda nats: nats))
    right.yaxis.set_major_formatter(lambda nats, _: f"{math.exp(nats):,.0f}")
    right.set_ylabel("perplexity")
    right.spines["right"].set_visible(False)
    figure.savefig(image)
    plt.close(figure)
