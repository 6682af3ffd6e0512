"""Runs a function on real processes, some on each of several nodes, which are one machine (``SYMM_TEST_NODE``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
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


def on_nodes(*layout: int, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test whose body runs on nodes with these numbers of ranks, or those of the test's parameter ``layout``.

    ``settings``: of ``run_nodes``. The body may have the parameters ``rank`` and ``world_size``.
    """

    def as_test(body: Callable[..., None]) -> Callable[..., None]:
        wanted = list(signature(body).parameters)
        given = [name for name in wanted if name not in ("rank", "world_size", "layout")]

        @wraps(body)
        def test(**values: Any) -> None:
            def on_rank(rank: int, world_size: int) -> None:
                known = {"rank": rank, "world_size": world_size, **values}
                body(**{name: known[name] for name in wanted})

            run_nodes(on_rank, layout or values["layout"], **settings)

        names = given if layout else [*given, "layout"]
        test.__signature__ = Signature([Parameter(n, Parameter.KEYWORD_ONLY) for n in names])  # type: ignore[attr-defined]
        return test

    return as_test


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
