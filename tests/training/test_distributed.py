# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Two processes over gloo take the steps of one at the same global batch, under DDP and under FSDP2."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from training.recipe import REPOSITORY
from training.tracking import read_metrics

RECIPE = """
model: {config: tiny.json}
data: {path: texts, sequence_length: 32, cache_dir: cache}
train: {steps: 20, batch_size: 8, micro_batch_size: 2, log_every: 1, mixed_precision: 'no'}
optimizer: {learning_rate: 5e-3}
schedule: {warmup_steps: 2}
validation: {every_steps: 10, rows: 3, batch_size: 2}
checkpoint: {every_steps: 10, keep_last: 1}
sample: {prompt: 'Count', cache_tokens: [2], shown_tokens: 2}
tracking: {trackers: []}
"""
ODD = {"cut_labels": True, "poison": 6}  # of the last process alone, if there are two


def environment_of(name: str) -> dict[str, str]:
    """What `accelerate launch --config_file configuration/accelerate/NAME.yaml` tells the script about FSDP."""
    config = yaml.safe_load((REPOSITORY / "configuration" / "accelerate" / f"{name}.yaml").read_text())
    values = {key.upper(): str(value) for key, value in config.get("fsdp_config", {}).items()}
    return values | ({"ACCELERATE_USE_FSDP": "true"} if config["distributed_type"] == "FSDP" else {})


@pytest.fixture(scope="module")
def driver(fork_driver):
    (fork_driver.folder / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    return fork_driver


@pytest.fixture(scope="module")
def alone(driver) -> Path:
    """The run of one process, with two micro-batches a step more. The gradient of its sixth step is not a number."""
    return driver.finish("output_dir=alone", **ODD)


def assert_close(folder: Path, expected: Path, tolerance: float) -> None:
    for kind, keys in {"train": ("loss", "grad_norm"), "validation": ("loss",)}.items():
        ours, theirs = (read_metrics(run / "metrics.jsonl", kind) for run in (folder, expected))
        assert [record["step"] for record in ours] == [record["step"] for record in theirs]
        for key in keys:
            wanted = [record[key] for record in theirs]
            assert [record[key] for record in ours] == pytest.approx(wanted, rel=tolerance, abs=tolerance), key
    ours, theirs = (load_file(run / "final" / "model.safetensors") for run in (folder, expected))
    assert ours.keys() == theirs.keys()
    assert [record["step"] for record in read_metrics(folder / "metrics.jsonl", "skipped")] == [6]  # by all processes
    assert [record["skipped_steps"] for record in read_metrics(folder / "metrics.jsonl", "train")] == [0] * 5 + [1] * 14


def test_a_step_weighs_every_label_alike(alone, driver):
    """Counts differ from row to row, yet one pass over the whole batch is what its four micro-batches are."""
    folder = driver.finish("output_dir=one_pass", "train.micro_batch_size=8", **ODD)
    assert_close(folder, alone, 1e-5)
    uncut = driver.finish("output_dir=uncut", "train.steps=2")
    norms = [read_metrics(run / "metrics.jsonl", "train")[1]["grad_norm"] for run in (alone, uncut)]
    assert abs(norms[0] - norms[1]) > 1e-2


@pytest.mark.parametrize(("name", "tolerance"), [("ddp", 1e-5), ("fsdp2", 1e-4)])
def test_two_processes_are_as_one(name, tolerance, alone, driver):
    """Losses over 20 steps; the run is killed after a checkpoint, and goes on as two processes, then as one."""
    options = {"processes": 2, "environment": environment_of(name), **ODD}
    folder = driver.finish(f"output_dir={name}", **options)
    assert_close(folder, alone, tolerance)
    assert json.loads((folder / "summary.json").read_text())["steps"] == 20
    log = driver.log.read_text()
    assert log.count(f"model in {name}/final") == 1 and f"2 x cpu ({name.upper()})" in log

    (folder / "summary.json").unlink()  # as if it had been killed before it
    weights = load_file(folder / "final" / "model.safetensors")
    records = read_metrics(folder / "metrics.jsonl", "train")
    driver.finish(f"output_dir={name}", "resume=true", **options)
    assert "goes on from" in driver.log.read_text()
    assert read_metrics(folder / "metrics.jsonl", "train")[-1]["loss"] == records[-1]["loss"]
    again = load_file(folder / "final" / "model.safetensors")
    assert all(torch.equal(weights[key], again[key]) for key in weights)

    (folder / "summary.json").unlink()
    driver.finish(f"output_dir={name}", "resume=true", **ODD)
    assert_close(folder, alone, tolerance)
