"""Finds all-reduce, addition and RMSNorm in vLLM's graphs, and replaces them by one operator.

vLLM's graphs have ``vllm::all_reduce`` and the functional ``vllm_ir::fused_add_rms_norm``. The normed rows may be
quantized by torch's operators, by an operator of vLLM that ``auto_functionalized`` wraps, or together with the norm.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from torch_symm.compile._nodes import value
from torch_symm.compile._norms import _comes_before, _erase, _is_served
from torch_symm.compile._quantized import quantization
from torch_symm.engines.vllm._operators import GROUPS

wrapped = torch.ops.higher_order.auto_functionalized


class GraphMatch(NamedTuple):
    """An addition and norm: its inputs, and the nodes that the operator's results replace, ``None`` for unused ones."""

    summed: Any
    residual: Any
    weight: Any
    eps: Any
    rows: Node | None
    added: Node | None
    scale: Any = None
    scales: Node | None = None


def replace_norms(graph: Graph) -> tuple[int, int]:
    """Replaces these nodes in ``graph``; returns the number of replacements, and how many of them quantize the rows."""
    readers = _readers()
    order = {node: number for number, node in enumerate(graph.nodes)}
    replaced = quantized = 0
    for node in list(graph.nodes):
        reader = readers.get(_target(node))
        found = None if reader is None else reader(node, order)
        group = None if found is None else _group(node, found, order)
        if found is not None and group is not None:
            _replace(graph, node, found, group)
            replaced += 1
            quantized += found.scale is not None or found.scales is not None
    return replaced, quantized


def _readers() -> dict[Any, Callable[[Node, dict[Node, int]], GraphMatch | None]]:
    """The operators that this vLLM has, and the functions that read their calls."""
    known: list[tuple[Any, str, Any]] = [
        (torch.ops.vllm_ir, "fused_add_rms_norm", _read_norm),
        (torch.ops._C, "fused_add_rms_norm_static_fp8_quant", _read_static),
        (torch.ops._C, "rms_norm_dynamic_per_token_quant", _read_dynamic),
    ]
    return {getattr(space, name).default: reader for space, name, reader in known if hasattr(space, name)}


def _target(node: Any) -> Any:
    """The operator that ``node`` calls, itself or inside ``auto_functionalized``."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    return node.args[0] if node.target is wrapped else node.target


def _arguments(node: Node) -> dict[str, Any]:
    """All arguments of the operator by name, with their defaults."""
    target: Any = _target(node)
    given = dict(zip((each.name for each in target._schema.arguments), node.args, strict=False))
    if node.target is wrapped:
        given = {}
    return {each.name: each.default_value for each in target._schema.arguments} | given | node.kwargs


def _results(node: Node) -> dict[int, Node] | None:
    """The results of ``node`` that are used, by index; ``None`` if it has other users."""
    found: dict[int, Node] = {}
    for user in node.users:
        if user.op != "call_function" or user.target is not operator.getitem or user.args[1] in found:
            return None
        found[user.args[1]] = user  # type: ignore[index]
    return found


def _read_norm(node: Node, order: dict[Node, int]) -> GraphMatch | None:
    given, results = _arguments(node), _results(node)
    if results is None or given.get("variance_size") is not None or not isinstance(given["weight"], Node):
        return None
    rows = results.get(0)
    found = GraphMatch(given["x"], given["x_residual"], given["weight"], given["epsilon"], rows, results.get(1))
    tensor = value(rows)
    if rows is None or tensor is None:
        return found
    quantized = quantization(rows, tensor.dtype)
    if quantized is not None and (quantized.scale is None or _comes_before(quantized.scale, node, order)):
        return found._replace(rows=quantized.rows, scale=quantized.scale, scales=quantized.scales)
    return _quantized_by_vllm(found, rows, node, order)


def _quantized_by_vllm(found: GraphMatch, rows: Node, norm: Node, order: dict[Node, int]) -> GraphMatch:
    """Returns ``found``, extended by vLLM's quantization of the normed rows if the rows have no other use."""
    user = next(iter(rows.users), rows)
    if len(rows.users) != 1 or user.target is not wrapped:
        return found
    target = _target(user)
    given, results = _arguments(user), _results(user)
    if results is None or given.get("input") is not rows or not _is_fp8(given.get("result")):
        return found
    if target.name() == "_C::static_scaled_fp8_quant":
        one = _is_one(given["scale"]) and _comes_before(given["scale"], norm, order)
        if one and given.get("group_shape") in (None, [-1, -1], (-1, -1)):
            return found._replace(rows=results.get(1), scale=given["scale"])
    elif target.name() == "_C::dynamic_per_token_scaled_fp8_quant" and given.get("scale_ub") is None and 2 in results:
        return found._replace(rows=results.get(1), scales=results.get(2))
    return found


def _read_static(node: Node, order: dict[Node, int]) -> GraphMatch | None:
    given, results = _arguments(node), _results(node)
    if results is None or not _is_one(given["scale"]) or not _is_fp8(given["result"]):
        return None
    common = given["input"], given["residual"], given["weight"], given["epsilon"]
    return GraphMatch(*common, results.get(1), results.get(2), scale=given["scale"])


def _read_dynamic(node: Node, order: dict[Node, int]) -> GraphMatch | None:
    given, results = _arguments(node), _results(node)
    is_limited, has_scales = given["scale_ub"] is not None, results is not None and 2 in results
    if results is None or not has_scales or is_limited or given["residual"] is None or not _is_fp8(given["result"]):
        return None
    common = given["input"], given["residual"], given["weight"], given["epsilon"]
    return GraphMatch(*common, results.get(1), results.get(3), scales=results.get(2))


def _is_fp8(node: Any) -> bool:
    tensor = value(node)
    return tensor is not None and tensor.dtype == torch.float8_e4m3fn


def _is_one(scale: Any) -> bool:
    """Returns true if ``scale`` is a single float32."""
    tensor = value(scale)
    return tensor is not None and tensor.dtype == torch.float32 and all(size == 1 for size in tensor.shape)


def _group(norm: Node, found: GraphMatch, order: dict[Node, int]) -> str | None:
    """Returns vLLM's name of the group that sums the rows, if the operator supports them."""
    summed, residual, weight = value(found.summed), value(found.residual), value(found.weight)
    reduce = getattr(torch.ops.vllm, "all_reduce", None)
    if reduce is None or _target(found.summed) is not reduce.default or list(found.summed.users) != [norm]:
        return None
    if summed is None or residual is None or weight is None or not isinstance(found.eps, float):
        return None
    group = str(_arguments(found.summed)["group_name"])
    if group not in GROUPS or not _is_served(summed, GROUPS[group]):
        return None
    if not summed.dtype == residual.dtype == weight.dtype or weight.shape != summed.shape[-1:]:
        return None
    return group if residual.dim() == summed.dim() else None


def _replace(graph: Graph, norm: Node, found: GraphMatch, group: str) -> None:
    operators: Any = torch.ops.symm_vllm
    given = _arguments(found.summed)["tensor"]
    target, scale, count = operators.all_reduce_add_rms_norm.default, [], 2
    if found.scale is not None:
        target, scale = operators.all_reduce_add_rms_norm_fp8.default, [found.scale]
    elif found.scales is not None:
        target, count = operators.all_reduce_add_rms_norm_dynamic_fp8.default, 3
    formers = (found.rows, found.added, found.scales)[:count]
    with graph.inserting_before(norm):
        all_ = graph.call_function(target, (given, found.residual, found.weight, found.eps, *scale, group))
        all_.meta["val"] = target(*(value(each) if isinstance(each, Node) else each for each in all_.args))
        for place, former in enumerate(formers):
            if former is not None:
                result = graph.call_function(operator.getitem, (all_, place))
                result.meta.update(former.meta)
                former.replace_all_uses_with(result)
    for former in formers:
        if former is not None:
            _erase(graph, former)
    _erase(graph, norm)  # Still in the graph if no result was used
