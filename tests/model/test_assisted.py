"""Assisted decoding and prompt lookup give greedy's tokens, for every spec, with AvgPath or Llama as the draft."""

import pytest
import torch
from laws.cases import CASES, LAYOUTS, VOCAB, random_ids, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from modeling_avgpath import AvgPathCache

SEEDS = 20
NEW = 12


@pytest.fixture(params=list(CASES))
def model(request):
    return tiny_model(request.param)


def llama():
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Counter:
    """Counts the target's forward passes: with g tokens out of f passes, each pass accepted (g - f) / f drafted ones."""

    def __init__(self, model):
        self.passes = 0
        model.register_forward_pre_hook(self.count)

    def count(self, *_):
        self.passes += 1


def test_all_drafts_give_greedys_tokens(model):
    drafts = {
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        "AvgPath draft": {"assistant_model": twin_of(model, noise=0.05)},
        "Llama draft": {"assistant_model": llama()},
        "itself": {"assistant_model": twin_of(model)},
    }
    accepted, drafted = dict.fromkeys(drafts, 0), 0
    counter = Counter(model)
    for seed in range(SEEDS):
        ids = random_ids(1, 8, seed=seed)
        ids = torch.cat((ids, ids[:, :5]), dim=1)  # something for prompt lookup to find
        arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
        greedy = model.generate(ids, **arguments)
        for name in drafts:
            counter.passes = 0
            assert torch.equal(model.generate(ids, **arguments, **drafts[name]), greedy), (name, seed)
            accepted[name] += greedy.shape[1] - ids.shape[1] - counter.passes
        drafted += greedy.shape[1] - ids.shape[1]
    print({name: f"{count / drafted:.0%} of the tokens were drafted ones" for name, count in accepted.items()})
    assert accepted["itself"] >= accepted["AvgPath draft"] > 0


def twin_of(model, noise: float = 0.0):
    """A second model with the same weights, a draft that is always right; noise makes it wrong at times."""
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(noise * parameter.std(correction=0) * torch.randn_like(parameter))
    return twin


@pytest.mark.parametrize("extra", ["prompt lookup", "draft"])
@pytest.mark.parametrize(
    "make", [AvgPathCache, lambda config: StaticCache(config, max_cache_len=80)], ids=["dynamic", "static"]
)
@pytest.mark.parametrize("case", [*LAYOUTS, "sinks", "identity@mean_field"])
def test_from_a_cache_that_has_read_the_start(case, make, extra):
    """The text may be given as a whole, as to plain generation."""
    model = tiny_model(case)
    ids = random_ids(1, 9).repeat(1, 3)
    extra = {"prompt_lookup_num_tokens": 3} if extra == "prompt lookup" else {"assistant_model": twin_of(model, 0.05)}
    arguments = {"do_sample": False, "max_new_tokens": NEW}
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    cache = make(model.config)
    with torch.no_grad():
        model(ids[:, :14], cache=cache)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **extra, **arguments)
    assert torch.equal(output, greedy)


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_text_that_does_not_go_on_beyond_the_cache(case):
    model = tiny_model(case)
    ids = random_ids(1, 9)
    for extra in ({}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 4}):
        cache = AvgPathCache(model.config)
        with torch.no_grad():
            model(ids, cache=cache)
        for length in (9, 6):
            given = ids[:, :length]
            with pytest.raises(ValueError, match=f"has read 9 tokens and the text given has {length}"):
                model.generate(given, attention_mask=torch.ones_like(given), cache=cache, **extra)
        assert cache.get_seq_length() == 9
    longer = torch.ones(1, 12, dtype=torch.long)
    with pytest.raises(ValueError, match="of 12 tokens input_ids has 3"):
        model.generate(ids[:, :3], attention_mask=longer, cache=cache, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("case", LAYOUTS)
def test_embeddings(case):
    """Of the new tokens alone, or of all; drafts need the ids."""
    model = tiny_model(case)
    ids = random_ids(2, 9)
    embeddings, mask = model.get_input_embeddings()(ids).detach(), torch.ones_like(ids)
    greedy = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)[:, 9:]
    for start in (0, 5, 8):
        cache = AvgPathCache(model.config)
        with torch.no_grad():
            model(ids[:, :5], cache=cache)
            if start == 8:
                model(ids[:, 5:8], cache=cache)
        output = model.generate(
            inputs_embeds=embeddings[:, start:], attention_mask=mask, cache=cache, do_sample=False, max_new_tokens=NEW
        )
        assert torch.equal(output, greedy)
    with pytest.raises(ValueError, match="leave inputs_embeds out"):
        model.generate(ids[:1], inputs_embeds=embeddings[:1], prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("case", ["softmax_middle", "three_cache_kinds"])
@pytest.mark.parametrize("depth", [None, 4])
def test_drafts_longer_than_what_is_recorded_by_default(case, depth):
    model = tiny_model(case)
    ids = random_ids(1, 200, seed=3).repeat(1, 2)
    draft = twin_of(model, 0.05)
    draft.generation_config.num_assistant_tokens = 150
    draft.generation_config.assistant_confidence_threshold = 0
    arguments = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": 160,
        "eos_token_id": None,
    }
    greedy = model.generate(ids, **arguments)
    for extra in ({"prompt_lookup_num_tokens": 190}, {"assistant_model": draft}):
        cache = AvgPathCache(model.config)
        if depth is not None:
            cache.activate_past_recording(depth)
        assert torch.equal(model.generate(ids, cache=cache, **extra, **arguments), greedy)


@pytest.mark.parametrize("case", CASES)
def test_an_avgpath_draft_for_llama(case):
    target, draft = llama(), tiny_model(case)
    for seed in range(3):
        ids = random_ids(1, 9, seed=seed)
        arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
        assert torch.equal(target.generate(ids, assistant_model=draft, **arguments), target.generate(ids, **arguments))
