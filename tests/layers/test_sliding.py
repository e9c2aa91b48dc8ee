"""Windows and sinks against the plain definition: one dense mask over the whole text."""

import pytest
import torch
from laws.cases import assert_close, tiny_config

from modeling_avgpath import AvgPathCache
from modeling_avgpath.attention import SlidingSoftmaxAttention


def dense(layer, hidden_states, window: int, sinks: int) -> torch.Tensor:
    """Token t sees the tokens s <= t with t - s < window or s < sinks."""
    query, key, value = layer.project(hidden_states, None)
    groups = layer.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    time = torch.arange(hidden_states.shape[1])
    distance = time[:, None] - time
    sees = (distance >= 0) & ((distance < window) | (time < sinks))
    scores = torch.einsum("bthd,bshd->bhts", query, key) / layer.head_dim**0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(dim=-1)
    return layer.project_output(torch.einsum("bhts,bshd->bthd", weights, value), hidden_states)


@pytest.mark.parametrize("window", [1, 2, 7, 70])
@pytest.mark.parametrize("sinks", [0, 1, 3, 9])
@pytest.mark.parametrize("pieces", [(150,), (1,) * 20, (2, 1, 30, 7, 64)])
@torch.no_grad()
def test_windows_and_sinks(window, sinks, pieces):
    torch.manual_seed(0)
    config = tiny_config(["sliding_softmax"], sliding_window=window, num_sink_tokens=sinks, use_rope=False)
    layer = SlidingSoftmaxAttention(config, 0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)  # sharp scores: a token more or less is seen
    x = torch.randn(2, sum(pieces), config.hidden_size)
    cache = AvgPathCache(config)
    outputs = [layer(piece, layer_cache=cache.layers[0])[0] for piece in x.split(pieces, dim=1)]
    expected = dense(layer, x, window, sinks)
    assert_close(torch.cat(outputs, dim=1), expected)
    assert_close(layer(x)[0], expected)
