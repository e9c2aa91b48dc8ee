# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Parameter groups, schedules and checkpoints without a run around them."""

import copy
import os
import signal

import pytest
import torch
from accelerate import Accelerator

from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM
from training.checkpoint import (
    Interruption,
    explain_failed_save,
    open_run_folder,
    prune_checkpoints,
    remove_partial,
    save_checkpoint,
)
from training.data import train_tokenizer
from training.guard import NonFiniteGuard
from training.machine import choose_precision
from training.modeling import cache_nbytes
from training.optimization import (
    build_optimizer,
    build_schedule,
    decay_length,
    load_optimizer_state,
    optimizer_state,
    parameter_groups,
)
from training.recipe import OptimizerRecipe, Recipe, RunError, ScheduleRecipe, SetupError, TrainRecipe
from training.step import LossWindow, TrainingStep


@pytest.fixture
def model():
    pattern = ["gated_delta_net", "mesa_net", "ttt_linear", "ttt_mlp", "softmax"]
    return AvgPathForCausalLM(
        AvgPathConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=5,
            num_attention_heads=2,
            layer_pattern=pattern,
            attention_bias=True,
            use_qk_norm=True,
            query_map=True,
            tie_word_embeddings=True,
        )
    )


def test_weight_decay_is_for_matrices_only(model):
    decayed, plain = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = ({names[id(parameter)] for parameter in group["params"]} for group in (decayed, plain))
    assert decayed | plain == set(names.values()) and not decayed & plain
    assert "model.embed_tokens.weight" in decayed
    assert {"model.layers.0.mixer.q_proj.weight", "model.layers.0.mlp.down_proj.weight"} <= decayed
    forbidden = ("norm", "bias", "A_log", "lambda_params", "mixer.b1", "mixer.b2", "token_idx")
    assert not [name for name in decayed if any(word in name for word in forbidden)]
    for name in ("0.mixer.A_log", "0.mixer.dt_bias", "1.mixer.lambda_params", "2.mixer.b1", "4.mixer.q_proj.bias"):
        assert f"model.layers.{name}" in plain
    assert {"model.norm.weight", "model.layers.4.mixer.q_norm.weight"} <= plain


def test_marked_and_frozen_parameters(model):
    model.model.layers[0].mlp.up_proj.weight._no_weight_decay = True
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.1)
    assert any(parameter is model.model.layers[0].mlp.up_proj.weight for parameter in plain["params"])
    frozen = model.model.layers[0].mlp.down_proj.weight
    assert not any(parameter is frozen for parameter in decayed["params"] + plain["params"])


def random_gradients(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_is_for_the_matrices_of_the_layers(model):
    """One optimiser that steps as PyTorch's Muon and AdamW do side by side, and whose state can be saved."""
    recipe = OptimizerRecipe(name="muon", learning_rate=0.01, momentum=0.9)
    other = copy.deepcopy(model)
    optimizer = build_optimizer(model, recipe)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = {names[id(p)] for group in optimizer.param_groups if "momentum" in group for p in group["params"]}
    assert {"model.layers.0.mixer.q_proj.weight", "model.layers.3.mlp.down_proj.weight"} <= matrices
    assert not [name for name in matrices if "embed" in name or "norm" in name or not name.endswith("proj.weight")]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)

    theirs = dict(other.named_parameters())
    muon = torch.optim.Muon(
        [theirs[name] for name in matrices], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    rest = [
        {"params": [p for p in group["params"] if id(p) not in {id(theirs[name]) for name in matrices}],
         "weight_decay": group["weight_decay"]}
        for group in parameter_groups(other, 0.1)
    ]  # fmt: skip
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), fused=True)
    for seed in range(3):
        random_gradients(model, seed)
        random_gradients(other, seed)
        for each in (optimizer, muon, adamw):
            each.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name

    saved = copy.deepcopy(optimizer_state(model, optimizer))
    assert "model.layers.0.mixer.q_proj.weight" in saved["state"]
    fresh = copy.deepcopy(model)
    again = build_optimizer(fresh, recipe)
    load_optimizer_state(fresh, again, saved)
    for each, its in ((model, optimizer), (fresh, again)):
        random_gradients(each, 7)
        its.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))


def test_a_step_that_is_not_finite_touches_nothing(model):
    """Neither weights nor optimiser; the count goes up, and an admitted step ends the row."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, build_optimizer(model, OptimizerRecipe()))
    guard = NonFiniteGuard(TrainRecipe(nonfinite="skip", nonfinite_limit=3))
    take_step, window = TrainingStep(accelerator, model, optimizer, guard, max_grad_norm=1.0), LossWindow()
    ids = torch.randint(300, (2, 9))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, :-1], "shift_labels": ids[:, 1:].contiguous()}
    window.add(take_step(1, [batch]))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    poison = model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * float("inf"))
    for step in (2, 3):
        result = take_step(step, [batch])
        window.add(result)
        assert not result.is_admitted and result.loss > 0 and guard.in_a_row == step - 1
    after = model.state_dict(), optimizer.state_dict()
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    for index, values in before[1]["state"].items():
        assert all(torch.equal(value, after[1]["state"][index][name]) for name, value in values.items())
    poison.remove()
    assert take_step(4, [batch]).is_admitted and (guard.skipped, guard.in_a_row) == (2, 0)
    assert window.targets == 16 and window.mean == pytest.approx(5.7, abs=0.3)
    with pytest.raises(RunError, match="at step 5.*as in 3 steps in a row"):
        for _ in range(3):
            guard.admits(5, float("nan"), 1.0)
    with pytest.raises(RunError, match="the loss is nan .* at step 1"):
        NonFiniteGuard(TrainRecipe(nonfinite="stop")).admits(1, float("nan"), 1.0)
    assert NonFiniteGuard(TrainRecipe(nonfinite="stop")).admits(1, 2.0, float("inf"), is_scaled=True)
    assert LossWindow().mean is None
    other = NonFiniteGuard(TrainRecipe())
    other.load_state_dict(guard.state_dict())
    assert (other.skipped, other.in_a_row) == (5, 3)


def test_the_loss_of_a_step_is_the_mean_over_its_targets(model):
    """Micro-batches with unequal counts of labels give loss and gradient of all their targets in one batch."""
    accelerator = Accelerator(cpu=True)
    gradients = []
    ids = torch.randint(300, (4, 9))
    labels = ids[:, 1:].contiguous()
    labels[0, 1:] = labels[3, 5:] = -100
    for size in (4, 1):
        copied = copy.deepcopy(model)
        prepared, optimizer = accelerator.prepare(copied, build_optimizer(copied, OptimizerRecipe()))
        parts = [
            {"input_ids": ids[at:end, :-1], "labels": ids[at:end, :-1], "shift_labels": labels[at:end]}
            for at, end in ((at, at + size) for at in range(0, 4, size))
        ]  # fmt: skip
        kept = []
        copied.lm_head.weight.register_post_accumulate_grad_hook(lambda p, kept=kept: kept.append(p.grad.clone()))
        take_step = TrainingStep(accelerator, prepared, optimizer, NonFiniteGuard(TrainRecipe()), 1e9)
        result = take_step(1, parts)
        assert result.targets == 8 * 4 - 7 - 3
        gradients.append((result.loss, kept[-1]))
    logits = model(ids[:, :-1]).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert gradients[0][0] == pytest.approx(wanted.item(), rel=1e-6) and gradients[1][0] == pytest.approx(
        wanted.item(), rel=1e-6
    )
    torch.testing.assert_close(gradients[1][1], gradients[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_compiled_steps_and_recomputed_layers_are_those_of_the_plain_model(activation_checkpointing):
    accelerator = Accelerator(cpu=True)
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, :-1], "shift_labels": ids[:, 1:].contiguous()}
    shape = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    losses = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = AvgPathForCausalLM(AvgPathConfig(mixer="softmax", **shape))
        if not is_plain and activation_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        elif not is_plain:
            model.compile()
        prepared, optimizer = accelerator.prepare(model, build_optimizer(model, OptimizerRecipe(learning_rate=1e-2)))
        take_step = TrainingStep(accelerator, prepared.train(), optimizer, NonFiniteGuard(TrainRecipe()), 1.0)
        losses.append([take_step(step, [batch]).loss for step in (1, 2, 3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][2] < losses[0][0]


def rates(recipe: ScheduleRecipe, steps: int) -> list[float]:
    optimizer = build_optimizer(torch.nn.Linear(2, 2), OptimizerRecipe(learning_rate=1.0))
    schedule = build_schedule(optimizer, recipe, steps)
    seen = []
    for _ in range(steps + 1):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_schedules_warm_up_and_end_low(name):
    seen = rates(ScheduleRecipe(name=name, warmup_steps=10, min_lr_ratio=0.1, decay_ratio=0.3), 100)
    assert seen[10] == pytest.approx(max(seen)) == pytest.approx(1.0)
    assert seen[:11] == sorted(seen[:11]) and seen[10:] == sorted(seen[10:], reverse=True)
    assert seen[100] == pytest.approx(0.1)
    if name == "wsd":
        assert seen[10:71] == pytest.approx([1.0] * 61)


def test_the_decay_of_wsd_by_steps_and_of_a_branch():
    recipe = ScheduleRecipe(name="wsd", warmup_steps=10, min_lr_ratio=0.1, decay_steps=25)
    seen = rates(recipe, 100)
    assert seen[75] == pytest.approx(1.0) and seen[76] < 1.0 and seen[100] == pytest.approx(0.1)
    recipe.decay_steps = None
    assert (decay_length(recipe, 100), decay_length(recipe, 100, branched_at=70)) == (20, 30)
    recipe.decay_steps = 400
    assert decay_length(recipe, 100) == 90  # what the warm-up leaves


def test_a_failed_save_is_explained(tmp_path):
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-000008.partial").mkdir()
    (tmp_path / ".metrics.jsonl.partial").write_text("")
    (tmp_path / "checkpoints" / ".step-000012.partial").mkdir()
    with pytest.raises(
        RunError, match=r"step-000008 could not be written \(.*full.*\).*step-000004 is whole: make room"
    ):
        with explain_failed_save(tmp_path / "checkpoints" / "step-000008"):
            raise Exception("disk full (os error 28)")  # as the tokenizers library puts it
    assert not (tmp_path / "checkpoints" / ".step-000008.partial").exists()
    with pytest.raises(KeyError):  # a mistake in the program stays one
        with explain_failed_save(tmp_path / "checkpoints" / "step-000008"):
            raise KeyError("x")
    remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoints", "step-000004"]


def test_a_save_that_fails_leaves_no_checkpoint(model, tmp_path, monkeypatch):
    tokenizer = train_tokenizer(["a b c"], 300)

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / "step-000001", model, tokenizer, model.state_dict(), {"step": 1})
    assert not (tmp_path / "step-000001").exists()
    monkeypatch.undo()
    save_checkpoint(tmp_path / "step-000001", model, tokenizer, model.state_dict(), {"step": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    restored = AvgPathForCausalLM.from_pretrained(tmp_path / "step-000001")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, restored.state_dict()[name]), name


def test_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 20, 300):
        (tmp_path / f"step-{step:06d}").mkdir()
    prune_checkpoints(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000020", "step-000300"]


def test_overwriting_removes_only_what_a_run_writes(tmp_path):
    recipe = Recipe(output_dir=str(tmp_path), overwrite=True)
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "final").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}")
    open_run_folder(recipe)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "thesis.tex"]
    recipe.overwrite = False
    with pytest.raises(SetupError, match="holds an unfinished run"):
        open_run_folder(recipe)


def test_the_first_signal_asks_and_the_second_stops():
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert not interruption.received
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_precision(monkeypatch):
    for has_amx, chosen in ((True, "bf16"), (False, "no")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        assert choose_precision("auto") == chosen
    assert choose_precision("no") == "no"
    with pytest.raises(SetupError, match="fp16 needs a CUDA device"):
        choose_precision("fp16")


def test_cache_bytes_of_any_cache(model):
    output = model(torch.arange(6)[None], use_cache=True)
    assert cache_nbytes(output.cache) == output.cache.nbytes > 0
