"""The ``repr`` of the native part's objects, counts of things, and lists of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any


def _options(self: Any) -> str:
    shown = [f"timeout={self._timeout.total_seconds():g}"]
    names = ("group_name", "inter_node_backend", "reduce_dtype", "order", "cta_policy", "max_ctas")
    shown += [f"{name}={value!r}" for name in names if (value := getattr(self, name))]
    return f"torch_symm.Options({', '.join(shown)})"


def group_name(self: Any) -> str:
    """Returns the name that messages use for a group: torch calls its default group "0"."""
    name: str = self.options.group_name
    return "default" if name in ("", "0") else name


def _group(self: Any) -> str:
    options = self.options
    ranks = list(options.global_ranks_in_group)
    where = f", global ranks {ranks}" if ranks and ranks != list(range(self.size())) else ""
    device = self._device()
    devices = "cpu" if device is None else f"cpu and cuda:{device}"
    timeout = options._timeout.total_seconds()
    place = f"rank {self.rank()} of {self.size()}{where}"
    return f"<torch_symm.ProcessGroupSymm {group_name(self)!r}: {place}, on {devices}, timeout {timeout:g} s>"


def counted(number: int, noun: str) -> str:
    """Returns the number and the noun, such as ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns the ranks as errors and reports name them, such as ``ranks 0, 2 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"


def install(native: ModuleType) -> None:
    """Gives options and groups a ``repr``."""
    native.Options.__repr__ = _options
    native.ProcessGroupSymm.__repr__ = _group
