# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Runs of `pretrain.py` that are killed, go on, and end as if they had never been disturbed: bit for bit."""

import dataclasses
import json
import random
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from training.checkpoint import PRETRAIN_FILES, STATE_FILE, find_damage
from training.recipe import Recipe, SetupError, load_recipe
from training.resume import changed_fields, random_state, recipe_changes, set_random_state
from training.tracking import read_metrics

RECIPE = """
model: {config: tiny.json}
data: {path: texts, sequence_length: 32, cache_dir: cache}
train: {steps: 26, batch_size: 4, micro_batch_size: 2, log_every: 3, mixed_precision: 'no'}
optimizer: {learning_rate: 1e-2}
schedule: {warmup_steps: 2}
validation: {every_steps: 8, rows: 2}
checkpoint: {every_steps: 4, keep_last: 2}
sample: {prompt: 'Count', cache_tokens: [2], shown_tokens: 2}
tracking: {trackers: []}
"""


@pytest.fixture(scope="module")
def driver(fork_driver):
    (fork_driver.folder / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    return fork_driver


@pytest.fixture(scope="module")
def whole(driver) -> Path:
    """The run that is never disturbed: 104 rows, which is more than an epoch."""
    folder = driver.finish("output_dir=whole")
    assert json.loads((folder / "summary.json").read_text())["epochs"] > 1.2
    return folder


def records(folder: Path) -> list[dict]:
    """The run's metrics, but for what a clock measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key and "mfu" not in key} for line in lines]


def assert_same_run(folder: Path, expected: Path) -> None:
    assert records(folder) == records(expected)
    weights, wanted = (load_file(run / "final" / "model.safetensors") for run in (folder, expected))
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert not list(folder.rglob("*.partial"))


def kill_and_go_on(driver, points: list[str], *arguments: str) -> list[str]:
    """Kill the run at each of `points` in turn, then let it end; returns where each one went on from."""
    came_from = []
    for point in points:
        status, log = driver.run(*arguments, "resume=true", kill_at=point)
        assert status == -signal.SIGKILL, (point, log)
        came_from.append(log.partition("goes on from ")[2].partition("\n")[0][-6:])
    driver.finish(*arguments, "resume=true")
    return came_from


def test_killed_at_any_moment(driver, whole):
    """Within steps, records, validations, each part of a save and of its clearing up, and while going on itself."""
    points = [
        "backward 3", "weights 4", "record 6", "tensors 8", "rename 8", "renamed 8", "opened", "validation 8", "validated 8",
        "pruned 4", "optimizer 13", "weights 16", "renamed 20", "validation 24", "final", "finish",
    ]  # fmt: skip
    came_from = kill_and_go_on(driver, points, "output_dir=killed")
    assert_same_run(driver.folder / "killed", whole)
    # Nothing where there was no checkpoint yet, and where the kill came before a word.
    expected = "- - - 4 4 4 - 8 8 8 12 12 12 20 24 24"
    assert " ".join(step.lstrip("0") or "-" for step in came_from) == expected
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == ["step-000020", "step-000024"]


def test_a_stream_goes_on_where_it_was(driver):
    """With a shuffle buffer and a thread that reads ahead, in the first pass and in the second; twice in a row at once."""
    stream = ("data.streaming=true", "data.shuffle_rows=16", "data.boundaries=true")
    expected = driver.finish("output_dir=stream", *stream)
    assert json.loads((expected / "summary.json").read_text())["epochs"] > 1.2
    points = ["tensors 8", "backward 7", "optimizer 9", "record 12", "rename 24"]
    came_from = kill_and_go_on(driver, points, "output_dir=killed_stream", *stream)
    assert [step.lstrip("0") for step in came_from] == ["", "4", "4", "8", "8"]
    assert_same_run(driver.folder / "killed_stream", expected)


def test_killed_from_outside_within_a_save(driver, whole):
    """By another process that watches the folder, at two moments that nobody chose."""
    folder = driver.folder / "outside"
    for step in ("000004", "000012"):
        partial = folder / "checkpoints" / f".step-{step}.partial"
        status, log = driver.run("output_dir=outside", "resume=true", watch=partial.exists)
        assert status == -signal.SIGKILL, log
    driver.finish("output_dir=outside", "resume=true")
    assert_same_run(folder, whole)


def test_stopped_by_a_signal_then_gone_on_with(driver, whole):
    """SIGTERM writes a checkpoint and a record between the regular ones; both are those of no other run."""
    status, log = driver.run(
        "output_dir=stopped", watch=lambda: "step     3/26" in driver.log.read_text(), number=signal.SIGTERM
    )
    assert status == 128 + signal.SIGTERM
    assert "stopped after step" in log and "go on with resume=true" in log
    driver.finish("output_dir=stopped", "resume=true")
    assert_same_run(driver.folder / "stopped", whole)


def test_the_metrics_are_not_needed_to_go_on(driver, whole):
    """Somebody has moved them away: the weights are the same, and the records those from the checkpoint on."""
    folder = driver.folder / "unmeasured"
    status, _ = driver.run("output_dir=unmeasured", kill_at="backward 18")
    assert status == -signal.SIGKILL
    (folder / "metrics.jsonl").unlink()
    driver.finish("output_dir=unmeasured", "resume=true")
    kept = records(folder)
    assert kept and kept == records(whole)[-len(kept) :]
    weights, wanted = (load_file(run / "final" / "model.safetensors") for run in (folder, whole))
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_a_damaged_checkpoint_is_skipped(driver, whole):
    folder = driver.folder / "damaged"
    status, _ = driver.run("output_dir=damaged", kill_at="backward 14")
    assert status == -signal.SIGKILL
    newest = folder / "checkpoints" / "step-000012"
    assert find_damage(newest, PRETRAIN_FILES) is None
    for name in ("model.safetensors", "optimizer.pt", "processes.pt", STATE_FILE):
        content = (newest / name).read_bytes()
        (newest / name).write_bytes(content[: len(content) // 2])
        assert find_damage(newest, PRETRAIN_FILES) == f"{name} cannot be read"
        (newest / name).write_bytes(content)
    (newest / "optimizer.pt").unlink()
    status, log = driver.run("output_dir=damaged", "resume=true")
    assert status == 0
    assert "step-000012 is damaged (no optimizer.pt), so it is skipped" in log and "goes on from" in log
    assert_same_run(folder, whole)
    status, log = driver.run("output_dir=damaged", "resume=true")
    assert status == 0 and "a run that is finished" in log


def test_a_full_disk_ends_the_run_and_loses_nothing(driver, whole):
    """A file system too small for the third checkpoint, if one may be mounted here; else a limit on a file's size."""
    place = driver.folder / "small"
    place.mkdir()
    size = sum(file.stat().st_size for file in (whole / "checkpoints" / "step-000020").iterdir())
    is_mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={int(2.7 * size)}", "tmpfs", str(place)], capture_output=True
    ).returncode == 0  # fmt: skip
    try:
        if is_mounted:
            status, log = driver.run("output_dir=small/run", "checkpoint.keep_last=9")
            kept = ["step-000004", "step-000008"]
            assert "step-000012 could not be written" in log and "step-000008 is whole" in log
        else:
            driver.run("output_dir=small/run", kill_at="backward 6")
            largest = max(file.stat().st_size for file in (whole / "checkpoints" / "step-000020").iterdir())
            status, log = driver.run("output_dir=small/run", "resume=true", file_limit=largest - 1000)
            kept = ["step-000004"]
            assert "step-000008 could not be written" in log and "step-000004 is whole" in log
        assert status == 1, log
        assert "Traceback" not in log and "resume=true" in log and "MiB are free there" in log
        assert sorted(path.name for path in (place / "run" / "checkpoints").iterdir()) == kept
        driver.run("output_dir=small/run", "resume=true", "checkpoint.every_steps=0", kill_at="final")
        assert find_damage(place / "run" / "checkpoints" / kept[-1], PRETRAIN_FILES) is None
        if not is_mounted:
            driver.finish("output_dir=small/run", "resume=true")
            assert_same_run(place / "run", whole)
    finally:
        if is_mounted:
            subprocess.run(["umount", str(place)], check=True)


def test_another_recipe_is_refused(driver, whole):
    """Naming the field, both values and the way out, before anything is changed."""
    before = (whole / "metrics.jsonl").read_bytes(), sorted(path.name for path in whole.rglob("*"))
    for argument, words in {
        "optimizer.learning_rate=1": ("'optimizer.learning_rate' was 0.01 when the run began and is 1.0 now",),
        "train.batch_size=8": ("'train.batch_size' was 4 when the run began and is 8 now",),
        "seed=3": ("'seed' was 0 when the run began and is 3 now",),
        "model.hidden_size=64": ("'model.hidden_size' was 32 when the run began and is 64 now",),
        "data.sequence_length=16": ("'data.sequence_length' was 32 when the run began and is 16 now",),
        "train.steps=40": (
            "'train.steps' was 26 when the run began and is 40 now",
            "a cosine schedule spans all steps",
        ),
        "data.path=other": ("'data.path' was 'texts' when the run began and is 'other' now",),
    }.items():
        if argument == "data.path=other":
            (driver.folder / "other").mkdir()
            for file in list((driver.folder / "texts").iterdir())[:20]:
                (driver.folder / "other" / file.name).write_bytes(file.read_bytes())
        extra = () if argument.startswith("train.steps") else ("train.steps=26", "schedule.name=cosine")
        # A finished run has nothing to go on with, so it is asked for as if it were not.
        (whole / "summary.json").rename(driver.folder / "summary.json")
        try:
            status, log = driver.run("output_dir=whole", "resume=true", argument, *extra)
        finally:
            (driver.folder / "summary.json").rename(whole / "summary.json")
        assert status == 2, log
        assert "resume=true" in log and "start anew in another output_dir" in log and "Traceback" not in log
        for word in words:
            assert word in log, log
    assert before == ((whole / "metrics.jsonl").read_bytes(), sorted(path.name for path in whole.rglob("*")))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_that_of_its_recipe_only(driver, whole):
    before = files(whole)
    status, log = driver.run("output_dir=whole", "resume=true", "sample.shown_tokens=1")
    assert status == 0 and "a run that is finished" in log
    for argument, words in {
        "optimizer.learning_rate=1": "'optimizer.learning_rate' was 0.01 when the run began and is 1.0 now",
        "model.hidden_size=64": "'model.hidden_size' was 32 when the run began and is 64 now",
    }.items():
        status, log = driver.run("output_dir=whole", "resume=true", argument)
        assert status == 2 and words in log, log
    assert files(whole) == before


def test_a_refused_place_in_the_data_changes_nothing(driver):
    """A stream of two processes, gone on with by one."""
    folder = driver.folder / "refused"
    stream = ("output_dir=refused", "data.streaming=true", "data.shuffle_rows=16")
    status, _ = driver.run(*stream, kill_at="backward 6")
    assert status == -signal.SIGKILL
    state = folder / "checkpoints" / "step-000004" / "processes.pt"
    processes = torch.load(state, weights_only=True)
    processes[0]["batches"]["identity"]["processes"] = 2
    torch.save(processes, state)
    (folder / "final").mkdir()  # as if the kill had come after the last step
    (folder / "loss.png").write_bytes(b"old")
    before = files(folder)
    status, log = driver.run(*stream, "resume=true")
    assert status == 2 and "is for processes=2, and this run has processes=1" in log, log
    assert files(folder) == before and (folder / "final").is_dir()


def test_a_ruined_model_is_no_result(driver):
    """Every number is bad from the second step on; the records are JSON all the same."""
    status, log = driver.run(
        "output_dir=ruined", "optimizer.learning_rate=1e30", "train.max_grad_norm=1e30", "train.steps=6",
        "schedule.warmup_steps=0",
    )  # fmt: skip
    assert status == 1 and "the final model's held-out loss is nan" in log and "Traceback" not in log, log
    assert not (driver.folder / "ruined" / "summary.json").exists()
    for line in (driver.folder / "ruined" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_branch_decays_from_a_stable_checkpoint(driver):
    """Bit for bit as the run that decays there by itself; and the long run goes on to more steps than it was given."""
    wsd = ("schedule.name=wsd", "optimizer.name=muon")
    short = driver.finish("output_dir=wsd", *wsd, "train.steps=12", "schedule.decay_steps=4")
    driver.finish("output_dir=long", *wsd, "train.steps=26", "schedule.decay_ratio=0.2", "checkpoint.keep_last=9")
    stable = "branch_from=long/checkpoints/step-000008"
    status, log = driver.run("output_dir=branch", *wsd, stable, "train.steps=12", kill_at="backward 11")
    assert status == -signal.SIGKILL, log
    assert "branches from long/checkpoints/step-000008" in log
    branch = driver.finish("output_dir=branch", *wsd, stable, "train.steps=12", "resume=true")
    weights, wanted = (load_file(run / "final" / "model.safetensors") for run in (branch, short))
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    train, expected = (read_metrics(run / "metrics.jsonl", "train") for run in (branch, short))
    for key in ("step", "tokens", "loss", "learning_rate"):
        assert [record[key] for record in train] == [record[key] for record in expected if record["step"] > 8]
    assert train[-1]["learning_rate"] < 0.5 * 1e-2

    for argument, words in {
        "branch_from=long/checkpoints/step-000024": "can change in the stable phase alone: from step 2 to",
        "branch_from=long/checkpoints/step-00008": "did you mean 'step-000008'?",
        "branch_from=long/final": "is no whole checkpoint (no optimizer.pt)",
        "branch_from=long": "is no whole checkpoint",
    }.items():
        status, log = driver.run("output_dir=none", *wsd, argument, "train.steps=30")
        assert status == 2 and words in log, log
    status, log = driver.run("output_dir=none", *wsd, stable, "train.steps=8")
    assert status == 2 and "must be more than the 8 steps" in log
    status, log = driver.run("output_dir=none", *wsd, stable, "train.steps=12", "optimizer.weight_decay=0")
    assert status == 2 and "'optimizer.weight_decay' was 0.1 when the run began and is 0.0 now" in log, log
    assert not (driver.folder / "none").exists()


def test_what_counts_as_changed():
    recipe = load_recipe(None, ["train.steps=70"])
    saved = dataclasses.asdict(recipe)
    assert recipe_changes(saved, recipe, ()) == {}
    del saved["train"]["nonfinite"]  # a field that is younger than the checkpoint had its default
    saved["train"]["steps"] = 9
    assert recipe_changes(saved, recipe, ()) == {"train.steps": (9, 70)}
    assert recipe_changes(saved, recipe, ("train.",)) == {}
    assert changed_fields({"a": (1, 2), "b": {"c": 1}}, {"a": [1, 2], "b": {"c": 2}, "d": None}) == {"b.c": (1, 2)}


def test_random_generators_go_on_alike():
    device = torch.device("cpu")

    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    state = random_state(device)
    first = draw()
    set_random_state(state, device)
    assert draw() == first


def test_the_fields_of_a_branch_are_checked():
    with pytest.raises(SetupError, match="'branch_from' must be null unless schedule.name=wsd"):
        load_recipe(None, ["branch_from=runs/x"])
    assert load_recipe(None, ["branch_from=runs/x", "schedule.name=wsd"], Recipe).branch_from == "runs/x"
