# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Training scripts in forked processes: imports are paid once, and a process can be told where to send itself a signal."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from training.recipe import REPOSITORY

# `accelerate launch --cpu` starts several processes by MPI alone; `torchrun` does by itself, for Accelerate told so.
ON_CPUS = {"ACCELERATE_USE_CPU": "true"}

# Forks for each line of its input: arguments, and where a process signals itself. What is patched is patched here alone:
# the script knows nothing of being killed. Code that sets `main`, POINTS and `prepare` stands between these two parts.
BEFORE = """
import json, os, resource, signal, sys, traceback

def patch(owner, name, matches, when, by=signal.SIGKILL):
    original = getattr(owner, name)
    def patched(*arguments, **options):
        is_hit = matches(*arguments, **options)
        if is_hit and when == "before":
            os.kill(os.getpid(), by)
        if is_hit and when == "cut short":
            with open(arguments[1], "wb") as stream:
                stream.write(b"PK" * 20)
            os.kill(os.getpid(), by)
        result = original(*arguments, **options)
        if is_hit:
            os.kill(os.getpid(), by)
        return result
    setattr(owner, name, patched)

def prepare(order, is_last):
    pass
"""
AFTER = """
def start(order, rank):
    child = os.fork()
    if not child:
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["environment"])
        signal.alarm(order["seconds"])  # processes that wait for each other for ever
        if order["processes"] > 1:  # what torchrun tells each process
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        prepare(order, rank == order["processes"] - 1)
        if order["point"]:
            name, _, count = order["point"].partition(" ")
            POINTS[name](int(count or 0))
        if order["file_limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_limit"], order["file_limit"]))
        status = 1
        try:
            status = main(order["arguments"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return child

for line in sys.stdin:
    order = json.loads(line)
    children = [start(order, rank) for rank in range(order["processes"])]
    print(children[0], flush=True)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(max(statuses, key=abs), flush=True)
"""


class ForkedDriver:
    """Runs a script in `folder` with the recipe there, each time in a process of its own that has imported everything."""

    def __init__(self, folder: Path, recipe: str, script: str, seconds: int = 100):
        """`script` is Python that sets `main`, POINTS (name -> function of a step that calls `patch`) and perhaps `prepare`;
        a process may take `seconds`.
        """
        self.folder, self.recipe, self.seconds = folder, recipe, seconds
        self.log = folder / "log.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEFORE + script + AFTER], cwd=folder, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip

    def run(
        self, *arguments: str, kill_at: str = "", watch: Callable[[], bool] | None = None,
        number: int = signal.SIGKILL, file_limit: int = 0, processes: int = 1, environment: dict | None = None, **options,
    ) -> tuple[int, str]:  # fmt: skip
        """The exit status (negative after a signal) and the output.

        Args:
            kill_at: one of POINTS, with its step.
            watch: called until it is true; then the process gets the signal `number` from here.
            file_limit: bytes that a file may have.
            processes: so many, as torchrun would start them; the worst exit status is that of all.
            options: for the script's `prepare`.
        """
        self.log.write_text("")
        environment = dict(environment or {})
        if processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            environment |= ON_CPUS | {
                "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }  # fmt: skip
        order = {
            "arguments": [self.recipe, *arguments], "point": kill_at, "log": str(self.log), "file_limit": file_limit,
            "processes": processes, "environment": environment, "seconds": self.seconds, **options,
        }  # fmt: skip
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        if watch is not None:
            deadline = time.monotonic() + 60
            while not watch() and time.monotonic() < deadline:
                time.sleep(0.0005)
            os.kill(child, number)
        return int(self.process.stdout.readline()), self.log.read_text(encoding="utf-8")

    def kill(self, point: str, *arguments: str) -> str:
        """Run until a point kills it; the output."""
        status, log = self.run(*arguments, kill_at=point)
        assert status == -signal.SIGKILL, (point, log)
        return log

    def finish(self, *arguments: str, **options) -> Path:
        """Run to the end; the run's folder."""
        status, log = self.run(*arguments, **options)
        assert status == 0, log
        name = next(argument for argument in arguments if argument.startswith("output_dir="))
        return self.folder / name.partition("=")[2]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)
