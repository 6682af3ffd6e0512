"""Runs a function on real processes, one per rank: ``torch_symm.testing`` with additions for these tests.

The processes are forked from pytest, which imports torch but makes no group and no thread, so that starting a rank
takes milliseconds.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_symm

# Modules that the forking process imports once, because an import in each rank would take longer than a group.
import torch_symm._backends
import torch_symm._group
from torch_symm import _native, testing
from torch_symm.launch.ranks import fork
from torch_symm.testing._rank import log_to as redirect
from torch_symm.tools.doctor.smoke_test import free_port as free_port

_native.load()

#: Directory in which the ranks of this run meet and leave files; set in ranks only.
scratch: Path

#: The line that a rank logs when a group fails.
DUMPED = re.compile(r"^.*the last calls of this process are in (.*?); for those of all ranks: .*\n", re.MULTILINE)


class Results(testing.Results):
    """``logs``: the output of each rank, without the path of its trace, which is in ``dumps``."""

    dumps: list[list[Path]]


def file_store(name: str, world_size: int) -> torch_symm.FileStore:
    """A store that the ranks of this run share under ``name``."""
    return torch_symm.FileStore(testing.shared_tmp_path() / f"store-{name}", world_size)


def init(rank: int, world_size: int, backend: str = "symm", timeout: float = 60, name: str = "default") -> None:
    """``init_process_group`` over a fresh file store."""
    dist.init_process_group(
        backend,
        store=file_store(name, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )


def backend_of(group: Any = None) -> Any:
    """The backend for the CPU tensors of a group, or of the default group."""
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def meet(name: str, rank: int, world_size: int, timeout: float = 30) -> None:
    """Returns once every rank has called it with this name; works without a group."""
    folder = testing.shared_tmp_path()
    (folder / f"meet-{name}-{rank}").touch()
    deadline = time.monotonic() + timeout
    while not all((folder / f"meet-{name}-{r}").exists() for r in range(world_size)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks came to {name!r}")
        time.sleep(0.002)


def on_threads(bodies: list[Callable[[], None]]) -> None:
    """Runs all at once and raises the first exception."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _share(folder: Path) -> None:
    global scratch
    scratch = folder


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **settings: Any) -> Results:
    """``torch_symm.testing.run_ranks``, with ``scratch`` set in the ranks."""

    def on_rank(rank: int, world_size: int) -> Any:
        _share(testing.shared_tmp_path())
        return fn(rank, world_size, *args)

    found = testing.run_ranks(on_rank, world_size, **settings)
    results = Results(found)
    results.seconds = found.seconds
    results.dumps = [[Path(path) for path in DUMPED.findall(log)] for log in found.logs]
    results.logs = [DUMPED.sub("", log) for log in found.logs]
    return results


def spawn_rank(fn: Callable[..., Any], rank: int, world_size: int, *args: Any) -> int:
    """Forks this rank; the child calls ``fn(rank, world_size, *args)`` and ends with 0, or 1 after a traceback."""
    return fork(lambda: fn(rank, world_size, *args))


def log_to(path: Path) -> None:
    """Redirects this process's output to ``path``, and prints the stacks of its threads there at SIGUSR1."""
    redirect(path)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
