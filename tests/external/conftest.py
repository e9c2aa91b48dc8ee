# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Documents of many lengths, and a tokenizer for the vocabulary of the laws' models."""

import pytest
from laws.cases import VOCAB, random_ids
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word `w<i>`; 0, 1 and 2 are padding, beginning and end, as in `tiny_config`."""
    words = models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w3")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )


@pytest.fixture(scope="session")
def documents() -> list[list[int]]:
    """Token ids of eight documents, from one token to more than four mini-batches of the TTT layers."""
    return [random_ids(1, length, seed=length)[0].tolist() for length in (5, 23, 9, 1, 14, 2, 30, 7)]
