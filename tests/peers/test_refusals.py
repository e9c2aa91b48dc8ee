"""What cannot be converted is refused by name, before anything is built, with what is supported."""

import json

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from peers.peers_common import SHAPE, make_peer
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, OlmoHybridConfig, OlmoHybridForCausalLM, Qwen3NextConfig

from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM
from modeling_avgpath.peers import from_peer, peer_config, peer_key_map, peer_state_dict

DELTA = {"model_type": "delta_net", **SHAPE, "num_heads": 4}
ATTENTION = {"layers": [1], "num_heads": 4}


@pytest.fixture
def nothing_is_built(monkeypatch):
    """Fails the test where a model is made."""

    def fail(self, *args, **kwargs):
        raise AssertionError("a model was built")

    monkeypatch.setattr(AvgPathForCausalLM, "__init__", fail)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LlamaConfig(), ["'llama'", "delta_net, gated_deltanet, mesa_net, olmo_hybrid, qwen3_next"]),
        (AvgPathConfig(), ["'avgpath'", "AutoModelForCausalLM"]),
        ({}, ["None", "olmo_hybrid"]),
        (Qwen3NextConfig(), ["mixture of experts", "48 layers", "first 0", "mlp_only_layers"]),
        (Qwen3NextConfig(num_hidden_layers=4, mlp_only_layers=[0, 1, 3]), ["1 layers", "first 2"]),
        (Qwen3NextConfig(num_experts=0, hidden_act="gelu"), ["hidden_act='gelu'", "'silu'"]),
        (OlmoHybridConfig(hidden_act="relu"), ["olmo_hybrid", "hidden_act='relu'"]),
        (
            OlmoHybridConfig(num_hidden_layers=2, layer_types=["linear_attention", "sliding_attention"]),
            ["layer_types", "'sliding_attention'", "linear_attention, full_attention"],
        ),
        ({**DELTA, "hidden_act": "powlu"}, ["delta_net", "hidden_act='powlu'", "SiLU"]),
        ({**DELTA, "attnres_block_size": 4}, ["attnres_block_size=4", "None"]),
        ({**DELTA, "qk_norm": "sum"}, ["qk_norm='sum'", "'l2'"]),
        ({**DELTA, "qk_activation": "elu"}, ["qk_activation='elu'", "'silu'"]),
        ({**DELTA, "use_beta": False}, ["use_beta=False", "True"]),
        ({**DELTA, "attn": [ATTENTION, {**ATTENTION, "layers": [2], "num_heads": 2}]}, ["attn", "one num_heads"]),
        (
            {**DELTA, "attn": [{**ATTENTION, "window_size": 4}, {"layers": [2], "num_heads": 4, "window_size": 8}]},
            ["attn", "window_size for all"],
        ),
        ({**DELTA, "attn": {"layers": [7], "num_heads": 4}}, ["attn", "layers 0 ... 3"]),
        ({**DELTA, "hidden_size": "big"}, ["hidden_size='big'", "int, like 2048"]),
        ({**DELTA, "quantization_config": {"bits": 4}}, ["quantized"]),
        (
            {**DELTA, "model_type": "gated_deltanet", "output_gate_activation": "tanh"},
            ["output_gate_activation='tanh'"],
        ),
        ({**DELTA, "model_type": "mesa_net", "lambda_lower_bound": 0.0}, ["lambda_lower_bound=0.0", "positive"]),
    ],
)
def test_configs(config, words, tmp_path, nothing_is_built):
    with pytest.raises(ValueError) as error:
        peer_config(config)
    for word in words:
        assert word in str(error.value)
    if isinstance(config, dict):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError) as again:
            from_peer(tmp_path)  # there are no weights either, but the config is what is wrong
        assert str(again.value) == str(error.value)


def test_models_of_other_kinds():
    with pytest.raises(ValueError, match="'llama'"):
        from_peer(LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4)))
    with pytest.raises(TypeError, match="int"):
        from_peer(3)


@pytest.fixture
def checkpoint(tmp_path):
    """A DeltaNet checkpoint as flash-linear-attention would save it, made without it."""
    ours = make_peer(AvgPathForCausalLM, peer_config(DELTA))
    (tmp_path / "config.json").write_text(json.dumps(DELTA))
    save_file(peer_state_dict(ours, DELTA), tmp_path / "model.safetensors")
    return tmp_path, ours


def test_checkpoint(checkpoint):
    path, ours = checkpoint
    loaded = from_peer(path).state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, loaded[name]), name


def test_weights_are_listed(checkpoint, monkeypatch):
    path, _ = checkpoint
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.attn.D"] = weights.pop("model.layers.0.attn.b_proj.weight")
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(7, 48)
    weights["mtp.layers.0.weight"] = torch.zeros(2)  # left aside
    save_file(weights, file)
    monkeypatch.setattr(AvgPathForCausalLM, "from_pretrained", None)
    with pytest.raises(ValueError) as error:
        from_peer(path)
    for words in (
        "1 missing: model.layers.0.attn.b_proj.weight;",
        "1 unexpected: model.layers.0.attn.D;",
        "1 mis-shaped: model.layers.2.mlp.up_proj.weight is (7, 48) instead of (80, 48).",
    ):
        assert words in str(error.value)
    save_file({"lm_head.weight": torch.zeros(97, 48)}, file)
    with pytest.raises(ValueError, match=r"missing: model.embeddings.weight, .*and \d+ more"):
        from_peer(path)
    file.unlink()
    with pytest.raises(ValueError, match="model.safetensors"):
        from_peer(path)


def test_files_at_fault_are_named(checkpoint, monkeypatch):
    path, ours = checkpoint
    monkeypatch.setattr(AvgPathForCausalLM, "from_pretrained", None)
    save_torch_state_dict(peer_state_dict(ours, DELTA), path, max_shard_size="50KB")  # instead of the one file
    shard = sorted(path.glob("model-*.safetensors"))[1]
    index, config = path / "model.safetensors.index.json", path / "config.json"
    for file, damage in ((shard, shard.read_bytes()[:40]), (index, b'{"weight_map": {"lm'), (index, b"{}"), (index, b"[]"),
                         (config, b'{"model_type": '), (config, b"3")):  # fmt: skip
        content = file.read_bytes()
        file.write_bytes(damage)
        with pytest.raises(ValueError, match=rf"{file.name} of .*{path.name} is damaged.*[Ff]etch it anew"):
            from_peer(path)
        file.write_bytes(content)
    for file, words in ((shard, f"{shard.name} of the checkpoint .* is missing.*Fetch it anew"),
                        (config, f"{path.name} has no config.json.*copy it from")):  # fmt: skip
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(FileNotFoundError, match=words):
            from_peer(path)
        file.write_bytes(content)


def test_tied_embeddings_must_agree(checkpoint):
    path, ours = checkpoint
    (path / "config.json").write_text(json.dumps({**DELTA, "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="tie_word_embeddings.*lm_head.weight is not model.embeddings.weight"):
        from_peer(path)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embeddings.weight"].clone()
    save_file(weights, path / "model.safetensors")
    loaded = from_peer(path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_weights_that_are_not_there():
    config = OlmoHybridConfig(**SHAPE, num_attention_heads=4, linear_key_head_dim=8)
    with torch.device("meta"):
        model = OlmoHybridForCausalLM(config)
    with pytest.raises(ValueError, match="not in memory"):
        from_peer(model)


def test_back_only_where_the_peer_can_follow():
    config = {**DELTA, "use_short_conv": False, "attn": {**ATTENTION, "qkv_bias": True}}
    key_map = peer_key_map(config)
    assert set(key_map.constants.values()) == {0.0, 1.0}
    model = AvgPathForCausalLM(peer_config(config))
    with torch.no_grad():
        for name, value in key_map.constants.items():
            model.get_parameter(name).fill_(value)
    assert "model.layers.0.attn.q_conv1d.weight" not in peer_state_dict(model, config)
    with torch.no_grad():
        model.model.layers[1].mixer.o_proj.bias[3] = 0.5
    with pytest.raises(ValueError, match="trained: model.layers.1.mixer.o_proj.bias"):
        peer_state_dict(model, config)
    other = AvgPathForCausalLM(AvgPathConfig(**{**peer_config(config).to_dict(), "query_map": True}))
    with pytest.raises(ValueError, match="query_map"):
        peer_state_dict(other, config)
    with pytest.raises(ValueError, match="linear_allow_neg_eigval is False instead of True"):
        peer_state_dict(model, {**config, "allow_neg_eigval": True})
