"""The `knot` command. Errors are one sentence on stderr; 2 is wrong usage, 1 a refusal, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Protocol

from knot.errors import KnotError

Command = Callable[[argparse.Namespace], int]


class Commands(Protocol):
    """Where commands are added: what `ArgumentParser.add_subparsers` returns."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser:
        """A parser for a new command."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A model's name may have characters that the terminal does not.
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone, as `| head` does; nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KnotError as error:
        print(f"knot: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"knot: {where}{error.strerror or error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="knot", description="Serves a language model from many small Workers."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_convert(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_repair(commands)
    _add_fetch(commands)
    _add_clusters(commands)
    return parser


def _add_clusters(commands: Commands) -> None:
    """Commands that describe themselves, in modules that import what they need when they run."""
    for name in ("knot.run_command", "knot.dev_command", "knot.plan.command", "knot.trace.command"):
        if find_spec(name) is not None:
            import_module(name).add_commands(commands)


def _add_convert(commands: Commands) -> None:
    parser = commands.add_parser("convert", help="make a knot of a GGUF file")
    parser.add_argument(
        "gguf", nargs="+", type=Path, help="a GGUF file, one part of a split one, or all its parts"
    )
    parser.add_argument("-o", "--output", type=Path, help="the knot; beside the GGUF unless given")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    _add_progress(parser)
    parser.set_defaults(command=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    from knot.convert import convert

    source = arguments.gguf[0] if len(arguments.gguf) == 1 else arguments.gguf
    path, header = convert(source, arguments.output, force=arguments.force, show_progress=arguments.progress)
    print(f"{path}: {header.file_size} bytes, {len(header.tensors)} tensors, {header.fingerprint[:16]}")
    return 0


def _add_inspect(commands: Commands) -> None:
    parser = commands.add_parser("inspect", help="show what a knot says of itself")
    parser.add_argument("knot", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    from knot.inspect_table import as_json, as_text
    from knot.reader import load_header

    header = load_header(arguments.knot)
    print(as_json(header) if arguments.json else as_text(header))
    return 0


def _add_verify(commands: Commands) -> None:
    parser = commands.add_parser("verify", help="check every byte of a knot")
    parser.add_argument("knot", type=Path)
    _add_progress(parser)
    parser.set_defaults(command=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from knot.verify import verify

    found = verify(arguments.knot, show_progress=arguments.progress)
    tokenizer = (
        "no tokenizer" if found.tokenizer is None else f"a tokenizer of {found.tokenizer.n_tokens} tokens"
    )
    print(
        f"{arguments.knot}: sound; {found.tensors} tensors in {found.groups} row groups, "
        f"{found.payload_bytes} bytes, "
        f"{tokenizer}, {found.header.fingerprint[:16]}"
    )
    return 0


def _add_repair(commands: Commands) -> None:
    parser = commands.add_parser("repair", help="rewrite a knot of the old layout")
    parser.add_argument("knot", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="the new knot; NAME.repaired.knot unless given")
    parser.add_argument("--tokenizer-from", type=Path, metavar="GGUF", help="a GGUF of the same model")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    _add_progress(parser)
    parser.set_defaults(command=_repair)


def _repair(arguments: argparse.Namespace) -> int:
    from knot.repair import repair

    repaired = repair(
        arguments.knot,
        arguments.output,
        tokenizer_from=arguments.tokenizer_from,
        force=arguments.force,
        show_progress=arguments.progress,
    )
    for note in repaired.notes:
        print(f"{arguments.knot}: {note}")
    print(f"{repaired.path}: {repaired.header.file_size} bytes, {repaired.header.fingerprint[:16]}")
    return 0


def _add_fetch(commands: Commands) -> None:
    from knot.fetch import HELP

    parser = commands.add_parser("fetch", help="fetch a model")
    parser.add_argument("model", help=HELP)
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="$KNOT_MODELS, or models/ unless given")
    _add_progress(parser)
    parser.set_defaults(command=_fetch)


def _fetch(arguments: argparse.Namespace) -> int:
    from knot.fetch import fetch
    from knot.paths import models_folder

    print(fetch(arguments.model, arguments.to or models_folder(), show_progress=arguments.progress))
    return 0


def _add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show a progress bar on stderr; on a terminal unless told otherwise",
    )


if __name__ == "__main__":
    sys.exit(main())
