# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Options of a command: each has a value for the full measurement and one for `--quick`."""

import argparse
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple


def whole(least: int) -> Callable[[str], int]:
    """A `type` of `add_argument`: whole numbers from `least` on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give {least} or more") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is too small; give {least} or more")
        return number

    return read


def positive(text: str) -> float:
    """A `type` of `add_argument`: finite numbers above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number above 0; give one such as 0.5")
    return number


class Option(NamedTuple):
    """The type, and whether it is a list, is that of the full value.

    Whole numbers are `least` or more: 0 is for options in which it has a meaning. Other numbers are above 0. Words are of
    those `known`, if any are named.
    """

    full: Any
    quick: Any
    help: str
    least: int = 1
    known: Collection[str] = ()

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        is_list = isinstance(self.full, list)
        full, quick = (" ".join(map(str, x)) if is_list else x for x in (self.full, self.quick))
        kind = type(self.full[0] if is_list else self.full)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type={int: whole(self.least), float: positive}.get(kind, kind),
            choices=list(self.known) or None,
            nargs="+" if is_list else None,
            help=f"{self.help} (default: {full}; quick: {quick})",
        )


def settle(arguments: argparse.Namespace, options: dict[str, Option]) -> None:
    """Give every option that was not given its full or quick value."""
    for name, option in options.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, option.quick if arguments.quick else option.full)
