# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What a run shows and keeps: JSONL records, a progress bar, plots."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from tqdm import tqdm

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

BLUE, RED, GREY = "#4c78a8", "#e4572e", "#9a9a9a"


def _finite(value: Any) -> Any:
    """`value` with `None`, which JSON has, for numbers that are not finite, which it has not."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """Appends one JSON object a line; every line is flushed, so a killed run keeps what it has measured.

    A number that is not finite is written as null.

    Args:
        file: `None` for a process that does not write.
        listener: called with (kind, values) of each record that is written, for trackers.
    """

    def __init__(self, file: Path | None, listener: Callable[[str, dict[str, Any]], None] | None = None):
        self._stream = file.open("a", encoding="utf-8") if file else None
        self._listener = listener

    def write(self, kind: str, **values: Any) -> None:
        """Write ``{"kind": kind, **values}``."""
        if self._stream:
            self._stream.write(json.dumps(_finite({"kind": kind, **values}), allow_nan=False) + "\n")
            self._stream.flush()
            if self._listener:
                self._listener(kind, values)

    def sync(self) -> int:
        """Have all records on the disk; returns the file's bytes, to which a run that goes on from now cuts it."""
        if not self._stream:
            return 0
        os.fsync(self._stream.fileno())
        return os.fstat(self._stream.fileno()).st_size


def truncate_metrics(file: Path, size: int) -> None:
    """Keep the first `size` bytes, which were there when a checkpoint was written."""
    if file.exists():
        os.truncate(file, min(size, file.stat().st_size))


def _records(file: Path) -> list[dict]:
    """All records, none where the file is gone: a run can go on without its metrics."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def read_metrics(file: Path, kind: str) -> list[dict]:
    """The records of one kind, in order."""
    return [record for record in _records(file) if record["kind"] == kind]


def read_records(file: Path, step: int) -> list[tuple[str, dict]]:
    """The records of one step, in order, as (kind, values)."""
    return [(record.pop("kind"), record) for record in _records(file) if record.get("step") == step]


def cut_metrics(file: Path, step: int) -> None:
    """Drop the records after `step`, which a run that goes on from there will write again.

    So goes a last line without its end, which a kill left. A kill of this function leaves the old records or the new.
    """
    if file.exists():
        lines = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in lines if json.loads(line).get("step", 0) <= step]
        temporary = file.with_name(f".{file.name}.partial")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(file)


class Progress:
    """A bar with loss, tokens/s, MFU and time left on a terminal; plain lines where the output is a file or a pipe."""

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

    def show(self, step: int, loss: float, tokens_per_second: float, mfu: float | None = None) -> None:
        """Show the training loss and speed at `step`, and the share of the devices' peak where that is known."""
        text = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
        if mfu is not None:
            text += f"  MFU {mfu:.1%}"
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


def tidy(axes) -> None:
    """The plain look of all plots: a pale grid behind the data, no frame above and on the right."""
    axes.grid(color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plot_losses(metrics: Path, image: Path, title: str) -> None:
    """Draw training and validation loss (nats per token) over training tokens, with perplexity on the right."""
    train, validation = read_metrics(metrics, "train"), read_metrics(metrics, "validation")
    figure, axes = plt.subplots(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    axes.plot([r["tokens"] for r in train], [r["loss"] for r in train], color=BLUE, lw=1.6, label="training")
    axes.plot(
        [r["tokens"] for r in validation],
        [r["loss"] for r in validation],
        color=RED,
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
            color=RED,
            fontweight="bold",
        )
    axes.set_xlabel("training tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.margins(y=0.1)
    axes.set_xlim(left=0)
    tidy(axes)
    axes.legend(frameon=False)
    right = axes.secondary_yaxis("right", functions=(lambda nats: nats, lambda nats: nats))
    right.yaxis.set_major_formatter(lambda nats, _: f"{math.exp(nats):,.0f}")
    right.set_ylabel("perplexity")
    right.spines["right"].set_visible(False)
    figure.savefig(image)
    plt.close(figure)


STATES = "states"  # the kind of the records of `state_norms`
# The tensor of each memory that stands for its state in the figure; the records have all.
SHOWN_STATES = ("W", "G", "W1")


def plot_training(metrics: Path, image: Path, title: str) -> None:
    """Draw a run in six panels: loss, loss by position, throughput, gradient norm, learning rate, state norms by layer.

    Args:
        metrics: the run's `metrics.jsonl`; a panel whose records it lacks is left out.
    """
    train, validation, states = (read_metrics(metrics, kind) for kind in ("train", "validation", STATES))
    shown = [record for record in validation if record.get("by_position")]
    panels = ["loss", "by_position", "throughput", "gradient", "rate", "states"]
    panels = [
        name
        for name in panels
        if (name != "by_position" or shown) and (name != "states" or any(r["layers"] for r in states))
    ]
    figure, all_axes = plt.subplots(
        2, (len(panels) + 1) // 2, figsize=(4.1 * ((len(panels) + 1) // 2), 6.4), dpi=110, layout="constrained"
    )
    for axes, name in zip(all_axes.flat, panels, strict=False):
        if name == "by_position":
            _plot_positions(axes, shown)
            continue
        tokens = [record["tokens"] for record in train]
        if name == "loss":
            axes.plot(tokens, [record["loss"] for record in train], color=BLUE, lw=1.3, label="training")
            held_out = [record["tokens"] for record in validation], [record["loss"] for record in validation]
            axes.plot(*held_out, color=RED, lw=1.3, marker="o", ms=3, label="held out")
            axes.set_ylabel("loss (nats per token)")
            axes.legend(frameon=False, fontsize=8)
        elif name == "throughput":
            axes.plot(tokens, [record["tokens_per_second"] for record in train], color=BLUE, lw=1.3)
            axes.set_ylabel("tokens/s")
            axes.set_ylim(bottom=0)
            _add_mfu(axes, train)
        elif name == "gradient":
            norms = [math.nan if record["grad_norm"] is None else record["grad_norm"] for record in train]
            axes.plot(tokens, norms, color=BLUE, lw=1.3)
            axes.set(ylabel="gradient norm", yscale="log")
        elif name == "rate":
            axes.plot(tokens, [record["learning_rate"] for record in train], color=BLUE, lw=1.3)
            axes.set_ylabel("learning rate")
            axes.set_ylim(bottom=0)
        else:
            _plot_states(axes, states)
        axes.set_xlabel("training tokens")
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        axes.set_xlim(left=0)
    for axes in all_axes.flat:
        if not axes.has_data():
            axes.set_axis_off()
            continue
        tidy(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(image)
    plt.close(figure)


def _add_mfu(axes, train: Sequence[dict]) -> None:
    """An axis on the right for the MFU, which is the throughput by another measure."""
    known = [record for record in train if record.get("mfu")]
    if known:
        factor = known[-1]["mfu"] / known[-1]["tokens_per_second"]
        right = axes.secondary_yaxis("right", functions=(lambda speed: speed * factor, lambda mfu: mfu / factor))
        right.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
        right.set_ylabel("MFU")


def plot_by_position(axes, by_position: Sequence[dict], **style: Any) -> None:
    """Draw loss over position in the row; each bucket stands at its middle."""
    middles = [(bucket["from"] + bucket["to"] - 1) / 2 + 1 for bucket in by_position]  # 1 is the first
    axes.plot(middles, [bucket["loss"] for bucket in by_position], **{"marker": "o", "ms": 3, "lw": 1.3, **style})
    axes.set(xlabel="position in the row (tokens)", ylabel="held-out loss (nats per token)")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")


def _plot_positions(axes, validation: Sequence[dict]) -> None:
    """The last validation's loss by position, and up to three earlier ones', paler."""
    last = len(validation) - 1
    chosen = sorted({last, *(round(last * part / 3) for part in (0, 1, 2))})
    for index in chosen:
        shade = 0.25 + 0.75 * (index / last if last else 1)
        label = f"step {validation[index]['step']:,}"
        plot_by_position(axes, validation[index]["by_position"], color=RED, alpha=shade, label=label)
    axes.legend(frameon=False, fontsize=8)


def _plot_states(axes, records: Sequence[dict]) -> None:
    """The norm of each recurrent layer's state at the ends of held-out rows, over training; deeper layers darker."""
    layers = [layer["layer"] for layer in records[-1]["layers"]]
    for place, index in enumerate(layers):
        points = []
        for record in records:
            norms = next((layer["norms"] for layer in record["layers"] if layer["layer"] == index), {})
            name = next((name for name in SHOWN_STATES if name in norms), None)
            if name is not None:
                points.append((record["tokens"], norms[name]))
        if points:
            colour = plt.get_cmap("viridis_r")(0.15 + 0.85 * place / max(len(layers) - 1, 1))
            label = f"layer {index}" if place in (0, len(layers) - 1) or len(layers) <= 8 else None
            axes.plot(*zip(*points, strict=True), color=colour, lw=1.2, marker="o", ms=2.5, label=label)
    axes.set_ylabel("norm of the state")
    axes.legend(frameon=False, fontsize=7, ncols=2)
