"""What the commands of this folder have in common: how many ranks, and what is printed first."""

from __future__ import annotations

import os
import signal
from argparse import ArgumentParser

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from torch_symm.launch.watch import StandsStill
from torch_symm.tools.command import overloaded

from .. import machine

MAX_RANKS = 8
#: What ends a measurement: a rank failed or was killed, or nobody gets on.
FAILURES = (ProcessRaisedException, ProcessExitedException, StandsStill)


def ranks(parser: ArgumentParser, requested: int | None, device: str) -> int:
    """The number of ranks: as requested, else a rank for each GPU, without GPUs 2. Refuses more than GPUs, or one."""
    # NVML answers, so that this process gets no context on a GPU.
    there = torch.cuda.device_count() if device == "cuda" else MAX_RANKS
    world = requested or (min(there, MAX_RANKS) if device == "cuda" else 2)
    if world < 2 or world > there:
        parser.error(
            f"{world} ranks need as many GPUs and at least 2; this machine has {there} (--device cpu needs none)"
        )
    return world


def begin(world: int, device: str, settings: dict[str, str]) -> tuple[machine.Machine, machine.Gpus]:
    """Takes ``settings`` where the environment has none, is interrupted by SIGTERM, and prints what is measured on."""
    for name, value in (machine.MULTICAST_SETTINGS | settings).items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here, gpus = machine.describe(), machine.describe_gpus(world if device == "cuda" else 0)
    print(f"{here.date}  {gpus.summary()}, torch {here.torch}, commit {here.commit}", flush=True)
    if busy := overloaded():
        print(f"warning: {busy}, so these times say little", flush=True)
    return here, gpus
