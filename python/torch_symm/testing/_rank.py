"""The life of a forked rank: its log, its group, the body, and the outcome."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

#: Number of calls of each rank in a report.
CALLS = 4
#: The barrier at which a rank with groups of Gloo waits for the others before it leaves, and for how many seconds. A
#: rank that has ended counts as arrived.
LEAVING, LEAVE_S = "leave the case", 5.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_here: tuple[int, int, Path] | None = None
#: Whether `_write_calls` is running.
_writing = False


@dataclasses.dataclass
class Outcome:
    """The outcome of a body: ``kind`` is ``"passed"``, ``"skipped"``, ``"xfailed"`` or ``"failed"``.

    ``reason``: one line. ``at``: ``file:line`` where a failure was raised. ``text``: the traceback on the rank that
    failed first. ``when``: seconds of the monotonic clock, which ranks share.
    """

    kind: str
    reason: str = ""
    at: str = ""
    text: str = ""
    when: float = 0.0
    value: Any = None


@dataclasses.dataclass
class Order:
    """The instructions for all ranks of a case."""

    body: Callable[[int, int], Any]
    world_size: int
    backend: str | None
    group_timeout: float
    folder: Path
    #: A rank's environment, in addition to its parent's.
    env: Callable[[int], dict[str, str]]
    #: Formats an exception; without it, a plain traceback.
    describe: Callable[[BaseException], str] | None
    #: Whether ``sys.stdout`` stays as a fixture set it.
    keep_streams: bool


def place() -> tuple[int, int, Path]:
    """Returns this rank, the number of ranks, and the directory that they share.

    Raises:
        RuntimeError: this process is not a rank of a test.
    """
    if _here is None:
        raise RuntimeError(
            "not inside a test rank: call this from a function that run_ranks or @pytest.mark.ranks runs"
        )
    return _here


def shared_tmp_path() -> Path:
    """Returns a directory that the ranks of this case share; it is removed after the case.

    Raises:
        RuntimeError: this process is not a rank of a test.
    """
    return place()[2]


def init_process_group(backend: str = "symm", timeout: float = 60.0, name: str = "default", **options: Any) -> None:
    """Calls ``torch.distributed.init_process_group`` for the ranks of this case, over a new file, without a port.

    For bodies with ``backend=None``. ``timeout`` in seconds; ``name`` distinguishes several groups of one case.

    Raises:
        RuntimeError: this process is not a rank of a test; or torch's exceptions.
    """
    import torch.distributed as dist

    import torch_symm

    rank, world_size, folder = place()
    store = torch_symm.FileStore(folder / f"store-{name}", world_size)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, **options)


def barrier(name: str, timeout: float = 30.0) -> None:
    """Returns once every rank of this case has called it with this ``name``; needs no group. ``timeout`` in seconds.

    Raises:
        TimeoutError: names the ranks that did not arrive.
        RuntimeError: this process is not a rank of a test.
    """
    rank, world_size, folder = place()
    arrival(folder, name, rank).touch()
    deadline = time.monotonic() + timeout
    while absent := [r for r in range(world_size) if not arrival(folder, name, r).exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {absent} did not come to {name!r} within {timeout} s")
        time.sleep(0.002)


def arrival(folder: Path, name: str, rank: int) -> Path:
    """Returns the file that exists once ``rank`` has come to the barrier ``name``."""
    return folder / f"meet-{name}-{rank}"


def dies_with(parent: int) -> None:
    """Makes this forked process end when ``parent``, which forked it, ends for any reason."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def used_cuda() -> bool:
    """Returns true if this process has started to use CUDA, whose driver does not survive a fork."""
    folder = "/proc/self/fd"
    for name in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{name}").startswith("/dev/nvidia-uvm"):
                return True
        except OSError:
            continue
    return False


def log_to(path: Path, keep_streams: bool = False) -> None:
    """Redirects this process's output to ``path``; with ``keep_streams``, except ``sys.stdout`` and ``sys.stderr``."""
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if not keep_streams:
        # pytest's capture has replaced both by objects that do not write to the descriptors.
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process


def serve(order: Order, rank: int, parent: int) -> None:
    """Runs a rank. Never returns."""
    global _here
    try:
        # The launcher finds the children of this rank by its session, even after the rank has ended.
        os.setsid()
        dies_with(parent)
        _here = (rank, order.world_size, order.folder)
        log_to(order.folder / f"log-{rank}", order.keep_streams)
        _show_stacks_on_request(order.folder, rank)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Dumps are removed with the case, unless the environment sets their directory.
        os.environ.setdefault("SYMM_TRACE_DIR", str(order.folder / "dumps"))
        os.environ.update(order.env(rank))
        outcome = _run(order, rank)
        _write_calls(order.folder, rank)
        _flush()
        try:
            content = pickle.dumps(outcome)
            # The launcher would raise the error without the name of the rank.
            pickle.loads(content)
        except Exception as error:
            outcome = Outcome("failed", f"what it returned cannot be pickled: {error}", when=time.monotonic())
            content = pickle.dumps(outcome)
        (order.folder / f"outcome-{rank}").write_bytes(content)
        os._exit(1 if outcome.kind == "failed" else 0)
    except BaseException:  # The child must not return into its parent's code
        traceback.print_exc()
        _flush()
    finally:
        os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # The body may have closed the stream, or set it to None
            stream.flush()


def _run(order: Order, rank: int) -> Outcome:
    try:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import DebugLevel, get_debug_level

        # One thread, as torchrun sets. This also avoids a thread pool of the parent that is lost in the fork.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        if order.backend is not None:
            init_process_group(order.backend, order.group_timeout)
        value = order.body(rank, order.world_size)
        if dist.is_initialized():
            backends = dist.distributed_c10d._world.pg_backend_config.values()
            if get_debug_level() == DebugLevel.DETAIL or any("gloo" in each for each in backends):
                # Gloo creates a group without a barrier at the end, and torch one for each group under DETAIL. If this
                # rank left before another had connected to all ranks, the other's `new_group` would fail with
                # "Connection closed by peer".
                with contextlib.suppress(TimeoutError):
                    barrier(LEAVING, LEAVE_S)
            dist.destroy_process_group()
        return Outcome("passed", value=value)
    except BaseException as error:
        return _of(error, order, time.monotonic())


def _of(error: BaseException, order: Order, when: float) -> Outcome:
    if isinstance(error, unittest.SkipTest):
        return Outcome("skipped", str(error))
    outcomes = sys.modules.get("_pytest.outcomes")
    if outcomes and isinstance(error, outcomes.Skipped):
        return Outcome("skipped", str(error))
    if outcomes and isinstance(error, outcomes.XFailed):
        return Outcome("xfailed", str(error))
    frames = [frame for frame in traceback.walk_tb(error.__traceback__) if not ours(frame[0].f_code.co_filename)]
    at = ""
    if frames:
        # The deepest line in the body's own file; an error is often raised deeper, in another file.
        file = frames[0][0].f_code.co_filename
        at = next(f"{Path(file).name}:{line}" for frame, line in reversed(frames) if frame.f_code.co_filename == file)
    try:
        said = str(error)
    except Exception:
        # As in a traceback.
        said = "<exception str() failed>"
    first = (said.strip().splitlines() or [""])[0]
    reason = f"{type(error).__name__}: {first}".removesuffix(": ")
    try:
        # Only the first rank that fails formats its text: others fail because of it, and formatting takes long.
        os.close(os.open(order.folder / "first", os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return Outcome("failed", reason, at, "", when)
    return Outcome("failed", reason, at, _text(error, order), when)


def _text(error: BaseException, order: Order) -> str:
    error = error.with_traceback(_of_the_test(error.__traceback__))
    with contextlib.suppress(Exception):  # A test may raise objects that cannot be printed
        if order.describe:
            return order.describe(error)
    return "".join(traceback.format_exception(error))


def _of_the_test(trace: TracebackType | None) -> TracebackType | None:
    """Removes the frames of this package at the start of a traceback, and those of torch at its end."""
    import torch

    torch_folder = os.path.dirname(torch.__file__) + os.sep
    kept: list[TracebackType] = []
    while trace:
        kept.append(trace)
        trace = trace.tb_next
    while len(kept) > 1 and ours(kept[0].tb_frame.f_code.co_filename):
        del kept[0]
    while len(kept) > 1 and kept[-1].tb_frame.f_code.co_filename.startswith(torch_folder):
        del kept[-1]
    for entry in reversed(kept):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


def ours(file: str) -> bool:
    """Returns true if ``file`` belongs to this package."""
    return os.path.dirname(file) == os.path.dirname(__file__)


def _show_stacks_on_request(folder: Path, rank: int) -> None:
    """Writes all stacks on a fatal signal or SIGUSR1; on SIGUSR1 also the last calls, once Python runs the handler."""
    signal.signal(signal.SIGUSR1, lambda *_: _write_calls(folder, rank))
    stacks = os.open(folder / f"stacks-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=True)


def _write_calls(folder: Path, rank: int) -> None:
    """Writes the last calls of groups of symm, if this process has used any."""
    global _writing
    # SIGUSR1 may arrive while this function runs, or while it imports what it needs.
    if _writing or "torch_symm._native" not in sys.modules:
        return
    _writing = True
    try:
        import torch_symm

        calls = torch_symm.trace()["calls"][-CALLS:]
    except ImportError:
        # Without the native part, there are no calls.
        return
    finally:
        _writing = False
    lines = []
    for call in calls:
        number = "" if call["sequence"] is None else f" #{call['sequence']}"
        lines.append(f"{call['call']}{number} {call['outcome'] or call['state']}")
    (folder / f"calls-{rank}").write_text("\n".join(lines))
