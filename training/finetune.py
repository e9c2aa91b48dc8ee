# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Fine-tune a causal language model on conversations, prompts with completions, or text: all weights, or LoRA.

The default recipe teaches the model of `pretrain.py` to answer how a president began a State of the Union message.
Started plainly (`python training/finetune.py`) or by `accelerate launch`.
"""

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):  # started as a file: Python put this folder on the path, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import training  # noqa: F401  (before the libraries, which it keeps quiet while they are imported)

import numpy as np
import torch
from accelerate.utils import set_seed
from datasets import Dataset, disable_progress_bars
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template

import modeling_avgpath  # noqa: F401  (registers model_type avgpath)
from training.card import build_card, held_out_results, name_source
from training.checkpoint import (
    STATE_FILE,
    TRAINER_FILES,
    Interruption,
    checkpoint_step,
    commit_folder,
    earlier_files,
    explain_failed_save,
    newest_whole_checkpoint,
    open_run_folder,
    save_checkpoint,
)
from training.data import IGNORE
from training.examples import (
    DEFAULT_CHAT_TEMPLATE,
    Example,
    check_chat_template,
    describe_kind,
    read_chat_template,
    split_examples,
)
from training.guard import explain_nonfinite
from training.machine import choose_precision, keep_freed_memory, split_batch
from training.modeling import count_parameters, load_causal_lm, refuse_adapter
from training.optimization import build_optimizer, build_schedule
from training.probes import position_limit
from training.publish import open_repository, upload_model
from training.recipe import FinetuneRecipe, LoraRecipe, RunError, SetupError, load_recipe, nearest
from training.resume import recipe_changes
from training.sampling import generation_style
from training.script import Interrupted, parse_recipe, run_script
from training.tracking import MetricsLog, Progress, cut_metrics, plot_losses, read_metrics

EXAMPLES = """  python training/finetune.py
  python training/finetune.py configuration/finetune_lora.yaml
  python training/finetune.py data.path=chats.jsonl data.validation_path=held_out.jsonl train.epochs=2
  python training/finetune.py model.path=runs/mesa/final lora.rank=8 'lora.target_modules=[q_proj, v_proj]'
  python training/finetune.py resume=true
  accelerate launch --num_processes 2 training/finetune.py train.batch_size=32
"""

PARTS = {"train": "training", "eval": "held-out"}  # the trainer's names of the data, and ours

# Fields that a run which goes on may change: none of them alters the steps that it has taken.
FREE_ON_RESUME = ("output_dir", "overwrite", "resume", "validation.", "checkpoint.", "sample.", "lora.merge")
FREE_ON_RESUME += (
    "hub_",
    "license",
    "train.steps",
    "train.epochs",
    "train.log_every",
    "train.activation_checkpointing",
)


def load_base(path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model at `path`, in fp32, and its tokenizer.

    Raises:
        SetupError: no model is there, it lacks weights or a tokenizer, or the tokenizer has more tokens than it.
    """
    folder = Path(path).expanduser()
    refuse_adapter(path)
    if folder.is_dir() and not (folder / "config.json").exists():
        inner = next((name for name in ("final", "merged") if (folder / name / "config.json").exists()), None)
        raise SetupError(
            f"model.path={path} holds no config.json" + (f"; did you mean {folder / inner}?" if inner else "")
        )
    source = str(folder) if folder.is_dir() else path
    try:
        model = load_causal_lm(source, dtype=torch.float32)
    except SetupError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if not folder.is_dir():
            hint = "; python training/pretrain.py makes it" if path == FinetuneRecipe().model.path else ""
            reason = f"no such model folder (seen from {Path.cwd()}) nor Hub model{hint} ({reason})"
        raise SetupError(f"model.path={path}: {reason}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise SetupError(f"model.path={path} has no tokenizer: {str(error).strip().splitlines()[0]}") from None
    if tokenizer.eos_token_id is None:
        raise SetupError(f"model.path={path}: its tokenizer has no eos_token, which ends an answer")
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise SetupError(
            f"model.path={path}: the tokenizer has {len(tokenizer)} tokens but the model's embedding {rows} rows; call "
            f"model.resize_token_embeddings({len(tokenizer)}) and save it, or use the tokenizer it was trained with"
        )
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def lora_config(recipe: LoraRecipe, model: PreTrainedModel) -> LoraConfig | None:
    """PEFT's configuration of the adapters, `None` to train all weights.

    Raises:
        SetupError: a target is no linear layer of `model`, or its head, whose weight TRL multiplies with directly.
    """
    if recipe.rank is None:
        return None
    targets: str | list[str] = recipe.target_modules
    if targets == ["all-linear"]:
        targets = "all-linear"
    else:
        head = model.get_output_embeddings()
        modules = {name: module for name, module in model.named_modules() if name and module is not head}
        linear = {name.rsplit(".", 1)[-1] for name, module in modules.items() if isinstance(module, nn.Linear)}
        raw = {name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()} - {"weight", "bias"}
        for target in targets:
            found = [module for name, module in modules.items() if f".{name}".endswith(f".{target}")]
            others = {type(module).__name__ for module in found if not isinstance(module, nn.Linear)}
            if others:
                raise SetupError(
                    f"lora.target_modules: '{target}' is a {others.pop()}, and adapters are for linear layers"
                )
            if not found and target.rsplit(".", 1)[-1] in raw:
                raise SetupError(
                    f"lora.target_modules: '{target}' is a parameter of its own, and adapters are for linear layers; "
                    "train it with all weights (lora.rank=null)"
                )
            if not found:
                raise SetupError(
                    f"lora.target_modules: the model has no linear layer '{target}' besides its head"
                    f"{nearest(target, linear) or '.'} Those it has: {', '.join(sorted(linear))}"
                )
    return LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=recipe.dropout,
        use_dora=recipe.dora,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def prepare_chat(recipe: FinetuneRecipe, tokenizer: PreTrainedTokenizerBase, examples: list[Example]) -> None:
    """Give `tokenizer` the template that conversations are written by, which is saved with it; see `ExampleRecipe`.

    Raises:
        SetupError: the template refuses a conversation, or does not mark what the assistant says.
    """
    template = read_chat_template(recipe.data.chat_template) or tokenizer.chat_template
    tokenizer.chat_template = template or DEFAULT_CHAT_TEMPLATE
    if not examples[0].is_conversation:
        return
    check_chat_template(examples, tokenizer)
    if recipe.data.loss == "completion" and examples[0].kind == "messages":
        try:
            # As `SFTTrainer` will: a marked form of the well-known ones, or this one.
            get_training_chat_template(tokenizer)
        except ValueError:
            raise SetupError(
                "the tokenizer's chat template does not mark what the assistant says by {% generation %} ... "
                "{% endgeneration %}, so it cannot be told from the rest: give such a template with "
                "data.chat_template=FILE, or learn every token with data.loss=all"
            ) from None


def token_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Loss in nats per token, perplexity and accuracy, over all learnt tokens of all held-out examples.

    `prediction.predictions` `[N, 3]` holds each example's summed nats, its tokens that were the likeliest, and its tokens.
    """
    nats, correct, tokens = prediction.predictions.astype("float64").sum(axis=0)
    loss = nats / max(tokens, 1)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "accuracy": correct / max(tokens, 1)}


@dataclasses.dataclass(frozen=True)
class Cut:
    """What `data.max_length` took from a set of examples: how many it shortened, and how many it left nothing to learn."""

    shortened: int
    dropped: int


class FineTuner(SFTTrainer):
    """TRL's trainer with the recipe's optimiser and schedule, and with held-out metrics per token, not per batch.

    Its checkpoints are whole or absent, like those of `save_checkpoint`.

    Attributes:
        cuts: by the name of a dataset, `train` or `eval`, what was cut from its examples.
    """

    def __init__(self, recipe: FinetuneRecipe, **arguments):
        self.recipe = recipe
        self.cuts: dict[str, Cut] = {}
        self.uses_cache = arguments["model"].config.use_cache  # to put back: a Trainer switches it off
        super().__init__(compute_metrics=token_metrics, **arguments)

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        """First as a whole, to count what will be cut, and to leave out, packed or not, what then teaches nothing."""
        uncut = copy.copy(args)
        uncut.max_length = None
        whole = super()._prepare_dataset(dataset, processing_class, uncut, False, formatting_func, dataset_name)
        shortened, kept = 0, []
        for row, is_learnt in enumerate(learnt_places(whole)):
            shortened += len(is_learnt) > args.max_length
            if is_learnt[: args.max_length].any():
                kept.append(row)
        if not kept:
            raise SetupError(
                f"the first data.max_length={args.max_length} tokens of the {PARTS[dataset_name]} examples hold nothing to "
                "learn: raise data.max_length"
            )
        self.cuts[dataset_name] = Cut(shortened, dropped=len(whole) - len(kept))
        kept_rows = whole if len(kept) == len(whole) else whole.select(kept)
        return super()._prepare_dataset(kept_rows, processing_class, args, packing, formatting_func, dataset_name)

    def _save_checkpoint(self, model, trial):
        # The Trainer writes below a hidden folder, whence the finished checkpoint moves into place.
        folder = Path(self.args.output_dir)
        partial = folder / ".partial"
        is_main = self.accelerator.is_main_process
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(partial)
        written = partial / f"checkpoint-{self.state.global_step}"
        try:
            with explain_failed_save(folder / written.name, partial):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.output_dir = str(folder)
        self.accelerator.wait_for_everyone()
        if is_main:
            state = {
                "step": self.state.global_step,
                "recipe": dataclasses.asdict(self.recipe),
                "data": self.data_digest,
            }
            (written / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
            commit_folder(written, folder / written.name)
            shutil.rmtree(partial)
            rotate_checkpoints(str(folder), self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    @functools.cached_property
    def data_digest(self) -> str:
        """SHA-256 of the training rows, which a run that goes on must find unchanged."""
        digest = hashlib.sha256()
        for column in ("input_ids", "labels"):
            for row in self.train_dataset[column]:
                digest.update(np.asarray(row, dtype=np.int64).tobytes() + b"|")
        return digest.hexdigest()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.recipe.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        if self.lr_scheduler is None:
            self.lr_scheduler = build_schedule(optimizer or self.optimizer, self.recipe.schedule, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_eval_dataloader(self, eval_dataset=None):
        # One example a row, so that sums by row can be gathered from several processes without the rows that repeat.
        collator, self.data_collator = self.data_collator, dataclasses.replace(self.data_collator, padding_free=False)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = collator

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Sums `[B, 3]` for `token_metrics`, in the place of logits `[B, T, V]`, which are never built."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        columns = (-outputs.log_probs, outputs.is_top1, outputs.label_mask)
        sums = torch.stack([column.float().sum(dim=1) for column in columns], dim=1)
        return None, sums, inputs["labels"]

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run."""
        _, accumulation = split_batch(self.recipe.train)
        batches = math.ceil(len(self.train_dataset) / (self.args.train_batch_size * self.args.world_size))
        return self.recipe.train.steps or math.ceil(self.recipe.train.epochs * math.ceil(batches / accumulation))


class RunCallback(TrainerCallback):
    """Writes metrics, shows progress, stops on a signal, and ends a run whose numbers have left the finite."""

    def __init__(self, trainer: FineTuner, folder: Path, interruption: Interruption, started: float):
        self.trainer, self.folder, self.interruption, self.started = trainer, folder, interruption, started
        is_main = trainer.accelerator.is_main_process
        self.metrics = MetricsLog(folder / "metrics.jsonl" if is_main else None)
        self.progress: Progress | None = None
        self.train_seconds = self.since_log = 0.0
        self.tokens = self.first_tokens = 0
        self.validated, self.result = -1, {}  # the last validation's step, and what it gave

    def on_train_begin(self, args, state, control, **kwargs):
        enabled = self.trainer.accelerator.is_main_process
        self.progress = Progress(state.max_steps, enabled=enabled, done=state.global_step)
        self.tokens = self.first_tokens = state.num_input_tokens_seen

    def on_step_begin(self, args, state, control, **kwargs):
        self.step_began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.since_log += time.perf_counter() - self.step_began
        self.progress.advance()
        every = self.trainer.recipe.checkpoint.every_steps
        if every and state.global_step % every == 0:
            control.should_log = True  # and so look at the numbers before a checkpoint replaces the last good one
        if state.global_step >= state.max_steps:
            control.should_log = True
        if self.interruption.agreed(self.trainer.accelerator):
            control.should_log = control.should_save = control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        elapsed = time.perf_counter() - self.started
        if "eval_loss" in logs:
            values = {name: logs[f"eval_{name}"] for name in ("loss", "perplexity", "accuracy")}
            self.validated, self.result = state.global_step, values
            self.metrics.write(
                "validation", step=state.global_step, tokens=state.num_input_tokens_seen, **values, seconds=elapsed
            )
            self.progress.say(
                f"step {state.global_step:>5}/{state.max_steps}  held-out loss {values['loss']:.3f}  "
                f"perplexity {values['perplexity']:,.1f}  accuracy {values['accuracy']:.3f}"
            )
        elif "loss" in logs:
            loss, norm = float(logs["loss"]), float(logs.get("grad_norm", 0.0))
            # Under fp16 an infinite norm is the loss scaler's daily business.
            if not math.isfinite(loss) or not (math.isfinite(norm) or args.fp16):
                raise RunError(explain_nonfinite(state.global_step, loss, norm))
            speed = (state.num_input_tokens_seen - self.tokens) / max(self.since_log, 1e-9)
            self.metrics.write(
                "train",
                step=state.global_step,
                tokens=state.num_input_tokens_seen,
                loss=loss,
                accuracy=logs["mean_token_accuracy"],
                grad_norm=norm,
                learning_rate=logs["learning_rate"],
                tokens_per_second=speed,
                seconds=elapsed,
            )
            self.progress.show(state.global_step, loss, speed)
            self.train_seconds += self.since_log
            self.tokens, self.since_log = state.num_input_tokens_seen, 0.0

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.close()


def check_resumed_data(trainer: FineTuner, checkpoint: str) -> None:
    """Raises `SetupError` if the training examples are not those that the run of `checkpoint` began with."""
    state = Path(checkpoint, STATE_FILE)
    before = json.loads(state.read_text(encoding="utf-8"))["data"] if state.exists() else trainer.data_digest
    if before != trainer.data_digest:
        raise SetupError(
            f"resume=true: the training examples (data.path={trainer.recipe.data.path}, or how they are written as tokens) "
            "have changed since the run began; put them back, or start anew in another output_dir"
        )


def check_resumed(recipe: FinetuneRecipe, folder: Path) -> str:
    """The checkpoint to go on from in `folder`; raises `SetupError` if there is none, or another recipe made it."""
    newest = newest_whole_checkpoint(folder, TRAINER_FILES, "finetune")
    if newest is None:
        raise SetupError(f"resume=true: {folder} holds no checkpoint to go on from; leave it out to start anew")
    before = load_recipe(str(folder / "recipe.yaml"), schema=FinetuneRecipe)
    for key, (old, new) in recipe_changes(dataclasses.asdict(before), recipe, FREE_ON_RESUME).items():
        raise SetupError(f"resume=true: '{key}' was {old!r} when the run began and is {new!r} now")
    return str(newest)


def training_arguments(recipe: FinetuneRecipe, output_dir: str, kind: str, validates: bool) -> SFTConfig:
    """The recipe in the words of TRL's trainer, for examples of `kind`."""
    train, every = recipe.train, recipe.validation.every_steps if validates else 0
    micro_batch_size, accumulation = split_batch(train)
    precision = choose_precision(train.mixed_precision)
    learns_part = recipe.data.loss == "completion"
    return SFTConfig(
        output_dir=output_dir,
        seed=recipe.seed,
        num_train_epochs=train.epochs,
        max_steps=train.steps or -1,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        per_device_eval_batch_size=recipe.validation.batch_size,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        gradient_checkpointing=train.activation_checkpointing,
        max_grad_norm=train.max_grad_norm,
        max_length=recipe.data.max_length,
        packing=recipe.data.packing,
        eval_packing=False,
        completion_only_loss=learns_part if kind == "prompt" else None,
        assistant_only_loss=learns_part and kind == "messages",
        logging_steps=train.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if every else "no",
        eval_steps=every or None,
        eval_on_start=bool(every) and not recipe.resume,
        save_strategy="steps" if recipe.checkpoint.every_steps else "no",
        save_steps=recipe.checkpoint.every_steps or 1,
        save_total_limit=recipe.checkpoint.keep_last,
        include_num_input_tokens_seen="non_padding",
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        disable_tqdm=True,
        report_to="none",
    )


def learnt_places(dataset: Dataset) -> Iterator[np.ndarray]:
    """For each prepared row, `[T]` bool: the tokens in the loss. No example's first one is, for nothing foretells it."""
    packed = dataset["seq_lengths"] if "seq_lengths" in dataset.column_names else itertools.repeat([])
    for labels, lengths in zip(dataset["labels"], packed, strict=False):
        is_learnt = np.asarray(labels) != IGNORE
        is_learnt[np.cumsum([0, *lengths[:-1]])] = False
        yield is_learnt


def count_learnt(dataset: Dataset) -> int:
    """Tokens of prepared examples that count in the loss."""
    return sum(int(is_learnt.sum()) for is_learnt in learnt_places(dataset))


def build_trainer(recipe: FinetuneRecipe) -> tuple[FineTuner, list[Example], list[Example]]:
    """The trainer of `recipe` with model and data, and the training and held-out examples; nothing is written.

    Raises:
        SetupError: any mistake that can be found before the first step.
    """
    examples, held_out = split_examples(recipe.data)
    model, tokenizer = load_base(recipe.model.path)
    if recipe.lora.rank is None and getattr(model, "is_quantized", False):
        raise SetupError(f"model.path={recipe.model.path} is quantised, and only adapters train on it: give lora.rank")
    limit = position_limit(model.config)
    if limit is not None and recipe.data.max_length > limit:
        raise SetupError(
            f"data.max_length={recipe.data.max_length} is longer than the model's max_position_embeddings={limit}: lower it"
        )
    prepare_chat(recipe, tokenizer, [*examples, *held_out])
    adapters = lora_config(recipe.lora, model)
    datasets = [Dataset.from_list([example.fields for example in part]) for part in (examples, held_out)]
    with tempfile.TemporaryDirectory() as unused:  # the Trainer makes its folder at once; mistakes can still show up
        trainer = FineTuner(
            recipe,
            model=model,
            args=training_arguments(recipe, unused, examples[0].kind, bool(held_out)),
            train_dataset=datasets[0],
            eval_dataset=datasets[1] if held_out else None,
            processing_class=tokenizer,
            peft_config=adapters,
        )
    trainer.args.output_dir = str(Path(recipe.output_dir).expanduser() / "checkpoints")
    trainer.remove_callback(PrinterCallback)
    steps, warmup = trainer.total_steps, recipe.schedule.warmup_steps
    if warmup > steps:
        raise SetupError(f"'schedule.warmup_steps' must be at most the run's {steps} steps, not {warmup}")
    return trainer, examples, held_out


def sample_answer(recipe: FinetuneRecipe, trainer: FineTuner, example: Example) -> tuple[str, str]:
    """A prompt, the recipe's or that of `example`, and how the model goes on from it."""
    sample, tokenizer = recipe.sample, trainer.processing_class
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
    if example.is_conversation:
        turns = example.conversation
        last = max(place for place, turn in enumerate(turns) if turn["role"] == "assistant")
        turns = [{"role": "user", "content": sample.prompt}] if sample.prompt else turns[:last]
        prompt = turns[-1]["content"] if turns else ""
        try:
            (ids,) = tokenizer.apply_chat_template([turns], add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception:  # whatever a template raises: some need turns, or all of them
            ids = [tokenizer.eos_token_id]
    else:
        prompt = sample.prompt or (
            example.fields["prompt"] if example.kind == "prompt" else example.fields["text"][:80]
        )
        ids = tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]
    set_seed(recipe.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products of one token are too small to share
    tokens = torch.tensor([ids], device=model.device)
    output = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=sample.shown_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **generation_style(sample.temperature, sample.top_p),
    )
    torch.set_num_threads(threads)
    return prompt.strip(), tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()


def save_results(recipe: FinetuneRecipe, trainer: FineTuner, folder: Path) -> dict[str, Path]:
    """Write the adapter, the model, or both; returns their folders by name."""
    accelerator, tokenizer = trainer.accelerator, trainer.processing_class
    model = accelerator.unwrap_model(trainer.model)
    model.config.use_cache = trainer.uses_cache
    weights = accelerator.get_state_dict(trainer.model_wrapped)
    saved = {}
    if accelerator.is_main_process:
        state = {"step": trainer.state.global_step, "recipe": dataclasses.asdict(recipe)}
        name = "final" if recipe.lora.rank is None else "adapter"
        saved[name] = save_checkpoint(folder / name, model, tokenizer, weights, state)
        if recipe.lora.rank is not None and recipe.lora.merge:
            base, _ = load_base(recipe.model.path)
            merged = PeftModel.from_pretrained(base, saved["adapter"]).merge_and_unload()
            saved["final"] = save_checkpoint(folder / "final", merged, tokenizer, merged.state_dict(), state)
    accelerator.wait_for_everyone()
    return saved


def describe_cuts(trainer: FineTuner) -> str:
    """A sentence on what was cut from the examples; empty if nothing was."""
    parts = [
        f"{cut.shortened:,} {PARTS[name]} examples ({cut.dropped:,} left out, with nothing to learn)"
        for name, cut in trainer.cuts.items()
        if cut.shortened or cut.dropped
    ]
    return f"Cut after {trainer.args.max_length:,} tokens: {' and '.join(parts)}." if parts else ""


def finetune(recipe: FinetuneRecipe) -> dict:
    """Carry out `recipe`; returns the summary that the run's folder holds as ``summary.json``."""
    started = time.perf_counter()
    keep_freed_memory()
    disable_progress_bars()
    set_seed(recipe.seed)
    folder = Path(recipe.output_dir).expanduser()
    earlier_files(recipe)
    checkpoint = check_resumed(recipe, folder) if recipe.resume else None
    trainer, examples, held_out = build_trainer(recipe)
    accelerator, config = trainer.accelerator, trainer.model.config
    if checkpoint is not None:
        check_resumed_data(trainer, checkpoint)
    if accelerator.is_main_process:
        if recipe.hub_model_id is not None:
            recipe.hub_model_id = open_repository(recipe.hub_model_id, recipe.hub_private_repo)
        open_run_folder(recipe)
        if checkpoint is not None:
            cut_metrics(folder / "metrics.jsonl", checkpoint_step(checkpoint))
    accelerator.wait_for_everyone()
    parameters = count_parameters(trainer.model)
    trained = count_parameters(trainer.model, trained_only=True)
    if accelerator.is_main_process:
        print(
            f"{config.model_type}, {parameters:,} parameters, {trained:,} of them trained\n"
            f"{len(examples):,} training and {len(held_out):,} held-out examples with {describe_kind(examples[0])} from "
            f"{recipe.data.path}\n"
            + (f"{cuts}\n" if (cuts := describe_cuts(trainer)) else "")
            + f"{count_learnt(trainer.train_dataset):,} tokens to learn in {len(trainer.train_dataset):,} "
            f"rows; {trainer.total_steps:,} steps on {accelerator.device} (mixed precision: {accelerator.mixed_precision})",
            flush=True,
        )
    with Interruption() as interruption:
        run = RunCallback(trainer, folder, interruption, started)
        trainer.add_callback(run)
        trainer.train(resume_from_checkpoint=checkpoint)
        if interruption.received and trainer.state.global_step < trainer.state.max_steps:
            raise Interrupted(
                f"stopped after step {trainer.state.global_step} of {trainer.state.max_steps}; checkpoint in "
                f"{get_last_checkpoint(trainer.args.output_dir)}, go on with resume=true",
                interruption.received,
            )
        saved = save_results(recipe, trainer, folder)
    try:
        if interruption.received:  # during the last step
            raise KeyboardInterrupt
        return finish(recipe, trainer, run, saved, examples, held_out)
    except KeyboardInterrupt:
        number = interruption.received or signal.SIGINT
        raise Interrupted(f"training is complete, saved in {', '.join(map(str, saved.values()))}", number) from None


def finish(
    recipe: FinetuneRecipe,
    trainer: FineTuner,
    run: RunCallback,
    saved: dict[str, Path],
    examples: list[Example],
    held_out: list[Example],
) -> dict:
    """Judge the final model, show an answer, and write plot and summary."""
    if held_out and run.validated != trainer.state.global_step:
        trainer.evaluate()
    result = run.result
    if not trainer.accelerator.is_main_process:
        return result
    prompt, answer = sample_answer(recipe, trainer, (held_out or examples)[0])
    (run.folder / "sample.txt").write_text(f"{prompt}\n\n{answer}\n", encoding="utf-8")
    config, state = trainer.model.config, trainer.state
    trained = count_parameters(trainer.model, trained_only=True)
    plot_losses(
        run.folder / "metrics.jsonl", run.folder / "loss.png", f"{config.model_type}, {trained / 1e6:.2f}M trained"
    )
    validations = read_metrics(run.folder / "metrics.jsonl", "validation")
    summary = {
        "model_type": config.model_type,
        "mixer_types": getattr(config, "mixer_types", None),
        "base": recipe.model.path,
        "parameters": count_parameters(trainer.model),
        "trained_parameters": trained,
        "precision": trainer.accelerator.mixed_precision,
        "steps": state.global_step,
        "epochs": state.epoch,
        "training_tokens": state.num_input_tokens_seen,
        "cut": {name: dataclasses.asdict(cut) for name, cut in trainer.cuts.items()},
        "validation_before": validations[0] if validations and validations[0]["step"] == 0 else None,
        "validation": result or None,
        "tokens_per_second": (run.tokens - run.first_tokens) / max(run.train_seconds, 1e-9),
        "seconds": time.perf_counter() - run.started,
    }
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for name, place in saved.items():
        if name == "adapter" or config.model_type == "avgpath":  # the card of a model is about AvgPath's layers
            describe(recipe, summary, trainer, place, examples, held_out).save(place / "README.md")
    print(f"\n> {prompt}\n{answer}\n")
    if result:
        before = summary["validation_before"]
        came_from = f" (before: {before['loss']:.3f})" if before else ""
        print(f"held-out loss {result['loss']:.3f}{came_from}, accuracy {result['accuracy']:.3f}")
    for name, place in saved.items():
        print(f"{'model' if name == 'final' else name} in {place}")
    print(
        f"plot in {run.folder / 'loss.png'}, metrics in {run.folder / 'metrics.jsonl'}; {summary['seconds']:.0f} s in all"
    )
    if recipe.hub_model_id is not None:
        print(f"sent to {upload_model(sent_folder(saved), recipe.hub_model_id)}")
    return summary


def sent_folder(saved: dict[str, Path]) -> Path:
    """What goes to the Hub: the model, or the adapter where no model was written."""
    return saved.get("final") or saved["adapter"]


def describe(
    recipe: FinetuneRecipe,
    summary: dict,
    trainer: FineTuner,
    folder: Path,
    examples: list[Example],
    held_out: list[Example],
) -> ModelCard:
    """The card of the model or adapter in `folder`."""
    is_sotu, lora = recipe.data.path == "sotu", recipe.lora
    is_adapter, is_chat = folder.name == "adapter", examples[0].is_conversation
    source = name_source(recipe.data.path)
    names = {"loss": "loss (nats per learnt token)", "accuracy": "next-token accuracy"}
    kind = "DoRA" if lora.dora else "LoRA"
    how = f"{kind}, rank {lora.rank}{'' if is_adapter else ', merged'}" if lora.rank else "all weights"
    is_on_hub = not Path(recipe.model.path).expanduser().exists()
    is_sent = recipe.hub_model_id is not None and not (is_adapter and lora.merge)
    return build_card(
        trainer.model if is_adapter else AutoModelForCausalLM.from_pretrained(folder),
        load_from=recipe.hub_model_id if is_sent else str(folder),
        adapter_of=recipe.model.path if is_adapter else None,
        data=f"`{recipe.model.path}`, fine-tuned on {len(examples):,} examples with {describe_kind(examples[0])} from "
        f"`{source}`; {len(held_out):,} more were held out." + (f" {cuts}" if (cuts := describe_cuts(trainer)) else ""),
        training={
            "trained": f"{summary['trained_parameters']:,} parameters ({how})",
            "tokens seen": f"{summary['training_tokens']:,} ({summary['epochs']:.2f} epochs)",
            "optimiser steps": f"{summary['steps']:,} of {recipe.train.batch_size} rows",
            "optimiser": f"AdamW, peak learning rate {recipe.optimizer.learning_rate:g} ({recipe.schedule.name})",
            "mixed precision": summary["precision"],
            "seed": str(recipe.seed),
        },
        results=held_out_results(source, names, summary["validation"]) if summary["validation"] else [],
        limits="It answers in the manner of its examples, states falsehoods as readily as facts, and was not made safe.",
        prompt=recipe.sample.prompt or ("Hello!" if is_chat else "The"),
        is_chat=is_chat,
        license=recipe.license,
        base_model=recipe.model.path if is_on_hub else None,
        language="en" if is_sotu else None,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of names that these libraries will drop, to one another
    return run_script(
        "finetune", lambda: finetune(parse_recipe("finetune", __doc__, EXAMPLES, arguments, schema=FinetuneRecipe))
    )


if __name__ == "__main__":
    sys.exit(main())
