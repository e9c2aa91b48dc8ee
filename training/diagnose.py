# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Diagnose a softmax model: how well does each step from softmax attention to a recurrent memory hold, layer by layer?

Writes diagnosis.json and maps.safetensors (`Diagnosis.load` of modeling_avgpath.diagnosis reads them), diagnosis.md,
scores.json (how much each layer should stay softmax, one number a layer, for convert.py), heads.png and layers.png. What
the figures mean stands at the end of diagnosis.md.
"""

import json
import random
import signal
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # started as a file: Python put this folder on the path, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import training  # noqa: F401  (before the libraries, which it keeps quiet while they are imported)

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from modeling_avgpath.diagnosis import GATE_WINDOWS, PASSES, DiagnosisRun, DiagnosisSettings
from modeling_avgpath.diagnosis_report import LOSS_STEPS, STATISTICS, Diagnosis
from training.data import load_documents, split_documents
from training.modeling import count_parameters, load_causal_lm, refuse_adapter
from training.recipe import DiagnoseRecipe, RunError, SetupError, nearest, recipe_to_yaml
from training.script import Interrupted, parse_recipe, run_script
from training.tracking import BLUE, GREY, RED, plt, tidy

EXAMPLES = """  python training/diagnose.py
  python training/diagnose.py model.path=HuggingFaceTB/SmolLM2-135M model.dtype=bfloat16 output_dir=runs/diagnose/smollm
  python training/diagnose.py memories=[gated_delta_net,mesa_net] data.windows=64 loss_windows=null
  python training/diagnose.py memories=[] data.path=wiki output_dir=runs/diagnose/wiki
  python training/diagnose.py resume=true
"""
NOTES = """Ctrl-C ends the run; at most the last minute of it is lost to resume=true. Relative paths of recipes are looked up
from the working folder, then from the repository.
"""
RESULT, STATE = "diagnosis.json", "state.pt"
SECONDS_BETWEEN_LINES = 10.0
GATE_COST = 15.0  # in forward passes, for each window that gates are chosen on
DRAWN_STATISTICS = ("v_static", "v_mesa_net", "mean_field_gap", "mean_key_affine", "sink_mass", "distance")


def check_output(recipe: DiagnoseRecipe) -> Path:
    """The folder to write to; raises `SetupError` if something is there and the recipe does not say what to do with it."""
    folder = Path(recipe.output_dir).expanduser()
    if recipe.overwrite:
        return folder
    if (folder / RESULT).exists():
        raise SetupError(
            f"{folder} holds a diagnosis; choose another output_dir=..., or replace it with overwrite=true"
        )
    if (folder / STATE).exists() != recipe.resume:
        raise SetupError(
            f"resume=true: {folder / STATE} does not exist, so there is nothing to go on from"
            if recipe.resume
            else f"{folder} holds an interrupted diagnosis; go on with resume=true, or begin anew with overwrite=true"
        )
    return folder


def load_model(recipe: DiagnoseRecipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on its device, and its tokenizer; raises `SetupError` naming what is missing."""
    model = recipe.model
    refuse_adapter(model.path)
    source = Path(model.path).expanduser()
    if not source.is_dir() and (model.path.count("/") != 1 or model.path.startswith((".", "/", "~"))):
        raise SetupError(f"model.path={model.path}: no such folder (seen from {Path.cwd()})")
    source = str(source) if source.is_dir() else model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer or source, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(
            f"no tokenizer in {model.tokenizer or source} (model.tokenizer names another one): {error}"
        ) from None
    try:
        loaded = load_causal_lm(source, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
    except SetupError:
        raise
    except (OSError, ValueError) as error:
        raise SetupError(f"model.path={model.path} cannot be loaded: {error}") from None
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return loaded.to(device).eval(), tokenizer


def make_windows(recipe: DiagnoseRecipe, tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    """Windows of token ids, each with <bos> first, drawn without overlap from the joined documents.

    Raises:
        SetupError: the documents are too short, or the tokenizer has neither <bos> nor <eos>.
    """
    data = recipe.data
    documents = load_documents(data.path, data.text_field)
    if data.split != "all":
        documents = split_documents(documents, data.validation_every)[data.split == "held_out"]
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else bos
    if bos is None:
        raise SetupError("the tokenizer has neither <bos> nor <eos>, and a window must begin as a text does")
    texts = [document.text for document in documents[: data.max_documents]]
    stream = [
        token for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] for token in (*ids, eos)
    ]
    size = data.window - 1  # beside <bos>
    places = len(stream) // size
    if places < data.windows:
        raise SetupError(
            f"data.path={data.path} has {len(stream):,} tokens, {places} windows of data.window={data.window}: ask for "
            "fewer with data.windows=..., for shorter ones, or give more text"
        )
    chosen = random.Random(recipe.seed).sample(range(places), data.windows)
    return [torch.tensor([bos, *stream[place * size : (place + 1) * size]]) for place in chosen]


class Watcher:
    """Progress of `diagnose` in words, with the time left; a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, windows: dict[str, int], layers: int, memories: int):
        self.windows = windows  # of each pass
        # In forward passes of the model, about: a layer that is replaced takes three rows through half of it on average.
        # The windows that gates are chosen on are read with many of them.
        self.cost = {"scales": 1.0, "fit": 4.0, "reads": 3.0, "measure": 4.0, "losses": 1 + 1.5 * layers * memories}
        self.total = self.place(PASSES[-1], windows[PASSES[-1]])
        self.first: float | None = None  # where this run began: an interrupted one goes on in the middle
        self.started = self.told = time.monotonic()
        self.bar = tqdm(
            total=self.total, disable=not sys.stderr.isatty(), bar_format="{percentage:3.0f}% {bar} {desc}{postfix}"
        )

    def place(self, name: str, done: int) -> float:
        """What has been done after so many windows of a pass."""
        before = PASSES[: PASSES.index(name)]
        counts = {**{earlier: self.windows[earlier] for earlier in before}, name: done}
        gates = GATE_COST * min(GATE_WINDOWS, counts.get("fit", 0))
        return sum(self.cost[passed] * count for passed, count in counts.items()) + gates

    def __call__(self, name: str, done: int, windows: int) -> None:
        """What `diagnose` calls after each window."""
        place, now = self.place(name, done), time.monotonic()
        if self.first is None:
            self.first = self.place(name, done - 1)
        left = (self.total - place) * (now - self.started) / (place - self.first)
        self.bar.n = place
        self.bar.set_description_str(f"{name} {done}/{windows}", refresh=False)
        self.bar.set_postfix_str(f", about {tqdm.format_interval(left)} left")
        if self.bar.disable and (now - self.told > SECONDS_BETWEEN_LINES or done == windows):
            print(f"{name}: window {done} of {windows}, about {tqdm.format_interval(left)} left", flush=True)
            self.told = now

    def close(self) -> None:
        self.bar.close()


def run_diagnosis(recipe: DiagnoseRecipe) -> Diagnosis:
    """Carry out `recipe`."""
    started = time.perf_counter()
    folder = check_output(recipe)
    if recipe.score not in (None, "loss_change", *STATISTICS):
        raise SetupError(
            f"score={recipe.score} is no figure of a diagnosis{nearest(recipe.score, STATISTICS)}; known: loss_change, "
            f"{', '.join(STATISTICS)}"
        )
    if recipe.score == "loss_change" and not recipe.memories:
        raise SetupError("score=loss_change needs losses: name some memories")
    model, tokenizer = load_model(recipe)
    windows = make_windows(recipe, tokenizer)
    if recipe.overwrite:
        (folder / STATE).unlink(missing_ok=True)
    try:
        settings = DiagnosisSettings(
            fit_windows=recipe.fit_windows,
            groups=recipe.groups,
            clip=recipe.clip,
            memories=recipe.memories,
            loss_windows=recipe.loss_windows,
            layers=recipe.layers,
            confidence=recipe.bootstrap.confidence,
            resamples=recipe.bootstrap.resamples,
            seed=recipe.seed,
        )
        run = DiagnosisRun(model, windows, settings, folder / STATE)
    except (ValueError, TypeError) as error:
        raise SetupError(str(error)) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"output_dir={recipe.output_dir} cannot be written: {error}") from None
    (folder / RESULT).unlink(missing_ok=True)  # which overwrite=true allows: from here on the old one is gone
    print(
        f"{model.config.model_type} in {recipe.model.path}, {count_parameters(model):,} parameters, "
        f"{str(model.dtype).removeprefix('torch.')}, on {model.device}; {len(windows)} windows of "
        f"{recipe.data.window} tokens",
        flush=True,
    )
    counts = {name: len(read) for name, read in run.windows.items()}
    run.progress = watcher = Watcher(counts, len(run.layers), len(recipe.memories))
    try:
        run.run()
    except FloatingPointError as error:
        raise RunError(str(error)) from None
    except KeyboardInterrupt:
        raise Interrupted("stopped; resume=true goes on from the last window that was saved", signal.SIGINT) from None
    finally:
        watcher.close()
    found = run.result()
    write_results(found, recipe, folder, model.config.num_hidden_layers)
    (folder / STATE).unlink(missing_ok=True)
    print(found.summary())
    print(
        f"{folder / 'diagnosis.md'}, with figures and pictures beside it; {time.perf_counter() - started:.0f} s in all"
    )
    return found


def write_results(found: Diagnosis, recipe: DiagnoseRecipe, folder: Path, num_layers: int) -> None:
    """All files but the state, for a model of so many layers."""
    (folder / "recipe.yaml").write_text(recipe_to_yaml(recipe), encoding="utf-8")
    pictures = "![Heads](heads.png)\n\n![Layers](layers.png)\n"
    (folder / "diagnosis.md").write_text(f"{found.markdown()}\n{pictures}", encoding="utf-8")
    needs = found.softmax_needs(recipe.score)
    scores = [needs.get(layer, min(needs.values())) for layer in range(num_layers)]  # what was not asked for can wait
    (folder / "scores.json").write_text(json.dumps(scores) + "\n", encoding="utf-8")
    plot_heads(found, folder / "heads.png")
    plot_layers(found, folder / "layers.png")
    found.save(folder)  # last: it marks the diagnosis as done


def plot_heads(found: Diagnosis, image: Path) -> None:
    """Heat maps, layers by heads, of `DRAWN_STATISTICS`."""
    figure, all_axes = plt.subplots(
        2, 3, figsize=(10.5, 2.2 + 0.22 * len(found.layers)), dpi=160, layout="constrained", squeeze=False
    )
    for axes, name in zip(all_axes.flat, DRAWN_STATISTICS, strict=True):
        statistic = STATISTICS[name]
        values = [[value.mean for value in layer.heads[name]] for layer in found.layers]
        is_share = statistic.unit == "share"
        shown = axes.imshow(
            values, aspect="auto", cmap="viridis", vmin=0 if is_share else None, vmax=1 if is_share else None
        )
        axes.set(title=statistic.title, xlabel=f"{statistic.heads} head", ylabel="layer")
        axes.set_xticks(range(len(values[0])))
        step = max(1, len(found.layers) // 10)
        axes.set_yticks(range(0, len(found.layers), step), [layer.layer for layer in found.layers[::step]])
        figure.colorbar(shown, ax=axes, label="tokens" if not is_share else None)
    figure.suptitle(f"{found.model}: by head", x=0.01, ha="left", fontsize=10)
    figure.savefig(image)
    plt.close(figure)


def plot_layers(found: Diagnosis, image: Path) -> None:
    """Means over heads by layer, with intervals as bands, and the loss change of each step."""
    memories = found.settings["memories"] if found.loss is not None else []
    figure, all_axes = plt.subplots(
        1,
        2 + len(memories),
        figsize=(0.6 + 3.8 * (2 + len(memories)), 3.6),
        dpi=160,
        layout="constrained",
        squeeze=False,
    )
    places = [layer.layer for layer in found.layers]
    panels: list[tuple[str, list[tuple[str, str, str]]]] = [
        ("values from keys", [("v_static", BLUE, "linear map"), ("v_mesa_net", RED, "mesa, online"),
                              ("v_gated_delta_net", GREY, "gated delta, online")]),
        ("mean key from the query", [("mean_key_affine", RED, "affine map of q"),
                                     ("mean_key_gaussian", BLUE, "m + Sigma q / sqrt(d)"),
                                     ("sink_mass", GREY, "sink mass")]),
    ]  # fmt: skip
    for axes, (title, lines) in zip(all_axes[0], panels, strict=False):
        for name, color, label in lines:
            _band(axes, places, [layer.mean[name] for layer in found.layers], color, label)
        axes.set(xlabel="layer", ylabel="share", title=title, ylim=(-0.25, 1.02))
    for axes, memory in zip(all_axes[0, 2:], memories, strict=True):
        for step, color in zip(LOSS_STEPS[1:], (BLUE, GREY, RED), strict=True):
            _band(
                axes, places, [layer.loss_change[memory][step] for layer in found.layers], color, step.replace("_", " ")
            )
        axes.set(xlabel="layer", ylabel="change of the loss (nats per token)", title=f"one layer as {memory}")
        axes.set_yscale("symlog", linthresh=0.01)
    for axes in all_axes[0]:
        tidy(axes)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{found.model}: by layer", x=0.01, ha="left", fontsize=10)
    figure.savefig(image)
    plt.close(figure)


def _band(axes, places, estimates, color: str, label: str) -> None:
    axes.plot(places, [value.mean for value in estimates], color=color, marker="o", ms=3, lw=1.4, label=label)
    if all(value.low is not None for value in estimates):
        axes.fill_between(
            places,
            [value.low for value in estimates],
            [value.high for value in estimates],
            color=color,
            alpha=0.18,
            lw=0,
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for a mistake in the set-up, 130 after Ctrl-C."""
    return run_script(
        "diagnose", lambda: run_diagnosis(parse_recipe("diagnose", __doc__, EXAMPLES, arguments, DiagnoseRecipe, NOTES))
    )


if __name__ == "__main__":
    sys.exit(main())
