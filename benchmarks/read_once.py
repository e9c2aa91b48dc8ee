# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Times questions about a long document: read once, saved, loaded and forked, against read again for every question.

    python -m benchmarks.read_once --documents 2048 8192 --questions 4

Both ways give the same tokens, which is checked. What is saved takes the bytes shown, for an all-softmax model too.
"""

import argparse
import tempfile
import time

import torch

from benchmarks.compiled_decode import make_model
from modeling_avgpath import AvgPathCache

QUESTION, ANSWER = 32, 16


@torch.no_grad()
def compare(model, length: int, questions: int) -> dict[str, float]:
    """Seconds to read the document, to load its cache, to answer a question either way, and the cache's bytes."""
    document = torch.randint(model.config.vocab_size, (1, length))
    asked = [
        torch.cat((document, torch.randint(model.config.vocab_size, (1, QUESTION))), dim=1) for _ in range(questions)
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
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True)), "the answers differ"
    return {
        "read": read - start,
        "load": loaded - read,
        "fork": (forked - loaded) / questions,
        "again": (end - forked) / questions,
        "bytes": cache.nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[2048, 8192], help="tokens (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--ratios", nargs="+", default=["1:0", "3:1", "0:1"], help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    print(
        f"gated_delta_net : softmax hybrids, float32, {arguments.threads} threads, PyTorch {torch.__version__}; ",
        end="",
    )
    print(f"questions of {QUESTION} tokens, answers of {ANSWER}, means of {arguments.questions}\n")
    print("| ratio | document | read and save | load | a question, forked | a question, read again | ratio | cache |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for ratio in arguments.ratios:
        model = make_model("gated_delta_net", ratio)
        for length in arguments.documents:
            found = compare(model, length, arguments.questions)
            print(
                f"| {ratio} | {length} | {found['read']:.2f} s | {found['load']:.3f} s | {found['fork']:.2f} s | "
                f"{found['again']:.2f} s | {found['fork'] / found['again']:.2f} | {found['bytes'] / 1e6:.1f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
