"""argparse with help that is pleasant to read: commands in groups, errors in one sentence, --a_b and --a-b alike.

Plain argparse and not a framework on top of it: it starts in a few milliseconds and is there on machines that hold only
torch.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

Arguments = argparse.Namespace
_Value = TypeVar("_Value")


class Parser(argparse.ArgumentParser):
    """A parser of one command, or of all."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **settings)

    def parse(self, argv: Sequence[str]) -> Arguments:
        """Parse a command line, in which --output-dir is the same as --output_dir.

        A command whose defaults have `takes_more` gets options that nobody described, as words in `more`.
        """
        arguments, more = self.parse_known_args([underscored(word) for word in argv])
        if more and not getattr(arguments, "takes_more", False):
            self.error(f"unknown: {' '.join(more)}")
        arguments.more = more
        return arguments

    def add_commands(self) -> "Commands":
        """Let commands follow; without one, the help is shown."""
        self.set_defaults(run=self._run_without_command)
        return Commands(self)

    def _run_without_command(self, _: Arguments) -> int:
        self.print_help(sys.stderr)
        return 2

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, without the usage that hides it."""
        self.exit(2, f"{self.prog}: {message}\nFor help: {self.prog} --help\n")


class Commands:
    """Sub-commands of a parser, listed in its help under the title of their group."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._action = parser.add_subparsers(
            prog=parser.prog, help=argparse.SUPPRESS, metavar="COMMAND", parser_class=Parser
        )

    def begin_group(self, title: str) -> None:
        """Put the commands that follow under this title."""
        self._parser.description = f"{self._parser.description}\n\n{title}:"

    def add(self, name: str, about: str, run: Callable[[Arguments], int], **settings: Any) -> Parser:
        """A command that calls `run` with what was parsed."""
        parser = self.add_group(name, about, **settings)
        parser.set_defaults(run=run)
        return parser

    def add_group(self, name: str, about: str, **settings: Any) -> Parser:
        """A command that has commands of its own."""
        self._parser.description = f"{self._parser.description}\n  {name:<12} {about}"
        description = settings.pop("description", f"{about[0].upper()}{about[1:]}.")
        return self._action.add_parser(name, description=description, **settings)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps our line breaks, and leaves room for long option names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


_OPTION = re.compile(r"^--[a-z][a-z0-9._-]*")


def underscored(word: str) -> str:
    """--output-dir=a-b as --output_dir=a-b; other words as they are."""
    return _OPTION.sub(lambda option: "--" + option[0][2:].replace("-", "_"), word)


def checked(kind: Callable[[str], _Value], fits: Callable[[_Value], bool], wanted: str) -> Callable[[str], _Value]:
    """An argparse type: what `kind` makes of the word, refused with "must be `wanted`" unless it `fits`."""

    def parse(word: str) -> _Value:
        try:
            value = kind(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {word!r}") from None
        if not fits(value):
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {word!r}")
        return value

    return parse
