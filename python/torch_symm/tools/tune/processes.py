"""Starts rank processes, one launch after the other, from a process that has imported torch already."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessContext, start_processes

#: Rank processes are forked from one that has these, which takes seconds less than importing them in each.
PRELOADED = ["torch", "torch.distributed.tensor", "torch_symm.tools.tune.rank", "torch_symm.tools.tune.plans"]
METHOD = "forkserver"
PREFIX = "SYMM_"


def queue() -> Any:
    """A queue for what ranks report."""
    return mp.get_context(METHOD).Queue()


def start(main: Callable[..., None], arguments: tuple[Any, ...], world: int, profile: Path | None) -> ProcessContext:
    """Starts ``main(rank, *arguments)`` in ``world`` processes and returns at once.

    Their settings are those of this process now, and ``profile`` the profile they go by, if it is given.
    """
    mp.get_context(METHOD).set_forkserver_preload(PRELOADED)
    settings = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    if profile is not None:
        settings["SYMM_PROFILE"] = str(profile)
    given = (main, settings, arguments)
    return start_processes(_run, given, nprocs=world, join=False, start_method=METHOD)  # type: ignore[no-any-return, no-untyped-call]


def _run(rank: int, main: Callable[..., None], settings: dict[str, str], arguments: tuple[Any, ...]) -> None:
    # A forked process has the environment in which the first launch began.
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(settings)
    main(rank, *arguments)
