"""flash-linear-attention's models: every weight finds its place, and the converted model computes what theirs defines.

Their layers call Triton kernels, which need a GPU. Here the same layers are written out around the package's plain
functions, from their modules' parameters.
"""

import sys

import pytest
import torch
import torch.nn.functional as F
from laws.cases import assert_close
from peers.peers_common import SHAPE, make_peer, random_ids

from modeling_avgpath import AvgPathCache
from modeling_avgpath.peers import FLA_DEFAULTS, PEERS, from_peer, peer_config, peer_key_map, peer_state_dict

fla_models = pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
from fla.layers import attn as fla_attention  # noqa: E402
from fla.modules.rotary.ops import rotary_embedding_ref  # noqa: E402
from fla.ops.delta_rule.naive import delta_rule_recurrence  # noqa: E402
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule  # noqa: E402
from fla.ops.mesa_net.naive import naive_mesa_net_exact  # noqa: E402

SOFTMAX = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "rope_theta": 500.0}
WINDOW = {"layers": [3], "num_heads": 4, "num_kv_heads": 2, "rope_theta": 500.0, "window_size": 5, "qkv_bias": True}
CASES = {
    "delta_net": ("DeltaNet", {"num_heads": 4, "use_gate": True}),
    "delta_net_wide": ("DeltaNet", {"num_heads": 2, "expand_k": 0.5, "expand_v": 2.0, "allow_neg_eigval": True}),
    "delta_net_tied": ("DeltaNet", {"num_heads": 4, "tie_word_embeddings": True}),
    "delta_net_no_conv": ("DeltaNet", {"num_heads": 4, "use_short_conv": False, "fuse_norm": False}),
    "delta_net_hybrid": ("DeltaNet", {"num_heads": 2, "norm_eps": 1e-3, "attn": [SOFTMAX, WINDOW]}),
    "gated_deltanet": ("GatedDeltaNet", {"num_heads": 2, "head_dim": 12, "num_v_heads": 4, "expand_v": 1.5}),
    "gated_deltanet_sigmoid": (
        "GatedDeltaNet",
        {"num_heads": 2, "head_dim": 12, "output_gate_activation": "sigmoid", "allow_neg_eigval": True, "conv_size": 3},
    ),
    "gated_deltanet_hybrid": (
        "GatedDeltaNet",
        {"num_heads": 3, "head_dim": 8, "use_gate": False, "use_short_conv": False, "attn": {**WINDOW, "layers": [0, 2]}},
    ),
    "mesa_net": ("MesaNet", {"num_heads": 4, "head_dim": 12}),
    "mesa_net_hybrid": (
        "MesaNet",
        # use_short_conv has no effect on their layer
        {
            "num_heads": 2, "head_dim": 8, "use_output_gate": True, "lambda_lower_bound": 0.6, "conv_size": 2,
            "use_short_conv": False, "attn": SOFTMAX,
        },
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_flash_attention(monkeypatch):
    """Their softmax layers ask for the function when they are built, long before they call it."""
    monkeypatch.setattr(fla_attention, "flash_attn_func", lambda *args: None)


def build(case: str):
    name, fields = CASES[case]
    config = getattr(fla_models, f"{name}Config")(**{**SHAPE, **fields})
    return make_peer(getattr(fla_models, f"{name}ForCausalLM"), config)


# The layers, written out.


def rms_norm(x, norm):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def l2_norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def convolve(x, conv):
    """A short convolution `[B, T, C]`, with its activation."""
    taps = conv.weight.shape[-1]
    y = F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), conv.weight, groups=conv.weight.shape[0]).transpose(1, 2)
    return y if conv.activation is None else F.silu(y)


def project(layer, x, *streams):
    """Projections by head, `[B, T, H, D]`, convolved where the layer does."""
    outputs = []
    for stream in streams:
        y = getattr(layer, f"{stream}_proj")(x)
        has_own_width = stream == "v" and not isinstance(layer, fla_attention.Attention)
        conv = getattr(layer, f"{stream}_conv1d", None)
        if conv is not None:
            y = convolve(y, conv)
        outputs.append(y.unflatten(-1, (-1, layer.head_v_dim if has_own_width else heads_width(layer))))
    return outputs


def heads_width(layer):
    return getattr(layer, "head_k_dim", None) or layer.head_dim


def read_out(layer, x, reads, activation=F.silu):
    """Output norm, gate and projection of reads `[B, T, H, D]`."""
    reads = rms_norm(reads, layer.o_norm)
    if hasattr(layer, "g_proj"):
        reads = reads * activation(layer.g_proj(x)).view_as(reads)
    return layer.o_proj(reads.flatten(2))


def delta_net(layer, x):
    q, k, v = project(layer, x, "q", "k", "v")
    if not layer.use_short_conv:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    q, k = l2_norm(q), l2_norm(k)
    beta = layer.b_proj(x).sigmoid()
    beta = beta * (2 if layer.allow_neg_eigval else 1)
    reads, _ = delta_rule_recurrence(*(y.transpose(1, 2) for y in (q, k, v, beta)))
    return read_out(layer, x, reads.transpose(1, 2))


def gated_delta_net(layer, x):
    q, k, v = project(layer, x, "q", "k", "v")
    if not layer.use_short_conv:
        q, k, v = F.silu(q), F.silu(k), F.silu(v)
    q, k = (l2_norm(y).repeat_interleave(v.shape[2] // y.shape[2], dim=2) for y in (q, k))
    beta = layer.b_proj(x).sigmoid() * (2 if layer.allow_neg_eigval else 1)
    g = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    reads, _ = naive_recurrent_gated_delta_rule(q, k, v, beta, g)
    is_sigmoid = layer.use_gate and layer.o_norm.activation == "sigmoid"
    return read_out(layer, x, reads, torch.sigmoid if is_sigmoid else F.silu)


def mesa_net(layer, x):
    q, k, v = project(layer, x, "q", "k", "v")
    ridge = F.softplus(layer.lambda_params).view(layer.num_heads, -1) + layer.lambda_lower_bound
    g, beta = F.logsigmoid(layer.a_proj(x)), layer.b_proj(x).sigmoid()
    reads, _, _ = naive_mesa_net_exact(l2_norm(q), l2_norm(k), v, g, ridge, beta)
    return read_out(layer, x, reads)


def attention(layer, x):
    q, k, v = project(layer, x, "q", "k", "v")
    steps = torch.arange(x.shape[1])
    angles = torch.outer(steps.float(), layer.rotary.inv_freq)
    q, k = (rotary_embedding_ref(y, angles.cos(), angles.sin()) for y in (q, k))
    distance = steps[:, None] - steps
    visible = (distance >= 0) & (distance < (layer.window_size or len(steps)))
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return layer.o_proj(y.transpose(1, 2).flatten(2))


MIXERS = {"DeltaNet": delta_net, "GatedDeltaNet": gated_delta_net, "MesaNet": mesa_net, "Attention": attention}


def reference_logits(model, ids):
    """Their model, written out."""
    x = model.model.embeddings(ids)
    for block in model.model.layers:
        x = x + MIXERS[type(block.attn).__name__](block.attn, rms_norm(x, block.attn_norm))
        y, mlp = rms_norm(x, block.mlp_norm), block.mlp
        x = x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
    return model.lm_head(rms_norm(x, model.model.norm))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits(case):
    """One pass over more than a chunk, and the same text from a cache."""
    theirs = build(case)
    ours = from_peer(theirs)
    tolerance = 1e-4 if case.startswith("mesa_net") else 2e-5
    ids = random_ids(2, 71)
    expected = reference_logits(theirs, ids)
    assert_close(ours(ids).logits, expected, tolerance)
    cache = AvgPathCache(ours.config)
    pieces = [ours(part, cache=cache).logits for part in ids.split([66, 1, 1, 3], dim=1)]
    assert_close(torch.cat(pieces, dim=1), expected, tolerance)


@pytest.mark.parametrize("case", CASES)
def test_every_weight_both_ways(case):
    """All tensors of their model class are taken, in shape, and come back bit for bit."""
    theirs = build(case)
    expected = theirs.state_dict()
    if theirs.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    weights = peer_state_dict(from_peer(theirs), theirs.config)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("name", ["DeltaNet", "GatedDeltaNet", "MesaNet"])
def test_full_size(name):
    """Their default shapes, compared on the meta device; the width of their MLP is derived there."""
    config = getattr(fla_models, f"{name}Config")()
    with torch.device("meta"):
        theirs = getattr(fla_models, f"{name}ForCausalLM")(config)
    key_map = peer_key_map(config)
    shapes = {entry.theirs: entry.shape(key_map.shapes) for entry in key_map.entries}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert not key_map.constants


@pytest.mark.parametrize(
    ("name", "hidden", "ratio"), [("DeltaNet", 1000, 3), ("MesaNet", 384, 4), ("DeltaNet", 512, None)]
)
def test_width_of_the_mlp(name, hidden, ratio):
    fields = {"hidden_size": hidden, "hidden_ratio": ratio, "num_heads": 4, "num_hidden_layers": 1, "vocab_size": 8}
    config = getattr(fla_models, f"{name}Config")(**fields)
    with torch.device("meta"):
        theirs = getattr(fla_models, f"{name}ForCausalLM")(config)
    assert peer_config(config).intermediate_size == theirs.model.layers[0].mlp.intermediate_size


@pytest.mark.parametrize("name", ["DeltaNet", "GatedDeltaNet", "MesaNet"])
def test_defaults_are_theirs(name):
    config = getattr(fla_models, f"{name}Config")()
    ours = {**FLA_DEFAULTS, **PEERS[config.model_type].defaults}
    assert ours == {option: getattr(config, option) for option in ours}


@pytest.mark.parametrize("case", ["delta_net_hybrid", "gated_deltanet", "mesa_net_hybrid"])
@torch.no_grad()
def test_checkpoint_without_the_package(case, tmp_path, monkeypatch):
    """A folder in shards is converted where flash-linear-attention cannot be imported, dtype kept, decay in fp32."""
    theirs = build(case).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = from_peer(theirs).state_dict()
    monkeypatch.setitem(sys.modules, "fla", None)
    ours = from_peer(tmp_path)
    assert ours.dtype == torch.bfloat16
    for name, tensor in ours.state_dict().items():
        is_fp32 = name.endswith(("A_log", "dt_bias", "lambda_params"))
        assert tensor.dtype == (torch.float32 if is_fp32 else torch.bfloat16), name
        assert torch.equal(tensor, expected[name]), name
