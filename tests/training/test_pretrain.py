# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The pretraining script end to end, as a user starts it."""

import json
import math
import signal

import pytest
import torch
from matplotlib import image
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_avgpath
from training.checkpoint import STATE_FILE
from training.data import load_documents, split_documents
from training.tracking import read_metrics


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def finished(workplace):
    """The folder of a finished run of the tiny recipe."""
    result = workplace.run("output_dir=finished")
    assert result.returncode == 0, result.stderr
    return workplace.folder / "finished", result


def test_the_model_loads_and_has_learned(finished, workplace):
    folder, _ = finished
    model, tokenizer = load(folder / "final")
    assert isinstance(model, modeling_avgpath.AvgPathForCausalLM)
    assert model.config.mixer_types == ["gated_delta_net"] * 3 + ["softmax"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    losses = [record["loss"] for record in read_metrics(folder / "metrics.jsonl", "validation")]
    assert losses[0] == pytest.approx(math.log(320), abs=0.3)
    assert losses[-1] < losses[0] - 1


def test_validation_is_the_loss_of_the_saved_model(finished, workplace):
    """Perplexity and bits per byte recomputed from the held-out text itself, row by row."""
    folder, _ = finished
    model, tokenizer = load(folder / "final")
    _, held_out = split_documents(load_documents(str(workplace.folder / "texts")), 20)
    eos = tokenizer.eos_token_id
    stream = [eos]
    for document in held_out:
        stream += [*tokenizer(document.text)["input_ids"], eos]
    nats = 0.0
    for start in range(0, len(stream) - 1, 32):
        row = torch.tensor(stream[start : start + 33])
        with torch.no_grad():
            logits = model(input_ids=row[None, :-1]).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    summary = json.loads((folder / "summary.json").read_text())
    loss = nats / (len(stream) - 1)
    bits = nats / math.log(2) / sum(len(document.text.encode()) for document in held_out)
    assert summary["validation"]["loss"] == pytest.approx(loss, rel=1e-2)  # the run used bf16 where there is AMX
    assert summary["validation"]["perplexity"] == pytest.approx(math.exp(summary["validation"]["loss"]))
    assert summary["validation"]["bits_per_byte"] == pytest.approx(bits, rel=1e-2)


def test_metrics_plot_and_sample(finished):
    folder, result = finished
    train = read_metrics(folder / "metrics.jsonl", "train")
    assert [record["step"] for record in train] == [2, 4, 6, 8, 10, 12]
    assert all(record["tokens"] == record["step"] * 4 * 32 for record in train)
    assert all(math.isfinite(record["loss"]) and record["tokens_per_second"] > 0 for record in train)
    assert [record["step"] for record in read_metrics(folder / "metrics.jsonl", "validation")] == [0, 6, 12]
    pixels = image.imread(folder / "loss.png")
    assert min(pixels.shape[:2]) > 400 and pixels.std() > 0.01
    assert (folder / "sample.txt").read_text().startswith("Count")
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]  # no temporary left


def test_cache_bytes_are_those_of_the_model(finished):
    folder, result = finished
    sizes = {r["generated_tokens"]: r["nbytes"] for r in read_metrics(folder / "metrics.jsonl", "cache")}
    # One softmax layer keeps K and V, 2 heads of 16 fp32 numbers each, with room for 256 tokens behind the first two; the
    # other layers do not grow.
    assert sizes[25] == sizes[5] > (2 + 256) * 2 * 2 * 16 * 4
    assert f"{sizes[5]:,} after 5, {sizes[25]:,} after 25" in result.stdout


def test_old_checkpoints_are_removed(finished):
    folder, _ = finished
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000008"]
    assert json.loads((folder / "checkpoints" / "step-000008" / STATE_FILE).read_text())["step"] == 8


def test_the_same_recipe_gives_the_same_losses_in_micro_batches(finished, workplace):
    """Also: `python -m`, another output folder, tokens from the cache, and gradient accumulation."""
    folder, _ = finished
    result = workplace.run(
        "output_dir=again", "train.micro_batch_size=2", "train.mixed_precision=no", launcher=("-m", "training.pretrain")
    )
    assert result.returncode == 0, result.stderr
    first, second = (read_metrics(path / "metrics.jsonl", "train") for path in (folder, workplace.folder / "again"))
    assert [r["loss"] for r in second] == pytest.approx([r["loss"] for r in first], rel=2e-2)
    assert len(list((workplace.folder / "cache").iterdir())) == 2  # one tokenizer, one set of rows


def test_a_finished_run_is_not_overwritten_unasked(finished, workplace):
    folder, _ = finished
    before = (folder / "metrics.jsonl").read_text()
    result = workplace.run("output_dir=finished")
    assert result.returncode == 2
    assert "finished holds a finished run" in result.stderr and "overwrite=true" in result.stderr
    assert "Traceback" not in result.stderr
    assert (folder / "metrics.jsonl").read_text() == before


def test_another_model_type_under_accelerate_launch(workplace):
    result = workplace.run(
        "output_dir=llama",
        "model.config=llama.json",
        "train.steps=4",
        "checkpoint.every_steps=0",
        launcher=("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", str(workplace.script)),
    )
    assert result.returncode == 0, result.stderr
    model, _ = load(workplace.folder / "llama" / "final")
    assert model.config.model_type == "llama"
    sizes = [r["nbytes"] for r in read_metrics(workplace.folder / "llama" / "metrics.jsonl", "cache")]
    assert sizes[1] - sizes[0] == 20 * 4 * 2 * 2 * 16 * 4  # four softmax layers now


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_a_usable_checkpoint(workplace, number):
    name = f"stopped-{number}"
    result = workplace.interrupt(number, f"output_dir={name}", "train.steps=100000", "checkpoint.every_steps=0")
    assert result.returncode == 128 + number, result.stderr
    (checkpoint,) = (workplace.folder / name / "checkpoints").iterdir()
    assert f"checkpoint in {name}/checkpoints/{checkpoint.name}" in result.stderr
    model, tokenizer = load(checkpoint)
    step = json.loads((checkpoint / STATE_FILE).read_text())["step"]
    assert checkpoint.name == f"step-{step:06d}" and step >= 2
    output = model.generate(**tokenizer("Count", return_tensors="pt"), max_new_tokens=5)
    assert output.shape[1] > 1
    assert read_metrics(workplace.folder / name / "metrics.jsonl", "train")[-1]["step"] == step


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.stepz=1"], ["unknown recipe key 'train.stepz'", "did you mean 'train.steps'?"]),
        (["data.path=nowhere"], ["data.path=nowhere", "no such file or folder"]),
        (["data.sequence_length=99999"], ["training tokens", "data.sequence_length=99999"]),
        (["train.batch_size=5000"], ["fewer than train.batch_size=5000"]),
        (["train.micro_batch_size=3"], ["train.batch_size=4 is not a multiple of train.micro_batch_size=3"]),
        (["tokenizer.vocab_size=330"], ["330 tokens", "vocab_size is 320", "model.vocab_size=330"]),
        (["model.mixxer=linear"], ["has no field 'mixxer'", "did you mean 'mixer'?"]),
        (["model.hybrid_ratio=0:0"], ["hybrid_ratio"]),
        (["--hepl"], ["unrecognized arguments: --hepl"]),
        (
            ["output_dir=texts/run"],
            ["output_dir=texts/run lies within the folder of texts texts", "choose one outside"],
        ),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, words, workplace, capsys, monkeypatch):
    from training.pretrain import main

    monkeypatch.chdir(workplace.folder)
    try:
        status = main(["tiny.yaml", "output_dir=mistaken", *arguments])
    except SystemExit as stop:  # argparse
        status = stop.code
    message = capsys.readouterr().err
    assert status == 2
    for word in words:
        assert word in message
    assert not (workplace.folder / "mistaken").exists()


def test_help_lists_every_field(capsys):
    from training.pretrain import main
    from training.recipe import recipe_fields

    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for key, _, _, meaning in recipe_fields():
        assert key in text and meaning in text


def test_two_processes_take_the_steps_of_one(finished, workplace):
    folder, _ = finished
    result = workplace.run(
        "output_dir=two",
        "train.mixed_precision=no",
        launcher=("-m", "torch.distributed.run", "--nproc_per_node", "2", str(workplace.script)),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("model in two/final") == 1  # they know of each other
    first, second = (read_metrics(path / "metrics.jsonl", "train") for path in (folder, workplace.folder / "two"))
    assert [r["step"] for r in second] == [r["step"] for r in first]
    assert [r["loss"] for r in second] == pytest.approx([r["loss"] for r in first], rel=2e-2)


def test_ctrl_c_after_training_keeps_the_final_model(workplace, capsys, monkeypatch):
    from training import pretrain

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(workplace.folder)
    monkeypatch.setattr(pretrain.Pretraining, "finish", interrupted)
    assert pretrain.main(["tiny.yaml", "output_dir=cut", "train.steps=2", "validation.every_steps=0"]) == 130
    assert "training is complete, model in cut/final" in capsys.readouterr().err
    assert load(workplace.folder / "cut" / "final")[0].config.model_type == "avgpath"


def test_a_diverged_run_keeps_the_last_good_checkpoint(workplace):
    """A learning rate that ruins the weights at once: the run stops before a ruined checkpoint replaces a good one."""
    result = workplace.run(
        "output_dir=diverged", "optimizer.learning_rate=1e30", "train.log_every=100", "checkpoint.every_steps=1",
        "train.max_grad_norm=1e9",
    )  # fmt: skip
    assert result.returncode not in (0, None)
    assert "lower optimizer.learning_rate" in result.stderr
    checkpoints = list((workplace.folder / "diverged" / "checkpoints").glob("step-*"))
    for checkpoint in checkpoints:
        model, _ = load(checkpoint)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
