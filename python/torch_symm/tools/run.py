"""``torch-symm run``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torch_symm.tools.command import PROGRAM, Parser, closest

from .hello import ranks_here

#: Options of torchrun that determine where ranks meet; without any of them, they meet on this node.
MEETING = ("standalone", "nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")


class _RunParser(Parser):
    """Passes all words to torchrun's parser, because only that parser knows where the program's words begin."""

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        if not arguments or arguments[0] in ("-h", "--help"):
            super().parse(arguments)
            self.error("name a program to run")
        return argparse.Namespace(words=list(arguments))


def parser() -> Parser:
    """Returns the parser of the command."""
    made = _RunParser(
        "run",
        "Starts PROGRAM on several ranks with torchrun, whose options go before PROGRAM. Without --nproc-per-node it "
        "starts one rank per GPU, or per core if there are no two GPUs (2 to 8). Without an option for the rendezvous, "
        "all ranks are on this node (--standalone). The exit status is that of torchrun.",
        [
            ("train.py --epochs 3", "run a program that calls init_process_group('symm')"),
            ("--replace-gloo train.py", "run an unchanged program for Gloo: symm serves its CPU tensors"),
            ("--nproc-per-node 4 -m package.train", "pass options to torchrun"),
        ],
    )
    made.usage = f"{PROGRAM} run [--replace-gloo] [options of torchrun] PROGRAM ..."
    made.add_argument("--replace-gloo", action="store_true", help="let symm replace Gloo: set SYMM_REPLACE_GLOO=1")
    return made


def run(parser: Parser, given: argparse.Namespace) -> int:
    """Runs the program; a rank that failed raises torchrun's error, as under torchrun."""
    from torch.distributed import run as torchrun

    known = torchrun.get_args_parser()
    known.prog, known.usage = parser.prog, parser.usage
    known.add_argument("--replace-gloo", action="store_true")

    def rejected(message: str) -> NoReturn:
        # argparse lists all positional arguments, although only the program's name is required.
        parser.error("name a program to run" if "arguments are required" in message else message)

    known.error = rejected  # type: ignore[method-assign]
    words: list[str] = given.words
    found, unknown = known.parse_known_args(words)
    if unknown:
        word = unknown[0].partition("=")[0]
        parser.error(f"there is no option {word}{closest(word, known._option_string_actions)}")
    try:
        torchrun.parse_min_max_nnodes(found.nnodes)
    except (ValueError, RuntimeError):
        parser.error(f"--nnodes {found.nnodes}: neither a number of nodes nor a range such as 1:4")
    program = len(words) - len(found.training_script_args) - 1
    if not (found.module or found.no_python):
        path = Path(words[program])
        if not path.exists():
            parser.error(f"there is no program {path}")
        if path.is_dir() and not (path / "__main__.py").exists():
            parser.error(f"{path} is a folder without a __main__.py: name a program to run")
    options = [word for word in words[:program] if word != "--replace-gloo"]
    if found.replace_gloo:
        os.environ["SYMM_REPLACE_GLOO"] = "1"
    asked = any(word.startswith(("--nproc-per-node", "--nproc_per_node")) for word in options)
    if not asked and "PET_NPROC_PER_NODE" not in os.environ:
        options.insert(0, f"--nproc-per-node={ranks_here()[1]}")
    else:
        try:
            started = torchrun.determine_local_world_size(str(found.nproc_per_node))
        except ValueError as error:
            parser.error(f"--nproc-per-node: {error}")
        if started < 1:
            parser.error(f"--nproc-per-node {found.nproc_per_node}: must be at least 1")
    if all(getattr(found, name) == known.get_default(name) for name in MEETING):
        options.insert(0, "--standalone")
    # Otherwise torchrun would set one thread per rank itself, with a warning of five lines.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    torchrun.main([*options, *words[program:]])
    return 0
