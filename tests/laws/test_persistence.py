"""Law 6. Save, load, continue is bitwise equal to continue; a fork leaves the original as it is; strangers are refused."""

import copy
import json
import pickle
import random

import pytest
import torch
from laws.cases import random_ids, state_of, tiny_model

from modeling_avgpath import AvgPathCache
from modeling_avgpath.cache_files import FACTS, TENSORS


@torch.no_grad()
def filled(model, length: int = 13):
    """A cache that has read two rows, one of them padded."""
    cache = AvgPathCache(model.config)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :4] = 0
    model(random_ids(2, length), attention_mask=mask, cache=cache)
    return cache


@torch.no_grad()
def continued(model, cache) -> torch.Tensor:
    past = cache.get_seq_length()
    mask = torch.ones(2, past + 6, dtype=torch.long)
    mask[0, :4] = 0
    return model(random_ids(2, 6, seed=5), attention_mask=mask, cache=cache).logits


def assert_bitwise(actual, expected) -> None:
    actual, expected = state_of(actual), state_of(expected)
    assert actual.keys() == expected.keys()
    for name in actual:
        assert actual[name].dtype == expected[name].dtype and torch.equal(actual[name], expected[name]), name


def test_save_load_continue(model, tmp_path):
    cache = filled(model)
    cache.save_pretrained(tmp_path)
    loaded = AvgPathCache.from_pretrained(tmp_path)
    assert loaded.get_seq_length() == 13 and loaded.nbytes == cache.nbytes
    assert_bitwise(loaded, cache)
    assert torch.equal(continued(model, loaded), continued(model, cache))
    assert_bitwise(loaded, cache)


def test_saving_again_before_use_keeps_the_fingerprint(model, tmp_path):
    cache = filled(model)
    cache.save_pretrained(tmp_path / "first")
    AvgPathCache.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    for name in (FACTS, TENSORS):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.parametrize("duplicate", [AvgPathCache.fork, copy.deepcopy])
@pytest.mark.parametrize("record", [False, True])
def test_a_fork_leaves_the_original(model, duplicate, record):
    cache = AvgPathCache(model.config)
    if record:
        cache.activate_past_recording(10)
    with torch.no_grad():
        model(random_ids(2, 13), cache=cache)
        before = {name: state.clone() for name, state in state_of(cache).items()}
        fork = duplicate(cache)
        assert_bitwise(fork, cache)
        model(random_ids(2, 6, seed=5), cache=fork)
        if record:
            fork.crop(-9)
        fork.batch_select_indices(torch.tensor([1]))
    assert cache.get_seq_length() == 13
    for name, state in state_of(cache).items():
        assert torch.equal(state, before[name]), name


def test_a_fork_of_a_cache_with_gradients(model):
    """Filled without no_grad, a cache carries its graph; forks do too, and share nothing else."""
    cache = AvgPathCache(model.config)
    embeddings = model.get_input_embeddings()(random_ids(1, 9)).detach().requires_grad_()
    model(inputs_embeds=embeddings, cache=cache)
    fork = cache.fork()
    model(random_ids(1, 3), cache=fork).logits.square().sum().backward()
    assert embeddings.grad.abs().sum() > 0
    assert cache.get_seq_length() == 9 and fork.get_seq_length() == 12


def test_pickle(model, case):
    """As between processes: it continues bit for bit, and only with the weights that filled it."""
    cache = filled(model)
    cache.activate_past_recording()
    twin = pickle.loads(pickle.dumps(cache))
    assert_bitwise(twin, cache)
    with pytest.raises(ValueError, match="other weights"):
        continued(tiny_model(case, seed=1), twin)
    assert torch.equal(continued(model, twin), continued(model, cache))


def test_reset_keeps_recording(model):
    cache = AvgPathCache(model.config)
    cache.activate_past_recording(4)
    with torch.no_grad():
        model(random_ids(2, 9), cache=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        model(random_ids(2, 9, seed=2), cache=cache)
    cache.crop(-4)
    assert cache.get_seq_length() == 5


def test_an_empty_cache_is_saved_as_such(model, tmp_path):
    AvgPathCache(model.config).save_pretrained(tmp_path)
    loaded = AvgPathCache.from_pretrained(tmp_path)
    assert loaded.get_seq_length() == 0 and loaded.nbytes == 0
    assert torch.equal(continued_from_nothing(model, loaded), continued_from_nothing(model, AvgPathCache(model.config)))


@torch.no_grad()
def continued_from_nothing(model, cache) -> torch.Tensor:
    return model(random_ids(2, 6), cache=cache).logits


def test_other_weights_and_dtypes_are_refused(model, case, tmp_path):
    filled(model).save_pretrained(tmp_path)
    for stranger in (tiny_model(case, seed=1), tiny_model(case).to(torch.bfloat16)):
        loaded = AvgPathCache.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match="other weights or another dtype"):
            continued(stranger, loaded)
        assert loaded.get_seq_length() == 13
        assert continued(model, loaded).isfinite().all()  # and stays good for its own model


def test_other_configs_are_refused(tmp_path):
    filled(tiny_model("softmax_last")).save_pretrained(tmp_path)
    loaded = AvgPathCache.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="belongs to another model: mixer_types"):
        continued(tiny_model("all_recurrent"), loaded)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damaged_files_are_refused_or_load_bitwise(damage, tmp_path):
    """100 random offsets in both files: a clear error, or a load that is bitwise equal; never anything else."""
    model = tiny_model("three_cache_kinds")
    cache = filled(model)
    cache.save_pretrained(tmp_path)
    generator, refused = random.Random(0), 0
    for _ in range(100):
        file = tmp_path / generator.choice((FACTS, TENSORS))
        content = file.read_bytes()
        offset = generator.randrange(len(content))
        if damage == "truncate":
            file.write_bytes(content[:offset])
        else:
            flipped = content[offset] ^ generator.randrange(1, 256)
            file.write_bytes(content[:offset] + bytes([flipped]) + content[offset + 1 :])
        try:
            assert_bitwise(AvgPathCache.from_pretrained(tmp_path), cache)
        except ValueError as error:
            refused += 1
            assert str(tmp_path) in str(error)
        file.write_bytes(content)
    assert refused > 60
    assert_bitwise(AvgPathCache.from_pretrained(tmp_path), cache)


def test_missing_files_and_newer_formats_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="cache.json is missing"):
        AvgPathCache.from_pretrained(tmp_path)
    filled(tiny_model("softmax")).save_pretrained(tmp_path)
    (tmp_path / TENSORS).rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="cache.safetensors is missing"):
        AvgPathCache.from_pretrained(tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / TENSORS)
    document = json.loads((tmp_path / FACTS).read_text())
    document["facts"]["format"] = 99
    (tmp_path / FACTS).write_text(json.dumps(document))
    with pytest.raises(ValueError, match="changed after it was written"):
        AvgPathCache.from_pretrained(tmp_path)
