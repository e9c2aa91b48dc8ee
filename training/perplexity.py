# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Negative log-likelihood of documents, token by token: in windows, or in one pass with the state carried along.

A document is read as the stream ``<bos> t_1 ... t_n`` (without ``<bos>`` if there is none, and then t_1 is not scored).
Every token is scored once. Two numbers go with it: its place in the stream, and how many tokens the model had before it
when it was scored, its context. They differ where a window cuts the past off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from training.data import IGNORE
from training.probes import MeasurementError, estimate, evaluation_mode, token_nll


@dataclass(frozen=True)
class DocumentScores:
    """The scored tokens of one document, in order, `[n]` each.

    Attributes:
        nll: nats.
        place: number of tokens before it in the document's stream, 1 for t_1 behind a ``<bos>``.
        context: number of tokens that the model had before it.
    """

    nll: np.ndarray
    place: np.ndarray
    context: np.ndarray


@dataclass(frozen=True)
class _Window:
    document: int
    inputs: list[int]
    targets: list[int]  # `IGNORE` where a window before has scored it
    start: int  # place of the first target


def cut_windows(
    stream: Sequence[int], window: int, stride: int, bos: int | None = None
) -> Iterator[tuple[list[int], list[int], int]]:
    """Yield (inputs, targets, place of the first target) of windows that score each token but the first once.

    Args:
        window: most inputs of a window.
        stride: places from one window's start to the next one's; those scored before become `IGNORE`.
        bos: put before the inputs of every window but the first, whose stream has its own; it takes one of the `window`.

    Raises:
        MeasurementError: a stride that would leave tokens out.
    """
    longest = window if bos is None else window - 1
    if not 1 <= stride <= longest:
        raise MeasurementError(f"stride must be between 1 and {longest}, or tokens would be left out; got {stride}.")
    start, scored = 0, 1  # the stream's places before `scored` are done
    while scored < len(stream):
        end = min(start + (longest if start else window), len(stream) - 1)
        inputs, targets = list(stream[start:end]), list(stream[start + 1 : end + 1])
        place = start + 1
        if bos is not None and start:
            inputs, targets, place = [bos, *inputs], [IGNORE, *targets], place - 1
        done = scored - place
        yield inputs, [IGNORE] * done + targets[done:], place
        start, scored = start + stride, end + 1


def _pad(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def score_windows(
    model: nn.Module,
    documents: Sequence[Sequence[int]],
    bos: int | None,
    window: int,
    stride: int | None = None,
    bos_in_each: bool = False,
    batch_tokens: int = 4096,
) -> list[DocumentScores]:
    """Score documents (token ids) in windows that know nothing of each other.

    Args:
        bos: begins each document, `None` for none; `bos_in_each`: each window.
        window, stride: see `cut_windows`; by default each window begins where the one before ended.
        batch_tokens: about so many tokens go into one forward pass.

    Raises:
        MeasurementError: a window or stride without sense, or logits that are not numbers.
    """
    bos_in_each = bos_in_each and bos is not None
    stride = (window - bos_in_each) if stride is None else stride
    windows = [
        _Window(index, *cut)
        for index, tokens in enumerate(documents)
        for cut in cut_windows(_stream(tokens, bos), window, stride, bos if bos_in_each else None)
    ]
    windows.sort(key=lambda item: -len(item.inputs))  # windows of one length share a batch
    found: list[list[tuple]] = [[] for _ in documents]
    with evaluation_mode(model):
        while windows:
            rows = max(1, batch_tokens // len(windows[0].inputs))
            batch, windows = windows[:rows], windows[rows:]
            # Filling stands behind what is read, where a causal model cannot see it: no mask is needed.
            inputs, targets = _pad([item.inputs for item in batch], 0), _pad([item.targets for item in batch], IGNORE)
            inputs, targets = inputs.to(model.device), targets.to(model.device)
            nll = token_nll(model(input_ids=inputs, use_cache=False).logits, targets).double().cpu().numpy()
            for item, row, target in zip(batch, nll, targets.cpu().numpy(), strict=True):
                scored = np.flatnonzero(target != IGNORE)
                found[item.document].append((scored + item.start, row[scored], scored + 1))
    return [_join(parts) for parts in found]


def score_carried(
    model: nn.Module,
    documents: Sequence[Sequence[int]],
    bos: int | None,
    chunk: int,
    batch_tokens: int = 4096,
) -> list[DocumentScores]:
    """Score documents in chunks of `chunk` tokens read one after another through the model's cache.

    Every token is scored with its whole past, in the memory that the cache takes: constant for recurrent memories.

    Raises:
        MeasurementError: the model returns no cache, or logits that are not numbers.
    """
    streams = [_stream(tokens, bos) for tokens in documents]
    order = sorted(range(len(streams)), key=lambda index: -len(streams[index]))  # like lengths share a batch
    rows = max(1, batch_tokens // chunk)
    found: list[list[tuple]] = [[] for _ in documents]
    with evaluation_mode(model):
        for first in range(0, len(order), rows):
            batch = order[first : first + rows]
            # A row that has ended reads filling from then on; rows know nothing of each other.
            inputs = _pad([streams[index][:-1] for index in batch], 0)
            targets = _pad([streams[index][1:] for index in batch], IGNORE)
            cache = None
            for start in range(0, inputs.shape[1], chunk):
                ids = inputs[:, start : start + chunk].to(model.device)
                goal = targets[:, start : start + chunk].to(model.device)
                output = model(input_ids=ids, use_cache=True, **({} if cache is None else {"cache": cache}))
                cache = getattr(output, "cache", None)
                if cache is None:
                    raise MeasurementError(
                        f"{type(model).__name__} returns no cache, so nothing can be carried from one chunk to the next: "
                        "read in windows instead."
                    )
                nll = token_nll(output.logits, goal).double().cpu().numpy()
                for index, row, target in zip(batch, nll, goal.cpu().numpy(), strict=True):
                    scored = np.flatnonzero(target != IGNORE)
                    found[index].append((scored + start + 1, row[scored], scored + start + 1))
    return [_join(parts) for parts in found]


def _stream(tokens: Sequence[int], bos: int | None) -> list[int]:
    stream = list(tokens) if bos is None else [bos, *tokens]
    if len(stream) < 2:
        raise MeasurementError(
            "A document has no token to score: it is empty, or has one token and no <bos> before it."
        )
    return stream


def _join(parts: list[tuple]) -> DocumentScores:
    place, nll, context = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(place, kind="stable")
    return DocumentScores(nll[order], place[order], context[order])


def count_bytes(text: str, tokens: int, scored: int) -> float:
    """UTF-8 bytes of the scored part of a text; where not all its tokens were scored, by the text's bytes per token."""
    return len(text.encode()) * scored / tokens


def summarise(scores: Sequence[DocumentScores], sizes: Sequence[float], **bootstrap) -> dict:
    """Figures over all tokens, with intervals over documents (`sizes`: bytes of each).

    Returns:
        tokens, bytes; {mean, low, high} of loss (nats per token), perplexity and bits_per_byte; and by_place and by_context,
        one record per power of two: from, to (inclusive), tokens, loss, perplexity.
    """
    nats = [document.nll.sum() for document in scores]
    tokens = [len(document.nll) for document in scores]
    return {
        "tokens": int(sum(tokens)),
        "bytes": round(sum(sizes)),
        "loss": estimate(nats, tokens, **bootstrap),
        "perplexity": estimate(nats, tokens, scale=np.exp, **bootstrap),
        "bits_per_byte": estimate(np.divide(nats, np.log(2)), sizes, **bootstrap),
        "by_place": _by_power_of_two([(document.place, document.nll) for document in scores], **bootstrap),
        "by_context": _by_power_of_two([(document.context, document.nll) for document in scores], **bootstrap),
    }


def _by_power_of_two(documents: Sequence[tuple[np.ndarray, np.ndarray]], **bootstrap) -> list[dict]:
    records = []
    highest = max(int(counts.max()) for counts, _ in documents)
    for exponent in range(highest.bit_length()):
        low, high = 2**exponent, 2 ** (exponent + 1) - 1
        inside = [nll[(counts >= low) & (counts <= high)] for counts, nll in documents]
        inside = [nll for nll in inside if len(nll)]
        if not inside:
            continue
        nats, tokens = [nll.sum() for nll in inside], [len(nll) for nll in inside]
        records.append(
            {
                "from": low,
                "to": min(high, highest),
                "tokens": int(sum(tokens)),
                "documents": len(inside),
                "loss": estimate(nats, tokens, **bootstrap),
                "perplexity": estimate(nats, tokens, scale=np.exp, **bootstrap),
            }
        )
    return records
