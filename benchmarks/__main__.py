# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Speed and memory of AvgPath against its peers, one table a command, measured side by side in one run.

python -m benchmarks ops                     # the full measurement, kept in docs/results/
python -m benchmarks ops --quick             # seconds, small sizes: shows that it runs, printed only
python -m benchmarks acceptance              # what was promised and what was found
"""

import argparse
import errno
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from benchmarks import (
    acceptance,
    compiled_decode,
    conversion,
    decode,
    growth,
    layers,
    loading,
    ops,
    overhead,
    pretraining,
    read_once,
    roofline,
    selection,
    training,
)
from benchmarks.measure import machine_facts
from benchmarks.options import settle, whole
from benchmarks.report import RESULTS, Report

COMMANDS = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        ops,
        layers,
        training,
        pretraining,
        overhead,
        decode,
        growth,
        roofline,
        compiled_decode,
        read_once,
        loading,
        conversion,
        selection,
        acceptance,
    )
}


def parse(argv: list[str]) -> argparse.Namespace:
    """The settings of one command, checked; makes the folder of the results if there is to be one.

    Raises:
        SystemExit: with status 2 and a message on stderr, for what cannot be measured, read or written.
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=style)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = module.__doc__.partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__, formatter_class=style)
        for option, values in module.OPTIONS.items():
            values.add_to(command, option)
        command.add_argument("--quick", action="store_true", help="small sizes, a run of seconds")
        command.add_argument("--threads", type=whole(1), default=2, help="CPU threads (default: %(default)s)")
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
        command.add_argument("--output", type=Path, help=f"folder of the results (default: {RESULTS}; quick: none)")
    arguments = parser.parse_args(argv)
    settle(arguments, COMMANDS[arguments.command].OPTIONS)
    error = commands.choices[arguments.command].error
    if arguments.device == "cuda" and not torch.cuda.is_available():
        error("argument --device: cuda: PyTorch finds no CUDA device here; use --device cpu")
    if arguments.command == "acceptance":
        try:
            acceptance.read_results(arguments.output or RESULTS)
        except ValueError as reason:
            error(f"argument --output: {reason}")
    if arguments.output is None and not arguments.quick:
        arguments.output = RESULTS
    if arguments.output is not None:
        try:
            make_writable(arguments.output)
        except OSError as reason:
            error(f"argument --output: {arguments.output} cannot be written ({reason.strerror}); name another folder")
    return arguments


def make_writable(folder: Path) -> None:
    """Make `folder` if it is not there, and a file in it that is gone at once: a long run must not be lost at its end.

    Raises:
        OSError: one of the two fails.
    """
    if folder.is_file():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def main(argv: list[str] | None = None) -> Report:
    """Run one command; prints the table and writes the files that the command's options ask for."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    module = COMMANDS[arguments.command]
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    start = time.perf_counter()
    title, rows, facts = module.measure(arguments)
    options = {name: getattr(arguments, name) for name in (*module.OPTIONS, "quick", "device")}
    command_line = shlex.join(["python", "-m", "benchmarks", *argv])
    report = Report(arguments.command, title, command_line, options, machine_facts(), rows, facts)
    print(report.markdown(module.COLUMNS))
    if arguments.output is not None:
        for path in report.save(arguments.output, module.COLUMNS, module.draw):
            print(f"wrote {path}")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return report


if __name__ == "__main__":
    main()
