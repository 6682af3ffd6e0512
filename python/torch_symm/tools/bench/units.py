"""Sizes and times as people write them."""

from __future__ import annotations

#: Seconds that ranks may take for a burst of calls, even for a call of 1 GB on a busy machine.
LIMIT_S = 120.0
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Parses a size such as ``8``, ``64K``, ``64KB`` or ``16 MB`` (binary multiples), in bytes.

    Raises:
        ValueError: ``text`` is not a positive size.
    """
    body = text.strip().upper().removesuffix("B").removesuffix("I").rstrip()
    suffix = body[-1:] if body[-1:] in _FACTORS else ""
    digits = body.removesuffix(suffix).strip()
    size = int(digits) * _FACTORS[suffix] if digits.isascii() and digits.isdigit() and len(digits) < 20 else 0
    if not 0 < size < 1 << 63:
        raise ValueError(f"not a size: {text!r} (examples: 8, 64K, 16MB)")
    return size


def format_size(size: int) -> str:
    """Formats ``size`` bytes in the largest binary unit that divides it; 0 is a call without a payload."""
    if size == 0:
        return "-"
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def format_us(us: float) -> str:
    """Formats ``us`` microseconds with three significant digits below 1000."""
    if us >= 1000.0:
        return f"{us:,.0f}"
    if us >= 100.0:
        return f"{us:.0f}"
    return f"{us:.1f}" if us >= 10.0 else f"{us:.2f}"
