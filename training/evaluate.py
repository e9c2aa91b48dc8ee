# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Judge a causal language model: perplexity by position and document, and recall of random tokens.

Any model that Transformers loads can be judged, so AvgPath, Llama and others compare: bits per byte and the probes' gains
do not depend on the tokenizer. Writes evaluation.json, evaluation.md and evaluation.png. Started plainly
(`python training/evaluate.py model.path=runs/pretrain/final`) or by `accelerate launch`, which shares the work out.
"""

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: Python put this folder on the path, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import training  # noqa: F401  (before the libraries, which it keeps quiet while they are imported)

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from modeling_avgpath import AvgPathForCausalLM  # also registers model_type avgpath
from modeling_avgpath.cache_files import stored_tensors
from training.data import Document, load_documents, split_documents
from training.modeling import count_parameters, load_causal_lm, refuse_adapter
from training.perplexity import DocumentScores, count_bytes, score_carried, score_windows, summarise
from training.probes import MeasurementError, estimate, make_alphabet, position_limit, recall_probe
from training.recipe import EvaluatedModelRecipe, EvaluationRecipe, SetupError, recipe_to_yaml
from training.report import describe_perplexity, plot_report, write_markdown
from training.script import Interrupted, parse_recipe, run_script

EXAMPLES = """  python training/evaluate.py
  python training/evaluate.py model.path=HuggingFaceTB/SmolLM2-135M output_dir=runs/evaluate/smollm model.dtype=bfloat16
  python training/evaluate.py tasks=perplexity model.quantization=int8 output_dir=runs/evaluate/int8
  python training/evaluate.py tasks=perplexity perplexity.carry_state=true perplexity.extrapolate=true
  python training/evaluate.py tasks=[lookup,copying] probes.alphabet=words probes.samples=128
  accelerate launch --num_processes 2 training/evaluate.py overwrite=true
"""
NOTES = """Nothing is written before the end. Relative paths of recipes are looked up from the working folder, then from the
repository.
"""
FILES = ("recipe.yaml", "evaluation.json", "evaluation.md", "evaluation.png")


def check_output(recipe: EvaluationRecipe) -> Path:
    """The folder to write to; raises `SetupError` if an evaluation is there and the recipe does not say ``overwrite``."""
    folder = Path(recipe.output_dir).expanduser()
    if (folder / "evaluation.json").exists() and not recipe.overwrite:
        raise SetupError(
            f"{folder} holds an evaluation; choose another output_dir=..., or replace it with overwrite=true"
        )
    return folder


def find_model(recipe: EvaluationRecipe) -> str:
    """The model's folder or Hub name; raises `SetupError` where it can be neither."""
    path = Path(recipe.model.path).expanduser()
    refuse_adapter(recipe.model.path)
    if path.is_dir():
        return str(path)
    if recipe.model.path.count("/") != 1 or recipe.model.path.startswith((".", "/", "~")):
        raise SetupError(f"model.path={recipe.model.path}: no such folder (seen from {Path.cwd()})")
    return recipe.model.path


def quantization_config(model: EvaluatedModelRecipe, config: PreTrainedConfig):
    """The `quantization_config` of `from_pretrained` that `model.quantization` names."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig
    except ImportError as error:
        raise SetupError(
            f"model.quantization={model.quantization} needs torchao ({error}): pip install -e '.[evaluate]'"
        ) from None
    if getattr(config, "quantization_config", None) is not None:
        raise SetupError(
            f"model.quantization={model.quantization}: this checkpoint is quantised already; leave model.quantization out"
        )
    kept = model.unquantized
    if kept is None and config.model_type == "avgpath":
        kept = AvgPathForCausalLM.modules_to_not_convert
    return TorchAoConfig(Int8WeightOnlyConfig(version=2), modules_to_not_convert=kept)


def load_model(recipe: EvaluationRecipe, quantized: bool, device: torch.device) -> PreTrainedModel:
    """The model to judge, in evaluation mode; raises `SetupError` naming what is missing."""
    model, source = recipe.model, find_model(recipe)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code)
        options = {"quantization_config": quantization_config(model, config)} if quantized else {}
        loaded = load_causal_lm(source, dtype=model.dtype, trust_remote_code=model.trust_remote_code, **options)
    except SetupError:
        raise
    except (OSError, ValueError) as error:
        raise SetupError(f"model.path={model.path} cannot be loaded: {error}") from None
    return loaded.to(device).eval()


def load_tokenizer(recipe: EvaluationRecipe) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the model."""
    path = recipe.model.tokenizer or find_model(recipe)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(f"no tokenizer in {path} (model.tokenizer names another one): {error}") from None


@dataclasses.dataclass
class Evaluation:
    """What the tasks share. Every process has one, does its part of each task, and gets the whole result."""

    recipe: EvaluationRecipe
    state: PartialState
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        bootstrap = self.recipe.bootstrap
        self.bootstrap = {
            "confidence": bootstrap.confidence,
            "resamples": bootstrap.resamples,
            "seed": self.recipe.seed,
        }

    def say(self, text: str) -> None:
        if self.state.is_main_process:
            print(text, flush=True)

    def share(self, items: list, work: Callable[[list], list]) -> list:
        """``work(items)``, each process doing its share; the results come back in the items' order, on every process."""
        rank, processes = self.state.process_index, self.state.num_processes
        mine = list(range(rank, len(items), processes))
        results = list(zip(mine, work([items[index] for index in mine]) if mine else [], strict=True))
        results = gather_object(results) if processes > 1 else results
        return [result for _, result in sorted(results, key=lambda pair: pair[0])]

    # Perplexity.

    def documents(self) -> list[Document]:
        """The documents to read, as `data` says."""
        data = self.recipe.data
        documents = load_documents(data.path, data.text_field)
        if data.split == "held_out":
            _, documents = split_documents(documents, data.validation_every)
        return documents[: data.max_documents]

    def tokenise(self, documents: list[Document]) -> list[list[int]]:
        """Token ids of each document, without special ones."""
        texts = [document.text for document in documents]
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def check_tokens(self, tokens: list[list[int]], config) -> None:
        """Raises `SetupError` if the model cannot read `tokens`, cut as they will be read."""
        settings = self.recipe.perplexity
        highest = max(max(row) for row in tokens)
        vocab_size = config.get_text_config().vocab_size
        if highest >= vocab_size:
            raise SetupError(
                f"the tokenizer gives ids up to {highest} but the model's vocab_size is {vocab_size}: they do not belong "
                "together; name the right one with model.tokenizer=..."
            )
        limit = None if settings.extrapolate else position_limit(config)
        bos = settings.bos != "none"
        if limit is None:
            return
        allow = "or allow it with perplexity.extrapolate=true"
        if settings.window > limit:
            raise SetupError(
                f"perplexity.window={settings.window} is longer than the model's max_position_embeddings={limit}: shorten "
                f"it, {allow}"
            )
        longest = max(map(len, tokens)) - 1 + bos  # inputs: the last token is only predicted
        if settings.carry_state and longest > limit:
            raise SetupError(
                f"perplexity.carry_state: a document of {longest} tokens is longer than the model's "
                f"max_position_embeddings={limit}: cut documents with perplexity.max_tokens={limit - bos + 1}, {allow}"
            )

    def bos(self) -> int | None:
        """The token that begins a document: <bos>, or <eos> where the tokenizer has no <bos>."""
        if self.recipe.perplexity.bos == "none":
            return None
        bos = self.tokenizer.bos_token_id
        bos = self.tokenizer.eos_token_id if bos is None else bos
        if bos is None:
            raise SetupError(
                "the tokenizer has neither <bos> nor <eos> to begin a document with: set perplexity.bos=none"
            )
        return bos

    def score_documents(self, model: PreTrainedModel, tokens: list[list[int]]) -> list[DocumentScores]:
        """Read every document as `perplexity` says."""
        settings = self.recipe.perplexity
        common = {"bos": self.bos(), "batch_tokens": self.recipe.batch_tokens}
        if settings.carry_state:
            return self.share(tokens, lambda mine: score_carried(model, mine, chunk=settings.window, **common))
        windows = {"window": settings.window, "stride": settings.stride, "bos_in_each": settings.bos == "window"}
        return self.share(tokens, lambda mine: score_windows(model, mine, **windows, **common))

    def perplexity(self, model: PreTrainedModel, unquantized: PreTrainedModel | None) -> dict:
        """Figures of the documents together and one by one; with a model to compare with, also the change from it."""
        documents = self.documents()
        whole = self.tokenise(documents)
        tokens = [row[: self.recipe.perplexity.max_tokens] for row in whole]
        self.check_tokens(tokens, model.config)
        scores = self.score_documents(model, tokens)
        counts = [len(document.nll) for document in scores]
        sizes = [
            count_bytes(document.text, len(row), count)
            for document, row, count in zip(documents, whole, counts, strict=True)
        ]
        result = summarise(scores, sizes, **self.bootstrap)
        result["documents"] = [
            {
                "group": document.group,
                "opening": " ".join(document.text[:60].split()),
                **one_document(document_scores, size),
            }
            for document, document_scores, size in zip(documents, scores, sizes, strict=True)
        ]
        if unquantized is not None:
            reference = self.score_documents(unquantized, tokens)
            before = [document.nll.sum() for document in reference]
            change = [document.nll.sum() - nats for document, nats in zip(scores, before, strict=True)]
            result["unquantized"] = {
                "loss": estimate(before, counts, **self.bootstrap),
                "perplexity": estimate(before, counts, scale=np.exp, **self.bootstrap),
                "nbytes": model_nbytes(unquantized),
            }
            # The same documents are drawn for both models, so the interval is that of the change itself.
            result["change"] = {
                "loss": estimate(change, counts, **self.bootstrap),
                "perplexity_ratio": estimate(change, counts, scale=np.exp, **self.bootstrap),
            }
        return result

    # Probes.

    def probe(self, task: str, model: PreTrainedModel) -> list[dict]:
        """The records of one probe, one per setting."""
        recipe = self.recipe
        alphabet = make_alphabet(self.tokenizer, model.config.get_text_config().vocab_size, recipe.probes.alphabet)
        settings, run = recall_probe(task, recipe)
        options = {"batch_tokens": recipe.batch_tokens, **self.bootstrap}
        return self.share(settings, lambda mine: run(model, alphabet, mine, **options))


def one_document(scores: DocumentScores, size: float) -> dict:
    """Figures of a single document."""
    loss = float(scores.nll.mean())
    bits = float(scores.nll.sum() / np.log(2) / size)
    return {"tokens": len(scores.nll), "loss": loss, "perplexity": float(np.exp(loss)), "bits_per_byte": bits}


def model_nbytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters, tied ones once."""
    return sum(tensor.nbytes for parameter in model.parameters() for tensor in stored_tensors(parameter.data))


def evaluate(recipe: EvaluationRecipe) -> dict:
    """Carry out `recipe`; returns what ``evaluation.json`` holds."""
    started = time.perf_counter()
    state = PartialState(cpu=not torch.accelerator.is_available())  # else it would not see processes on CPUs
    folder = check_output(recipe)
    quantized = recipe.model.quantization is not None
    run = Evaluation(recipe, state, load_tokenizer(recipe))
    model = load_model(recipe, quantized, state.device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"output_dir={recipe.output_dir} cannot be written: {error}") from None
    config = model.config
    result: dict[str, Any] = {
        "model": recipe.model.path,
        "model_type": config.model_type,
        "mixer_types": getattr(config, "mixer_types", None),
        "parameters": count_parameters(model),
        "nbytes": model_nbytes(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": recipe.model.quantization,
        "vocabulary": len(run.tokenizer),
        "recipe": dataclasses.asdict(recipe),
    }
    run.say(
        f"{config.model_type} in {recipe.model.path}, {result['parameters']:,} parameters, "
        f"{recipe.model.quantization or result['dtype']}, on {state.device}"
    )
    try:
        for task in dict.fromkeys(recipe.tasks):
            since = time.perf_counter()
            if task == "perplexity":
                unquantized = load_model(recipe, False, state.device) if quantized else None
                result[task] = run.perplexity(model, unquantized)
                run.say(describe_perplexity(result[task]))
            else:
                result[task] = run.probe(task, model)
            run.say(f"{task}: {time.perf_counter() - since:.0f} s")
    except MeasurementError as error:
        raise SetupError(f"{task}: {error}") from None
    except KeyboardInterrupt:
        raise Interrupted("stopped; nothing was written", signal.SIGINT) from None
    result["seconds"] = time.perf_counter() - started
    if state.is_main_process:
        (folder / "recipe.yaml").write_text(recipe_to_yaml(recipe), encoding="utf-8")
        (folder / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (folder / "evaluation.md").write_text(write_markdown(result), encoding="utf-8")
        plot_report(result, folder / "evaluation.png")
        run.say(f"{folder / 'evaluation.md'}, with .json and .png beside it; {result['seconds']:.0f} s in all")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for a mistake in the set-up, 130 after Ctrl-C."""
    return run_script(
        "evaluate", lambda: evaluate(parse_recipe("evaluate", __doc__, EXAMPLES, arguments, EvaluationRecipe, NOTES))
    )


if __name__ == "__main__":
    sys.exit(main())
