"""Restrictions of containers: seccomp denies system calls, parts of /proc are masked. Permanent; only for ranks."""

from __future__ import annotations

import ctypes
import platform

import pytest

#: Numbers of the system calls on x86-64.
NUMBERS = {
    "accept4": 288,
    "eventfd2": 290,
    "fallocate": 285,
    "ftruncate": 77,
    "getrandom": 318,
    "getsockopt": 55,
    "listen": 50,
    "memfd_create": 319,
    "pidfd_open": 434,
    "process_vm_readv": 310,
    "recvmsg": 47,
    "sendmsg": 46,
}

needs_seccomp = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def deny(call: str, code: int) -> None:
    """Makes the system call fail with errno ``code`` on all threads of this process from now on."""
    load_number, compare, answer = 0x20, 0x15, 0x06
    steps = [
        _Instruction(load_number, 0, 0, 0),
        _Instruction(compare, 0, 1, NUMBERS[call]),
        _Instruction(answer, 0, 0, 0x00050000 | code),
        _Instruction(answer, 0, 0, 0x7FFF0000),
    ]
    program = _Program(len(steps), (_Instruction * len(steps))(*steps))
    no_new_privileges, seccomp, set_filter, all_threads = 38, 317, 1, 1
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.prctl(no_new_privileges, 1, 0, 0, 0))
    _done(libc.syscall(seccomp, set_filter, all_threads, ctypes.byref(program)))


def mask(folder: str) -> None:
    """Makes ``folder`` empty for this process from now on; needs root."""
    new_mounts, private, recursive = 0x00020000, 1 << 18, 1 << 14
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.unshare(new_mounts))
    _done(libc.mount(b"none", b"/", None, recursive | private, None))
    _done(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, None))


def _done(status: int) -> None:
    assert status == 0, ctypes.get_errno()
