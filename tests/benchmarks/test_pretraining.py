# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The comparison of pretrained models: what its arms are, what is repeated, and how runs become rows."""

import json
import subprocess

import pytest

from benchmarks import pretraining
from benchmarks.__main__ import main
from benchmarks.runs import run_script
from training.modeling import load_model_config
from training.plan import build_on_meta, count_parts
from training.recipe import REPOSITORY, load_recipe


@pytest.mark.parametrize("arm", pretraining.ARMS)
def test_arms_have_about_5m_parameters(arm):
    recipe = load_recipe(str(REPOSITORY / pretraining.RECIPE), list(pretraining.ARMS[arm]))
    config = load_model_config(recipe.model)
    assert 4.7e6 < count_parts(build_on_meta(config))["total"] < 5.5e6
    assert [source.path for source in recipe.data.sources] == ["sotu", "wiki"]
    softmax = config.mixer_types.count("softmax")
    assert softmax == {"all softmax": 8, "all linear": 0}.get(arm, 2)


def write_run(folder, loss: float, steps: int = 4) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"steps": steps, "parameters": 7, "training_tokens": 64, "tokens_per_second": 10.0 * loss, "mfu": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    buckets = [{"from": 0, "to": 1, "tokens": 1, "loss": loss + 1}, {"from": 1, "to": 2, "tokens": 1, "loss": loss - 1}]
    records = [
        {"kind": "validation", "tokens": tokens, "loss": value, "bits_per_byte": value / 2, "by_position": buckets,
         "by_source": [{"name": "sotu", "loss": value - 0.5}, {"name": "wiki", "loss": value + 0.5}]}
        for tokens, value in ((0, 9.0), (32, 2 * loss), (64, loss))
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_finished_runs_are_read_and_not_repeated(tmp_path, monkeypatch):
    """Means, standard deviations, and differences between runs of the same seed."""
    losses = {"all softmax": (3.0, 4.0), "3:1 mesa": (2.5, 3.7)}
    for arm, found in losses.items():
        for seed, loss in enumerate(found):
            write_run(pretraining.run_folder(tmp_path / "runs", arm, seed), loss)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a finished run was repeated"))
    arguments = ["--arms", *losses, "--seeds", "0", "1", "--steps", "4", "--runs", str(tmp_path / "runs")]
    report = main(["pretraining", *arguments, "--output", str(tmp_path / "results")])
    first, second = report.rows
    assert (first["loss"], first["difference"]) == (3.5, None) and first["spread"] == pytest.approx(0.5**0.5)
    assert second["loss"] == pytest.approx(3.1) and second["difference"] == pytest.approx(-0.4)
    assert second["difference_spread"] == pytest.approx(0.2 / 2**0.5)
    assert second["sources"] == "sotu 2.6000 (0.8485); wiki 3.6000 (0.8485)"
    assert second["curve"] == [
        [0, 9.0, 9.0, 9.0],
        [32, pytest.approx(6.2), 5.0, 7.4],
        [64, pytest.approx(3.1), 2.5, 3.7],
    ]
    assert [bucket["low"] for bucket in second["by_position"]] == [3.5, 1.5]
    text = (tmp_path / "results" / "pretraining.md").read_text()
    assert "| 3:1 mesa |" in text and "CC BY-SA" in text


@pytest.mark.parametrize("existing", [False, True])
def test_runs_that_are_not_finished_are_begun_or_gone_on_with(existing, tmp_path, monkeypatch):
    """And one that was finished at another length is no run of this comparison."""
    folder = pretraining.run_folder(tmp_path, "3:1 mesa", 1)
    assert folder.name == "3-1-mesa-1"
    if existing:
        folder.mkdir()
    commands = []

    def run(command, **_):
        commands.append(command)
        write_run(folder, 3.0)

    monkeypatch.setattr(subprocess, "run", run)
    arguments = ("pretrain.py", pretraining.RECIPE, folder, ["seed=1"], 1)
    assert run_script(*arguments, steps=4)["parameters"] == 7
    assert f"output_dir={folder}" in commands[0] and ("resume=true" in commands[0]) == existing
    with pytest.raises(ValueError, match="holds a run of 4 steps, not 8"):
        run_script(*arguments, steps=8)
    assert len(commands) == 1
