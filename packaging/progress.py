"""Runs a command, and prints every 20 s that it still runs: ``packaging/progress.py WHAT COMMAND ...``.

Compilers and pip are silent for minutes, especially if standard output is not a terminal.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 20.0


@contextmanager
def running(what: str, seconds: float = SECONDS) -> Iterator[None]:
    """Prints to standard error every ``seconds`` that ``what`` still runs, and for how long."""
    begun, ended = time.monotonic(), threading.Event()

    def say(rest: str) -> None:
        print(f"torch-symm: {what}{rest}", file=sys.stderr, flush=True)

    def beat() -> None:
        while not ended.wait(seconds):
            say(f": {time.monotonic() - begun:.0f} s so far")

    say(" …")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    say(f" took {time.monotonic() - begun:.0f} s")


def main(what: str, *command: str) -> int:
    """Runs ``command`` and returns its exit status."""
    with running(what):
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
