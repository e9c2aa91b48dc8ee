# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What the training scripts' command lines share: recipe and overrides, errors in one line, exit statuses."""

import argparse
import dataclasses
import errno
import os
import sys
from collections.abc import Callable

import transformers

from training.recipe import REPOSITORY, Recipe, RunError, Schema, SetupError, describe_fields, load_recipe

NOTES = """Ctrl-C or SIGTERM ends the run after the step in hand, with a checkpoint; a second Ctrl-C ends it at once.
Relative paths of recipes and model shapes are looked up from the working folder, then from the repository.
"""


class Interrupted(Exception):
    """The run was told to stop, and has: what was saved where, and the signal's number."""


def parse_recipe(
    name: str,
    description: str,
    examples: str,
    arguments: list[str] | None = None,
    schema: type[Schema] = Recipe,
    notes: str = NOTES,
) -> Schema:
    """The recipe that the command line of the script `name` asks for, by default the one in configuration/ of that name."""
    default = f"configuration/{name}.yaml"
    plans = any(entry.name == "dry_run" for entry in dataclasses.fields(schema))
    parser = argparse.ArgumentParser(
        prog=f"{name}.py",
        description=description,
        usage=f"%(prog)s {'[--dry-run] ' if plans else ''}[RECIPE.yaml] [KEY=VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"recipe fields:\n{describe_fields(schema)}\n\nexamples:\n{examples}\n{notes}",
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="RECIPE.yaml | KEY=VALUE",
        help=f"a recipe (default: {default}), then fields to change",
    )
    if plans:
        parser.add_argument("--dry-run", action="store_true", help="print what the run will take, and stop")
    parsed = parser.parse_intermixed_args(arguments)
    given = parsed.arguments
    if plans and parsed.dry_run:
        given = [*given, "dry_run=true"]
    has_recipe = bool(given) and "=" not in given[0]
    return load_recipe(given[0] if has_recipe else str(REPOSITORY / default), given[has_recipe:], schema)


def is_main_process() -> bool:
    """Whether this is the process that speaks for all, told before Accelerate has started."""
    return os.environ.get("RANK", "0") == "0"


def warn(name: str, message: str) -> None:
    """Tell on standard error, once for all processes, what the script `name` does otherwise than might be expected."""
    if is_main_process():
        print(f"{name}.py: warning: {message}", file=sys.stderr)


def run_script(name: str, run: Callable[[], object]) -> int:
    """Call `run`; returns the exit status: 0, 1 for a failure on the way, 2 for a mistake in the set-up, 128 + n after
    signal n.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    is_main = is_main_process()
    try:
        run()
    except (SetupError, RunError) as error:
        if is_main:
            print(f"{name}.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SetupError) else 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"{name}.py: error: {error}: make room and start it again", file=sys.stderr)
        return 1
    except Interrupted as stop:
        message, number = stop.args
        if is_main:
            print(f"{name}.py: {message}", file=sys.stderr)
        return 128 + number
    except KeyboardInterrupt:
        print(f"{name}.py: stopped at once; nothing was saved after the last checkpoint", file=sys.stderr)
        return 130
    return 0
