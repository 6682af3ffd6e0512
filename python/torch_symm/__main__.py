"""``python -m torch_symm``: the commands of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch_symm._trace import command as trace
from torch_symm.doctor import command as doctor
from torch_symm.tune import command as tune


def main(arguments: Sequence[str]) -> int:
    """Runs the command that ``arguments`` name; 0 if it went through."""
    parser = argparse.ArgumentParser(prog="python -m torch_symm")
    commands = parser.add_subparsers(title="commands", required=True)
    doctor.add_to(commands)
    trace.add_to(commands)
    tune.add_to(commands)
    given = parser.parse_args(arguments)
    return int(given.run(given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
