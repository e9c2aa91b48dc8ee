# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints that are whole or absent, and a stop that waits for the step in hand."""

import json
import os
import shutil
import signal
import zipfile
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_avgpath.modeling_avgpath import faulty_files
from training.recipe import FinetuneRecipe, Recipe, SetupError, recipe_to_yaml

STATE_FILE = "training_state.json"
RUN_FILES = ("recipe.yaml", "metrics.jsonl", "loss.png", "summary.json", "sample.txt")
RUN_FOLDERS = ("checkpoints", "final", "adapter")
RESUMED = ("metrics.jsonl", "checkpoints")  # what a run that goes on needs of its beginning


def earlier_files(recipe: Recipe | FinetuneRecipe) -> list[str]:
    """What this run will remove of an earlier one in `output_dir`; raises `SetupError` if it may not."""
    folder = Path(recipe.output_dir).expanduser()
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


def save_checkpoint(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: dict, state: dict
) -> Path:
    """Write model, tokenizer, generation config and `state` to a sibling of `folder`, then rename it into place.

    A process killed at any moment leaves either the whole checkpoint or none; `AutoModelForCausalLM.from_pretrained`
    loads it.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary, state_dict=weights)
    tokenizer.save_pretrained(temporary)
    (temporary / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    os.rename(temporary, folder)
    return folder


def find_damage(checkpoint: Path) -> str | None:
    """What a checkpoint of Transformers' `Trainer` lacks to go on from, such as ``no scheduler.pt``; `None` if it is whole.

    Files are opened and not read through: a file cut short shows, a changed byte in the midst does not.
    """
    for pattern in ("*model[._]*", "optimizer*", "scheduler.pt", "rng_state*", "trainer_state.json"):
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


def prune_checkpoints(folder: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` of ``folder/step-*``."""
    for old in sorted(folder.glob("step-*"))[:-keep_last]:
        shutil.rmtree(old)


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

    def agreed(self, accelerator) -> bool:
        """True on every process once any of them was told to stop."""
        if accelerator.num_processes == 1:
            return bool(self.received)
        highest = accelerator.gather(torch.tensor([self.received], device=accelerator.device)).max()
        self.received = int(highest)
        return bool(self.received)
