"""``torch-symm topo``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from torch_symm.tools.command import MOST_RANKS, Parser, check_plot, ranks
from torch_symm.tools.doctor import devices, library
from torch_symm.tools.doctor.probe_result import Probed, probe
from torch_symm.tools.doctor.report import Section, render

from . import cpu, plot


def parser() -> Parser:
    """Returns the parser of the command."""
    made = Parser(
        "topo",
        "Shows the cores, caches, memory nodes and GPUs of this machine, the links between the GPUs, the results of a "
        "test of peer access, and the algorithm for each collective and size.",
        [
            ("", "show everything"),
            ("--ranks 8", "choose algorithms for 8 ranks"),
            ("--measure", "also measure the bandwidth of each pair of GPUs, or of two ranks on CPU"),
            ("--plot host.svg", "also draw the topology"),
        ],
    )
    made.add_argument(
        "--ranks", type=ranks, default=0, help=f"ranks to plan for, 2 to {MOST_RANKS} (default: the GPUs, at least 2)"
    )
    made.add_argument("--measure", action="store_true", help="measure the bandwidth of each pair")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw a .svg, .png or .pdf (needs matplotlib)")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(parser: Parser, given: argparse.Namespace) -> int:
    """Prints section by section; returns 1 if torch or the native part cannot be loaded."""
    if given.plot:
        check_plot(parser, given.plot, plot.ENDINGS)
    probed = probe(given.ranks)
    sections = []
    for section in _sections(probed, given.ranks or max(2, probed.gpus), given.measure):
        sections.append(section)
        if not given.json:
            print(render(section), flush=True)
            for problem in section.problems:
                print(f"             {problem.text}; {problem.remedy}", flush=True)
    errors = [problem.text for section in sections for problem in section.problems if not probed.works]
    if given.plot:
        devices, nvlinks = probed.of("gpus").get("devices", []), probed.of("links").get("nvlinks", [])
        if not devices and "links" in probed.found:
            devices, nvlinks = _described()
        try:
            plot.draw(sections[0].found, devices, nvlinks, given.plot)
        except (OSError, ValueError) as error:
            print(f"failed: {error}", file=sys.stderr)
            errors.append(f"failed: {error}")
    if given.json:
        found = {section.name: section.found for section in sections}
        print(json.dumps(found | ({"error": "; ".join(errors)} if errors else {}), indent=1))
    return int(bool(errors) or not probed.works)


def _described() -> tuple[list[dict[str, str]], list[list[int]]]:
    """Returns GPUs and links of ``SYMM_TOPOLOGY_FILE``, which the native part has accepted."""
    file = os.environ.get("SYMM_TOPOLOGY_FILE", "").strip()
    if not file:
        return [], []
    links: list[list[int]] = json.loads(Path(file).read_text())["links"]
    return [{"name": "as described"}] * len(links), links


def _sections(probed: Probed, world: int, measure: bool) -> Iterator[Section]:
    yield cpu.section(world)
    yield devices.gpus(probed, world)
    links = devices.links(probed)
    if links is not None:
        yield links
    if not probed.works:
        yield library.native(probed)
        return
    yield from library.collectives(probed)
    if measure:
        from . import pairs

        yield pairs.gpus() if probed.gpus > 1 else pairs.ranks()
