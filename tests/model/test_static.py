"""Static caches and compiled decoding: the same tokens, one graph without breaks, no recompilation as the text grows."""

import shutil

import pytest
import torch
from laws.cases import CASES, LAYOUTS, assert_close, random_ids, tiny_model
from transformers import CompileConfig, StaticCache

NEW = 14
COMPILED = [  # one of each kind of memory, readout and cache; compiling takes seconds a model
    "softmax", "sliding_softmax", "identity@mean_field", "linear", "delta_net@mean_field", "gated_delta_net", "mesa_net",
    "ttt_linear@expectation", "ttt_mlp", "softmax_last",
]  # fmt: skip


def padded_prompt():
    ids = random_ids(3, 12)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, :2] = 0, 0
    return ids, mask


@pytest.mark.parametrize("case", CASES)
def test_static_equals_dynamic(case):
    model = tiny_model(case)
    ids, mask = padded_prompt()
    arguments = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    expected = model.generate(ids, **arguments)
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **arguments)
    assert torch.equal(static, expected)


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_decoding_in_one_graph(case):
    """Dynamo traces the decode step whole (`fullgraph`) and once; what runs the graph is another matter."""
    model = tiny_model(case)
    ids, mask = padded_prompt()
    arguments = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40}
    expected = model.generate(ids, **arguments)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compile_config = CompileConfig(fullgraph=True, dynamic=False, mode=None, backend=backend)
    compile_config._compile_all_devices = True
    static = model.generate(ids, cache_implementation="static", compile_config=compile_config, **arguments)
    assert torch.equal(static, expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_users_static_cache(case):
    """In pieces, with addresses that stay and states that equal those of a dynamic cache."""
    model = tiny_model(case)
    ids = random_ids(2, 30)
    cache = StaticCache(config=model.config, max_cache_len=40)
    logits = [model(ids[:, :9], cache=cache).logits]
    addresses = [tensor.data_ptr() for layer in cache.layers for tensor in getattr(layer, "states", {}).values()]
    logits += [model(ids[:, step : step + 1], cache=cache).logits for step in range(9, 14)]
    logits += [model(ids[:, 14:], cache=cache).logits]
    assert_close(torch.cat(logits, dim=1), model(ids).logits)
    assert addresses == [
        tensor.data_ptr() for layer in cache.layers for tensor in getattr(layer, "states", {}).values()
    ]


@pytest.mark.parametrize("case", ["softmax_last", "delta_net@mean_field"])
@torch.no_grad()
def test_more_tokens_than_there_is_room_for(case):
    model = tiny_model(case)
    cache = StaticCache(config=model.config, max_cache_len=12)
    model(random_ids(1, 10), cache=cache)
    with pytest.raises(ValueError, match="room for 12 tokens, but 10 are there and 3 are to come.*max_cache_len"):
        model(random_ids(1, 3), cache=cache)
    whole = model(torch.cat((random_ids(1, 10), random_ids(1, 2, seed=5)), dim=1)).logits
    assert_close(model(random_ids(1, 2, seed=5), cache=cache).logits, whole[:, 10:])


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize("case", ["softmax_last", "mesa_net"])
@torch.no_grad()
def test_compiled_by_inductor(case):
    """`torch.compile` of the plain forward: no graph break, one graph for all lengths."""
    model = tiny_model(case)
    ids = random_ids(1, 60)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = StaticCache(config=model.config, max_cache_len=60)
    step = torch.compile(model.forward, fullgraph=True, dynamic=False)
    logits = [model(ids[:, :8], cache=cache).logits]
    logits += [step(input_ids=ids[:, place : place + 1], cache=cache).logits for place in range(8, 60)]
    assert_close(torch.cat(logits, dim=1), model(ids).logits)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("case", ["softmax_last", "three_cache_kinds", "all_recurrent"])
def test_static_with_prompt_lookup_and_beams(case):
    model = tiny_model(case)
    ids = torch.cat((random_ids(1, 9), random_ids(1, 9)), dim=1)
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    for extra in ({"prompt_lookup_num_tokens": 3}, {"num_beams": 3}):
        expected = model.generate(ids, **extra, **arguments)
        static = {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(model.generate(ids, **extra, **static, **arguments), expected)


@pytest.mark.parametrize("case", [*LAYOUTS, "sliding_softmax"])
@torch.no_grad()
def test_a_mask_over_the_whole_room(case):
    """Padding in one's own loop: a mask as long as the static cache, whatever it says of tokens to come; one graph."""
    model = tiny_model(case)
    ids, mask = random_ids(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[0, :5], mask[1, :2] = 0, 0
    expected = model(ids, attention_mask=mask).logits[:, 8:]
    torch._dynamo.reset()
    graphs = []
    step = torch.compile(
        model.forward, fullgraph=True, dynamic=False, backend=lambda graph, _: graphs.append(0) or graph
    )
    for forward in (model.forward, step):
        cache = StaticCache(config=model.config, max_cache_len=40)
        model(ids[:, :8], attention_mask=mask[:, :8], cache=cache)
        logits = [
            forward(input_ids=ids[:, place : place + 1], attention_mask=mask, cache=cache).logits
            for place in range(8, 30)
        ]
        assert_close(torch.cat(logits, dim=1), expected[:, :22])
    assert len(graphs) == 1


@torch.no_grad()
def test_one_graph_for_512_tokens():
    model = tiny_model("softmax_last")
    ids = random_ids(1, 520)
    torch._dynamo.reset()
    graphs = []
    step = torch.compile(
        model.forward, fullgraph=True, dynamic=False, backend=lambda graph, _: graphs.append(0) or graph
    )
    cache = StaticCache(config=model.config, max_cache_len=520)
    logits = [model(ids[:, :8], cache=cache).logits]
    logits += [step(input_ids=token, cache=cache).logits for token in ids[:, 8:].split(1, dim=1)]
    assert_close(torch.cat(logits, dim=1), model(ids).logits)
    assert len(graphs) == 1
