"""vLLM on CPUs: its tensor-parallel and pipeline-parallel groups over symm, in place of its shared memory and of Gloo.

:func:`register` replaces ``_CPUSHMDistributed``, the object to which vLLM's ``CpuCommunicator`` passes its calls. vLLM
makes one only on processors with AVX-512; elsewhere ``CpuCommunicator`` would use Gloo, and gets our object instead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

from torch_symm.engines import _common

#: A child of vLLM's logger, whose handlers and level it uses.
log = logging.getLogger("vllm.plugins.symm")
#: The module that is changed.
_MODULE = "vllm.distributed.device_communicators.cpu_communicator"
#: The classes of that module, and their methods that are replaced or called.
_SIGNATURES: dict[str, _common.Expected] = {
    "CpuCommunicator": {"__init__": ("cpu_group", "device", "device_group", "unique_name"), "destroy": ()},
    "_CPUSHMDistributed": {
        "__init__": ("communicator",),
        "make_group_name": ("communicator",),
        "all_reduce": ("input", "group"),
        "gather": ("input", "gather_list", "dst", "group"),
        "all_gather_into_tensor": ("output", "input", "group"),
        "send_tensor_dict": ("tensor_dict", "dst"),
        "recv_tensor_dict": ("src",),
    },
}
#: First letters of the names of the groups that vLLM's shared memory serves.
_KINDS = ("tp", "pp")
#: Bytes of the first message of a dictionary, and of the field in it that holds the length of the description.
_HEAD, _LENGTH = 2048, 8
#: The class that :func:`register` replaced.
_theirs: Any = None


def register() -> None:
    """From now on, makes symm serve the tensor-parallel and pipeline-parallel groups of vLLM's CPU workers.

    Call it in every process before vLLM makes its groups, as plug-ins of ``vllm.general_plugins`` are called. A second
    call has no effect. If symm rejects a group on any rank, vLLM serves it on all; the log has the reason. If the
    methods of this vLLM differ from the tested methods, nothing is changed, and the log says so.
    """
    global _theirs
    module: Any = import_module(_MODULE)
    if getattr(module, "_CPUSHMDistributed", None) is SymmDistributed:
        return
    for name, expected in _SIGNATURES.items():
        owner = getattr(module, name, None)
        if problem := _common.problem(owner, expected) if owner else f"there is no class {name}":
            log.warning("symm is off, and vLLM uses its own collectives: %s", problem)
            return
    _theirs = module._CPUSHMDistributed
    module._CPUSHMDistributed = SymmDistributed
    module.CpuCommunicator.__init__ = _also_without_shm(module.CpuCommunicator.__init__)
    module.CpuCommunicator.destroy = _also_leaving(module.CpuCommunicator.destroy)


def _also_without_shm(initialize: Callable[..., None]) -> Callable[..., None]:
    """Returns a constructor of ``CpuCommunicator`` that uses symm even where vLLM has no shared memory."""

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        initialize(self, *given, **named)
        if self.world_size > 1 and self.dist_module is dist and self.unique_name.startswith(_KINDS):
            self.dist_module = SymmDistributed(self, lambda _: dist)
            self.supports_tensor_dict = self.dist_module.served

    return __init__


def _also_leaving(usual: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns a ``destroy`` of ``CpuCommunicator`` that also leaves the symm group."""

    def destroy(self: Any) -> None:
        if isinstance(self.dist_module, SymmDistributed):
            self.dist_module.leave()
        usual(self)

    return destroy


class SymmDistributed:
    """The methods of vLLM's ``_CPUSHMDistributed``, over a symm group of the communicator's ranks.

    Args:
        communicator: vLLM's ``CpuCommunicator``.
        fallback: makes the object that replaces this one if symm rejects the group; vLLM's own class by default.
    """

    def __init__(self, communicator: Any, fallback: Callable[[Any], Any] | None = None) -> None:
        self._group: Any = _common.join(log, "vLLM", communicator)
        self._instead: Any = None if self._group else (fallback or _theirs)(communicator)
        self._all_reduce, self._all_gather = AllreduceOptions(), AllgatherOptions()

    @property
    def served(self) -> bool:
        """True if symm serves the group."""
        return self._group is not None

    def leave(self) -> None:
        """Leaves the symm group. No call may follow."""
        _common.leave(self._group)
        self._group = None

    @staticmethod
    def make_group_name(communicator: Any) -> str:
        """Returns the name that vLLM compares among ranks."""
        name: str = _theirs.make_group_name(communicator)
        return name

    def all_reduce(self, input: torch.Tensor, group: Any = None) -> None:
        """Replaces ``input`` by the sum over ranks, in rank order, rounded once."""
        if self._group is None:
            self._instead.all_reduce(input, group=group)
        elif torch.compiler.is_compiling():  # dynamo can trace this form
            dist.all_reduce(input, group=self._group)
        else:
            self._group.allreduce([input], self._all_reduce).wait()

    def gather(
        self, input: torch.Tensor, gather_list: list[torch.Tensor] | None, dst: int = -1, group: Any = None
    ) -> None:
        """Gathers into ``gather_list`` of the rank whose global rank is ``dst``."""
        if self._group is None:
            self._instead.gather(input, gather_list, dst=dst, group=group)
        else:
            dist.gather(input, gather_list, dst=dst, group=self._group)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, group: Any = None) -> None:
        """Concatenates the ranks' ``input`` into ``output``."""
        if self._group is None:
            self._instead.all_gather_into_tensor(output, input, group=group)
        elif torch.compiler.is_compiling():
            dist.all_gather_into_tensor(output, input, group=self._group)
        else:
            self._group._allgather_base(output, input, self._all_gather).wait()

    def send_tensor_dict(self, tensor_dict: dict[str, torch.Tensor | Any], dst: int) -> None:
        """Sends a dictionary of tensors to rank ``dst`` of the group."""
        if self._group is None:
            self._instead.send_tensor_dict(tensor_dict, dst)
            return
        for key, value in tensor_dict.items():
            if not isinstance(value, torch.Tensor):
                raise RuntimeError(f"only tensors can be sent, {key!r} is of type {type(value).__name__}")
        text = json.dumps([(key, [*v.shape], str(v.dtype)[6:]) for key, v in tensor_dict.items()]).encode()
        message = torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH, "little") + text), dtype=torch.uint8)
        head = torch.zeros(_HEAD, dtype=torch.uint8)
        head[: message.numel()] = message[:_HEAD]
        self._send(head, dst)
        if message.numel() > _HEAD:
            self._send(message[_HEAD:], dst)
        for value in tensor_dict.values():
            if value.numel():
                self._send(value.contiguous(), dst)

    def recv_tensor_dict(self, src: int) -> dict[str, torch.Tensor | Any]:
        """Receives the dictionary that rank ``src`` of the group sends."""
        if self._group is None:
            return self._instead.recv_tensor_dict(src)  # type: ignore[no-any-return]
        head = torch.empty(_HEAD, dtype=torch.uint8)
        self._receive(head, src)
        length = int.from_bytes(bytes(head[:_LENGTH].tolist()), "little")
        if (left := _LENGTH + length - _HEAD) > 0:
            rest = torch.empty(left, dtype=torch.uint8)
            self._receive(rest, src)
            head = torch.cat([head, rest])
        made = {}
        for key, shape, dtype in json.loads(bytes(head[_LENGTH : _LENGTH + length].tolist())):
            made[key] = torch.empty(shape, dtype=getattr(torch, dtype))
            if made[key].numel():
                self._receive(made[key], src)
        return made

    def _send(self, tensor: torch.Tensor, dst: int) -> None:
        self._group.send([tensor], dst, 0).wait()

    def _receive(self, tensor: torch.Tensor, src: int) -> None:
        self._group.recv([tensor], src, 0).wait()
