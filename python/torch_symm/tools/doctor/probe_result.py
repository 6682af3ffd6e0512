"""The findings of the child with torch and the native part."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_symm.launch.messages import sentence
from torch_symm.launch.ranks import Ended, Program, run

#: Torch may load from a slow disk, and contexts on many GPUs take time.
SECONDS = 120.0
#: The error of step ``torch`` if torch is missing.
MISSING = "torch is not installed in this environment"


@dataclass
class Probed:
    """Findings and errors by step of `probe`; ``log``: the child's standard error."""

    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    log: str = ""

    @property
    def works(self) -> bool:
        """True if the native part is loaded."""
        return "native" in self.found

    @property
    def gpus(self) -> int:
        """Number of GPUs that torch shows to a process."""
        return len(self.of("gpus").get("devices", ()))

    def of(self, step: str) -> Mapping[str, Any]:
        """Returns the findings of a step; empty if the child did not reach it."""
        return self.found.get(step, {})


def probe(ranks: int) -> Probed:
    """Runs the child; with ``ranks`` 0, for as many ranks as GPUs, and at least 2. Failures are in the result."""
    if importlib.util.find_spec("torch") is None:
        return Probed(errors={"torch": MISSING})
    levels = ",".join(filter(None, ("symm::config=warn", os.environ.get("SYMM_LOG", "").strip())))
    child = Program("torch_symm.tools.doctor.native_probe", [str(ranks)], {**os.environ, "SYMM_LOG": levels})
    try:
        (ended,) = run([child], SECONDS)
    except OSError as error:
        return Probed(errors={"child": f"no process could be started to load torch: {sentence(error)}"})
    return _read(ended)


def _read(ended: Ended) -> Probed:
    probed, begun = Probed(log=ended.errors), "torch"
    for message in ended.messages:
        begun = message.get("begins", "")
        if "found" in message:
            probed.found[message["step"]] = message["found"]
        elif "error" in message:
            probed.errors[message["step"]] = message["error"]
    if begun:
        probed.errors[begun] = f"the process that tried it {ended.last_words()}"
    if "torch" in probed.errors:
        probed.errors["torch"] = f"torch cannot be imported: {probed.errors['torch']}"
    return probed
