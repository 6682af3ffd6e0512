"""What the CUDA driver takes to enqueue a kernel: nobody who launches one can be faster."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

#: Bytes of the argument, as large as that of the kernels that a short all-reduce launches.
ARGUMENT_BYTES = 216
BLOCKS, THREADS = 16, 512

_PTX = f""".version 7.0
.target sm_80
.address_size 64
.visible .entry nothing(.param .align 8 .b8 argument[{ARGUMENT_BYTES}]) {{ ret; }}
""".encode()
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_OVERLAP = 6


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``; the value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"the CUDA driver says {result}")


def empty_launch() -> Callable[[], None]:
    """A function that enqueues a kernel without work on the current stream, as the backend's own are launched.

    It is called through ctypes, which is part of what it takes: some tenths of a microsecond.

    Raises:
        RuntimeError: the driver refuses it.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), _PTX))
    _check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"nothing"))
    argument = ctypes.create_string_buffer(ARGUMENT_BYTES)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    attribute = _Attribute(id=_OVERLAP, value=1)
    stream = torch.cuda.current_stream().cuda_stream
    config = _Config((BLOCKS, 1, 1), (THREADS, 1, 1), 0, stream, ctypes.pointer(attribute), 1)
    enqueue, given = driver.cuLaunchKernelEx, ctypes.byref(config)

    def run() -> None:
        # The driver reads the argument while it is called.
        _check(enqueue(given, kernel, arguments, None))

    # Held as long as the function is.
    run.held = argument  # type: ignore[attr-defined]
    return run
