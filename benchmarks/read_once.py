# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Questions about a long document: read once, saved, loaded and forked, against read again for every question.

Both ways give the same tokens, which is checked. What is saved takes the bytes shown, for an all-softmax model too.
"""

import argparse
import tempfile
import time

import torch

from benchmarks.cases import MODEL_SHAPE, QUICK_MODEL_SHAPE, make_model
from benchmarks.options import Option
from benchmarks.report import Column, Report, bars
from modeling_avgpath import AvgPathCache

QUESTION, ANSWER = 32, 16
MIXER = "gated_delta_net"
OPTIONS = {
    "documents": Option([2048, 8192], [64], "tokens"),
    "questions": Option(2, 1, "per document"),
    "ratios": Option(["1:0", "3:1", "0:1"], ["3:1"], "recurrent : softmax layers"),
}
COLUMNS = (
    Column("hybrid", f"{MIXER} : softmax"),
    Column("document", "document", "{:,}"),
    Column("read", "read and save (s)", "{:.2f}"),
    Column("load", "load (s)", "{:.3f}"),
    Column("fork", "a question, forked (s)", "{:.2f}"),
    Column("again", "a question, read again (s)", "{:.2f}"),
    Column("ratio", "ratio", "{:.2f}"),
    Column("cache_mb", "cache (MB)", "{:.1f}"),
)


@torch.no_grad()
def compare(model, length: int, questions: int) -> dict[str, float]:
    """Seconds to read the document, to load its cache, to answer a question either way, and the cache's megabytes.

    Raises:
        RuntimeError: the two ways answered differently.
    """
    document = torch.randint(model.config.vocab_size, (1, length), device=model.device)
    asked = [
        torch.cat((document, torch.randint_like(document[:, :1].expand(-1, QUESTION), model.config.vocab_size)), dim=1)
        for _ in range(questions)
    ]

    def answer(ids: torch.Tensor, **arguments) -> torch.Tensor:
        settings = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **arguments)

    answer(asked[0][:, -QUESTION:])  # to warm up
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        cache = AvgPathCache(model.config)
        model(document, cache=cache, logits_to_keep=1)
        cache.save_pretrained(folder)
        read = time.perf_counter()
        cache = AvgPathCache.from_pretrained(folder)
        loaded = time.perf_counter()
    once = [answer(ids, cache=cache.fork()) for ids in asked]
    forked = time.perf_counter()
    again = [answer(ids) for ids in asked]
    end = time.perf_counter()
    if not all(torch.equal(a, b) for a, b in zip(once, again, strict=True)):
        raise RuntimeError("answers from a fork differ from those of the document read again")
    return {
        "read": read - start,
        "load": loaded - read,
        "fork": (forked - loaded) / questions,
        "again": (end - forked) / questions,
        "ratio": (forked - loaded) / (end - forked),
        "cache_mb": cache.nbytes / 1e6,
    }


def measure(settings: argparse.Namespace) -> tuple[str, list[dict], dict]:
    shape = QUICK_MODEL_SHAPE if settings.quick else MODEL_SHAPE
    rows = []
    for ratio in settings.ratios:
        model = make_model(f"{MIXER} {ratio}", shape, settings.device)
        for length in settings.documents:
            rows.append({"hybrid": ratio, "document": length, **compare(model, length, settings.questions)})
    title = f"Questions of {QUESTION} tokens, answers of {ANSWER}, fp32, batch 1; means of {settings.questions}."
    return title, rows, {}


def draw(report: Report):
    labels = [f"{row['hybrid']}, {row['document']:,}, {way}" for row in report.rows for way in ("forked", "read again")]
    values = [row[key] for row in report.rows for key in ("fork", "again")]
    return bars(labels, values, "seconds a question")
