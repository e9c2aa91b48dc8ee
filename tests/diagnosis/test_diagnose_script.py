# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""`training/diagnose.py` as a user runs it."""

import json
import random

import pytest
import torch
from matplotlib import image
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from modeling_avgpath import diagnosis as module
from modeling_avgpath.diagnosis_report import Diagnosis
from training.data import load_documents, train_tokenizer
from training.diagnose import Watcher, main, make_windows
from training.recipe import REPOSITORY, DiagnoseRecipe, load_recipe, recipe_fields

SMALL = (
    "model.path=model",
    "data.path=texts",
    "data.split=all",
    "data.window=24",
    "data.windows=6",
    "bootstrap.resamples=20",
    "loss_windows=1",
    "output_dir=out",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts, and a model with its tokenizer."""
    folder = tmp_path_factory.mktemp("diagnose")
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    (folder / "texts").mkdir()
    for index in range(6):
        drawn = random.Random(index).choices(words, k=120)
        (folder / "texts" / f"{index}.txt").write_text(" ".join(drawn), encoding="utf-8")
    tokenizer = train_tokenizer([document.text for document in load_documents(str(folder / "texts"), "text")], 300)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("texts", "model"):
        (tmp_path / name).symlink_to(folder / name)
    return lambda *arguments: main([*SMALL, *arguments])


def test_all_files_are_written_and_kept(run, tmp_path, capsys):
    assert run() == 0
    out = tmp_path / "out"
    shown = capsys.readouterr().out
    assert "losses: window 1 of 1, about 00:00 left" in shown
    assert "By the loss of step 3 (gated_delta_net, mapped query) the layers to keep as softmax first are" in shown
    assert "nan" not in shown
    names = {file.name for file in out.iterdir()}
    assert names == {
        "diagnosis.json", "diagnosis.md", "maps.safetensors", "scores.json", "heads.png", "layers.png", "recipe.yaml"
    }  # fmt: skip
    found = Diagnosis.load(out)
    assert found.model_type == "llama" and found.tokens == {"fitted": 72, "measured": 72, "losses": 24}
    scores = json.loads((out / "scores.json").read_text())
    assert scores == [found.scores("loss_change")[layer] for layer in range(3)]
    for name in ("heads.png", "layers.png"):
        assert image.imread(out / name).std() > 0.01
    assert load_recipe(str(out / "recipe.yaml"), (), DiagnoseRecipe).data.windows == 6
    assert run() == 2
    assert (
        "holds a diagnosis; choose another output_dir=..., or replace it with overwrite=true" in capsys.readouterr().err
    )
    assert run("overwrite=true", "memories=[]", "layers=[1]") == 0
    found = Diagnosis.load(out)
    assert [layer.layer for layer in found.layers] == [1] and found.scores() == found.scores("isotropy")
    assert len(set(json.loads((out / "scores.json").read_text()))) == 1


def test_an_interrupted_run_is_resumed(run, tmp_path, capsys, monkeypatch):
    assert run("output_dir=whole") == 0
    place = Watcher.place

    def interrupt(self, name, done):
        if (name, done) == ("measure", 1):
            raise KeyboardInterrupt
        return place(self, name, done)

    monkeypatch.setattr(module, "SECONDS_BETWEEN_SAVES", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Watcher, "place", interrupt)
        assert run() == 130
    assert "resume=true goes on" in capsys.readouterr().err
    assert run() == 2
    assert "interrupted diagnosis; go on with resume=true" in capsys.readouterr().err
    assert run("resume=true", "clip=2.0") == 2
    assert "was left by a diagnosis of clip=3.0 (now 2.0)" in capsys.readouterr().err
    assert run("resume=true") == 0
    assert "fit: window" not in capsys.readouterr().out
    assert Diagnosis.load(tmp_path / "out") == Diagnosis.load(tmp_path / "whole")
    assert run("resume=true", "output_dir=nowhere") == 2
    assert "nothing to go on from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.path=nothing"], "model.path=nothing: no such folder"),
        (["model.path=texts"], "no tokenizer in texts"),
        (["model.path=texts", "model.tokenizer=model"], "model.path=texts cannot be loaded"),
        (["data.windows=1000"], "ask for fewer with data.windows="),
        (["data.window=65"], "max_position_embeddings=64"),
        (["data.windows=1"], "'data.windows' must be at least 2"),
        (["data.split=some"], "'data.split' must be one of train, held_out, all"),
        (["clip=1.0"], "'clip' must be greater than 1"),
        (["memories=[softmax]"], "Unknown memory 'softmax'"),
        (["layers=[5]"], "no softmax layers"),
        (["score=isotropie"], "no figure of a diagnosis; did you mean 'isotropy'?"),
        (["score=loss_change", "memories=[]"], "score=loss_change needs losses"),
        (["fit_windows=6"], "must leave some of the 6 windows"),
        (["overwrite=true", "resume=true"], "exclude each other"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(run, tmp_path, capsys, arguments, message):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_windows_come_from_all_over_without_overlap(run, folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    recipe = load_recipe(None, SMALL, DiagnoseRecipe)
    windows = make_windows(recipe, tokenizer)
    texts = tokenizer.eos_token.join(document.text for document in load_documents("texts", "text"))
    pieces = [tokenizer.decode(window[1:]) for window in windows]
    assert all(len(window) == 24 and window[0] == tokenizer.bos_token_id for window in windows)
    assert len({texts.index(piece) for piece in pieces}) == 6
    assert all(map(torch.equal, windows, make_windows(recipe, tokenizer)))
    other = make_windows(load_recipe(None, [*SMALL, "seed=1"], DiagnoseRecipe), tokenizer)
    assert not all(map(torch.equal, windows, other))


def test_help_and_recipe_agree_with_the_schema(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    for key, _, _, meaning in recipe_fields(DiagnoseRecipe):
        assert key in shown and meaning in shown
    assert load_recipe(str(REPOSITORY / "configuration" / "diagnose.yaml"), (), DiagnoseRecipe) == DiagnoseRecipe()
