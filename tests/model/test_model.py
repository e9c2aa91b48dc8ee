"""What a user of Transformers does with a model besides generating."""

import pytest
import torch
from laws.cases import CASES, assert_close, random_ids, tiny_config, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from modeling_avgpath import AvgPathCache, AvgPathForCausalLM, AvgPathForSequenceClassification, AvgPathModel

MIXED = ["softmax", "sliding_softmax", "identity", "gated_delta_net", "mesa_net@mean_field", "ttt_mlp"]


@pytest.fixture(params=list(CASES))
def model(request):
    return tiny_model(request.param)


@pytest.fixture
def mixed():
    torch.manual_seed(0)
    return AvgPathForCausalLM(tiny_config(MIXED)).eval()


def test_save_and_load_through_the_auto_classes(model, tmp_path):
    ids = random_ids(2, 9)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is AvgPathForCausalLM
    if model.config._attn_implementation != "eager":  # the implementation is a choice of the loading side
        assert torch.equal(loaded(ids).logits, expected)
    assert_close(loaded(ids).logits, expected, 1e-5)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is AvgPathModel
    assert_close(loaded.lm_head(base(ids).last_hidden_state), expected, 1e-5)


def test_missing_weights_are_initialised_as_at_construction(model, tmp_path):
    """Loading the base model into a new head, on the meta device first: every parameter gets a finite value."""
    model.model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(loaded) is AvgPathForSequenceClassification
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    assert loaded(random_ids(1, 5)).logits.isfinite().all()


def test_initialisation_from_the_meta_device(model, tmp_path):
    """A checkpoint without one layer's mixer: what is missing is drawn as at construction, not left as it was."""
    config = model.config
    torch.manual_seed(3)
    fresh = AvgPathForCausalLM(config)
    weights = {name: value for name, value in fresh.state_dict().items() if ".layers.0.mixer." not in name}
    loaded = AvgPathForCausalLM.from_pretrained(None, config=config, state_dict=weights)
    for name, parameter in loaded.named_parameters():
        assert not parameter.is_meta and parameter.isfinite().all(), name
        reference = fresh.get_parameter(name)
        if name in weights:
            assert torch.equal(parameter, reference), name
        elif reference.numel() > 50:  # as spread as a fresh draw, or equally constant
            assert torch.allclose(parameter.std(), reference.std(), rtol=0.5, atol=1e-6), name
            assert torch.allclose(parameter.mean(), reference.mean(), atol=0.5 * reference.std().item() + 1e-3), name


def test_loss_counts_items(mixed):
    ids = random_ids(2, 12)
    logits = mixed(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    assert_close(mixed(ids, labels=ids).loss, expected / 22, 1e-6)
    assert_close(mixed(ids, labels=ids, num_items_in_batch=100).loss, expected / 100, 1e-6)


def test_logits_to_keep(mixed):
    ids = random_ids(2, 12)
    logits = mixed(ids).logits
    assert torch.equal(mixed(ids, logits_to_keep=3).logits, logits[:, -3:])
    assert torch.equal(mixed(ids, logits_to_keep=torch.tensor([0, 5])).logits, logits[:, [0, 5]])


def test_inputs_embeds(mixed):
    ids = random_ids(2, 12)
    assert torch.equal(mixed(inputs_embeds=mixed.get_input_embeddings()(ids)).logits, mixed(ids).logits)


def test_hidden_states_and_attentions_are_recorded():
    torch.manual_seed(0)
    model = AvgPathForCausalLM(tiny_config(MIXED, attn_implementation="eager")).eval()
    ids = random_ids(2, 12)
    outputs = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(outputs.hidden_states) == len(MIXED) + 1
    assert all(hidden.shape == (2, 12, model.config.hidden_size) for hidden in outputs.hidden_states)
    assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits, 1e-6)
    (weights,) = outputs.attentions  # one softmax layer
    assert weights.shape == (2, 4, 12, 12)
    assert_close(weights.sum(-1), torch.ones(2, 4, 12), 1e-5)
    assert weights.triu(1).abs().max() == 0


def test_tuples_and_old_names(mixed):
    ids = random_ids(1, 6)
    assert torch.equal(mixed(ids, return_dict=False)[0], mixed(ids).logits)
    cache = AvgPathCache(mixed.config)
    with pytest.warns(FutureWarning, match="past_key_values"):
        mixed(ids, past_key_values=cache)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("side", ["left", "right"])
def test_sequence_classification_pools_the_last_real_token(side):
    torch.manual_seed(0)
    model = AvgPathForSequenceClassification(tiny_config(MIXED, num_labels=3)).eval()
    rows = [random_ids(5), random_ids(9, seed=2)]
    ids = torch.stack(
        [torch.nn.functional.pad(r, (9 - len(r), 0) if side == "left" else (0, 9 - len(r))) for r in rows]
    )
    logits = model(ids, attention_mask=(ids != 0).long()).logits
    for row, logit in zip(rows, logits, strict=True):
        assert_close(logit, model(row[None]).logits[0])
    loss = model(ids, attention_mask=(ids != 0).long(), labels=torch.tensor([0, 2])).loss
    assert_close(loss, torch.nn.functional.cross_entropy(logits, torch.tensor([0, 2])), 1e-5)


def test_embeddings_resize_and_tie(tmp_path):
    torch.manual_seed(0)
    model = AvgPathForCausalLM(tiny_config(["delta_net", "softmax"], tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    rows = model.lm_head.weight.detach().clone()
    model.resize_token_embeddings(110)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.shape[0] == 110
    assert torch.equal(model.lm_head.weight[:97], rows)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_attention_implementation_can_be_changed(mixed):
    ids = random_ids(2, 12)
    expected = mixed(ids).logits
    mixed.set_attn_implementation("eager")
    assert_close(mixed(ids).logits, expected, 1e-5)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "llama3"])
def test_rope_types(rope_type):
    parameters = {
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 2.0, "original_max_position_embeddings": 64},
        "llama3": {
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    }[rope_type]
    parameters |= {"rope_type": rope_type, "rope_theta": 10000.0}
    pattern = ["softmax", "sliding_softmax", "delta_net@mean_field"]
    torch.manual_seed(0)
    model = AvgPathForCausalLM(tiny_config(pattern, rope_parameters=parameters, max_position_embeddings=128)).eval()
    plain = AvgPathForCausalLM(tiny_config(pattern, max_position_embeddings=128)).eval()
    plain.load_state_dict(model.state_dict())
    ids = random_ids(1, 40)
    logits = model(ids).logits
    assert logits.isfinite().all()
    if rope_type != "dynamic":  # which only sets in beyond max_position_embeddings
        assert not torch.allclose(logits, plain(ids).logits, atol=1e-3)
