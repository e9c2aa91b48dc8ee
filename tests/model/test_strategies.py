"""The other ways to generate: beams with sampling, chunks, streams, offloading, autocast, drafts of other tokenizers."""

import copy
import string

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from laws.cases import CASES, assert_close, random_ids, relative_error, tiny_model
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PreTrainedTokenizerFast
from transformers.generation import BaseStreamer

from modeling_avgpath import AvgPathCache, AvgPathForCausalLM
from modeling_avgpath.cache_avgpath import layer_tensors

NEW = 10


@pytest.fixture(params=list(CASES))
def model(request):
    return tiny_model(request.param)


def padded_prompt(length: int = 23):
    ids = random_ids(2, length)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids, {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}


def test_chunked_prefill(model):
    """Chunks shorter and longer than the convolution, the window and the TTT mini-batch, into every kind of cache."""
    ids, arguments = padded_prompt()
    expected = model.generate(ids, **arguments)
    for chunk in (1, 4, 11, 100):
        assert torch.equal(model.generate(ids, prefill_chunk_size=chunk, **arguments), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(ids, prefill_chunk_size=4, **static, **arguments), expected)


def test_offloading_between_steps(model):
    ids, arguments = padded_prompt()
    expected = model.generate(ids, **arguments)
    assert torch.equal(model.generate(ids, cache_implementation="offloaded", **arguments), expected)
    static = {"cache_implementation": "offloaded_static", "disable_compile": True}
    assert torch.equal(model.generate(ids, **static, **arguments), expected)
    for extra in ({"prefill_chunk_size": 4}, {"cache": DynamicCache(config=model.config, offloading=True)}):
        extra.setdefault("cache_implementation", "offloaded") if "cache" not in extra else None
        assert torch.equal(model.generate(ids, **extra, **arguments), expected)


@pytest.mark.parametrize("case", ["softmax_middle", "all_recurrent", "three_cache_kinds", "sliding_softmax"])
@torch.no_grad()
def test_an_offloading_cache_moves_each_layer_at_its_turn(case, monkeypatch):
    """On the device while a layer computes, and in host memory otherwise, but for the one that comes next."""
    model = tiny_model(case)
    cache = DynamicCache(config=model.config, offloading=True)
    ids = random_ids(1, 9)
    model(ids[:, :4], cache=cache)
    moves = []
    for index, layer in enumerate(cache.layers):
        for verb in ("prefetch", "offload"):
            monkeypatch.setattr(layer, verb, lambda index=index, verb=verb: moves.append((verb, index)))
        model.model.layers[index].register_forward_hook(lambda *_, index=index: moves.append(("compute", index)))
    logits = model(ids[:, 4:], cache=cache).logits
    assert_close(logits, model(ids).logits[:, 4:])
    moves = moves[: moves.index(("offload", 2)) + 1 if len(cache.layers) == 3 else None]
    for index in range(len(cache.layers)):
        turn = [moves.index((verb, index)) for verb in ("prefetch", "compute", "offload")]
        assert turn == sorted(turn)
        following = (index + 1) % len(cache.layers)
        assert ("prefetch", following) in moves[turn[0] : turn[1]]  # on its way while this one computes


def test_beam_sampling_with_cache_equals_without(model):
    ids, arguments = padded_prompt(9)
    arguments |= {"do_sample": True, "num_beams": 3, "num_return_sequences": 3, "top_k": 30}
    torch.manual_seed(3)
    cached = model.generate(ids, **arguments)
    torch.manual_seed(3)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **arguments))
    assert cached.shape == (6, 9 + NEW)


def test_many_samples_of_one_prompt(model):
    ids, arguments = padded_prompt(9)
    arguments |= {"do_sample": True, "num_return_sequences": 4}
    torch.manual_seed(3)
    cached = model.generate(ids, **arguments)
    torch.manual_seed(3)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **arguments))
    assert len({tuple(row.tolist()) for row in cached}) == 8


class Collector(BaseStreamer):
    """Keeps what is streamed."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("extra", [{}, {"prompt_lookup_num_tokens": 3}])
def test_streaming(model, extra):
    ids = random_ids(1, 12).repeat(1, 2)
    streamer = Collector()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, streamer=streamer, **extra
    )
    assert streamer.tokens == output[0].tolist() and streamer.ended


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_autocast_keeps_states_in_fp32(case):
    """fp32 weights under bf16 autocast: from fp32 states, decoding token by token is as near to fp32 as one pass is."""
    model = tiny_model(case, initializer_range=0.1)
    ids = random_ids(2, 30)
    expected = model(ids).logits
    cache = AvgPathCache(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        whole = model(ids).logits
        pieces = [model(piece, cache=cache).logits for piece in (ids[:, :20], *ids[:, 20:].split(1, dim=1))]
        generated = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert generated.shape == (2, 30 + NEW)
    error = relative_error(whole, expected)
    assert 0 < error < 0.1  # bf16 products through seven memories; it moves with the order of roundings
    assert_close(torch.cat(pieces, dim=1), expected, 2 * error)
    for layer, mixer in zip(cache.layers, (layer.mixer for layer in model.model.layers), strict=True):
        for name in getattr(mixer, "state_names", ()):
            state = layer.states[name]
            assert state.dtype == torch.float32 or not state.is_floating_point()


@torch.no_grad()
def test_two_conversations_on_one_model(model):
    texts = [random_ids(2, 25, seed=seed) for seed in (1, 2)]
    caches = [AvgPathCache(model.config) for _ in texts]
    outputs = [[], []]
    for start, end in ((0, 7), (7, 8), (8, 25)):
        for text, cache, output in zip(texts, caches, outputs, strict=True):
            output.append(model(text[:, start:end], cache=cache).logits)
    for text, output in zip(texts, outputs, strict=True):
        assert_close(torch.cat(output, dim=1), model(text).logits)


@pytest.mark.parametrize("case", ["softmax_middle", "all_recurrent", "three_cache_kinds"])
def test_layers_kept_on_disk(case, tmp_path):
    """`device_map` with offloading: weights come in layer by layer, raw parameters of the memories included."""
    model = tiny_model(case)
    model.save_pretrained(tmp_path / "model")
    device_map = dict.fromkeys([name for name, _ in model.model.named_children() if name != "layers"], "cpu")
    device_map |= {f"layers.{index}": "disk" if index else "cpu" for index in range(3)}
    device_map = {f"model.{name}": device for name, device in device_map.items()} | {"lm_head": "cpu"}
    split = AvgPathForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert {parameter.device.type for parameter in split.model.layers[1].parameters()} == {"meta"}
    ids, arguments = padded_prompt()
    assert torch.equal(split.generate(ids, **arguments), model.generate(ids, **arguments))
    # Taking tokens back runs some again, and a fingerprint looks at all weights: neither in the turn of a layer.
    ids = random_ids(1, 11).repeat(1, 2)
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    expected = model.generate(ids, **arguments)
    assert torch.equal(split.generate(ids, prompt_lookup_num_tokens=3, **arguments), expected)
    cache = AvgPathCache(split.config)
    cache.activate_past_recording()
    with torch.no_grad():
        split(ids, cache=cache)
        cache.crop(-5)
        cache.save_pretrained(tmp_path / "cache")
        logits = model(ids[:, 17:], cache=AvgPathCache.from_pretrained(tmp_path / "cache")).logits
        assert_close(logits, model(ids).logits[:, 17:])
        assert_close(split(ids[:, 17:], cache=cache).logits, logits)


@pytest.mark.parametrize("case", [*CASES])
def test_layers_on_two_devices(case):
    """Each layer's states stand where the layer does; the devices are simulated, so only places and shapes are seen."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = tiny_model(case)
        for name, module in model.named_modules():
            device = "meta:1" if name.startswith("model.layers.") and name.split(".")[2] != "0" else "meta:0"
            for place in (module._parameters, module._buffers):
                moved = {key: tensor.detach().to(device) for key, tensor in place.items() if tensor is not None}
                place.update({key: torch.nn.Parameter(tensor) for key, tensor in moved.items()})
        for layer in model.model.layers[1:]:
            add_hook_to_module(layer, AlignDevicesHook("meta:1", io_same_device=True))
        cache = AvgPathCache(model.config)
        with torch.no_grad():
            for length in (9, 1):
                output = model(torch.zeros(2, length, dtype=torch.long, device="meta:0"), cache=cache)
                assert output.logits.device == torch.device("meta:0")
        for index, layer in enumerate(cache.layers):
            assert {str(tensor.device) for tensor in layer_tensors(layer)} == {f"meta:{min(index, 1)}"}


def character_tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    """Knows characters, and pairs of them as merges."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *tokens])}
    backend = Tokenizer(BPE(vocabulary, [tuple(token) for token in tokens if len(token) == 2], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("target_case, draft_case", [("softmax_middle", "all_recurrent"), ("ttt_mlp", "softmax")])
def test_a_draft_with_another_tokenizer(target_case, draft_case):
    characters = [*string.ascii_lowercase, " ", ".", ","]
    tokenizer = character_tokenizer(characters)
    other = character_tokenizer([*reversed(characters), "th", "he", "an", "in"])
    target, draft = tiny_model(target_case, vocab_size=len(tokenizer)), tiny_model(draft_case, vocab_size=len(other))
    for seed in range(5):
        ids = torch.randint(4, len(tokenizer), (1, 12), generator=torch.Generator().manual_seed(seed))
        arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 16}
        greedy = target.generate(ids, **arguments)
        arguments |= {"assistant_model": draft, "tokenizer": tokenizer, "assistant_tokenizer": other}
        assert torch.equal(target.generate(ids, **arguments), greedy)
    del arguments["tokenizer"], arguments["assistant_tokenizer"]
    with pytest.raises(ValueError, match="different tokenizers"):
        target.generate(ids, **arguments)


def test_ones_own_decoding_loop(model):
    """A callable as `custom_generate` gets our cache and may fork it: here, a look one token ahead for each of three."""

    def look_ahead(model, input_ids, *_, cache, **kwargs):
        assert type(cache) is AvgPathCache
        logits = model(input_ids, cache=cache).logits[:, -1]
        for _ in range(4):
            scores = []
            for token in logits.topk(3).indices[0]:
                ahead = model(token[None, None], cache=cache.fork()).logits[:, -1]
                scores.append((ahead.logsumexp(-1).item(), token))
            input_ids = torch.cat((input_ids, max(scores, key=lambda score: score[0])[1][None, None]), dim=1)
            logits = model(input_ids[:, -1:], cache=cache).logits[:, -1]
        return input_ids, logits

    ids = random_ids(1, 9)
    with torch.no_grad():
        output, logits = model.generate(ids, custom_generate=look_ahead, max_new_tokens=4)
        assert_close(logits, model(output).logits[:, -1])


@pytest.mark.parametrize("case", ["softmax", "sliding_softmax", "softmax_middle"])
def test_what_cannot_work_is_refused(case):
    model = tiny_model(case)
    ids = random_ids(1, 5)
    with pytest.raises(ValueError, match="Continuous batching"):
        model.generate_batch([ids[0].tolist()])
    with pytest.raises(ValueError, match="Continuous batching"):
        model.generate(ids, cache_implementation="paged")
    with pytest.raises(ValueError, match="assistant_early_exit=1"):
        model.generate(ids, assistant_early_exit=1, do_sample=False)
    if case != "softmax":
        with pytest.raises(ValueError, match="QuantizedCache"):
            model.generate(ids, cache_implementation="quantized")


def test_a_batch_that_changes_between_turns(model):
    cache = AvgPathCache(model.config)
    model(random_ids(3, 6), cache=cache)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="3 rows but the input has 2"):
        model(random_ids(2, 1), cache=cache)
    cache.batch_select_indices(torch.tensor([0, 2]))
    before.batch_select_indices(torch.tensor([0, 2]))
    ids = random_ids(2, 2)
    assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=before).logits)
