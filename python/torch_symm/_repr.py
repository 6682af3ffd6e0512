"""How objects of the native part show themselves."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def _options(self: Any) -> str:
    shown = [f"timeout={self._timeout.total_seconds():g}"]
    shown += [f"{name}={value!r}" for name in ("group_name", "between_hosts") if (value := getattr(self, name))]
    return f"torch_symm.Options({', '.join(shown)})"


def _group(self: Any) -> str:
    options = self.options
    ranks = list(options.global_ranks_in_group)
    where = f", global ranks {ranks}" if ranks and ranks != list(range(self.size())) else ""
    # torch calls its default group "0", error messages "default".
    name = "default" if options.group_name in ("", "0") else options.group_name
    timeout = options._timeout.total_seconds()
    place = f"rank {self.rank()} of {self.size()}{where}"
    return f"<torch_symm.ProcessGroupSymm {name!r}: {place}, timeout {timeout:g} s>"


def install(native: ModuleType) -> None:
    """Gives options and groups a ``repr``."""
    native.Options.__repr__ = _options
    native.ProcessGroupSymm.__repr__ = _group
