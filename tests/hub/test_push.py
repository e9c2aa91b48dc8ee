# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Models sent to a Hub and loaded from it, through Transformers' and `huggingface_hub`'s own code and over HTTP."""

import json

import pytest
import torch
from hub.processes import run_python
from hub.server import Hub, Repository, metadata_errors
from laws.cases import random_ids, tiny_model

from modeling_avgpath import AvgPathForCausalLM
from modeling_avgpath.configuration_avgpath import AUTO_MAP, collect_code

IDS = random_ids(1, 9)

AUTHOR = r"""
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
import modeling_avgpath

model = AutoModelForCausalLM.from_pretrained("model")
result["commit"] = model.push_to_hub("whole")
model.save_pretrained("while-saving", push_to_hub=True, repo_id="while-saving")
model.config.push_to_hub("config")
model.config.save_pretrained("config-while-saving", push_to_hub=True)

rows = [{"input_ids": torch.tensor(IDS)[0], "labels": torch.tensor(IDS)[0]}]
arguments = TrainingArguments(output_dir="trained", hub_model_id="tester/trained", push_to_hub=True, max_steps=1,
                              save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=0.0)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
trainer.push_to_hub()

from pathlib import Path
from training.publish import open_repository, upload_model

for strategy in ("every_save", "checkpoint"):
    arguments = TrainingArguments(output_dir=f"way-{strategy}", hub_model_id=f"tester/way-{strategy}", push_to_hub=True,
                                  hub_strategy=strategy, hub_always_push=True, max_steps=2, save_steps=1, report_to=[],
                                  use_cpu=True, disable_tqdm=True, learning_rate=1e-3)
    trainer = Trainer(model, arguments, train_dataset=rows)

    class Wait(TrainerCallback):  # for the push of one checkpoint before there is a next one
        def on_save(self, args, state, control, **kwargs):
            trainer.push_in_progress.wait_until_done()

    trainer.add_callback(Wait())
    trainer.train()

result["refused name"] = tell(open_repository, "someone/model")
Path("model/README.md").write_text("---\nlanguage: english\n---\n")
result["refused card"] = tell(upload_model, Path("model"), "tester/whole")
"""

READER = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained("tester/config", trust_remote_code=True)
config.push_to_hub("config-again")
for name in ("whole", "while-saving", "trained"):
    model = AutoModelForCausalLM.from_pretrained(f"tester/{name}", trust_remote_code=True)
    with torch.no_grad():
        result[name] = float((model(torch.tensor(IDS)).logits - torch.load("logits.pt")).abs().max())
result["module"] = type(model).__module__
result["generated"] = model.generate(torch.tensor(IDS), max_new_tokens=3, do_sample=False).tolist()
model.push_to_hub("again")
again = AutoModelForCausalLM.from_pretrained("tester/again", trust_remote_code=True)
again.push_to_hub("thrice")
result["broken"] = tell(AutoModelForCausalLM.from_pretrained, "tester/broken", trust_remote_code=True)
result["untrusted"] = tell(AutoModelForCausalLM.from_pretrained, "tester/whole", trust_remote_code=False)
"""


@pytest.fixture(scope="module")
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def model() -> AvgPathForCausalLM:
    return tiny_model("softmax_last")


@pytest.fixture(scope="module")
def pushed(hub, model, tmp_path_factory):
    """What the author of a model and then a reader without the package see."""
    folder = tmp_path_factory.mktemp("work")
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        torch.save(model(IDS).logits, folder / "logits.pt")
    author, reader = (code.replace("IDS)", f"{IDS.tolist()})") for code in (AUTHOR, READER))
    seen = run_python(author, folder, hub.environment(folder / "author"), knows_package=True)
    whole = hub.repositories["tester/whole"]
    hub.repositories["tester/broken"] = broken = Repository(private=False)
    broken.commit({path: entry for path, entry in whole.commits[whole.head].items() if path != "op_delta.py"})
    return seen | run_python(reader, folder, hub.environment(folder / "reader"), knows_package=False)


@pytest.mark.parametrize(
    "name",
    ["whole", "while-saving", "trained", "config", "config-while-saving", "config-again", "again", "thrice"],
)
def test_repositories_are_complete(name, hub, pushed, tmp_path):
    """Whatever sent them, from the package or from remote code, first hand or third."""
    files = hub.repositories[f"tester/{name}"].files
    for path, content in files.items():
        (tmp_path / path).write_bytes(content)
    assert json.loads(files["config.json"])["auto_map"] == AUTO_MAP
    assert not collect_code(tmp_path.joinpath)[1]
    assert ("model.safetensors" in files) == ("config" not in name)
    assert metadata_errors(files["README.md"].decode()) == []


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_each_push_of_a_trainer_is_complete(strategy, hub, pushed, tmp_path):
    """In the midst of the run too: no commit's config names code that its folder lacks."""
    repository = hub.repositories[f"tester/way-{strategy}"]
    seen = []
    for number, files in enumerate(repository.commits.values()):
        for config in (
            path for path in files if path.endswith("config.json") and "auto_map" in files[path][0].decode()
        ):
            folder = tmp_path / str(number) / config.removesuffix("config.json")
            folder.mkdir(parents=True, exist_ok=True)
            for path, (content, _) in files.items():
                if path.rpartition("/")[0] == config.rpartition("/")[0]:
                    (folder / path.rpartition("/")[2]).write_bytes(content)
            assert json.loads(files[config][0])["auto_map"] == AUTO_MAP
            assert not collect_code(folder.joinpath)[1]
            seen.append(config)
    assert seen.count("config.json") >= 2
    assert ("last-checkpoint/config.json" in seen) == (strategy == "checkpoint")
    assert "model.safetensors" in repository.files


def test_a_reader_without_the_package_gets_the_same_model(model, pushed):
    assert pushed["module"].startswith("transformers_modules.tester.trained.")
    assert all(pushed[name] < 1e-5 for name in ("whole", "while-saving", "trained"))
    assert pushed["generated"] == model.generate(IDS, max_new_tokens=3, do_sample=False).tolist()


def test_the_author_gets_the_commit(hub, pushed):
    assert pushed["commit"] == f"{hub.url}/tester/whole/commit/{hub.repositories['tester/whole'].head}"


def test_weights_travel_as_large_files(hub, pushed):
    repository = hub.repositories["tester/whole"]
    large = [path for path, (_, is_lfs) in repository.commits[repository.head].items() if is_lfs]
    assert large == ["model.safetensors"]
    assert "POST /tester/whole.git/info/lfs/objects/batch" in hub.requests


def test_a_missing_code_file_is_named(pushed):
    assert "tester/broken does not appear to have a file named op_delta.py" in pushed["broken"]


def test_code_runs_only_when_trusted(pushed):
    assert pushed["untrusted"].startswith("ValueError") and "trust_remote_code=True" in pushed["untrusted"]


def test_refusals_say_what_to_do(hub, pushed):
    """Another's account, before a run; a card that the Hub does not accept, after one, which sends nothing."""
    for words in ("SetupError: hub_model_id=someone/model cannot be written", "403", "hf auth login"):
        assert words in pushed["refused name"]
    for words in ("complete in model, but was not sent to tester/whole", "'english'", "hf upload tester/whole model"):
        assert words in pushed["refused card"]
    assert len(hub.repositories["tester/whole"].commits) == 2  # the first made the repository
