# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Recipes: merging, YAML scalars, and errors that name the key."""

import json

import pytest
import yaml

from training.modeling import load_model_config
from training.recipe import (
    REPOSITORY,
    Recipe,
    SetupError,
    load_recipe,
    parse_yaml,
    recipe_fields,
    recipe_to_yaml,
)


def test_the_default_recipe_and_its_model():
    recipe = load_recipe(str(REPOSITORY / "configuration" / "pretrain.yaml"))
    config = load_model_config(recipe.model)
    assert config.mixer_types == (["gated_delta_net"] * 3 + ["softmax"]) * 2
    assert recipe.data.path == "sotu"


def test_command_line_wins_over_file_wins_over_defaults(tmp_path):
    (tmp_path / "a.yaml").write_text("train: {steps: 7}\nseed: 3\nmodel: {mixer: linear}\n")
    recipe = load_recipe(str(tmp_path / "a.yaml"), ["seed=4", "model.hybrid_ratio=1:0", "schedule.warmup_steps=2"])
    assert (recipe.train.steps, recipe.seed, recipe.train.batch_size) == (7, 4, Recipe().train.batch_size)
    assert recipe.model == {"config": "configuration/models/5m.json", "mixer": "linear", "hybrid_ratio": "1:0"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3:1", "3:1"),  # YAML 1.1 reads a base-60 number
        ("1:0", "1:0"),
        ("no", "no"),  # and this as false
        ("1e-3", 1e-3),  # and this as a string
        ("-3", -3),
        ("0.5", 0.5),
        ("true", True),
        ("", None),
        ("null", None),
        ("[delta_net, mesa_net@mean_field]", ["delta_net", "mesa_net@mean_field"]),
        ("'12'", "12"),
    ],
)
def test_scalars(text, value):
    assert parse_yaml(text) == value and type(parse_yaml(text)) is type(value)


def test_a_written_recipe_reads_back_equal(tmp_path):
    recipe = load_recipe(None, ["model.hybrid_ratio=1:0", "train.mixed_precision=no", "sample.prompt='12'"])
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe
    assert yaml.safe_load(recipe_to_yaml(recipe))["model"]["hybrid_ratio"] == "1:0"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=1", ["'train.stepz'", "did you mean 'train.steps'?"]),
        ("trian.steps=1", ["'trian'", "did you mean 'train'?"]),
        ("steps=1", ["'steps'", "did you mean 'train.steps'?"]),
        ("learning_rate=1", ["did you mean 'optimizer.learning_rate'?"]),
        ("train.steps=many", ["'train.steps' must be int", "'many' (str)"]),
        ("train.steps=1.5", ["'train.steps' must be int", "1.5 (float)"]),
        ("overwrite=perhaps", ["'overwrite' must be bool"]),
        ("sample.cache_tokens=[a]", ["'sample.cache_tokens' must be list[int]"]),
        ("train=3", ["'train' is a group of fields"]),
        ("train.steps.x=3", ["'train.steps' must be int"]),
        ("train.steps=0", ["'train.steps' must be at least 1, not 0"]),
        ("train.batch_size=0", ["'train.batch_size' must be at least 1, not 0"]),
        ("optimizer.learning_rate=-1", ["must be greater than 0"]),
        ("schedule.warmup_steps=400", ["at most train.steps=300"]),
        ("schedule.name=linear", ["one of cosine, wsd", "'linear'"]),
        ("train.mixed_precision=fp8", ["one of auto, no, bf16, fp16"]),
        ("data.validation_every=1", ["at least 2"]),
        ("sample.cache_tokens=[9,3]", ["rising counts"]),
        ("model.config=", ["'model.config' must name a JSON file"]),
        ("train.steps", ["expected KEY=VALUE"]),
        ("=3", ["expected KEY=VALUE"]),
        ("data.path=[", ["not valid YAML"]),
    ],
)
def test_errors_name_the_key(override, words):
    with pytest.raises(SetupError) as error:
        load_recipe(None, [override])
    for word in words:
        assert word in str(error.value)


def test_a_missing_or_malformed_recipe_file(tmp_path):
    with pytest.raises(SetupError, match="file not found: absent.yaml"):
        load_recipe("absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(SetupError, match="mapping of keys to values, not list"):
        load_recipe(str(tmp_path / "list.yaml"))


def test_every_field_says_what_it_means():
    assert all(meaning for _, _, _, meaning in recipe_fields())


@pytest.mark.parametrize(
    ("shape", "overrides", "words"),
    [
        ({"model_type": "avgpth"}, {}, ["unknown model_type 'avgpth'", "did you mean 'avgpath'?"]),
        ({"hidden_size": 8}, {}, ["with a model_type"]),
        ({"model_type": "avgpath", "hiden_size": 8}, {}, ["no field 'hiden_size'", "did you mean 'hidden_size'?"]),
        ({"model_type": "avgpath"}, {"hidden_size": "big"}, ["hidden_size", "'big'"]),
        ({"model_type": "avgpath"}, {"mixer": "delta"}, ["'delta'", "delta_net"]),
    ],
)
def test_model_shape_errors(tmp_path, shape, overrides, words):
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    with pytest.raises(SetupError) as error:
        load_model_config({"config": str(tmp_path / "shape.json"), **overrides})
    for word in words:
        assert word in str(error.value)


def test_nested_model_fields_are_merged(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    (tmp_path / "shape.json").write_text(json.dumps({"model_type": "avgpath", "rope_parameters": rope}))
    recipe = load_recipe(None, [f"model.config={tmp_path / 'shape.json'}", "model.rope_parameters.rope_theta=5e5"])
    assert load_model_config(recipe.model).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
