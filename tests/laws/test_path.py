"""Law 10. The steps of the averaging path meet where the theory says they do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from laws.cases import assert_close, random_ids, tiny_config, tiny_model

from modeling_avgpath import AvgPathForCausalLM
from modeling_avgpath.norms import l2_norm
from modeling_avgpath.ops import delta_rule, gated_delta_rule, linear_attention, mesa, ttt_linear

BATCH, LENGTH, HEADS, KEY, VALUE = 2, 67, 3, 8, 12


def streams(dtype=torch.float32, key_dim: int = KEY, value_dim: int = VALUE):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k = (l2_norm(normal(BATCH, LENGTH, HEADS, key_dim)) for _ in range(2))
    v = normal(BATCH, LENGTH, HEADS, value_dim)
    beta, g = normal(BATCH, LENGTH, HEADS).sigmoid(), F.logsigmoid(normal(BATCH, LENGTH, HEADS) + 2)
    return q, k, v, g, beta


@torch.no_grad()
def test_softmax_is_scaled_dot_product_attention():
    """A softmax layer's mixer, rebuilt by hand from its projections."""
    model = tiny_model("softmax", use_rope=False)
    mixer, config = model.model.layers[0].mixer, model.config
    x = torch.randn(2, 21, config.hidden_size)
    q, k, v = (
        projection(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_close(mixer(x)[0], mixer.o_proj(expected.transpose(1, 2).flatten(2)), 1e-5)


@torch.no_grad()
def test_sliding_window_of_the_whole_text_is_softmax():
    window = tiny_model("sliding_softmax", sliding_window=50)
    full = AvgPathForCausalLM(tiny_config(["softmax"])).eval()
    full.load_state_dict(window.state_dict())
    ids = random_ids(2, 50)
    assert_close(window(ids).logits, full(ids).logits)


@torch.no_grad()
def test_sliding_window_by_its_definition():
    model = tiny_model("sliding_softmax")
    mixer, config = model.model.layers[0].mixer, model.config
    x = torch.randn(1, 200, config.hidden_size)
    q, k, v = (
        projection(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    distance = torch.arange(200)[:, None] - torch.arange(200)
    visible = (distance >= 0) & (distance < config.sliding_window)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    assert_close(mixer(x)[0], mixer.o_proj(expected.transpose(1, 2).flatten(2)), 1e-5)


@torch.no_grad()
def test_identity_is_attention_with_values_equal_to_keys():
    model = tiny_model("identity@mean_field", use_rope=False)
    mixer, config = model.model.layers[0].mixer, model.config
    x = torch.randn(2, 30, config.hidden_size)
    q, k = (
        projection(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for projection in (mixer.q_proj, mixer.k_proj)
    )
    expected = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    assert_close(mixer(x)[0], mixer.o_proj(expected.transpose(1, 2).flatten(2)), 1e-5)


@pytest.mark.parametrize("memory", ["identity", "linear", "delta_net", "gated_delta_net", "mesa_net", "ttt_linear"])
@torch.no_grad()
def test_expectation_is_mean_field_for_linear_memories(memory):
    mean_field = tiny_model(f"{memory}@mean_field", ttt_inner_norm=False, ttt_base_lr=0.1)
    config = copy.deepcopy(mean_field.config)
    config.mixer_types = [f"{memory}@expectation"] * config.num_hidden_layers
    expectation = AvgPathForCausalLM(config).eval()
    expectation.load_state_dict(mean_field.state_dict())
    ids = random_ids(2, 40)
    assert_close(expectation(ids).logits, mean_field(ids).logits, 1e-6)


@torch.no_grad()
def test_expectation_of_a_memory_by_its_definition():
    """o_t = sum_i a_ti W_t k_i for the delta rule, with every W_t taken from the op's final state on the prefix."""
    model = tiny_model("delta_net@expectation", use_rope=False, linear_conv_kernel_dim=None, num_key_value_heads=4)
    mixer, config = model.model.layers[0].mixer, model.config
    x = torch.randn(1, 12, config.hidden_size)
    q, k, v = (
        projection(x).unflatten(-1, (-1, config.head_dim)) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    beta, memory_key = mixer.b_proj(x).sigmoid(), l2_norm(k)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * config.head_dim**-0.5
    weights = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).softmax(-1)
    reads = []
    for t in range(12):
        prefix = slice(0, t + 1)
        _, state = delta_rule(memory_key[:, prefix], memory_key[:, prefix], v[:, prefix], beta[:, prefix],
                              output_final_state=True)  # fmt: skip
        values = torch.einsum("bshk,bhkv->bshv", memory_key[:, prefix], state)
        reads.append(torch.einsum("bhs,bshv->bhv", weights[:, :, t, : t + 1], values))
    reads = mixer.o_norm(torch.stack(reads, dim=1)).flatten(2) * F.silu(mixer.g_proj(x))
    assert_close(mixer(x)[0], mixer.o_proj(reads), 1e-5)


def test_ttt_linear_with_mini_batches_of_one_is_the_delta_rule():
    q, k, v, _, beta = streams()
    weights = {"W1": torch.zeros(HEADS, KEY, VALUE)}
    actual, _ = ttt_linear(q, k, v, beta, weights, mini_batch_size=1, inner_norm=False)
    expected, _ = delta_rule(q, k, v, beta, scale=1.0)
    assert_close(actual, expected, 1e-5)


def test_gated_delta_rule_without_decay_is_the_delta_rule():
    q, k, v, g, beta = streams()
    actual, state = gated_delta_rule(q, k, v, torch.zeros_like(g), beta, output_final_state=True)
    expected, expected_state = delta_rule(q, k, v, beta, output_final_state=True)
    assert_close(actual, expected, 1e-6)
    assert_close(state, expected_state, 1e-6)


def test_mesa_without_decay_is_ridge_regression_on_the_prefix():
    """At each t the read is the least-squares solution of the augmented system [sqrt(beta) K; sqrt(Lambda)] at q_t."""
    q, k, v, g, beta = streams()
    ridge = torch.rand(HEADS, KEY) + 0.25
    actual, _ = mesa(q, k, v, torch.zeros_like(g), beta, ridge, tolerance=1e-7)
    root = beta.sqrt()[..., None].double()
    keys, values = root * k.double(), root * v.double()
    penalty = torch.diag_embed(ridge.double().sqrt()).expand(BATCH, HEADS, KEY, KEY)
    for t in (0, 1, 5, 40, LENGTH - 1):
        system = torch.cat((keys[:, : t + 1].transpose(1, 2), penalty), dim=2)
        target = torch.cat((values[:, : t + 1].transpose(1, 2), penalty.new_zeros(BATCH, HEADS, KEY, VALUE)), dim=2)
        solution = torch.linalg.lstsq(system, target).solution  # [B, H, D_k, D_v]
        expected = torch.einsum("bhk,bhkv->bhv", q[:, t].double(), solution)
        assert_close(actual[:, t], expected, 1e-4)


def test_linear_is_mesa_with_the_identity_for_h():
    """Keys too small to matter in H + Lambda, and Lambda = 1: the solve becomes the identity."""
    q, k, v, g, beta = streams(torch.float64)
    tiny = 1e-6
    actual, _ = mesa(q, tiny * k, v, g, beta, torch.ones(HEADS, KEY, dtype=torch.float64), tolerance=1e-10)
    expected, _ = linear_attention(q, tiny * k, v, g, beta, scale=1.0)
    assert_close(actual, expected, 1e-9)


@torch.no_grad()
def test_mean_key_tends_to_a_multiple_of_the_query():
    """Isotropic Gaussian keys, k ~ N(0, s^2 I): k_bar_t -> s^2 q_t / sqrt(d), the error shrinking as 1 / sqrt(T)."""
    generator = torch.Generator().manual_seed(0)
    size, spread = 8, 0.7
    query = torch.randn(64, size, generator=generator)
    errors = []
    for count in (1_000, 16_000, 256_000):
        keys = spread * torch.randn(count, size, generator=generator)
        mean_key = torch.softmax(query @ keys.T / size**0.5, dim=-1) @ keys
        limit = spread**2 * query / size**0.5
        errors.append(((mean_key - limit).norm() / limit.norm()).item())
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.05


@torch.no_grad()
def test_query_map_folds_into_the_query_projection():
    model = tiny_model("query_map")
    mixer = model.model.layers[0].mixer
    torch.nn.init.normal_(mixer.query_map.weight)
    torch.nn.init.normal_(mixer.query_map.bias)
    x = torch.randn(2, 9, model.config.hidden_size)
    expected = mixer(x)[0]
    blocks = mixer.q_proj.weight.unflatten(0, (-1, mixer.key_dim))  # [H, D, hidden]
    folded = torch.nn.Linear(*reversed(mixer.q_proj.weight.shape))
    folded.weight.copy_(torch.einsum("hoi,hix->hox", mixer.query_map.weight, blocks).flatten(0, 1))
    folded.bias.copy_(mixer.query_map.bias.flatten())
    mixer.q_proj, mixer.query_map = folded, None
    assert_close(mixer(x)[0], expected, 1e-5)
