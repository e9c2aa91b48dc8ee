# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Fitting a run to the machine it is on."""

import ctypes
import os
import re
import sys
import time

import torch

from training.recipe import SetupError, TrainRecipe

# TFLOP/s of dense matrix products, as the vendors' data sheets give them: bf16, tf32 (fp32 inputs on tensor cores), fp32.
# The first pattern that is found in the device's name counts.
GPU_PEAKS: tuple[tuple[str, float | None, float | None, float], ...] = (
    (r"\bGB[23]00\b", 2500.0, 1250.0, 80.0),
    (r"\bB[23]00\b", 2250.0, 1125.0, 75.0),
    (r"\bH100 PCIe\b", 756.0, 378.0, 51.0),
    (r"\bH100 NVL\b|\bH200 NVL\b", 835.5, 417.7, 60.0),
    (r"\bH[12]00\b|\bH800\b|\bGH200\b", 989.4, 494.7, 66.9),
    (r"\bA[18]00\b", 312.0, 156.0, 19.5),
    (r"\bA40\b", 149.7, 74.8, 37.4),
    (r"\bA30\b", 165.0, 82.0, 10.3),
    (r"\bA10G\b", 70.0, 35.0, 31.5),
    (r"\bA10\b", 125.0, 62.5, 31.2),
    (r"\bRTX A6000\b", 154.8, 77.4, 38.7),
    (r"\bL40S\b", 362.0, 183.0, 91.6),
    (r"\bL40\b", 181.0, 90.5, 90.5),
    (r"\bL4\b", 121.0, 60.0, 30.3),
    (r"\bRTX 5090\b", 209.5, 104.8, 104.8),
    (r"\bRTX 4090\b", 165.2, 82.6, 82.6),
    (r"\bRTX 3090\b", 71.0, 35.6, 35.6),
    (r"\bV100\b", None, None, 15.7),
    (r"\bMI3(00|25)X\b", 1307.4, 653.7, 163.4),
    (r"\bMI250X\b", 383.0, None, 95.7),
    (r"\bMI250\b", 362.1, None, 90.5),
)


def choose_precision(wanted: str) -> str:
    """Resolve ``auto`` to Accelerate's ``bf16`` where the device multiplies bf16 natively, else to ``no`` (fp32).

    On CPUs that is AMX, where bf16 products are several times faster than fp32; without it, bf16 is slower.
    """
    on_cuda = torch.cuda.is_available()
    if wanted == "fp16" and not on_cuda:
        raise SetupError("train.mixed_precision=fp16 needs a CUDA device; use bf16 or no")
    if wanted != "auto":
        return wanted
    native = torch.cuda.is_bf16_supported(including_emulation=False) if on_cuda else torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "no"


def gpu_peak_flops(name: str, precision: str) -> float | None:
    """FLOP/s of dense products on the GPU called `name` at `bf16` (fp16 is as fast), `tf32` or `fp32`; `None` if unknown."""
    for pattern, *rates in GPU_PEAKS:
        if re.search(pattern, name):
            rate = rates[("bf16", "tf32", "fp32").index(precision)]
            return None if rate is None else rate * 1e12
    return None


def measure_peak_flops(dtype: torch.dtype, seconds: float = 0.3, size: int = 1024) -> float:
    """FLOP/s of the fastest of the `size` x `size` products that the CPU makes in so many `seconds`, with all threads."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    fastest, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or fastest == float("inf"):
        a @ b
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def peak_flops(device: torch.device, mixed_precision: str) -> float | None:
    """FLOP/s that one device can reach in products at the training precision: a CPU's measured, a GPU's from a table.

    `None` for devices that the table does not know. The random generator is left as it was.
    """
    is_half = mixed_precision in ("bf16", "fp16")
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            return measure_peak_flops(torch.bfloat16 if is_half else torch.float32)
    if device.type != "cuda":
        return None
    precision = "bf16" if is_half else "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return gpu_peak_flops(torch.cuda.get_device_name(device), precision)


def split_batch(train: TrainRecipe) -> tuple[int, int]:
    """Rows per process in one forward pass, and the number of such passes that make an optimiser step.

    Raises:
        SetupError: `train.batch_size` cannot be had in equal parts.
    """
    processes = int(os.environ.get("WORLD_SIZE", 1))
    micro_batch_size = train.micro_batch_size or train.batch_size // processes
    if not micro_batch_size or train.batch_size % (micro_batch_size * processes):
        raise SetupError(
            f"train.batch_size={train.batch_size} is not a multiple of train.micro_batch_size={micro_batch_size} times "
            f"{processes} process{'es' if processes > 1 else ''}"
        )
    return micro_batch_size, train.batch_size // (micro_batch_size * processes)


def keep_freed_memory() -> None:
    """Let glibc's allocator keep freed memory instead of returning it to the kernel.

    By default each tensor above 32 MiB is mapped anew, and its pages are zeroed and faulted in at every step; keeping
    them made training of a 5M Llama on two CPU cores 25% faster. No effect on other systems.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
