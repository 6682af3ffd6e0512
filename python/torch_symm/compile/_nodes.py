"""Queries about nodes of Inductor's graphs."""

from __future__ import annotations

import operator
import struct
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.fx import Node

from torch_symm._describe import on_several_nodes
from torch_symm.symm_mem._groups import is_symm, resolve

aten = torch.ops.aten
collectives = torch.ops._c10d_functional


#: For each operator, the arguments that the matchers read, by position. All others must have their default values.
READ: dict[Any, tuple[str, ...]] = {
    aten.abs.default: ("self",),
    aten.add.Scalar: ("self", "other"),
    aten.add.Tensor: ("self", "other"),
    aten.amax.default: ("self", "dim", "keepdim"),
    aten.clamp_max.default: ("self", "max"),
    aten.clamp_min.default: ("self", "min"),
    aten.copy_.default: ("self", "src"),
    aten.div.Tensor: ("self", "other"),
    aten.max.dim: ("self", "dim", "keepdim"),
    aten.mean.dim: ("self", "dim", "keepdim"),
    aten.mul.Tensor: ("self", "other"),
    aten.pow.Tensor_Scalar: ("self", "exponent"),
    aten.reciprocal.default: ("self",),
    aten.rsqrt.default: ("self",),
    aten.unsqueeze.default: ("self", "dim"),
    collectives.all_reduce.default: ("input", "reduce_op", "group_name"),
    collectives.wait_tensor.default: ("tensor",),
    operator.getitem: ("a", "b"),
}


#: The conversions, and their arguments that affect the results.
CASTS: dict[Any, tuple[str, ...]] = {
    aten._to_copy.default: ("self", "dtype", "device"),
    torch.ops.prims.convert_element_type.default: ("a", "dtype"),
}


def calls(node: Any, *targets: Any) -> bool:
    """Returns true for a call of one of ``targets`` whose arguments outside :data:`READ` all have their defaults."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets and _is_read_whole(node)


def _is_read_whole(node: Node) -> bool:
    read = READ[node.target]
    if not hasattr(node.target, "_schema"):
        return not node.kwargs and len(node.args) == len(read)
    return not any(name in node.kwargs for name in read) and _has_defaults(node, read)


def _has_defaults(node: Node, but: tuple[str, ...]) -> bool:
    """Returns true if each argument that is not named in ``but`` is absent or equal to its default value."""
    target: Any = node.target
    for place, argument in enumerate(target._schema.arguments):
        default = argument.default_value
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, default)
        if argument.name not in but and (type(given) is not type(default) or given != default):
            return False
    return True


def users(node: Node, *targets: Any) -> list[Node]:
    """Returns the calls of one of ``targets`` that use the node."""
    return [user for user in node.users if calls(user, *targets)]


def other(node: Node, one: Node) -> Any:
    """Returns the operand of ``node`` that is not ``one``."""
    first, second = node.args[:2]
    return second if first is one else first


def value(node: Any) -> torch.Tensor | None:
    """Returns a tensor without memory, of the node's type and shape."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def is_cast(node: Any, dtype: torch.dtype) -> bool:
    """Returns true if the node converts to ``dtype`` and changes neither the device nor the memory format."""
    if not isinstance(node, Node) or node.op != "call_function" or node.target not in CASTS:
        return False
    given, result = value(node.args[0]), value(node)
    if given is None or result is None or result.dtype != dtype or result.device != given.device:
        return False
    return _has_defaults(node, CASTS[node.target])


def uncast(node: Any) -> Any:
    """Returns the input of a conversion to float32, or the node itself."""
    return node.args[0] if is_cast(node, torch.float32) else node


def casts(node: Node, dtype: torch.dtype) -> list[Node]:
    """Returns the conversions of the node to ``dtype``."""
    return [user for user in node.users if is_cast(user, dtype)]


def is_last(dims: Any, of: Any) -> bool:
    """Returns true if ``dims``, one number or a list, names only the last dimension of ``of``."""
    tensor = value(of)
    return tensor is not None and dims in (-1, tensor.dim() - 1, [-1], [tensor.dim() - 1])


def is_number(node: Any, number: float) -> bool:
    """Returns true if the node is ``number``, once both are rounded to float32."""
    return isinstance(node, (int, float)) and struct.pack("f", node) == struct.pack("f", number)


def groups() -> tuple[tuple[str, bool, bool, bool], ...]:
    """Returns each group's name, whether it uses symm for CPU and for CUDA tensors, and whether it spans nodes."""
    names = distributed_c10d._world.pg_names
    several = on_several_nodes() if names else set()
    return tuple(
        sorted((name, is_symm(group, "cpu"), is_symm(group, "cuda"), name in several) for group, name in names.items())
    )


def is_of_symm(group: str, tensor: torch.Tensor) -> bool:
    """Returns true if ``group`` exists and uses symm for the device of ``tensor``."""
    try:
        return is_symm(resolve(group), tensor.device.type)
    except RuntimeError:
        return False
