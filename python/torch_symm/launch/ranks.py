"""Starts rank processes by fork, by ``multiprocessing`` or as programs, and leaves none behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from .messages import received
from .watch import state

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext

#: Methods of ``multiprocessing``: ranks that import everything again, as under torchrun, and ranks that are forked from
#: a process that has imported torch, which saves seconds.
ANEW, WARM = "spawn", "forkserver"
PREFIX = "SYMM_"
#: Seconds that a process gets to end after SIGTERM or SIGKILL.
GRACE_S = 5.0


def fork(main: Callable[[], object]) -> int:
    """Forks a process that calls ``main`` and exits with 0, or with 1 after a traceback; returns its pid."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError, OSError):
            stream.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns if there are threads. The child uses no lock of these threads and runs no exit handlers.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _live(main)
    return pid


def _live(main: Callable[[], object]) -> NoReturn:
    # Do not collect the parent's garbage. The destructor of a store or backend of torch may join a thread, which exists
    # only in the parent, and would end this process.
    gc.freeze()
    status = 1
    try:
        main()
        status = 0
    except BaseException:  # The child must not return into its parent's code
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError, OSError):
                stream.flush()
        os._exit(status)


class Forked:
    """Forked processes. ``status``: by pid, the exit code, or minus the signal, of each process that has ended."""

    def __init__(self) -> None:
        self.status: dict[int, int] = {}
        self._files: dict[int, int] = {}
        #: Processes that have ended but are not reaped, because processes that they started still run.
        self._unreaped: list[int] = []
        self._poll = select.poll()

    def fork(self, main: Callable[[], object]) -> int:
        """Calls :func:`fork` and tracks the process.

        Raises:
            OSError: the process cannot be started, or cannot be tracked and was killed.
        """
        pid = fork(main)
        try:
            # Polls a pidfd, because children of the process would keep a pipe open.
            file = os.pidfd_open(pid)
        except BaseException:  # for example, no descriptor is free
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._files[file] = pid
        self._poll.register(file, select.POLLIN)
        return pid

    @property
    def running(self) -> list[int]:
        """The processes whose end :meth:`wait` has not yet reported."""
        return list(self._files.values())

    def wait(self, seconds: float) -> list[int]:
        """Returns the processes that have ended, once one has or the time is up."""
        ended = [file for file, _ in self._poll.poll(max(0.0, seconds) * 1000)]
        return [self._take(file) for file in ended]

    def _take(self, file: int) -> int:
        pid = self._files.pop(file)
        self._poll.unregister(file)
        os.close(file)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        self.status[pid] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        # The system may reuse the pid of a reaped process. Keep the pid while other members of the process group run.
        if _members(pid) - {pid}:
            self._unreaped.append(pid)
        else:
            os.waitpid(pid, 0)
        return pid

    def end(self) -> None:
        """Kills the remaining processes, with the process groups that they lead, and reaps all of them."""
        for file, pid in self._files.items():
            os.kill(pid, signal.SIGKILL)
            os.close(file)
        for pid in [*self._unreaped, *self._files.values()]:
            # The process is not reaped yet, so no other process group can have this number.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._files, self._unreaped = {}, []


def _members(group: int) -> set[int]:
    """Returns the processes of a process group."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            # The command's name may contain spaces and parentheses; state, parent and process group follow it.
            if int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[2]) == group:
                found.add(int(name))
    return found


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Processes started within the context have ``changes`` in their environment."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def queue() -> Any:
    """Returns a queue for the reports of ranks."""
    import torch.multiprocessing as mp

    return mp.get_context("spawn").Queue()


def barrier(world: int) -> Any:
    """A barrier of ``world`` ranks."""
    import torch.multiprocessing as mp

    return mp.get_context("spawn").Barrier(world)


@contextmanager
def started(
    main: Callable[..., None],
    arguments: tuple[Any, ...],
    world: int,
    warm: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Iterator[ProcessContext]:
    """Starts processes that run ``main(rank, *arguments)``, and ends the remaining ones at exit.

    ``warm``: fork them from a process that has imported torch. All have this process's settings and ``settings``.

    Raises:
        OSError: a process cannot be started; the others have been ended.
    """
    import torch.multiprocessing as mp
    from torch.multiprocessing.spawn import start_processes

    method = WARM if warm else ANEW
    if method == "forkserver":
        mp.get_context(method).set_forkserver_preload(["torch", "torch.distributed.tensor", main.__module__])
        with _without_interrupts():
            forkserver.ensure_running()
    ours = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)} | dict(settings or {})
    given = (main, ours, arguments)
    others = multiprocessing.active_children()
    try:
        # A start from the fork server may take seconds, and its processes have the server's signal mask.
        with nullcontext() if method == "forkserver" else _without_interrupts():
            context: ProcessContext = start_processes(_run, given, nprocs=world, join=False, start_method=method)  # type: ignore[no-untyped-call]
    except BaseException:
        # A later process cannot be started, and torch does not return the earlier ones.
        end([process for process in multiprocessing.active_children() if process not in others])
        if method == "forkserver":
            _stop_server()
        raise
    try:
        yield context
    finally:
        end(context.processes)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started within the context never get SIGINT: their launcher gets it as well, and ends them."""
    # Starting the resource tracker would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_server() -> None:
    """Kills the fork server; otherwise it may fork a requested rank after this process has removed its semaphores."""
    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if server is not None:
        os.kill(server, signal.SIGKILL)
        # The next start reaps it.
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)


def _run(rank: int, main: Callable[..., None], settings: dict[str, str], arguments: tuple[Any, ...]) -> None:
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    # torch asks the kernel for SIGINT when the launcher ends, and these processes block SIGINT.
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    # A launcher that ended while the fork server was starting has left this process behind.
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        return
    # A process of the fork server has the environment of the first launch.
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(settings)
    main(rank, *arguments)


def end(processes: Sequence[Any]) -> None:
    """Ends processes, even if they are blocked."""
    for process in processes:
        if process.is_alive():
            # A stopped process reacts only to SIGKILL.
            (process.kill if state(process.pid) in ("T", "t") else process.terminate)()
    until = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(GRACE_S)


@dataclass(frozen=True)
class Program:
    """A module to run, its arguments and its environment."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Ended:
    """A program's messages, standard error and exit status, which is ``None`` if the deadline passed first."""

    messages: Sequence[dict[str, Any]]
    errors: str
    status: int | None

    def last_words(self) -> str:
        """Returns how the program ended, as the end of a sentence."""
        if self.status is None:
            return "did not end in time"
        try:
            how = f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            how = f"exited with code {self.status}"
        lines = self.errors.strip().splitlines()
        return f"{how}: {lines[-1].strip()}" if lines else how


def run(programs: Sequence[Program], seconds: float) -> list[Ended]:
    """Runs all programs at once, and kills those that still run after ``seconds``.

    Raises:
        OSError: a process cannot be started.
    """
    deadline = time.monotonic() + seconds
    running: list[subprocess.Popen[str]] = []
    pipe = subprocess.PIPE
    try:
        for program in programs:
            command = [sys.executable, "-m", program.module, *program.arguments]
            given: Any = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "env": dict(program.environment)}
            with _handlers_run_at_the_end():
                running.append(subprocess.Popen(command, text=True, errors="replace", **given))
        with ThreadPoolExecutor(len(running)) as pool:
            try:
                return list(pool.map(lambda process: _ended(process, deadline), running))
            except BaseException:
                # The threads wait for the programs, and the pool for the threads.
                _kill(running)
                raise
    finally:
        _kill(running)


@contextmanager
def _handlers_run_at_the_end() -> Iterator[None]:
    """Delays handlers of SIGINT and SIGTERM, which may raise, so that no process is started and then forgotten."""
    came: list[tuple[int, FrameType | None]] = []
    here = threading.current_thread() is threading.main_thread()
    handlers: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if here and callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda *signal_and_frame: came.append(signal_and_frame))
        yield
    finally:
        # The handler of SIGINT, which was replaced first and usually raises, comes back last.
        for known, handler in reversed(handlers.items()):
            signal.signal(known, handler)
        for arrived, frame in came:
            handlers[arrived](arrived, frame)


def _kill(running: Sequence[subprocess.Popen[str]]) -> None:
    for process in running:
        if process.poll() is None:
            process.kill()
            # A driver may delay the end of a killed process.
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


def _ended(process: subprocess.Popen[str], deadline: float) -> Ended:
    late = False
    try:
        output, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        # A program that has ended may have left a child that holds its pipes.
        late = process.poll() is None
        process.kill()
        try:
            output, errors = process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired as held:
            output, errors = _text(held.output), _text(held.stderr)
    return Ended(received(output), errors, None if late else process.returncode)


def _text(read: bytes | str | None) -> str:
    """Returns the text that was read before the timeout, which is bytes even from a text pipe."""
    return read.decode(errors="replace") if isinstance(read, bytes) else read or ""
