"""Our mixers against the layers they stand in for: same parameter names and shapes, and where it runs, same numbers."""

from pathlib import Path

import pytest
import torch
from laws.cases import assert_close
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import OlmoHybridConfig
from transformers.models.olmo_hybrid import modeling_olmo_hybrid

from modeling_avgpath import AvgPathConfig
from modeling_avgpath.modeling_avgpath import MIXERS

DATA = Path(__file__).parents[1] / "data"


def make_mixer(memory: str, **fields):
    config = AvgPathConfig(num_hidden_layers=1, mixer_types=[memory], **fields)
    return MIXERS[memory](config, 0)


@pytest.mark.parametrize("memory", ["ttt_linear", "ttt_mlp"])
@pytest.mark.parametrize("length", [48, 37])
def test_ttt_reference_layer(memory, length):
    """Weights, input, output and input gradient recorded from the reference implementation, to 1e-5."""
    path = DATA / f"{memory}_L{length}.safetensors"
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    hidden_size, heads = int(facts["hidden_size"]), int(facts["num_heads"])
    mixer = make_mixer(
        memory,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        ttt_base_lr=float(facts["ttt_base_lr"]),
        ttt_mini_batch_size=int(facts["mini_batch_size"]),
        ttt_rope_theta=float(facts["rope_theta"]),
        linear_use_output_gate=False,
    )
    weights = {name.removeprefix("weights."): value for name, value in tensors.items() if name.startswith("weights.")}
    weights = {name.replace("post_norm", "o_norm"): value for name, value in weights.items()}
    mixer.load_state_dict(weights)
    x = tensors["input"].requires_grad_()
    output, _ = mixer(x)
    output.backward(tensors["grad_output"])
    assert_close(output, tensors["output"], 1e-5)
    assert_close(x.grad, tensors["grad_input"], 1e-5)


@pytest.fixture
def torch_gated_delta_rule(monkeypatch):
    """The in-tree layer picks flash-linear-attention's kernels wherever they import; on a CPU it must not."""
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        function = getattr(modeling_olmo_hybrid, name)
        monkeypatch.setattr(modeling_olmo_hybrid, name, getattr(function, "__wrapped__", function))


@pytest.mark.parametrize("negative", [False, True])
def test_in_tree_gated_delta_net(torch_gated_delta_rule, negative):
    """OLMo-Hybrid's layer: the same weights, output and gradients."""
    shape = {"linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 24}
    theirs_config = OlmoHybridConfig(
        hidden_size=48, num_attention_heads=2, num_hidden_layers=4, linear_allow_neg_eigval=negative, **shape
    )
    torch.manual_seed(0)
    theirs = modeling_olmo_hybrid.OlmoHybridGatedDeltaNet(theirs_config, 0)
    ours = make_mixer(
        "gated_delta_net",
        hidden_size=48,
        num_attention_heads=2,
        linear_allow_neg_eigval=negative,
        rms_norm_eps=1e-5,  # fixed in their layer
        **shape,
    )
    weights = theirs.state_dict()
    convs = weights.pop("conv1d.weight").split([24, 24, 48])  # theirs are stored in one piece
    weights |= {f"{name}_conv1d.weight": conv for name, conv in zip("qkv", convs, strict=True)}
    ours.load_state_dict(weights)
    x = torch.randn(2, 70, 48)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    actual, expected = ours(inputs[0])[0], theirs(inputs[1])
    assert_close(actual, expected, 1e-5)
    for output in (actual, expected):
        output.square().sum().backward()
    assert_close(inputs[0].grad, inputs[1].grad, 1e-4)


@pytest.mark.parametrize(
    ("memory", "layer", "arguments", "fields"),
    [
        ("delta_net", "DeltaNet", {"num_heads": 4, "use_gate": True}, {}),
        ("delta_net", "DeltaNet", {"num_heads": 4}, {"linear_use_output_gate": False}),
        (
            "gated_delta_net",
            "GatedDeltaNet",
            {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "expand_v": 2},
            {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 32},
        ),
        ("mesa_net", "MesaNet", {"num_heads": 4, "head_dim": 16}, {"linear_use_output_gate": False}),
        ("mesa_net", "MesaNet", {"num_heads": 4, "head_dim": 16, "use_output_gate": True}, {}),
    ],
)
def test_flash_linear_attention_parameter_names(memory, layer, arguments, fields):
    """flash-linear-attention's layers need a GPU to run, but their parameters say whether weights can move."""
    layers = pytest.importorskip("fla.layers", reason="flash-linear-attention is not installed")
    theirs = getattr(layers, layer)(hidden_size=64, layer_idx=0, **arguments)
    ours = make_mixer(memory, hidden_size=64, num_attention_heads=4, **fields)
    ours.load_state_dict(theirs.state_dict())
