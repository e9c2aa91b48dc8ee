"""Assisted decoding and prompt lookup give greedy's tokens, for every spec, with AvgPath or Llama as the draft."""

import pytest
import torch
from laws.cases import CASES, VOCAB, random_ids, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

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
        "AvgPath draft": {"assistant_model": tiny_model("softmax_middle", seed=5)},
        "Llama draft": {"assistant_model": llama()},
        "itself": {"assistant_model": tiny_model_like(model)},
    }
    accepted = dict.fromkeys(drafts, 0)
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
    print({name: f"{count} tokens accepted" for name, count in accepted.items()})
    assert accepted["itself"] > 0


def tiny_model_like(model):
    """A second model with the same weights: the draft that is always right."""
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def test_a_recurrent_draft_for_llama():
    target, draft = llama(), tiny_model("all_recurrent")
    for seed in range(SEEDS):
        ids = random_ids(1, 9, seed=seed)
        arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
        assert torch.equal(target.generate(ids, assistant_model=draft, **arguments), target.generate(ids, **arguments))
