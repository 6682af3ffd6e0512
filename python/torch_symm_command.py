"""The program ``torch-symm``. Not a part of ``torch_symm``, because the import of that package imports torch."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs ``python -m torch_symm``. An interrupt ends it with status 130, also during the imports."""
    try:
        from torch_symm.__main__ import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
