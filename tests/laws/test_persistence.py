"""Law 6. Save, load, continue is bitwise equal to continue; a fork leaves the original as it is; strangers are refused."""

import copy
import gc
import hashlib
import json
import pickle
import random

import pytest
import torch
from laws.cases import random_ids, state_of, tiny_model
from safetensors.torch import save_file
from transformers import DynamicCache, StaticCache

from modeling_avgpath import AvgPathCache
from modeling_avgpath.cache_files import CACHE_FILE


@torch.no_grad()
def filled(model, make=AvgPathCache):
    """A cache that has read two rows, one of them padded."""
    cache = make(model.config)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    model(random_ids(2, 13), attention_mask=mask, cache=cache)
    return cache


@torch.no_grad()
def continued(model, cache) -> torch.Tensor:
    past = int(cache.get_seq_length())
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
    assert (tmp_path / "first" / CACHE_FILE).read_bytes() == (tmp_path / "second" / CACHE_FILE).read_bytes()


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


def test_what_is_neither_pickled_nor_saved(tmp_path):
    model = tiny_model("softmax_middle")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(filled(model, lambda config: DynamicCache(config=config, offloading=True)))
    with pytest.raises(TypeError, match="AvgPathCache"):
        filled(model, lambda config: StaticCache(config, 30)).save_pretrained(tmp_path)


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
    model = tiny_model("softmax_last")
    filled(model).save_pretrained(tmp_path)
    loaded = AvgPathCache.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="belongs to another model: mixer_types"):
        continued(tiny_model("all_recurrent"), loaded)


def test_a_single_changed_weight_is_noticed(tmp_path):
    model = tiny_model("softmax_middle")
    filled(model).save_pretrained(tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[7, 5] *= 1.001
    with pytest.raises(ValueError, match="other weights"):
        continued(model, AvgPathCache.from_pretrained(tmp_path))


def test_which_weights_filled_a_cache(tmp_path):
    """The fingerprint is that of the weights which filled it; when it cannot be known any more, saving says so."""
    model = tiny_model("softmax_middle")
    known, unknown = filled(model), filled(model)
    assert known.fingerprint  # asked for once, it is kept
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)
    with pytest.raises(ValueError, match="has other weights by now"):
        unknown.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has other weights by now"):
        pickle.dumps(unknown)
    unknown.reset()
    continued_from_nothing(model, unknown)
    assert unknown.fingerprint != known.fingerprint
    known.save_pretrained(tmp_path)
    orphan = filled(model)
    del model
    gc.collect()
    with pytest.raises(ValueError, match="is gone"):
        orphan.save_pretrained(tmp_path)
    continued(tiny_model("softmax_middle"), AvgPathCache.from_pretrained(tmp_path))


def test_writes_behind_the_back_are_noticed(tmp_path):
    """As PEFT merges adapters: through `.data`, which counts no version."""
    model = tiny_model("softmax_last")
    cache = filled(model)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    with pytest.raises(ValueError, match="has other weights by now"):
        cache.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "make",
    [AvgPathCache, lambda config: DynamicCache(config=config, offloading=True), lambda config: StaticCache(config, 30)],
    ids=["dynamic", "offloaded", "static"],
)
def test_a_cache_in_memory_is_refused_by_other_weights(make):
    model, equal, other = (tiny_model("softmax_middle", seed=seed) for seed in (0, 0, 1))
    cache = filled(model, make)
    with pytest.raises(ValueError, match="other weights"):
        continued(other, cache)
    assert int(cache.get_seq_length()) == 13
    assert continued(equal, cache).isfinite().all()
    cache.reset()
    assert continued_from_nothing(other, cache).isfinite().all()


@pytest.mark.parametrize(
    "override",
    [
        {"linear_allow_neg_eigval": True},
        {"ttt_base_lr": 0.5},
        {"rms_norm_eps": 1e-3},
        {"ttt_rope_theta": 10.0},
        {"mesa_max_cg_steps": 2},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}},
    ],
    ids=lambda override: next(iter(override)),
)
def test_configs_that_change_states_are_compared(override):
    """The same weights, read otherwise."""
    model = tiny_model("softmax_middle")
    other = tiny_model("softmax_middle", **override)
    other.load_state_dict(model.state_dict())
    cache = filled(model)
    with pytest.raises(ValueError, match=f"belongs to another model: {next(iter(override))}"):
        continued(other, cache)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damaged_files_are_refused_or_load_bitwise(damage, tmp_path):
    """100 random offsets: a clear error, or a load that is bitwise equal; never anything else."""
    model = tiny_model("three_cache_kinds")
    cache = filled(model)
    cache.save_pretrained(tmp_path)
    file, generator, refused = tmp_path / CACHE_FILE, random.Random(0), 0
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for trial in range(100):
        offset = generator.randrange(header if trial % 2 else len(content))  # half of them where the facts are
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
    assert refused > 90
    file.write_bytes(content)
    assert_bitwise(AvgPathCache.from_pretrained(tmp_path), cache)


def test_files_of_another_kind_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="cache.safetensors is missing"):
        AvgPathCache.from_pretrained(tmp_path)
    model = tiny_model("softmax")
    filled(model).save_pretrained(tmp_path)
    for call in (AvgPathCache.from_pretrained, filled(model).save_pretrained):
        with pytest.raises(NotADirectoryError, match=f"{CACHE_FILE} is a file"):
            call(tmp_path / CACHE_FILE)
    with pytest.raises(RuntimeError, match="nonsense"):
        AvgPathCache.from_pretrained(tmp_path, device="nonsense")
    newer = json.dumps({"format": 99})
    for header, message in (
        ({"facts": f"{hashlib.sha256(newer.encode()).hexdigest()} {newer}"}, "format 99, this version reads"),
        ({"facts": "0" * 64 + " " + "[" * 100_000}, "changed after it was written"),
        (None, "changed after it was written"),
    ):
        save_file({"0.keys": torch.ones(2)}, tmp_path / CACHE_FILE, metadata=header)
        with pytest.raises(ValueError, match=message):
            AvgPathCache.from_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / CACHE_FILE]  # no leftovers of saving
