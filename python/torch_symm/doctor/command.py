"""``python -m torch_symm doctor``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from . import devices, host, library
from .probed import Probed, probe
from .report import Section, as_json, problems, render, verdict
from .trial import trial

#: Variables in which launchers say how many ranks a host has.
LAUNCHED = ("LOCAL_WORLD_SIZE", "WORLD_SIZE")


def add_to(commands: Any) -> None:
    """Adds the command to the parser of the package's commands."""
    parser = commands.add_parser(
        "doctor",
        help="say whether it works here, and what to do where it does not",
        description="Says which software and hardware is at hand, what collectives will use, and whether ranks can "
        "form a group; with a remedy for each problem. Exit status 1 if something would fail.",
    )
    parser.add_argument("--ranks", type=_count, help="ranks that will be started (default: a launcher's, GPUs, or 2)")
    parser.add_argument("--quick", action="store_true", help="leave out the trial with real ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks")
    return int(text)


def _run(given: argparse.Namespace) -> int:
    sections = []
    try:
        for section in _sections(given.ranks or _launched(), given.quick):
            sections.append(section)
            if not given.json:
                print(render(section), flush=True)
        found = problems(sections)
        print(json.dumps(as_json(sections), indent=1) if given.json else verdict(found), flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read has gone; the interpreter's last flush must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return int(any(problem.fatal for problem in found))


def _launched() -> int:
    """Ranks that a launcher started on this host; 0 if none says so."""
    numbers = (os.environ.get(name, "") for name in LAUNCHED)
    return next((int(number) for number in numbers if number.isdigit()), 0)


def _sections(ranks: int, quick: bool) -> Iterator[Section]:
    yield (system := host.system())
    if system.found["system"] != "Linux":
        return
    probed = probe(ranks)
    ranks = ranks or max(2, probed.gpus)
    yield library.versions(probed)
    yield library.native(probed)
    yield from (host.cores(ranks), host.memory(), host.descriptors(ranks), host.namespaces(), host.folders())
    yield library.settings(probed)
    yield devices.gpus(probed, ranks)
    yield from (section for section in (devices.links(probed), devices.kernels(probed)) if section)
    yield from library.collectives(probed)
    if not quick:
        yield from _trials(probed)


def _trials(probed: Probed) -> Iterator[Section]:
    if not probed.works:
        return
    yield trial("cpu")
    if probed.gpus > 1:
        yield trial("cuda")
