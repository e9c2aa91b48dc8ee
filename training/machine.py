# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Fitting a run to the machine it is on."""

import ctypes
import os
import sys

import torch

from training.recipe import SetupError, TrainRecipe


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
