"""``torch-symm``, which is ``python -m torch_symm``: the commands of this package."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import FrameType
from typing import TextIO

from torch_symm.tools.command import PROGRAM, closest

#: The module and a summary of each command. A module has ``parser()`` and ``run(parser, given)``.
COMMANDS = {
    "hello": ("hello", "start some ranks and report their transport and its speed"),
    "run": ("run", "start a program on several ranks, with torchrun"),
    "doctor": ("doctor.command", "report whether torch-symm works on this machine, with a remedy for each problem"),
    "topo": ("topo.command", "show cores, caches, GPUs, their links, and the algorithm for each collective and size"),
    "check": ("check.command", "compare every collective with a reference, on this machine, in under a minute"),
    "bench": ("bench.command", "measure collectives, with the flags and columns of nccl-tests"),
    "top": ("top", "show the calls of a running job, and the rank that they wait for"),
    "trace": ("trace", "find the rank that did not start a call, from the dumps of a failed run"),
    "tune": ("tune.command", "measure the time of collectives on this machine, for the cost model"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` name (default: the program's arguments); returns 0 if it succeeded."""
    try:
        try:
            return _main(arguments)
        finally:
            # Report a failed write here, because the interpreter's last flush prints a traceback.
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if not _output_fails():
            raise
        if not isinstance(error, BrokenPipeError):
            print(f"cannot write to standard output: {error.strerror}", file=sys.stderr)
        # Redirect standard output, so that the interpreter's last flush does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _output_fails() -> bool:
    """Returns true if an empty line cannot be written to standard output, and neither can text before it."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _main(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:2], "--help"]
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        return _help(sys.stdout if words else sys.stderr, 0 if words else 2)
    if name in ("-V", "--version"):
        from torch_symm._version import __version__

        print(f"torch-symm {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"{PROGRAM}: there is no command {name!r}{closest(name, COMMANDS)}", file=sys.stderr)
        print(f"  commands: {', '.join(COMMANDS)}\n  what they do: {PROGRAM} --help", file=sys.stderr)
        return 2
    try:
        # The import of a command may import torch, which takes seconds.
        command = import_module(f"torch_symm.tools.{COMMANDS[name][0]}")
        parser = command.parser()
        # torchrun handles SIGTERM itself.
        with nullcontext() if name == "run" else _cleans_up():
            return int(command.run(parser, parser.parse(words[1:])))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@contextmanager
def _cleans_up() -> Iterator[None]:
    """Lets SIGTERM raise :exc:`SystemExit`, so that a command ends its ranks and removes its directories."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(number: int, _frame: FrameType | None) -> None:
    # Another one must not interrupt the cleanup.
    signal.signal(signal.SIGTERM, _ignored)
    raise SystemExit(128 + number)


def _ignored(_number: int, _frame: FrameType | None) -> None:
    return None


def _help(stream: TextIO, status: int) -> int:
    lines = [f"usage: {PROGRAM} COMMAND ...", "", "commands:"]
    lines += [f"  {name:<8}{does}" for name, (_, does) in COMMANDS.items()]
    lines += ["", f"options and examples of a command: {PROGRAM} COMMAND --help", "", "examples:"]
    lines += [f"  {PROGRAM} hello", f"  {PROGRAM} doctor", f"  {PROGRAM} bench all_reduce -b 8 -e 64M -f 4 -g 2"]
    print("\n".join(lines), file=stream)
    return status


if __name__ == "__main__":
    sys.exit(main())
