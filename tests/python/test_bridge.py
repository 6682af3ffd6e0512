"""The border between the languages, read as text: properties that no program can trigger from outside."""

from __future__ import annotations

import re
from pathlib import Path

BRIDGE = Path(__file__).parents[2] / "src"

#: Functions that only return existing values, set a flag, or make an empty object: nothing in them can panic.
READS = {
    "add", "add_client", "count", "load_generator", "get", "no_blobs", "share", "store_memory", "wrap_store", "version",
    "watch_interrupts", "blocking_wait", "user_profile_dir", "sequence", "set_timeout", "stats_seconds", "timeout",
    "fail", "fused_workspace", "made", "buffers", "bytes", "global_ranks", "is_current", "is_set", "pads", "record",
    "tables", "gb_per_s", "local", "origin", "reference_us", "trip_us",
}  # fmt: skip


def block(text: str, start: int) -> str:
    """The text from the brace at ``start`` to the brace that closes it."""
    depth = 0
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start : end + 1]
    raise AssertionError("a brace is not closed")


def test_p23_a_panic_is_caught_before_it_reaches_the_bridge() -> None:
    """A panic that crosses cxx ends the process, so every function that C++ may call catches it or cannot panic."""
    paths = (BRIDGE / "bridge.rs", *sorted((BRIDGE / "bridge").rglob("*.rs")))
    # Removes the lengths of arrays, so that a semicolon always ends a declaration.
    texts = [re.sub(r"; \d+\]", "]", path.read_text()) for path in paths]
    offered = {
        name
        for text in texts
        for begin in re.finditer(r'extern "Rust" \{', text)
        for name in re.findall(r"\bfn (\w+)\(", block(text, begin.end() - 1))
    }
    assert len(offered) > 50, "the bridge is read"
    for name in sorted(offered - READS):
        bodies = [
            block(text, begin.end() - 1)
            for text in texts
            for begin in re.finditer(rf"\bfn {name}(?:<[^>]*>)?\([^;{{]*\)[^;{{]*\{{", text)
        ]
        assert any(re.search(r"\b(guarded|started|opened|begun)\(", body) for body in bodies), (
            f"{name} neither goes through `guarded` nor stands in the list of those that cannot panic"
        )
    assert offered >= READS, f"not in the bridge any more: {READS - offered}"
