# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/gpu.py, as far as a CPU can run it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).parents[2]


def test_smoke(tmp_path):
    """Every part runs on the torch backend, keeps the laws, and writes its rows."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failures"] == found["skipped"] == []
    assert all(found["rows"][part] for part in gpu.PARTS)
    assert {row["backend"] for row in found["rows"]["laws"]} == {"torch"}
    page = (tmp_path / "gpu.md").read_text()
    assert all(title in page for _, title, _ in gpu.PARTS.values())


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.signal, "setitimer", lambda *_: None)
    run = gpu.Run("cpu", gpu.QUICK, seconds=10, folder=tmp_path)
    run.part, run.deadline = "laws", time.monotonic() + 10
    return run


def test_goes_on_after_a_failure(run, capsys):
    assert run.attempt("broken", lambda: 1 / 0) is None
    assert run.attempt("whole", lambda: 7) == 7
    run.check("wrong", "fp32", "torch", "output", float("nan"), 1e-5)
    assert [failure["case"] for failure in run.failures] == ["broken", "wrong, fp32, torch"]
    assert "FAILED laws: broken: ZeroDivisionError" in capsys.readouterr().out
    gpu.save(run, gpu.facts(run))
    assert "- laws: broken: ZeroDivisionError" in (run.folder / "gpu.md").read_text()


def test_ends_in_time(run):
    def too_long():
        raise gpu.OutOfTime

    assert run.attempt("long", too_long) is None
    run.deadline = time.monotonic()
    assert run.attempt("late", lambda: 7) is None
    assert run.skipped == ["laws: long (cut off)", "laws: late"] and not run.failures


def test_needs_a_gpu_unless_told(monkeypatch, capsys):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit):
        gpu.parse_arguments()
    assert "--device cpu --quick" in capsys.readouterr().err
