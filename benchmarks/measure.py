# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Measuring: sides timed in turn, peak memory in a process of its own, facts about the machine."""

import ctypes
import datetime
import gc
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

WARM_UP_BELOW = 5.0  # seconds: what caches, allocator and threads cost a first run is lost in a longer one
# glibc reads these when a process starts: large tensors get pages of their own, which go back when they are freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


class Timing(NamedTuple):
    """Seconds of one side: the median, the fastest and the number of its timed runs."""

    median: float
    fastest: float
    runs: int


def wait_for_device() -> None:
    """Until everything queued on an accelerator is done; nothing to do on a CPU."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def clock(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    wait_for_device()
    start = time.perf_counter()
    function()
    wait_for_device()
    return time.perf_counter() - start


def interleave(
    sides: Mapping[str, Callable[[], Any]], repeats: int, seconds: float = 30.0, least: int = 3
) -> dict[str, Timing]:
    """Time all sides in turn, round by round, so that what disturbs the machine disturbs every side.

    Args:
        sides: name -> what to time, called without arguments.
        repeats: timed runs of each side at most.
        seconds: a side stops when its runs add up to this, but not before `least` of them.
        least: timed runs of each side at least.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name, function in sides.items():
        first = clock(function)
        if first > WARM_UP_BELOW:
            times[name].append(first)
    for _ in range(repeats):
        for name, function in sides.items():
            done = times[name]
            if len(done) < repeats and (len(done) < min(least, repeats) or sum(done) < seconds):
                done.append(clock(function))
    return {name: Timing(statistics.median(done), min(done), len(done)) for name, done in times.items()}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm()).item()


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a process of its own, which has imported everything and computed nothing yet.

    Its allocator returns freed memory at once (see `ALLOCATOR`). Function, arguments and result are pickled.
    """
    os.environ.update(ALLOCATOR)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.cases", "torch._dynamo"])
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(function, *arguments).result()


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most memory that a call holds at any time beyond what the process held before; run it `in_fresh_process`.

    On a CPU it is the resident set, which Linux alone can reset: `OSError` elsewhere.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    before = _resident("VmRSS")
    function()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


def machine_facts() -> dict[str, Any]:
    """What a number must be quoted with: processor, threads, versions, date."""
    facts = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
