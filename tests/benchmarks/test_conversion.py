# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What `benchmarks conversion` makes of losses token by token."""

import torch

from benchmarks.conversion import describe_excess, repeats


def test_pairs_that_come_again():
    ids = torch.tensor([[1, 2, 3, 1, 2, 2, 3, 1], [5, 5, 5, 5, 6, 5, 6, 6]])
    expected = [[0, 0, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 1, 0]]
    assert repeats(ids).int().tolist() == expected


def test_losses_where_pairs_come_again_and_elsewhere():
    """The last place of a row, whose token stands in the next one, is left out, as are places without a token."""
    ids = torch.tensor([[1, 2, 3, 1, 2, 2, 3, 1]])
    is_target = torch.tensor([[True, True, False, True, True, True, True, True]])
    teacher = torch.zeros(1, 8)
    student = torch.tensor([[0.1, 0.2, 9.0, 1.0, 0.3, 2.0, 3.0, 9.0]])
    words = describe_excess([(teacher, ids, is_target)], [(student, ids, is_target)])
    assert words == "pairs read before, 50% of the tokens, 2.000; others 0.200"
