# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Softmax models to convert: random ones of every family, and a tiny Llama that has learnt something."""

import json
import os
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from forked_driver import ForkedDriver
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from training import pretrain

TEACHER_SHAPE = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
RECIPE = """
teacher: {path: teacher/final}
layers: {mixer: gated_delta_net, count: 1}
data: {path: texts, sequence_length: 32, cache_dir: cache}
train: {mixed_precision: 'no', log_every: 3}
calibration: {tokens: 2048, fit_tokens: 1024}
align: {tokens: 5120, batch_size: 16, micro_batch_size: 8, learning_rate: 2e-2, warmup_ratio: 0.0}
distil: {tokens: 5120, batch_size: 32, sequence_length: 16, learning_rate: 1e-2, warmup_ratio: 0.0}
evaluation: {rows: 8, watch_rows: 8, probes: [lookup]}
lookup: {pairs: [2]}
probes: {samples: 4}
checkpoint: {every_steps: 4, keep_last: 2}
"""


def write_texts(folder: Path) -> None:
    """What comes next follows from what came some words before: every text goes through its own few words in turn."""
    words = "red blue green black white brown pink grey gold teal".split()
    folder.mkdir()
    for index in range(60):
        own = [words[(index * 7 + place * (index % 3 + 1)) % 10] for place in range(3 + index % 3)]
        text = " ".join(own[place % len(own)] for place in range(70))
        (folder / f"{index:03d}.txt").write_text(text, encoding="utf-8")


@pytest.fixture(scope="session")
def workplace(tmp_path_factory) -> Path:
    """A folder with texts, a Llama trained on them (teacher/final), and a recipe to convert it."""
    folder = tmp_path_factory.mktemp("conversion")
    write_texts(folder / "texts")
    (folder / "llama.json").write_text(json.dumps(TEACHER_SHAPE), encoding="utf-8")
    (folder / "convert.yaml").write_text(RECIPE, encoding="utf-8")
    AcceleratorState._reset_state(reset_partial_state=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        status = pretrain.main(
            [
                "output_dir=teacher", "model.config=llama.json", "data.path=texts", "data.sequence_length=32",
                "data.cache_dir=cache", "train.steps=150", "train.batch_size=8", "train.log_every=50",
                "train.mixed_precision=no", "optimizer.learning_rate=5e-3", "schedule.warmup_steps=10",
                "validation.every_steps=0", "checkpoint.every_steps=0", "sample.training_tokens=0",
                "sample.cache_tokens=[2]", "tracking.trackers=[]",
            ]
        )  # fmt: skip
    finally:
        os.chdir(before)
    assert status == 0
    return folder


@pytest.fixture(scope="session")
def teacher(workplace) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(workplace / "teacher" / "final").eval()


CONVERT = """
from training import checkpoint, convert
from training.convert import main

def ends(n):
    return lambda old, new: str(new).endswith(f"step-{n:06d}")

POINTS = {
    "step": lambda n: patch(convert.Conversion, "advance", lambda self: self.step == n, "after"),
    "stop": lambda n: patch(convert.Conversion, "advance", lambda self: self.step == n - 1, "after", signal.SIGINT),
    "rename": lambda n: patch(checkpoint.os, "rename", ends(n), "before"),
    "renamed": lambda n: patch(checkpoint.os, "rename", ends(n), "after"),
    "watch": lambda n: patch(convert.Conversion, "watch", lambda self: self.step == n, "after"),
    "finish": lambda n: patch(convert.Conversion, "finish", lambda *_: True, "before"),
}
"""


@pytest.fixture(scope="session")
def driver(workplace):
    driver = ForkedDriver(workplace, "convert.yaml", CONVERT, seconds=600)
    yield driver
    driver.close()
