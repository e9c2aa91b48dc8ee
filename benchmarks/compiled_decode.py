# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Times decoding token by token, eager against `torch.compile` (inductor), and counts graph breaks and recompilations.

    python -m benchmarks.compiled_decode --mixers softmax gated_delta_net mesa_net --tokens 512

Both sides read the same prompt and then the same tokens, one at a time and in turn, eager into an `AvgPathCache` and
compiled into a `StaticCache`. The largest difference between their logits stands beside the times.
"""

import argparse
import statistics
import time
import warnings

import torch
from torch._dynamo.utils import counters
from transformers import StaticCache

from modeling_avgpath import AvgPathCache, AvgPathConfig, AvgPathForCausalLM

PROMPT = 64


def make_model(mixer: str, hybrid_ratio: str) -> AvgPathForCausalLM:
    """About 36M parameters: 8 layers of width 512, vocabulary 8,192."""
    torch.manual_seed(0)
    config = AvgPathConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        mixer=mixer, hybrid_ratio=hybrid_ratio,
    )  # fmt: skip
    return AvgPathForCausalLM(config).eval()


@torch.no_grad()
def compare(model: AvgPathForCausalLM, tokens: int) -> dict[str, float]:
    """Median milliseconds a token of both sides, the first compiled step's seconds, and what Dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    compiled_forward = torch.compile(model.forward, fullgraph=False, dynamic=False)
    ids = torch.randint(model.config.vocab_size, (1, PROMPT + tokens))
    caches = AvgPathCache(model.config), StaticCache(config=model.config, max_cache_len=PROMPT + tokens)
    for cache in caches:
        model(ids[:, :PROMPT], cache=cache, logits_to_keep=1)
    times, difference = [], 0.0
    for place in range(PROMPT, PROMPT + tokens):
        token, logits = ids[:, place : place + 1], []
        start = time.perf_counter()
        for forward, cache in zip((model.forward, compiled_forward), caches, strict=True):
            logits.append(forward(input_ids=token, cache=cache).logits)
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
        difference = max(difference, ((logits[0] - logits[1]).norm() / logits[0].norm()).item())
    eager, compiled = times[2::2], times[3::2]
    return {
        "eager": 1e3 * statistics.median(eager),
        "compiled": 1e3 * statistics.median(compiled),
        "first": times[1],
        "graph breaks": sum(counters["graph_break"].values()),
        "recompilations": counters["stats"]["unique_graphs"] - 1,
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mixers = ["softmax", "gated_delta_net", "mesa_net", "ttt_linear"]
    parser.add_argument("--mixers", nargs="+", default=mixers, help="default: %(default)s")
    parser.add_argument("--hybrid-ratio", default="3:1", help="recurrent : softmax layers (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="decoded one at a time (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch._inductor")
    torch.set_num_threads(arguments.threads)
    print(f"Decoding {arguments.tokens} tokens after {PROMPT}, float32, {arguments.threads} threads, ", end="")
    print(f"{arguments.hybrid_ratio} hybrids, medians, PyTorch {torch.__version__}\n")
    print("| mixer | parameters | eager | compiled | ratio | graph breaks | recompilations | difference | first step |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for mixer in arguments.mixers:
        model = make_model(mixer, arguments.hybrid_ratio)
        found = compare(model, arguments.tokens)
        print(
            f"| {mixer} | {model.num_parameters() / 1e6:.1f}M | {found['eager']:.1f} ms | {found['compiled']:.1f} ms | "
            f"{found['compiled'] / found['eager']:.2f} | {found['graph breaks']} | {found['recompilations']} | "
            f"{found['difference']:.0e} | {found['first']:.0f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
