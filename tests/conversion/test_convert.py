# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The conversion script: the whole chain on a Llama trained for it, kills and going on, ablation, errors."""

import json
import math
import shutil
import signal

import pytest
import torch
from huggingface_hub import ModelCard
from matplotlib import image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_avgpath import AvgPathForCausalLM, head_loss
from modeling_avgpath.conversion import from_softmax
from training.distillation import (
    LayerAlignment,
    LogitDistillation,
    build_optimizer,
    converted_layers,
    swapped_layers,
    trained_parameters,
    without_recurrence,
)
from training.recipe import ConversionRecipe, DistilRecipe, PhaseRecipe, load_recipe
from training.tracking import read_metrics


@pytest.fixture(scope="module")
def whole(driver):
    """The run that is never disturbed, and what it printed."""
    status, log = driver.run("output_dir=whole")
    assert status == 0, log
    return driver.folder / "whole", log


def test_the_chain(whole, teacher):
    """Each phase brings the student nearer; its recurrent layers carry what it says."""
    folder, log = whole
    align, distil = (read_metrics(folder / "metrics.jsonl", kind) for kind in ("align", "distil"))
    assert [record["step"] for record in align] == [3, 6, 9, 10]
    assert [record["step"] for record in distil] == [12, 15, 18, 20]
    assert all(set(record["by_layer"]) == {"0", "1", "2"} for record in align)
    assert align[-1]["loss"] < 0.9 * align[0]["loss"] and distil[-1]["kl"] < 0.7 * distil[0]["kl"]
    ratios = [record["sources"][0]["ratio"]["mean"] for record in read_metrics(folder / "metrics.jsonl", "evaluation")]
    assert len(ratios) == 3 and ratios[-1] < ratios[0]
    summary = json.loads((folder / "summary.json").read_text())
    (source,) = summary["evaluation"]
    perplexity = {name: source[name]["perplexity"]["mean"] for name in ("teacher", "student", "without_recurrence")}
    assert source["tokens"] > 16 * source["rows"]  # held-out rows are as long as the data's, whatever a phase trains on
    assert source["ratio"]["mean"] == pytest.approx(perplexity["student"] / perplexity["teacher"])
    assert perplexity["without_recurrence"] > 1.2 * perplexity["student"]
    assert summary["training_tokens"] == 10240 and summary["steps"] == 20
    assert set(summary["probes"]["lookup"]) == {"teacher", "student"}
    for words in ("calibrate: 2,048 tokens", "calibrate: 1 of 3 layers fitted", "align: 10 steps of 16 x 32 tokens",
                  "distil: 10 steps of 32 x 16 tokens", "tokens/s", " left", "ratio "):  # fmt: skip
        assert words in log


def test_the_folder_is_ready_for_the_hub(whole):
    folder, _ = whole
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    assert isinstance(model, AvgPathForCausalLM)
    assert model.config.mixer_types == ["gated_delta_net"] * 3 + ["softmax"]
    inputs = tokenizer("red blue", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=4, min_new_tokens=4).shape[1] == inputs["input_ids"].shape[1] + 4
    card = ModelCard.load(folder / "final" / "README.md")
    summary = json.loads((folder / "summary.json").read_text())
    values = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert values["perplexity"] == pytest.approx(summary["evaluation"][0]["student"]["perplexity"]["mean"])
    assert {"teacher_perplexity", "perplexity_without_recurrence", "lookup_2_student"} <= values.keys()
    assert "layers that stayed softmax | 3 (uniform)" in card.text
    pixels = image.imread(folder / "loss.png")
    assert min(pixels.shape[:2]) > 300 and pixels.std() > 0.01


def records(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


def test_killed_at_any_moment_it_goes_on_bit_for_bit(driver, whole):
    """In both phases, within and after writes, at a phase's end, before the end of all."""
    folder = driver.folder / "killed"
    points = ["step 3", "rename 8", "watch 10", "step 13", "finish"]
    came_from = []
    for point in points:
        log = driver.kill(point, "output_dir=killed", "resume=true")
        came_from.append(log.partition("goes on from ")[2].partition("\n")[0][-2:])
    status, log = driver.run("output_dir=killed", "resume=true")
    assert status == 0, log
    assert came_from == ["", "00", "04", "10", "12"]
    assert records(folder) == records(whole[0])
    weights, wanted = (load_file(run / "final" / "model.safetensors") for run in (folder, whole[0]))
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert not list(folder.rglob("*.partial"))
    status, log = driver.run("output_dir=killed", "resume=true")
    assert status == 0 and "a run that is finished" in log
    for changed in ("distil.learning_rate=1", "evaluation.rows=1"):
        status, log = driver.run("output_dir=killed", "resume=true", changed)
        assert status == 2 and f"'{changed.partition('=')[0]}' was" in log and "and the run is finished" in log
    status, log = driver.run("output_dir=killed")
    assert status == 2 and "holds a finished run" in log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["teacher.path=nowhere"], "teacher.path=nowhere cannot be loaded"),
        (["data.sequence_length=65"], "data.sequence_length=65 is beyond the teacher's max_position_embeddings=64"),
        (["distil.sequence_length=65"], "distil.sequence_length=65 is beyond the teacher's max_position_embeddings=64"),
        (
            ["data.path=few", "data.sequence_length=4", "distil.sequence_length=64"],
            "data.path=few has 8 training tokens, fewer than one row of distil.sequence_length=64",
        ),
        (["align.sequence_length=0"], "'align.sequence_length' must be at least 1"),
        (["layers.count=5"], "from 0 to 4"),
        (["layers.count=4"], "nothing to train"),
        (["layers.mixer=delta"], "did you mean 'delta_net'"),
        (["config.linear_key_head_dim=16"], "4 query heads of 12"),
        (["align.learning_rate=0"], "greater than 0"),
        (["distil.trained=heads"], "mixers, layers, all"),
        (["align.micro_batch_size=3"], "multiple of align.micro_batch_size=3"),
        (["train.mixed_precision=fp16"], "not 'fp16'"),
        (["layers.strategy=score", "layers.scores=none.json"], "layers.scores=none.json"),
        (["evaluation.probes=[chess]"], "phrases, lookup, copying"),
        (["evaluation.probes=[phrases]", "phrases.distances=[64]"], "probe of 73 tokens is longer than"),
        (["layers.mixer=softmax"], "which is what the layers are already"),
        (["layers.softmax=[1]"], "layers.softmax is for layers.strategy=list"),
        (["layers.offset=1", "layers.strategy=first"], "layers.offset is for layers.strategy=uniform"),
        (["layers.strategy=score", "layers.scores=object.json"], "a list of finite numbers"),
        (["layers.strategy=score", "layers.scores=nan.json"], "a list of finite numbers"),
        (["calibration.fit_tokens=0"], "'calibration.fit_tokens' must be at least 1"),
        (["config.linear_conv_kernl_dim=2"], "did you mean 'linear_conv_kernel_dim'"),
        (["config.hidden_size=32"], "hidden_size cannot be changed"),
        (["resume=true", "overwrite=true"], "exclude each other"),
        (["teacher.path=broken"], "embed_tokens.weight holds values that are not finite"),
    ],
)
def test_mistakes_are_told_in_one_line(driver, arguments, words):
    """And before the calibration, however far into the recipe they are."""
    (driver.folder / "object.json").write_text('{"0": 9, "1": 2, "2": 3, "3": 4}')
    (driver.folder / "nan.json").write_text("[NaN, 1, 2, 3]")
    (driver.folder / "few").mkdir(exist_ok=True)
    for name in ("a.txt", "b.txt", "c.txt"):
        (driver.folder / "few" / name).write_text("red blue green")
    if "teacher.path=broken" in arguments:
        model = AutoModelForCausalLM.from_pretrained(driver.folder / "teacher" / "final")
        model.lm_head.weight.data[0, 0] = math.nan
        model.save_pretrained(driver.folder / "broken")
    status, log = driver.run("output_dir=mistaken", *arguments)
    assert status == 2 and words in log and "Traceback" not in log, log
    assert "calibrate:" not in log and not (driver.folder / "mistaken").exists()


def test_a_run_goes_on_with_its_own_recipe_only(driver):
    driver.kill("step 2", "output_dir=changed")
    status, log = driver.run("output_dir=changed", "resume=true", "align.learning_rate=1")
    assert status == 2 and "'align.learning_rate' was 0.02" in log


def test_a_run_goes_on_with_its_own_teacher_only(driver):
    shutil.copytree(driver.folder / "teacher" / "final", driver.folder / "moved")
    driver.kill("step 2", "output_dir=taught", "teacher.path=moved")
    weights = load_file(driver.folder / "moved" / "model.safetensors")
    weights["model.norm.weight"] += 0.1
    save_file(weights, driver.folder / "moved" / "model.safetensors", {"format": "pt"})
    status, log = driver.run("output_dir=taught", "teacher.path=moved", "resume=true")
    assert status == 2 and "the weights of teacher.path=moved have changed" in log


@pytest.mark.parametrize("step", [3, 4])  # with a record just written, and without
def test_a_stop_saves_and_goes_on(driver, whole, step):
    status, log = driver.run(f"output_dir=stopped{step}", kill_at=f"stop {step}")
    assert status == 128 + signal.SIGINT and f"stopped after step {step} of 20" in log and "Traceback" not in log, log
    status, log = driver.run(f"output_dir=stopped{step}", "resume=true")
    assert status == 0 and f"step-{step:06d}" in log, log
    assert records(driver.folder / f"stopped{step}") == records(whole[0])


def test_a_window_is_a_conversion_too(driver):
    status, log = driver.run("output_dir=window", "layers.mixer=sliding_softmax", "config.sliding_window=4")
    assert status == 0, log
    model = AutoModelForCausalLM.from_pretrained(driver.folder / "window" / "final")
    assert model.config.mixer_types == ["sliding_softmax"] * 3 + ["softmax"] and model.config.sliding_window == 4
    align = read_metrics(driver.folder / "window" / "metrics.jsonl", "align")
    assert set(align[0]["by_layer"]) == {"0", "1", "2"} and align[-1]["loss"] < 0.5


def test_phases_can_be_left_out(driver):
    """The calibrated start alone, and listed layers."""
    status, log = driver.run(
        "output_dir=start", "align.tokens=0", "distil.tokens=0", "layers.strategy=list", "layers.softmax=[1]",
        "layers.mixer=mesa_net@mean_field", "evaluation.probes=[]", "checkpoint.every_steps=0",
    )  # fmt: skip
    assert status == 0, log
    model = AutoModelForCausalLM.from_pretrained(driver.folder / "start" / "final")
    assert model.config.mixer_types == ["mesa_net@mean_field", "softmax", *["mesa_net@mean_field"] * 2]


def test_the_default_recipe_is_well_formed():
    recipe = load_recipe("configuration/convert.yaml", schema=ConversionRecipe)
    assert recipe.layers.count == 8 and [source.path for source in recipe.data.sources] == ["sotu", "wiki"]
    assert signal.SIGTERM  # the notes of --help name it


# The parts.


@pytest.fixture
def pair(teacher):
    """A teacher and a student with two converted layers, and a batch."""
    student = from_softmax(teacher, ["delta_net", "softmax", "mesa_net", "softmax"]).requires_grad_(False)
    ids = torch.randint(3, 290, (2, 24), generator=torch.Generator().manual_seed(0))
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), dim=1)
    return teacher, student, {"input_ids": ids, "shift_labels": labels}


def plain():
    return torch.autocast("cpu", enabled=False)


def test_alignment_is_the_error_of_each_layer_on_the_teachers_input(pair):
    teacher, student, batch = pair
    layers = converted_layers(teacher, student.config)
    assert layers == [0, 2]
    parameters = trained_parameters(student, layers, "mixers")
    errors = LayerAlignment(teacher, student, layers)(batch["input_ids"], plain, scale=0.5)
    gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    student.zero_grad()
    with torch.no_grad():
        hidden = teacher(batch["input_ids"], output_hidden_states=True).hidden_states
    expected = 0
    for layer in layers:
        block = teacher.model.layers[layer]
        x = block.input_layernorm(hidden[layer])
        rope = teacher.model.rotary_emb(x, torch.arange(24)[None])
        with torch.no_grad():
            target = block.self_attn(x, position_embeddings=rope, attention_mask=None)[0]
        output = student.model.layers[layer].mixer(x)[0]
        error = (output - target).square().mean() / (target - target.mean((0, 1))).square().mean()
        assert errors[layer] == pytest.approx(error.item(), rel=1e-4)
        expected = expected + 0.5 * error
    expected.backward()
    wanted = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for found, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-6)


def test_distillation_is_the_divergence_of_all_logits(pair, monkeypatch):
    """Made piece by piece, with cross-entropy and the stream's error beside it; gradients are those of the whole."""
    teacher, student, batch = pair
    monkeypatch.setattr(head_loss, "CHUNK_LOGITS", 7 * student.config.vocab_size)
    parameters = trained_parameters(student, [0, 2], "all")
    found = LogitDistillation(teacher, student, ce_weight=0.3, stream_weight=0.7)(batch, plain, targets=46)
    gradients = [parameter.grad.clone() for parameter in parameters]
    student.zero_grad()
    with torch.no_grad():
        known = teacher(batch["input_ids"], output_hidden_states=True)
    output = student(batch["input_ids"], output_hidden_states=True)
    wanted, logits = (result.logits[:, :-1].log_softmax(-1) for result in (known, output))
    stream = sum(
        ((x - y).norm(dim=-1) / y.norm(dim=-1)).square().mean() / 3
        for x, y in zip(output.hidden_states[1:4], known.hidden_states[1:4], strict=True)
    )
    kl = (wanted.exp() * (wanted - logits)).sum(-1).mean()
    ce = -logits.gather(-1, batch["input_ids"][:, 1:, None]).mean()
    assert found["kl"] == pytest.approx(kl.item(), rel=1e-4) and found["ce"] == pytest.approx(ce.item(), rel=1e-4)
    assert found["stream"] == pytest.approx(stream.item(), rel=1e-4)
    (kl + 0.3 * ce + 0.7 * stream).backward()
    for gradient, parameter in zip(gradients, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)


def test_what_trains(pair):
    teacher, student, _ = pair
    counts = {
        which: sum(p.numel() for p in trained_parameters(student, [0, 2], which))
        for which in ("mixers", "layers", "all")
    }
    assert counts["mixers"] == sum(p.numel() for i in (0, 2) for p in student.model.layers[i].mixer.parameters())
    assert counts["layers"] == sum(p.numel() for i in (0, 2) for p in student.model.layers[i].parameters())
    assert counts["all"] == sum(p.numel() for p in student.parameters())


def test_rates_are_relative_to_the_size_of_matrices():
    parameters = [
        torch.nn.Parameter(4 * torch.ones(3, 3)),
        torch.nn.Parameter(torch.zeros(3, 3)),
        torch.nn.Parameter(torch.zeros(3)),
    ]
    optimizer = build_optimizer(parameters, PhaseRecipe(learning_rate=0.01))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.04, 0.0002, 0.01])
    assert DistilRecipe().learning_rate != PhaseRecipe().learning_rate


@torch.no_grad()
def test_swapped_layers_make_the_teacher_the_hybrid(pair):
    teacher, student, batch = pair
    before, hybrid = (model(batch["input_ids"]).logits for model in (teacher, student))
    mixers = {index: student.model.layers[index].mixer for index in (0, 2)}
    with swapped_layers(teacher, mixers, plain):
        torch.testing.assert_close(teacher(batch["input_ids"], use_cache=False).logits, hybrid, rtol=1e-4, atol=1e-4)
    assert torch.equal(teacher(batch["input_ids"]).logits, before) and (hybrid - before).abs().max() > 1e-2


@torch.no_grad()
def test_ablation_leaves_what_softmax_layers_do(pair):
    _, student, batch = pair
    before = student(batch["input_ids"]).logits
    with without_recurrence(student):
        ablated = student(batch["input_ids"]).logits
    assert torch.equal(student(batch["input_ids"]).logits, before)
    for index in (0, 2):
        student.model.layers[index].mixer.o_proj.weight.zero_()
    torch.testing.assert_close(student(batch["input_ids"]).logits, ablated)
    assert not math.isclose(before.sum().item(), ablated.sum().item(), rel_tol=1e-4)
