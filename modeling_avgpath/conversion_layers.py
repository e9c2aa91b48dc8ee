# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Which layers of a softmax model stay softmax: ways to choose that need no training."""

import math
import random
from collections.abc import Sequence

STRATEGIES = ("uniform", "random", "first", "last", "list", "score")


def choose_softmax_layers(
    strategy: str,
    num_layers: int,
    count: int | None = None,
    *,
    offset: int | None = None,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    scores: Sequence[float] | None = None,
) -> list[int]:
    """The layers that stay softmax, in rising order.

    Args:
        strategy: `"uniform"` spreads them evenly; `"random"` draws them; `"first"` and `"last"` take an end of the model;
            `"list"` takes `layers`; `"score"` takes the highest of `scores`, the earlier layer of two that are equal.
        num_layers: of the model.
        count: how many stay (`"list"`: may be left out).
        offset: uniform: the first one. The others follow at steps of `num_layers / count`, rounded down, around the end.
            By default the last layer is one of them, as in the groups of `hybrid_ratio`.
        seed: random: of the draw.
        scores: one a layer, higher where softmax is missed more, such as the diagnosis gives.

    Raises:
        ValueError: an unknown strategy, or a count, offset, layers or scores that do not go with the model.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"Unknown strategy {strategy!r} of choosing layers. Known: {', '.join(STRATEGIES)}.")
    if strategy == "list":
        return _check_list(num_layers, count, layers)
    if count is None or not 0 <= count <= num_layers:
        raise ValueError(
            f"The number of softmax layers must be from 0 to {num_layers}, the model's layers; got {count}."
        )
    if strategy == "first":
        return list(range(count))
    if strategy == "last":
        return list(range(num_layers - count, num_layers))
    if strategy == "random":
        return sorted(random.Random(seed).sample(range(num_layers), count))
    if strategy == "score":
        if scores is None or len(scores) != num_layers:
            given = "none" if scores is None else str(len(scores))
            raise ValueError(f"Strategy 'score' needs one score for each of the {num_layers} layers, got {given}.")
        if not all(map(math.isfinite, scores)):
            raise ValueError(f"The scores must be finite numbers, got {list(scores)}.")
        return sorted(sorted(range(num_layers), key=lambda layer: (-scores[layer], layer))[:count])
    if not count:
        return []
    # Rounded down behind the offset, the steps never meet: count of them span the model once.
    first = num_layers - 1 if offset is None else offset
    if not 0 <= first < num_layers:
        raise ValueError(f"The offset of uniform layers must be from 0 to {num_layers - 1}, got {offset}.")
    return sorted((first + index * num_layers // count) % num_layers for index in range(count))


def _check_list(num_layers: int, count: int | None, layers: Sequence[int] | None) -> list[int]:
    if layers is None:
        raise ValueError("Strategy 'list' needs the layers that stay softmax.")
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside or len(set(layers)) != len(layers):
        raise ValueError(
            f"The softmax layers must be different numbers from 0 to {num_layers - 1}, the last layer; got {list(layers)}."
        )
    if count is not None and count != len(layers):
        raise ValueError(f"{len(layers)} softmax layers are listed, and {count} were asked for: leave one of them out.")
    return sorted(layers)


def place_mixers(num_layers: int, softmax_layers: Sequence[int], mixer: str) -> list[str]:
    """The `mixer_types` of a model whose `softmax_layers` stay softmax, with `mixer` everywhere else."""
    kept = set(softmax_layers)
    return ["softmax" if layer in kept else mixer for layer in range(num_layers)]


__all__ = ["STRATEGIES", "choose_softmax_layers", "place_mixers"]
