"""The pass that vLLM runs over each graph, and its place in vLLM's configuration."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from torch.fx import Graph
from vllm.compilation.passes.inductor_pass import InductorPass  # type: ignore[import-not-found]

from torch_symm.compile import _nodes, _norms, _quantized
from torch_symm.engines.vllm import _graphs, _operators, _signatures

log = logging.getLogger("vllm.plugins.symm")

#: ``CompilationMode.VLLM_COMPILE``, the only mode that runs passes.
COMPILED = 3
#: Numbers of all-reduces that were fused in the graphs of this process; the first is logged at INFO.
_fused: list[int] = []


class SymmFusionPass(InductorPass):  # type: ignore[misc]
    """Runs the user's own pass, then fuses each all-reduce with the addition of a residual and the norm after it."""

    def __init__(self, first: Any = None) -> None:
        self.first = first

    def __call__(self, graph: Graph) -> None:
        """Changes ``graph`` in place."""
        if self.first is not None:
            self.first(graph)
        replaced, quantized = _graphs.replace_norms(graph)
        level = logging.INFO if replaced and not _fused else logging.DEBUG
        more = f", {quantized} of them with quantization" if quantized else ""
        log.log(level, "symm fuses %d all-reduces of a graph with the norm%s", replaced, more)
        _fused.extend([replaced] * bool(replaced))

    def uuid(self) -> str:
        """Returns the key by which vLLM and Inductor distinguish cached graphs."""
        modules = (_nodes, _norms, _quantized, _graphs, _operators)
        files = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
        return hashlib.sha256(files + str(self.first and self.first.uuid()).encode()).hexdigest()


def add_to(vllm_config: Any, key: str) -> None:
    """Adds the pass to a configuration of vLLM that compiles for several tensor-parallel ranks. May be called again.

    Args:
        vllm_config: the configuration; FlashInfer's fusion is switched off in it.
        key: vLLM's name of the slot for passes of others.
    """
    compilation = vllm_config.compilation_config
    if vllm_config.parallel_config.tensor_parallel_size < 2 or compilation.mode != COMPILED:
        return
    if problem := _signatures.problem(InductorPass, _signatures.PASS):
        log.warning("symm does not fuse all-reduces with norms: %s", problem)
        return
    passes = compilation.inductor_compile_config
    if isinstance(passes.get(key), SymmFusionPass):
        return
    if compilation.pass_config.fuse_allreduce_rms:
        log.info("symm fuses all-reduces with norms instead of FlashInfer")
        compilation.pass_config.fuse_allreduce_rms = False
    passes[key] = SymmFusionPass(passes.get(key))
