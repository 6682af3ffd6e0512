"""The plug-in for vLLM: tensor-parallel collectives on symm, and on GPUs fused all-reduce and RMSNorm.

vLLM calls :func:`register` in each of its processes, by the entry point ``vllm.general_plugins``. It has no effect
unless ``SYMM_VLLM`` is ``1`` or ``unfused``. ``docs/guide/serving.md`` describes its use.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from torch_symm.engines import _common, vllm_cpu
from torch_symm.engines.vllm import _signatures

__all__ = ["register"]

#: A child of vLLM's logger, whose handlers and level it uses.
log = logging.getLogger("vllm.plugins.symm")
#: The class names of vLLM's communicator and of ours, which replaces it.
USUAL = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
OURS = "torch_symm.engines.vllm._communicator.SymmCommunicator"
#: Platform classes of vLLM that have been changed.
_changed: set[type] = set()


def register() -> None:
    """Makes vLLM's CUDA or CPU platform use symm in this process. May be called again; called by vLLM."""
    choice = os.environ.get("SYMM_VLLM", "").strip()
    if choice not in ("1", "unfused"):
        return
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if current_platform.is_cpu():
        vllm_cpu.register()
        return
    platform = type(current_platform)
    if platform in _changed or not current_platform.is_cuda():
        return
    _changed.add(platform)
    if problem := _signatures.problem(platform, _signatures.PLATFORM):
        log.warning("symm is off, and vLLM uses its own collectives: %s", problem)
        return
    _choose_communicator(platform)  # also without the native part, so that the other ranks do not wait for this one
    if choice == "1" and not _common.native_problem():
        _add_fusion(platform, current_platform.pass_key)


def _choose_communicator(platform: Any) -> None:
    usual = platform.get_device_communicator_cls

    @functools.wraps(usual.__func__)
    def get_device_communicator_cls(cls: type) -> str:
        return _ours_instead_of(usual())

    platform.get_device_communicator_cls = classmethod(get_device_communicator_cls)


@functools.cache
def _ours_instead_of(found: str) -> str:
    """Returns the name of our communicator if it can replace the one named ``found``, otherwise ``found``."""
    problem = "" if found == USUAL else f"another plug-in has chosen the communicator {found}"
    if not problem:
        from vllm.distributed.device_communicators.cuda_communicator import (  # type: ignore[import-not-found]
            CudaCommunicator,
        )

        problem = _signatures.problem(CudaCommunicator, _signatures.COMMUNICATOR)
    if problem:
        log.warning("symm is off, and vLLM uses its own collectives: %s", problem)
    return found if problem else OURS


def _add_fusion(platform: Any, key: str) -> None:
    usual = platform.check_and_update_config

    @functools.wraps(usual.__func__)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        usual(vllm_config)
        from torch_symm.engines.vllm._fusion import add_to

        add_to(vllm_config, key)

    platform.check_and_update_config = classmethod(check_and_update_config)
