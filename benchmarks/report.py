# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""A finished measurement as JSON, as a Markdown table and as a figure."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path("docs/results")
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8f5db7", "#edae49", "#5f6b76", "#00798c", "#b56576", "#7a6f3c", "#222222")


class Column(NamedTuple):
    """A column of the Markdown table: the rows' key, its title, and a format as of `str.format` (numbers only)."""

    key: str
    title: str
    format: str = "{}"


# Ours and a peer on the same work.
SIDE_BY_SIDE = (
    Column("pass", "pass"),
    Column("seconds", "AvgPath (s)", "{:.3f}"),
    Column("peer", "peer"),
    Column("peer_seconds", "peer (s)", "{:.3f}"),
    Column("ratio", "ratio", "{:.2f}"),
)


@dataclass
class Report:
    """What one command measured.

    Attributes:
        command: its name, which is also that of the files.
        title: one sentence: what was measured, and on what shapes.
        command_line: what was typed.
        options: all settings that it ran with.
        machine: `measure.machine_facts()`.
        rows: flat records; seconds and bytes throughout. A value that was not measured is None.
        facts: what is not of one row, such as the machine's rates; numbers, or words.
    """

    command: str
    title: str
    command_line: str
    options: dict[str, Any]
    machine: dict[str, Any]
    rows: list[dict[str, Any]]
    facts: dict[str, Any]

    def markdown(self, columns: Sequence[Column]) -> str:
        machine = self.machine.get("gpu") or f"{self.machine['cpu']}, {self.machine['threads']} threads"
        lines = [
            f"# {self.command}",
            "",
            self.title,
            "",
            f"{machine}; PyTorch {self.machine['torch']}, Transformers {self.machine['transformers']}; "
            f"{self.machine['date']}. Command: `{self.command_line}`",
            "",
            *(
                f"- {name}: {value if isinstance(value, str) else f'{value:,.1f}'}"
                for name, value in self.facts.items()
            ),
            *([""] if self.facts else []),
            *table(columns, self.rows),
        ]
        return "\n".join(lines)

    def save(self, folder: Path, columns: Sequence[Column], draw: Callable[["Report"], Any] | None) -> list[Path]:
        """Write COMMAND.json, COMMAND.md and COMMAND.png; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.command}.{suffix}" for suffix in ("json", "md", "png")]
        paths[0].write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        paths[1].write_text(self.markdown(columns), encoding="utf-8")
        if draw is None:
            return paths[:2]
        figure = draw(self)
        figure.savefig(paths[2], dpi=150)
        _pyplot().close(figure)
        return paths

    @classmethod
    def load(cls, path: Path) -> "Report":
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def table(columns: Sequence[Column], rows: Iterable[dict[str, Any]]) -> list[str]:
    """Markdown lines; text to the left, numbers to the right, nothing where a value is None."""
    rows = list(rows)
    words = [any(isinstance(row.get(column.key), str) for row in rows) for column in columns]
    lines = [
        f"| {' | '.join(column.title for column in columns)} |",
        f"|{'|'.join('---' if word else '---:' for word in words)}|",
    ]
    for row in rows:
        cells = (
            "" if (value := row.get(column.key)) is None
            else value if isinstance(value, str)
            else column.format.format(value)
            for column in columns
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def axes_of(panels: Sequence[dict[str, Any]], height: float = 3.6):
    """A figure of panels side by side, each with the labels and scales given as of `Axes.set`: (figure, axes)."""
    figure, all_axes = _pyplot().subplots(
        1, len(panels), figsize=(1 + 4.6 * len(panels), height), layout="constrained", squeeze=False
    )
    for axes, settings in zip(all_axes[0], panels, strict=True):
        axes.set(**settings)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_label_text().startswith("tokens") and axis.get_scale() == "log":
                axis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
    return figure, all_axes[0]


def bars(labels: Sequence[str], values: Sequence[float], xlabel: str, mark: float | None = None, log: bool = False):
    """A figure of horizontal bars, the first on top, with their values; a line at `mark`."""
    figure, (axes,) = axes_of([{"xlabel": xlabel}], height=1 + 0.24 * len(labels))
    drawn = axes.barh(range(len(labels)), values, color=COLOURS[0], height=0.7)
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    if log:
        axes.set_xscale("log")
    if mark is not None:
        axes.axvline(mark, color="#5f6b76", linestyle="--", linewidth=1)
    return figure


def lines(axes, rows: Sequence[dict[str, Any]], series: str, x: str, y: str) -> None:
    """One line for each value of `series`, against `x`; rows without `y` are left out."""
    names = list(dict.fromkeys(row[series] for row in rows))
    for name, colour in zip(names, COLOURS * (1 + len(names) // len(COLOURS)), strict=False):
        points = [(row[x], row[y]) for row in rows if row[series] == name and row.get(y) is not None]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), color=colour, marker="o", markersize=3, label=name)
    axes.legend(frameon=False, fontsize=8)
