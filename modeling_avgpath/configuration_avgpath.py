# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""AvgPath configuration and the grammar of mixer specs.

A layer's token mixer is written `memory` or `memory@readout`: what a layer remembers, and how it is read. The grammar
lives here, free of torch, so that a config can be parsed and checked anywhere.
"""

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError
from huggingface_hub.file_download import REGEX_COMMIT_HASH
from transformers.configuration_utils import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_imports
from transformers.modeling_rope_utils import RopeParameters
from transformers.utils import cached_file, logging

logger = logging.get_logger(__name__)

# Auto class -> its class in modeling_avgpath.py: the package registers these, and checkpoints name them in their auto_map.
HEADS: dict[str, str] = {
    "AutoModel": "AvgPathModel",
    "AutoModelForCausalLM": "AvgPathForCausalLM",
    "AutoModelForSequenceClassification": "AvgPathForSequenceClassification",
    "AutoModelForTokenClassification": "AvgPathForTokenClassification",
    "AutoModelForQuestionAnswering": "AvgPathForQuestionAnswering",
}
AUTO_MAP: dict[str, str] = {
    "AutoConfig": "configuration_avgpath.AvgPathConfig",
    **{auto_class: f"modeling_avgpath.{head}" for auto_class, head in HEADS.items()},
}

# Memory -> the readouts it takes, the default first. Softmax memories have one way to be read and take no suffix.
# `identity` (mu(k) = k) read at the query would return the query itself, so it is read through attention only.
MEMORIES: dict[str, tuple[str, ...]] = {
    "softmax": (),
    "sliding_softmax": (),
    "identity": ("mean_field", "expectation"),
    "linear": ("query", "mean_field", "expectation"),
    "delta_net": ("query", "mean_field", "expectation"),
    "gated_delta_net": ("query", "mean_field", "expectation"),
    "mesa_net": ("query", "mean_field", "expectation"),
    "ttt_linear": ("query", "mean_field", "expectation"),
    "ttt_mlp": ("query", "mean_field", "expectation"),
}


class MixerSpec(NamedTuple):
    """A parsed token-mixer spec: the memory's name and its readout (`None` for the softmax memories)."""

    memory: str
    readout: str | None

    def __str__(self) -> str:
        """The canonical spelling: the readout is written unless it is `query`."""
        return self.memory if self.readout in (None, "query") else f"{self.memory}@{self.readout}"

    @property
    def layer_type(self) -> str:
        """The Transformers layer type, which says what the layer keeps in the cache."""
        if self.memory == "softmax":
            return "full_attention"
        if self.memory == "sliding_softmax":
            return "sliding_attention"
        return "linear_attention" if self.readout == "query" else "hybrid"

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer keeps a fitted, fixed-size state (all memories but softmax, its window and `identity`)."""
        return self.memory not in ("softmax", "sliding_softmax", "identity")


def parse_mixer_spec(spec: str) -> MixerSpec:
    """Parse a spec such as `"delta_net"` or `"mesa_net@mean_field"`.

    Raises:
        TypeError: `spec` is not a string.
        ValueError: unknown memory, or a readout that the memory does not take; the message lists the allowed ones.
    """
    if not isinstance(spec, str):
        raise TypeError(f"A mixer spec is a string like 'delta_net' or 'mesa_net@mean_field', got {spec!r}.")
    memory, at, readout = spec.partition("@")
    if memory not in MEMORIES:
        near = difflib.get_close_matches(memory, MEMORIES, n=1)
        raise ValueError(
            f"Unknown memory {memory!r} in mixer spec {spec!r}{f': did you mean {near[0]!r}?' if near else '.'} Known "
            f"memories: {', '.join(MEMORIES)}; a newer version of AvgPath may have others."
        )
    allowed = MEMORIES[memory]
    if not at:
        return MixerSpec(memory, allowed[0] if allowed else None)
    if not allowed:
        raise ValueError(f"Memory {memory!r} has one readout and takes no suffix: write {memory!r}, not {spec!r}.")
    if readout not in allowed:
        options = ", ".join(f"'{memory}@{name}'" for name in allowed)
        raise ValueError(f"Memory {memory!r} cannot be read by {readout!r} (spec {spec!r}). Allowed: {options}.")
    return MixerSpec(memory, readout)


def parse_hybrid_ratio(ratio: str) -> tuple[int, int]:
    """Parse `"R:S"`, recurrent to softmax layers in each group, into `(R, S)`.

    Raises:
        ValueError: not of the form R:S with integers R, S >= 0 that are not both 0.
    """
    parts = ratio.split(":") if isinstance(ratio, str) else []
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"hybrid_ratio must be 'R:S' with integers R, S >= 0 (recurrent to softmax layers), like '3:1', '1:0' (all "
            f"recurrent) or '0:1' (all softmax); got {ratio!r}."
        )
    recurrent, softmax = (int(part) for part in parts)
    if recurrent == softmax == 0:
        raise ValueError(f"hybrid_ratio {ratio!r} names no layer at all: at least one of R and S must be positive.")
    return recurrent, softmax


def collect_code(find: Callable[[str], str | os.PathLike | None]) -> tuple[dict[str, Path], list[str]]:
    """The source files that models are made of, as Transformers' loader of remote code follows their imports.

    Args:
        find: from a file's name to its path, or `None` where there is none.

    Returns:
        the files found by name, and the names of those that are missing.
    """
    found, missing, names = {}, [], ["modeling_avgpath.py"]
    while names:
        name = names.pop()
        if name in found or name in missing:
            continue
        path = find(name)
        if path is None or not os.path.isfile(path):
            missing.append(name)
        else:
            found[name] = Path(path)
            names += [f"{module}.py" for module in get_relative_imports(path)]
    return found, sorted(missing)


def _is_carried(entry: str | list[str | None], folder: str | os.PathLike) -> bool:
    """Whether an entry of an auto_map, not one of ours, leads to another repository or to a file in `folder`.

    Tokenizers have two references in an entry, either of which may be `None`.
    """
    references = [entry] if isinstance(entry, str) else entry
    files = [f"{reference.split('.')[0]}.py" for reference in references if reference and "--" not in reference]
    own = {f"{reference.split('.')[0]}.py" for reference in AUTO_MAP.values()}
    return all(file not in own and os.path.isfile(os.path.join(folder, file)) for file in files)


class ConfigTypeError(StrictDataclassFieldValidationError, TypeError):
    """A field of a config has a value of another type: `@strict`'s error, in one line."""

    def __init__(self, message: str):
        Exception.__init__(self, message)


def name_types(config_class: type) -> type:
    """Decorator on top of `@strict`: a value of a wrong type raises `ConfigTypeError`, which says what to give instead."""
    checked_setattr, expected = config_class.__setattr__, config_class.__annotations__
    hint = " Write a list of specs, like ['delta_net', 'softmax']; one for all recurrent layers goes into mixer."

    def __setattr__(self, name, value):
        try:
            checked_setattr(self, name, value)
        except StrictDataclassFieldValidationError as error:
            if name not in expected or isinstance(error, ConfigTypeError):
                raise
            kind = expected[name].__name__ if isinstance(expected[name], type) else expected[name]
            raise ConfigTypeError(
                f"{name} must be {kind}, got {value!r} ({type(value).__name__})."
                f"{hint if name in ('layer_pattern', 'mixer_types') else ''}"
            ) from None

    config_class.__setattr__ = __setattr__
    return config_class


@name_types
@strict
class AvgPathConfig(PreTrainedConfig):
    r"""
    Configuration of an AvgPath hybrid language model.

    The token mixer of each layer is chosen in one of three ways; the most explicit one given wins:
    `mixer_types` (one spec per layer), `layer_pattern` (specs tiled over the layers), or `mixer` + `hybrid_ratio`.

    Args:
        vocab_size (`int`, defaults to 32000): Number of token ids.
        hidden_size (`int`, defaults to 768): Width of the residual stream.
        intermediate_size (`int`, defaults to 2048): Width of the gated MLP.
        num_hidden_layers (`int`, defaults to 12): Number of decoder layers.
        num_attention_heads (`int`, defaults to 12): Query heads of softmax, `identity`, mean-field and expectation layers.
        num_key_value_heads (`int`, *optional*): Key (and value) heads of those layers; defaults to `num_attention_heads`.
        head_dim (`int`, *optional*): Head width of those layers; defaults to `hidden_size // num_attention_heads`.
        hidden_act (`str`, defaults to `"silu"`): Activation of the MLP's gate.
        max_position_embeddings (`int`, defaults to 8192): Longest sequence (tokens) the rotary embedding is set up for.
        initializer_range (`float`, defaults to 0.02): Standard deviation of initial weight matrices.
        rms_norm_eps (`float`, defaults to 1e-6): Epsilon of every RMSNorm.
        use_cache (`bool`, defaults to `True`): Whether forward passes return a cache by default.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Special token ids.
        tie_word_embeddings (`bool`, defaults to `False`): Whether the LM head shares the input embedding.
        rope_parameters (`dict`, *optional*): Rotary embedding of the layers that score by softmax (`rope_theta`,
            `rope_type`, ...); defaults to the plain form with theta 10000. `partial_rotary_factor` in it rotates the first
            channels of each head only.
        use_rope (`bool`, defaults to `True`): `False` gives softmax scores without rotary embedding (NoPE).
        use_qk_norm (`bool`, defaults to `False`): RMSNorm on queries and keys before softmax scoring.
        qk_norm_type (`str`, defaults to `"per_head"`): What `use_qk_norm` normalises: `"per_head"` each head, with one
            weight for all (Qwen3), `"per_layer"` all heads joined (OLMo 2).
        attention_output_gate (`bool`, defaults to `False`): Multiplies the averages of `softmax`, `sliding_softmax` and
            `identity` layers by the sigmoid of a gate computed from the layer's input (Qwen3-Next).
        softmax_post_norm (`bool`, defaults to `False`): `softmax` and `sliding_softmax` layers normalise what their mixer
            and MLP return, before the residual sum, instead of what goes in (OLMo 2).
        attention_bias (`bool`, defaults to `False`): Biases in the softmax layers' q/k/v/o projections.
        attention_dropout (`float`, defaults to 0.0): Dropout probability of attention weights while training.
        mlp_bias (`bool`, defaults to `False`): Biases in the MLP.
        sliding_window (`int`, *optional*): Tokens a `sliding_softmax` layer sees, the current one included. Required by it.
        num_sink_tokens (`int`, defaults to 0): First tokens of a text that `sliding_softmax` layers see besides the window.
        mixer (`str`, defaults to `"mesa_net"`): Spec of the recurrent layers, see `hybrid_ratio`.
        hybrid_ratio (`str`, defaults to `"3:1"`): `"R:S"`: groups of R layers of `mixer` followed by S softmax layers,
            tiled over the depth. `"1:0"` is all recurrent, `"0:1"` all softmax.
        layer_pattern (`list[str]`, *optional*): Specs tiled over the layers, instead of `mixer` and `hybrid_ratio`.
        mixer_types (`list[str]`, *optional*): One spec per layer, wins over both. Always resolved after construction.
        layer_types (`list[str]`, *optional*): Derived from `mixer_types`, what each layer caches: `full_attention`,
            `sliding_attention`, `linear_attention` (state only) or `hybrid` (keys only, plus state).
        linear_num_key_heads (`int`, *optional*): Query and key heads of recurrent layers read at the query; defaults to
            `num_attention_heads`.
        linear_num_value_heads (`int`, *optional*): Value heads, hence states, of those layers: a multiple of
            `linear_num_key_heads`, to which it defaults.
        linear_key_head_dim (`int`, *optional*): Width of their query and key heads; defaults to `head_dim`.
        linear_value_head_dim (`int`, *optional*): Width of their value heads; defaults to `linear_key_head_dim`.
        linear_conv_kernel_dim (`int`, *optional*, defaults to 4): Kernel (tokens) of the causal short convolution, with
            SiLU, on q, k and v (mesa: q and k) of the recurrent memories except TTT. `None` leaves it out, SiLU included.
        linear_allow_neg_eigval (`bool`, defaults to `False`): Doubles the delta rules' step size to the range (0, 2), which
            permits negative eigenvalues of the state transition.
        linear_use_gates (`bool`, defaults to `True`): Data-dependent decay and write strength of the `linear` memory;
            `False` gives plain linear attention (both fixed to 1).
        linear_norm_eps (`float`, *optional*): Epsilon of the output norm of recurrent memories except TTT; defaults to
            `rms_norm_eps`.
        linear_use_output_norm (`bool`, defaults to `True`): Per-head RMSNorm on what a recurrent memory returns
            (TTT: LayerNorm over all heads joined).
        linear_use_output_gate (`bool`, defaults to `True`): Multiplies it by a gate computed from the layer's input
            (SiLU; TTT: tanh-approximated GELU).
        linear_output_gate_activation (`str`, defaults to `"silu"`): `"silu"` or `"sigmoid"`, for that gate (TTT's excepted).
        query_map (`bool`, defaults to `False`): Learned affine map per head (identity at the start) of the query of layers
            with readout `query`: the cheap repair of the step from the mean key to the query. It acts right after the
            query projection and can be folded into it.
        linear_a_log_min, linear_a_log_max (`float`, default to 0.0 and 16.0): Range of the uniform draw whose logarithm
            initialises `A_log`, the decay rate of `gated_delta_net`.
        linear_dt_min, linear_dt_max, linear_dt_init_floor (`float`, default to 0.001, 0.1 and 1e-4): Range, and floor, of
            its initial time step (log-uniform).
        mesa_max_cg_steps (`int`, defaults to 30): Limit of conjugate-gradient steps of `mesa_net`.
        mesa_tolerance (`float`, defaults to 1e-6): Relative residual at which the solve stops.
        mesa_lambda_min (`float`, defaults to 0.25): Lower bound of the ridge, per key channel.
        mesa_lambda_init (`float`, defaults to 1.0): Initial ridge, above `mesa_lambda_min`.
        ttt_mini_batch_size (`int`, defaults to 16): Tokens whose inner gradients are taken at the same weights.
        ttt_base_lr (`float`, *optional*): Inner learning rate; defaults to 1.0 for `ttt_linear` and 0.1 for `ttt_mlp`.
        ttt_inner_norm (`bool`, defaults to `True`): Residual LayerNorm form f(x) = x + LN(mu(x)); `False` is plain
            least squares.
        ttt_rope_theta (`float`, defaults to 10000.0): Base of the rotary embedding inside a mini-batch (readout `query`).
        ttt_conv_kernel_dim (`int`, *optional*): Kernel (tokens) of a short convolution on TTT's q, k and v; default none.

    Raises:
        TypeError: a field has a value of another type than the one declared below.
        ValueError: unknown mixers or readouts, malformed ratios, heads that do not divide, a missing `sliding_window`, a
            list of the wrong length, sizes out of range. The message names the value and what is allowed.

    Example:

    ```python
    >>> from modeling_avgpath import AvgPathConfig

    >>> AvgPathConfig(mixer="delta_net", hybrid_ratio="3:1", num_hidden_layers=4).mixer_types
    ['delta_net', 'delta_net', 'delta_net', 'softmax']
    ```
    """

    model_type = "avgpath"
    keys_to_ignore_at_inference = ["cache"]
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 8192
    initializer_range: float | int = 0.02
    rms_norm_eps: float | int = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    use_rope: bool = True
    use_qk_norm: bool = False
    qk_norm_type: str = "per_head"
    attention_output_gate: bool = False
    softmax_post_norm: bool = False
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    mlp_bias: bool = False
    sliding_window: int | None = None
    num_sink_tokens: int = 0

    mixer: str = "mesa_net"
    hybrid_ratio: str = "3:1"
    layer_pattern: list[str] | None = None
    mixer_types: list[str] | None = None
    layer_types: list[str] | None = None

    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = 4
    linear_allow_neg_eigval: bool = False
    linear_use_gates: bool = True
    linear_norm_eps: float | int | None = None
    linear_use_output_norm: bool = True
    linear_use_output_gate: bool = True
    linear_output_gate_activation: str = "silu"
    query_map: bool = False
    linear_a_log_min: float | int = 0.0
    linear_a_log_max: float | int = 16.0
    linear_dt_min: float | int = 0.001
    linear_dt_max: float | int = 0.1
    linear_dt_init_floor: float | int = 1e-4

    mesa_max_cg_steps: int = 30
    mesa_tolerance: float | int = 1e-6
    mesa_lambda_min: float | int = 0.25
    mesa_lambda_init: float | int = 1.0

    ttt_mini_batch_size: int = 16
    ttt_base_lr: float | int | None = None
    ttt_inner_norm: bool = True
    ttt_rope_theta: float | int = 10000.0
    ttt_conv_kernel_dim: int | None = None

    def __post_init__(self, **kwargs):
        self._check_positive(
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
        )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                    f"({self.num_attention_heads}): change one of them or set head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.linear_num_key_heads is None:
            self.linear_num_key_heads = self.num_attention_heads
        if self.linear_num_value_heads is None:
            self.linear_num_value_heads = self.linear_num_key_heads
        if self.linear_key_head_dim is None:
            self.linear_key_head_dim = self.head_dim
        if self.linear_value_head_dim is None:
            self.linear_value_head_dim = self.linear_key_head_dim
        self._resolve_mixer_types()
        self.validate_architecture()  # here too, for a plain ValueError; `@strict` wraps what its validators raise
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """`PreTrainedConfig.from_dict`, for checkpoints too that newer code has written or that are not whole.

        Raises:
            FileNotFoundError: run as the remote code of a local checkpoint, some of whose code files are missing.
            ValueError: a field is wrong, or has a value, such as a mixer, that this version does not know.
        """
        name = str(kwargs.get("name_or_path") or config_dict.get("_name_or_path") or "")
        if os.path.isdir(name) and AUTO_MAP["AutoModel"] in (config_dict.get("auto_map") or {}).values():
            cls._check_code(name)
        try:
            return super().from_dict(config_dict, **kwargs)
        except (ValueError, TypeError, StrictDataclassError) as error:
            source = os.path.join(name, "config.json") if name else "The configuration"
            given = ", ".join(sorted(kwargs.keys() & cls.__dataclass_fields__.keys()))
            raise ValueError(
                f"{source}{f', with the given {given},' if given else ''} is nothing that this version of AvgPath "
                f"({__file__}) can read. {error} Correct the value. If a newer version wrote the checkpoint, upgrade the "
                "avgpath package; or, if newer code lies beside config.json, load it with trust_remote_code=True in a "
                "process that does not import modeling_avgpath."
            ) from error

    @staticmethod
    def _check_code(folder: str) -> None:
        _, missing = collect_code(Path(folder).joinpath)
        # Run from the installed package, no code of the checkpoint's is needed.
        if missing and collect_code(Path(__file__).parent.joinpath)[1]:
            raise FileNotFoundError(
                f"The checkpoint in {folder} carries its own code, but {', '.join(missing)} is missing from it. Copy the "
                "missing file from where the checkpoint came from; or install the avgpath package and import "
                "modeling_avgpath before loading, which needs no code in the checkpoint."
            )

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """`PreTrainedConfig.save_pretrained`; beside config.json it leaves the code that loads it, and every head, with
        `trust_remote_code=True`, so that a checkpoint needs no package.

        A subclass of this class brings code of its own, by `register_for_auto_class`.
        """
        # Read before anything is written: the code may come from the very folder that is saved to.
        code = self._read_code(save_directory) if type(self) is AvgPathConfig else {}
        entries = getattr(self, "auto_map", None) or {}
        entries = {name: entry for name, entry in entries.items() if _is_carried(entry, save_directory)}
        self.auto_map = {**(AUTO_MAP if code else {}), **entries}
        if not self.auto_map:
            del self.auto_map
        super().save_pretrained(save_directory)
        folders = [Path(save_directory).resolve()]
        if folders[0].name.startswith("checkpoint-"):
            # A Trainer that pushes on its way sends the folder above, into which it copies config.json but no code.
            folders.append(folders[0].parent)
        for folder in folders:
            for name, content in code.items():
                Path(folder, name).write_bytes(content)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def _read_code(self, save_directory: str | os.PathLike) -> dict[str, bytes]:
        """The models' source files by name, from the first place that has them all; empty if none has.

        The package has them. A config that was loaded as remote code from a folder is alone in Transformers' cache of
        modules: then its model may have just put them into `save_directory`, else they are where the config came from.
        """
        here = Path(__file__).parent
        revision = here.name if REGEX_COMMIT_HASH.match(here.name) else None  # Hub code is cached by its commit

        def fetch(name: str) -> str | None:
            try:
                return cached_file(self.name_or_path, name, revision=revision)
            except OSError:  # not there, or no longer reachable
                return None

        places = [here.joinpath, Path(save_directory).joinpath, fetch]
        for find in places if self.name_or_path else places[:2]:
            found, missing = collect_code(find)
            if not missing:
                return {name: path.read_bytes() for name, path in found.items()}
        logger.warning(
            f"The code of AvgPath's models was not found where this config came from ({self.name_or_path or 'unknown'}), so "
            f"it is saved to {save_directory} without it: to load models from there takes the avgpath package."
        )
        return {}

    def __setattr__(self, name, value):
        is_done = getattr(self, "_post_init_done", False)
        is_tiled = is_done and name == "num_hidden_layers" and self.mixer_types == self._tiled_specs()
        super().__setattr__(name, value)
        if not is_done:
            return
        # Overrides of from_pretrained arrive here: the layers follow whichever description was changed last.
        if name == "mixer_types" and value is not None:
            specs = [parse_mixer_spec(spec) for spec in value]
            super().__setattr__("mixer_types", [str(spec) for spec in specs])
            self.layer_types = [spec.layer_type for spec in specs]
        elif name in ("mixer", "hybrid_ratio", "layer_pattern"):
            if name != "layer_pattern":
                super().__setattr__("layer_pattern", None)
            self.mixer_types = self._tiled_specs()
        elif is_tiled:
            self.mixer_types = self._tiled_specs()
        elif name == "num_hidden_layers" and len(self.mixer_types) != value:
            self.mixer_types = [self.mixer_types[i % len(self.mixer_types)] for i in range(value)]

    def _tiled_specs(self) -> list[str]:
        """The specs that `layer_pattern`, or else `mixer` and `hybrid_ratio`, give the layers."""
        if self.layer_pattern is not None:
            pattern = self.layer_pattern
            if not pattern:
                raise ValueError("layer_pattern is empty: name at least one mixer spec, like ['delta_net', 'softmax'].")
        else:
            recurrent, softmax = parse_hybrid_ratio(self.hybrid_ratio)
            pattern = [self.mixer] * recurrent + ["softmax"] * softmax
        return [str(parse_mixer_spec(pattern[i % len(pattern)])) for i in range(self.num_hidden_layers)]

    def _resolve_mixer_types(self) -> None:
        explicit = self.mixer_types is not None
        specs = self.mixer_types if explicit else self._tiled_specs()
        parsed = [parse_mixer_spec(spec) for spec in specs]
        layer_types = [spec.layer_type for spec in parsed]
        if not explicit and self.layer_types is not None and list(self.layer_types) != layer_types:
            raise ValueError(
                f"layer_types {self.layer_types} disagrees with the mixers {specs}. It is derived: choose the layers by "
                "mixer_types, layer_pattern or mixer + hybrid_ratio, and leave layer_types out."
            )
        self.mixer_types = [str(spec) for spec in parsed]
        self.layer_types = layer_types

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism splits the weights. Mixers work on whole heads, so what they project is gathered."""
        plan = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "colwise") | {"mlp.down_proj": "rowwise"}
        plan |= dict.fromkeys(("mixer.q_proj", "mixer.k_proj"), "colwise_gather_output")
        if any(spec.memory != "identity" for spec in self.mixer_specs):
            plan["mixer.v_proj"] = "colwise_gather_output"
        plan["mixer.o_proj"] = "rowwise_split_input"
        return {f"layers.*.{name}": style for name, style in plan.items()}

    @property
    def mixer_specs(self) -> list[MixerSpec]:
        """The parsed `mixer_types`, one per layer."""
        return [parse_mixer_spec(spec) for spec in self.mixer_types]

    def _check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")

    def validate_architecture(self):
        """Part of the `@strict` validation: head shapes and the fields that single mixers need."""
        self._check_positive(
            "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
            "linear_value_head_dim", "linear_conv_kernel_dim", "ttt_conv_kernel_dim", "ttt_mini_batch_size",
            "mesa_max_cg_steps", "max_position_embeddings",
        )  # fmt: skip
        for low, name, high in (
            (0, "rms_norm_eps", 1), (0, "initializer_range", 10), (0, "attention_dropout", 1), (0, "linear_a_log_min", None),
            (self.linear_a_log_min, "linear_a_log_max", None), (self.linear_dt_min, "linear_dt_max", None),
            (0, "num_sink_tokens", None), (0, "linear_norm_eps", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (value < low or (high is not None and value > high)):
                limits = f"at least {low}" if high is None else f"between {low} and {high}"
                raise ValueError(f"{name} must be {limits}, got {value}.")
        for name, choices in (
            ("qk_norm_type", ("per_head", "per_layer")),
            ("linear_output_gate_activation", ("silu", "sigmoid")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}.")
        if self.linear_dt_min <= 0:
            raise ValueError(f"linear_dt_min must be positive, got {self.linear_dt_min}.")
        if len(self.mixer_types) != self.num_hidden_layers:
            raise ValueError(
                f"mixer_types names {len(self.mixer_types)} layers but num_hidden_layers is {self.num_hidden_layers}: give "
                "one spec per layer, or a layer_pattern, which is tiled."
            )
        for groups, heads in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, groups) % getattr(self, heads):
                raise ValueError(
                    f"{groups} ({getattr(self, groups)}) must be a multiple of {heads} ({getattr(self, heads)})."
                )
        specs = self.mixer_specs
        memories = {spec.memory for spec in specs}
        if "sliding_softmax" in memories and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(
                f"mixer 'sliding_softmax' needs sliding_window, the number of tokens it sees (at least 1); got "
                f"sliding_window={self.sliding_window}."
            )
        if self.use_rope and any(spec.readout != "query" for spec in specs):
            self._validate_rotary_width()
        if memories & {"ttt_linear", "ttt_mlp"}:
            self._validate_ttt(any(spec.memory.startswith("ttt") and spec.readout == "query" for spec in specs))
        if "mesa_net" in memories:
            if not 0 < self.mesa_lambda_min < self.mesa_lambda_init:
                raise ValueError(
                    f"mesa_net needs 0 < mesa_lambda_min < mesa_lambda_init, got {self.mesa_lambda_min} and "
                    f"{self.mesa_lambda_init}."
                )
            if not 0 < self.mesa_tolerance < 1:
                raise ValueError(f"mesa_tolerance must lie between 0 and 1, got {self.mesa_tolerance}.")

    def _validate_rotary_width(self) -> None:
        factor = (self.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        width = int(self.head_dim * factor)
        if width < 1 or width + width % 2 > self.head_dim:  # an odd part is rounded up, as in Transformers
            raise ValueError(
                f"Rotary embedding needs an even head_dim, got {self.head_dim}, of which partial_rotary_factor={factor} (in "
                "rope_parameters, above 0 and at most 1) is rotated; or set use_rope=False."
            )

    def _validate_ttt(self, reads_at_query: bool) -> None:
        if self.ttt_base_lr is not None and self.ttt_base_lr <= 0:
            raise ValueError(f"ttt_base_lr must be positive, got {self.ttt_base_lr}.")
        if not reads_at_query:
            return
        if self.ttt_inner_norm and self.linear_key_head_dim != self.linear_value_head_dim:
            raise ValueError(
                f"ttt_inner_norm adds the key to its prediction, so linear_key_head_dim ({self.linear_key_head_dim}) must "
                f"equal linear_value_head_dim ({self.linear_value_head_dim}); or set ttt_inner_norm=False."
            )
        if self.linear_key_head_dim % 2:
            raise ValueError(
                f"TTT rotates keys and queries inside a mini-batch: linear_key_head_dim must be even, got "
                f"{self.linear_key_head_dim}."
            )


__all__ = ["AvgPathConfig", "HEADS", "MEMORIES", "MixerSpec", "parse_hybrid_ratio", "parse_mixer_spec"]
