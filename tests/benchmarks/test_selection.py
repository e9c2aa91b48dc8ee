# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Choosing softmax layers: what the choices are, and what is said of them."""

import numpy as np
import pytest

from benchmarks.selection import choices, compare


def test_choices():
    found = choices(30, 8, draws=3, scores={"swap-one KL": list(range(30)), "recall": list(range(30, 0, -1))})
    assert [name for name in found if name.startswith("uniform")] == [f"uniform, offset {x}" for x in range(4)]
    assert found["swap-one KL"] == found["last"] == list(range(22, 30))
    assert found["recall"] == found["first"] == list(range(8))
    assert (
        all(len(set(kept)) == 8 for kept in found.values())
        and len({tuple(found[f"random {x}"]) for x in range(3)}) == 3
    )


class Measured:
    """Hybrids of four layers whose rows cost 0.1 nats for each layer that is converted, and 1 where layer 2 is."""

    mixers = dict.fromkeys(range(4))
    texts = {"judging": type("Texts", (), {"sources": ["a", "a", "b"]})}

    def measure(self, kept, texts):
        cost = sum(1.0 if layer == 2 else 0.1 for layer in range(4) if layer not in kept)
        targets = np.array([10, 20, 10])
        noise = np.array([0.5, 0.0, -0.5])
        return {
            "kl": cost * targets, "nll": (2 + cost) * targets + noise, "targets": targets, "recall": np.full(6, 3 + cost)
        }  # fmt: skip


def test_choices_are_compared_with_the_means_of_the_others():
    chosen = {"uniform, offset 0": [0, 2], "uniform, offset 1": [1, 3], "random 0": [2, 3], "by score": [1, 2]}
    rows = {row["choice"]: row for row in compare(Measured(), chosen)}
    assert rows["by score"]["kl"] == pytest.approx(0.2) and rows["by score"]["recall"] == pytest.approx(3.2)
    # Uniform's mean is (0.2 + 1.1) / 2; every row and sequence agrees, so there is no spread.
    assert rows["by score"]["kl_to_uniform"] == "-0.450 (-0.450 to -0.450)"
    assert rows["by score"]["recall_to_random"] == "+0.000 (+0.000 to +0.000)"
    assert rows["none stays"]["kl"] == pytest.approx(1.3) and rows["none stays"]["layers"] == ""
    assert rows["teacher"]["kl"] == 0 and rows["teacher"]["layers"] == "all" and "kl_to_uniform" not in rows["teacher"]
    assert rows["by score"]["perplexity_ratios"] == pytest.approx({"a": np.exp(0.2), "b": np.exp(0.2)})
