"""The config's grammar: how layers are chosen, what is derived, what is refused and with which words."""

import json
import pickle

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from modeling_avgpath import AvgPathConfig
from modeling_avgpath.configuration_avgpath import MEMORIES, parse_mixer_spec


def mixers(**fields) -> list[str]:
    return AvgPathConfig(num_hidden_layers=6, **fields).mixer_types


def test_ratio():
    assert mixers(mixer="delta_net", hybrid_ratio="3:1") == ["delta_net"] * 3 + ["softmax"] + ["delta_net"] * 2
    assert mixers(mixer="delta_net", hybrid_ratio="2:1") == ["delta_net", "delta_net", "softmax"] * 2
    assert mixers(mixer="delta_net", hybrid_ratio="1:2") == ["delta_net", "softmax", "softmax"] * 2
    assert mixers(mixer="delta_net", hybrid_ratio="1:0") == ["delta_net"] * 6
    assert mixers(mixer="delta_net", hybrid_ratio="0:1") == ["softmax"] * 6
    assert mixers() == ["mesa_net"] * 3 + ["softmax"] + ["mesa_net"] * 2


def test_pattern_and_explicit_types_win():
    pattern = ["delta_net", "mesa_net", "ttt_mlp", "softmax"]
    assert mixers(layer_pattern=pattern, hybrid_ratio="0:1") == pattern + pattern[:2]
    explicit = ["softmax", "linear", "identity", "ttt_linear@query", "mesa_net@mean_field", "delta_net@expectation"]
    config = AvgPathConfig(num_hidden_layers=6, mixer_types=explicit, layer_pattern=pattern)
    assert config.mixer_types == [
        "softmax", "linear", "identity@mean_field", "ttt_linear", "mesa_net@mean_field", "delta_net@expectation",
    ]  # fmt: skip
    assert config.layer_types == [
        "full_attention",
        "linear_attention",
        "hybrid",
        "linear_attention",
        "hybrid",
        "hybrid",
    ]


def test_every_memory_has_a_mixer_class():
    from modeling_avgpath.modeling_avgpath import MIXERS

    assert MIXERS.keys() == MEMORIES.keys()


def test_save_and_load(tmp_path):
    config = AvgPathConfig(mixer="gated_delta_net", hybrid_ratio="3:1", num_hidden_layers=8, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is AvgPathConfig
    assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()


def test_overrides_while_loading(tmp_path):
    """What from_pretrained is given on top of config.json is what one gets, layers included."""
    AvgPathConfig(mixer="gated_delta_net", hybrid_ratio="3:1", num_hidden_layers=8).save_pretrained(tmp_path)

    def load(**overrides) -> AvgPathConfig:
        return AutoConfig.from_pretrained(tmp_path, **overrides)

    assert load(mixer_types=["softmax"] * 8).layer_types == ["full_attention"] * 8
    assert load(hybrid_ratio="1:1").mixer_types == ["gated_delta_net", "softmax"] * 4
    assert load(mixer="identity").mixer_types == (["identity@mean_field"] * 3 + ["softmax"]) * 2
    assert load(mixer="identity").layer_types == (["hybrid"] * 3 + ["full_attention"]) * 2
    assert load(layer_pattern=["linear", "softmax"]).mixer_types == ["linear", "softmax"] * 4
    assert load(num_hidden_layers=3).mixer_types == ["gated_delta_net"] * 3
    assert load(num_hidden_layers=12).mixer_types == (["gated_delta_net"] * 3 + ["softmax"]) * 3
    with pytest.raises(ValueError, match="'mamba'"):
        load(mixer="mamba")


def test_overrides_in_any_order(tmp_path):
    AvgPathConfig(mixer="delta_net", hybrid_ratio="3:1", num_hidden_layers=4).save_pretrained(tmp_path)
    expected = ["delta_net", "delta_net", "softmax"] * 2
    for overrides in (
        {"hybrid_ratio": "2:1", "num_hidden_layers": 6},
        {"num_hidden_layers": 6, "hybrid_ratio": "2:1"},
    ):
        assert AutoConfig.from_pretrained(tmp_path, **overrides).mixer_types == expected
    config = AutoConfig.from_pretrained(tmp_path)
    for depth in (2, 4):
        config.num_hidden_layers = depth
    assert config.mixer_types == ["delta_net"] * 3 + ["softmax"]
    config.layer_pattern = ["linear", "linear", "softmax"]
    config.num_hidden_layers = 6
    assert config.mixer_types == ["linear", "linear", "softmax"] * 2


def test_derived_heads():
    config = AvgPathConfig(hidden_size=96, num_attention_heads=4, num_key_value_heads=2)
    assert (config.head_dim, config.num_key_value_heads) == (24, 2)
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (4, 4)
    assert (config.linear_key_head_dim, config.linear_value_head_dim) == (24, 24)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixer": "mamba"}, ["'mamba'", "gated_delta_net", "ttt_mlp", "newer version"]),
        ({"mixer": "mesanet"}, ["'mesanet'", "did you mean 'mesa_net'?"]),
        ({"layer_pattern": ["softmax", "ttt_liner"]}, ["'ttt_liner'", "did you mean 'ttt_linear'?", "newer version"]),
        ({"mixer_types": ["holo"]}, ["'holo'", "newer version"]),
        ({"mixer_types": "holo"}, ["mixer_types must be list[str] | None, got 'holo' (str)", "goes into mixer"]),
        (
            {"layer_pattern": "softmax"},
            ["layer_pattern must be list[str] | None, got 'softmax' (str)", "goes into mixer"],
        ),
        ({"mixer_types": [3]}, ["mixer_types", "[3] (list)"]),
        ({"mixer": None}, ["mixer must be str, got None (NoneType)."]),
        ({"hidden_size": "big"}, ["hidden_size must be int, got 'big' (str)."]),
        ({"head_dim": 8.0}, ["head_dim must be int | None, got 8.0 (float)."]),
        ({"mixer": "delta_net@key"}, ["'key'", "delta_net@mean_field", "delta_net@query"]),
        ({"mixer": "softmax@query"}, ["'softmax'", "no suffix"]),
        ({"mixer": "identity@query"}, ["'query'", "identity@mean_field"]),
        ({"hybrid_ratio": "3"}, ["'3'", "R:S", "3:1"]),
        ({"hybrid_ratio": "0:0"}, ["'0:0'", "at least one"]),
        ({"hybrid_ratio": "-1:2"}, ["'-1:2'", ">= 0"]),
        ({"hybrid_ratio": "3:1:1"}, ["'3:1:1'", "R:S"]),
        ({"layer_pattern": []}, ["layer_pattern is empty"]),
        ({"mixer_types": ["softmax"] * 5}, ["5 layers", "num_hidden_layers is 12", "layer_pattern"]),
        ({"layer_types": ["full_attention"] * 12}, ["disagrees", "mixer_types"]),
        ({"num_attention_heads": 5}, ["768", "(5)", "head_dim"]),
        ({"num_key_value_heads": 5}, ["12", "(5)", "multiple"]),
        ({"linear_num_value_heads": 5}, ["linear_num_value_heads (5)", "multiple"]),
        ({"mixer": "sliding_softmax"}, ["sliding_softmax", "sliding_window"]),
        ({"mixer": "sliding_softmax", "sliding_window": 0}, ["sliding_window=0"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"linear_conv_kernel_dim": 0}, ["linear_conv_kernel_dim", "0"]),
        ({"mixer": "ttt_mlp", "linear_value_head_dim": 32}, ["linear_key_head_dim (64)", "ttt_inner_norm=False"]),
        ({"mixer": "ttt_linear", "linear_key_head_dim": 7}, ["even", "7"]),
        ({"mixer": "ttt_linear", "ttt_mini_batch_size": 0}, ["ttt_mini_batch_size", "0"]),
        ({"mixer": "ttt_linear", "ttt_base_lr": -1.0}, ["ttt_base_lr", "-1.0"]),
        ({"mixer": "mesa_net", "mesa_lambda_init": 0.1}, ["mesa_lambda_min", "0.1"]),
        ({"mixer": "mesa_net", "mesa_tolerance": 2.0}, ["mesa_tolerance", "2.0"]),
        ({"linear_dt_min": 0}, ["linear_dt_min", "positive"]),
        ({"linear_dt_min": 0.5}, ["linear_dt_max", "0.5", "0.1"]),
        ({"linear_a_log_min": -1}, ["linear_a_log_min", "-1"]),
        ({"attention_dropout": 1.5}, ["attention_dropout", "between 0 and 1", "1.5"]),
        ({"rms_norm_eps": -1e-6}, ["rms_norm_eps", "-1e-06"]),
        ({"head_dim": 15}, ["even head_dim", "15", "use_rope"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.01}}, ["partial_rotary_factor=0.01", "64", "at most 1"]),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor=1.5", "at most 1"]),
        ({"qk_norm_type": "per_model"}, ["qk_norm_type", "per_head, per_layer", "'per_model'"]),
        ({"linear_output_gate_activation": "tanh"}, ["linear_output_gate_activation", "silu, sigmoid", "'tanh'"]),
        ({"linear_norm_eps": -1.0}, ["linear_norm_eps", "-1.0"]),
    ],
)
def test_errors_name_the_value_and_the_way_out(fields, words):
    with pytest.raises((ValueError, TypeError)) as error:
        AvgPathConfig(**fields)
    for word in words:
        assert word in str(error.value)


def test_types_are_checked():
    """The error is what `@strict` raises, and a TypeError; it survives the way from a worker process."""
    with pytest.raises(StrictDataclassFieldValidationError, match="hidden_size.*") as error:
        AvgPathConfig(hidden_size=768.0)
    assert isinstance(error.value, TypeError)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.parametrize(
    ("facts", "overrides", "words"),
    [
        ({"hidden_size": "big"}, {}, ["hidden_size must be int, got 'big' (str)"]),
        ({"mixer_types": "holo"}, {}, ["mixer_types must be list[str] | None, got 'holo' (str)"]),
        ({"mixer_types": ["softmax", "holo"]}, {}, ["Unknown memory 'holo'"]),
        ({"mixer_types": None, "layer_types": None, "layer_pattern": ["holo"]}, {}, ["Unknown memory 'holo'"]),
        ({"mixer_types": None, "layer_types": None, "mixer": "delta_nt"}, {}, ["did you mean 'delta_net'?"]),
        ({"qk_norm_type": "per_model"}, {}, ["per_head, per_layer"]),
        ({}, {"mixer": "holo"}, ["with the given mixer", "Unknown memory 'holo'"]),
        ({}, {"layer_pattern": "holo", "use_cache": 3}, ["with the given layer_pattern, use_cache"]),
    ],
)
def test_loading_names_the_file_and_the_ways_out(facts, overrides, words, tmp_path):
    AvgPathConfig(num_hidden_layers=2, mixer="delta_net").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))
    with pytest.raises(ValueError) as error:
        AutoConfig.from_pretrained(tmp_path, **overrides)
    for word in [*words, str(file), "Correct the value", "newer version", "trust_remote_code=True"]:
        assert word in str(error.value)


def test_a_spec_must_be_a_string():
    with pytest.raises(TypeError, match="string"):
        parse_mixer_spec(None)
