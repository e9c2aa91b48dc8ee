# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Loading: tokens a second that `next(batches)` gives, mapped and streaming, and what the start takes.

Nothing trains meanwhile, so streaming shows how fast a corpus is read and tokenised. It gives a block of rows at a time, and
the longest wait is for one.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.options import Option
from benchmarks.report import Column, Report, bars
from training.data import prepare_data
from training.recipe import DataRecipe, TokenizerRecipe

OPTIONS = {
    "path": Option("sotu", "generated", "a corpus, as data.path; generated: 500 short documents"),
    # At least the 256 bytes and 2 special tokens.
    "vocab_size": Option(8192, 300, "of the tokenizer, which is trained on the corpus", least=258),
    "sequence_length": Option(512, 64, "tokens a row"),
    "rows": Option(4, 2, "a batch"),
    "shuffle_rows": Option(256, 16, "of a block, as data.shuffle_rows"),
    "seconds": Option(10.0, 0.2, "of each measurement"),
}
COLUMNS = (
    Column("way", "data"),
    Column("boundaries", "boundaries"),
    Column("workers", "workers"),
    Column("first_seconds", "first start (s)", "{:.1f}"),
    Column("again_seconds", "next start (s)", "{:.2f}"),
    Column("tokens_per_second", "tokens/s", "{:,.0f}"),
    Column("median_ms", "a batch (ms), median", "{:.2f}"),
    Column("longest_ms", "longest", "{:,.0f}"),
)
WAYS = (
    ("mapped", False, 0),
    ("mapped", True, 0),
    ("streaming", False, 0),
    ("streaming", False, 2),
    ("streaming", True, 2),
)


def generate(folder: Path) -> str:
    """A corpus of 500 short documents in `folder`; returns its path."""
    file = folder / "generated.jsonl"
    lines = [
        json.dumps({"text": f"Document {index} counts: {' '.join(map(str, range(index)))}"}) for index in range(500)
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    rows = []
    for way, boundaries, workers in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            recipe = DataRecipe(
                path=generate(Path(folder)) if settings.path == "generated" else settings.path,
                sequence_length=settings.sequence_length,
                boundaries=boundaries,
                streaming=way == "streaming",
                shuffle_rows=settings.shuffle_rows,
                workers=workers,
                cache_dir=f"{folder}/cache",
            )
            starts = []
            for _ in range(2):
                begin = time.perf_counter()
                data = prepare_data(recipe, TokenizerRecipe(), settings.vocab_size)
                starts.append(time.perf_counter() - begin)
            batches = data.batches(settings.rows)
            waits, tokens, begin = [], 0, time.perf_counter()
            while (now := time.perf_counter()) - begin < settings.seconds:
                tokens += next(batches)["input_ids"].numel()
                waits.append(time.perf_counter() - now)
            batches.close()
            rows.append(
                {
                    "way": way,
                    "boundaries": "honoured" if boundaries else "none",
                    "workers": workers,
                    "first_seconds": starts[0],
                    "again_seconds": starts[1],
                    "tokens_per_second": tokens / sum(waits),
                    "median_ms": 1e3 * statistics.median(waits),
                    "longest_ms": 1e3 * max(waits),
                }
            )
    title = f"Batches of {settings.rows} rows of {settings.sequence_length} tokens from {settings.path}."
    return title, rows, {}


def draw(report: Report):
    labels = [f"{row['way']}, boundaries {row['boundaries']}, {row['workers']} workers" for row in report.rows]
    return bars(labels, [row["tokens_per_second"] for row in report.rows], "tokens/s")
