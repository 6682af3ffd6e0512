"""Finds all-reduce, addition and RMSNorm in Inductor's graphs, and replaces them by one operator."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from torch_symm._native import load
from torch_symm.symm_mem._groups import is_symm, resolve

aten = torch.ops.aten
collectives = torch.ops._c10d_functional

#: Element types and the longest row that the operator serves, and what a row's length is a multiple of.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST, MULTIPLE = 16384, 8


class Found(NamedTuple):
    """All-reduce, addition and norm: what goes in, and the nodes that the operator's results replace."""

    given: Node
    residual: Node
    weight: Node
    eps: float
    group: str
    added: Node
    normed: Node


class NormPass(CustomGraphPass):
    """Replaces them in one graph."""

    def __call__(self, graph: Graph) -> None:
        """Changes ``graph`` in place."""
        order = {node: number for number, node in enumerate(graph.nodes)}
        for wait in graph.find_nodes(op="call_function", target=collectives.wait_tensor.default):
            found = _find(wait, order)
            if found is not None:
                _replace(graph, found)

    def uuid(self) -> Any:
        """What cached graphs are told apart by."""
        return get_hash_for_files((__file__,))


_pass = NormPass()


def enable() -> None:
    """From now on Inductor replaces ``rms_norm(all_reduce(x) + residual)`` on symm groups by one operator.

    It looks for functional all-reduces (``torch.distributed._functional_collectives``) of sums, and for
    ``torch.nn.functional.rms_norm`` or the same written with ``pow``, ``mean`` and ``rsqrt``; rows of other lengths and
    types than the operator serves are left as they are. Residual and weight must be alike on all ranks. Call it before
    compiling. May be called again; :func:`disable` undoes it.

    Raises:
        ImportError: the native part cannot serve this torch.
    """
    load()  # It makes the operator known to torch
    others = _others()
    torch._inductor.config.post_grad_custom_pre_pass = [*others, _pass] if others else _pass


def disable() -> None:
    """Inductor leaves all-reduces alone again. May be called again."""
    others = _others()
    found: Any = others[0] if len(others) == 1 else others or None
    torch._inductor.config.post_grad_custom_pre_pass = found


def _others() -> list[Any]:
    """Passes of the user."""
    there: Any = torch._inductor.config.post_grad_custom_pre_pass
    passes = list(there) if isinstance(there, (list, tuple)) else [] if there is None else [there]
    return [each for each in passes if each is not _pass]


def _calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _other(node: Node, one: Node) -> Any:
    """The second of two operands, of which ``one`` is the other."""
    first, second = node.args[:2]
    return second if first is one else first


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _users(node: Node, *targets: Any) -> list[Node]:
    return [user for user in node.users if _calls(user, *targets)]


def _is_cast(node: Any, dtype: torch.dtype) -> bool:
    return (
        _calls(node, torch.ops.prims.convert_element_type.default, aten._to_copy.default)
        and (value := _value(node)) is not None
        and value.dtype == dtype
    )


def _uncast(node: Any) -> Any:
    """What was widened to float32, or the node itself."""
    return node.args[0] if _is_cast(node, torch.float32) else node


def _casts(node: Node, dtype: torch.dtype) -> list[Node]:
    return [user for user in node.users if _is_cast(user, dtype)]


def _find(wait: Node, order: dict[Node, int]) -> Found | None:
    reduce = wait.args[0]
    if not _calls(reduce, collectives.all_reduce.default, collectives.all_reduce_.default):
        return None
    assert isinstance(reduce, Node)
    given, operation, group = reduce.args
    value = _value(wait)
    if operation != "sum" or not isinstance(given, Node) or value is None or not _is_served(value, str(group)):
        return None
    for added in _users(wait, aten.add.Tensor):
        residual = _other(added, wait)
        theirs, sum_ = _value(residual), _value(added)
        alike = theirs is not None and sum_ is not None and (theirs.shape, theirs.dtype) == (value.shape, value.dtype)
        if len(wait.users) > 1 or added.kwargs or not alike or residual is wait:
            continue
        norm = _norm_of(added, value.dtype)
        if norm is None:
            continue
        weight, eps, normed = norm
        if _comes_before(weight, added, order) and _comes_before(residual, added, order):
            return Found(given, residual, weight, eps, str(group), added, normed)
    return None


def _is_served(value: torch.Tensor, group: str) -> bool:
    hidden = value.shape[-1] if value.dim() else 0
    if value.dtype not in DTYPES or not isinstance(hidden, int) or hidden % MULTIPLE or not 0 < hidden <= MOST:
        return False
    try:
        return is_symm(resolve(group), value.device.type)
    except RuntimeError:
        return False


def _comes_before(node: Node, other: Node, order: dict[Node, int]) -> bool:
    return order.get(node, -1) < order[other]


def _norm_of(added: Node, dtype: torch.dtype) -> tuple[Node, float, Node] | None:
    """Weight, eps and result of an RMSNorm of ``added``."""
    for wide in [added] if dtype == torch.float32 else _casts(added, torch.float32):
        squares = [user for user in wide.users if _is_square(user, wide)]
        means = [mean for square in squares for mean in _users(square, aten.mean.dim) if _is_of_rows(mean)]
        for mean in means:
            for shifted in _users(mean, aten.add.Tensor, aten.add.Scalar):
                eps = _other(shifted, mean)
                for root in _users(shifted, aten.rsqrt.default):
                    for scaled in _users(root, aten.mul.Tensor):
                        if isinstance(eps, (int, float)) and _other(scaled, root) is wide:
                            found = _weighted(scaled, dtype)
                            if found is not None:
                                return found[0], float(eps), found[1]
    return None


def _is_square(node: Node, of: Node) -> bool:
    if _calls(node, aten.pow.Tensor_Scalar):
        return bool(node.args[1] == 2)
    return bool(_calls(node, aten.mul.Tensor) and node.args[0] is of and node.args[1] is of)


def _is_of_rows(mean: Node) -> bool:
    value, dims = _value(mean.args[0]), mean.args[1]
    assert value is not None
    return dims in ([-1], [value.dim() - 1]) and len(mean.args) > 2 and mean.args[2] is True


def _weighted(scaled: Node, dtype: torch.dtype) -> tuple[Node, Node] | None:
    """Weight and result: multiplied in float32 and then rounded, or rounded and then multiplied."""
    for first in [scaled] if dtype == torch.float32 else [scaled, *_casts(scaled, dtype)]:
        for product in _users(first, aten.mul.Tensor):
            weight = _uncast(_other(product, first))
            theirs, whole = _value(weight), _value(scaled)
            if theirs is None or whole is None or theirs.dtype != dtype or theirs.shape != whole.shape[-1:]:
                continue
            result = _value(product)
            if result is not None and result.dtype == dtype:
                return weight, product
            casts = _casts(product, dtype)
            if len(casts) == 1 and len(product.users) == 1:
                return weight, casts[0]
    return None


def _replace(graph: Graph, found: Found) -> None:
    given, residual, weight, eps, group, added, normed = found
    with graph.inserting_before(added):
        arguments = (given, residual, weight, eps, group)
        both = graph.call_function(torch.ops.symm.all_reduce_add_rms_norm.default, arguments)
        both.meta["val"] = (normed.meta["val"], added.meta["val"])
        results = [graph.call_function(operator.getitem, (both, place)) for place in range(2)]
    for result, former in zip(results, (normed, added), strict=True):
        result.meta.update(former.meta)
        former.replace_all_uses_with(result)
    _erase(graph, normed)
    _erase(graph, added)


def _erase(graph: Graph, node: Node) -> None:
    """Removes a node that nobody uses, and what was there for it alone."""
    if node.op != "call_function" or node.users:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        _erase(graph, each)
