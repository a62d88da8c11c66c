"""The front of the measurements: `python -m bench NAME [options] [--json]`.

A measurement is a module of this package with `SUMMARY`, `add_arguments(parser)` and `run(arguments)`, which
returns a JSON object. Figures are medians, and ratios are taken in one run; tables go to stderr while it
runs, the object is the last line of stdout. A module that has `QUICK`, a list of arguments, has a part in
`python -m bench all` too, which fits a coffee break.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import bench
from knot.errors import KnotError


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement: its name, what it is about, its options and the run itself."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], dict[str, Any]]
    quick: Sequence[str] | None


def measurements() -> list[Measurement]:
    """Every measurement of the package, by name."""
    found: list[Measurement] = []
    for info in pkgutil.iter_modules(bench.__path__):
        if info.name.startswith("_"):
            continue
        module = cast(Any, importlib.import_module(f"bench.{info.name}"))
        if hasattr(module, "SUMMARY"):
            quick = getattr(module, "QUICK", None)
            found.append(Measurement(info.name, module.SUMMARY, module.add_arguments, module.run, quick))
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Runs one measurement, or the quick form of all; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m bench", description="Measurements: ratios taken in one run, one JSON object last."
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    named = {one.name: one for one in measurements()}
    for one in named.values():
        own = names.add_parser(one.name, help=one.summary, description=one.summary)
        own.add_argument("--json", action="store_true", help="the object alone, without tables")
        one.add_arguments(own)
    names.add_parser("all", help="the quick form of each that has one")
    arguments = parser.parse_args(words)
    found: dict[str, Any] = {}
    try:
        if arguments.name == "all":
            for one in named.values():
                if one.quick is not None:
                    found[one.name] = one.run(parser.parse_args([one.name, *one.quick]))
        else:
            found = named[arguments.name].run(arguments)
    except KnotError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    sys.stderr.flush()
    print(json.dumps({"bench": arguments.name, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
