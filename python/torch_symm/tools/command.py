"""Common parts of ``torch-symm`` commands: a parser whose help has examples and whose errors have a remedy."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

#: The command line of this program.
PROGRAM = "python -m torch_symm" if Path(sys.argv[0]).name == "__main__.py" else "torch-symm"
WIDTH = 100
#: Maximum of numbers on the command line: as seconds, 11 days, which every system wait accepts.
LARGEST = 1e6
#: Maximum size of a group on one node (``MAX_RANKS`` of ``src/mem/layout.rs``).
MOST_RANKS = 128


def closest(word: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean …?`` with the closest match for ``word`` in ``known``; empty without a match."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def named(what: str, word: str, known: Iterable[str]) -> str:
    """Returns ``word``, if it is one of ``known``.

    Raises:
        ValueError: ``word`` is not known; the text suggests a known name, or lists all.
    """
    names = list(known)
    if word in names:
        return word
    raise ValueError(f"no {what} {word!r}{closest(word, names) or '; there are ' + ', '.join(names)}")


def overloaded() -> str:
    """Returns a sentence if more processes want to run than this machine has cores; otherwise nothing.

    The load average counts all processes of the machine, so it is compared with all of its cores.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return ""
    return f"load average {load:.1f} on {cores} cores: other processes take time from the ranks"


def positive(text: str) -> float:
    """Returns the finite number above 0 that an option gives, which is at most :data:`LARGEST`."""
    with suppress(ValueError):
        if 0 < (value := float(text)) <= LARGEST:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to {LARGEST:g}")


def count(text: str) -> int:
    """Returns the whole number from 1 to :data:`LARGEST` that an option gives."""
    if text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= LARGEST:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {LARGEST:g}")


def whole(text: str) -> int:
    """Returns the whole number from 0 to :data:`LARGEST` that an option gives."""
    return 0 if text == "0" else count(text)


def ranks(text: str) -> int:
    """Parses the number of ranks of a group: from 2 to the :data:`MOST_RANKS` of one node."""
    if text.isascii() and text.isdigit() and len(text) < 20 and 2 <= int(text) <= MOST_RANKS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: a group of one node has 2 to {MOST_RANKS}")


def write_error(path: Path) -> str | None:
    """Returns why a command could not write to ``path``, or ``None`` if it can."""
    if not path.absolute().parent.is_dir():
        return f"{path}: there is no folder {path.parent}"
    if path.is_dir():
        return f"{path} is a folder: name a file"
    try:
        if path.exists():
            # Appending nothing could wait for the reader of a pipe.
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            # A link may point to a file that does not exist yet.
            probe = path.resolve()
            probe.touch()
            probe.unlink()
    except OSError as error:
        return f"{path}: cannot be written: {error.strerror}"
    return None


def check_folder(parser: Parser, path: Path) -> None:
    """Ends the command before it measures data that it cannot write to ``path``."""
    if error := write_error(path):
        parser.error(error)


def check_plot(parser: Parser, path: Path, endings: Sequence[str]) -> None:
    """Ends the command before it measures data that it cannot draw to ``path``."""
    check_folder(parser, path)
    if path.suffix not in endings:
        parser.error(f"--plot {path}: the name ends in one of {', '.join(endings)}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: needs matplotlib, which is not installed: pip install matplotlib")


def report(error: object, as_json: bool) -> None:
    """Prints why a command failed to standard error; if it ``as_json`` prints one object, also as that object."""
    print(error, file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps({"error": str(error)}, indent=1))


def counts(text: str) -> tuple[int, ...]:
    """Returns the whole numbers from 1 to :data:`LARGEST` that an option gives, with commas between them."""
    return tuple(map(count, text.split(",")))


def check_figures(values: Iterable[object]) -> None:
    """Checks the times, rates and sizes that were read from a file.

    Raises:
        ValueError: one of ``values`` is not a number from 0 to 2^63.
    """
    for value in values:
        if not isinstance(value, (int, float)) or not 0 <= value <= 1 << 63:
            raise ValueError(f"{str(value)[:40]!r} is not a number from 0 to 2^63")


class Parser(argparse.ArgumentParser):
    """The parser of one command. ``examples``: lines without the program's name; the first is shown with each error."""

    def __init__(self, name: str, description: str, examples: Sequence[tuple[str, str]]) -> None:
        """``examples``: arguments, or a whole line that starts with torchrun, and their effects."""
        self._examples = [
            (text if text.startswith("torchrun ") else f"{PROGRAM} {name} {text}".strip(), does)
            for text, does in examples
        ]
        longest = max(len(line) for line, _ in self._examples)
        lines = [f"  {line:<{longest}}  # {does}" for line, does in self._examples]
        self._options: list[str] = []
        self._as_json = False
        super().__init__(
            prog=f"{PROGRAM} {name}",
            description=textwrap.fill(description, WIDTH),
            epilog="\n".join(["examples:", *lines]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Works like the method of argparse, and keeps the names of options."""
        self._options += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **options)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses ``arguments``. Ends the program with status 2 and a message if they are invalid."""
        self._as_json = self._prints_json(list(arguments))
        given, unknown = self.parse_known_args(arguments)
        if unknown:
            word = unknown[0].partition("=")[0]
            what = "option" if word.startswith("-") else "argument"
            self.error(f"there is no {what} {word}{closest(word, self._options)}")
        return given

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Works like the method of argparse, which ignores an error of the write."""
        print(self.format_help(), end="", file=file)

    def _prints_json(self, words: list[str]) -> bool:
        """Returns true if ``--json`` is present, and names no file."""
        if "--json" not in words:
            return False
        behind = words[words.index("--json") + 1 :]
        return self._option_string_actions["--json"].nargs == 0 or not behind or behind[0].startswith("-")

    def error(self, message: str) -> NoReturn:
        """Reports the error and the right usage; with ``--json``, also in an object on standard output."""
        if self._as_json:
            print(json.dumps({"error": message, "example": self._examples[0][0]}, indent=1))
        self.exit(2, f"{self.prog}: {message}\n  for example: {self._examples[0][0]}\n  all options: {self.prog} -h\n")
