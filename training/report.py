# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""An evaluation as Markdown and as a figure."""

import math
from collections.abc import Sequence
from pathlib import Path

from training.tracking import BLUE, GREY, RED, plt, tidy


def _number(estimate: dict, digits: int = 3, factor: float = 1.0) -> str:
    """An estimate in words: ``2.413 (2.401 to 2.425)``."""
    text = f"{estimate['mean'] * factor:.{digits}f}"
    if estimate["low"] is None:
        return text
    return f"{text} ({estimate['low'] * factor:.{digits}f} to {estimate['high'] * factor:.{digits}f})"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", f"|{'---:|' * len(header)}"]
    return [*lines, *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows), ""]


def describe_perplexity(result: dict) -> str:
    """The main figures in one or two lines."""
    text = (
        f"loss {_number(result['loss'])} nats per token, perplexity {_number(result['perplexity'], 1)}, bits per byte "
        f"{_number(result['bits_per_byte'])}; {result['tokens']:,} tokens of {len(result['documents'])} documents"
    )
    if "change" in result:
        text += (
            f"\nunquantised: perplexity {_number(result['unquantized']['perplexity'], 1)}; the change in loss is "
            f"{_number(result['change']['loss'], 5)}, in perplexity {_change(result['change']['perplexity_ratio'])}"
        )
    return text


def _change(ratio: dict) -> str:
    """A ratio as a change in per cent, with sign."""
    texts = [f"{100 * (value - 1):+.3f}%" for value in ratio.values() if value is not None]
    return texts[0] if len(texts) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def write_markdown(result: dict) -> str:
    """The whole evaluation as Markdown tables; `result` is what ``evaluation.json`` holds."""
    recipe = result["recipe"]
    confidence = f"{100 * recipe['bootstrap']['confidence']:g}%"
    layers = (
        f", {len(result['mixer_types'])} layers: {', '.join(result['mixer_types'])}" if result["mixer_types"] else ""
    )
    lines = [
        f"# Evaluation of {result['model']}",
        "",
        f"{result['model_type']}, {result['parameters']:,} parameters in {result['nbytes']:,} bytes "
        f"({result['quantization'] or result['dtype']}){layers}. In brackets: {confidence} bootstrap intervals, over "
        "documents or over the probes' sequences.",
        "",
    ]
    if "perplexity" in result:
        lines += _perplexity_section(result["perplexity"], recipe["perplexity"])
    for task, title, key, text in (
        ("phrases", "Repeated phrases", "distance", "A phrase of random tokens comes again after so many tokens."),
        ("lookup", "Key-value lookup", "pairs", "So many pairs are read, then each key is asked for its value."),
        ("copying", "Copying", "length", "A string of so many random tokens comes twice."),
    ):
        if task in result:
            lines += _probe_section(result[task], title, key, text)
    return "\n".join(lines)


def _perplexity_section(result: dict, settings: dict) -> list[str]:
    how = (
        f"read {settings['window']} tokens at a time, the state carried on"
        if settings["carry_state"]
        else f"windows of {settings['window']} tokens, {settings['stride'] or 'no overlap'}"
        + (" tokens apart" if settings["stride"] else "")
    )
    lines = ["## Perplexity", "", f"{result['tokens']:,} tokens, {result['bytes']:,} bytes; {how}.", ""]
    lines += _table(
        ["loss (nats per token)", "perplexity", "bits per byte"],
        [[_number(result["loss"]), _number(result["perplexity"], 2), _number(result["bits_per_byte"], 4)]],
    )
    if "change" in result:
        before, change = result["unquantized"], result["change"]
        lines += [
            f"Without quantisation ({before['nbytes']:,} bytes): loss {_number(before['loss'])}, perplexity "
            f"{_number(before['perplexity'], 2)}. Quantisation changes the loss by {_number(change['loss'], 5)} and the "
            f"perplexity by {_change(change['perplexity_ratio'])}, on the same documents.",
            "",
        ]
    for name, title in (("by_place", "place in the document"), ("by_context", "tokens read before")):
        rows = [
            [f"{record['from']:,}-{record['to']:,}", f"{record['tokens']:,}", record["documents"],
             _number(record["loss"]), _number(record["perplexity"], 1)]
            for record in result[name]
        ]  # fmt: skip
        lines += _table([title, "tokens", "documents", "loss", "perplexity"], rows)
        if settings["carry_state"]:
            break  # the two are the same
    rows = [
        [document["group"], document["opening"], f"{document['tokens']:,}", f"{document['loss']:.3f}",
         f"{document['perplexity']:.1f}", f"{document['bits_per_byte']:.4f}"]
        for document in result["documents"]
    ]  # fmt: skip
    return lines + _table(["group", "document", "tokens", "loss", "perplexity", "bits per byte"], rows)


def _probe_section(records: list[dict], title: str, key: str, text: str) -> list[str]:
    header = [key, "nats per token", "the same unseen", "gain", "accuracy", "all right"]
    header += ["right among the values", "chance"] if "choice" in records[0] else []
    rows = []
    for record in records:
        shares = [_number(record[name], 1, 100) + "%" for name in ("accuracy", "exact")]
        row = [record[key], *(_number(record[name], 2) for name in ("nll", "unseen_nll", "gain")), *shares]
        if "choice" in record:
            row += [_number(record["choice"], 1, 100) + "%", f"{100 * record['chance']:.1f}%"]
        rows.append(row)
    lines = [f"## {title}", "", f"{text} {records[0]['samples']} sequences per row.", ""]
    return lines + _table(header, rows)


def plot_report(result: dict, image: Path) -> None:
    """Draw one panel per task, with intervals as bands."""
    panels = [task for task in ("perplexity", "phrases", "lookup", "copying") if task in result]
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(0.6 + 3.6 * len(panels), 3.4), dpi=160, layout="constrained", squeeze=False
    )
    for axes, task in zip(all_axes[0], panels, strict=True):
        if task == "perplexity":
            for name, color, label in (
                ("by_place", BLUE, "place in the document"),
                ("by_context", RED, "tokens read before"),
            ):
                records = result[task][name]
                if name == "by_context" and result["recipe"]["perplexity"]["carry_state"]:
                    continue  # the two are the same
                centres = [math.sqrt(record["from"] * record["to"]) for record in records]
                _band(axes, centres, [record["loss"] for record in records], color, label)
            axes.set(xlabel="tokens", ylabel="loss (nats per token)", title="perplexity")
        elif task == "lookup":
            pairs = [record["pairs"] for record in result[task]]
            _band(axes, pairs, [record["choice"] for record in result[task]], RED, "right among the values")
            _band(axes, pairs, [record["accuracy"] for record in result[task]], BLUE, "right among all tokens")
            axes.plot(pairs, [record["chance"] for record in result[task]], color=GREY, ls="--", lw=1.2, label="chance")
            axes.set(xlabel="pairs", ylabel="share", title="key-value lookup", ylim=(-0.03, 1.03))
        else:
            key, title = ("distance", "repeated phrases") if task == "phrases" else ("length", "copying")
            places = [record[key] for record in result[task]]
            _band(axes, places, [record["unseen_nll"] for record in result[task]], GREY, "the same, unseen")
            _band(axes, places, [record["nll"] for record in result[task]], RED, "seen before")
            axes.set(xlabel=f"{key} (tokens)", ylabel="nats per token", title=title)
            axes.set_ylim(bottom=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
        tidy(axes)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{result['model']} ({result['model_type']})", x=0.01, ha="left", fontsize=10)
    figure.savefig(image)
    plt.close(figure)


def _band(axes, places: Sequence[float], estimates: Sequence[dict], color: str, label: str) -> None:
    axes.plot(places, [value["mean"] for value in estimates], color=color, marker="o", ms=3.5, lw=1.6, label=label)
    known = [
        (place, value["low"], value["high"])
        for place, value in zip(places, estimates, strict=True)
        if value["low"] is not None
    ]
    if known:  # a single document has no interval
        axes.fill_between(*map(list, zip(*known, strict=True)), color=color, alpha=0.18, lw=0)
