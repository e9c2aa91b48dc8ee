# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""A corpus and a model shape small enough to train in a second, and the script run as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPE = {
    "model_type": "avgpath",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
    "mixer": "gated_delta_net",
    "hybrid_ratio": "3:1",
}
# `accelerate launch --cpu` starts several processes by MPI alone; `torchrun` does by itself, for Accelerate told so.
ON_CPUS = {"ACCELERATE_USE_CPU": "true"}
LLAMA_SHAPE = {key: SHAPE[key] for key in list(SHAPE)[:7]} | {"model_type": "llama"}


def write_corpus(folder: Path, documents: int = 40) -> Path:
    """Text whose next word follows from the words before: counting, upwards and downwards."""
    folder.mkdir()
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    for index in range(documents):
        step = 1 if index % 2 else -1
        text = " ".join(words[(index + step * place) % 10] for place in range(60))
        (folder / f"{index:03d}.txt").write_text(f"Count {index}: {text}.", encoding="utf-8")
    return folder


class Workplace:
    """A folder with a corpus, model shapes and a recipe; runs the script in it."""

    script = REPOSITORY / "training" / "pretrain.py"

    def __init__(self, folder: Path):
        self.folder = folder
        write_corpus(folder / "texts")
        (folder / "tiny.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        (folder / "llama.json").write_text(json.dumps(LLAMA_SHAPE), encoding="utf-8")
        (folder / "tiny.yaml").write_text(
            "model: {config: tiny.json}\n"
            "data: {path: texts, sequence_length: 32, cache_dir: cache}\n"
            "train: {steps: 12, batch_size: 4, log_every: 2}\n"
            "optimizer: {learning_rate: 1e-2}\n"
            "schedule: {warmup_steps: 2}\n"
            "validation: {every_steps: 6, rows: 4}\n"
            "checkpoint: {every_steps: 4, keep_last: 1}\n"
            "sample: {prompt: 'Count', cache_tokens: [5, 25], shown_tokens: 20}\n",
            encoding="utf-8",
        )

    def start(self, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
        command = [sys.executable, *(launcher or (str(self.script),)), "tiny.yaml", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | (ON_CPUS if launcher else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
        process = self.start(*arguments, launcher=launcher)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def interrupt(self, number: signal.Signals, *arguments: str) -> subprocess.CompletedProcess:
        """Start the script, and send it a signal once it has logged its first steps."""
        process = self.start(*arguments)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "tokens/s" in line:
                process.send_signal(number)
                break
        deadline = time.monotonic() + 120
        out, err = process.communicate(timeout=deadline - time.monotonic())
        return subprocess.CompletedProcess(process.args, process.returncode, "".join(lines) + out, err)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("pretraining"))


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps its state for the process: what an earlier test chose, no script would find."""
    AcceleratorState._reset_state(reset_partial_state=True)
