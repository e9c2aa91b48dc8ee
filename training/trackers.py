# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Experiment trackers, through Accelerate: which ones, under which name, and how a run that goes on finds its place."""

import dataclasses
import importlib.util
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from training.recipe import Recipe, SetupError, nearest

# Accelerate's name of a tracker -> the modules that it needs one of, and what to install.
PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    "trackio": (("trackio",), "trackio"),
    "wandb": (("wandb",), "wandb"),
    "aim": (("aim",), "aim"),
    "clearml": (("clearml",), "clearml"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "dvclive": (("dvclive",), "dvclive"),
    "mlflow": (("mlflow",), "mlflow"),
    "swanlab": (("swanlab",), "swanlab"),
}
FOLDER = "tracking"
WITHOUT_CURVES = ("step", "tokens", "seconds")  # the axes; a tracker draws over steps


def is_installed(tracker: str) -> bool:
    """Whether a package that the tracker needs is there."""
    return any(importlib.util.find_spec(module) for module in PACKAGES[tracker][0])


def choose_trackers(trackers: list[str] | None) -> list[str]:
    """The trackers to use: those named, or TensorBoard where it is installed.

    Raises:
        SetupError: an unknown name, or a package that is missing.
    """
    if trackers is None:
        return ["tensorboard"] if is_installed("tensorboard") else []
    for name in trackers:
        if name not in PACKAGES:
            raise SetupError(f"tracking.trackers: unknown tracker '{name}'{nearest(name, PACKAGES)}")
        if not is_installed(name):
            raise SetupError(
                f"tracking.trackers: {name} is not installed: pip install {PACKAGES[name][1]}, or leave it out"
            )
    return list(dict.fromkeys(trackers))


def tracking_options(recipe: Recipe) -> dict[str, Any]:
    """What `Accelerator` is made with to have the recipe's trackers; raises `SetupError` as `choose_trackers` does."""
    folder = Path(recipe.output_dir).expanduser()
    return {
        "log_with": choose_trackers(recipe.tracking.trackers) or None,
        "project_config": ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / FOLDER)),
    }


def start_trackers(
    accelerator: Accelerator, recipe: Recipe, step: int | None, records: Sequence[tuple[str, dict]] = ()
) -> None:
    """Open the trackers of a run, whose folder is there, and tell them its recipe.

    A run that goes on after `step` writes where it wrote before. TensorBoard forgets what was written from that step on, and
    is told `records`, the run's own of that step, again; wandb goes on in the run of the same id, in which a step is taken
    once. Others get the run of the same name.

    Args:
        accelerator: made with `tracking_options`.
        step: the step that the run goes on after, `None` for one that begins.
        records: (kind, values) as `curves` takes them.
    """
    if not accelerator.log_with:
        return
    tracking, folder = recipe.tracking, Path(accelerator.logging_dir)
    name = tracking.run_name or folder.resolve().parent.name
    identity = folder / "run_id"
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        if step is None or not identity.exists():
            identity.write_text(uuid.uuid4().hex[:16] + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {} if step is None else {"purge_step": step},
        "trackio": {"name": name, "resume": "never" if step is None else "allow"},
        "wandb": {
            "name": name,
            "id": identity.read_text(encoding="utf-8").strip(),
            "resume": "allow",
            "dir": str(folder),
            **({"mode": "offline"} if tracking.offline else {}),
        },
    }
    # TensorBoard would open another folder of hyper-parameters each time that a run goes on.
    settings = flatten_settings(dataclasses.asdict(recipe)) if step is None else None
    accelerator.init_trackers(tracking.project, settings, options)
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            for kind, values in records:
                tracker.log(curves(kind, values), step=values["step"])


def finish_trackers(accelerator: Accelerator) -> None:
    """Have all trackers write what they hold. (`Accelerator.end_training` would take the process group along.)"""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers.clear()


def curves(kind: str, values: Mapping[str, Any]) -> dict[str, float | str]:
    """A record of `metrics.jsonl` as named values for trackers, such as ``validation/loss``; texts stay texts."""
    named: dict[str, float | str] = {}
    for key, value in values.items():
        if key in WITHOUT_CURVES or value is None:
            continue
        if key == "by_position":
            named |= {f"{kind}_by_position/{bucket['from']}-{bucket['to']}": bucket["loss"] for bucket in value}
        elif key == "by_source":
            named |= {f"{kind}_by_source/{source['name']}": source["loss"] for source in value}
        elif key == "layers":
            for layer in value:
                named |= {f"{kind}/{layer['layer']} {name}": norm for name, norm in layer["norms"].items()}
        elif isinstance(value, int | float | str):
            named[f"{kind}/{key}"] = value
    return named


def flatten_settings(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe by dotted keys, with values that every tracker takes: numbers and texts."""
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            flat[prefix + key] = value
        else:
            flat[prefix + key] = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    return flat
