# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Which layers stay softmax."""

import pytest

from modeling_avgpath import AvgPathConfig
from modeling_avgpath.conversion_layers import choose_softmax_layers, place_mixers


@pytest.mark.parametrize(("layers", "count"), [(30, 8), (30, 7), (12, 3), (5, 5), (7, 1), (9, 0)])
def test_uniform(layers, count):
    """So many, at every offset, with steps that differ by one at most; by default the last is among them."""
    for offset in range(layers):
        chosen = choose_softmax_layers("uniform", layers, count, offset=offset)
        assert len(set(chosen)) == count and (not count or offset in chosen)
        steps = [
            (after - before) % layers or layers for before, after in zip(chosen, chosen[1:] + chosen[:1], strict=True)
        ]
        assert not steps or max(steps) - min(steps) <= 1
    if count:
        assert choose_softmax_layers("uniform", layers, count)[-1] == layers - 1


def test_uniform_is_the_hybrid_ratio():
    kept = choose_softmax_layers("uniform", 12, 3)
    config = AvgPathConfig(num_hidden_layers=12, mixer="delta_net", hybrid_ratio="3:1")
    assert place_mixers(12, kept, "delta_net") == config.mixer_types


def test_other_strategies():
    assert choose_softmax_layers("first", 9, 2) == [0, 1]
    assert choose_softmax_layers("last", 9, 2) == [7, 8]
    assert choose_softmax_layers("list", 9, layers=[5, 2]) == [2, 5]
    assert choose_softmax_layers("score", 5, 2, scores=[0.1, 3, 0.2, 3, 2]) == [1, 3]
    assert choose_softmax_layers("score", 5, 1, scores=[0.1, 3, 0.2, 3, 2]) == [1]
    draws = {tuple(choose_softmax_layers("random", 30, 8, seed=seed)) for seed in range(20)}
    assert len(draws) == 20 and all(len(set(draw)) == 8 and list(draw) == sorted(draw) for draw in draws)
    assert choose_softmax_layers("random", 30, 8, seed=3) == choose_softmax_layers("random", 30, 8, seed=3)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("best", 4, 1), {}, "uniform"),
        (("first", 4, 5), {}, "from 0 to 4"),
        (("first", 4), {}, "got None"),
        (("uniform", 4, 2), {"offset": 4}, "from 0 to 3"),
        (("list", 4), {}, "needs the layers"),
        (("list", 4), {"layers": [1, 1]}, "different numbers"),
        (("list", 4), {"layers": [4]}, "from 0 to 3"),
        (("list", 4, 3), {"layers": [1]}, "3 were asked for"),
        (("score", 4, 1), {"scores": [1.0]}, "each of the 4 layers, got 1"),
        (("score", 4, 1), {}, "got none"),
        (("score", 2, 1), {"scores": [1.0, float("nan")]}, "must be finite numbers"),
    ],
)
def test_refusals(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        choose_softmax_layers(*arguments, **options)
