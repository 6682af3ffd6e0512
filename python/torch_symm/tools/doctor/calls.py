"""Tries each system call that every group needs (``src/sys/required.rs`` has the list)."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

from torch_symm._repr import counted
from torch_symm.launch.messages import sentence

from .report import Problem, Section

REMEDY = "allow it in the container's seccomp profile or security module, and run Linux 5.3 or newer"


def calls() -> Section:
    """Reports whether every required system call works, made as a group makes it."""
    refused: dict[str, str] = {}
    tried = 0
    with ExitStack() as stack:
        for name, step in _steps(stack).items():
            tried += 1
            try:
                step()
            except (KeyError, BlockingIOError):
                # An earlier step failed, which would have made the file descriptor or sent the message.
                continue
            except (OSError, AttributeError, RuntimeError) as error:
                refused[name] = sentence(error)
    problems = [Problem(f"{name} fails: {why}", REMEDY, fatal=True) for name, why in refused.items()]
    line = f"{counted(tried, 'system call')} that a group needs, " + ("some fail, see below" if refused else "all work")
    return Section("calls", {"tried": tried, "refused": refused}, [line], problems)


def _steps(stack: ExitStack) -> dict[str, Callable[[], object]]:
    """Returns the steps, by the names of their calls, in an order in which later steps use results of earlier ones."""
    made: dict[str, int] = {}
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    sockets: dict[str, socket.socket] = {}

    def keep(what: str, descriptor: int) -> None:
        made[what] = descriptor
        stack.callback(os.close, descriptor)

    def unix() -> socket.socket:
        return stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))

    def listen() -> None:
        listener = unix()
        listener.bind(f"\0symm-doctor-{os.getpid()}")
        listener.listen(1)
        sockets["listener"] = listener

    def connect() -> None:
        near = unix()
        near.connect(sockets["listener"].getsockname())
        sockets["near"] = near

    def accept() -> None:
        sockets["far"] = stack.enter_context(sockets["listener"].accept()[0])

    def size() -> None:
        os.ftruncate(made["memory"], mmap.PAGESIZE)
        made["sized memory"] = made["memory"]

    def start() -> None:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

    flags, keep_size = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING, 1
    start_of_file, page = ctypes.c_int64(0), ctypes.c_int64(mmap.PAGESIZE)
    return {
        "getrandom": lambda: os.getrandom(16),
        "memfd_create": lambda: keep("memory", os.memfd_create("symm-doctor", flags)),
        "ftruncate": size,
        "fcntl": lambda: fcntl.fcntl(made["memory"], fcntl.F_ADD_SEALS, seals),
        # Not `os.posix_fallocate`, which may write the pages instead if the call is denied.
        "fallocate": lambda: _libc("fallocate", made["sized memory"], keep_size, start_of_file, page),
        "fstat": lambda: os.fstat(made["memory"]),
        "mmap": lambda: mmap.mmap(made["sized memory"], mmap.PAGESIZE).close(),
        "socket, bind or listen": listen,
        "socket or connect": connect,
        "accept4": accept,
        "getsockopt": lambda: sockets["near"].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12),
        "sendmsg": lambda: sockets["near"].sendmsg([b"1"]),
        "recvmsg": lambda: sockets["far"].recvmsg(1, 0, socket.MSG_DONTWAIT),
        "ppoll": lambda: _libc("ppoll", None, 0, (ctypes.c_long * 2)(), None),
        "pidfd_open": lambda: keep("process", os.pidfd_open(os.getpid())),
        "eventfd2": lambda: keep("event", _libc("eventfd", 0, os.O_CLOEXEC)),
        "clone3 or clone": start,
    }


def _libc(function: str, *arguments: object) -> int:
    """Calls a function of the C library that does no more than the system call of its name."""
    result = int(getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
