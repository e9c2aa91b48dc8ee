"""Law 9. Time and memory grow linearly with the text; a decode step and a recurrent layer's bytes do not grow."""

import weakref
from collections import Counter

import pytest
import torch
from laws.cases import SPECS, random_ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_avgpath import AvgPathCache
from modeling_avgpath.cache_avgpath import layer_tensors, named_tensors
from modeling_avgpath.cache_room import ROOM
from modeling_avgpath.configuration_avgpath import parse_mixer_spec

LINEAR_TIME = [spec for spec in SPECS if parse_mixer_spec(spec).layer_type in ("linear_attention", "sliding_attention")]


class OutputElements(TorchDispatchMode):
    """Counts the elements of all op outputs: a proxy of the work done that no other process can disturb."""

    def __init__(self):
        super().__init__()
        self.total = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(output, torch.Tensor):
                self.total += output.numel()
                self.largest = max(self.largest, output.numel())
        return outputs


def training_cost(model, length: int) -> tuple[int, int, int]:
    """Elements computed forward and backward, the largest single tensor, and bytes saved for the backward pass."""
    saved = 0

    def pack(tensor):
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    ids = random_ids(1, length)
    with OutputElements() as count, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
    return count.total, count.largest, saved


class PeakBytes(TorchDispatchMode):
    """The most bytes that op outputs held at any one time."""

    def __init__(self):
        super().__init__()
        self.tensors = Counter()  # live tensors of each storage
        self.present = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(output, torch.Tensor):
                storage = output.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self.tensors[key] += 1
                self.present += size if self.tensors[key] == 1 else 0
                self.peak = max(self.peak, self.present)
                weakref.finalize(output, self.release, key, size)
        return outputs

    def release(self, key: int, size: int) -> None:
        self.tensors[key] -= 1
        self.present -= size if not self.tensors[key] else 0


@pytest.mark.parametrize("spec", LINEAR_TIME)
def test_chunked_prefill_needs_the_memory_of_a_chunk(spec):
    model = tiny_model(spec)

    def peak(length: int, **arguments) -> int:
        with PeakBytes() as memory:
            model.generate(random_ids(1, length), max_new_tokens=1, **arguments)
        return memory.peak

    chunked = [peak(length, prefill_chunk_size=64) for length in (256, 1024)]
    of_the_ids = 5 * 8 * (1024 - 256)  # the ids, their mask, and what is counted from it
    assert chunked[1] - chunked[0] <= of_the_ids
    assert peak(1024) > 3 * chunked[1]


@pytest.mark.parametrize("spec", LINEAR_TIME)
def test_training_cost_is_linear(spec):
    model = tiny_model(spec, vocab_size=97)
    short, long = training_cost(model, 512), training_cost(model, 2048)
    for name, before, after in zip(("work", "largest tensor", "saved bytes"), short, long, strict=True):
        assert after <= 4.3 * before, f"{name} grew {after / before:.2f} times for 4 times the text"


@pytest.mark.parametrize("spec", LINEAR_TIME)
@torch.no_grad()
def test_decode_does_not_grow(spec):
    model = tiny_model(spec)
    cache = AvgPathCache(model.config)

    def step_cost() -> int:
        with OutputElements() as count:
            model(random_ids(1, 1), cache=cache)
        return count.total

    model(random_ids(1, 20), cache=cache)
    early, early_bytes = step_cost(), cache.nbytes
    model(random_ids(1, 1000), cache=cache)
    assert step_cost() == early
    assert cache.nbytes == early_bytes


@torch.no_grad()
def test_bytes_after_10_and_10000_tokens():
    """An all-recurrent model holds the same bytes; its hybrid grows by the softmax layer's keys and values alone."""
    for case in ("all_recurrent", "softmax_last"):
        model = tiny_model(case)
        sizes = []
        for length in (10, 10_000):
            cache = AvgPathCache(model.config)
            model(random_ids(1, length), cache=cache, logits_to_keep=1)
            sizes.append(cache.nbytes_per_layer)
            assert cache.nbytes == sum(sizes[-1])
        for layer_type, before, after in zip(model.config.layer_types, *sizes, strict=True):
            assert after == (before if layer_type == "linear_attention" else 1000 * before)


@torch.no_grad()
def test_every_byte_of_a_hybrid_with_windows_is_constant():
    """`sliding_softmax`, with its sinks, and recurrent layers: the same bytes from the window on, decoding included."""
    model = tiny_model("sinks")
    assert set(model.config.layer_types) == {"sliding_attention", "linear_attention"}
    cache = AvgPathCache(model.config)
    model(random_ids(1, model.config.sliding_window), cache=cache)
    size = cache.nbytes_per_layer
    for length in (1, 1, 500, 1):
        model(random_ids(1, length), cache=cache)
        assert cache.nbytes_per_layer == size


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_what_is_held_is_all_that_is_kept_alive(spec, record):
    """No tensor of the cache is a view of something larger, but for the room of those that grow, and its bytes show that."""
    model = tiny_model(spec)
    cache = AvgPathCache(model.config)
    if record:
        cache.activate_past_recording(5)
    model(random_ids(2, 40), cache=cache)
    model(random_ids(2, 1), cache=cache)
    for layer, nbytes in zip(cache.layers, cache.nbytes_per_layer, strict=True):
        grown = [tensor for name, tensor in named_tensors(layer).items() if name in ("keys", "values", "positions")]
        grown = grown if hasattr(layer, "growing") else []
        for tensor in layer_tensors(layer):
            room = tensor.nbytes // 41 * ROOM if any(tensor is other for other in grown) else 0
            assert 0 <= tensor.untyped_storage().nbytes() - tensor.nbytes <= room
        assert nbytes == sum(tensor.untyped_storage().nbytes() for tensor in layer_tensors(layer))


@torch.no_grad()
def test_key_only_layers_hold_half():
    """A mean-field layer's keys take half the bytes of a softmax layer's keys and values, and 4 bytes a position."""
    length, caches = 50, {}
    for spec in ("softmax", "identity", "delta_net@mean_field"):
        model = tiny_model(spec if spec != "identity" else "identity@mean_field")
        caches[spec] = AvgPathCache(model.config)
        model(random_ids(1, length), cache=caches[spec])
    pairs = caches["softmax"].nbytes_per_layer[0]
    assert caches["identity"].nbytes_per_layer[0] == pairs / 2 + 4 * length
    assert caches["delta_net@mean_field"].layers[0].states["keys"].nbytes == pairs / 2


@torch.no_grad()
def test_mesa_state_is_a_triangle():
    """1.5 times the delta rule's state for square heads, up to the diagonal's half."""
    model = tiny_model("mesa_net")
    cache = AvgPathCache(model.config)
    model(random_ids(1, 5), cache=cache)
    config = model.config
    size, heads = config.linear_key_head_dim, config.linear_num_value_heads
    states = cache.layers[0].states
    assert states["G"].shape == (1, heads, size, size)
    assert states["H"].shape == (1, heads, size * (size + 1) // 2)
