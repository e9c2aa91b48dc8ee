# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Recall probes: what a causal language model still knows of random tokens that it has read.

Three tasks, each a function of a model that returns one record per setting:

- `repeated_phrases`: a short phrase comes again after a given distance (induction over a distance);
- `key_value_lookup`: pairs of tokens are read, then each key is asked for its value (multi-query associative recall,
  Arora et al., 2024);
- `copying`: a whole string comes again at once (Jelassi et al., 2024).

Tokens are drawn at random from an `Alphabet`, so no tokenizer, language or instruction matters, and nothing but the
sequence itself foretells them. Any model that takes `input_ids` and returns `logits` can be probed. Scores are negative
log-likelihoods (nats per token, under teacher forcing) and accuracies of the most likely token. Every sequence has a twin
in which what is to be recalled was never told: other random tokens stand there. `unseen_nll` is the score of the same
tokens at the same places of the twin, and `gain` what having read them is worth, which compares between vocabularies and
is free of what a model knows by position alone. Intervals are bootstrapped over sequences.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from training.recipe import ALPHABETS, ConversionRecipe, EvaluationRecipe

WORD = re.compile(r"[\u0120\u2581][a-z]{3,}")  # a lower-case word with its space, in byte-level BPE and SentencePiece
UNLIMITED_LAYERS = {"linear_attention", "sliding_attention", "mamba", "mamba2"}  # their past has no positions, or few


class MeasurementError(ValueError):
    """What was asked for cannot be measured on this model, and why."""


@dataclass(frozen=True)
class Alphabet:
    """What probe sequences are made of.

    Attributes:
        ids: `[N]` distinct token ids to draw from.
        prefix: ids that every sequence begins with, such as the beginning-of-text token.
    """

    ids: torch.Tensor
    prefix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or len(self.ids.unique()) != len(self.ids):
            raise MeasurementError(
                f"An alphabet's ids must be distinct, in one dimension; got shape {tuple(self.ids.shape)}."
            )


def make_alphabet(tokenizer, vocab_size: int, kind: str = "tokens") -> Alphabet:
    """The alphabet of a tokenizer: all its tokens but the special ones (`tokens`), or whole English words (`words`).

    Args:
        vocab_size: of the model, which may know fewer ids than the tokenizer.
        kind: `words` takes lower-case words of three letters or more that are one token with their leading space:
            nearer to what a model trained on English has seen, at the price of a smaller, tokenizer-dependent alphabet.

    Raises:
        MeasurementError: unknown kind, or fewer than 64 such tokens.
    """
    if kind not in ALPHABETS:
        raise MeasurementError(f"Unknown alphabet {kind!r}; known: {', '.join(ALPHABETS)}.")
    excluded = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = [
        index
        for token, index in tokenizer.get_vocab().items()
        if index < vocab_size and index not in excluded and (kind == "tokens" or WORD.fullmatch(token))
    ]
    if len(ids) < 64:
        raise MeasurementError(
            f"The tokenizer has only {len(ids)} usable {kind}, fewer than 64; choose the other alphabet."
        )
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return Alphabet(torch.tensor(sorted(ids)), () if start is None else (start,))


def position_limit(config) -> int | None:
    """Tokens of text that the model's positions are made for; `None` if none of its layers looks back without bound."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types and set(layer_types) <= UNLIMITED_LAYERS:
        return None
    return getattr(config, "max_position_embeddings", None)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients inside; the model's mode comes back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def token_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood (nats, fp32) of `targets` `[B, T]` under `logits` `[B, T, V]`; 0 where a target is -100.

    Row by row, since a batch of fp32 logits of a large vocabulary need not fit into memory twice.

    Raises:
        MeasurementError: a likelihood that is not a number.
    """
    nll = torch.stack(
        [F.cross_entropy(row.float(), target, reduction="none") for row, target in zip(logits, targets, strict=True)]
    )
    if nll.isnan().any():
        raise MeasurementError(
            "The model's logits are not numbers: its weights may be broken, or its precision too low."
        )
    return nll


def bootstrap_interval(
    totals: Sequence[float], counts: Sequence[float], confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile interval of ``sum(totals) / sum(counts)`` over units (documents, sequences) drawn with replacement.

    `None` for a single unit, which says nothing about the spread.
    """
    totals, counts = np.asarray(totals, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if len(totals) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(totals), (resamples, len(totals)))
    ratios = totals[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, (tail, 1 - tail))
    return float(low), float(high)


def estimate(totals, counts, scale: Callable[[float], float] = float, **bootstrap) -> dict:
    """`{mean, low, high}` of ``scale(sum(totals) / sum(counts))``, with `bootstrap_interval`'s bounds."""
    interval = bootstrap_interval(totals, counts, **bootstrap)
    low, high = (None, None) if interval is None else map(scale, interval)
    return {"mean": scale(float(np.sum(totals) / np.sum(counts))), "low": low, "high": high}


@dataclass(frozen=True)
class Scores:
    """What a model made of sequences `[N, T]`; entry t is about token t + 1, given those up to t.

    Attributes:
        nll: `[N, T - 1]` nats.
        hits: `[N, T - 1]`, whether the most likely token was the right one.
        chosen: `[N, M]`, for each of M places the index of the most likely among the tokens at other places.
    """

    nll: torch.Tensor
    hits: torch.Tensor
    chosen: torch.Tensor | None = None


def score(
    model: nn.Module,
    sequences: torch.Tensor,
    batch_tokens: int = 4096,
    asked: torch.Tensor | None = None,
    told: torch.Tensor | None = None,
) -> Scores:
    """Read `sequences` `[N, T]` once, in batches of about `batch_tokens` tokens.

    Args:
        asked, told: places `[M]` whose token is also chosen from those at places `[C]`, as in a test with C answers.

    Raises:
        MeasurementError: sequences longer than the model's positions, or logits that are not numbers.
    """
    length = sequences.shape[1]
    limit = position_limit(getattr(model, "config", None))
    if limit is not None and length > limit:
        raise MeasurementError(
            f"A probe of {length} tokens is longer than the model's max_position_embeddings={limit}: ask for shorter "
            "distances or strings, or fewer pairs."
        )
    nll, hits, chosen = [], [], []
    with evaluation_mode(model):
        for ids in sequences.split(max(1, batch_tokens // length)):
            ids = ids.to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [B, T - 1, V]
            nll.append(token_nll(logits, ids[:, 1:]).cpu())
            hits.append((logits.argmax(dim=-1) == ids[:, 1:]).cpu())
            if asked is not None:
                candidates = ids[:, None, told.to(ids.device)].expand(-1, len(asked), -1)  # [B, M, C]
                chosen.append(logits[:, asked.to(ids.device) - 1].gather(-1, candidates).argmax(dim=-1).cpu())
    return Scores(torch.cat(nll), torch.cat(hits), torch.cat(chosen) if chosen else None)


class BlankModel(nn.Module):
    """Knows nothing: probes that run on it will run on any model of `config`."""

    device = torch.device("cpu")

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, input_ids: torch.Tensor, **kwargs) -> SimpleNamespace:
        """Logits that are all the same, `[B, T, V]` of one stored number."""
        return SimpleNamespace(logits=torch.zeros(()).expand(*input_ids.shape, self.config.vocab_size))


def _draw(alphabet: Alphabet, distinct: int, others: int, generator: torch.Generator) -> torch.Tensor:
    """`distinct` different tokens, then `others` from the rest of the alphabet, which may repeat."""
    if distinct + min(others, 1) > len(alphabet.ids):
        raise MeasurementError(
            f"This probe needs {distinct + min(others, 1)} different tokens, and the alphabet has {len(alphabet.ids)}."
        )
    order = torch.randperm(len(alphabet.ids), generator=generator)
    rest = order[distinct:]
    filler = rest[torch.randint(len(rest), (others,), generator=generator)] if others else rest[:0]
    return alphabet.ids[torch.cat((order[:distinct], filler))]


def _sequences(
    alphabet: Alphabet, samples: int, seed: int, build: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`samples` sequences of `build` and their twins, `[N, T]` each, behind the alphabet's prefix."""
    if samples < 1:
        raise MeasurementError(f"samples must be at least 1, got {samples}.")
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.tensor(alphabet.prefix, dtype=torch.long)
    pairs = [build(generator) for _ in range(samples)]
    return tuple(torch.stack([torch.cat((prefix, row)) for row in rows]) for rows in zip(*pairs, strict=True))


def _record(scores: Scores, unseen: Scores, places: torch.Tensor, bootstrap: dict) -> dict:
    """Figures of the tokens at `places` `[M]` of the sequences, and of the same ones in the twins."""
    samples, counts = len(scores.nll), np.full(len(scores.nll), len(places))
    # Scores stand one place before their token.
    nll, control = (part.nll[:, places - 1].double() for part in (scores, unseen))
    hits = scores.hits[:, places - 1]

    def mean(values: torch.Tensor) -> dict:
        return estimate(values.double().sum(dim=1).numpy(), counts, **bootstrap)

    return {
        "samples": samples,
        "tokens": int(counts.sum()),
        "nll": mean(nll),
        "unseen_nll": mean(control),
        "gain": mean(control - nll),
        "accuracy": mean(hits),
        "exact": estimate(hits.all(dim=1).double().numpy(), np.ones(samples), **bootstrap),
    }


def repeated_phrases(
    model: nn.Module,
    alphabet: Alphabet,
    distances: Sequence[int] = (16, 64, 256, 1024),
    phrase_length: int = 8,
    samples: int = 32,
    seed: int = 0,
    batch_tokens: int = 4096,
    **bootstrap,
) -> list[dict]:
    """A phrase of different tokens, random filler without them, and the phrase again, `distance` tokens after it began.

    Scored are the phrase's tokens from the second on, since nothing foretells the first; `exact` is the share of
    phrases of which all were the most likely token. `bootstrap` goes to `bootstrap_interval`.

    Returns:
        one record per distance: distance, samples, tokens, and {mean, low, high} of nll, unseen_nll, gain, accuracy, exact.

    Raises:
        MeasurementError: a phrase shorter than 2 tokens, a distance below its length, a sequence longer than the model's
            positions, an alphabet too small.
    """
    records = []
    for distance in distances:
        sequences, twins, places = phrase_sequences(alphabet, distance, phrase_length, samples, seed)
        scores, unseen = (score(model, rows, batch_tokens) for rows in (sequences, twins))
        records.append({"distance": distance, **_record(scores, unseen, places, {"seed": seed, **bootstrap})})
    return records


def phrase_sequences(
    alphabet: Alphabet, distance: int, phrase_length: int = 8, samples: int = 32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `repeated_phrases` reads at one distance: the sequences `[samples, T]`, their twins, the places that are scored.

    Raises:
        MeasurementError: a phrase shorter than 2 tokens, a distance below its length, an alphabet too small.
    """
    if phrase_length < 2:
        raise MeasurementError(f"phrase_length must be at least 2, got {phrase_length}: the first token is not scored.")
    if distance < phrase_length:
        raise MeasurementError(f"A distance of {distance} is shorter than the phrase ({phrase_length} tokens).")

    def build(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = _draw(alphabet, 2 * phrase_length, distance - phrase_length, generator)
        phrase, other, filler = drawn.tensor_split((phrase_length, 2 * phrase_length))
        return torch.cat((phrase, filler, phrase)), torch.cat((other, filler, phrase))

    sequences, twins = _sequences(alphabet, samples, seed, build)
    return sequences, twins, len(alphabet.prefix) + distance + torch.arange(1, phrase_length)


def key_value_lookup(
    model: nn.Module,
    alphabet: Alphabet,
    pairs: Sequence[int] = (4, 8, 16),
    samples: int = 32,
    seed: int = 0,
    batch_tokens: int = 4096,
    **bootstrap,
) -> list[dict]:
    """Pairs k_1 v_1 ... k_n v_n of different tokens, then every key once more in another order, each with its value.

    Scored are the values after the keys that ask for them. `choice` is the accuracy among the n values alone (chance
    1/n), which tells recall apart from knowing that a value is wanted; `exact` the share of sequences with all n right.

    Returns:
        one record per number of pairs: pairs, samples, tokens, chance, and {mean, low, high} of nll, unseen_nll, gain,
        accuracy, exact, choice.

    Raises:
        MeasurementError: fewer than 2 pairs, a sequence longer than the model's positions, an alphabet too small.
    """
    records = []
    for count in pairs:
        if count < 2:
            raise MeasurementError(f"pairs must be at least 2, got {count}.")

        def build(generator: torch.Generator, count: int = count) -> tuple[torch.Tensor, torch.Tensor]:
            told, other = _draw(alphabet, 4 * count, 0, generator).view(2, count, 2)
            asked = told[torch.randperm(count, generator=generator)]
            return torch.cat((told, asked)).flatten(), torch.cat((other, asked)).flatten()

        sequences, twins = _sequences(alphabet, samples, seed, build)
        values = len(alphabet.prefix) + 1 + 2 * torch.arange(count)  # places of the values as they are told
        asked = values + 2 * count
        answers = (
            (sequences[:, asked, None] == sequences[:, None, values]).long().argmax(dim=-1)
        )  # [N, n] of which pair
        scores, unseen = score(model, sequences, batch_tokens, asked, values), score(model, twins, batch_tokens)
        right = (scores.chosen == answers).double().sum(dim=1).numpy()
        records.append(
            {
                "pairs": count,
                **_record(scores, unseen, asked, {"seed": seed, **bootstrap}),
                "choice": estimate(right, np.full(samples, count), seed=seed, **bootstrap),
                "chance": 1 / count,
            }
        )
    return records


def copying(
    model: nn.Module,
    alphabet: Alphabet,
    lengths: Sequence[int] = (16, 64, 256),
    samples: int = 32,
    seed: int = 0,
    batch_tokens: int = 4096,
    **bootstrap,
) -> list[dict]:
    """A string of random tokens, twice. Scored are the tokens of the copy from the second on.

    `exact` is the share of strings whose tokens were all the most likely ones, that is, what greedy decoding would have
    copied without a fault.

    Returns:
        one record per length: length, samples, tokens, and {mean, low, high} of nll, unseen_nll, gain, accuracy, exact.

    Raises:
        MeasurementError: a string shorter than 2 tokens, a sequence longer than the model's positions.
    """
    records = []
    for length in lengths:
        if length < 2:
            raise MeasurementError(
                f"A string to copy must have at least 2 tokens, got {length}: the first is not scored."
            )

        def build(generator: torch.Generator, length: int = length) -> tuple[torch.Tensor, torch.Tensor]:
            string, other = _draw(alphabet, 0, 2 * length, generator).view(2, length)
            return string.repeat(2), torch.cat((other, string))

        sequences, twins = _sequences(alphabet, samples, seed, build)
        places = len(alphabet.prefix) + length + torch.arange(1, length)
        scores, unseen = (score(model, rows, batch_tokens) for rows in (sequences, twins))
        records.append({"length": length, **_record(scores, unseen, places, {"seed": seed, **bootstrap})})
    return records


def recall_probe(task: str, recipe: ConversionRecipe | EvaluationRecipe) -> tuple[list[int], Callable[..., list[dict]]]:
    """The settings of a task of `recipe`, and what is called with (model, alphabet, settings) to carry it out.

    Args:
        task: `phrases`, `lookup` or `copying`.
    """
    function, settings, options = {
        "phrases": (repeated_phrases, recipe.phrases.distances, {"phrase_length": recipe.phrases.length}),
        "lookup": (key_value_lookup, recipe.lookup.pairs, {}),
        "copying": (copying, recipe.copying.lengths, {}),
    }[task]
    return settings, functools.partial(function, samples=recipe.probes.samples, **options)
