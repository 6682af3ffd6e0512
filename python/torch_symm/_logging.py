"""Passes the lines of ``SYMM_LOG`` to Python's ``logging``.

The core's threads only queue their lines, because they hold locks, and may run while the interpreter ends. A Python
thread takes the lines and passes them to loggers.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from threading import Thread
from typing import Any

from torch_symm._native import load

#: Python has no name for this level.
TRACE = 5
_LEVELS = {
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
    "TRACE": TRACE,
}
#: Interval in milliseconds at which the thread checks whether to end.
_LOOK_MS = 1000


class _Bridge:
    """The thread of one process, and the filter for its lines."""

    def __init__(self, native: Any, filter: str) -> None:
        self.native, self.filter = native, filter
        self._ended = False
        native._log_to_queue(filter, True)
        self._thread = Thread(target=self._run, name="symm-log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            self._hand_over(_LOOK_MS)

    def _hand_over(self, limit_ms: int) -> None:
        for level, target, text, seconds in json.loads(self.native._log_lines(limit_ms)):
            try:
                _handle(_LEVELS[level], target, text, seconds)
            except Exception:  # A filter of the program failed; neither this line nor later ones may be lost.
                sys.stderr.write(f"{level} {target}: {text}\n")

    def end(self) -> None:
        self._ended = True
        self.native._log_to_queue("", False)
        self._thread.join(2.0)
        self._hand_over(0)


def _handle(level: int, target: str, text: str, seconds: float) -> None:
    name = target.replace("::", ".")
    logger = logging.getLogger(f"torch_{name}" if name.split(".")[0] == "symm" else f"torch_symm.{name}")
    if logger.isEnabledFor(level):
        record = logger.makeRecord(logger.name, level, target, 0, text, (), None)
        record.created, record.msecs = seconds, seconds % 1 * 1000
        logger.handle(record)


_bridge: _Bridge | None = None
_following_forks = False


def log_to_python(level: int | str | None = None) -> None:
    """From now on, sends the lines of ``SYMM_LOG`` to Python's ``logging`` instead of standard error.

    Loggers are named by module, such as ``torch_symm.group`` and ``torch_symm.boot.claim``: set the level and handlers
    on ``torch_symm``. Error, warn, info and debug are Python's levels of these names; trace is 5. Handlers run on their
    own thread, so no call waits for one. A forked child continues in the same way. At the end of the process, all lines
    are delivered; a process that ends by a signal or ``os._exit`` loses the lines that the thread had not taken.

    Args:
        level: minimum level of the lines, as in ``logging`` (``logging.INFO``) or by name (``"info"``); ``None``: as
            ``SYMM_LOG`` says. Filtered lines cost nothing. Calling this function again changes the level.

    Raises:
        ValueError: no such level.
        ImportError: the native part cannot serve this torch.
    """
    global _bridge, _following_forks
    filter = _filter(level)
    native = load()
    if _bridge is not None:
        _bridge.filter = filter
        native._log_to_queue(filter, True)
        return
    _bridge = _Bridge(native, filter)
    if not _following_forks:
        _following_forks = True
        os.register_at_fork(after_in_child=_follow)


def _filter(level: int | str | None) -> str:
    if level is None:
        return ""
    if isinstance(level, str):
        name = {"WARNING": "WARN", "CRITICAL": "OFF", "NOTSET": "TRACE"}.get(level.upper(), level.upper())
        if name != "OFF" and name not in _LEVELS:
            raise ValueError(f"there is no level {level!r}; there are trace, debug, info, warning, error and off")
        return name.lower()
    return next((name for name, number in reversed(_LEVELS.items()) if level <= number), "OFF").lower()


def _follow() -> None:
    """Starts a new bridge in a forked child, because the fork copies neither the thread nor the core's queued lines."""
    global _bridge
    if _bridge is not None:
        _bridge = _Bridge(_bridge.native, _bridge.filter)


def end() -> None:
    """Delivers the queued lines; later lines go to standard error. Has no effect if lines go there already."""
    global _bridge
    bridge, _bridge = _bridge, None
    if bridge is not None:
        bridge.end()
