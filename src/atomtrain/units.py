"""Bytes, rates and durations: parsed from what users write, formatted for what users read.

Inside ATOM everything is plain bytes, bytes per second and seconds.
"""

from __future__ import annotations

import math
import re

from atomtrain.errors import ConfigError

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MOST_BYTES = 2**60
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, what: str = "size") -> int:
    """Return the bytes of `"256MiB"`, `"1.5 GB"` or a plain number.

    Raises:
        ConfigError: not a positive size, or an unknown unit; names `what`.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        value: float = text
    else:
        match = _QUANTITY.fullmatch(str(text))
        if match is None or match[2].lower() not in _BYTES:
            raise ConfigError(
                f"{what} {text!r} is not a size; write a number and a unit, such as 256MiB or 8GiB"
            )
        value = float(match[1]) * _BYTES[match[2].lower()]
    if not 1 <= value < _MOST_BYTES:
        raise ConfigError(
            f"{what} {text!r} must be at least one byte and below 1 EiB, such as 256MiB or 8GiB"
        )
    return int(value)


def parse_rate(text: str | float, what: str = "rate") -> float:
    """Return bytes per second of `"4GiB/s"`, `"100Mbit/s"` or a plain number of bytes per second.

    Raises:
        ConfigError: not a positive rate, or an unknown unit; names `what`.
    """
    error = ConfigError(f"{what} {text!r} is not a rate; write for example 4GiB/s or 100Mbit/s")
    if isinstance(text, int | float) and not isinstance(text, bool):
        value = float(text) if abs(text) < _MOST_BYTES else math.inf
    else:
        body = str(text).strip()
        match = _QUANTITY.fullmatch(body[:-2] if body.lower().endswith("/s") else body)
        if match is None:
            raise error
        unit = match[2].lower()
        if unit in _BITS:
            value = float(match[1]) * _BITS[unit] / 8
        elif unit in _BYTES:
            value = float(match[1]) * _BYTES[unit]
        else:
            raise error
    if not (value > 0 and math.isfinite(value)):
        raise error
    return value


def format_bytes(value_bytes: float) -> str:
    """Return for example `"1.5 GiB"`."""
    value = float(value_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_seconds(value_s: float) -> str:
    """Return for example `"850 us"`, `"12.5 ms"`, `"3.20 s"`, `"4 min 05 s"` or `"2 h 10 min"`."""
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} us"
    if value_s < 1:
        return f"{value_s * 1e3:.1f} ms"
    if value_s < 60:
        return f"{value_s:.2f} s"
    minutes, seconds = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_count(value: float) -> str:
    """Return for example `"950"`, `"12.3k"`, `"4.1M"` or `"175B"`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # What would be rounded to 1000 of the smaller unit belongs to this one.
        if abs(value) >= 0.9995 * limit and abs(value) >= 1000:
            digits = 3 if abs(value) < 999.5 * limit else 15
            return f"{value / limit:.{digits}g}{unit}"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Return for example `"1 slot"` or `"2 slots"`."""
    return f"{count} {noun}{'' if count == 1 else ending}"
