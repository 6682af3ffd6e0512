"""Finds all-reduce, addition and RMSNorm in Inductor's graphs, and replaces them by one operator."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from torch_symm._describe import on_several_nodes
from torch_symm.compile._nodes import aten, calls, casts, collectives, is_last, is_of_symm, other, uncast, users, value
from torch_symm.compile._quantized import quantization

#: Element types and longest row that the operator supports; the length of a row must be a multiple of ``MULTIPLE``.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST, MULTIPLE = 16384, 8


class Norm(NamedTuple):
    """Weight, eps, and resulting rows of an RMSNorm: normed, and also quantized if ``scale`` or ``scales`` is set."""

    weight: Node
    eps: float
    rows: Node
    scale: Node | None = None
    scales: Node | None = None


class NormMatch(NamedTuple):
    """All-reduce, addition and norm: the inputs, and the nodes that the operator's results replace."""

    given: Node
    residual: Node
    group: str
    added: Node
    norm: Norm


def replace_norms(graph: Graph) -> None:
    """Replaces each all-reduce, addition and RMSNorm in ``graph`` by one operator."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for wait in graph.find_nodes(op="call_function", target=collectives.wait_tensor.default):
        found = _find(wait, order)
        if found is not None:
            _replace(graph, found)


def _find(wait: Node, order: dict[Node, int]) -> NormMatch | None:
    reduce = wait.args[0]
    if not calls(wait, collectives.wait_tensor.default) or not calls(reduce, collectives.all_reduce.default):
        return None
    assert isinstance(reduce, Node)
    given, operation, group = reduce.args
    summed = value(wait)
    if operation != "sum" or not isinstance(given, Node) or summed is None or not _is_served(summed, str(group)):
        return None
    for added in users(wait, aten.add.Tensor):
        residual = other(added, wait)
        theirs, sum_ = value(residual), value(added)
        alike = theirs is not None and sum_ is not None and (theirs.shape, theirs.dtype) == (summed.shape, summed.dtype)
        if len(wait.users) > 1 or not alike or residual is wait:
            continue
        if not _comes_before(residual, added, order):
            continue
        for norm in _norms_of(added, summed.dtype):
            if all(_comes_before(node, added, order) for node in (norm.weight, norm.scale) if node is not None):
                return NormMatch(given, residual, str(group), added, norm)
    return None


def _is_served(summed: torch.Tensor, group: str) -> bool:
    hidden = summed.shape[-1] if summed.dim() else 0
    if summed.dtype not in DTYPES or not isinstance(hidden, int) or hidden % MULTIPLE or not 0 < hidden <= MOST:
        return False
    # Multi-node groups reject CUDA tensors.
    return is_of_symm(group, summed) and (summed.device.type == "cpu" or group not in on_several_nodes())


def _comes_before(node: Node, other: Node, order: dict[Node, int]) -> bool:
    return order.get(node, -1) < order[other]


def _norms_of(added: Node, dtype: torch.dtype) -> Iterator[Norm]:
    """RMSNorms of ``added``, quantized ones first."""
    for wide in [added] if dtype == torch.float32 else casts(added, torch.float32):
        squares = [user for user in wide.users if _is_square(user, wide)]
        means = [mean for square in squares for mean in users(square, aten.mean.dim) if _is_of_rows(mean)]
        for mean in means:
            for shifted in users(mean, aten.add.Tensor, aten.add.Scalar):
                eps = other(shifted, mean)
                for root in users(shifted, aten.rsqrt.default):
                    for scaled in users(root, aten.mul.Tensor):
                        if isinstance(eps, (int, float)) and other(scaled, root) is wide:
                            yield from _weighted(scaled, float(eps), dtype)


def _is_square(node: Node, of: Node) -> bool:
    if calls(node, aten.pow.Tensor_Scalar):
        return bool(node.args[1] == 2)
    return bool(calls(node, aten.mul.Tensor) and node.args[0] is of and node.args[1] is of)


def _is_of_rows(mean: Node) -> bool:
    return is_last(mean.args[1], mean.args[0]) and len(mean.args) > 2 and mean.args[2] is True


def _weighted(scaled: Node, eps: float, dtype: torch.dtype) -> Iterator[Norm]:
    """The weighted rows: multiplied in float32 and then rounded, or rounded and then multiplied."""
    for first in [scaled] if dtype == torch.float32 else [scaled, *casts(scaled, dtype)]:
        for product in users(first, aten.mul.Tensor):
            weight = uncast(other(product, first))
            theirs, whole, result = value(weight), value(scaled), value(product)
            if theirs is None or whole is None or theirs.dtype != dtype or theirs.shape != whole.shape[-1:]:
                continue
            quantized = quantization(product, dtype)
            if quantized is not None:
                yield Norm(weight, eps, *quantized)
            rounded = casts(product, dtype)
            if result is not None and result.dtype == dtype:
                yield Norm(weight, eps, product)
            elif len(rounded) == 1 and len(product.users) == 1:
                yield Norm(weight, eps, rounded[0])


def _replace(graph: Graph, found: NormMatch) -> None:
    given, residual, group, added, norm = found
    operators: Any = torch.ops.symm
    formers, scale = [norm.rows, added], [] if norm.scale is None else [norm.scale]
    operator_ = operators.all_reduce_add_rms_norm.default
    if norm.scale is not None:
        operator_ = operators.all_reduce_add_rms_norm_fp8.default
    elif norm.scales is not None:
        operator_ = operators.all_reduce_add_rms_norm_dynamic_fp8.default
        formers.append(norm.scales)
    with graph.inserting_before(added):
        all_ = graph.call_function(operator_, (given, residual, norm.weight, norm.eps, *scale, group))
        all_.meta["val"] = tuple(former.meta["val"] for former in formers)
        results = [graph.call_function(operator.getitem, (all_, place)) for place in range(len(formers))]
    for result, former in zip(results, formers, strict=True):
        result.meta.update(former.meta)
        former.replace_all_uses_with(result)
    for former in formers:
        _erase(graph, former)


def _erase(graph: Graph, node: Node) -> None:
    """Removes an unused node, and the nodes that only it used."""
    if node.op != "call_function" or node.users or node._erased:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        _erase(graph, each)
