# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Options of a command: each has a value for the full measurement and one for `--quick`."""

import argparse
from typing import Any, NamedTuple


class Option(NamedTuple):
    """The type, and whether it is a list, is that of the full value."""

    full: Any
    quick: Any
    help: str

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        is_list = isinstance(self.full, list)
        full, quick = (" ".join(map(str, x)) if is_list else x for x in (self.full, self.quick))
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(self.full[0] if is_list else self.full),
            nargs="+" if is_list else None,
            help=f"{self.help} (default: {full}; quick: {quick})",
        )


def settle(arguments: argparse.Namespace, options: dict[str, Option]) -> None:
    """Give every option that was not given its full or quick value."""
    for name, option in options.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, option.quick if arguments.quick else option.full)
