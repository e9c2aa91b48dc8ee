# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints that are whole or absent, and a stop that waits for the step in hand."""

import contextlib
import json
import os
import shutil
import signal
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_avgpath.modeling_avgpath import faulty_files
from training.recipe import FinetuneRecipe, Recipe, RunError, SetupError, recipe_to_yaml
from training.script import Interrupted, warn

STATE_FILE = "training_state.json"
# What a checkpoint must hold to go on from, as patterns: one of Transformers' `Trainer`, and one of `pretrain.py`.
TRAINER_FILES = ("*model[._]*", "optimizer*", "scheduler.pt", "rng_state*", "trainer_state.json")
PRETRAIN_FILES = ("*model[._]*", "config.json", "optimizer.pt", "processes.pt", STATE_FILE)
RUN_FILES = ("recipe.yaml", "metrics.jsonl", "loss.png", "training.png", "summary.json", "sample.txt", "samples.jsonl")
RUN_FOLDERS = ("checkpoints", "final", "adapter", "tracking")
RESUMED = (
    "metrics.jsonl",
    "samples.jsonl",
    "checkpoints",
    "tracking",
)  # what a run that goes on needs of its beginning


def earlier_files(recipe: Recipe | FinetuneRecipe) -> list[str]:
    """What this run will remove of an earlier one in `output_dir`.

    Raises:
        SetupError: it may not remove it, or the folder lies among the texts, where a run's files would be taken for some.
    """
    folder = Path(recipe.output_dir).expanduser()
    data = recipe.data
    sources = [source.path for source in getattr(data, "sources", ())]
    for path in (data.path, getattr(data, "validation_path", None), *sources):
        if path and Path(path).expanduser().is_dir():
            texts = Path(path).expanduser().resolve()
            if folder.resolve().is_relative_to(texts):
                raise SetupError(
                    f"output_dir={recipe.output_dir} lies within the folder of texts {path}, where the run's own files "
                    "would be read as texts: choose one outside"
                )
    earlier = [name for name in (*RUN_FILES, *RUN_FOLDERS) if (folder / name).exists()]
    if getattr(recipe, "resume", False):
        return [name for name in earlier if name not in RESUMED]
    if earlier and not recipe.overwrite:
        is_finished = (folder / "summary.json").exists()
        go_on = ", go on with resume=true" if hasattr(recipe, "resume") and not is_finished else ""
        what = "a finished run" if is_finished else "an unfinished run"
        raise SetupError(
            f"{folder} holds {what}; choose another output_dir=...{go_on}, or replace it with overwrite=true"
        )
    return earlier


def open_run_folder(recipe: Recipe | FinetuneRecipe) -> Path:
    """Create `output_dir` and write the resolved recipe there.

    Raises `SetupError` if an earlier run is there and the recipe says neither ``overwrite`` nor ``resume``. Overwriting
    removes what a run writes and nothing else; resuming keeps its checkpoints and metrics.
    """
    folder = Path(recipe.output_dir).expanduser()
    earlier = earlier_files(recipe)
    for name in earlier:
        if name in RUN_FOLDERS:
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(recipe_to_yaml(recipe), encoding="utf-8")
    except OSError as error:
        raise SetupError(f"output_dir={recipe.output_dir} cannot be written: {error}") from None
    return folder


def commit_folder(temporary: Path, folder: Path) -> None:
    """Rename `temporary`, a finished folder beside `folder`, into its place once all of it is on the disk."""
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)  # a damaged one, or that of a run that went on since
    os.rename(temporary, folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def remove_partial(folder: Path) -> None:
    """Remove what a killed run left below `folder` of what it was writing or removing."""
    for leftover in [*folder.glob(".*.partial"), *(folder / "checkpoints").glob(".*.partial")]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


@contextlib.contextmanager
def explain_failed_save(folder: Path, partial: Path | None = None) -> Iterator[None]:
    """Turns a failure to write `folder` into a `RunError` that says what is kept; what was written of it is removed.

    Args:
        partial: where it was written to; by default where `save_checkpoint` does.
    """
    try:
        yield
    except Exception as error:
        # PyTorch, safetensors and tokenizers each have an error of their own for a full disk.
        if not isinstance(error, OSError | RuntimeError | SafetensorError) and "os error" not in str(error):
            raise
        shutil.rmtree(partial or _partial(folder), ignore_errors=True)
        reason = str(error).strip().splitlines()[0]
        free = shutil.disk_usage(folder.parent).free / 2**20 if folder.parent.exists() else 0
        is_checkpoint = folder.parent.name == "checkpoints"
        kept = sorted_checkpoints(folder.parent if is_checkpoint else folder.parent / "checkpoints")
        kept_words = f"{kept[-1]} is whole" if kept else "no checkpoint was written before"
        raise RunError(
            f"{folder} could not be written ({reason}); {free:,.0f} MiB are free there. {kept_words}: make room and go on "
            "with resume=true"
        ) from error


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: dict,
    state: dict,
    tensors: dict[str, Any] | None = None,
) -> Path:
    """Write model, tokenizer, generation config and `state` to a sibling of `folder`, then rename it into place.

    A process killed at any moment leaves either the whole checkpoint or none; `AutoModelForCausalLM.from_pretrained`
    loads it.

    Args:
        weights: what the model's weights file will hold.
        state: goes to `STATE_FILE` as JSON.
        tensors: further files, by name: what `torch.save` will write.

    Raises:
        Exception: the disk is full or fails; `explain_failed_save` tells.
    """
    temporary = _partial(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary, state_dict=weights)
    tokenizer.save_pretrained(temporary)
    for name, value in (tensors or {}).items():
        torch.save(value, temporary / name)
    (temporary / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    commit_folder(temporary, folder)
    return folder


def find_damage(checkpoint: Path, patterns: Sequence[str] = TRAINER_FILES) -> str | None:
    """What a checkpoint lacks to go on from, such as ``no scheduler.pt``; `None` if it is whole.

    Files are opened and not read through: a file cut short shows, a changed byte in the midst does not.
    """
    for pattern in patterns:
        if not any(checkpoint.glob(pattern)):
            return f"no {pattern}"
    faults = faulty_files(checkpoint)
    if faults["missing"]:
        return f"no {faults['missing'][0]}"
    if faults["damaged"]:
        return f"{faults['damaged'][0]} cannot be read"
    for file in sorted(checkpoint.iterdir()):
        try:
            if file.suffix in (".pt", ".pth", ".bin"):
                zipfile.ZipFile(file).close()
            elif file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, zipfile.BadZipFile):
            return f"{file.name} cannot be read"
    return None


def checkpoint_step(checkpoint: Path | str) -> int:
    """The step in the name of a checkpoint, such as step-000400 or checkpoint-400."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def sorted_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    return sorted(
        (path for path in folder.glob("[!.]*-*") if path.name.rpartition("-")[2].isdigit()), key=checkpoint_step
    )


def newest_whole_checkpoint(run_folder: Path, patterns: Sequence[str], script: str) -> Path | None:
    """The newest checkpoint of a run that is whole, after a warning by `script` for each newer one that is not.

    `None` if the run has none yet.

    Raises:
        SetupError: it has some, and all are damaged.
    """
    checkpoints = sorted_checkpoints(run_folder / "checkpoints")
    for checkpoint in reversed(checkpoints):
        damage = find_damage(checkpoint, patterns)
        if damage is None:
            return checkpoint
        warn(script, f"{checkpoint} is damaged ({damage}), so it is skipped")
    if checkpoints:
        raise SetupError(
            f"resume=true: {run_folder} holds no whole checkpoint to go on from; leave it out to start anew"
        )
    return None


def prune_checkpoints(folder: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` of ``folder/step-*``."""
    for old in sorted_checkpoints(folder)[:-keep_last]:
        os.rename(old, _partial(old))  # a kill leaves none by halves
        shutil.rmtree(_partial(old))


class Interruption:
    """Turns the first Ctrl-C or SIGTERM into a request to stop; the second Ctrl-C stops at once.

    `received` is the signal's number, or 0. By custom a program that a signal stops exits with 128 plus that number.
    """

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = number

    @contextlib.contextmanager
    def after_training(self, saved: Path, what: str) -> Iterator[None]:
        """Around what follows the last step. A signal, even one from within that step, ends it; the model is in `saved`.

        Args:
            what: is cut short then, with its verb, such as "its evaluation was".

        Raises:
            Interrupted: a signal came.
        """
        try:
            if self.received:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            number = self.received or signal.SIGINT
            raise Interrupted(f"training is complete, model in {saved}; {what} cut short", number) from None

    def agreed(self, accelerator) -> bool:
        """True on every process once any of them was told to stop."""
        if accelerator.num_processes == 1:
            return bool(self.received)
        highest = accelerator.gather(torch.tensor([self.received], device=accelerator.device)).max()
        self.received = int(highest)
        return bool(self.received)
