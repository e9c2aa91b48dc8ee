# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints that carry their code: complete whatever saved them, and loadable where the package is not installed."""

import json
import shutil

import pytest
import torch
import transformers
from hub.processes import run_python
from laws.cases import SPECS, random_ids, tiny_config, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

import modeling_avgpath
from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM
from modeling_avgpath.configuration_avgpath import AUTO_MAP, HEADS, collect_code

IDS = random_ids(2, 11)


def assert_complete(folder) -> None:
    """Every class of auto_map is defined in a file of the folder, and so is every file that those import."""
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map == AUTO_MAP
    for reference in auto_map.values():
        module, name = reference.split(".")
        assert f"class {name}(" in (folder / f"{module}.py").read_text()
    files, missing = collect_code(folder.joinpath)
    assert not missing
    assert set(files) == {path.name for path in folder.glob("*.py")}


def output_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One checkpoint per head, of all mixers together, with what the model returns."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    for auto_class, head in HEADS.items():
        model = getattr(modeling_avgpath, head)(tiny_config(SPECS))
        model.save_pretrained(folder / auto_class)
        torch.save(output_of(model), folder / f"{auto_class}.pt")
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    tiny_config(["softmax"]).save_pretrained(folder / "config")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"w": 0}, unk_token="w"))).save_pretrained(
        folder / "AutoModelForCausalLM"
    )
    return folder


# Loads each checkpoint, saves it, loads what it saved and saves that, by every way there is.
STRANGER = """
import builtins, os, shutil, torch, transformers
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM, pipeline

ids = torch.tensor(IDS)
for auto_class, head in HEADS.items():
    auto = getattr(transformers, auto_class)
    model = auto.from_pretrained(auto_class, trust_remote_code=True)
    assert type(model).__name__ == head and type(model).__module__.startswith("transformers_modules.")
    model.save_pretrained(f"{auto_class}-2")
    again = auto.from_pretrained(f"{auto_class}-2", trust_remote_code=True)
    again.save_pretrained(f"{auto_class}-3")
    again.base_model.save_pretrained(f"{auto_class}-base")  # a class that no auto class has handed out
    with torch.no_grad():
        result[auto_class] = bool(torch.equal(again.eval()(ids)[0], torch.load(f"{auto_class}.pt")))

config = AutoConfig.from_pretrained("config", trust_remote_code=True)
config.save_pretrained("config-2")
again = AutoConfig.from_pretrained("config-2", trust_remote_code=True)
again.save_pretrained("config-3")
result["from_config"] = type(AutoModelForCausalLM.from_config(again, trust_remote_code=True)).__name__
again.hidden_size = 16
again.save_pretrained("config-3")  # onto itself

model = AutoModelForCausalLM.from_pretrained("AutoModelForCausalLM-3", trust_remote_code=True)
result["generated"] = model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
draft = model.generate(ids[:1], max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2).tolist()
result["prompt_lookup"] = draft[0] == result["generated"][0]

# A config whose source is gone brings no code, and then names none but its own.
os.rename("config-2", "moved")
orphan = AutoConfig.from_pretrained("moved", trust_remote_code=True)
shutil.rmtree("moved")
orphan.save_pretrained("orphan")
# A model's code does not depend on where it came from.
shutil.copytree("AutoModel-3", "passing")
model = transformers.AutoModel.from_pretrained("passing", trust_remote_code=True)
shutil.rmtree("passing")
model.save_pretrained("rescued")

last_head = list(HEADS.keys())[-1]
auto = getattr(transformers, last_head)
model = auto.from_pretrained("shards", trust_remote_code=True).eval()
with torch.no_grad():
    result["shards"] = bool(torch.equal(model(ids)[0], torch.load(f"{last_head}.pt")))
shutil.copytree("shards", "less")
lost = sorted(Path("less").glob("model-*.safetensors"))[1]
lost.unlink()
result["lost"] = [lost.name, tell(auto.from_pretrained, "less", trust_remote_code=True)]

asked = []
builtins.input = lambda question: asked.append(question) or "n"
for trust in (True, False, None):
    tokenizer = transformers.AutoTokenizer.from_pretrained("AutoModelForCausalLM", trust_remote_code=trust)
    result[f"tokenizer {trust}"] = [tokenizer("w").input_ids, len(asked)]

for name in ("op_delta.py", "mixer.py", "modeling_avgpath.py", "configuration_avgpath.py"):
    shutil.copytree("AutoModel", f"without-{name}")
    (Path(f"without-{name}") / name).unlink()
    result[name] = tell(AutoModelForCausalLM.from_pretrained, f"without-{name}", trust_remote_code=True)
"""


@pytest.fixture(scope="module")
def stranger(folder):
    code = STRANGER.replace("IDS)", f"{IDS.tolist()})").replace("HEADS.", f"{HEADS}.")
    return run_python(code, folder, {"HF_MODULES_CACHE": str(folder / "modules")}, knows_package=False)


@pytest.mark.parametrize("auto_class", HEADS)
def test_every_head_loads_without_the_package(auto_class, folder, stranger):
    """Bit for bit alike after two more rounds of saving and loading, and complete after each."""
    assert stranger[auto_class]
    for suffix in ("", "-2", "-3", "-base"):
        assert_complete(folder / f"{auto_class}{suffix}")


def test_a_config_alone_carries_the_code_of_all_heads(folder, stranger):
    assert stranger["from_config"] == "AvgPathForCausalLM"
    for name in ("config", "config-3"):
        assert_complete(folder / name)
    assert json.loads((folder / "config-3" / "config.json").read_text())["hidden_size"] == 16


def test_remote_code_generates_as_the_package(folder, stranger):
    model = AutoModelForCausalLM.from_pretrained(folder / "AutoModelForCausalLM")
    assert stranger["generated"] == model.generate(IDS, max_new_tokens=4, do_sample=False).tolist()
    assert stranger["prompt_lookup"]


def test_shards(folder, stranger):
    """They load without the package; one that is missing is named, with the way out."""
    assert len(list((folder / "shards").glob("model-*.safetensors"))) > 2
    assert stranger["shards"]
    assert_complete(folder / "shards")
    name, message = stranger["lost"]
    assert message.startswith(f"FileNotFoundError: {name} of the checkpoint less is missing")
    assert "Fetch it anew" in message


def test_the_tokenizer_runs_no_code(stranger):
    """`AutoTokenizer` reads the config first, so Transformers asks about its code unless it was told."""
    assert [stranger[f"tokenizer {trust}"] for trust in (True, False, None)] == [[[0], 0], [[0], 0], [[0], 1]]


def test_no_auto_map_dangles_when_the_source_is_gone(folder, stranger):
    assert_complete(folder / "rescued")
    auto_map = json.loads((folder / "orphan" / "config.json").read_text())["auto_map"]
    assert auto_map == {"AutoConfig": AUTO_MAP["AutoConfig"]}
    assert [path.name for path in (folder / "orphan").glob("*.py")] == ["configuration_avgpath.py"]


@pytest.mark.parametrize("name", ["op_delta.py", "mixer.py", "modeling_avgpath.py"])
def test_a_missing_code_file_is_named(name, stranger):
    message = stranger[name]
    assert message.startswith("FileNotFoundError: The checkpoint in without-")
    for words in (f", but {name} is missing", "Copy the missing file", "install the avgpath package"):
        assert words in message


def test_a_missing_config_file_is_named(stranger):
    """Nothing of ours runs before it; the message is that of Transformers."""
    assert "does not appear to have a file named configuration_avgpath.py" in stranger["configuration_avgpath.py"]


def test_the_package_needs_no_code_in_the_checkpoint(folder, tmp_path):
    shutil.copytree(folder / "AutoModelForCausalLM", tmp_path / "bare")
    for file in (tmp_path / "bare").glob("*.py"):
        file.unlink()
    for trust in (None, True):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "bare", trust_remote_code=trust)
        assert type(model) is AvgPathForCausalLM
    model.save_pretrained(tmp_path / "again")
    assert_complete(tmp_path / "again")


MIXED = """
import json, torch, transformers
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM

first = AutoModelForCausalLM.from_pretrained("AutoModelForCausalLM", trust_remote_code=True)
other = AutoModelForCausalLM.from_pretrained("other", trust_remote_code=True)
result["two"] = [type(model).__module__ for model in (first, other)]
result["marks"] = [hasattr(type(model), "is_other") for model in (first, other)]
other.save_pretrained("other-2")

import modeling_avgpath
own = AutoModelForCausalLM.from_pretrained("AutoModelForCausalLM", trust_remote_code=True)
result["own"] = type(own) is modeling_avgpath.AvgPathForCausalLM
own.save_pretrained("own-2")
first.save_pretrained("first-2")
modeling_avgpath.AvgPathForCausalLM(first.config).save_pretrained("foreign-config")  # a config of the other copy
type(first)(own.config).save_pretrained("own-config")

ids = torch.tensor(IDS)
with torch.no_grad():
    logits = first(ids).logits
    for name, cache in (("own", modeling_avgpath.AvgPathCache(own.config)), ("dynamic", transformers.DynamicCache())):
        first(ids[:, :5], cache=cache)
        result[name + " cache"] = float((first(ids[:, 5:], cache=cache).logits - logits[:, 5:]).abs().max())
"""


def test_copies_of_the_code_live_side_by_side(folder, stranger):
    """Two checkpoints with different code in one process, then the package too; each saves the code it runs."""
    shutil.copytree(folder / "AutoModelForCausalLM", folder / "other")
    modeling = folder / "other" / "modeling_avgpath.py"
    text = modeling.read_text()
    modeling.write_text(text.replace("class AvgPathForCausalLM(", "class AvgPathForCausalLM(Marked, ").replace(
        "class AvgPathMLP(", "class Marked:\n    is_other = True\n\n\nclass AvgPathMLP(", 1
    ))  # fmt: skip
    code = MIXED.replace("IDS)", f"{IDS.tolist()})")
    result = run_python(code, folder, {"HF_MODULES_CACHE": str(folder / "modules")}, knows_package=True)
    assert all(name.startswith("transformers_modules.") for name in result["two"]) and len(set(result["two"])) == 2
    assert result["marks"] == [False, True]
    assert result["own"]
    for name in ("own-2", "first-2", "foreign-config", "own-config"):
        assert_complete(folder / name)
        assert (folder / name / "modeling_avgpath.py").read_text() == text
    assert (folder / "other-2" / "modeling_avgpath.py").read_text() == modeling.read_text()
    assert result["own cache"] < 1e-4 and result["dynamic cache"] < 1e-4


def test_trainer_saves_complete_checkpoints(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in random_ids(4, 9)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(tiny_model("softmax_last"), arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"):
        assert_complete(folder)


def test_entries_of_others_stay_if_their_files_do(tmp_path):
    """A tokenizer's code, another repository's, an entry without a file, and one that a newer version knows."""
    config = tiny_config(["softmax"])
    config.auto_map = {
        "AutoTokenizer": ["my_tokenizer.MyTokenizer", None],
        "AutoProcessor": "someone/processors--processing.Processor",
        "AutoModelForMaskedLM": "gone.Gone",
        "AutoModelForMultipleChoice": "modeling_avgpath.AvgPathForMultipleChoice",
    }
    (tmp_path / "my_tokenizer.py").write_text("class MyTokenizer: ...\n")
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP | {
        "AutoTokenizer": ["my_tokenizer.MyTokenizer", None],
        "AutoProcessor": "someone/processors--processing.Processor",
    }


class Derived(AvgPathConfig):
    model_type = "derived"


def test_a_subclass_is_not_saved_under_our_name(tmp_path):
    """Neither when made, nor when it was read from a checkpoint that has our code."""
    tiny_config(["softmax"]).save_pretrained(tmp_path / "ours")
    Derived.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "derived")
    assert "auto_map" not in json.loads((tmp_path / "derived" / "config.json").read_text())
    assert not list((tmp_path / "derived").glob("*.py"))


@pytest.mark.parametrize(("spec", "words"), [("holographic", "holographic"), ("linear@softmax_free", "softmax_free")])
def test_a_mixer_of_a_newer_version(spec, words, folder, tmp_path):
    shutil.copytree(folder / "AutoModelForCausalLM", tmp_path / "newer")
    facts = json.loads((tmp_path / "newer" / "config.json").read_text())
    facts["mixer_types"][1] = spec
    (tmp_path / "newer" / "config.json").write_text(json.dumps(facts))
    for load in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError) as error:
            load(tmp_path / "newer")
        for word in (words, f"{tmp_path / 'newer' / 'config.json'}", "newer version", "upgrade the avgpath package",
                     "trust_remote_code=True"):  # fmt: skip
            assert word in str(error.value)


def test_the_package_registers_the_table_of_heads():
    for auto_class, head in HEADS.items():
        with torch.device("meta"):
            model = getattr(transformers, auto_class).from_config(tiny_config(["softmax"]))
        assert type(model) is getattr(modeling_avgpath, head)
    heads = {name for name in modeling_avgpath.__all__ if name.startswith("AvgPathFor")}
    assert heads | {"AvgPathModel"} == set(HEADS.values())
