# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The cache of AvgPath models: per layer either keys and values, keys alone, or a state of constant size.

A state is a dictionary of named tensors whose first axis is the batch. Layers hand the whole dictionary out and take a
new one back; tensors are replaced, never written in place, so a carried state stays part of the autograd graph. Keys and
values that grow with the text have room behind them, which is written to where no graph is kept (see cache_room.py).
"""

import contextlib
import copy
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from .alignment import Alignment, align_padding
from .cache_files import is_unchanged, model_fingerprint, read_cache, weights_glimpse, write_cache
from .cache_room import GrowingTensors
from .configuration_avgpath import AvgPathConfig, parse_mixer_spec

# Tokens that can be taken back while the past is recorded, unless said otherwise.
RECORDED_TOKENS = 128
# `function(rows, lengths, layer_cache) -> (outputs, new states)`: a mixer's work on rows, given the cache layer to read.
RowFunction = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def run_aligned(
    function: RowFunction, streams: dict[str, torch.Tensor], alignment: Alignment | None, layer_cache
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`function` on the streams `[B, T, ...]`, in rows if `alignment` says so; outputs `[B, T, ...]` and new states."""
    if alignment is None:
        return function(dict(streams), None, layer_cache)
    return alignment.run(lambda rows, lengths: function(rows, lengths, layer_cache), streams)


def advance(
    function: RowFunction, streams: dict[str, torch.Tensor], alignment: Alignment | None, layer_cache
) -> torch.Tensor:
    """`function` on the streams, from the state of `layer_cache` and with its new state kept there, if there is one."""
    if layer_cache is not None:
        return layer_cache.advance(function, streams, alignment)
    return run_aligned(function, streams, alignment, None)[0]


@dataclass
class Recorded:
    """A piece of text that a state layer can take back: the state before it and all it takes to run it again.

    Attributes:
        states: the constant-size states before the piece.
        streams: the mixer's inputs `[B, T, ...]`.
        is_real: `[B, T]` bool, or `None` without padding.
        function: the mixer's work on rows, a method of the mixer.
        num_keys: keys that the layer held before the piece, if it holds keys.
        autocast: whether autocast was on, and to which dtype.
        weights: the mixer's parameters that are no linear layers', by name. They are kept because accelerate may have moved
            them away from the mixer when the piece has to run again.
    """

    states: dict[str, torch.Tensor]
    streams: dict[str, torch.Tensor]
    is_real: torch.Tensor | None
    function: RowFunction
    num_keys: int = 0
    autocast: tuple[bool, torch.dtype] = (False, torch.float32)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @contextlib.contextmanager
    def circumstances(self):
        """Those under which the piece ran first: autocast, and weights in their place."""
        device = next(iter(self.streams.values())).device.type
        enabled, dtype = self.autocast
        with torch.autocast(device, dtype, enabled), placed_weights(self.function.__self__, self.weights):
            yield

    def __len__(self) -> int:
        return next(iter(self.streams.values())).shape[1]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Recorded":
        """The same piece with every tensor replaced."""
        return replace(
            self,
            states={name: function(state) for name, state in self.states.items()},
            streams={name: function(stream) for name, stream in self.streams.items()},
            is_real=None if self.is_real is None else function(self.is_real),
        )

    def tensors(self) -> list[torch.Tensor]:
        """All tensors held."""
        return [*self.states.values(), *self.streams.values(), *([] if self.is_real is None else [self.is_real])]

    def first(self, length: int) -> "Recorded":
        """The piece cut to its first `length` tokens."""
        return replace(
            self,
            streams={name: stream[:, :length] for name, stream in self.streams.items()},
            is_real=None if self.is_real is None else self.is_real[:, :length],
        )


def row_weights(mixer: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that a mixer's work on rows may need: all but those of its linear layers, by name."""
    return {
        f"{path}.{name}".lstrip("."): parameter
        for path, module in mixer.named_modules()
        if not isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters(recurse=False)
    }


@contextlib.contextmanager
def placed_weights(mixer: nn.Module, weights: dict[str, torch.Tensor]):
    """Within it, those of the `weights` that are away (on the meta device) are where `mixer` looks for them."""
    away = {name: weight for name, weight in row_weights(mixer).items() if weight.is_meta and name in weights}
    owners = {name: mixer.get_submodule(name.rpartition(".")[0])._parameters for name in away}
    for name, parameters in owners.items():
        parameters[name.rpartition(".")[2]] = weights[name]
    try:
        yield
    finally:
        for name, parameters in owners.items():
            parameters[name.rpartition(".")[2]] = away[name]


class StateCacheLayer(CacheLayerMixin):
    """Cache of a layer whose memory has constant size: named state tensors, batch first.

    Attributes:
        states: name -> `[B, ...]`; empty before the first update.
        cumulative_length: tokens seen, padding included (as the attention layers count them).
        record_past: whether the last `recorded_depth` tokens can be taken back by `crop`.
        history: the pieces of text that can be, oldest first: the states before each and its mixer inputs.
        max_cache_len: for compiled decoding, the tokens to make room for: states then keep their address and are written in
            place, and `cumulative_length` is a tensor. `None` for tensors that are replaced.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__()
        self.states: dict[str, torch.Tensor] = {}
        self.max_cache_len = max_cache_len
        # A number in the compiled graph would be compiled anew with every token.
        self.cumulative_length = 0 if max_cache_len is None else torch.tensor(0)
        self.record_past = False
        self.recorded_depth = RECORDED_TOKENS
        self.device: torch.device | None = None  # where the states were before they were offloaded
        self.history: list[Recorded] = []

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={tuple(state.shape)}" for name, state in self.states.items())
        return f"{type(self).__name__}({shapes})"

    @property
    def batch_size(self) -> int:
        """Rows held, or -1 before the first update."""
        return next((len(state) for state in self.states.values()), -1)

    @property
    def is_static(self) -> bool:
        """Whether states are written in place."""
        return self.max_cache_len is not None

    @property
    def is_compileable(self) -> bool:
        """Whether a decode step can be compiled: static, and not recording its past."""
        return self.is_static and not self.record_past

    @property
    def is_croppable(self) -> bool:
        """Whether the past is recorded, so that `crop` can take tokens back."""
        return self.record_past

    def advance(
        self, function: RowFunction, streams: dict[str, torch.Tensor], alignment: Alignment | None
    ) -> torch.Tensor:
        """Run a mixer over its streams `[B, T, ...]` and move on to the state after them; returns its outputs.

        While the past is recorded, the last `recorded_depth` tokens run as a piece of their own that can be taken back, so
        what is held for it does not depend on the length of the text.
        """
        some_stream = next(iter(streams.values()))
        length, device = some_stream.shape[1], some_stream.device.type
        is_real = None if alignment is None else alignment.is_real
        if not self.record_past:
            return self._advance(function, streams, alignment, length)
        cut = max(0, length - self.recorded_depth)
        outputs = []
        if cut:
            head = Recorded({}, streams, is_real, function).first(cut)
            outputs.append(self._advance(function, head.streams, self._align(head.is_real), cut))
        piece = Recorded(
            states=self.memory_states(),
            # Copied, lest a view of the last tokens keep the whole text's inputs alive.
            streams={name: stream[:, cut:].clone() for name, stream in streams.items()},
            is_real=None if is_real is None else is_real[:, cut:].clone(),
            function=function,
            num_keys=self.num_keys,
            autocast=(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
            weights=row_weights(function.__self__),
        )
        outputs.append(self._advance(function, piece.streams, self._align(piece.is_real), length - cut))
        self.history.append(piece)
        while sum(map(len, self.history[1:])) >= self.recorded_depth:
            self.history.pop(0)
        return torch.cat(outputs, dim=1)

    def _advance(self, function, streams, alignment, length: int) -> torch.Tensor:
        outputs, states = run_aligned(function, streams, alignment, self)
        self._store(states)
        self.cumulative_length += length  # in place where it is a tensor
        self.is_initialized = True
        return outputs

    def _store(self, states: dict[str, torch.Tensor]) -> None:
        """Keep new states: in the place of the old ones if static, else instead of them."""
        if not self.is_static:
            self.states = {**self.states, **states}
            return
        for name, state in states.items():
            if name in self.states:
                self.states[name].copy_(state)
            else:
                self.states[name] = fixed_buffer(state.clone(memory_format=torch.contiguous_format))
                self.cumulative_length = self.cumulative_length.to(state.device)

    @staticmethod
    def _align(is_real: torch.Tensor | None) -> Alignment | None:
        return None if is_real is None else align_padding(is_real)

    def memory_states(self) -> dict[str, torch.Tensor]:
        """The states of constant size, safe from later writes."""
        return {name: state.clone() if self.is_static else state for name, state in self.states.items()}

    def snapshot(self) -> "StateCacheLayer":
        """A copy that shares the present tensors; updates of one do not reach the other."""
        twin = type(self)()
        twin.__dict__.update(self.__dict__)
        twin.states, twin.history = dict(self.states), list(self.history)
        if self.is_static:
            twin.cumulative_length = self.cumulative_length.clone()
        return twin

    def __deepcopy__(self, memo) -> "StateCacheLayer":
        # Cloned one by one: deepcopy refuses tensors that carry a graph, which a cache filled without no_grad holds.
        twin = self.snapshot()
        twin.map_states(torch.Tensor.clone)
        return twin

    def __getstate__(self) -> dict:
        # What was recorded would take the model along.
        return {**self.__dict__, "history": []}

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len if self.is_static else self.cumulative_length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to allocate: states come into being with the first update."""

    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError(f"{type(self).__name__} keeps a recurrent state, not keys and values.")

    @property
    def num_keys(self) -> int:
        """Keys held, one for each token, if this is a layer that holds keys."""
        return 0

    def activate_past_recording(self, depth: int | None = None) -> None:
        """From now on keep what it takes to go back up to `depth` tokens, by default as many as before or 128."""
        if depth is None:
            depth = self.recorded_depth if self.record_past else RECORDED_TOKENS
        self.record_past, self.recorded_depth = True, depth

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises if `crop` would: more tokens than were recorded."""
        recorded = sum(map(len, self.history))
        if -tokens_to_remove > recorded:
            raise RuntimeError(
                f"Cannot remove {-tokens_to_remove} tokens: {recorded} are recorded. Call "
                "cache.activate_past_recording(depth) before reading them, or keep a copy.deepcopy of the cache from then."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Go back to the state before the last `-tokens_to_remove` tokens; 0 forgets what was recorded.

        Raises:
            TypeError, ValueError: no integer, or a positive one.
            RuntimeError: more tokens than were recorded; nothing is changed.
        """
        check_count(tokens_to_remove)
        self.check_crop(tokens_to_remove)
        if tokens_to_remove == 0:
            self.history = []
            return
        remaining = -tokens_to_remove
        while remaining:
            piece = self.history.pop()
            self.go_back_before(piece)
            if len(piece) > remaining:  # run the part that stays again, from the state before the piece
                piece = piece.first(len(piece) - remaining)
                with piece.circumstances():
                    self._advance(piece.function, piece.streams, self._align(piece.is_real), len(piece))
                self.history.append(piece)
                break
            remaining -= len(piece)

    def go_back_before(self, piece: Recorded) -> None:
        """Put back the states from before the latest piece."""
        self.cumulative_length -= len(piece)
        if self.is_static and piece.states:
            self._store(piece.states)
        else:
            self.states = dict(piece.states)

    def reset(self) -> None:
        records, depth = self.record_past, self.recorded_depth
        self.__init__(self.max_cache_len)
        self.record_past, self.recorded_depth = records, depth

    def map_states(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor held, recorded ones included, by `function` of it."""
        keep = fixed_buffer if self.is_static else lambda state: state
        self.states = {name: keep(function(state)) for name, state in self.states.items()}
        self.history = [piece.map(function) for piece in self.history]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.map_states(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_states(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_states(lambda state: state[indices.to(state.device)])

    def offload(self) -> None:
        if self.states:
            self.device = next(iter(self.states.values())).device
        self.map_states(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.device is not None:
            self.map_states(lambda state: state.to(self.device, non_blocking=True))


class SlidingCacheLayer(StateCacheLayer):
    """Cache of a `sliding_softmax` layer, as states: keys and values of the last `sliding_window - 1` real tokens, and of
    the first `num_sink_tokens`."""

    is_sliding = True


class KeyCacheLayer(StateCacheLayer):
    """Cache of a mean-field or expectation layer: un-rotated keys of all tokens, plus the memory's state.

    Beside the states it holds `keys` `[B, S, H, D]` and `positions` `[B, S]` int32: a key's position in its row, counted
    in real tokens, and -1 for padding.
    """

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__(max_cache_len, **kwargs)
        self.growing = GrowingTensors()

    def snapshot(self) -> "KeyCacheLayer":
        twin = super().snapshot()
        twin.growing = GrowingTensors()
        self.growing.forget()  # else it would write where the twin reads after a crop
        return twin

    def append_keys(self, keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `keys` `[B, T, H, D]` at `positions` `[B, T]`; returns all keys and positions, those of the past first."""
        positions = positions.to(torch.int32)
        if self.is_static:
            return self._insert_keys(keys, positions)
        # Contiguous, so that a cache continues bit for bit alike whether it was loaded or not.
        keys = keys.contiguous()
        if "keys" in self.states:
            keys = self.growing.append("keys", self.states["keys"], keys, dim=1)
            positions = self.growing.append("positions", self.states["positions"], positions, dim=1)
        self.states = {**self.states, "keys": keys, "positions": positions}
        return keys, positions

    def _insert_keys(self, keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if "keys" not in self.states:
            rows, _, heads, size = keys.shape
            self.states["keys"] = fixed_buffer(keys.new_zeros(rows, self.max_cache_len, heads, size))
            self.states["positions"] = fixed_buffer(positions.new_full((rows, self.max_cache_len), -1))
            self.cumulative_length = self.cumulative_length.to(keys.device)
        places = self.cumulative_length + torch.arange(keys.shape[1], device=keys.device)
        self.states["keys"].index_copy_(1, places, keys)
        self.states["positions"].index_copy_(1, places, positions)
        return self.states["keys"], self.states["positions"]

    def get_max_length(self) -> int:
        return self.max_cache_len if self.is_static else -1

    @property
    def num_keys(self) -> int:
        # Not the number of tokens: padding that all rows share is stored for none.
        return self.states["keys"].shape[1] if "keys" in self.states else 0

    def memory_states(self) -> dict[str, torch.Tensor]:
        return {name: state for name, state in super().memory_states().items() if name not in ("keys", "positions")}

    def go_back_before(self, piece: Recorded) -> None:
        held = {name: self.states[name] for name in ("keys", "positions")}
        super().go_back_before(piece)
        if self.is_static:
            self.states = {**self.states, **held}
            self.states["positions"][:, int(self.cumulative_length) :] = -1
        elif piece.num_keys:
            self.states |= {
                name: self.growing.shorten(name, tensor, piece.num_keys, dim=1) for name, tensor in held.items()
            }


class SoftmaxCacheLayer(DynamicLayer):
    """Transformers' `DynamicLayer`, which copies all keys and values for every token, with room for some more of them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.growing = GrowingTensors()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append `[B, H, T, D]` keys and values; returns all of them."""
        if self.get_seq_length() == 0:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = self.growing.append("keys", self.keys, key_states, dim=-2)
        self.values = self.growing.append("values", self.values, value_states, dim=-2)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""
        held = self.keys, self.values
        super().crop(tokens_to_remove)
        if tokens_to_remove and self.is_initialized:
            length = self.keys.shape[-2]
            self.keys, self.values = (
                self.growing.shorten(name, tensor, length, dim=-2)
                for name, tensor in zip(("keys", "values"), held, strict=True)
            )

    def __copy__(self) -> "SoftmaxCacheLayer":
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, growing=GrowingTensors())
        self.growing.forget()  # else it would write where the twin reads after a crop
        return twin


CACHE_LAYERS = {
    "full_attention": SoftmaxCacheLayer,
    "sliding_attention": SlidingCacheLayer,
    "linear_attention": StateCacheLayer,
    "hybrid": KeyCacheLayer,
}


def fixed_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, marked to stay where it is, which compiled graphs rely on."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor


# The config fields that do not change what a layer's states are, given the weights; `mixer_types` says it all of the layout.
_FIELDS_WITHOUT_EFFECT = {
    "mixer", "hybrid_ratio", "layer_pattern", "layer_types", "use_cache", "vocab_size", "tie_word_embeddings",
    "pad_token_id", "bos_token_id", "eos_token_id", "attention_dropout", "initializer_range", "linear_a_log_min",
    "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor", "mesa_lambda_init",
}  # fmt: skip
CACHE_FIELDS = tuple(name for name in AvgPathConfig.__annotations__ if name not in _FIELDS_WITHOUT_EFFECT)


def cache_fields(config) -> dict[str, object]:
    """The fields of a config that a cache made for it depends on."""
    return {name: getattr(config, name) for name in CACHE_FIELDS}


def check_positive(name: str, value: int) -> None:
    """Raises unless `value` is an integer of at least one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def check_count(tokens_to_remove: int) -> None:
    """Raises unless this is what `crop` takes: zero, or minus a number of tokens."""
    try:
        operator.index(tokens_to_remove)
    except TypeError:
        raise TypeError(
            f"crop takes minus the number of tokens to remove, an integer such as -2; got {tokens_to_remove!r}."
        ) from None
    if tokens_to_remove > 0:
        raise ValueError(f"crop takes minus the number of tokens to remove, such as -2; got {tokens_to_remove}.")


def snapshot_layer(layer):
    """A copy of any cache layer that shares the present tensors; updates of one do not reach the other."""
    return layer.snapshot() if hasattr(layer, "states") else copy.copy(layer)


def copy_layer(layer, memo: dict | None = None):
    """An independent copy of any cache layer, tensors cloned."""
    if hasattr(layer, "states"):
        return copy.deepcopy(layer, memo)
    twin = snapshot_layer(layer)
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(twin, name, fixed_buffer(value.clone()) if isinstance(layer, StaticLayer) else value.clone())
    return twin


def named_tensors(layer) -> dict[str, torch.Tensor]:
    """What any cache layer needs to go on, by name."""
    if hasattr(layer, "states"):
        return layer.states
    named = {name: getattr(layer, name, None) for name in ("keys", "values")}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def layer_tensors(layer) -> list[torch.Tensor]:
    """All tensors that a cache layer holds now, those recorded to go back included."""
    history = getattr(layer, "history", ())
    recorded = [tensor for piece in history for tensor in piece.tensors()]
    return [*named_tensors(layer).values(), *recorded]


def map_tensors(layer, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every tensor that any cache layer holds, recorded ones included, by `function` of it."""
    if hasattr(layer, "states"):
        layer.map_states(function)
        return
    for name, tensor in named_tensors(layer).items():
        tensor = function(tensor)
        setattr(layer, name, fixed_buffer(tensor) if isinstance(layer, StaticLayer) else tensor)
        if isinstance(layer, StaticLayer):
            layer.batch_size = len(tensor)


class StateKeeper:
    """What the caches of AvgPath models do beyond those of Transformers; a mixin over one of them."""

    def _forget_model(self) -> None:
        self._fingerprint: str | None = None  # as loaded or once asked for
        self._model: weakref.ref | None = None  # the model that fills the cache
        self._glimpse = None  # of its weights

    def bind(self, model) -> None:
        """Remember the model that fills this cache.

        Raises:
            ValueError: another model, with other weights, has filled it.
        """
        if self._model is not None and self._model() is model:
            return
        if int(self.get_seq_length()) == 0:
            self._forget_model()
        elif self.fingerprint is not None and self.fingerprint != model_fingerprint(model):
            raise ValueError(
                "The cache was filled by a model with other weights or another dtype: its states mean nothing to this "
                "one. Use it with the model that filled it, or read the text again."
            )
        self._model, self._glimpse = weakref.ref(model), weights_glimpse(model)

    @property
    def fingerprint(self) -> str | None:
        """That of the model that filled the cache, `None` for a cache that has read nothing.

        Raises:
            ValueError: that model is gone, or its weights have changed since.
        """
        if self._fingerprint is None and self._model is not None:
            model = self._model()
            if model is None or not is_unchanged(model, self._glimpse):
                raise ValueError(
                    f"The model that filled this cache {'is gone' if model is None else 'has other weights by now'}, so "
                    "nothing can tell any more to which weights the cache belongs: save it, pickle it or hand it to an "
                    "equal model while the model that filled it is there and unchanged."
                )
            self._fingerprint = model_fingerprint(model)
        return self._fingerprint

    def activate_past_recording(self, depth: int | None = None) -> None:
        """From now on keep what it takes to take back the last `depth` tokens with `crop`.

        Softmax layers hold their past anyway; the others keep the inputs of the last tokens and the state before them.

        Args:
            depth: by default as many as before, or 128.
        """
        if depth is not None:
            check_positive("depth, the number of tokens that can be taken back,", depth)
        for layer in self.layers:
            if hasattr(layer, "states"):
                layer.activate_past_recording(depth)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, exactly: the cache is as if it had never read them.

        Raises:
            TypeError: no integer.
            ValueError: a positive count, or more tokens than were read.
            RuntimeError: more tokens than were recorded (see `activate_past_recording`). Nothing is changed in either case.
        """
        check_count(tokens_to_remove)
        length = int(self.get_seq_length())
        if -tokens_to_remove > length:
            raise ValueError(f"Cannot remove {-tokens_to_remove} tokens from a cache of {length}.")
        for layer in self.layers:
            if hasattr(layer, "states"):
                layer.check_crop(tokens_to_remove)
        for index, layer in enumerate(self.layers):
            enter_turn(self, index)
            if not hasattr(layer, "states") and length + tokens_to_remove == 0:
                layer.reset()  # a cache that has read nothing takes any number of rows
            else:
                layer.crop(tokens_to_remove)
            leave_turn(self, index)

    def reset(self) -> None:
        """Forget all that was read."""
        super().reset()
        self._forget_model()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times in a row.

        Raises:
            TypeError, ValueError: `repeats` is no integer, or less than one.
        """
        check_positive("repeats", repeats)
        for layer in self.layers:
            map_tensors(layer, lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Row `i` becomes what row `indices[i]` was; a boolean mask `[B]` keeps the rows where it is True.

        Raises:
            ValueError: `indices` is not one-dimensional, or selects nothing.
            IndexError: a row that there is not. Nothing is changed in either case.
        """
        indices = torch.as_tensor(indices)
        rows = next((len(tensor) for layer in self.layers for tensor in layer_tensors(layer)), None)
        if indices.dtype == torch.bool and rows is not None and tuple(indices.shape) == (rows,):
            indices = indices.nonzero().squeeze(1)
        if indices.ndim != 1 or not len(indices) or indices.dtype == torch.bool or indices.is_floating_point():
            raise ValueError(
                "The rows to keep must be given by a one-dimensional tensor of at least one integer, or by a mask with one "
                f"entry for each of {rows} rows; got {indices.dtype} of shape {tuple(indices.shape)}."
            )
        # Elsewhere the look-up itself reports a bad row; reading it back here would stall the device.
        if rows is not None and indices.device.type == "cpu" and not -rows <= indices.min() <= indices.max() < rows:
            raise IndexError(f"The cache holds {rows} rows; the rows to keep are {indices.tolist()}.")
        for layer in self.layers:
            map_tensors(layer, lambda tensor: tensor[indices.to(tensor.device)])

    def __getstate__(self) -> dict:
        if self.offloading:
            raise TypeError(
                "An offloading cache holds a stream of its device and cannot be pickled: use save_pretrained."
            )
        # A pickled cache cannot point at its model; the fingerprint stays.
        return {**self.__dict__, "_fingerprint": self.fingerprint, "_model": None, "_glimpse": None}

    def fork(self):
        """An independent copy: what is done to one leaves the other as it is. Gradients flow through both."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo):
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.layers = [copy_layer(layer, memo) for layer in self.layers]
        return twin

    @property
    def nbytes_per_layer(self) -> list[int]:
        """Bytes of memory that the tensors of each layer keep occupied now."""
        return [
            sum({storage._cdata: storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors)}.values())
            for tensors in map(layer_tensors, self.layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all tensors keep occupied now."""
        return sum(self.nbytes_per_layer)

    def detach_(self):
        """Cut all held tensors from the autograd graph, for truncated back-propagation through time; returns `self`."""
        for layer in self.layers:
            map_tensors(layer, torch.Tensor.detach)
        return self


class AvgPathCache(StateKeeper, DynamicCache):
    """Cache for a model of the given config; what `generate()` and forward passes with `use_cache` build by default.

    Softmax layers grow with the text; `sliding_softmax` and recurrent layers hold the same bytes after 10 tokens and after
    a million; mean-field and expectation layers keep keys without values.

    Args:
        config (`AvgPathConfig`): the model's configuration.

    Example:

    ```python
    >>> cache = AvgPathCache(model.config)
    >>> outputs = model(input_ids, cache=cache)
    >>> cache.nbytes, cache.nbytes_per_layer
    ```
    """

    def __init__(self, config):
        if not hasattr(config, "mixer_types"):
            raise TypeError(f"AvgPathCache needs the AvgPathConfig of its model, got {type(config).__name__}.")
        Cache.__init__(self, layers=[CACHE_LAYERS[layer_type]() for layer_type in config.layer_types])
        self.fields = cache_fields(config)
        self._forget_model()

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Save the cache to `folder`, in one safetensors file, with a fingerprint of the model that filled it.

        What was recorded to take tokens back is not saved.
        """
        tensors, lengths = {}, []
        for index, layer in enumerate(self.layers):
            tensors |= {f"{index}.{name}": tensor for name, tensor in named_tensors(layer).items()}
            lengths.append(layer.get_seq_length())
        facts = {"fields": self.fields, "lengths": lengths, "fingerprint": self.fingerprint}
        write_cache(folder, tensors, facts)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike, device: str | torch.device = "cpu") -> "AvgPathCache":
        """Load a cache saved by `save_pretrained`; a model continues from it, bit for bit, as from the original.

        Raises:
            FileNotFoundError: `folder` holds no saved cache.
            ValueError: a file is cut short, was changed, or is of an unknown format. (Use with a model that did not write
                it is refused at the first forward pass.)
        """
        tensors, facts = read_cache(folder, device)
        layer_types = [parse_mixer_spec(spec).layer_type for spec in facts["fields"]["mixer_types"]]
        cache = cls(SimpleNamespace(**facts["fields"], layer_types=layer_types))
        cache._fingerprint = facts["fingerprint"]
        for index, (layer, length) in enumerate(zip(cache.layers, facts["lengths"], strict=True)):
            states = {name.split(".", 1)[1]: state for name, state in tensors.items() if name.startswith(f"{index}.")}
            if hasattr(layer, "states"):
                layer.states, layer.cumulative_length, layer.is_initialized = states, length, bool(length)
            elif states:
                layer.lazy_initialization(states["keys"], states["values"])
                layer.keys, layer.values = states["keys"], states["values"]
        return cache


class AvgPathStaticCache(StateKeeper, StaticCache):
    """What a `StaticCache` becomes when an AvgPath model takes it: rooms for keys, and states that are written in place."""

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Refused: most of a static cache is room for tokens to come.

        Raises:
            TypeError: always.
        """
        raise TypeError("Static caches are not saved: read the text into an AvgPathCache(config), and save that.")


def record_at_least(cache: Cache, num_tokens: int) -> None:
    """Let a cache that records its past keep what it takes to take back `num_tokens` tokens, if it keeps less."""
    for layer in cache.layers:
        if hasattr(layer, "states") and layer.record_past:
            layer.activate_past_recording(max(num_tokens, layer.recorded_depth))


def check_room(cache: Cache, num_tokens: int) -> None:
    """Raises a `ValueError` if `num_tokens` more do not fit into a static cache on a CPU (elsewhere, asking would wait)."""
    for layer in cache.layers if isinstance(cache, StaticCache) else ():
        room, seen = layer.get_max_length(), layer.get_seq_length()
        is_cheap = not isinstance(seen, torch.Tensor) or seen.device.type == "cpu"
        if not layer.is_sliding and room is not None and room > 0 and is_cheap and int(seen) + num_tokens > room:
            raise ValueError(
                f"The static cache has room for {room} tokens, but {int(seen)} are there and {num_tokens} are to come: make "
                "one with a larger max_cache_len."
            )


def adopt_cache(cache: Cache, config, batch_size: int | None) -> None:
    """Make any `Cache` fit an AvgPath model: empty layers that cannot hold a layer's state are replaced, in place.

    Args:
        batch_size: rows to come, or `None` while that is not known.

    Raises:
        ValueError: the cache holds another model's layers or another batch size; nothing is changed then.
    """
    if not hasattr(cache, "layers"):
        raise TypeError(f"A {type(cache).__name__} cannot hold a decoder's states: use AvgPathCache(config).")
    fields = cache_fields(config)
    made_for = getattr(cache, "fields", fields)
    different = [
        f"{name} is {made_for[name]} there and {value} here"
        for name, value in fields.items()
        if made_for.get(name, value) != value
    ]
    if different:
        raise ValueError(
            f"The cache belongs to another model: {'; '.join(different)}. Make one with AvgPathCache(config)."
        )
    lazy = getattr(cache, "layer_class_to_replicate", None) is not None and not cache.layers
    layers = [CACHE_LAYERS[layer_type]() for layer_type in config.layer_types] if lazy else list(cache.layers)
    static = {}
    if isinstance(cache, StaticCache):
        static = {"max_cache_len": max(getattr(layer, "max_cache_len", None) or 0 for layer in layers)}
    if len(layers) != len(config.layer_types):
        raise ValueError(
            f"The cache belongs to another model: it has {len(layers)} layers, this model {len(config.layer_types)}. Make "
            "one with AvgPathCache(config)."
        )
    is_recording = any(getattr(layer, "record_past", False) for layer in layers)
    for index, (layer, layer_type) in enumerate(zip(layers, config.layer_types, strict=True)):
        held = [tensor for tensor in layer_tensors(layer) if tensor.numel()]
        expected = CACHE_LAYERS[layer_type]
        # By name: remote code and the installed package define these classes twice.
        fits = (
            type(layer).__name__ == expected.__name__
            if layer_type != "full_attention"
            else not hasattr(layer, "states") and (held or type(layer) is not DynamicLayer)
        )
        if not fits:
            if held and layer.get_seq_length() > 0:  # a static layer may have its room before its first token
                prefix = (
                    ""
                    if hasattr(layer, "states")
                    else " PEFT's prefix tuning makes such caches, and keys and values for every "
                    "layer suit models with only softmax layers: here use prompt tuning, LoRA or DoRA."
                )
                raise ValueError(
                    f"The cache belongs to another model: its layer {index} is a filled {type(layer).__name__}, this "
                    f"model's is {config.mixer_types[index]!r}. Make one with AvgPathCache(config).{prefix}"
                )
            layers[index] = expected(**static)
            if is_recording and hasattr(layers[index], "states"):
                layers[index].activate_past_recording()
            held = []
        rows = {len(tensor) for tensor in held}
        if batch_size is not None and rows and rows != {batch_size}:
            raise ValueError(
                f"The cache holds {rows.pop()} rows but the input has {batch_size}: continue with the same batch, or use "
                "cache.batch_repeat_interleave, cache.batch_select_indices or a new cache."
            )
    if lazy:
        cache.layer_class_to_replicate = None
    cache.layers, cache.fields = layers, fields
    # From here on it can do, and checks, what ours does: the object that its owner holds becomes one.
    if type(cache) in (DynamicCache, StaticCache):
        cache.__class__ = AvgPathCache if type(cache) is DynamicCache else AvgPathStaticCache
        cache._forget_model()


def enter_turn(cache: Cache | None, index: int) -> None:
    """The turn of layer `index` begins: an offloading cache has its entry on the device, and the next one on its way."""
    if cache is None or not cache.offloading:
        return
    layer = cache.layers[index]
    device = getattr(layer, "device", None)  # none before the first turn
    if device is not None and device.type == "cuda":  # each stream waits for what the other has begun
        stream = torch.cuda.default_stream(device)
        stream.wait_stream(cache.prefetch_stream)
        cache.prefetch_stream.wait_stream(stream)
    layer.prefetch()
    if not (cache.only_non_sliding and all(cache.is_sliding)):
        cache.prefetch(index + 1, cache.only_non_sliding)


def leave_turn(cache: Cache | None, index: int) -> None:
    """The turn of layer `index` is over: an offloading cache moves its entry to host memory."""
    if cache is not None and cache.offloading:
        cache.offload(index, cache.only_non_sliding)


__all__ = ["AvgPathCache"]
