"""The pass over Inductor's graphs, and how it is put among those of the user."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
import torch._inductor.custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from torch_symm._native import load
from torch_symm.compile import _all_reduce, _nodes, _norms, _quantized

MODULES = (_all_reduce, _nodes, _norms, _quantized)


class SymmPass(CustomGraphPass):
    """Replaces what the operators of symm do in one graph."""

    def __call__(self, graph: Graph) -> None:
        """Changes ``graph`` in place."""
        _norms.replace_norms(graph)
        _all_reduce.replace_copied(graph)

    def uuid(self) -> Any:
        """What cached graphs are told apart by."""
        return get_hash_for_files((__file__, *(str(module.__file__) for module in MODULES)))


class Following(CustomGraphPass):
    """Another pass and then ours, as one: torch 2.11 takes one only."""

    def __init__(self, first: Any, ours: SymmPass) -> None:
        self.first, self.ours = first, ours

    def __call__(self, graph: Graph) -> None:
        """Changes ``graph`` in place."""
        self.first(graph)
        self.ours(graph)

    def uuid(self) -> Any:
        """What cached graphs are told apart by; none if the other pass has none."""
        theirs = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return None if theirs is None else (theirs, self.ours.uuid())


_pass = SymmPass()


def enable() -> None:
    """From now on Inductor replaces ``rms_norm(all_reduce(x) + residual)`` on symm groups by one operator.

    It looks for functional all-reduces (``torch.distributed._functional_collectives``) of sums, and for
    ``torch.nn.functional.rms_norm`` or the same written with ``pow``, ``mean`` and ``rsqrt``; rows of other lengths and
    types than the operator serves are left as they are. Where nothing but float8_e4m3fn comes of the normed rows, by
    one float32 scale or by one for each row, the operator makes that as well. Residual and weight must be alike on all
    ranks. Other all-reduces, of an input that is needed afterwards, are done out of place: Inductor would copy it. Call
    it before compiling. May be called again; :func:`disable` undoes it.

    Raises:
        ImportError: the native part cannot serve this torch.
    """
    load()  # It makes the operators known to torch
    _set([*_others(), _pass])


def disable() -> None:
    """Inductor leaves all-reduces alone again. May be called again."""
    _set(_others())


def _takes_several() -> bool:
    return hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes")


def _set(passes: list[Any]) -> None:
    several: Any = passes if _takes_several() else Following(*passes[:2]) if len(passes) == 2 else None
    found: Any = (passes or [None])[0] if len(passes) < 2 else several
    torch._inductor.config.post_grad_custom_pre_pass = found


def _others() -> list[Any]:
    """Passes of the user."""
    there: Any = torch._inductor.config.post_grad_custom_pre_pass
    if isinstance(there, Following):
        return [there.first]
    passes = list(there) if isinstance(there, (list, tuple)) else [] if there is None else [there]
    return [each for each in passes if each is not _pass]
