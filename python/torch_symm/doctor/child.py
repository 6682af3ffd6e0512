"""Child processes that send what they find, line by line, so that what was found before an end is kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

#: How a line begins that holds a message; libraries may write others.
MARK = "torch_symm.doctor "


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
    """The first line of an exception, with its type where the line alone does not read well."""
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
            return list(pool.map(lambda process: _end(process, deadline), started))
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


def _end(process: subprocess.Popen[str], deadline: float) -> Ended:
    late = False
    try:
        output, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        late = True
        process.kill()
        output, errors = process.communicate()
    lines = (line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK))
    return Ended([json.loads(line) for line in lines], errors, None if late else process.returncode)
