"""What peers hear of a rank that leaves: the exception because of which its program ended."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch_symm

rank, path, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("symm", init_method="file://" + path, rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    exec(ending)
else:
    try:
        dist.all_reduce(torch.ones(4))
    except torch_symm.SymmPeerError as error:
        sys.stdout.buffer.write(str(error).encode())
"""

LEFT = "left the group (destroy_process_group or exit)"


@pytest.mark.parametrize(
    ("ending", "expected"),
    (
        ("raise KeyError('x')", "left the group after KeyError: 'x';"),
        ("raise ValueError('one' + chr(10) + 'two')", "left the group after ValueError: one two;"),
        ("raise ValueError('é' * 200)", "left the group after ValueError: " + "é" * 56 + "…;"),
        ("raise ValueError(chr(0xD800))", "left the group after ValueError: ?;"),
        ("class Odd(Exception): __str__ = None\nraise Odd", "left the group after Odd;"),
        ("", LEFT),
        # The interpreter keeps no SystemExit.
        ("sys.exit(3)", LEFT),
        ("try: raise KeyError('caught')\nexcept KeyError: pass", LEFT),
    ),
)
def test_peers_hear_with_what_exception_a_script_ended(tmp_path: Path, ending: str, expected: str) -> None:
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), ending], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for rank in range(2)
    ]
    output, _ = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=60)
    text = output.decode()
    assert "rank 1 (pid " in text and expected in text, text


def _ends(rank: int, path: str, ending: str) -> None:
    """One of two ranks; what rank 0 is told goes to a file."""
    dist.init_process_group("symm", init_method=f"file://{path}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        exec(ending)
        return
    try:
        dist.all_reduce(torch.ones(4))
    except dist.DistBackendError as error:
        Path(path + ".seen").write_text(str(error))


@pytest.mark.parametrize(
    ("ending", "expected"),
    (
        ("raise KeyError('x')", "left the group after KeyError: 'x';"),
        ("import sys; sys.exit(3)", "left the group after SystemExit: 3;"),
        ("", LEFT),
    ),
)
@pytest.mark.parametrize("way", ("multiprocessing", "torch.multiprocessing"))
def test_so_do_peers_of_a_process_of_multiprocessing(tmp_path: Path, way: str, ending: str, expected: str) -> None:
    path = str(tmp_path / "store")
    if way == "multiprocessing":
        context = get_context("spawn")
        ranks = [context.Process(target=_ends, args=(rank, path, ending)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
    else:
        started = torch.multiprocessing.start_processes(
            _ends, (path, ending), nprocs=2, join=False, start_method="spawn"
        )
        for process in started.processes:
            process.join(60)
    text = Path(path + ".seen").read_text()
    assert "rank 1 (pid " in text and expected in text, text
