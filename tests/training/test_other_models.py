# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Models of other kinds in `pretrain.py`: what trains, and what is refused before anything is made."""

import json

import pytest
from transformers import BloomConfig, LlamaConfig, Mamba2Config, MambaConfig, PreTrainedConfig, T5Config

from modeling_avgpath import AvgPathConfig
from training.flops import count_flops
from training.modeling import build_model, check_boundaries
from training.plan import build_on_meta
from training.pretrain import main
from training.recipe import SetupError

SMALL = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BLOOM = BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=2)
MAMBA = MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2)


class Tokens:
    bos_token_id = eos_token_id = 0
    pad_token_id = 1


@pytest.mark.parametrize(
    ("config", "holds"),
    [
        (LlamaConfig(**SMALL, intermediate_size=48), True),
        (AvgPathConfig(**SMALL, intermediate_size=48, layer_pattern=["mesa_net", "softmax"]), True),
        (BLOOM, False),
        (
            Mamba2Config(vocab_size=320, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, n_groups=1),
            False,
        ),
    ],
)
def test_boundaries_are_for_models_that_hold_them(config: PreTrainedConfig, holds):
    model = build_model(config, Tokens)
    if holds:
        check_boundaries(model)
    else:
        with pytest.raises(SetupError, match=f"data.boundaries=true: {config.model_type} models do not keep documents"):
            check_boundaries(model)


def test_what_is_no_causal_language_model():
    with pytest.raises(SetupError, match="model_type t5 has no causal language model"):
        build_model(T5Config(), Tokens)


def test_models_without_attention_have_their_linear_layers_counted():
    flops = count_flops(build_on_meta(MAMBA), 64)
    assert flops.forward["projections"] > 0 and "attention" not in flops.forward


@pytest.mark.parametrize(
    ("shape", "arguments", "words"),
    [
        (
            {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2},
            ["data.boundaries=true"],
            "bloom models do not keep documents in one row apart",
        ),
        ({"model_type": "gpt2", "n_positions": 16}, [], "data.sequence_length=32 is beyond the model's max_position"),
        ({"model_type": "gpt2"}, ["--dry-run"], "plans AvgPath models and those built like Llama, not gpt2"),
    ],
)
def test_a_refusal_leaves_the_run_it_was_to_replace(shape, arguments, words, workplace, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(workplace.folder)
    old = tmp_path / "old"
    (old / "final").mkdir(parents=True)
    (old / "final" / "model.safetensors").write_text("weights")
    (old / "summary.json").write_text("{}")
    (tmp_path / "other.json").write_text(json.dumps({"vocab_size": 320, **shape}))
    given = [f"output_dir={old}", "overwrite=true", f"model.config={tmp_path / 'other.json'}", *arguments]
    assert main(["tiny.yaml", *given]) == 2 and words in capsys.readouterr().err
    assert sorted(path.name for path in old.rglob("*")) == ["final", "model.safetensors", "summary.json"]
