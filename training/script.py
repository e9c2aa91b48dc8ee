# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What the training scripts' command lines share: recipe and overrides, errors in one line, exit statuses."""

import argparse
import os
import sys
from collections.abc import Callable

import transformers

from training.recipe import REPOSITORY, Recipe, Schema, SetupError, describe_fields, load_recipe

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
    parser = argparse.ArgumentParser(
        prog=f"{name}.py",
        description=description,
        usage="%(prog)s [RECIPE.yaml] [KEY=VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"recipe fields:\n{describe_fields(schema)}\n\nexamples:\n{examples}\n{notes}",
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="RECIPE.yaml | KEY=VALUE",
        help=f"a recipe (default: {default}), then fields to change",
    )
    given = parser.parse_args(arguments).arguments
    has_recipe = bool(given) and "=" not in given[0]
    return load_recipe(given[0] if has_recipe else str(REPOSITORY / default), given[has_recipe:], schema)


def warn(name: str, message: str) -> None:
    """Tell on standard error, once for all processes, what the script `name` does otherwise than might be expected."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{name}.py: warning: {message}", file=sys.stderr)


def run_script(name: str, run: Callable[[], object]) -> int:
    """Call `run`; returns the exit status: 0, 2 for a mistake in the set-up, 128 + n after signal n."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        run()
    except SetupError as error:
        if is_main:
            print(f"{name}.py: error: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        message, number = stop.args
        if is_main:
            print(f"{name}.py: {message}", file=sys.stderr)
        return 128 + number
    except KeyboardInterrupt:
        print(f"{name}.py: stopped at once; nothing was saved after the last checkpoint", file=sys.stderr)
        return 130
    return 0
