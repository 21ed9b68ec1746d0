"""The frame of the command line: the commands, their help, errors and exit codes."""

import argparse
import functools
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from rich.console import Console

from fftgrad.planning.commands import _analyze, _bench, _islands, _plan
from fftgrad.planning.commands._bench import version

FAILED, USAGE, INTERRUPTED, PIPE = 1, 2, 130, 141

EXIT_CODES = """\
exit codes:
  0    done, whatever the answer is
  1    the run failed
  2    something that was passed is not right: one line on stderr says what is
  130  interrupted
  141  nobody reads standard output any more
"""

DESCRIPTION = """\
Gradient exchange that costs what the information in a gradient costs: whether
it pays for you, which way, and how fast this machine is at it.
"""

RULE = re.compile(r"([\w.]+)\((.*?)\): (.*)", re.DOTALL)
"""An error of the library about an argument: `object(argument): rule ...`."""
COMMANDS: Mapping[str, ModuleType] = {
    "plan": _plan,
    "analyze": _analyze,
    "bench": _bench,
    "islands": _islands,
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and that takes -1ms for a value, and not for a flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def flags(self) -> dict[str, str]:
        """What the user types for each argument; nothing for those that only have a place."""
        return {one.dest: max(one.option_strings, key=len, default="") for one in self._actions}

    def error(self, message: str) -> NoReturn:
        """Says it, and how to get help."""
        self.exit(USAGE, f"{self.prog}: {' '.join(message.split())} (--help tells more)\n")


class Output(Console):
    """Standard output, of which a reader may have enough."""

    def on_broken_pipe(self) -> None:
        """Leaves the answer to the frame."""
        raise BrokenPipeError


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    formatter = functools.partial(argparse.RawDescriptionHelpFormatter, width=79)
    examples = "\n".join(command.EPILOG for command in COMMANDS.values())
    parser = Parser(
        prog="fftgrad",
        description=DESCRIPTION,
        epilog=f"{examples}\n{EXIT_CODES}",
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"fftgrad {version('fftgrad')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.HELP,
            description=command.HELP,
            epilog=f"{command.EPILOG}\n{EXIT_CODES}",
            formatter_class=formatter,
        )
        command.add_arguments(own)
        own.add_argument("--traceback", action="store_true", help="where an error comes from")
        own.set_defaults(flags=own.flags())
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Bad usage and --help leave by SystemExit."""
    try:
        try:
            return _answer(make_parser().parse_args(argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE


def _answer(args: argparse.Namespace) -> int:
    """The exit code of a command, whose errors become one line."""
    try:
        COMMANDS[args.command].run(args, Output())
    except (BrokenPipeError, ModuleNotFoundError):
        raise
    except KeyboardInterrupt:
        print("fftgrad: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if args.traceback:
            traceback.print_exc()
        text = " ".join(str(error).split())
        if isinstance(error, ValueError | TypeError) and (said := RULE.fullmatch(text)):
            print(f"fftgrad {args.command}: {_by_flags(said, args)}", file=sys.stderr)
            return USAGE
        hint = "" if args.traceback else " (--traceback shows where)"
        print(f"fftgrad: {type(error).__name__}: {text}{hint}", file=sys.stderr)
        return FAILED
    return 0


def _by_flags(said: re.Match[str], args: argparse.Namespace) -> str:
    """An error of the library, with the flag in place of the argument."""
    owner, argument, rule = said.groups()
    flag = args.flags.get(argument) if owner == args.command else None
    where = flag or (argument if argument.startswith("--") else f"{owner}({argument})")
    return f"{where}: {rule}"
