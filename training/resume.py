# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Going on from a checkpoint of a run: which one, whether the recipe lets it, and the random generators."""

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training.checkpoint import PRETRAIN_FILES, STATE_FILE, find_damage, newest_whole_checkpoint
from training.optimization import decay_length
from training.recipe import Recipe, ScheduleRecipe, SetupError, nearest

# Fields that a run which goes on may change, as beginnings of their names: none of them alters the steps it has taken.
# `model` is compared as the config that it makes, and where the data lies by the data's fingerprint.
FREE_ON_RESUME = (
    "output_dir", "overwrite", "resume", "branch_from", "hub_", "license", "model", "validation.", "checkpoint.", "sample.",
    "tracking.", "data.path", "data.cache_dir", "data.workers", "tokenizer.path", "train.log_every",
    "train.micro_batch_size", "train.activation_checkpointing", "train.compile", "train.nonfinite",
)  # fmt: skip
# Fields that reach from the stable phase of a wsd schedule onwards alone.
FREE_WHILE_STABLE = ("train.steps", "schedule.decay_ratio", "schedule.decay_steps", "schedule.min_lr_ratio")


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, by dotted keys."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return flat


def changed_fields(before: dict, now: dict) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ, with both values; a key that only one side has counts as `None` there."""
    # As JSON keeps them: a tuple comes back as a list.
    old, new = (flatten(json.loads(json.dumps(side))) for side in (before, now))
    return {key: (old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)}


def recipe_changes(before: dict, now: Any, free: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """What differs between a recipe as it was saved and one now, but for fields whose names begin with one of `free`."""
    # A field that was not there when the older one was written had what is now its default.
    old = flatten(dataclasses.asdict(type(now)())) | flatten(before)
    changes = changed_fields(old, flatten(dataclasses.asdict(now)))
    return {key: values for key, values in changes.items() if not key.startswith(tuple(free))}


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """The checkpoint that a run of `pretrain.py` or `convert.py` goes on from; the checks but `refuse` are pretraining's.

    Attributes:
        folder: the checkpoint.
        state: what its `STATE_FILE` holds.
        is_branch: a new run begins here, in a folder of its own.
    """

    folder: Path
    state: dict
    is_branch: bool

    @classmethod
    def read(cls, folder: Path, is_branch: bool = False) -> "StartingPoint":
        """That of a whole checkpoint."""
        return cls(folder, json.loads((folder / STATE_FILE).read_text(encoding="utf-8")), is_branch)

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def branched_at(self) -> int | None:
        """The step at which this run left another one, if it did."""
        return self.step if self.is_branch else self.state["branched_at"]

    def tensors(self, name: str) -> Any:
        """What `torch.save` wrote as `name`."""
        return torch.load(self.folder / name, map_location="cpu", weights_only=True)

    def refuse(self, key: str, before: Any, now: Any, reason: str = "") -> SetupError:
        """The error for a recipe whose field `key` has changed where it may not."""
        what = f"branch_from={self.folder}" if self.is_branch else "resume=true"
        return SetupError(
            f"{what}: '{key}' was {before!r} when the run began and is {now!r} now{reason}; put it back, or start anew in "
            "another output_dir"
        )

    def check_recipe(self, recipe: Recipe, model_config: dict) -> None:
        """Raises `SetupError` if a field differs that the steps of the checkpoint have come from.

        Args:
            model_config: the config that ``recipe.model`` makes, as `to_dict` gives it.
        """
        free = (*FREE_ON_RESUME, *FREE_WHILE_STABLE)
        if self.is_branch:
            free += ("data.", "tokenizer.")
        for key, (before, now) in recipe_changes(self.state["recipe"], recipe, free).items():
            raise self.refuse(key, before, now)
        for key, (before, now) in changed_fields(self.state["model_config"], model_config).items():
            if key != "transformers_version":
                raise self.refuse(f"model.{key}", before, now)
        self._check_schedule(recipe)

    def _check_schedule(self, recipe: Recipe) -> None:
        before = self.state["recipe"]
        old_steps, old_schedule = before["train"]["steps"], ScheduleRecipe(**before["schedule"])
        changes = recipe_changes(before, recipe, FREE_ON_RESUME)
        changes = {key: values for key, values in changes.items() if key in FREE_WHILE_STABLE}
        if recipe.train.steps <= self.step and (self.is_branch or changes):
            raise SetupError(
                f"train.steps={recipe.train.steps} must be more than the {self.step} steps that {self.folder} has taken"
            )
        if not changes and not self.is_branch:
            return
        key, (old, new) = next(iter(changes.items()), ("train.steps", (old_steps, recipe.train.steps)))
        if recipe.schedule.name != "wsd":
            raise self.refuse(key, old, new, f", and a {recipe.schedule.name} schedule spans all steps")
        old_end = old_steps - decay_length(old_schedule, old_steps, self.state["branched_at"])
        new_end = recipe.train.steps - decay_length(recipe.schedule, recipe.train.steps, self.branched_at)
        if not recipe.schedule.warmup_steps <= self.step <= min(old_end, new_end):
            raise SetupError(
                f"{self.folder} is at step {self.step}, and '{key}' ({old!r} before, {new!r} now) can change in the stable "
                f"phase alone: from step {recipe.schedule.warmup_steps} to {min(old_end, new_end)}. Branch from such a "
                "checkpoint with branch_from=FOLDER, if one was kept (checkpoint.keep_last)"
            )

    def check_data(self, recipe: Recipe, fingerprint: str, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the data is that of the checkpoint, so that its position in it holds; a branch may have other data.

        Raises:
            SetupError: a run that goes on finds other data, or a branch another vocabulary.
        """
        if fingerprint == self.state["data"]:
            return True
        fields = {key: values for key, values in recipe_changes(self.state["recipe"], recipe, ()).items()
                  if key.startswith(("data.", "tokenizer.")) and key != "data.cache_dir"}  # fmt: skip
        if not self.is_branch:
            for key, (before, now) in fields.items():
                raise self.refuse(key, before, now, ", and the data differs")
            raise SetupError(
                f"resume=true: the training data (data.path={recipe.data.path}, or how it is written as tokens) has changed "
                "since the run began; put it back, or start anew in another output_dir"
            )
        if AutoTokenizer.from_pretrained(self.folder).get_vocab() != tokenizer.get_vocab():
            raise SetupError(
                f"branch_from={self.folder}: the tokenizer of the new data differs; give tokenizer.path={self.folder}"
            )
        return False


def finished_run(recipe: Any) -> tuple[dict, StartingPoint] | None:
    """The summary and the final model of the finished run that `recipe`, of any script, would go on with."""
    file = Path(recipe.output_dir).expanduser() / "summary.json"
    final = file.parent / "final"
    if not (recipe.resume and file.exists() and (final / STATE_FILE).exists()):
        return None
    return json.loads(file.read_text(encoding="utf-8")), StartingPoint.read(final)


def find_start(recipe: Recipe) -> StartingPoint | None:
    """The checkpoint to go on or to branch from; `None` begins with fresh weights.

    Raises:
        SetupError: the checkpoint to branch from is missing or damaged, or those to go on from all are.
    """
    folder = Path(recipe.output_dir).expanduser()
    if recipe.resume and (newest := newest_whole_checkpoint(folder, PRETRAIN_FILES, "pretrain")):
        return StartingPoint.read(newest)
    if recipe.branch_from is None:
        return None
    source = Path(recipe.branch_from).expanduser()
    if not source.is_dir():
        near = nearest(source.name, [path.name for path in source.parent.glob("step-*")])
        raise SetupError(f"branch_from={source}: no such checkpoint folder{near}")
    if damage := find_damage(source, PRETRAIN_FILES):
        raise SetupError(
            f"branch_from={source} is no whole checkpoint ({damage}); it must be one of checkpoints/ in a run's folder"
        )
    return StartingPoint.read(source, is_branch=True)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of this process's random generators: Python's, NumPy's, PyTorch's on the CPU and on `device`."""
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "cpu": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` gave."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
