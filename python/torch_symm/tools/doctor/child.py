"""Child processes that send what they find, line by line, so that what was found before an end is kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

#: How a line begins that holds a message; libraries may write others.
MARK = "torch_symm.tools.doctor "
#: Seconds that a killed child gets to end.
GRACE = 5.0


@dataclass(frozen=True)
class Child:
    """A module to run, its arguments and its environment."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Ended:
    """What a child sent and wrote to standard error, and how it ended; ``status`` is ``None`` at the deadline."""

    messages: Sequence[dict[str, Any]]
    errors: str
    status: int | None

    def last_words(self) -> str:
        """How it ended, as the end of a sentence."""
        if self.status is None:
            return "did not end in time"
        try:
            how = f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            how = f"exited with code {self.status}"
        lines = self.errors.strip().splitlines()
        return f"{how}: {lines[-1].strip()}" if lines else how


def send(message: Mapping[str, Any]) -> None:
    """Sends a message to the parent."""
    print(MARK + json.dumps(message), flush=True)


def sentence(error: BaseException) -> str:
    """The first line of an exception, with its type; of its cause where it has many lines of advice."""
    while error.__cause__ is not None and "\n" in str(error).strip():
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def run(children: Sequence[Child], seconds: float) -> list[Ended]:
    """Runs all at once; after ``seconds`` those that still run are killed.

    Raises:
        OSError: a process cannot be started.
    """
    deadline = time.monotonic() + seconds
    started: list[subprocess.Popen[str]] = []
    try:
        for child in children:
            command = [sys.executable, "-m", child.module, *child.arguments]
            environment = dict(child.environment)
            pipe = subprocess.PIPE
            started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=pipe,
                    text=True,
                    errors="replace",
                    env=environment,
                )
            )
        with ThreadPoolExecutor(len(started)) as pool:
            try:
                return list(pool.map(lambda process: _end(process, deadline), started))
            except BaseException:
                # The threads wait for the children, and the pool for the threads.
                _kill(started)
                raise
    finally:
        _kill(started)


def _kill(started: Sequence[subprocess.Popen[str]]) -> None:
    for process in started:
        if process.poll() is None:
            process.kill()
            # A driver may hold a process that is killed.
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def _end(process: subprocess.Popen[str], deadline: float) -> Ended:
    late = False
    try:
        output, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        late = True
        process.kill()
        try:
            output, errors = process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired as held:
            output, errors = _text(held.output), _text(held.stderr)
    lines = (line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK))
    return Ended([json.loads(line) for line in lines], errors, None if late else process.returncode)


def _text(read: bytes | str | None) -> str:
    """What was read before a limit passed: bytes, whatever the pipe is."""
    return read.decode(errors="replace") if isinstance(read, bytes) else read or ""
