"""Shared by the programs for GPUs: the number of ranks, the first lines of output, collecting and writing results."""

from __future__ import annotations

import json
import os
import signal
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch_symm.launch.messages import reported
from torch_symm.launch.watch import StalledError
from torch_symm.tools.bench import machine
from torch_symm.tools.command import overloaded

MAX_RANKS = 8
#: Errors that end a measurement: a rank failed or was killed, or no rank makes progress.
FAILURES = (ProcessRaisedException, ProcessExitedException, StalledError)


def ranks(parser: ArgumentParser, requested: int | None, device: str) -> int:
    """The number of ranks: as requested, otherwise one per GPU, or 2 on CPU. Rejects 1, and more ranks than GPUs."""
    # torch asks NVML for the number, so this process gets no context on a GPU.
    there = torch.cuda.device_count() if device == "cuda" else MAX_RANKS
    world = requested or (min(there, MAX_RANKS) if device == "cuda" else 2)
    if world < 2 or world > there:
        parser.error(
            f"{world} ranks need as many GPUs and at least 2; this machine has {there} (--device cpu needs none)"
        )
    return world


def begin(world: int, device: str, settings: dict[str, str]) -> tuple[machine.Machine, machine.Gpus]:
    """Sets ``settings`` that the environment lacks, treats SIGTERM as an interrupt and prints the hardware."""
    for name, value in (machine.MULTICAST_SETTINGS | settings).items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here, gpus = machine.describe(), machine.describe_gpus(world if device == "cuda" else 0)
    print(f"{here.date}  {gpus.summary()}, torch {here.torch}, commit {here.commit}", flush=True)
    if busy := overloaded():
        print(f"warning: {busy}, so these times say little", flush=True)
    return here, gpus


def collect(results: Any, count: int, started: Sequence[Any], still_s: float, what: str) -> Iterator[Any]:
    """Yields ``count`` results of the ranks that were ``started``, each as soon as it arrives.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a rank failed.
        StalledError: no result arrived for ``still_s`` seconds, or no more will arrive; ``what`` names the results.
    """
    left, until = count, time.monotonic() + still_s

    def watched() -> None:
        if left and time.monotonic() > until:
            raise StalledError(f"{left} {what} are missing")

    for message in reported(started, results, count, watched=watched):
        left, until = left - 1, time.monotonic() + still_s
        yield message


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Writes ``found`` to ``path``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(found, indent=1) + "\n")
    unfinished.replace(path)


def write_table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]], stream: TextIO) -> None:
    """A plain table whose first column is text."""
    stream.write(plain_text(title, headings, lines, range(0, 1)))


def plain_text(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]], left: range) -> str:
    """A table without rich. ``left``: the columns that are aligned to the left."""
    everything = [headings, *lines]
    widths = [max(len(line[column]) for line in everything) for column in range(len(headings))]
    text = [title]
    for line in everything:
        padded = [
            field.ljust(width) if column in left else field.rjust(width)
            for column, (field, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(padded).rstrip())
    return "\n".join([*text, ""])
