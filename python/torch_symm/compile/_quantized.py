"""Finds normed rows that are quantized to float8_e4m3fn as the operator does it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from torch_symm.compile._nodes import aten, calls, casts, is_cast, is_last, is_number, other, users, value

LARGEST = 448.0
LEAST_SCALE = 1 / (LARGEST * 512)


class Quantized(NamedTuple):
    """The quantized rows, and their divisor: one ``scale``, or one per row, ``scales``, which the operator returns."""

    rows: Node
    scale: Node | None
    scales: Node | None


def quantization(normed: Node, dtype: torch.dtype) -> Quantized | None:
    """Returns how ``normed`` is quantized, if it has no other use.

    The operator rounds ``normed`` to ``dtype`` before it quantizes. Eager code and Inductor from torch 2.12 on do so,
    too; Inductor 2.11 drops a rounding that is followed by widening.
    """
    rows = _the_same(normed, dtype)
    for wide in rows:
        for scaled in users(wide, aten.div.Tensor, aten.mul.Tensor):
            divisor, result = _divisor(scaled, wide), value(scaled)
            last = _last(scaled)
            if divisor is None or last is None or result is None or result.dtype != torch.float32:
                continue
            end, chain, is_limited = last
            found = Quantized(end, divisor, None)
            of_rows = _of_each_row(divisor, rows)
            if of_rows is not None:
                # Quotients exceed 448 at most by their rounding, so limits do not change the results.
                found = Quantized(end, None, divisor)
            elif not is_limited or not _is_one(divisor, normed):
                continue
            if _are_used_within([*rows, *chain, *(of_rows or [])], (end, divisor)):
                return found
    return None


def _the_same(normed: Node, dtype: torch.dtype) -> list[Node]:
    """Returns ``normed``, and its conversions to its own type and to float32."""
    found = [normed]
    for node in found:
        found += [cast for kind in {dtype, torch.float32} for cast in casts(node, kind)]
    return found


def _divisor(scaled: Node, of: Node) -> Node | None:
    """Returns the divisor of ``of``, also if ``of`` is multiplied by the reciprocal of the divisor."""
    if calls(scaled, aten.div.Tensor):
        found = scaled.args[1] if scaled.args[0] is of else None
    else:
        factor = other(scaled, of)
        found = factor.args[0] if calls(factor, aten.reciprocal.default) else None
    return found if isinstance(found, Node) else None


def _last(scaled: Node) -> tuple[Node, list[Node], bool] | None:
    """Returns the conversion to float8_e4m3fn, the nodes before it, and whether these limit the elements to 448."""
    chain = [scaled]
    limits: set[float] = set()
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        if is_cast(user, torch.float8_e4m3fn):
            return user, chain, len(limits) == 2
        if not calls(user, aten.clamp_min.default, aten.clamp_max.default):
            return None
        limit = -LARGEST if calls(user, aten.clamp_min.default) else LARGEST
        if not is_number(user.args[1], limit):
            return None
        limits.add(limit)
        chain.append(user)
    return None


def _is_one(scale: Node, normed: Node) -> bool:
    """Returns true if ``scale`` is a single float32 on the device of ``normed``."""
    found, rows = value(scale), value(normed)
    if found is None or rows is None or found.dtype != torch.float32 or found.device != rows.device:
        return False
    return found.dim() <= rows.dim() and all(isinstance(size, int) and size == 1 for size in found.shape)


def _of_each_row(scales: Node, rows: list[Node]) -> list[Node] | None:
    """Returns the nodes between ``rows`` and ``scales``: each row's maximum / 448, but at least 1 / (448 * 512)."""
    if not calls(scales, aten.clamp_min.default) or not is_number(scales.args[1], LEAST_SCALE):
        return None
    quotient: Any = scales.args[0]
    result = value(scales)
    if result is None or result.dtype != torch.float32 or not calls(quotient, aten.div.Tensor):
        return None
    largest, divisor = quotient.args
    if not is_number(divisor, LARGEST):
        return None
    between, keeps = [quotient], False
    if is_cast(largest, torch.float32):
        between.append(largest)
        largest = largest.args[0]
    if calls(largest, aten.unsqueeze.default) and is_last(largest.args[1], largest):
        between.append(largest)
        largest, keeps = largest.args[0], True
    if calls(largest, operator.getitem) and largest.args[1] == 0 and calls(largest.args[0], aten.max.dim):
        between.append(largest)
        largest = largest.args[0]
    elif not calls(largest, aten.amax.default):
        return None
    magnitude, *dims = largest.args
    if not calls(magnitude, aten.abs.default) or magnitude.args[0] not in rows or not dims:
        return None
    keeps ^= len(dims) > 1 and dims[1] is True
    return [*between, largest, magnitude] if is_last(dims[0], magnitude) and keeps else None


def _are_used_within(nodes: Iterable[Node], results: Iterable[Node]) -> bool:
    """Returns true if no node outside ``nodes`` and ``results`` uses one of ``nodes``."""
    inside = {*nodes, *results}
    return all(user in inside for node in nodes for user in node.users)
