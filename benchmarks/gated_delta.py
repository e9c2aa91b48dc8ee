# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Times `gated_delta_rule` against the PyTorch function in Transformers, forward and backward, side by side on the CPU.

    python -m benchmarks.gated_delta --lengths 4096 16384 --repeats 5

The peer is `torch_chunk_gated_delta_rule` of OLMo Hybrid. Where flash-linear-attention is installed, Transformers puts
its GPU kernel behind that name, which cannot run on a CPU; the PyTorch function is the one the name was wrapped around.
Both sides see the same tensors in turn, after one run each to warm up. Wall time on a shared machine is noisy: prefer
an idle one.
"""

import argparse
import inspect
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers.models.olmo_hybrid import modeling_olmo_hybrid

from modeling_avgpath.ops import gated_delta_rule

in_tree_gated_delta_rule = inspect.unwrap(modeling_olmo_hybrid.torch_chunk_gated_delta_rule)


def make_inputs(batch: int, length: int, heads: int, dim: int) -> list[torch.Tensor]:
    """q, k, v `[B, T, H, D]`, g, beta `[B, T, H]`, all float32 and wanting gradients."""
    q, k = (F.normalize(torch.randn(batch, length, heads, dim), dim=-1) for _ in range(2))
    v = torch.randn(batch, length, heads, dim)
    g = F.logsigmoid(torch.randn(batch, length, heads) + 3)
    beta = torch.rand(batch, length, heads)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def forward_and_backward(rule: Callable, inputs: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """Seconds of one pass, and its output and gradients."""
    start = time.perf_counter()
    o, _ = rule(*inputs)
    gradients = torch.autograd.grad(o, inputs, torch.ones_like(o))
    return time.perf_counter() - start, [o, *gradients]


def compare(inputs: list[torch.Tensor], repeats: int) -> tuple[float, float, float]:
    """Median seconds of ours and of the peer, and the largest relative difference between their results."""
    rules = gated_delta_rule, in_tree_gated_delta_rule
    results = [forward_and_backward(rule, inputs)[1] for rule in rules]
    difference = max(((a - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True))
    times = [[forward_and_backward(rule, inputs)[0] for rule in rules] for _ in range(repeats)]
    ours, peer = (statistics.median(column) for column in zip(*times, strict=True))
    return ours, peer, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each side (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--dim", type=int, default=64, help="key and value size of a head (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(
        f"Gated delta rule, float32, forward + backward, batch {arguments.batch}, {arguments.heads} heads of ", end=""
    )
    print(f"{arguments.dim}, {arguments.threads} threads, median of {arguments.repeats}, PyTorch {torch.__version__}\n")
    print("| tokens | AvgPath | Transformers | ratio | largest relative difference |")
    print("|---:|---:|---:|---:|---:|")
    for length in arguments.lengths:
        inputs = make_inputs(arguments.batch, length, arguments.heads, arguments.dim)
        ours, peer, difference = compare(inputs, arguments.repeats)
        print(f"| {length} | {ours:.3f} s | {peer:.3f} s | {ours / peer:.3f} | {difference:.1e} |", flush=True)


if __name__ == "__main__":
    main()
