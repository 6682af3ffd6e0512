"""The host's time in eager calls of one size: the parts of an all-reduce, and how other calls compare."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch_symm.tools.bench.gpu.inputs import GpuCall, Setting

if TYPE_CHECKING:
    from torch_symm.tools.bench.gpu.contenders import GpuSide
    from torch_symm.tools.bench.gpu.record import Cell

SIZE = 64 << 10
OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def entrances(at: Setting, cell: Cell, whole: GpuCall, side: GpuSide) -> dict[str, GpuCall]:
    """The synchronous call ``whole`` of ``cell`` on ``side``, and an all-reduce by its other entry points.

    * ``host``: ``whole``, which users call, such as ``dist.all_reduce``;
    * ``group``: the method of ``ProcessGroup``: without the Python code of torch.distributed, through the dispatcher;
    * ``backend``: the method of the backend itself, with the translation of its arguments from Python;
    * ``launch``: on GPUs, the driver's launch of a kernel, the last step of each of these calls;
    * ``operator``: on groups of symm, ``torch.ops.symm.all_reduce``, into a new tensor.
    """
    if cell.op not in OPS or cell.size != SIZE:
        return {}
    calls = {"host": whole}
    if cell.op != "all_reduce" or not side.calls_dist:
        return calls
    tensors = [at.given(at.inputs.count)]
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = False

    def entered(allreduce: Callable[..., dist.Work | None]) -> GpuCall:
        def run() -> None:
            work = allreduce(tensors, options)
            if work is not None:
                work.wait()

        return GpuCall(whole.reset, run, whole.check)

    # The stub of this class lacks the collectives.
    backend: Any = at.group._get_backend(at.inputs.device)
    calls |= {"group": entered(at.group.allreduce), "backend": entered(backend.allreduce)}
    if at.inputs.device.type == "cuda":
        calls["launch"] = GpuCall(lambda: None, empty_launch(), lambda _calls: None)
    if dist.get_backend(at.group) == "symm":
        calls["operator"] = _operator(at, tensors[0], whole)
    return calls


def _operator(at: Setting, tensor: torch.Tensor, whole: GpuCall) -> GpuCall:
    results: list[torch.Tensor] = []

    def run() -> None:
        results[:] = [torch.ops.symm.all_reduce(tensor, "sum", at.group.group_name)]

    return GpuCall(whole.reset, run, lambda _calls: at.inputs.compare_sum(results[0]))


#: Size of the argument, the same as of the kernels that a short all-reduce launches.
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


def _succeed(result: int) -> None:
    if result:
        raise RuntimeError(f"the CUDA driver says {result}")


def empty_launch() -> Callable[[], None]:
    """A function that enqueues a kernel without work on the current stream, as the backend's kernels are launched.

    It is called through ctypes, which adds some tenths of a microsecond.

    Raises:
        RuntimeError: the driver rejects the kernel.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _succeed(driver.cuModuleLoadData(ctypes.byref(module), _PTX))
    _succeed(driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"nothing"))
    argument = ctypes.create_string_buffer(ARGUMENT_BYTES)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    attribute = _Attribute(id=_OVERLAP, value=1)
    stream = torch.cuda.current_stream().cuda_stream
    config = _Config((BLOCKS, 1, 1), (THREADS, 1, 1), 0, stream, ctypes.pointer(attribute), 1)
    enqueue, given = driver.cuLaunchKernelEx, ctypes.byref(config)

    def run() -> None:
        # The driver reads the argument while it is called.
        _succeed(enqueue(given, kernel, arguments, None))

    # The argument must live as long as the function.
    run.held = argument  # type: ignore[attr-defined]
    return run
