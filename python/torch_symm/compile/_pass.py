"""The pass over Inductor's graphs, and its registration among the user's passes."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
import torch._inductor.custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from torch_symm import _inductor
from torch_symm._native import load
from torch_symm.compile import _all_reduce, _nodes, _norms, _quantized

MODULES = (_all_reduce, _inductor, _nodes, _norms, _quantized)


class SymmPass(CustomGraphPass):
    """Uses the operators of symm in one graph."""

    def __call__(self, graph: Graph) -> None:
        """Changes ``graph`` in place."""
        _norms.replace_norms(graph)
        _all_reduce.replace_copied(graph)

    def uuid(self) -> Any:
        """Returns the key by which cached graphs are distinguished: this code, and the groups by which it chooses."""
        return get_hash_for_files((__file__, *(str(module.__file__) for module in MODULES))), _nodes.groups()


class Following(CustomGraphPass):
    """Another pass and then ours, combined into one because torch 2.11 accepts only one."""

    def __init__(self, first: Any, ours: SymmPass) -> None:
        self.first, self.ours = first, ours

    def __call__(self, graph: Graph) -> None:
        """Changes ``graph`` in place."""
        self.first(graph)
        self.ours(graph)

    def uuid(self) -> Any:
        """Returns the key by which cached graphs are distinguished; ``None`` if the other pass has no key."""
        theirs = self.first.uuid() if isinstance(self.first, CustomGraphPass) else None
        return None if theirs is None else (theirs, self.ours.uuid())


_pass = SymmPass()


def enable() -> None:
    """From now on, Inductor replaces ``rms_norm(all_reduce(x) + residual)`` on symm groups by one operator.

    The pass matches functional all-reduces (``torch.distributed._functional_collectives``) of sums, and
    ``torch.nn.functional.rms_norm`` or its spelling with ``pow``, ``mean`` and ``rsqrt``; rows of lengths and types
    that the operator does not support are left unchanged. If the normed rows are only used as float8_e4m3fn, with one
    float32 scale or one per row, the operator quantizes them as well. Residual and weight must be the same on all
    ranks. Other all-reduces, of an input that is needed afterwards, are done out of place, because Inductor would copy
    the input. Call it before compiling. May be called again; :func:`disable` undoes it.

    Raises:
        ImportError: the native part cannot serve this torch.
    """
    load()  # Registers the operators with torch
    _set([*_others(), _pass])


def disable() -> None:
    """Makes Inductor leave all-reduces unchanged again. May be called again."""
    _set(_others())


def _takes_several() -> bool:
    return hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes")


def _set(passes: list[Any]) -> None:
    several: Any = passes if _takes_several() else Following(*passes[:2]) if len(passes) == 2 else None
    found: Any = (passes or [None])[0] if len(passes) < 2 else several
    torch._inductor.config.post_grad_custom_pre_pass = found


def _others() -> list[Any]:
    """The user's passes."""
    there: Any = torch._inductor.config.post_grad_custom_pre_pass
    if isinstance(there, Following):
        return [there.first]
    passes = list(there) if isinstance(there, (list, tuple)) else [] if there is None else [there]
    return [each for each in passes if each is not _pass]
