"""Runs all-reduces whose input is needed afterwards out of place, instead of in place on a copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_symm.compile._nodes import aten, calls, collectives, is_of_symm, value

#: The reductions that ``torch.ops.symm.all_reduce`` supports, by their names in functional collectives.
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def replace_copied(graph: Graph) -> None:
    """Replaces each all-reduce of ``graph`` that Inductor would run on a copy, and its wait.

    If the input is not needed any more, Inductor reduces it in place by itself. If another node is between an
    all-reduce and its wait, the two stay unchanged, because that node may run during the all-reduce.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    sharers: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if (tensor := value(node)) is not None:
            sharers[_storage(tensor)].append(node)
    for reduce in graph.find_nodes(op="call_function", target=collectives.all_reduce.default):
        if not calls(reduce, collectives.all_reduce.default):
            continue
        given, reduction, group = reduce.args
        tensor, waits = value(given), list(reduce.users)
        if tensor is None or len(waits) != 1 or not calls(waits[0], collectives.wait_tensor.default):
            continue
        wait = waits[0]
        if order[wait] != order[reduce] + 1 or reduction not in REDUCTIONS or not tensor.is_contiguous():
            continue
        if is_of_symm(group, tensor) and _is_needed(sharers[_storage(tensor)], order, reduce):
            with graph.inserting_before(reduce):
                result = graph.call_function(torch.ops.symm.all_reduce.default, (given, reduction, group))
            result.meta.update(wait.meta)
            order[result] = order[reduce]
            sharers[_storage(result.meta["val"])].append(result)
            wait.replace_all_uses_with(result)
            graph.erase_node(wait)
            graph.erase_node(reduce)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_needed(sharers: Iterable[Node], order: dict[Node, int], reduce: Node) -> bool:
    """Returns true if the memory of ``sharers`` is read after ``reduce``, by the graph or by its caller."""
    for node in sharers:
        later = [user for user in node.users if order.get(user, -1) > order[reduce]]
        if any(calls(user, aten.copy_.default) and user.args[0] is node for user in later):
            return False  # The final value is visible to the caller: Inductor reduces in place
    return any(
        node.op != "call_function" or any(order.get(user, -1) > order[reduce] for user in node.users)
        for node in sharers
    )
