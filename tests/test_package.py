"""The package as its users meet it: what it needs, what it registers, and files that the Hub can carry."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import modeling_avgpath
from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM, AvgPathForSequenceClassification, AvgPathModel
from modeling_avgpath.configuration_avgpath import MEMORIES

PACKAGE = Path(modeling_avgpath.__file__).parent
SOURCES = sorted(PACKAGE.glob("*.py"))
OPTIONAL = ["fla", "triton", "accelerate", "datasets"]
TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "sliding_window": 8,
}

# Trains and samples one tiny model per memory, with a layer for each of its readouts, and prints {memory: loss}.
# Arguments, each as JSON: modules to hide, modules to import first, config fields.
RUN_EVERY_MEMORY = """
import importlib, json, sys

hidden, first, fields = map(json.loads, sys.argv[1:])
sys.modules.update(dict.fromkeys(hidden))  # None in sys.modules: neither found nor imported
for name in first:
    importlib.import_module(name)

import torch
from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM
from modeling_avgpath.configuration_avgpath import MEMORIES

losses = {}
for memory, readouts in MEMORIES.items():
    torch.manual_seed(0)
    specs = [f"{memory}@{readout}" for readout in readouts] or [memory]
    config = AvgPathConfig(**{**fields, "num_hidden_layers": len(specs), "mixer_types": specs})
    model = AvgPathForCausalLM(config)
    input_ids = torch.randint(config.vocab_size, (2, 19))
    loss = model(input_ids=input_ids, labels=input_ids).loss
    loss.backward()
    bad = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not bad, f"{memory}: no finite gradient for {bad}"
    assert model.eval().generate(input_ids, max_new_tokens=2, do_sample=False).shape == (2, 21), memory
    losses[memory] = loss.item()
print(json.dumps(losses))
"""


def run_every_memory(hidden: list[str], first: list[str]) -> dict[str, float]:
    """Run `RUN_EVERY_MEMORY` in a fresh interpreter and return its losses."""
    arguments = [json.dumps(value) for value in (hidden, first, TINY)]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_EVERY_MEMORY, *arguments],
        capture_output=True, text=True, cwd=PACKAGE.parent,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def losses_without_optional_packages() -> dict[str, float]:
    return run_every_memory(hidden=OPTIONAL, first=[])


def test_every_memory_runs_without_optional_packages(losses_without_optional_packages):
    losses = losses_without_optional_packages
    assert set(losses) == set(MEMORIES)
    assert all(0 < loss < 10 for loss in losses.values()), losses


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ["fla", "triton"])), reason="flash-linear-attention or triton not installed"
)
def test_installed_kernels_change_nothing_on_cpu(losses_without_optional_packages):
    losses = run_every_memory(hidden=[], first=["fla", "triton"])
    assert losses == pytest.approx(losses_without_optional_packages, rel=1e-6)


def test_runtime_requirements():
    requirements = map(Requirement, importlib.metadata.requires("avgpath"))
    required = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert required == {"torch", "transformers", "safetensors"}


def test_auto_classes_know_avgpath():
    config = AutoConfig.for_model("avgpath", **TINY)
    assert type(config) is AvgPathConfig
    with torch.device("meta"):
        assert type(AutoModel.from_config(config)) is AvgPathModel
        assert type(AutoModelForCausalLM.from_config(config)) is AvgPathForCausalLM
        assert type(AutoModelForSequenceClassification.from_config(config)) is AvgPathForSequenceClassification


def test_checkpoint_reloads_through_auto_classes(tmp_path):
    model = AvgPathForCausalLM(AvgPathConfig(**TINY)).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is AvgPathForCausalLM
    input_ids = torch.arange(11)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids).logits, model(input_ids).logits, rtol=0, atol=0)


def test_package_is_flat():
    assert SOURCES == sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_imports_survive_the_hub(path):
    """The Hub's loader finds a checkpoint's files by the text `from .name import`, wherever in a file it stands."""
    text = path.read_text(encoding="utf-8")
    siblings = {source.stem for source in SOURCES}
    found = set(re.findall(r"^\s*from\s+\.(\S+)\s+import", text, flags=re.MULTILINE))
    assert found <= siblings, f"not files of the package: {found - siblings}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"line {node.lineno}: more than one level up"
            assert node.module, f"line {node.lineno}: 'from . import' is missed by the Hub's loader"
            absolute = [] if node.level else [node.module]
        elif isinstance(node, ast.Import):
            absolute = [alias.name for alias in node.names]
        else:
            continue
        packages = {name.split(".")[0] for name in absolute}
        assert PACKAGE.name not in packages, f"line {node.lineno}: import the package's own files relatively"
