# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Parameter groups, schedules and checkpoints without a run around them."""

import os
import signal

import pytest
import torch

from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM
from training.checkpoint import Interruption, open_run_folder, prune_checkpoints, save_checkpoint
from training.data import train_tokenizer
from training.machine import choose_precision
from training.modeling import cache_nbytes
from training.optimization import build_optimizer, build_schedule, parameter_groups
from training.recipe import OptimizerRecipe, Recipe, ScheduleRecipe, SetupError


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
