"""The flight recorder: the last 2000 calls of this process (``docs/guide/trace.md``)."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

from torch_symm._native import load

from . import torchfrtrace
from .annotate import annotate_profiler_trace as annotate_profiler_trace
from .dump import parse


def trace() -> dict[str, Any]:
    """Returns the last 2000 calls of this process and its groups: the contents of a dump, see ``docs/guide/trace.md``.

    Times are nanoseconds since 1970. Calls of other threads continue meanwhile. A forked child starts without calls.

    Raises:
        ImportError: the native part cannot serve this torch.
    """
    kept: dict[str, Any] = json.loads(load()._trace())
    return kept


def dump_trace(path: str | os.PathLike[str] | None = None, format: str = "json") -> str:
    """Writes the result of :func:`trace` to a file that only this user can read (mode 0600), and returns its path.

    Args:
        path: replaced if it exists; its directory must exist. ``None``: ``trace-<pid>-rank<rank>.json``, or
            ``torch_rank_<rank>``, in ``SYMM_TRACE_DIR``, or in ``torch-symm-<uid>`` below ``TMPDIR`` if that is unset.
        format: ``"json"``; or ``"torch"``, the pickle that torch's ``torchfrtrace`` reads.

    Raises:
        ValueError: another format; the directory of ``path`` does not exist or cannot be written; with ``"torch"``, no
            group was joined, or several ranks are threads of this process, and each needs its own file
            (``python -m torch_symm trace --torch`` writes these).
        SymmConfigError: ``path`` is ``None`` and the directory cannot be used.
    """
    if format not in ("json", "torch"):
        raise ValueError(f"format must be 'json' or 'torch', not {format!r}")
    native = load()
    text: str = native._trace()
    dump = parse(json.loads(text), "this process")
    ranks = sorted({view.global_rank for view in dump.views})
    if format == "json":
        name = f"trace-{os.getpid()}-rank{ranks[0] if ranks else 0}.json"
        content = text.encode()
    else:
        if len(ranks) != 1:
            raise ValueError(f"this process is {len(ranks)} ranks, and torch's format has a file for each rank")
        name = f"torch_rank_{ranks[0]}"
        content = pickle.dumps(torchfrtrace.convert([dump])[ranks[0]])
    written: str = native._write_trace(b"" if path is None else os.fsencode(path), name, content)
    return written
