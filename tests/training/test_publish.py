# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""A pretraining run that sends its model to the Hub, and a reader who does what the model card says."""

import json
import re

import pytest
from hub.processes import run_python
from hub.server import Hub, metadata_errors
from huggingface_hub import ModelCard

from training.checkpoint import STATE_FILE
from training.pretrain import main


@pytest.fixture(scope="module")
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def run(hub, workplace):
    """The folder of a finished run of someone with an account on the Hub, and its output."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in hub.environment(workplace.folder / "sender").items():
            patch.setenv(name, value)
        result = workplace.run(
            "output_dir=sent",
            "hub_model_id=counting",
            "hub_private_repo=true",
            "checkpoint.every_steps=0",
            "license=mit",
        )
    assert result.returncode == 0, result.stderr
    return workplace.folder / "sent", result


def test_the_hub_has_the_final_folder(hub, run):
    """All of it but the state of the training, in one commit of a private repository."""
    folder, result = run
    repository = hub.repositories["tester/counting"]
    local = {path.name: path.read_bytes() for path in (folder / "final").iterdir()}
    assert {name: content for name, content in repository.files.items() if name != ".gitattributes"} == {
        name: content for name, content in local.items() if name != STATE_FILE
    }
    assert repository.private and len(repository.commits) == 2  # the first made the repository
    assert f"sent to {hub.url}/tester/counting/commit/{repository.head}" in result.stdout


def test_the_card_tells_the_run(run):
    folder, _ = run
    assert metadata_errors((folder / "final" / "README.md").read_text(encoding="utf-8")) == []
    card = ModelCard.load(folder / "final" / "README.md")
    summary = json.loads((folder / "summary.json").read_text())
    assert card.data.license == "mit"
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == summary["validation"]
    for words in (
        "# counting", "3 gated_delta_net + 1 softmax", f"{summary['parameters']:,} parameters", "12 of 4 × 32 tokens",
        "| tokens seen | 1,536", 'name = "tester/counting"',
    ):  # fmt: skip
        assert words in card.text
    assert str(folder.parent) not in card.content  # nobody's paths


def test_a_reader_does_what_the_card_says(hub, run, workplace):
    """The card's block of Python, copied into a process that does not know the package."""
    (code,) = re.findall(r"```python\n(.*?)```", hub.repositories["tester/counting"].files["README.md"].decode(), re.S)
    code += "\nresult['text'] = tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0])\n"
    result = run_python(code, workplace.folder, hub.environment(workplace.folder / "reader"), knows_package=False)
    assert result["text"].startswith("Count")


@pytest.mark.parametrize("name", ["counting", "a/b/c"])
def test_a_run_that_cannot_send_does_not_start(name, workplace, capsys, monkeypatch):
    """Here because tests are offline, and because of the name."""
    monkeypatch.chdir(workplace.folder)
    assert main(["tiny.yaml", "output_dir=refused", f"hub_model_id={name}"]) == 2
    message = capsys.readouterr().err
    for words in (f"hub_model_id={name} cannot be written", "hf auth login"):
        assert words in message
    assert not (workplace.folder / "refused").exists()
