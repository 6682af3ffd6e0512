"""``torch-symm doctor``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator

from torch_symm.tools.command import Parser, count

from . import calls, devices, host, library
from .probe_result import Probed, probe
from .report import NAMES, Section, as_json, problems, render, verdict
from .smoke_test import RANKS, SECONDS, trial

#: Variables in which launchers publish the number of ranks of a node.
LAUNCHED = ("LOCAL_WORLD_SIZE", "WORLD_SIZE")


def parser() -> Parser:
    """Returns the parser of the command."""
    made = Parser(
        "doctor",
        "Reports the software and hardware of this machine, what collectives will use, and whether ranks can form a "
        "group, with a remedy for each problem. Exit status 1 if something would fail.",
        [
            ("", "check everything, in some seconds"),
            ("--ranks 8 --quick", "check whether the machine can run 8 ranks, without starting any"),
        ],
    )
    made.add_argument(
        "--ranks", type=count, help="number of ranks to check for (default: as launched, or the GPUs, at least 2)"
    )
    made.add_argument("--quick", action="store_true", help="start no ranks to test a group")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(_parser: Parser, given: argparse.Namespace) -> int:
    """Prints section by section; returns 1 if something would fail."""
    sections = []

    def say(line: str) -> None:
        if not given.json:
            print(f"{'':<{NAMES}} {line} …", flush=True)

    for section in _sections(given.ranks or _launched(), given.quick, say):
        sections.append(section)
        if not given.json:
            print(render(section), flush=True)
    found = problems(sections)
    print(json.dumps(as_json(sections), indent=1) if given.json else verdict(found), flush=True)
    return int(any(problem.fatal for problem in found))


def _launched() -> int:
    """Returns the number of ranks that a launcher started on this node; 0 if unknown."""
    numbers = (os.environ.get(name, "") for name in LAUNCHED)
    return next((int(number) for number in numbers if number.isdecimal()), 0)


def _sections(ranks: int, quick: bool, say: Callable[[str], None]) -> Iterator[Section]:
    """Yields the sections as they are found; ``say`` announces a slow step before it starts."""
    yield (system := host.system())
    if system.found["system"] != "Linux":
        return
    yield calls.calls()
    say("loading torch and the native part")
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
        yield from _trials(probed, say)


def _trials(probed: Probed, say: Callable[[str], None]) -> Iterator[Section]:
    if not probed.works:
        return
    for device in ("cpu", "cuda") if probed.gpus > 1 else ("cpu",):
        say(f"starting {RANKS} ranks on {device}, which end after {SECONDS:.0f} s at the latest")
        yield trial(device)
