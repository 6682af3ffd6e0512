"""Writes THIRD_PARTY: the licences of the crates whose code is in the wheels. ``--check`` compares instead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "THIRD_PARTY"


def crates() -> list[dict]:
    """Returns the crates whose code is in the core, by name, without crates that only build or test it."""
    command = ["cargo", "metadata", "--format-version=1", "--features=bridge", "--locked"]
    command += ["--filter-platform=x86_64-unknown-linux-gnu", f"--manifest-path={ROOT / 'Cargo.toml'}"]
    graph = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    nodes = {node["id"]: node for node in graph["resolve"]["nodes"]}
    packages = {package["id"]: package for package in graph["packages"]}
    macros = {id for id, package in packages.items() if any("proc-macro" in of["kind"] for of in package["targets"])}
    reached, waiting = set(), [graph["resolve"]["root"]]
    while waiting:
        id = waiting.pop()
        if id in reached or id in macros:
            continue
        reached.add(id)
        for dependency in nodes[id]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                waiting.append(dependency["pkg"])
    found = [packages[id] for id in reached if packages[id]["source"]]
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def text() -> str:
    """Returns the file's content: a list, then each licence once with the crates that state it."""
    found = crates()
    lines = ["torch-symm contains code of these crates, and of Rust's standard library (MIT OR Apache-2.0).", ""]
    lines += [f"{crate['name']} {crate['version']}: {crate['license']}" for crate in found]
    holders: dict[str, list[str]] = {}
    for crate in found:
        for file in sorted(Path(crate["manifest_path"]).parent.glob("LICEN[CS]E*")):
            content = file.read_text(errors="replace").strip() if file.is_file() else ""
            # This package's own LICENSE already has the text of the Apache licence.
            if content and "Apache License" not in content[:200]:
                holders.setdefault(content, []).append(f"{crate['name']} {crate['version']}")
    for content, names in holders.items():
        lines += ["", "-" * 80, ", ".join(names), "-" * 80, content]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        FILE.write_text(text())
    elif FILE.read_text() != text():
        sys.exit("THIRD_PARTY is not that of Cargo.lock: run python packaging/third_party.py")
