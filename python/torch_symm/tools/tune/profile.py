"""The file that calibration writes: ``docs/design/cost-model.md`` documents its fields.

The native part reads and validates it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from torch_symm._describe import prices as prices
from torch_symm._native import load
from torch_symm._version import __version__
from torch_symm.tools.command import write_error

from .measurement_points import OPS, Point, Priced, group_sizes, local


@dataclass(frozen=True)
class Key:
    """The hardware of a profile. ``file``: the name of the profile's file; ``says``: a text for human readers."""

    hardware: dict[str, Any]
    file: str
    says: str


def key(device: str, world: int) -> Key:
    """Returns the key of this node's hardware, for ``world`` ranks.

    Raises:
        SymmConfigError: NVML does not identify the GPUs.
    """
    found = json.loads(load()._profile_key(device, world))
    if found is None:
        raise load().SymmConfigError("what GPUs these are cannot be told: NVML does not answer")
    return Key(found["hardware"], found["file"], found["says"])


def measured(command: str, load_before: list[float], reference_us: float) -> dict[str, Any]:
    """Describes a measurement made now. ``reference_us``: the time of the reference in the state that counts."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    software = f"torch_symm {__version__}, torch {torch.__version__}"
    state = {"reference_us": round(reference_us, 3)} if reference_us else {}
    return {"date": now, "software": software, "command": command, "load": load_before, **state}


def bare(here: Key, settings: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns a profile without times. ``settings``: thresholds, by ranks of a group."""
    groups = [
        {"ranks": ranks, **settings.get(ranks, {}), "curves": list[Any]()}
        for ranks in group_sizes(here.hardware["ranks"])
    ]
    return {
        "format": "torch_symm profile",
        "version": 1,
        "measured": measured("", [], 0.0),
        "hardware": here.hardware,
        "groups": groups,
    }


@contextmanager
def draft(here: Key, settings: Mapping[int, dict[str, Any]]) -> Iterator[Path]:
    """Yields the file of a profile without times, while measurements use it."""
    with tempfile.TemporaryDirectory(prefix="torch-symm-tune-") as folder:
        path = Path(folder) / "draft.json"
        write(path, bare(here, settings))
        yield path


def assemble(
    profile: dict[str, Any], times: Mapping[Point, float], measured: dict[str, Any], known: Mapping[int, Priced]
) -> dict[str, Any]:
    """Adds ``times`` to the bare ``profile``. ``measured``: from :func:`measured`. ``known``: algorithms, by ranks."""
    groups = [
        {
            **group,
            "curves": [curve for op in OPS for curve in _curves(group["ranks"], op, times, known[group["ranks"]])],
        }
        for group in profile["groups"]
    ]
    return {**profile, "measured": measured, "groups": groups, **_local(profile["hardware"], times)}


def _local(hardware: Mapping[str, Any], times: Mapping[Point, float]) -> dict[str, dict[str, float]]:
    """Returns the profile's entry ``local``, the costs of steps within a rank; empty if they were not measured."""
    points = local(hardware["device"], hardware["ranks"])
    if not all(point in times for point in points):
        return {}
    step, slice, collective, copy = (times[point] for point in points)
    rate = points[-1].bytes / copy / 1e3
    found = {"step_us": max(step - collective, 0.001), "slice_us": slice, "copy_gb_per_s": rate}
    return {"local": {name: round(value, 3) for name, value in found.items()}}


def _curves(ranks: int, op: str, times: Mapping[Point, float], known: Priced) -> list[dict[str, Any]]:
    by_algorithm: dict[str, list[Point]] = {}
    for point in sorted(times, key=lambda point: point.bytes):
        if (point.ranks, point.op) == (ranks, op):
            by_algorithm.setdefault(known.price(op, point.bytes, 0)[1], []).append(point)
    return [
        {
            "op": op,
            "algorithm": algorithm,
            "bytes": [point.bytes for point in points],
            "us": [round(times[point], 3) for point in points],
        }
        for algorithm, points in by_algorithm.items()
    ]


def known(path: Path) -> dict[str, Any]:
    """Returns the profile at ``path``; empty without a valid one. Prints a message if it is faulty."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        _validate(path, found)
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, load().SymmConfigError) as error:
        print(f"profile {path} is faulty and will be replaced: {error}", file=sys.stderr, flush=True)
        return {}


def with_others(made: dict[str, Any], old: Mapping[str, Any], ops: Sequence[str]) -> dict[str, Any]:
    """Returns ``made`` with the other collectives than ``ops`` in the ``old`` profile, if that is of this hardware.

    The others keep the thresholds under which they were measured, except those that ``made`` sets.
    """
    if old.get("hardware") != made["hardware"]:
        return made
    before, groups = {group["ranks"]: group for group in old["groups"]}, []
    for group in made["groups"]:
        its = before.get(group["ranks"], {"curves": []})
        kept = [curve for curve in its["curves"] if curve["op"] not in ops]
        groups.append({**(_over(its, group) if kept else group), "curves": group["curves"] + kept})
    return {**{name: old[name] for name in ("local",) if name in old}, **made, "groups": groups}


def _over(its: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of ``its`` with those of ``group`` over them, also within the list of GPU thresholds."""
    both = {**its, **group}
    if "cuda_tuning" in both:
        pairs = ",".join(each.get("cuda_tuning", "") for each in (its, group)).split(",")
        named = {pair.partition("=")[0].strip(): pair.strip() for pair in pairs if pair.strip()}
        both["cuda_tuning"] = ",".join(named.values())
    return both


def settings_of(profile: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns the thresholds in ``profile``, by ranks of a group, without the groups that have none."""
    found = {
        group["ranks"]: {name: value for name, value in group.items() if name not in ("ranks", "curves")}
        for group in profile["groups"]
    }
    return {ranks: settings for ranks, settings in found.items() if settings}


def inter_node(path: Path) -> dict[str, Any]:
    """Returns the current entry about the inter-node network of the profile at ``path``, to keep it in the next one."""
    found = known(path)
    return {"inter_node": found["inter_node"]} if "inter_node" in found else {}


def own_path(here: Key) -> Path | None:
    """Returns where the user's profile of this hardware belongs; ``None`` without a cache."""
    folder = os.fsdecode(load()._user_profile_dir())
    return Path(folder) / here.file if folder else None


def output_error(here: Key) -> str | None:
    """Makes the folder of the user's profile, and returns why the profile cannot be written, or ``None`` if it can."""
    path = own_path(here)
    if path is None:
        return "there is no cache to write to (SYMM_CACHE_DIR): say where with --output"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        error = write_error(path)
    except OSError as failed:
        error = f"{path.parent}: cannot be made: {failed.strerror}"
    return error and f"{error}; say where to write with --output, or set SYMM_CACHE_DIR"


def write(path: Path, profile: Mapping[str, Any]) -> None:
    """Writes ``profile`` atomically, and reads it back as the cost model does.

    Raises:
        SymmConfigError: ``profile`` is not valid, which would be a bug; OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(_text(profile))
        _validate(Path(name), profile)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _validate(path: Path, profile: Mapping[str, Any]) -> None:
    hardware = profile["hardware"]
    ranks = profile["groups"][0]["ranks"] if profile["groups"] else 1
    prices(hardware["device"], ranks, hardware["ranks"], "measured", path)


def _text(profile: Mapping[str, Any]) -> str:
    """Formats JSON with a line for each list of numbers."""
    text = json.dumps(profile, indent=1)
    lines, listed = [], ""
    for line in text.splitlines():
        bare = line.strip()
        if listed:
            listed += " " + bare if bare[0] not in "]}" else bare
            if bare[0] == "]":
                lines.append(listed.replace("[ ", "["))
                listed = ""
        elif bare.endswith("[") and ('"bytes"' in bare or '"us"' in bare or '"load"' in bare):
            listed = line
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"
