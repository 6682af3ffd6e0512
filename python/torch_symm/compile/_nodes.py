"""Questions about nodes of Inductor's graphs."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch.fx import Node

from torch_symm.symm_mem._groups import is_symm, resolve

aten = torch.ops.aten
collectives = torch.ops._c10d_functional


def calls(node: Any, *targets: Any) -> bool:
    """Whether it is a call of one of ``targets``."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def users(node: Node, *targets: Any) -> list[Node]:
    """Calls of one of ``targets`` that use it."""
    return [user for user in node.users if calls(user, *targets)]


def other(node: Node, one: Node) -> Any:
    """The second of two operands, of which ``one`` is the other."""
    first, second = node.args[:2]
    return second if first is one else first


def value(node: Any) -> torch.Tensor | None:
    """A tensor without memory, of the type and shape that it has."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def is_cast(node: Any, dtype: torch.dtype) -> bool:
    """Whether it converts to ``dtype``."""
    return (
        calls(node, torch.ops.prims.convert_element_type.default, aten._to_copy.default)
        and (result := value(node)) is not None
        and result.dtype == dtype
    )


def uncast(node: Any) -> Any:
    """What was widened to float32, or the node itself."""
    return node.args[0] if is_cast(node, torch.float32) else node


def casts(node: Node, dtype: torch.dtype) -> list[Node]:
    """Conversions of it to ``dtype``."""
    return [user for user in node.users if is_cast(user, dtype)]


def is_last(dims: Any, of: Any) -> bool:
    """Whether ``dims``, one or a list, is the last dimension of ``of`` alone."""
    tensor = value(of)
    return tensor is not None and dims in (-1, tensor.dim() - 1, [-1], [tensor.dim() - 1])


def is_number(node: Any, number: float) -> bool:
    """Whether it is ``number``, once both are rounded to float32."""
    return isinstance(node, (int, float)) and struct.pack("f", node) == struct.pack("f", number)


def is_of_symm(group: str, tensor: torch.Tensor) -> bool:
    """Whether ``group`` is there and has symm for the device of ``tensor``."""
    try:
        return is_symm(resolve(group), tensor.device.type)
    except RuntimeError:
        return False
