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
from forked_driver import ON_CPUS, ForkedDriver

from training.recipe import REPOSITORY

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


# `cut_labels`: rows lose a part of their labels, by their content. `poison`: the step in which the last process has a
# gradient that is not a number.
PRETRAIN = """
import accelerate
from training import batches, checkpoint, pretrain, step
from training.pretrain import main
from training.tracking import MetricsLog
from transformers import PreTrainedModel

POINTS = {
    "backward": lambda n: patch(step.NonFiniteGuard, "admits", lambda self, at, *_, **__: at == n, "before"),
    "optimizer": lambda n: patch(step.NonFiniteGuard, "admits", lambda self, at, *_, **__: at == n + 1, "before"),
    "record": lambda n: patch(MetricsLog, "write", lambda self, kind, step=0, **_: (kind, step) == ("train", n), "after"),
    "validation": lambda n: patch(pretrain.Pretraining, "validate", lambda self, *_: self.step == n, "before"),
    "validated": lambda n: patch(pretrain.Pretraining, "validate", lambda self, *_: self.step == n, "after"),
    "weights": lambda n: patch(
        PreTrainedModel, "save_pretrained", lambda self, to, **_: f"step-{n:06d}" in str(to), "after"
    ),
    "tensors": lambda n: patch(
        checkpoint.torch, "save", lambda value, to: f"step-{n:06d}" in str(to) and to.name == "optimizer.pt", "cut short"
    ),
    "rename": lambda n: patch(checkpoint.os, "rename", lambda old, new: str(new).endswith(f"step-{n:06d}"), "before"),
    "renamed": lambda n: patch(checkpoint.os, "rename", lambda old, new: str(new).endswith(f"step-{n:06d}"), "after"),
    "pruned": lambda n: patch(checkpoint.os, "rename", lambda old, new: str(old).endswith(f"step-{n:06d}"), "after"),
    "opened": lambda n: patch(pretrain, "open_folder", lambda *_: True, "after"),
    "final": lambda n: patch(PreTrainedModel, "save_pretrained", lambda self, to, **_: ".final" in str(to), "after"),
    "finish": lambda n: patch(pretrain.Pretraining, "finish", lambda *_: True, "before"),
}

def cut_labels():
    whole = batches.TrainingBatches.__next__
    def cut(self):
        batch = whole(self)
        for ids, labels in zip(batch["input_ids"], batch["shift_labels"]):
            labels[int(ids.sum()) % len(ids) + 1 :] = -100
        return batch
    batches.TrainingBatches.__next__ = cut

def poison(at):
    take, backward, now = step.TrainingStep.__call__, accelerate.Accelerator.backward, []
    def remember(self, number, micro_batches):
        now[:] = [number]
        return take(self, number, micro_batches)
    step.TrainingStep.__call__ = remember
    accelerate.Accelerator.backward = lambda self, loss: backward(self, loss * (float("nan") if now == [at] else 1))

def prepare(order, is_last):
    if order.get("cut_labels"):
        cut_labels()
    if order.get("poison") and is_last:
        poison(order["poison"])
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("pretraining"))


@pytest.fixture(scope="module")
def fork_driver(workplace):
    driver = ForkedDriver(workplace.folder, "tiny.yaml", PRETRAIN)
    yield driver
    driver.close()


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps its state for the process: what an earlier test chose, no script would find."""
    AcceleratorState._reset_state(reset_partial_state=True)
