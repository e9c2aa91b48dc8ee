# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Convert a softmax language model into an AvgPath hybrid: calibrate, align, distil, evaluate.

The layers that `layers` does not keep get another mixer, which begins near its teacher (calibration), learns to return what
the teacher's layer returns (align), and then to predict what the teacher predicts (distil). Writes a model folder that is
ready for the Hub, with what was measured on its card.
"""

import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

if __package__ in (None, ""):  # started as a file: Python put this folder on the path, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import training  # noqa: F401  (before the libraries, which it keeps quiet while they are imported)

import torch
from accelerate import PartialState
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from modeling_avgpath import AvgPathForCausalLM
from modeling_avgpath.cache_files import model_fingerprint
from modeling_avgpath.conversion import Calibration, calibrate, conversion_config, from_softmax
from modeling_avgpath.conversion_layers import choose_softmax_layers, place_mixers
from training.card import describe_layers
from training.checkpoint import (
    PRETRAIN_FILES,
    Interruption,
    earlier_files,
    explain_failed_save,
    newest_whole_checkpoint,
    open_run_folder,
    prune_checkpoints,
    remove_partial,
    save_checkpoint,
)
from training.conversion_report import HeldOutRows, conversion_card, describe_evaluation, plot_conversion
from training.corpus import describe_sources
from training.data import IGNORE, TrainingData, prepare_data
from training.distillation import (
    PHASES,
    LayerAlignment,
    LogitDistillation,
    build_optimizer,
    build_schedule,
    converted_layers,
    row_length,
    step_tokens,
    trained_parameters,
    without_recurrence,
)
from training.machine import choose_precision, keep_freed_memory
from training.modeling import count_parameters, load_causal_lm, refuse_adapter
from training.probes import BlankModel, MeasurementError, make_alphabet, recall_probe
from training.publish import open_repository, upload_model
from training.recipe import ConversionRecipe, PhaseRecipe, RunError, SetupError, TokenizerRecipe
from training.resume import StartingPoint, finished_run, random_state, recipe_changes, set_random_state
from training.script import Interrupted, parse_recipe, run_script, warn
from training.tracking import MetricsLog, Progress, truncate_metrics

EXAMPLES = """  python training/convert.py teacher.path=HuggingFaceTB/SmolLM2-135M output_dir=runs/convert/smollm
  python training/convert.py teacher.path=runs/llama/final layers.mixer=mesa_net layers.count=2
  python training/convert.py layers.strategy=list layers.softmax=[3,7,11] layers.count=null
  python training/convert.py align.tokens=0 distil.tokens=0      # the calibrated start alone
  python training/convert.py resume=true
"""
# Fields that a run which goes on may change, as beginnings of their names: none alters the steps that it has taken.
FREE_ON_RESUME = (
    "output_dir", "overwrite", "resume", "hub_", "license", "evaluation.", "checkpoint.", "probes.", "phrases.", "lookup.",
    "copying.", "bootstrap.", "train.log_every", "data.cache_dir", "data.workers",
)  # fmt: skip
# Those of a finished run, whose result is there: it was evaluated as its recipe said.
FREE_WHEN_FINISHED = (
    "output_dir", "overwrite", "resume", "hub_", "license", "evaluation.every_steps", "evaluation.watch_rows",
    "evaluation.batch_size", "checkpoint.", "train.log_every", "data.cache_dir", "data.workers",
)  # fmt: skip


@dataclasses.dataclass
class Conversion:
    """One run: the pieces that its phases, evaluations and checkpoints share."""

    recipe: ConversionRecipe
    folder: Path
    data: TrainingData
    rows: Mapping[str, TrainingData]  # what each phase trains on
    teacher: PreTrainedModel
    student: AvgPathForCausalLM
    metrics: MetricsLog
    interruption: Interruption
    precision: str
    started: float  # time.perf_counter() at the start of the script
    start: StartingPoint | None

    def __post_init__(self) -> None:
        recipe = self.recipe
        self.device = self.student.device
        # Of a run that goes on, the one that was checked.
        self.teacher_fingerprint = self.start.state["teacher"] if self.start else model_fingerprint(self.teacher)
        self.layers = converted_layers(self.teacher, self.student.config)
        self.last_step, steps = {}, 0
        for phase in PHASES:
            steps += -(-getattr(recipe, phase).tokens // step_tokens(recipe, phase))
            self.last_step[phase] = steps
        self.steps = steps
        self.held_out = HeldOutRows(self.data, recipe.bootstrap, recipe.seed, recipe.evaluation.batch_size)
        self.step = self.tokens = 0
        self.train_seconds = 0.0
        self.phase: str | None = None
        self.teacher_scores: dict[int | None, list] = {}  # by the number of rows
        self.window: dict[str, float] = {}  # sums since the last record, and of how many steps
        self.autocast = functools.partial(
            torch.autocast, self.device.type, torch.bfloat16, enabled=self.precision == "bf16"
        )
        if self.start:
            state = self.start.state
            self.step, self.tokens, self.window = state["step"], state["tokens"], state["window"]
            self.train_seconds = state["train_seconds"]
            self.started -= state["seconds"]
            set_random_state(self.start.tensors("processes.pt")["random"], self.device)

    def begin(self, phase: str) -> None:
        """Make parameters, optimiser, schedule and data of a phase ready, at its start or where the checkpoint was."""
        recipe: PhaseRecipe = getattr(self.recipe, phase)
        index = PHASES.index(phase)
        first = self.last_step[PHASES[index - 1]] if index else 0
        steps = self.last_step[phase] - first
        self.phase, self.first_step = phase, first
        trained = "mixers" if phase == "align" else self.recipe.distil.trained
        parameters = trained_parameters(self.student, self.layers, trained)
        self.trained = parameters
        self.optimizer = build_optimizer(parameters, recipe)
        self.schedule = build_schedule(self.optimizer, recipe, steps)
        self.micro_batch_size = recipe.micro_batch_size or recipe.batch_size
        # The calibration has the seed itself: every phase reads the texts in an order of its own.
        self.batches = self.rows[phase].batches(self.micro_batch_size, seed=self.recipe.seed + 1 + index)
        if self.start and first < self.step:
            saved = self.start.tensors("optimizer.pt")
            self.optimizer.load_state_dict(saved["optimizer"])
            self.schedule.load_state_dict(saved["schedule"])
            self.batches.load_state_dict(self.start.tensors("processes.pt")["batches"])
        if phase == "align":
            self.align = LayerAlignment(self.teacher, self.student, self.layers)
        else:
            distil = self.recipe.distil
            self.distil = LogitDistillation(self.teacher, self.student, distil.ce_weight, distil.stream_weight)
        self.progress = Progress(steps, done=self.step - first)
        self.progress.say(
            f"{phase}: {steps:,} steps of {recipe.batch_size} x {row_length(self.recipe, phase)} tokens, "
            f"{sum(parameter.numel() for parameter in parameters):,} parameters train"
        )
        self.logged_at, self.since = self.step, time.perf_counter()

    def train(self) -> Path:
        """Take all steps that are left; returns the final model's folder. Raises `Interrupted` after a requested stop."""
        checkpoint = self.recipe.checkpoint
        if checkpoint.every_steps and not self.start:
            self.save(self.checkpoint_folder, is_resumable=True)  # the calibrated start, lest it be made again
        if self.is_watched():
            self.watch()
        while self.step < self.steps:
            phase = next(phase for phase in PHASES if self.step < self.last_step[phase])
            if phase != self.phase:
                self.begin(phase)
            self.advance()
            is_last, ends_phase = self.step == self.steps, self.step == self.last_step[phase]
            if self.interruption.received and not is_last:
                saved = self.save(self.checkpoint_folder, is_resumable=True)
                if self.window:
                    self.log_step()  # a run that goes on cuts it off again
                self.progress.close()
                raise Interrupted(
                    f"stopped after step {self.step} of {self.steps}; checkpoint in {saved}, go on with resume=true",
                    self.interruption.received,
                )
            pause = time.perf_counter()
            is_due = checkpoint.every_steps and (ends_phase or self.step % checkpoint.every_steps == 0)
            if is_due and not is_last:
                self.save(self.checkpoint_folder, is_resumable=True)
                prune_checkpoints(self.folder / "checkpoints", checkpoint.keep_last)
            if ends_phase:
                self.progress.close()
            # The last evaluation, of all its rows, follows; a curve of the same rows ends here.
            if self.is_watched() and not (is_last and self.recipe.evaluation.rows == self.recipe.evaluation.watch_rows):
                self.watch()
            self.since += time.perf_counter() - pause  # tokens/s counts training alone
        return self.save(self.folder / "final")

    def is_watched(self) -> bool:
        every = self.recipe.evaluation.every_steps
        return self.step in (0, *self.last_step.values()) or bool(every and self.step % every == 0)

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoints" / f"step-{self.step:06d}"

    def advance(self) -> None:
        """Take one step, and write the training record if one is due."""
        recipe: PhaseRecipe = getattr(self.recipe, self.phase)
        self.learning_rate = self.schedule.get_last_lr()[0] / self.schedule.base_lrs[0] * recipe.learning_rate
        parts = recipe.batch_size // self.micro_batch_size
        batches = [next(self.batches) for _ in range(parts)]
        batches = [{name: x.to(self.device) for name, x in batch.items()} for batch in batches]
        found: dict[str, float] = {}
        if self.phase == "align":
            for batch in batches:
                for layer, error in self.align(batch["input_ids"], self.autocast, 1 / parts).items():
                    found[f"layer {layer}"] = found.get(f"layer {layer}", 0.0) + error / parts
            loss = sum(found.values()) / len(found)
            groups = [list(self.align.mixers[layer].parameters()) for layer in self.layers]
        else:
            targets = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in batches)
            for batch in batches:
                for name, value in self.distil(batch, self.autocast, targets).items():
                    found[name] = found.get(name, 0.0) + value
            loss = found["kl"] + recipe.ce_weight * found["ce"] + recipe.stream_weight * found["stream"]
            groups = [self.trained]
        norms = torch.stack([torch.nn.utils.clip_grad_norm_(group, recipe.max_grad_norm) for group in groups])
        if not (torch.isfinite(norms).all() and torch.isfinite(torch.tensor(loss))):
            raise RunError(
                f"the loss is {loss} and the gradient's norm {norms.max().item()} at step {self.step + 1}: lower "
                f"{self.phase}.learning_rate and go on with resume=true"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        self.tokens += step_tokens(self.recipe, self.phase)
        for name, value in {"steps": 1.0, "loss": loss, "grad_norm": norms.max().item(), **found}.items():
            self.window[name] = self.window.get(name, 0.0) + value
        self.progress.advance()
        if self.step % self.recipe.train.log_every == 0 or self.step == self.last_step[self.phase]:
            self.log_step()

    def log_step(self) -> None:
        """Write the record of the steps since the last one: means over them."""
        now = time.perf_counter()
        elapsed, steps = now - self.since, self.step - self.logged_at
        self.train_seconds += elapsed
        count = self.window.pop("steps")
        means = {name: value / count for name, value in self.window.items()}
        by_layer = {name.removeprefix("layer "): means.pop(name) for name in list(means) if name.startswith("layer ")}
        self.window, self.logged_at, self.since = {}, self.step, now
        speed = steps * step_tokens(self.recipe, self.phase) / elapsed
        self.metrics.write(
            self.phase,
            step=self.step,
            tokens=self.tokens,
            **means,
            **({"by_layer": by_layer} if by_layer else {}),
            learning_rate=self.learning_rate,
            tokens_per_second=speed,
            seconds=now - self.started,
        )
        self.progress.show(self.step - self.first_step, means["loss"], speed)

    def watch(self) -> None:
        """Evaluate on a part of the held-out rows."""
        result = self.evaluate(self.recipe.evaluation.watch_rows, ablate=False)
        self.metrics.write("evaluation", step=self.step, tokens=self.tokens, sources=result)
        for line in describe_evaluation(result):
            print(f"after {self.tokens:,} training tokens: {line}", flush=True)

    def evaluate(self, rows: int | None, ablate: bool) -> list[dict]:
        """Perplexity on held-out rows of each source: teacher, student, and the student without its recurrence."""
        if rows not in self.teacher_scores:
            self.teacher_scores[rows] = self.held_out.score(self.teacher, rows, self.autocast)
        scores = {
            "teacher": self.teacher_scores[rows],
            "student": self.held_out.score(self.student, rows, self.autocast),
        }
        if ablate:
            with without_recurrence(self.student):
                scores["without_recurrence"] = self.held_out.score(self.student, rows, self.autocast)
        return self.held_out.summarise(scores)

    def save(self, folder: Path, is_resumable: bool = False) -> Path:
        """Write a model folder that `AutoModelForCausalLM.from_pretrained` loads, with all that going on from it needs.

        Raises:
            RunError: the weights are not finite, or the folder cannot be written.
        """
        weights = self.student.state_dict()
        if not all(bool(weight.isfinite().all()) for weight in weights.values()):
            raise RunError(f"the weights are not finite after step {self.step}: lower the learning rate")
        tensors = {}
        if is_resumable:
            trains = self.phase is not None
            tensors = {
                "optimizer.pt": {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
                if trains
                else {},
                "processes.pt": {
                    "batches": self.batches.state_dict() if trains else None,
                    "random": random_state(self.device),
                },
            }
        state = {
            "step": self.step,
            "steps": self.steps,
            "tokens": self.tokens,
            "window": self.window,
            "metrics_bytes": self.metrics.sync(),
            "train_seconds": self.train_seconds,
            "seconds": time.perf_counter() - self.started,
            "data": self.data.fingerprint,
            "teacher": self.teacher_fingerprint,
            "recipe": dataclasses.asdict(self.recipe),
        }
        with explain_failed_save(folder):
            save_checkpoint(folder, self.student, self.data.tokenizer, weights, state, tensors)
        return folder

    def finish(self, saved: Path) -> dict:
        """Judge the final model, and write plot, summary and card."""
        result = self.evaluate(self.recipe.evaluation.rows, ablate=True)
        self.metrics.write("evaluation", step=self.step, tokens=self.tokens, sources=result)
        try:
            probes = probe(self.recipe, self.data, {"teacher": self.teacher, "student": self.student}, self.autocast)
        except MeasurementError as error:
            raise RunError(f"evaluation.probes: {error}; the model is in {saved}") from None
        config = self.student.config
        summary = {
            "teacher": self.recipe.teacher.path,
            "mixer_types": config.mixer_types,
            "parameters": count_parameters(self.student),
            "precision": self.precision,
            "steps": self.step,
            "training_tokens": self.tokens,
            "evaluation": result,
            "probes": probes,
            "train_seconds": self.train_seconds,
            "seconds": time.perf_counter() - self.started,
        }
        title = f"{Path(self.recipe.teacher.path).name}: {describe_layers(config.mixer_types)}"
        plot_conversion(self.folder / "metrics.jsonl", self.folder / "loss.png", title)
        conversion_card(self.recipe, self.student, self.data, summary).save(saved / "README.md")
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        for line in describe_evaluation(result):
            print(line)
        print(
            f"{self.tokens:,} training tokens, {summary['seconds']:.0f} s in all\nmodel in {saved}, plot in "
            f"{self.folder / 'loss.png'}, metrics in {self.folder / 'metrics.jsonl'}",
            flush=True,
        )
        if self.recipe.hub_model_id is not None:
            print(f"sent to {upload_model(saved, self.recipe.hub_model_id)}")
        return summary


def probe(
    recipe: ConversionRecipe,
    data: TrainingData,
    models: Mapping[str, nn.Module],
    autocast: Callable[[], AbstractContextManager],
    **overrides,
) -> dict[str, dict]:
    """The recall probes that the recipe asks for: task -> name of the model -> records.

    `overrides` are options of a probe that go before the recipe's.

    Raises:
        MeasurementError: what a probe needs is not there.
    """
    if not recipe.evaluation.probes:
        return {}
    vocab_size = next(iter(models.values())).config.vocab_size
    alphabet = make_alphabet(data.tokenizer, vocab_size, recipe.probes.alphabet)
    options = {"seed": recipe.seed, **dataclasses.asdict(recipe.bootstrap), **overrides}
    results = {}
    for task in recipe.evaluation.probes:
        settings, run = recall_probe(task, recipe)
        results[task] = {}
        for name, model in models.items():
            with autocast():
                results[task][name] = run(model, alphabet, settings, **options)
    return results


def check_probes(recipe: ConversionRecipe, data: TrainingData, config: PreTrainedConfig) -> None:
    """Raises `SetupError` for a probe that cannot be run on models of `config`, before anything is computed."""
    try:
        probe(recipe, data, {"teacher": BlankModel(config)}, contextlib.nullcontext, samples=1)
    except MeasurementError as error:
        raise SetupError(f"evaluation.probes: {error}") from None


def load_teacher(recipe: ConversionRecipe, dtype: torch.dtype) -> PreTrainedModel:
    """The softmax model; raises `SetupError` where it cannot be loaded, or its positions do not reach."""
    refuse_adapter(recipe.teacher.path)
    path = Path(recipe.teacher.path).expanduser()
    try:
        teacher = load_causal_lm(str(path) if path.is_dir() else recipe.teacher.path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise SetupError(f"teacher.path={recipe.teacher.path} cannot be loaded: {error}") from None
    limit = teacher.config.max_position_embeddings
    for part in ("data", *PHASES):
        if (length := getattr(recipe, part).sequence_length or 0) > limit:
            raise SetupError(
                f"{part}.sequence_length={length} is beyond the teacher's max_position_embeddings={limit}: shorten the rows"
            )
    for name, weight in teacher.state_dict().items():
        if not weight.isfinite().all():
            raise SetupError(
                f"teacher.path={recipe.teacher.path}: {name} holds values that are not finite, so it cannot teach"
            )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return teacher.to(device).eval().requires_grad_(False)


def read_scores(file: str | None) -> list[float] | None:
    """The scores of the layers, one a layer, from a JSON file; raises `SetupError`."""
    if file is None:
        return None
    try:
        scores = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"layers.scores={file} cannot be read as JSON: {error}") from None
    numbers = isinstance(scores, list) and all(type(score) in (int, float) for score in scores)
    if not numbers or not all(map(math.isfinite, scores)):
        raise SetupError(f"layers.scores={file} must hold a list of finite numbers, one a layer, such as [0.1, 0.3]")
    return scores


def mixer_types(recipe: ConversionRecipe, num_layers: int) -> list[str]:
    """One spec a layer, as `layers` says; raises `SetupError`."""
    layers = recipe.layers
    for name, strategy in (("offset", "uniform"), ("softmax", "list"), ("scores", "score")):
        if getattr(layers, name) is not None and layers.strategy != strategy:
            raise SetupError(
                f"layers.{name} is for layers.strategy={strategy}, and the strategy is {layers.strategy}: leave one out"
            )
    scores = read_scores(layers.scores)
    try:
        kept = choose_softmax_layers(
            layers.strategy,
            num_layers,
            layers.count if layers.strategy != "list" else None,
            offset=layers.offset,
            seed=recipe.seed,
            layers=layers.softmax,
            scores=scores,
        )
    except ValueError as error:
        raise SetupError(f"layers: {error}") from None
    return place_mixers(num_layers, kept, layers.mixer)


def run_calibration(recipe: ConversionRecipe, teacher: PreTrainedModel, data: TrainingData) -> Calibration | None:
    """What the teacher's layers do on the first training tokens; `None` if the recipe asks for none."""
    settings, length = recipe.calibration, recipe.data.sequence_length
    if not settings.tokens:
        return None
    count = -(-settings.tokens // (4 * length))
    progress = Progress(count)
    progress.say(f"calibrate: {count * 4 * length:,} tokens through the teacher")

    def texts() -> Iterator[torch.Tensor]:
        batches = data.batches(4, seed=recipe.seed)
        for step in range(count):
            since = time.perf_counter()
            yield next(batches)["input_ids"]
            progress.advance()
            if not progress.on_terminal and step + 1 == count // 2:
                left = (time.perf_counter() - since) * (count - step - 1)
                progress.say(f"calibrate: half done, {left:.0f} s left")
        batches.close()

    try:
        return calibrate(teacher, texts(), fit_tokens=settings.fit_tokens)
    finally:
        progress.close()


def make_student(recipe: ConversionRecipe, teacher: PreTrainedModel, data: TrainingData) -> AvgPathForCausalLM:
    """The student at its start, calibrated if the recipe says so; raises `SetupError` for what cannot be converted."""
    specs = mixer_types(recipe, teacher.config.num_hidden_layers)
    try:
        config = conversion_config(teacher, specs, **recipe.config)
        if not converted_layers(teacher, config) and (recipe.align.tokens or recipe.distil.tokens):
            raise SetupError(
                f"no layer becomes another, so there is nothing to train: lower layers.count={recipe.layers.count}, or name "
                f"another layers.mixer than {recipe.layers.mixer}, which is what the layers are already"
            )
        calibration = run_calibration(recipe, teacher, data)
        began = time.perf_counter()

        def settled(done: int, layers: int) -> None:
            left = (time.perf_counter() - began) * (layers - done) / done
            if done % 5 == 1:
                print(f"calibrate: {done} of {layers} layers fitted, {left:.0f} s left", flush=True)

        student = from_softmax(
            teacher, specs, calibration=calibration, dtype=torch.float32, progress=settled, **recipe.config
        )
    except SetupError:
        raise
    except (ValueError, TypeError) as error:
        raise SetupError(f"{recipe.teacher.path} as {describe_layers(specs)}: {error}") from None
    return student


def check_start(recipe: ConversionRecipe, start: StartingPoint, fingerprint: str, teacher: PreTrainedModel) -> None:
    """Raises `SetupError` if a field, the data, or the teacher differs that the steps of the checkpoint have come from."""
    for key, (before, now) in recipe_changes(start.state["recipe"], recipe, FREE_ON_RESUME).items():
        raise start.refuse(key, before, now)
    if start.state["data"] != fingerprint:
        raise SetupError(
            f"resume=true: the texts ({describe_sources(recipe.data)}) have changed since the run began; put them back, or "
            "start anew in another output_dir"
        )
    if start.state["teacher"] != model_fingerprint(teacher):
        raise SetupError(
            f"resume=true: the weights of teacher.path={recipe.teacher.path} have changed since the run began; put them "
            "back, or start anew in another output_dir"
        )


def read_rows(recipe: ConversionRecipe, vocab_size: int) -> tuple[TrainingData, dict[str, TrainingData]]:
    """The data of the run, and those that each phase trains on: the same texts in rows of its length."""

    def prepare(length: int) -> TrainingData:
        data = dataclasses.replace(recipe.data, sequence_length=length)
        return prepare_data(data, TokenizerRecipe(path=recipe.teacher.path), vocab_size)

    data, rows = prepare(recipe.data.sequence_length), {}
    for phase in PHASES:
        length = row_length(recipe, phase)
        try:
            rows[phase] = data if length == recipe.data.sequence_length else prepare(length)
        except SetupError as error:
            raise SetupError(str(error).replace("data.sequence_length", f"{phase}.sequence_length")) from None
    return data, rows


def build_run(recipe: ConversionRecipe, interruption: Interruption) -> Conversion:
    """Make data, teacher, student and folder ready, fresh or from a checkpoint."""
    started = time.perf_counter()
    torch.manual_seed(recipe.seed)
    precision = choose_precision(recipe.train.mixed_precision)
    folder = Path(recipe.output_dir).expanduser()
    newest = newest_whole_checkpoint(folder, PRETRAIN_FILES, "convert") if recipe.resume else None
    start = StartingPoint.read(newest) if newest else None
    earlier_files(recipe)  # an occupied folder is told before anything is computed
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    teacher = load_teacher(recipe, dtype if start else torch.float32)  # the student is made from it in fp32
    data, rows = read_rows(recipe, teacher.config.vocab_size)
    check_probes(recipe, data, teacher.config)
    if start:
        check_start(recipe, start, data.fingerprint, teacher)
        student = load_causal_lm(str(start.folder), dtype=torch.float32).to(teacher.device).eval()
    else:
        student = make_student(recipe, teacher, data)
        if dtype != torch.float32:
            teacher = load_teacher(recipe, dtype)  # loaded anew: a cast would round the rotary frequencies too
    if recipe.hub_model_id is not None:
        recipe.hub_model_id = open_repository(recipe.hub_model_id, recipe.hub_private_repo)
    open_run_folder(recipe)
    remove_partial(folder)
    metrics = folder / "metrics.jsonl"
    truncate_metrics(metrics, start.state["metrics_bytes"] if start else 0)
    run = Conversion(
        recipe, folder, data, rows, teacher, student, MetricsLog(metrics), interruption, precision, started, start
    )
    print(
        f"{teacher.config.model_type} {recipe.teacher.path} -> {describe_layers(student.config.mixer_types)}, "
        f"{count_parameters(student):,} parameters\n{describe_sources(recipe.data)}: {data.validation_tokens:,} held-out "
        f"tokens\n{run.steps:,} steps on {run.device} (mixed precision: {precision})"
        + (f"\ngoes on from {start.folder}" if start else ""),
        flush=True,
    )
    if recipe.resume and start is None:
        warn("convert", f"{folder} holds no checkpoint to go on from, so the run begins at the beginning")
    return run


def convert(recipe: ConversionRecipe) -> dict:
    """Carry out `recipe`; returns the summary that the run's folder holds as ``summary.json``."""
    if PartialState(cpu=not torch.accelerator.is_available()).num_processes > 1:
        raise SetupError(
            "convert.py runs in one process: start it without accelerate launch, or with --num_processes 1"
        )
    keep_freed_memory()
    if finished := finished_run(recipe):
        summary, final = finished
        for key, (before, now) in recipe_changes(final.state["recipe"], recipe, FREE_WHEN_FINISHED).items():
            raise final.refuse(key, before, now, ", and the run is finished")
        warn("convert", f"{recipe.output_dir} holds a run that is finished, so there is nothing to go on with")
        return summary
    interruption = Interruption()
    run = build_run(recipe, interruption)
    with interruption:
        saved = run.train()
    with interruption.after_training(saved, "its evaluation was"):
        return run.finish(saved)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_script(
        "convert", lambda: convert(parse_recipe("convert", __doc__, EXAMPLES, arguments, ConversionRecipe))
    )


if __name__ == "__main__":
    sys.exit(main())
