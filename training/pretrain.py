# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Pretrain a causal language model on text, from one CPU core upwards.

The default recipe trains a small AvgPath hybrid on the annual messages of the presidents of the United States, in a
few minutes on two CPU cores. Started plainly (`python training/pretrain.py`) or by `accelerate launch`.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: Python put this folder on the path, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import training  # noqa: F401  (before the libraries, which it keeps quiet while they are imported)

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
    set_seed,
)
from huggingface_hub import ModelCard
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from training.card import (
    build_card,
    describe_held_out,
    describe_layers,
    describe_texts,
    held_out_results,
    name_source,
)
from training.checkpoint import (
    Interruption,
    earlier_files,
    explain_failed_save,
    open_run_folder,
    prune_checkpoints,
    remove_partial,
    save_checkpoint,
)
from training.corpus import describe_sources, list_sources
from training.data import IGNORE, TrainingData, collate, prepare_data
from training.flops import count_flops
from training.guard import NonFiniteGuard, explain_nonfinite
from training.machine import choose_precision, keep_freed_memory, peak_flops, split_batch
from training.modeling import (
    build_model,
    cache_nbytes,
    can_skip_logits,
    check_boundaries,
    count_parameters,
    load_causal_lm,
    load_model_config,
)
from training.optimization import build_optimizer, build_schedule, load_optimizer_state, optimizer_state
from training.plan import describe_plan, make_plan
from training.probes import position_limit
from training.publish import open_repository, upload_model
from training.recipe import Recipe, RunError, SetupError
from training.resume import StartingPoint, find_start, finished_run, random_state, set_random_state
from training.sampling import generation_style, prompt_tokens, write_sample
from training.script import Interrupted, is_main_process, parse_recipe, run_script, warn
from training.step import LossWindow, StepResult, TrainingStep
from training.trackers import curves, finish_trackers, start_trackers, tracking_options
from training.tracking import (
    STATES,
    MetricsLog,
    Progress,
    cut_metrics,
    plot_losses,
    plot_training,
    read_records,
    truncate_metrics,
)
from training.validation import PositionLosses, state_norms

OPTIMIZER_NAMES = {"adamw": "AdamW", "muon": "Muon and AdamW"}
EXAMPLES = """  python training/pretrain.py
  python training/pretrain.py output_dir=runs/mesa model.mixer=mesa_net
  python training/pretrain.py output_dir=runs/linear model.hybrid_ratio=1:0 train.steps=100
  python training/pretrain.py my_recipe.yaml data.path=texts/ overwrite=true
  python training/pretrain.py resume=true
  python training/pretrain.py --dry-run model.config=configuration/models/1b.json train.batch_size=512
  python training/pretrain.py schedule.name=wsd output_dir=runs/short \
      branch_from=runs/long/checkpoints/step-000300 train.steps=350
  accelerate launch --config_file configuration/accelerate/ddp.yaml training/pretrain.py train.batch_size=32
"""


@dataclasses.dataclass
class Pretraining:
    """One run: the pieces that its steps, validations and checkpoints share."""

    recipe: Recipe
    accelerator: Accelerator
    folder: Path
    data: TrainingData
    model: PreTrainedModel
    model_config: dict  # that of the recipe, which a run that goes on must find again
    interruption: Interruption
    started: float  # time.perf_counter() at the start of the script
    start: StartingPoint | None
    metrics: MetricsLog = dataclasses.field(init=False)  # opened once the folder is ready

    def __post_init__(self) -> None:
        train, accelerator = self.recipe.train, self.accelerator
        micro_batch_size, self.accumulation = split_batch(train)
        self.parameters = count_parameters(self.model)
        self.flops_per_token = count_flops(self.model, self.recipe.data.sequence_length).training
        self.peak_flops = peak_flops(accelerator.device, accelerator.mixed_precision)
        self.tokens_per_step = train.batch_size * self.recipe.data.sequence_length
        self.step = 0
        self.train_seconds = 0.0
        self.branched_at = self.start.branched_at if self.start else None
        if train.activation_checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        # A compiled step joins logits and loss by itself.
        options = {"skip_logits": True} if can_skip_logits(self.model) and not train.compile else {}
        if train.compile:
            self.model.compile()  # in place: names stay as they are
        optimizer = build_optimizer(self.model, self.recipe.optimizer)
        self.model, self.optimizer = accelerator.prepare(self.model, optimizer)
        # Not handed to Accelerate, which would advance it once per process.
        self.schedule = build_schedule(
            self.optimizer.optimizer, self.recipe.schedule, train.steps, branched_at=self.branched_at
        )
        self.batches = self.data.batches(
            micro_batch_size, accelerator.process_index, accelerator.num_processes, self.recipe.seed
        )
        self.guard = NonFiniteGuard(train)
        self.window = LossWindow()
        self.take_step = TrainingStep(accelerator, self.model, self.optimizer, self.guard, train.max_grad_norm, options)
        if self.start:
            self.restore(self.start)
        self.logged_at, self.since = self.step, time.perf_counter()
        self.progress = Progress(train.steps, enabled=accelerator.is_main_process, done=self.step)

    @property
    def plain_model(self) -> PreTrainedModel:
        return self.accelerator.unwrap_model(self.model)

    @property
    def written_model(self) -> PreTrainedModel:
        """What writes the model's files, weights given: `plain_model`, or if it is spread over processes its like."""
        model = self.plain_model
        if not self.accelerator.is_fsdp2:
            return model
        with torch.device("meta"):  # one process alone must not touch sharded parameters, which are read in common
            like = type(model)(model.config)
        like.generation_config = model.generation_config
        return like

    def restore(self, start: StartingPoint) -> None:
        """Take up what `save` wrote, but for the weights, which the model was made with."""
        state, saved, processes = start.state, start.tensors("optimizer.pt"), start.tensors("processes.pt")
        load_optimizer_state(self.model, self.optimizer.optimizer, saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        if self.accelerator.scaler is not None and saved["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(saved["scaler"])
        self.guard.load_state_dict(state["guard"])
        self.window.load_state_dict(state["window"])
        self.step, self.train_seconds = state["step"], state["train_seconds"]
        self.started -= state["seconds"]
        mine = processes[self.accelerator.process_index % len(processes)]  # there may be more processes now
        if start.check_data(self.recipe, self.data.fingerprint, self.data.tokenizer):
            self.batches.load_state_dict(mine["batches"])
        set_random_state(mine["random"], self.accelerator.device)

    def is_due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def train(self) -> Path:
        """Take all steps that are left; returns the final model's folder. Raises `Interrupted` after a requested stop."""
        train, validation, checkpoint = self.recipe.train, self.recipe.validation, self.recipe.checkpoint
        if self.is_due(validation.every_steps) and not (self.start and self.start.is_branch):
            self.watch()  # at the beginning, or what a checkpoint at this step was written before
        self.model.train()
        self.since = time.perf_counter()
        while self.step < train.steps:
            self.advance()
            stop = self.interruption.agreed(self.accelerator)
            last = self.step == train.steps
            if stop and not last:
                saved = self.save(self.checkpoint_folder, is_resumable=True)
                self.log_step()  # a run that goes on cuts it off again
                self.progress.close()
                raise Interrupted(
                    f"stopped after step {self.step} of {train.steps}; checkpoint in {saved}, go on with resume=true",
                    self.interruption.received,
                )
            pause = time.perf_counter()
            # After a step that was left out the weights may be ruined: the last good checkpoint keeps its place.
            if self.is_due(checkpoint.every_steps) and not last and not self.guard.in_a_row:
                self.save(self.checkpoint_folder, is_resumable=True)
                if self.accelerator.is_main_process:
                    prune_checkpoints(self.folder / "checkpoints", checkpoint.keep_last)
            if self.is_due(validation.every_steps) and not last:
                self.watch()
                self.model.train()
            self.since += time.perf_counter() - pause  # tokens/s counts training alone
        self.progress.close()
        return self.save(self.folder / "final")

    def advance(self) -> None:
        """Take one step, and write the training record if one is due."""
        self.learning_rate = self.schedule.get_last_lr()[0]
        self.result = self.take_step(self.step + 1, [next(self.batches) for _ in range(self.accumulation)])
        self.schedule.step()
        self.step += 1
        self.window.add(self.result)
        self.progress.advance()
        if not self.result.is_admitted:
            self.tell_skipped(self.result)
        if self.is_due(self.recipe.train.log_every) or self.step == self.recipe.train.steps:
            self.log_step()

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoints" / f"step-{self.step:06d}"

    def tell_skipped(self, result: StepResult) -> None:
        self.metrics.write("skipped", step=self.step, skipped_steps=self.guard.skipped)
        words = explain_nonfinite(self.step, result.loss, result.grad_norm)
        self.progress.say(
            f"step {self.step:>5}/{self.recipe.train.steps}  left out ({self.guard.skipped} so far): {words}"
        )

    def log_step(self) -> None:
        """Write the training record of the steps since the last one, if there are any with numbers."""
        now = time.perf_counter()
        elapsed, steps = now - self.since, self.step - self.logged_at
        self.train_seconds += elapsed
        loss = self.window.mean
        self.window, self.logged_at, self.since = LossWindow(), self.step, now
        if loss is None:
            return
        tokens_per_second = steps * self.tokens_per_step / elapsed
        self.metrics.write(
            "train",
            step=self.step,
            tokens=self.step * self.tokens_per_step,
            loss=loss,
            grad_norm=self.result.grad_norm if math.isfinite(self.result.grad_norm) else None,
            learning_rate=self.learning_rate,
            skipped_steps=self.guard.skipped,
            tokens_per_second=tokens_per_second,
            mfu=self.mfu(tokens_per_second),
            seconds=now - self.started,
        )
        self.progress.show(self.step, loss, tokens_per_second, self.mfu(tokens_per_second))

    def mfu(self, tokens_per_second: float) -> float | None:
        """The share of all devices' peak that useful arithmetic takes (see flops.py); `None` where no peak is known."""
        if self.peak_flops is None:
            return None
        return tokens_per_second * self.flops_per_token / (self.peak_flops * self.accelerator.num_processes)

    def watch(self) -> None:
        """What is looked at while the run goes on: a part of the held-out rows, and a sample."""
        self.validate(self.recipe.validation.rows)
        recipe = self.recipe.sample
        if not recipe.training_tokens:
            return
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=True)
        # On all processes, over which the model may be spread.
        text = write_sample(model, self.data.tokenizer, recipe, recipe.training_tokens, self.recipe.seed)
        if self.accelerator.is_main_process:
            record = {"step": self.step, "tokens": self.step * self.tokens_per_step, "text": text}
            with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            self.accelerator.log({"sample": text}, step=self.step)

    @torch.no_grad()
    def validate(self, rows: int | None = None) -> dict:
        """Loss on the held-out documents: all rows, or `rows` of them spread evenly.

        Perplexity is per token. Bits per byte divide by the UTF-8 bytes of all held-out text, so models with other
        tokenizers compare; on a part of the rows they use the whole text's bytes per token. The norms of the recurrent
        layers' states are written as a record of their own.
        """
        accelerator, data = self.accelerator, self.data
        count = min(rows or len(data.validation), len(data.validation))
        chosen = [index * len(data.validation) // count for index in range(count)]
        mine = chosen[accelerator.process_index :: accelerator.num_processes]
        own = len(mine)
        # All processes take as many forward passes, which FSDP2 makes common ones: some see a row that does not count.
        mine += chosen[:1] * (-(-count // accelerator.num_processes) - own)
        model = accelerator.unwrap_model(self.model, keep_fp32_wrapper=True).eval()
        losses, states = PositionLosses(self.recipe.data.sequence_length, len(data.held_out)), []
        source_of = [index for index, part in enumerate(data.held_out) for _ in range(len(part.rows))]
        for first in range(0, len(mine), size := self.recipe.validation.batch_size):
            batch_rows = mine[first : first + size]
            batch = collate([data.validation[row] for row in batch_rows])
            batch["shift_labels"][max(own - first, 0) :] = IGNORE
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            losses.add(model, batch, [source_of[row] for row in batch_rows])
            if not first:
                states = state_norms(model, self.plain_model, batch["input_ids"])
        # As two fp32 numbers each, of which not every device has fp64.
        high = losses.sums.float()
        parts = torch.stack([high, (losses.sums - high).float()]).to(accelerator.device)
        losses.sums = accelerator.reduce(parts, "sum").cpu().double().sum(0)
        loss = losses.loss()
        result: dict[str, Any] = {
            "loss": loss,
            "perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()),  # infinite where math.exp would fail
            "bits_per_byte": loss / math.log(2) * data.validation_tokens / data.validation_bytes,
        }
        if len(data.held_out) > 1:
            result["by_source"] = [
                {
                    "name": part.name,
                    "tokens": losses.targets(index),
                    "loss": losses.loss(index),
                    "bits_per_byte": losses.loss(index) / math.log(2) * part.tokens / part.bytes,
                }
                for index, part in enumerate(data.held_out)
                if losses.targets(index)
            ]
        self.metrics.write(
            "validation",
            step=self.step,
            tokens=self.step * self.tokens_per_step,
            **result,
            target_tokens=losses.targets(),
            by_position=losses.buckets(),
            seconds=time.perf_counter() - self.started,
        )
        self.metrics.write(STATES, step=self.step, tokens=self.step * self.tokens_per_step, layers=states)
        self.progress.say(
            f"step {self.step:>5}/{self.recipe.train.steps}  held-out loss {loss:.3f}  "
            f"perplexity {result['perplexity']:,.1f}  bits per byte {result['bits_per_byte']:.3f}"
        )
        return result

    def save(self, folder: Path, is_resumable: bool = False) -> Path:
        """Write a model folder that `AutoModelForCausalLM.from_pretrained` loads.

        Args:
            is_resumable: add all that `restore` needs.

        Raises:
            RunError: on all processes, if the weights are not finite or the folder cannot be written.
        """
        accelerator = self.accelerator
        weights = accelerator.get_state_dict(self.model)
        if accelerator.is_fsdp2:  # what was gathered of tied weights shares no memory, and would be written twice
            tied = self.plain_model.all_tied_weights_keys
            weights = {name: weight for name, weight in weights.items() if name not in tied}
        tensors = {}
        if is_resumable:
            mine = {"batches": self.batches.state_dict(), "random": random_state(accelerator.device)}
            tensors = {
                "optimizer.pt": {
                    "optimizer": optimizer_state(self.model, self.optimizer.optimizer),
                    "schedule": self.schedule.state_dict(),
                    "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
                },
                "processes.pt": gather_object([mine]),
            }
        failure = None
        if accelerator.is_main_process:
            try:
                if not all(bool(weight.isfinite().all()) for weight in weights.values()):
                    raise RunError(f"the weights are not finite after step {self.step}: lower optimizer.learning_rate")
                with explain_failed_save(folder):
                    save_checkpoint(folder, self.written_model, self.data.tokenizer, weights, self.state(), tensors)
            except RunError as error:
                failure = str(error)
        (failure,) = broadcast_object_list([failure])  # all processes end together, or go on together
        if failure:
            self.progress.close()
            raise RunError(failure)
        return folder

    def state(self) -> dict:
        """What a checkpoint tells about its run as JSON."""
        return {
            "step": self.step,
            "steps": self.recipe.train.steps,
            "tokens": self.step * self.tokens_per_step,
            "epoch": self.batches.epoch,
            "branched_at": self.branched_at,
            "processes": self.accelerator.num_processes,
            "guard": self.guard.state_dict(),
            "window": self.window.state_dict(),
            "metrics_bytes": self.metrics.sync(),
            "train_seconds": self.train_seconds,
            "seconds": time.perf_counter() - self.started,
            "data": self.data.fingerprint,
            "model_config": self.model_config,
            "recipe": dataclasses.asdict(self.recipe),
        }

    def finish(self, saved: Path) -> dict:
        """Judge the final model, show a sample and what the cache holds, and write plot and summary."""
        result = self.validate()
        finish_trackers(self.accelerator)
        if not math.isfinite(result["loss"]):
            raise RunError(
                f"the final model's held-out loss is {result['loss']}: its weights are ruined ({self.guard.skipped} of "
                f"{self.step} steps were left out as not finite). Lower optimizer.learning_rate and start anew"
            )
        if not self.accelerator.is_main_process:
            return result
        text, cache_bytes = self.sample(model := load_causal_lm(str(saved), dtype=torch.float32))
        config = self.plain_model.config
        title = f"{config.model_type}, {self.parameters / 1e6:.1f}M parameters"
        if hasattr(config, "mixer_types"):
            title += f": {describe_layers(config.mixer_types)}"
        plot_losses(self.folder / "metrics.jsonl", self.folder / "loss.png", title)
        plot_training(self.folder / "metrics.jsonl", self.folder / "training.png", title)
        summary = {
            "model_type": config.model_type,
            "mixer_types": getattr(config, "mixer_types", None),
            "parameters": self.parameters,
            "vocabulary": len(self.data.tokenizer),
            "precision": self.accelerator.mixed_precision,
            "steps": self.step,
            "training_tokens": self.step * self.tokens_per_step,
            "skipped_steps": self.guard.skipped,
            "epochs": self.batches.epoch,
            "validation": result,
            "tokens_per_second": self.step * self.tokens_per_step / self.train_seconds,
            "mfu": self.mfu(self.step * self.tokens_per_step / self.train_seconds),
            "flops_per_token": self.flops_per_token,
            "cache_bytes": cache_bytes,
            "seconds": time.perf_counter() - self.started,
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        if config.model_type == "avgpath":  # the card is about AvgPath's layers; baselines have none
            self.describe(summary, model).save(saved / "README.md")
        cached = ", ".join(f"{size:,} after {count:,}" for count, size in cache_bytes.items())
        print(f"\n{text}\n\ncache bytes by generated tokens: {cached}")
        print(
            f"held-out loss {result['loss']:.3f}, perplexity {result['perplexity']:.1f}, bits per byte "
            f"{result['bits_per_byte']:.3f}\n{summary['training_tokens']:,} tokens at "
            f"{summary['tokens_per_second']:,.0f} tokens/s; {summary['seconds']:.0f} s in all\n"
            f"model in {saved}, plots in {self.folder}/loss.png and training.png, metrics in {self.folder / 'metrics.jsonl'}"
        )
        if self.recipe.hub_model_id is not None:
            print(f"sent to {upload_model(saved, self.recipe.hub_model_id)}")
        return summary

    def describe(self, summary: dict, model: PreTrainedModel) -> ModelCard:
        """The model card of the finished run, whose `model` is a whole one on this process."""
        recipe, data = self.recipe, self.data
        tokens = "read as a stream" if data.train_tokens is None else f"{data.train_tokens:,} tokens"
        paths = [source.path for _, source in list_sources(recipe.data)]
        source = " and ".join(map(name_source, paths))
        names = {"loss": "loss (nats per token)", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
        return build_card(
            model,
            load_from=recipe.hub_model_id or str(self.folder / "final"),
            data=f"{describe_texts(recipe.data)}: {tokens}, and {data.validation_tokens:,} held out "
            f"({describe_held_out(recipe.data)}). The vocabulary has {len(data.tokenizer):,} tokens.",
            training={
                "tokens seen": f"{summary['training_tokens']:,} ({summary['epochs']:.2f} epochs)",
                "optimiser steps": f"{self.step:,} of {recipe.train.batch_size} × {recipe.data.sequence_length} tokens",
                "optimiser": f"{OPTIMIZER_NAMES[recipe.optimizer.name]}, peak learning rate "
                f"{recipe.optimizer.learning_rate:g} ({recipe.schedule.name}), "
                f"weight decay {recipe.optimizer.weight_decay:g}",
                "mixed precision": self.accelerator.mixed_precision,
                "seed": str(recipe.seed),
                "throughput": f"{summary['tokens_per_second']:,.0f} tokens/s on {self.accelerator.num_processes} × "
                f"{self.accelerator.device.type}",
            },
            results=held_out_results(source, names, summary["validation"]),
            limits=f"A base model, trained on {summary['training_tokens']:,} tokens of "
            f"{'one source' if len(paths) == 1 else f'{len(paths)} sources'}: it continues text in that manner, states "
            "falsehoods as readily as facts, and has learnt the views of its authors. It was not tuned to follow "
            "instructions or to be safe.",
            prompt=recipe.sample.prompt or "The",
            license=recipe.license,
            language="en" if set(paths) <= {"sotu", "wiki"} else None,
        )

    def sample(self, model: PreTrainedModel) -> tuple[str, dict[int, int]]:
        """Generate text with one growing cache; returns its beginning, and the cache's bytes by generated tokens.

        Args:
            model: the finished one as users load it, in fp32; the trained one may be spread over all processes.
        """
        recipe, tokenizer = self.recipe.sample, self.data.tokenizer
        model = model.to(self.accelerator.device).eval()
        prompt = prompt_tokens(tokenizer, recipe.prompt)
        tokens = torch.tensor([prompt], device=self.accelerator.device)
        set_seed(self.recipe.seed)
        cache, sizes = None, {}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # products of one token are too small to share
        for count in recipe.cache_tokens:
            wanted = len(prompt) + count - tokens.shape[1]
            output = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                cache=cache,
                max_new_tokens=wanted,
                min_new_tokens=wanted,
                return_dict_in_generate=True,
                **generation_style(recipe.temperature, recipe.top_p),
            )
            tokens, cache = output.sequences, output.cache
            sizes[count] = cache_nbytes(cache)
            self.metrics.write("cache", generated_tokens=count, nbytes=sizes[count])
        torch.set_num_threads(threads)
        text = tokenizer.decode(tokens[0], skip_special_tokens=True)
        (self.folder / "sample.txt").write_text(text + "\n", encoding="utf-8")
        return tokenizer.decode(tokens[0, : len(prompt) + recipe.shown_tokens], skip_special_tokens=True).strip(), sizes


def build_accelerator(recipe: Recipe) -> Accelerator:
    """An `Accelerator` for the recipe's batch and precision; raises `SetupError` if they cannot be had."""
    split_batch(recipe.train)
    accelerator = Accelerator(
        mixed_precision=choose_precision(recipe.train.mixed_precision), **tracking_options(recipe)
    )
    if accelerator.distributed_type == DistributedType.MULTI_CPU and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        # Accelerate falls back to DDP on CPUs without a word, though PyTorch shards over gloo as it does over NCCL.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    if accelerator.is_fsdp2:
        # Accelerate's policy would cast what must stay in fp32 (decay rates, states) and add up gradients in bf16. Weights
        # are gathered in fp32 instead, and autocast chooses the precision of each product as on one device.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
    elif accelerator.distributed_type == DistributedType.FSDP:
        raise SetupError(
            "FSDP of version 1 is not supported: set fsdp_version to 2, as in configuration/accelerate/fsdp2.yaml"
        )
    return accelerator


def describe_devices(accelerator: Accelerator) -> str:
    """Such as ``cpu`` or ``8 x cuda (FSDP2)``."""
    if accelerator.num_processes == 1:
        return str(accelerator.device)
    kind = "FSDP2" if accelerator.is_fsdp2 else "DDP"
    return f"{accelerator.num_processes} x {accelerator.device.type} ({kind})"


def on_main_process_first(accelerator: Accelerator, make: Callable[[], TrainingData]) -> TrainingData:
    """`make()`, first on the main process, then on the others, which find what it has stored.

    Raises:
        SetupError: on all processes, if the main process raised it.
    """
    failure = found = None
    if accelerator.is_main_process:
        try:
            found = make()
        except SetupError as error:
            failure = str(error)
    (failure,) = broadcast_object_list([failure])
    if failure:
        raise SetupError(failure)
    return found if accelerator.is_main_process else make()


def finished_summary(recipe: Recipe) -> dict | None:
    """The summary of the finished run that `recipe` would go on with, if there is nothing left to do."""
    found = finished_run(recipe)
    if found is None or found[0]["steps"] != recipe.train.steps:
        return None
    summary, final = found
    # As strict as with a run that is not finished: the result of one recipe is not that of another.
    final.check_recipe(recipe, load_model_config(recipe.model).to_dict())
    return summary


def open_folder(recipe: Recipe, start: StartingPoint | None) -> Path:
    """Make the run's folder ready, on the main process: without what a kill left, and with metrics up to `start`."""
    if recipe.hub_model_id is not None:
        recipe.hub_model_id = open_repository(recipe.hub_model_id, recipe.hub_private_repo)
    folder = open_run_folder(recipe)
    remove_partial(folder)
    goes_on = start is not None and not start.is_branch
    truncate_metrics(folder / "metrics.jsonl", start.state["metrics_bytes"] if goes_on else 0)
    # A checkpoint is written before the sample of its step.
    cut_metrics(folder / "samples.jsonl", start.step - 1 if start else -1)
    return folder


def build_run(recipe: Recipe, interruption: Interruption) -> Pretraining:
    """Make data, model and folder ready, fresh or from a checkpoint; nothing is written before all of it is checked."""
    started = time.perf_counter()
    accelerator = build_accelerator(recipe)
    earlier_files(recipe)  # an occupied folder is told before anything is computed
    set_seed(recipe.seed)
    config = load_model_config(recipe.model)
    model_config = config.to_dict()
    start = find_start(recipe)
    if start:
        start.check_recipe(recipe, model_config)
    data = on_main_process_first(accelerator, lambda: prepare_data(recipe.data, recipe.tokenizer, config.vocab_size))
    limit = position_limit(config)
    if limit is not None and recipe.data.sequence_length > limit:
        raise SetupError(
            f"data.sequence_length={recipe.data.sequence_length} is beyond the model's max_position_embeddings={limit}: "
            "shorten the rows, or raise model.max_position_embeddings"
        )
    if data.rows_per_epoch is not None and data.rows_per_epoch < recipe.train.batch_size:
        raise SetupError(
            f"{describe_sources(recipe.data)} has {data.rows_per_epoch} training rows of {recipe.data.sequence_length} "
            f"tokens, fewer than train.batch_size={recipe.train.batch_size}; lower one of them or give more text"
        )
    if start:
        start.check_data(recipe, data.fingerprint, data.tokenizer)
        model = load_causal_lm(str(start.folder), dtype=torch.float32)
    else:
        model = build_model(config, data.tokenizer)
    if recipe.data.boundaries and config.model_type != "avgpath":
        check_boundaries(model)
    folder = Path(recipe.output_dir).expanduser()
    run = Pretraining(recipe, accelerator, folder, data, model, model_config, interruption, started, start)
    # All is checked: from here on the folder changes.
    if accelerator.is_main_process:
        open_folder(recipe, start)
    accelerator.wait_for_everyone()
    goes_on = start is not None and not start.is_branch
    kept = read_records(folder / "metrics.jsonl", start.step) if goes_on else []
    start_trackers(accelerator, recipe, start.step if goes_on else None, kept)

    def track(kind: str, values: dict) -> None:
        if "step" in values:
            accelerator.log(curves(kind, values), step=values["step"])

    run.metrics = MetricsLog(folder / "metrics.jsonl" if accelerator.is_main_process else None, track)
    size = "" if data.train_tokens is None else f"{data.train_tokens:,} training and "
    run.progress.say(
        f"{config.model_type}, {run.parameters:,} parameters"
        + (f": {describe_layers(config.mixer_types)}" if hasattr(config, "mixer_types") else "")
        + f"\n{size}{data.validation_tokens:,} held-out tokens from {describe_sources(recipe.data)}, "
        f"vocabulary {len(data.tokenizer):,}\n"
        f"{recipe.train.steps:,} steps of {run.tokens_per_step:,} tokens on {describe_devices(accelerator)} "
        f"(mixed precision: {accelerator.mixed_precision})"
        + (f"\n{'branches from' if start.is_branch else 'goes on from'} {start.folder}" if start else "")
    )
    if recipe.resume and start is None:
        warn("pretrain", f"{folder} holds no checkpoint to go on from, so the run begins at the beginning")
    return run


def pretrain(recipe: Recipe) -> dict:
    """Carry out `recipe`; returns the summary that the run's folder holds as ``summary.json``."""
    if recipe.dry_run:
        if is_main_process():
            print(describe_plan(make_plan(recipe)))
        return {}
    keep_freed_memory()
    if summary := finished_summary(recipe):
        warn("pretrain", f"{recipe.output_dir} holds a run that is finished, so there is nothing to go on with")
        return summary
    interruption = Interruption()
    run = build_run(recipe, interruption)
    with interruption:
        saved = run.train()
    try:
        with interruption.after_training(saved, "its validation and sample were"):
            return run.finish(saved)
    finally:
        run.batches.close()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_script("pretrain", lambda: pretrain(parse_recipe("pretrain", __doc__, EXAMPLES, arguments)))


if __name__ == "__main__":
    sys.exit(main())
