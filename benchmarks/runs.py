# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Runs of the project's own scripts that a measurement is made of: begun, gone on with, or already there."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from training.recipe import REPOSITORY

# Of a model that is there to show that a command runs.
QUICK_SHAPE = (
    "model.vocab_size=320", "model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=4",
    "model.num_attention_heads=1", "schedule.warmup_steps=1", "sample.cache_tokens=[2]",
)  # fmt: skip


def run_script(
    script: str, recipe: str, folder: Path, arguments: Sequence[str], threads: int, steps: int | None = None
) -> dict:
    """Begin a run of training/`script` in `folder`, or go on with it, unless it is finished; returns its summary.

    Args:
        steps: how many the run has, if a finished one of another length is to be refused.

    Raises:
        CalledProcessError: it fails.
        ValueError: another number of steps.
    """
    summary = folder / "summary.json"
    if not summary.exists():
        command = [sys.executable, str(REPOSITORY / "training" / script), recipe, f"output_dir={folder}", *arguments]
        if folder.exists():
            command.append("resume=true")
        print("$", shlex.join(command[1:]), file=sys.stderr, flush=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=2, check=True)
    found = json.loads(summary.read_text(encoding="utf-8"))
    if steps is not None and found["steps"] != steps:
        raise ValueError(
            f"{folder} holds a run of {found['steps']} steps, not {steps}: take another folder with --runs"
        )
    return found


def quick_corpus(folder: Path) -> str:
    """A file of documents in which much follows from what was before."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    texts = [" ".join(words[(start + place) % 10] for place in range(40)) for start in range(24)]
    file = folder / "texts.txt"
    file.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    return str(file)


def quick_data(folder: Path) -> list[str]:
    """What a recipe of two sources reads instead, where it keeps it, in short rows and in fp32."""
    return [
        "data.sources=[]", f"data.path={quick_corpus(folder)}", f"data.cache_dir={folder}/cache",
        "data.sequence_length=32", "data.validation_every=4", "train.mixed_precision=no",
    ]  # fmt: skip


def quick_teacher(folder: Path, threads: int) -> str:
    """A tiny softmax model that has seen a few rows."""
    arguments = [*QUICK_SHAPE, *quick_data(folder), "model.hybrid_ratio=0:1", "train.steps=2", "train.batch_size=2"]
    run_script("pretrain.py", "configuration/pretrain.yaml", folder / "teacher", arguments, threads)
    return str(folder / "teacher" / "final")
