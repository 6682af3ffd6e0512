"""A process that pytest forks after collection, and that runs the marked tests from then on.

Ranks are forked from it. The effects of other tests in pytest's own process, such as threads or CUDA, do not reach it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from torch_symm.launch.ranks import fork

from ._rank import dies_with

#: How many seconds the process has to end a test after a time limit in pytest's own process has failed it.
GRACE_S = 5.0


class WarmProcess:
    """Runs marked tests, with their fixtures, one after another; forked by :meth:`start`, and again if it dies."""

    #: True in the warm process.
    inside = False

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        factory = getattr(session.config, "_tmp_path_factory", None)
        if factory is not None:
            # Make the directory before the fork, so that both processes use the same one.
            factory.getbasetemp()

    def run(self, item: pytest.Item, following: pytest.Item | None) -> list[Any]:
        """Runs the test and returns its reports; ``following`` is the next test that the process will get.

        Raises:
            pytest.exit.Exception: the test requested the exit.
        """
        try:
            self._connection.send((self._index(item), following and self._index(following)))
            kind, value = self._reply()
        except (KeyboardInterrupt, pytest.exit.Exception):
            # A terminal interrupts both processes, but another sender may interrupt only this one.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGINT)
            raise
        except pytest.fail.Exception as limit:
            # The time limit of another plug-in has passed. It applies in the warm process, too, whose report says more.
            try:
                kind, value = self._reply(GRACE_S)
            except (EOFError, OSError):
                self._restart()
                return [_failed(item, str(limit))]
        except (EOFError, OSError):
            status = self._restart()
            return [_failed(item, f"the warm process, which makes fixtures and forks ranks, ended with {status}")]
        if kind == "exit":
            pytest.exit(value)
        if kind == "error":
            return [_failed(item, value)]
        config = self._session.config
        return [config.hook.pytest_report_from_serializable(config=config, data=data) for data in value]

    def stop(self) -> None:
        """Ends the process after it has torn down its fixtures."""
        with contextlib.suppress(OSError, EOFError):
            self._connection.send(None)
            # The first reply is to a test whose run was interrupted, if there was one.
            while self._reply() is not None:
                pass
        self._end()

    def _reply(self, seconds: float | None = None) -> Any:
        """Returns the next reply of the process.

        Raises:
            EOFError: the process has ended, or has not replied after ``seconds``.
        """
        # A child of the process may hold its end of the pipe, which then reports no end.
        wait([self._connection, self._ended], seconds)
        if not self._connection.poll():
            raise EOFError
        return self._connection.recv()

    def _index(self, item: pytest.Item) -> int:
        return self._session.items.index(item)

    def _restart(self) -> int:
        status = self._end()
        self.start()
        return status

    def _end(self) -> int:
        self._connection.close()
        os.close(self._ended)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def start(self) -> None:
        """Forks the process, which gets a copy of the session's current stash."""
        ours, theirs = Pipe()
        parent = os.getpid()
        self._pid = fork(lambda: self._serve(ours, theirs, parent))
        theirs.close()
        self._ended = os.pidfd_open(self._pid)
        self._connection: Connection[Any, Any] = ours

    def _serve(self, ours: Connection[Any, Any], requests: Connection[Any, Any], parent: int) -> NoReturn:
        try:
            ours.close()
            dies_with(parent)
            WarmProcess.inside = True
            self._interrupt = _once(signal.signal(signal.SIGINT, signal.SIG_IGN))
            # Capture into new files, because the parent's files have one offset for both processes.
            capture: Any = self._session.config.pluginmanager.getplugin("capturemanager")
            capture.stop_global_capturing()
            capture.start_global_capturing()
            while (request := requests.recv()) is not None:
                requests.send(self._answer(*request))
            self._session._setupstate.teardown_exact(None)
            requests.send(None)
        finally:
            os._exit(0)

    def _answer(self, index: int, following: int | None) -> tuple[str, Any]:
        items, config = self._session.items, self._session.config
        item = items[index]
        try:
            # A signal interrupts tests, and nothing else in this process: `stop` ends the fixtures afterwards.
            signal.signal(signal.SIGINT, self._interrupt)
            # End the fixtures that this test does not use: pytest-xdist may not have announced this test as the next.
            self._session._setupstate.teardown_exact(item)
            after = None if following is None else items[following]
            reports = item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
            to_data = config.hook.pytest_report_to_serializable
            return "reports", [to_data(config=config, report=report) for report in reports]
        except pytest.exit.Exception as error:
            return "exit", str(error)
        except BaseException as error:  # Any exception belongs to this test
            return "error", f"{type(error).__name__}: {error}"
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _once(handler: Any) -> Any:
    """Returns a handler of SIGINT that calls ``handler``, and ignores the signal from then on in this process.

    pytest's own process forwards the signal. A second interrupt would hit the code that kills the ranks.
    """
    if not callable(handler):
        return signal.SIG_IGN
    process = os.getpid()

    def interrupted(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        handler(number, frame)

    return interrupted


def protocol(item: pytest.Item, following: pytest.Item | None) -> list[Any]:
    """Runs all phases of a test in this process; pytest's own process shows the reports."""
    return runtestprotocol(item, log=False, nextitem=following)


def _failed(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
