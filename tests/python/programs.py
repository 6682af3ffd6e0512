"""Runs a program of this repository on forked ranks, with the environment and the store that torchrun gives them."""

from __future__ import annotations

import ast
import importlib
import io
import os
import runpy
import shutil
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import ranks
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def run_program(
    program: str, *arguments: str, world: int = 4, nodes: str = "", env: dict[str, str] | None = None
) -> list[list[str]]:
    """Returns the lines that each rank of ``program`` prints; ``nodes``: a letter for the node of each rank.

    Raises:
        RanksFailedError: a rank raised, or ended with another status than 0.
    """
    path = ROOT / program
    # A program finds the modules in its directory, as if Python ran it directly.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    _import(path.read_text())
    given = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", **(env or {})}
    found = ranks.run_ranks(_run, world + 1, path, arguments, nodes, backend=None, timeout=150, env=given)
    return [printed.splitlines() for printed in found[:world]]


def _import(text: str) -> None:
    """Imports the modules that a program needs, so that its ranks do not each import them."""
    if "torch.compile(" in text:
        importlib.import_module("torch._inductor.compile_fx")
    for node in ast.parse(text).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else names:
            importlib.import_module(name)


def _run(rank: int, processes: int, path: Path, arguments: tuple[str, ...], nodes: str) -> str:
    world, port = processes - 1, ranks.scratch / "port"
    if rank == world:
        _serve(port, world)
        return ""
    while not port.exists():
        time.sleep(0.002)
    local, local_world = (nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])) if nodes else (rank, world)
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_world}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port.read_text())
    if nodes:
        os.environ.update(SYMM_INTER_NODE_BACKEND="gloo", SYMM_TEST_NODE=nodes[rank], GLOO_SOCKET_IFNAME="lo")
    sys.argv[1:] = arguments
    try:
        with redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(path), run_name="__main__")
        return printed.getvalue()
    finally:
        (ranks.scratch / f"ended-{rank}").touch()


def _serve(port: Path, world: int) -> None:
    """Acts as torchrun's agent, whose store outlives the ranks' groups."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (new := port.with_suffix(".new")).write_text(str(store.port))
    new.rename(port)
    while not all((port.parent / f"ended-{rank}").exists() for rank in range(world)):
        time.sleep(0.02)
