"""Background processes that compete with the ranks for cores, like data loaders, a notebook or another job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .machine import usable_cores

#: The work of a process, which stops when the parent has ended for any reason.
_COMPUTE = """
while os.getppid() == parent:
    sum(range(100_000))
"""
_STREAM = """
source, target = bytearray(64 << 20), bytearray(64 << 20)
while os.getppid() == parent:
    target[:] = source
"""


@dataclass(frozen=True)
class BackgroundLoad:
    """The load: ``count`` processes that compute or, with ``loaders``, stream memory as data loaders do.

    With ``products`` no process is started; instead, each rank's GPU multiplies matrices.
    """

    count: int = 0
    loaders: bool = False
    products: bool = False

    @classmethod
    def parse(cls, text: str) -> BackgroundLoad:
        """Parses ``"2"``, ``"loader"`` (one for each core) or ``"matmul"``.

        Raises:
            ValueError: ``text`` is none of these.
        """
        if text == "loader":
            return cls(usable_cores(), loaders=True)
        if text == "matmul":
            return cls(products=True)
        if not (text.isascii() and text.isdigit() and len(text) < 5):
            raise ValueError(
                f"--background-load: {text!r} is neither a number of processes up to 9999 nor 'loader' or 'matmul'"
            )
        return cls(int(text))

    def __str__(self) -> str:
        return f"{self.count} that {'stream memory' if self.loaders else 'compute'}"


@contextmanager
def running(load: BackgroundLoad) -> Iterator[None]:
    """Runs the processes in this session, so that they are in the scheduling group of the ranks."""
    code = f"import os\nparent = {os.getpid()}\n{_STREAM if load.loaders else _COMPUTE}"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(load.count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
