"""Makes Inductor and AOTAutograd treat operators that communicate as they treat torch's collectives.

Inductor keeps the program's order only among its own collective kernels. It orders all other operators by size and
locality, so two ranks with tensors of different sizes could call such operators in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_map

from torch_symm._import_hook import ImportHook

#: The operators, each with the lowering that it has in Inductor by now.
_collectives: dict[Any, Any] = {}


def add_collectives(operators: Iterable[Any]) -> None:
    """Makes Inductor keep the order of all calls of ``operators``, such as ``torch.ops.symm.all_reduce``.

    The order is the program's order, also among torch's own collectives. Does not import Inductor: the operators are
    registered when it is imported.
    """
    for packet in operators:
        has_side_effect(packet)
        has_side_effect(packet.default)
        _collectives.setdefault(packet.default, None)
    _hook.install()


def _register_lowerings(lowering: Any) -> None:
    for operator, known in _collectives.items():
        if known is None:
            _collectives[operator] = lower = partial(_lower, operator)
            lowering.add_layout_constraint(operator, lowering.constrain_to_fx_strides)
            lowering.add_needs_realized_inputs(operator)
            lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def _lower(operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor import ir

    # From `FallbackKernel`, which supports every form of arguments and results; the type is what Inductor orders.
    results = ir._CollectiveKernel.create(operator, *args, **kwargs)
    return tree_map(lambda node: ir.TensorBox.create(node) if isinstance(node, ir.IRNode) else node, results)


def _keep_order_in_graphs(post_grad: Any) -> None:
    """Keeps Inductor from moving operators past each other, towards their users, before it lowers the graph."""
    reorder = post_grad.reorder_for_locality
    if hasattr(reorder, "__wrapped__"):
        return

    @wraps(reorder)
    def reorder_in_order(graph: Graph) -> None:
        nodes = list(graph.nodes)
        reorder(graph)
        if any(_target(node) in _collectives for node in nodes) and _calls(graph.nodes) != _calls(nodes):
            for node in nodes[:-1]:
                nodes[-1].prepend(node)

    post_grad.reorder_for_locality = reorder_in_order


def _keep_calls_in_one_graph(partitioners: Any) -> None:
    """Keeps AOTAutograd from copying a forward call into the backward graph.

    AOTAutograd copies what depends on saved tensors, and removes what the backward does not use, but no operator with a
    side effect. It never copies an operator that mutates. Calls to be recomputed are copied on purpose.
    """
    for name, of_backward in (("_must_be_in_forward", False), ("_must_be_in_backward", True)):
        must = getattr(partitioners, name)
        if not hasattr(must, "__wrapped__"):
            setattr(partitioners, name, _also_calls(partitioners, must, of_backward))


def _also_calls(partitioners: Any, must: Callable[[Node], bool], of_backward: bool) -> Callable[[Node], bool]:
    @wraps(must)
    def must_or_calls(node: Node) -> bool:
        if must(node):
            return True
        if _target(node) not in _collectives or partitioners.must_recompute(node):
            return False
        # AOTAutograd tags every node of the forward, but no node of an autograd.Function's backward that Dynamo traced.
        of_forward = node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")
        return of_forward != of_backward

    return must_or_calls


def _calls(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if _communicates(_target(node))]


def _target(node: Node) -> Any:
    """Returns the operator that the node calls, also if it calls a functional form of an operator that mutates."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return next((given for given in node.args if isinstance(given, torch._ops.OpOverload)), None)
    return node.target


def _communicates(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    of_torch = target.namespace in ("_c10d_functional", "_dtensor") and "wait_tensor" not in target._opname
    return of_torch or target in _collectives


#: Prepares modules of Inductor and AOTAutograd.
_hook = ImportHook(
    {
        "torch._inductor.lowering": _register_lowerings,
        "torch._inductor.fx_passes.post_grad": _keep_order_in_graphs,
        "torch._functorch.partitioners": _keep_calls_in_one_graph,
    }
)
