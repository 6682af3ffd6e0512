"""Runs a function on real processes, some on each of several nodes, which are one machine (``SYMM_TEST_NODE``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import ranks

#: Names of the nodes.
NAMES = "abcd"


def nodes_of(layout: Sequence[int]) -> list[int]:
    """The node of each rank, if node ``h`` has ``layout[h]`` ranks, one after another."""
    return [node for node, count in enumerate(layout) for _ in range(count)]


def run_nodes(
    fn: Callable[..., Any],
    layout: Sequence[int],
    *args: Any,
    timeout: float = 60,
    choice: str = "gloo",
    settings: Sequence[dict[str, str]] = (),
    **kwargs: Any,
) -> ranks.Results:
    """``ranks.run_ranks`` on nodes; ``timeout``: of the default group, in seconds; ``settings``: of each rank."""
    kwargs.setdefault("backend", None)
    world, each = sum(layout), tuple(settings) or ({},) * sum(layout)
    return ranks.run_ranks(_on_node, world, fn, tuple(layout), choice, timeout, each, args, timeout=120, **kwargs)


def _on_node(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    layout: Sequence[int],
    choice: str,
    timeout: float,
    settings: Sequence[dict[str, str]],
    args: Any,
) -> Any:
    os.environ.update(settings[rank])
    os.environ["SYMM_INTER_NODE_BACKEND"] = choice
    os.environ["SYMM_TEST_NODE"] = NAMES[nodes_of(layout)[rank]]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks.init(rank, world_size, timeout=timeout)
    return fn(rank, world_size, *args)
